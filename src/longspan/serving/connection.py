"""Connections with bounds: slow and malicious clients neither stay nor take memory or files."""

import asyncio
import contextlib
import errno
import os
import socket
from typing import Any, ClassVar, NamedTuple, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

RATE = 1000  # bytes per second that a client must read at least, once the buffers of both sides are full
BACKLOG = 2048  # connections that wait to be accepted, at most
ROUNDS = 4  # turns of the event loop from accepting a connection to closing it; each may accept a backlog
SPARE = 64  # files that the server opens besides connections
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 102\r\n\r\n"
    b'{"error": {"message": "too many connections", "type": "server_error", "param": null, "code": "busy"}}\n'
)


class Bounds(Protocol):
    """What a connection needs of ``requests.Limits``."""

    @property
    def body(self) -> int: ...
    @property
    def slow(self) -> float: ...
    @property
    def connections(self) -> int: ...


class Connection(H11Protocol):
    """A connection of uvicorn that ends when its client does not go on.

    uvicorn alone waits without end for the head of a request, for the rest of a body that was refused, and for a client
    that does not read what it is sent. The application bounds the time of a body and of a stream.
    """

    bounds: ClassVar[Bounds]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._drained = 0
        self._idle: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._restart()
        if len(self.connections) > self.bounds.connections:
            transport.write(BUSY)
            transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._running and self.conn.their_state is h11.SEND_BODY:
            # The rest of a body that was refused. A client that sends it in full can read why.
            self._drained += len(data)
            if self._drained > self.bounds.body:
                self.transport.abort()
        self._restart()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._drained = 0
        self._restart()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._idle, self._stalled):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    @property
    def _running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _restart(self) -> None:
        """Bound the time without a request. Data that make no request do not prolong it."""
        if self._running and self._idle is not None:
            self._idle.cancel()
            self._idle = None
        elif not self._running and self._idle is None:
            self._idle = self.loop.call_later(self.bounds.slow, self.transport.abort)

    def _watch(self) -> None:
        """End the connection unless its client reads ``RATE`` bytes per second from now on."""
        size = self.transport.get_write_buffer_size()

        def check() -> None:
            if size - self.transport.get_write_buffer_size() < RATE * self.bounds.slow:
                self.transport.abort()
            else:
                self._watch()

        self._stalled = self.loop.call_later(self.bounds.slow, check)


def protocol(bounds: Bounds) -> type[Connection]:
    """Return the class of connections for ``uvicorn.Config(http=...)``."""
    return type("Connection", (Connection,), {"bounds": bounds})


class Files(NamedTuple):
    """How many connections the limit of open files leaves."""

    connections: int
    """connections that are served"""
    backlog: int
    """connections that are accepted together"""


def affordable(wanted: int) -> Files:
    """Return how many connections this process can have, after raising its limit of open files as far as they need.

    Args:
        wanted: The connections to serve.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return Files(wanted, BACKLOG)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (1 << 30 if one == resource.RLIM_INFINITY else one for one in limits)
    used = SPARE + _open_files()
    needed = min(hard, used + wanted + ROUNDS * BACKLOG)
    # Some systems have a lower limit than they report.
    with contextlib.suppress(OSError, ValueError):
        if soft < needed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, limits[1]))
            soft = needed
    free = max(0, soft - used)
    backlog = min(BACKLOG, max(1, (free - wanted) // ROUNDS, free // (4 * ROUNDS)))
    return Files(max(1, min(wanted, free - ROUNDS * backlog)), backlog)


def _open_files() -> int:
    """The number of files that this process has open; a guess where the system does not tell."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/dev/fd"))
    return 64


def bound(host: str, port: int) -> list[socket.socket]:
    """Return sockets that are bound to a host's addresses, which do not listen yet.

    Args:
        host: A name or an address of this machine.
        port: A port; 0 takes a free one.

    Raises:
        ValueError: The host has no address of this machine, or the port is not free.
    """
    if not host:
        raise ValueError("host='' must be a name or an address of this machine, such as 127.0.0.1; 0.0.0.0 is any")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"host {host!r} is not a name or an address: {getattr(error, 'strerror', error)}") from error
    sockets: list[socket.socket] = []
    try:
        missing = OSError(errno.EADDRNOTAVAIL, "no address")
        for family, _, _, _, address in found:
            # All addresses of a host get the same port.
            number = sockets[0].getsockname()[1] if sockets else port
            try:
                sockets.append(_bound_socket(family, (address[0], number, *address[2:])))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
        if not sockets:
            raise missing
    except OSError as error:
        for one in sockets:
            one.close()
        raise ValueError(f"cannot listen at {host!r}, port {port}: {error.strerror or error}") from error
    return sockets


def _bound_socket(family: int, address: Any) -> socket.socket:
    """Return a socket that is bound to an address, with the options of ``asyncio``."""
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind(address)
    except BaseException:
        found.close()
        raise
    return found
