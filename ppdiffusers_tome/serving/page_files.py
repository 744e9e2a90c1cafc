"""The page for browsers: the files in page/, from memory, with headers that forbid everything from elsewhere."""

from pathlib import Path

from fastapi import APIRouter, Request, Response

from .api_errors import ApiError

FOLDER = Path(__file__).parent / "page"
PREFIX = "/page/"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Styles that the page's scripts set on an element (`style.setProperty`) need no 'unsafe-inline'.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def is_page(path: str) -> bool:
    """Whether this is the path of a file of the page. They are public, so no key is needed."""
    return path == "/" or path.startswith(PREFIX)


def make_page_router() -> APIRouter:
    """The routes of the page. All files are read now: no path from a request reaches the file system."""
    router = APIRouter(include_in_schema=False)
    contents = {
        PREFIX + file.relative_to(FOLDER).as_posix(): (file.read_bytes(), TYPES.get(file.suffix, "text/plain"))
        for file in FOLDER.rglob("*")
        if file.is_file()
    }
    contents["/"] = contents.pop(f"{PREFIX}index.html")

    @router.api_route("/", methods=["GET", "HEAD"])
    @router.api_route(PREFIX + "{name:path}", methods=["GET", "HEAD"])
    async def show(request: Request) -> Response:
        path = request.scope["path"]
        if path not in contents:
            raise ApiError(404, "Not Found")
        content, kind = contents[path]
        return Response(content, media_type=kind, headers=HEADERS)

    return router
