"""The configuration of the HTTP application, except for the limits of jobs."""

import re
from dataclasses import dataclass, field
from math import inf

from ..errors import ParameterError, ToMeConfigError

KEY_VARIABLE = "PPDIFFUSERS_TOME_API_KEY"
HOST = re.compile(r"\*|(\*\.)?[^*/:]+|.*:.*:.*")
ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*://[^*/?#@\s]+)([/?#].*)?")  # the second group is a path, which is refused


@dataclass(frozen=True)
class AppConfig:
    """Time-outs, body size, API key, allowed hosts and origins, and defaults of requests.

    Args:
        api_key: the key that clients must send; None for no authentication.
        request_seconds: longest time in the queue and in the pipeline together; then the answer is 504.
        body_bytes: largest body. A larger one is answered with 413, before it is read if its length is in the head.
        hosts: names, besides this machine's own, that requests may address the server by; otherwise a web page could
            reach it through a DNS name of its own. "*" for any, "*.example.org" for all subdomains. Not checked when
            an API key is set.
        origins: of web pages on other hosts, browser extensions and desktop programs that may send requests, as
            browsers write them ("https://example.org", "chrome-extension://ID", "app://obsidian.md"); "*" for all.
        steps, guidance_scale: defaults for requests without these fields.
        page: whether `/` is the page for browsers; otherwise 404.
        prompts: examples that suit the model, for the page, which begins with the first one.
        any_model: whether requests may name any model; this server's own model answers them all.

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
    any_model: bool = False

    def __post_init__(self) -> None:
        for name in ("request_seconds", "body_bytes", "steps"):
            if not 0 < getattr(self, name) < inf:
                raise ParameterError(name, getattr(self, name), "it must be positive and finite")
        key = self.api_key
        if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
            raise ToMeConfigError(
                f"{KEY_VARIABLE} is not allowed: it must be printable ASCII without spaces, not empty"
            )
        for host in self.hosts:
            if not HOST.fullmatch(host):
                raise ParameterError("hosts", host, "it must be like example.org or *.example.org, or *")
        for origin in self.origins:
            if remedy := _remedy(origin):
                raise ParameterError("origins", origin, remedy)

    def is_allowed_host(self, header: str) -> bool:
        """Whether a request with this Host header, with or without a port, may be answered."""
        name = re.sub(r":[^\]:]*$", "", header)
        allowed = ("localhost", "127.0.0.1", "::1", *self.hosts)
        patterns = tuple(host[1:] for host in allowed if host.startswith("*"))
        names = {*allowed, *(f"[{host}]" for host in allowed)}  # an IPv6 address has brackets in a header
        return self.api_key is not None or name in names or name.endswith(patterns)


def _remedy(origin: str) -> str | None:
    """How to correct an origin; None if it is right."""
    if origin == "*":
        return None
    if origin == "null":
        return "every sandboxed page and every file has this origin. Serve the page from a host, and allow that"
    parts = ORIGIN.fullmatch(origin)
    if parts is None:
        return "it must be a scheme and a host, like https://example.org or chrome-extension://ID, or *"
    return f"an origin has no path: write {parts[1]!r}" if parts[2] else None


def url_of(host: str, port: int) -> str:
    """The address of the server for a browser on this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/"
