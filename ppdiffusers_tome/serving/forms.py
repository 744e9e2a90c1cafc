"""Read bodies that are sent as multipart/form-data. Their texts and files stay in memory."""

from fastapi import Request
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from .api_errors import CLIENT_GONE, ApiError

MAX_PARTS = 50  # real requests have fewer


async def read_form(request: Request) -> tuple[dict[str, str], dict[str, list[bytes]]]:
    """Read the texts and the files of a form, by name. `RequestMiddleware` limits the size of the body.

    Raises:
        ApiError: 400 the form is malformed or incomplete, 413 it has too many parts, 415 the body is not a form, 422 a
            text is sent twice, 499 the client disconnected.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        message = "the body must be sent as Content-Type: multipart/form-data, with a boundary"
        raise ApiError(415, message, code="unsupported_media_type")
    try:
        form = _Form(options[b"boundary"])
        async for chunk in request.stream():
            form.parser.write(chunk)
    except ValueError as error:  # python-multipart's and Unicode's errors
        raise ApiError(400, f"the form cannot be read: {error!s:.200}", code="invalid_form") from None
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE, "the client has disconnected") from None
    if not form.is_complete:
        raise ApiError(400, "the form cannot be read: its end is missing", code="invalid_form")
    return form.texts, form.files


class _Form:
    """Collects the parts of a form from what python-multipart's parser finds in the body, piece by piece."""

    def __init__(self, boundary: bytes) -> None:
        self.texts: dict[str, str] = {}
        self.files: dict[str, list[bytes]] = {}
        self.is_complete = False
        self._parts = 0
        self._header_name = self._header_value = self._disposition = b""
        self._data = bytearray()
        self.parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_header_name,
                "on_header_value": self._add_header_value,
                "on_header_end": self._end_header,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise ApiError(413, f"the form has more than {MAX_PARTS} parts", code="too_many_values")
        self._disposition, self._data = b"", bytearray()

    def _add_header_name(self, chunk: bytes, start: int, end: int) -> None:
        self._header_name += chunk[start:end]

    def _add_header_value(self, chunk: bytes, start: int, end: int) -> None:
        self._header_value += chunk[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _add_data(self, chunk: bytes, start: int, end: int) -> None:
        self._data += chunk[start:end]

    def _end_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode()
        if not name:
            raise ValueError("a part has no name")
        if b"filename" in options:
            self.files.setdefault(name, []).append(bytes(self._data))
        elif name in self.texts:
            raise ApiError(422, "it is sent more than once", name[:100], "invalid_value")
        else:
            self.texts[name] = self._data.decode()

    def _end(self) -> None:
        self.is_complete = True
