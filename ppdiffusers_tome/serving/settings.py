"""How the HTTP side behaves, apart from the limits of jobs."""

import os
import re
from dataclasses import dataclass, field
from math import inf

from ..errors import ToMeConfigError

KEY_VARIABLE = "PPDIFFUSERS_TOME_API_KEY"
EXAMPLES = {"hosts": "example.org or *.example.org", "origins": "https://example.org"}


@dataclass(frozen=True)
class Settings:
    """Time-outs, sizes, the key, and what a request means that leaves things out.

    Args:
        api_key: what clients must send; None to serve whoever can connect.
        request_seconds: longest time in the queue and in the pipeline together; then the answer is 504.
        body_seconds: longest time for a client to send its body; then the answer is 408.
        body_bytes: largest body; a larger one is answered with 413, before it was read to its end.
        hosts: names, beside this machine's own, that requests may call the server by: a web page elsewhere could point
            its own name here. "*" for any, "*.example.org" for all below. Not checked where there is a key.
        origins: of web pages elsewhere that may draw, as browsers send them ("https://example.org"); "*" for all.
        steps, guidance_scale: of requests that do not say.

    Raises:
        ToMeConfigError: a number is not positive, the key is empty or holds what HTTP cannot carry, or a host or an
            origin is not written so.
    """

    api_key: str | None = field(default=None, repr=False)
    request_seconds: float = 120.0
    body_seconds: float = 30.0
    body_bytes: int = 16 * 2**20
    steps: int = 20
    guidance_scale: float = 7.5
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("request_seconds", "body_seconds", "body_bytes", "steps"):
            if not 0 < getattr(self, name) < inf:
                raise ToMeConfigError(f"{name}={getattr(self, name)!r} is not allowed: it must be positive and finite")
        key = self.api_key
        if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
            raise ToMeConfigError(
                f"{KEY_VARIABLE} is not allowed: it must be printable ASCII without spaces, not empty"
            )
        for name, pattern in (("hosts", r"\*|(\*\.)?[^*/:]+|.*:.*:.*"), ("origins", r"\*|https?://[^*/]+")):
            for text in getattr(self, name):
                if not re.fullmatch(pattern, text):
                    raise ToMeConfigError(f"{name}: {text!r} is not allowed: it must be like {EXAMPLES[name]}, or *")

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """For Starlette's TrustedHostMiddleware, which reads an IPv6 address up to its first colon."""
        return ("*",) if self.api_key is not None else ("localhost", "127.0.0.1", "[", *self.hosts)


def key_from_environment() -> str | None:
    """The key that clients must send, or None where the variable is not set. Settings refuse an empty one."""
    return os.environ.get(KEY_VARIABLE)
