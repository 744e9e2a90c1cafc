"""How a request is refused: one exception, written in the shape that the clients of each interface expect."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from . import protocol

CLIENT_GONE = 499  # nginx' number: nobody reads this answer, it is for the counters
OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class Refusal(HTTPException):
    """An answer that is no image.

    Args:
        status, headers: of HTTP.
        message: for people; says what is allowed.
        field: the offending field as the client wrote it, dots between levels; None where it is no field's fault.
        code: for programs; None where the status says it all.
    """

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # OpenAI's client shows the message alone, so that it must name the field.
        super().__init__(status, f"{field}: {message}" if field else message, dict(headers or {}))
        self.field, self.code = field, code

    def respond(self, path: str) -> JSONResponse:
        """The answer in the words of the interface that the path belongs to."""
        body: protocol.WebuiErrorResponse | protocol.OpenAIErrorResponse
        if path.startswith("/sdapi/"):
            fault: dict[str, str | list[str]] = {"msg": self.detail, "type": self.code or "value_error"}
            fault["loc"] = ["body", *(self.field or "").split(".")]
            body = protocol.WebuiErrorResponse(detail=[fault] if self.field else self.detail)
        else:
            other = "invalid_request_error" if self.status_code < 500 else "server_error"
            kind = OPENAI_TYPES.get(self.status_code, other)
            error = protocol.OpenAIError(message=self.detail, type=kind, param=self.field, code=self.code)
            body = protocol.OpenAIErrorResponse(error=error)
        return JSONResponse(body.model_dump(), self.status_code, self.headers)


def responses(model: Any, *statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI schema: these statuses have such a body."""
    return {status: {"model": model} for status in statuses}


async def answer(request: Request, error: Exception) -> JSONResponse:
    """For FastAPI: what a route, FastAPI or pydantic refuses, as a Refusal."""
    if isinstance(error, RequestValidationError):
        error = _of_validation(error)
    assert isinstance(error, HTTPException)
    if not isinstance(error, Refusal):  # from FastAPI itself: no such path or method
        error = Refusal(error.status_code, error.detail, headers=error.headers)
    if error.status_code == 405:  # Starlette names the methods of the path's first route alone
        routes = [route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE]
        error.headers = {"Allow": ", ".join(sorted({name for route in routes for name in route.methods}))}
    return error.respond(request.url.path)


def _of_validation(error: RequestValidationError) -> Refusal:
    """The first of pydantic's complaints, without the value: it may be long, secret or not JSON."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:] if part != "nullable")[:100]
    if first["type"] == "extra_forbidden":
        return Refusal(422, "there is no such field in this request", field, "unknown_parameter")
    if not field:
        return Refusal(422, "the body must be a JSON object", code="invalid_json")
    return Refusal(422, first["msg"].removeprefix("Value error, "), field, "invalid_value")
