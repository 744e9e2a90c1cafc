"""The configuration of the HTTP application, except for the limits of jobs."""

import re
from dataclasses import dataclass, field
from math import inf

from ..errors import ParameterError, ToMeConfigError

KEY_VARIABLE = "PPDIFFUSERS_TOME_API_KEY"
EXAMPLES = {"hosts": "example.org or *.example.org", "origins": "https://example.org"}


@dataclass(frozen=True)
class AppConfig:
    """Time-outs, body size, API key, allowed hosts and origins, and defaults of requests.

    Args:
        api_key: the key that clients must send; None for no authentication.
        request_seconds: longest time in the queue and in the pipeline together; then the answer is 504.
        body_bytes: largest body. A larger one is answered with 413 before it is read.
        hosts: names, besides this machine's own, that requests may address the server by; otherwise a web page could
            reach it through a DNS name of its own. "*" for any, "*.example.org" for all subdomains. Not checked when
            an API key is set.
        origins: web pages on other hosts that may send requests, as browsers write them ("https://example.org");
            "*" for all.
        steps, guidance_scale: defaults for requests without these fields.
        page: whether `/` is the page for browsers; otherwise 404.
        prompts: examples that the model knows, for the page; the first is its value at first.

    Raises:
        ToMeConfigError: a number is not positive, the key is empty or cannot be sent in an HTTP header, or a host or
            an origin is malformed.
    """

    api_key: str | None = field(default=None, repr=False)
    request_seconds: float = 120.0
    body_bytes: int = 16 * 2**20
    steps: int = 20
    guidance_scale: float = 7.5
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    page: bool = True
    prompts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("request_seconds", "body_bytes", "steps"):
            if not 0 < getattr(self, name) < inf:
                raise ParameterError(name, getattr(self, name), "it must be positive and finite")
        key = self.api_key
        if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
            raise ToMeConfigError(
                f"{KEY_VARIABLE} is not allowed: it must be printable ASCII without spaces, not empty"
            )
        for name, pattern in (("hosts", r"\*|(\*\.)?[^*/:]+|.*:.*:.*"), ("origins", r"\*|https?://[^*/]+")):
            for text in getattr(self, name):
                if not re.fullmatch(pattern, text):
                    raise ParameterError(name, text, f"it must be like {EXAMPLES[name]}, or *")

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """Names for Starlette's TrustedHostMiddleware, which reads an IPv6 address up to its first colon."""
        return ("*",) if self.api_key is not None else ("localhost", "127.0.0.1", "[", *self.hosts)


def url_of(host: str, port: int) -> str:
    """The address of the server for a browser on this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/"
