"""Who may use the server: its key, and the web pages and host names that requests may come from."""

import contextlib
import hmac
import ipaddress
import re
from asyncio import timeout
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .requests import RequestError

RETRY = 1  # seconds that a refused client should wait
METHODS = ("GET", "POST", "DELETE")


@dataclass(frozen=True)
class Access:
    """Who may use a server.

    Browsers send requests of any web page to any server, also to those that only their own machine reaches. So
    requests of pages of another origin are refused, and requests to another host name too: a page's own name may be
    made to point to this server.

    Raises:
        ValueError: For a key, a host or an origin that no request can have.
    """

    api_key: str = ""
    """requests need the header ``Authorization: Bearer KEY``; "" for none"""
    hosts: tuple[str, ...] | None = None
    """host names of this server besides localhost and loopback addresses; None or ("*",) for any"""
    origins: tuple[str, ...] = ()
    """origins of other web pages that may use it, such as ``https://example.org``; ("*",) for any"""

    def __post_init__(self):
        if not re.fullmatch(r"[!-~]*", self.api_key):
            raise ValueError("the API key must be printable ASCII without spaces, as a header carries it")
        for host in self.hosts or ():
            if not re.fullmatch(r"\*|[\w.-]+|\[?[0-9A-Fa-f:.]+(%[\w.-]+)?\]?", host):
                raise ValueError(f"host {host!r} must be a name or an address without a port, such as example.org")
        for origin in self.origins:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin.lower()):
                raise ValueError(f"origin {origin!r} must be a scheme and a host, such as https://example.org")

    def complaint(self, scope: Scope) -> RequestError | None:
        """Return what is wrong with where a request comes from or goes to; None if nothing is."""
        headers = dict(scope["headers"])
        host, origin = (headers.get(name, b"").decode("latin-1").lower() for name in (b"host", b"origin"))
        # Only programs leave the host out.
        if host and not self._has_host(_name(host)):
            return RequestError(f"host {host[:100]!r} is not served here", status=403, code="host_not_allowed")
        # Behind a proxy with TLS the scheme differs.
        own = bool(host) and origin.partition("://")[2] == host
        if origin and not own and "*" not in self.origins and origin not in map(str.lower, self.origins):
            return RequestError(
                f"pages of {origin[:100]!r} may not use this server", status=403, code="origin_not_allowed"
            )
        return None

    def has_key(self, scope: Scope) -> bool:
        """Return whether a request has the key."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        return not self.api_key or hmac.compare_digest(given, f"Bearer {self.api_key}".encode())

    def _has_host(self, name: str) -> bool:
        if self.hosts is None or "*" in self.hosts or name == "localhost" or is_loopback(name):
            return True
        return name in {_name(host.lower()) for host in self.hosts}


def is_loopback(address: str) -> bool:
    """Return whether this is an address of the machine itself, such as 127.0.0.1 and ::1; False for names."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def _name(host: str) -> str:
    """A host without its port, brackets and last dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    # More than one colon: an address of IPv6.
    return (host if host.count(":") > 1 else host.partition(":")[0]).removesuffix(".")


class Guard:
    """Checks where each request comes from and its key, and drops clients that read nothing. A plain ASGI application.

    ``connection.protocol`` bounds what an application does not see.

    Args:
        app: The application.
        access: Who may use it.
        slow: Seconds within which a client must read what it is sent.
        count: Called with the status of each request that is refused here.
    """

    OPEN = ("/", "/healthz", "/readyz")

    def __init__(self, app: ASGIApp, access: Access, *, slow: float, count: Callable[[int], None]):
        self.app, self.access, self.slow, self.count = app, access, slow, count
        self.keyed: ASGIApp = self._keyed
        if access.origins:
            origins, options = [*map(str.lower, access.origins)], {"allow_methods": METHODS, "allow_headers": ("*",)}
            self.keyed = CORSMiddleware(self._keyed, allow_origins=origins, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif (wrong := self.access.complaint(scope)) is not None:
            await self._refuse(wrong, {}, scope, receive, send)
        elif _has_two_lengths(scope):
            text = "a body has either a content-length or, from HTTP/1.1 on, a transfer-encoding"
            await self._refuse(RequestError(text, code="two_lengths"), {"connection": "close"}, scope, receive, send)
        else:
            await self.keyed(scope, receive, send)

    async def _keyed(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in self.OPEN and not self.access.has_key(scope):
            wrong = RequestError(
                "the request needs the header Authorization: Bearer KEY", status=401, code="invalid_api_key"
            )
            await self._refuse(wrong, {}, scope, receive, send)
            return

        async def patient(message: Any) -> None:
            async with timeout(self.slow):
                await send(message)

        with contextlib.suppress(TimeoutError, ClientDisconnect):
            await self.app(scope, receive, patient)

    async def _refuse(
        self, wrong: RequestError, headers: dict[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.count(wrong.status)
        answer = refused(wrong)
        answer.headers.update(headers)
        await answer(scope, receive, send)


def _has_two_lengths(scope: Scope) -> bool:
    """Whether a body ends in two places: a proxy may take the rest of one for the request of another client."""
    names = {name for name, _ in scope["headers"]}
    return b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0")


def refused(error: RequestError) -> Response:
    """Return an error in OpenAI's form."""
    headers = {"retry-after": str(RETRY)} if error.status == 429 else {}
    return JSONResponse({"error": error_body(error)}, error.status, headers)


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the content of an error in OpenAI's form."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    param = error.param and error.param[:100].encode("utf-8", "replace").decode()
    return {"message": error.message, "type": kind, "param": param, "code": error.code}
