"""Error answers: one exception, in the format that each interface's clients expect."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from . import protocol
from .jobs import GenerationError, JobError
from .tickets import QueueFullError, UnavailableError

RETRY_AFTER = {"Retry-After": "5"}  # seconds, however many images wait
CLIENT_GONE = 499  # nginx's status: nobody reads this answer, it exists for the counters
WEBUI_PATHS = ("/sdapi/", "/internal/ping", "/login_check", "/queue/status")  # of clients of stable-diffusion-webui
NO_SUCH_PATH = "this server has no such path: /openapi.json lists its paths"
OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


# Fields of a job that may be refused after the request was read, where stable-diffusion-webui has different names.
WEBUI_NAMES = {"image": "init_images", "strength": "denoising_strength", "second_pass.steps": "hr_second_pass_steps"}


class ApiError(HTTPException):
    """A request that is not answered with images.

    Args:
        status, headers: of the HTTP answer.
        message: for people; it names what is allowed.
        field: the invalid field in the client's spelling, with dots between levels; None if no field is invalid.
        code: for programs; None if the status is enough.
    """

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # OpenAI's client shows only the message, so the message must name the field.
        super().__init__(status, f"{field}: {message}" if field else message, dict(headers or {}))
        self.field, self.code = field, code

    def respond(self, path: str) -> JSONResponse:
        """The answer in the format of the interface that the path belongs to."""
        body: dict[str, Any] = {"error": self.openai_error().model_dump()}
        if path.startswith(WEBUI_PATHS):
            place = ["body", *(self.field or "").split(".")]
            detail = {"msg": self.detail, "type": self.code or "value_error", "loc": place}
            body = {"detail": [detail] if self.field else self.detail}
        return JSONResponse(body, self.status_code, self.headers)

    def openai_error(self) -> protocol.OpenAIError:
        """The error as OpenAI's clients expect it, in a response or in an event."""
        default = "invalid_request_error" if self.status_code < 500 else "server_error"
        kind = OPENAI_TYPES.get(self.status_code, default)
        return protocol.OpenAIError(message=self.detail, type=kind, param=self.field, code=self.code)


def internal_error() -> ApiError:
    """The answer to a request that has met a bug in this package, which the client does not see."""
    return ApiError(500, "internal error; the server's log has the reason", code="internal_error")


def model_not_found(message: str) -> ApiError:
    """The answer to a request for a model that is not the server's."""
    return ApiError(404, message, "model", "model_not_found")


def json_response(body: BaseModel, exclude_none: bool = False) -> Response:
    """The response with a body that is valid already, so that FastAPI does not validate it again.

    Args:
        exclude_none: whether to leave out fields that are None.
    """
    return Response(body.model_dump_json(exclude_none=exclude_none), media_type="application/json")


def responses(model: Any, *statuses: int) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses`: these statuses have a body of this model."""
    return {status: {"model": model} for status in statuses}


def api_error(error: Exception, path: str) -> ApiError:
    """The answer to an exception that a request to this path has met."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _from_validation(error)
    if isinstance(error, JobError):
        names = WEBUI_NAMES if path.startswith("/sdapi/") else {}
        return ApiError(422, str(error), names.get(error.field, error.field), "invalid_value")
    if isinstance(error, UnavailableError):
        status, code = (429, "queue_full") if isinstance(error, QueueFullError) else (503, "unavailable")
        return ApiError(status, str(error), code=code, headers=RETRY_AFTER)
    if isinstance(error, GenerationError):
        return ApiError(500, str(error), code="generation_failed")
    if isinstance(error, HTTPException):  # from FastAPI itself: an unknown path or method
        message = NO_SUCH_PATH if error.status_code == 404 else error.detail
        return ApiError(error.status_code, message, headers=error.headers)
    return internal_error()


async def handle_error(request: Request, error: Exception) -> JSONResponse:
    """FastAPI's handler of the exceptions that `EXPECTED` lists."""
    answer = api_error(error, request.scope["path"])
    if answer.status_code == 405:  # Starlette names only the methods of the path's first route
        routes = [route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE]
        answer.headers = {"Allow": ", ".join(sorted({name for route in routes for name in route.methods}))}
    return answer.respond(request.scope["path"])


EXPECTED = (HTTPException, RequestValidationError, JobError, UnavailableError, GenerationError)


async def handle_bug(request: Request, error: Exception) -> JSONResponse:
    """FastAPI's handler of exceptions in a middleware. uvicorn logs them and closes the connection."""
    response = internal_error().respond(request.scope["path"])
    response.headers["Connection"] = "close"
    return response


def _from_validation(error: RequestValidationError) -> ApiError:
    """The first of pydantic's errors, without the value, which may be long, secret or not JSON."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:])[:100]
    if first["type"] == "model_not_found":
        return model_not_found(first["msg"])
    if first["type"] == "extra_forbidden":
        return ApiError(422, "there is no such field in this request", field, "unknown_parameter")
    if not field:
        return ApiError(422, "the body must be a JSON object", code="invalid_json")
    return ApiError(422, first["msg"].removeprefix("Value error, "), field, "invalid_value")
