"""The HTTP server: OpenAI's completions over a pool, with streaming, metrics and limits."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .. import states
from . import openapi, page
from .chat import chat
from .chat_reply import ChatReply
from .guard import Access, Guard, refused
from .pool import Pool
from .reply import Outbox, Reply, Service
from .requests import Completion, Limits, RequestError, completion, parsed
from .sessions import Sessions
from .state_adapters import AdapterRoutes, StateAdapters
from .turns import SessionRoutes, while_connected
from .worker import Worker


class Metrics:
    """Counters for Prometheus, in a registry of their own."""

    def __init__(self, worker: Worker, sessions: Sessions):
        self.registry, pool = CollectorRegistry(), worker.pool
        self.requests = Counter("longspan_requests", "Requests by status", ["status"], registry=self.registry)
        self.first = Histogram("longspan_first_token_seconds", "Seconds to the first token", registry=self.registry)
        for name, text, value in (
            ("longspan_live_streams", "Streams that draw tokens", lambda: pool.live),
            ("longspan_waiting_streams", "Streams whose prompt is not read yet", lambda: pool.waiting),
            ("longspan_slots", "Streams that fit", lambda: pool.slots),
            ("longspan_state_bytes", "Memory of all slots", lambda: states.nbytes(pool.state)),
            ("longspan_prefix_bytes", "Memory of known beginnings", lambda: pool.prefixes.nbytes),
            ("longspan_prefix_hits", "Prompts whose beginning was known", lambda: pool.prefixes.hits),
            ("longspan_prefix_misses", "Prompts whose beginning was not known", lambda: pool.prefixes.misses),
            ("longspan_tokens_read", "Tokens of prompts that were read", lambda: pool.tokens_read),
            ("longspan_tokens_drawn", "Tokens drawn", lambda: pool.tokens_drawn),
            ("longspan_sessions", "Sessions", lambda: len(sessions)),
            ("longspan_session_bytes", "Bytes of all sessions", lambda: sessions.nbytes),
            ("longspan_streams_cancelled", "Streams that were cancelled", lambda: worker.cancelled),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)


T = TypeVar("T")


class Server:
    """The application: ``Server(pool, ...).app`` is an ASGI application.

    Args:
        pool: The pool of the model.
        name: The model's name in requests.
        codec: Text to tokens and back, such as ``text.Bytes``; None for a model without text.
        access: Who may use it; by default everyone who reaches it, except for web pages of another origin.
        limits: What one client may use.
        grid: The shape of the images of a model of pixels, (height, width) or (height, width, 3); () for other models.
        playground: Serve a page for trying the model at ``/``.
        sessions: Where sessions are kept; by default in memory. ``close`` closes it.
        adapters: The state adapters that requests may name; by default none.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        name: str,
        codec: Any = None,
        access: Access | None = None,
        limits: Limits | None = None,
        grid: tuple[int, ...] = (),
        playground: bool = True,
        sessions: Sessions | None = None,
        adapters: StateAdapters | None = None,
    ):
        self.pool, self.name, self.codec, self.access, self.grid = pool, name, codec, access or Access(), grid
        self.limits, self.template = limits or Limits(), getattr(codec, "template", None)
        self.worker = Worker(pool)
        self.sessions = Sessions(pool) if sessions is None else sessions
        self.adapters = StateAdapters(pool) if adapters is None else adapters
        self.metrics = Metrics(self.worker, self.sessions)
        self.created = int(time.time())
        self.closing = False
        self.service = Service(
            name=name,
            worker=self.worker,
            adapters=self.adapters,
            outbox=Outbox(self.worker),
            codec=codec,
            token_name=functools.cache(codec.name if codec else str),
            limits=self.limits,
            threads=ThreadPoolExecutor(2, "longspan-reading"),
            first_token=self.metrics.first,
        )
        self.turns = SessionRoutes(
            self.sessions,
            self.adapters,
            self.worker,
            model=name,
            codec=codec,
            body=self._body,
            upload=self._received if self.limits.state_upload else None,
            accept=self._accept,
        )
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/healthz", self.health),
            Route("/readyz", self.ready),
            Route("/metrics", self.prometheus),
            *([Route("/", page.playground)] if playground else []),
            Route("/openapi.json", self.description),
            *self.turns.routes,
            *AdapterRoutes(self.adapters, model=name, body=self._body).routes,
        ]
        handlers = {
            RequestError: self.wrong,
            404: self.not_found,
            405: self.not_found,
            ClientDisconnect: self.gone,
            Exception: self.broken,
        }
        self.routes = routes
        application = Starlette(routes=routes, exception_handlers=handlers)  # pyright: ignore[reportArgumentType] (handlers of a subclass)
        application.router.redirect_slashes = False  # a redirect would name the host that the client claims
        self.app = Guard(application, self.access, slow=self.limits.slow, count=self._count)

    def close(self) -> None:
        """Stop the model's thread; streams end as cancelled."""
        self.closing = True
        for stream in [*self.pool.rows]:
            self.worker.cancel(stream)
        self.worker.close()
        self.service.threads.shutdown(wait=False, cancel_futures=True)
        self.sessions.close()

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        began, limit = time.monotonic(), self.limits.tokens
        body = await self._body(
            request,
            lambda body: completion(body, model=self.name, codec=self.codec, vocab=self.pool.vocab, max_tokens=limit),
        )
        return await self._reply(request, body, began, Reply)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        began, limit = time.monotonic(), self.limits.tokens
        if self.template is None:
            raise RequestError("this model has no chat template; use /v1/completions", code="no_chat_template")
        facts: dict[str, Any] = {"template": self.template, "model": self.name, "codec": self.codec}
        found = await self._body(request, lambda body: chat(body, **facts, vocab=self.pool.vocab, max_tokens=limit))
        return await self._reply(request, found.completion, began, functools.partial(ChatReply, found))

    async def _reply(self, request: Request, body: Completion, began: float, kind: Callable[..., Reply]) -> Response:
        self._accept()
        if (turn := await self.turns.begin(request, body)) is not None:
            body = replace(body, prompts=[turn.prompt])
        reply, loop = kind(self.service, body, turn, began), asyncio.get_running_loop()
        await self.service.run(sum(map(len, body.prompts)), lambda: reply.submit(loop))
        if body.stream:
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            self._count(200)
            return Events(reply.events(), reply.close, media_type="text/event-stream", headers=headers)
        try:
            answer = await while_connected(request, reply.whole())
        finally:
            reply.close()
        self._count(200)
        return JSONResponse(answer)

    async def models(self, request: Request) -> Response:
        """GET /v1/models; the key ``longspan`` describes the model to the playground."""
        about = page.about(self.pool, self.codec, self.grid, self.limits.tokens)
        one = {"id": self.name, "object": "model", "created": self.created, "owned_by": "longspan", "longspan": about}
        return JSONResponse({"object": "list", "data": [one]})

    async def health(self, request: Request) -> Response:
        """GET /healthz: the process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /readyz: the model's thread runs, and new requests are accepted."""
        good = self.worker.alive and not self.closing
        return JSONResponse({"status": "ready" if good else "not ready"}, 200 if good else 503)

    async def prometheus(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4")

    async def description(self, request: Request) -> Response:
        """GET /openapi.json."""
        return JSONResponse(openapi.document(self, Guard.OPEN))

    async def wrong(self, request: Request, error: RequestError) -> Response:
        """Return an error in OpenAI's form."""
        self._count(error.status)
        return refused(error)

    async def not_found(self, request: Request, error: Any) -> Response:
        """Return 404 and 405 in OpenAI's form."""
        text = f"{request.method} {request.scope['path']} is not served here"
        answer = await self.wrong(request, RequestError(text, status=error.status_code, code="not_found"))
        answer.headers.update(error.headers or {})  # the methods that are allowed
        return answer

    async def gone(self, request: Request, error: ClientDisconnect) -> Response:
        """Count a client that hung up before its answer, as status 499."""
        self._count(499)
        return Response(status_code=499)

    async def broken(self, request: Request, error: Exception) -> Response:
        """Return 500 in OpenAI's form; the error itself is in the log."""
        return await self.wrong(request, RequestError("the server failed", status=500, code="internal_error"))

    def _count(self, status: int) -> None:
        """Count a request in the metrics."""
        self.metrics.requests.labels(str(status)).inc()

    def _accept(self) -> None:
        """Raise RequestError while the server accepts no work."""
        if self.closing:
            raise RequestError("the server is shutting down", status=503, code="shutting_down")
        if not self.worker.running:
            raise RequestError("the model's thread has ended; restart the server", status=503, code="model_error")

    async def _body(self, request: Request, check: Callable[[Any], T]) -> T:
        """Return the body, read up to the limit, parsed and checked."""
        data = await self._received(request, "application/json", self.limits.body)
        return await self.service.run(len(data), lambda: check(parsed(data)))

    async def _received(self, request: Request, wanted: str, limit: int) -> bytearray:
        """Return the body, of this type and of at most ``limit`` bytes."""
        # A web page may send bodies of other types, and of none, to any server without asking it.
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != wanted:
            raise RequestError(
                f"content-type {kind[:100]!r} is not read; send {wanted}",
                status=415,
                code="unsupported_media_type",
            )
        data = bytearray()
        try:
            async with asyncio.timeout(self.limits.slow):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > limit:
                        raise RequestError(f"the body has more than {limit} bytes", status=413, code="too_large")
        except TimeoutError:
            text = f"the body did not arrive within {self.limits.slow:g} seconds"
            raise RequestError(text, status=408, code="timeout") from None
        return data


class Events(StreamingResponse):
    """A stream of events that calls ``end`` however it ends.

    A generator that waits for its reader would otherwise end only when it is collected.
    """

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None], **options: Any):
        super().__init__(events, **options)
        self.end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.end()
