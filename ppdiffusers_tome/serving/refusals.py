"""How a request is refused: one exception, written in the shape that the clients of each interface expect."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from .errors import JobError, QueueFullError, UnavailableError

CLIENT_GONE = 499  # nginx' number: nobody reads this answer, it is for the counters
OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class Refusal(HTTPException):
    """An answer that is no picture.

    Args:
        status: HTTP status.
        message: for people; says what is allowed.
        field: the offending field as the client wrote it, dots between levels; None where it is no field's fault.
        code: for programs; None where the status says it all.
        headers: further headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.field = field
        self.code = code

    def respond(self, path: str) -> Response:
        """The answer in the words of the interface that the path belongs to."""
        if path.startswith("/sdapi/"):
            body = {"detail": self._fastapi_detail()}
        else:
            kind = OPENAI_TYPES.get(
                self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error"
            )
            body = {"error": {"message": self.detail, "type": kind, "param": self.field, "code": self.code}}
        # ASCII: a field's name may hold half a surrogate pair, which UTF-8 cannot carry.
        return Response(json.dumps(body), self.status_code, self.headers, "application/json")

    def _fastapi_detail(self) -> Any:
        """A list of one for a field, as FastAPI and stable-diffusion-webui write it, else the message."""
        if self.field is None:
            return self.detail
        return [{"loc": ["body", *self.field.split(".")], "msg": self.detail, "type": self.code or "value_error"}]


def refuse_job(error: JobError, names: Mapping[str, str]) -> Refusal:
    """422 for a job that is not allowed; names tells what the interface calls a job's fields, where it differs."""
    return Refusal(422, str(error), names.get(error.field, error.field), "invalid_value")


def refuse_for_now(error: UnavailableError) -> Refusal:
    """429 for a full queue and 503 for a server that starts or stops, both with Retry-After."""
    headers = {"Retry-After": str(error.retry_after)}
    if isinstance(error, QueueFullError):
        return Refusal(429, str(error), code="queue_full", headers=headers)
    return Refusal(503, str(error), code="unavailable", headers=headers)


def install(app: FastAPI) -> None:
    """Answer what the app refuses as a Refusal."""
    app.add_exception_handler(Refusal, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(RequestValidationError, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        refusal = _of_validation(error)
    elif isinstance(error, Refusal):
        refusal = error
    else:  # from FastAPI itself: no such path, method or JSON
        assert isinstance(error, HTTPException)
        refusal = Refusal(error.status_code, str(error.detail), headers=error.headers)
    return refusal.respond(request.url.path)


def _of_validation(error: RequestValidationError) -> Refusal:
    """The first of pydantic's complaints, without the value: it may be long, secret or not JSON."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Refusal(422, "the body is not JSON", code="invalid_json")
    field = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "extra_forbidden":
        return Refusal(422, f"{field} is not a field of this request", field, "unknown_parameter")
    if not field:
        return Refusal(422, "the body must be a JSON object, sent as application/json", code="invalid_json")
    return Refusal(422, f"{field}: {first['msg'].removeprefix('Value error, ')}", field, "invalid_value")
