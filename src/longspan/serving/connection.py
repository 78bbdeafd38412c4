"""Connections with bounds: slow and malicious clients neither stay nor take memory."""

import asyncio
from typing import Any, ClassVar, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

RATE = 1000  # bytes per second that a client must read at least, once the buffers of both sides are full
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 102\r\n\r\n"
    b'{"error": {"message": "too many connections", "type": "server_error", "param": null, "code": "busy"}}\n'
)


class Bounds(Protocol):
    """What a connection needs of ``server.Limits``."""

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
