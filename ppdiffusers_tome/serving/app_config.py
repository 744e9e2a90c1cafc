"""The configuration of the HTTP application, except for the limits of jobs."""

import re
from dataclasses import dataclass, field
from math import inf

from ..errors import ParameterError, ToMeConfigError

KEY_VARIABLE = "PPDIFFUSERS_TOME_API_KEY"
HOST = re.compile(r"\*|(\*\.)?[^*/:]+|.*:.*:.*")
# The second group is a path, which is refused.
ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*://[^*/?#@\s]+)([/?#].*)?", re.IGNORECASE)
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class AppConfig:
    """Time-outs, body size, API key, allowed hosts and origins, and defaults of requests.

    Args:
        api_key: the key that clients must send; None for no authentication.
        request_seconds: longest time in the queue and in the pipeline together; then the answer is 504.
        keep_alive_seconds: time without a request after which a connection is closed. A proxy in front must close its
            own earlier, or it sends a request into a connection that is just being closed.
        body_bytes: largest body. A larger body is answered with 413, before it is read if its length is in the head.
        hosts: names, besides this machine's own, that requests may address the server by; otherwise a web page could
            reach it through a DNS name of its own. "*" for any, "*.example.org" for all subdomains. Not checked when
            an API key is set, nor for /health and /ready. Upper and lower case, and a dot at the end, make no
            difference.
        origins: of web pages on other hosts, browser extensions and desktop programs that may send requests
            ("https://example.org", "chrome-extension://ID", "app://obsidian.md"); "*" for all. They are compared as
            hosts are, and a scheme's default port makes no difference either.
        steps, guidance_scale: defaults for requests without these fields.
        page: whether `/` is the page for browsers; otherwise 404.
        prompts: examples that suit the model, for the page, which begins with the first example.
        any_model: whether requests may name any model; this server's own model answers them all.

    Raises:
        ToMeConfigError: a number is not positive, the key is empty or cannot be sent in an HTTP header, or a host or
            an origin is malformed.
    """

    api_key: str | None = field(default=None, repr=False)
    request_seconds: float = 120.0
    keep_alive_seconds: float = 75.0  # nginx and load balancers close theirs after 60
    body_bytes: int = 16 * 2**20
    steps: int = 20
    guidance_scale: float = 7.5
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    page: bool = True
    prompts: tuple[str, ...] = ()
    any_model: bool = False

    def __post_init__(self) -> None:
        for name in ("request_seconds", "keep_alive_seconds", "body_bytes", "steps"):
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
            if remedy := origin_remedy(origin):
                raise ParameterError("origins", origin, remedy)

    def is_allowed_host(self, header: str) -> bool:
        """Whether a request with this Host header, with or without a port, may be answered."""
        name = host_of(header)
        allowed = [dns_name(host) for host in (*LOCAL_HOSTS, *self.hosts)]
        patterns = tuple(host[1:] for host in allowed if host.startswith("*"))
        names = {*allowed, *(f"[{host}]" for host in allowed)}  # an IPv6 address has brackets in a header
        return self.api_key is not None or name in names or name.endswith(patterns)

    def is_allowed_origin(self, origin: str) -> bool:
        """Whether `origins` has this Origin header. The server's own origin is not one of them."""
        return "*" in self.origins or canonical_origin(origin) in map(canonical_origin, self.origins)


def dns_name(host: str) -> str:
    """A host's name, without a port, in the spelling that stands for all which are equal in DNS."""
    return host.lower().removesuffix(".")


def host_of(header: str) -> str:
    """The host in a Host header, without its port, as `dns_name` spells it."""
    return dns_name(re.sub(r":[^\]:]*$", "", header))


def canonical_origin(origin: str) -> str:
    """An origin in the spelling that stands for all equal origins.

    Example:
        >>> canonical_origin("https://Example.org.:443")
        'https://example.org'
    """
    scheme, mark, host = origin.lower().partition("://")
    host = host.removesuffix(DEFAULT_PORTS.get(scheme, ""))
    name, colon, port = host.rpartition(":")
    if colon and port.isdecimal():
        return f"{scheme}{mark}{dns_name(name)}:{port}"
    return f"{scheme}{mark}{dns_name(host)}"


def origin_remedy(origin: str) -> str | None:
    """How to correct an origin for `AppConfig.origins`; None if it is right."""
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
