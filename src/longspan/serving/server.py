"""The HTTP server: OpenAI's completions over a pool, with streaming, metrics and limits."""

import asyncio
import contextlib
import functools
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .. import states
from . import openapi, page
from .guard import Access, Guard, error_body, refused
from .pool import Full, Pool, Stream
from .requests import Completion, Wrong, completion, parsed
from .sessions import SessionError, Sessions
from .text import Stops
from .turns import SessionRoutes, Turn, refusal, while_connected
from .worker import Worker

PING = 15.0  # seconds without a token after which a comment keeps the connection open
SHORT = 1 << 12  # bytes or tokens that the event loop reads itself; more go to a thread
LEAST = -9999.0  # the log-probability of impossible tokens, since JSON has no infinity


@dataclass(frozen=True)
class Limits:
    """What one client may use."""

    body: int = 1 << 20
    """bytes of a request"""
    tokens: int = 4096
    """the largest max_tokens"""
    slow: float = 30.0
    """seconds within which a client must send the head of a request, then its body, and read what it is sent"""
    backlog: int = 4096
    """tokens of a stream that its client has not read yet, after which it is cancelled"""
    connections: int = 1024
    """open connections"""


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
            ("longspan_tokens_drawn", "Tokens drawn", lambda: worker.drawn),
            ("longspan_sessions", "Sessions", lambda: len(sessions)),
            ("longspan_session_bytes", "Bytes of all sessions", lambda: sessions.nbytes),
            ("longspan_streams_cancelled", "Streams that were cancelled", lambda: worker.cancelled),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)


@dataclass(eq=False)
class _Choice:
    """One choice of a response: its stream, and the text so far."""

    index: int
    stream: Stream
    queue: asyncio.Queue
    decoding: Any
    stops: Stops
    offset: int = 0
    finish: str | None = None
    seen: int = 0
    parts: list[str] = field(default_factory=list)
    echoed: bool = False
    turn: Turn | None = None
    error: Wrong | None = None


_Piece = tuple[_Choice, dict[str, Any]]
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
    ):
        self.pool, self.name, self.codec, self.access, self.grid = pool, name, codec, access or Access(), grid
        self.limits = limits or Limits()
        self.worker = Worker(pool)
        self.sessions = Sessions(pool) if sessions is None else sessions
        self.metrics = Metrics(self.worker, self.sessions)
        self.created = int(time.time())
        self.outbox: deque[tuple[dict[int, asyncio.Queue], Stream, int | None, int]] = deque()
        self.woken = False  # whether the event loop will look into the outbox
        self.closing = False
        self.threads = ThreadPoolExecutor(2, "longspan-reading")
        self.token_name: Callable[[int], str] = functools.cache(codec.name if codec else str)
        self.turns = SessionRoutes(
            self.sessions, self.worker, model=name, codec=codec, body=self._body, accept=self._accept
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
        ]
        handlers = {
            Wrong: self.wrong,
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
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.sessions.close()

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        began = time.monotonic()
        about = {"model": self.name, "codec": self.codec, "vocab": self.pool.vocab, "most": self.limits.tokens}
        asked = await self._body(request, lambda body: completion(body, **about))
        self._accept()
        if (turn := await self.turns.begin(request, asked)) is not None:
            asked = replace(asked, prompts=[turn.prompt])
        loop, size = asyncio.get_running_loop(), sum(map(len, asked.prompts))
        choices = await self._aside(size, lambda: self._submit(asked, turn, loop))
        about = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.name,
        }
        if asked.stream:
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            self._count(200)
            events = self._events(asked, choices, about, began)
            return Events(events, lambda: self._drop(choices), media_type="text/event-stream", headers=headers)
        try:
            found = await while_connected(request, self._all(asked, choices, began))
        finally:
            self._drop(choices)
        if failed := next((choice.error for choice in choices if choice.error is not None), None):
            raise failed
        self._count(200)
        return JSONResponse({**about, "choices": found, "usage": self._usage(asked, choices)})

    async def models(self, request: Request) -> Response:
        """GET /v1/models; the key ``longspan`` describes the model to the playground."""
        one: dict[str, Any] = {"id": self.name, "object": "model", "created": self.created, "owned_by": "longspan"}
        one["longspan"] = page.about(self.pool, self.codec, self.grid, self.limits.tokens)
        return JSONResponse({"object": "list", "data": [one]})

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions, which needs a chat template that these models do not have."""
        raise Wrong("these models have no chat template; use /v1/completions", status=404, code="not_found")

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

    async def wrong(self, request: Request, error: Wrong) -> Response:
        """Return an error in OpenAI's form."""
        self._count(error.status)
        return refused(error)

    async def not_found(self, request: Request, error: Any) -> Response:
        """Return 404 and 405 in OpenAI's form."""
        text = f"{request.method} {request.scope['path']} is not served here"
        answer = await self.wrong(request, Wrong(text, status=error.status_code, code="not_found"))
        answer.headers.update(error.headers or {})  # the methods that are allowed
        return answer

    async def gone(self, request: Request, error: ClientDisconnect) -> Response:
        """Count a client that hung up before its answer, as status 499."""
        self._count(499)
        return Response(status_code=499)

    async def broken(self, request: Request, error: Exception) -> Response:
        """Return 500 in OpenAI's form; the error itself is in the log."""
        return await self.wrong(request, Wrong("the server failed", status=500, code="internal_error"))

    def _count(self, status: int) -> None:
        """Count a request in the metrics."""
        self.metrics.requests.labels(str(status)).inc()

    def _accept(self) -> None:
        """Raise Wrong while the server accepts no work."""
        if self.closing:
            raise Wrong("the server is shutting down", status=503, code="shutting_down")
        if not self.worker.running:
            raise Wrong("the model's thread has ended; restart the server", status=503, code="model_error")

    async def _aside(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of work on a number of bytes or tokens; a thread does it if there are many."""
        return work() if size <= SHORT else await asyncio.get_running_loop().run_in_executor(self.threads, work)

    async def _body(self, request: Request, check: Callable[[Any], T]) -> T:
        """Return the body, read up to the limit, parsed and checked."""
        # A web page may send bodies of other types, and of none, to any server without asking it.
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise Wrong(
                f"content-type {kind[:100]!r} is not read; send application/json",
                status=415,
                code="unsupported_media_type",
            )
        data = bytearray()
        try:
            async with asyncio.timeout(self.limits.slow):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > self.limits.body:
                        raise Wrong(f"the body has more than {self.limits.body} bytes", status=413, code="too_large")
        except TimeoutError:
            text = f"the body did not arrive within {self.limits.slow:g} seconds"
            raise Wrong(text, status=408, code="timeout") from None
        return await self._aside(len(data), lambda: check(parsed(data)))

    def _submit(self, asked: Completion, turn: Turn | None, loop: asyncio.AbstractEventLoop) -> list[_Choice]:
        choices: list[_Choice] = []
        if (total := len(asked.prompts) * asked.n) > self.pool.slots + self.pool.queue:
            raise Wrong(
                f"{total} streams do not fit into {self.pool.slots} slots and a queue of {self.pool.queue}",
                "prompt" if len(asked.prompts) > 1 else "n",
            )
        # A response in one piece is read at its end, so its queue may hold all tokens.
        most = self.limits.backlog if asked.stream else self.limits.tokens
        try:
            for i, prompt in enumerate(asked.prompts):
                queues: dict[int, asyncio.Queue] = {}

                def listener(stream: Stream, token: int | None, queues: dict[int, asyncio.Queue] = queues) -> None:
                    self.outbox.append((queues, stream, token, most))
                    if not self.woken:
                        self.woken = True
                        with contextlib.suppress(RuntimeError):  # the loop has ended
                            loop.call_soon_threadsafe(self._deliver)

                start: dict[str, Any] = {"prompt": prompt} if turn is None else turn.options()
                streams = self.pool.submit(
                    **start,
                    max_new_tokens=asked.max_tokens,
                    sampling=asked.ways(i),
                    stop=self.codec.ends if self.codec else (),
                    top=asked.logprobs or 0,
                    score_prompt=asked.scores,
                    listener=listener,
                )
                for stream in streams:
                    queue = queues.setdefault(id(stream), asyncio.Queue())
                    decoding = self.codec.decoder() if self.codec else None
                    choices.append(_Choice(len(choices), stream, queue, decoding, Stops(asked.stop), turn=turn))
        except Exception as error:
            self._drop(choices, count=False)
            if turn is not None:
                turn.release()
            if isinstance(error, Full):
                raise Wrong(str(error), status=429, code="overloaded") from error
            if isinstance(error, ValueError):
                raise Wrong(str(error), "prompt") from error
            raise
        self.worker.wake()
        return choices

    async def _next(self, asked: Completion, choice: _Choice) -> dict[str, Any] | None:
        """Wait for the next piece of a choice; None after its end."""
        return None if choice.finish is not None else await self._taken(asked, choice, await choice.queue.get())

    async def _taken(self, asked: Completion, choice: _Choice, token: int | None) -> dict[str, Any]:
        """Return the piece of a choice that a token, or its end, makes."""
        place, echo = choice.seen, None
        if asked.echo and not choice.echoed:
            choice.echoed = True
            prompt = asked.prompts[choice.index // asked.n]
            echo = await self._aside(len(prompt), lambda: self._echo(asked, choice, prompt))
        if token is None:
            reason = choice.stream.finished
            text = "" if choice.decoding is None else choice.stops.add(choice.decoding.end()) + choice.stops.end()
            choice.finish = reason or "error"
            if choice.finish == "error":
                message = f"the model failed: {choice.stream.error}"
                choice.error = Wrong(message, status=500, code="model_error")
        else:
            choice.seen += 1
            text = "" if choice.decoding is None else choice.stops.add(choice.decoding.add(token))
            if choice.stops.stopped:
                choice.finish = "stop"
                self.worker.cancel(choice.stream, count=False)
        choice.parts.append(text)
        if choice.turn is not None and choice.finish is not None:
            await self._finish(choice, choice.turn)
        piece = self._piece(asked, choice, text, [] if token is None else [token], place)
        return piece if echo is None else _joined([echo, piece])

    async def _finish(self, choice: _Choice, turn: Turn) -> None:
        """Save the session of a turn that has ended, before its client learns of the end."""
        if choice.finish not in ("stop", "length"):
            turn.release()
            return
        try:
            cut = "".join(choice.parts) if choice.stops.stopped else None
            await turn.commit(choice.stream, choice.seen, cut)
        except SessionError as error:
            choice.finish, choice.error = "error", refusal(error)
            turn.release()

    def _piece(self, asked: Completion, choice: _Choice, text: str, tokens: list[int], place: int) -> dict[str, Any]:
        found: dict[str, Any] = {"index": choice.index, "text": text, "finish_reason": choice.finish, "logprobs": None}
        if self.codec is None:
            found["tokens"] = tokens
        if asked.logprobs is not None:
            stream, places = choice.stream, slice(place, place + len(tokens))
            found["logprobs"] = self._logprobs(
                tokens, stream.log_probs[places], stream.top_log_probs[places], [choice.offset] * len(tokens)
            )
        choice.offset += len(text)
        return found

    def _logprobs(
        self, tokens: list[int], values: list[Any], tops: list[Any], offsets: list[int]
    ) -> dict[str, list[Any] | None]:
        """The log-probabilities of tokens in OpenAI's form; None for a token that nothing precedes."""
        name = self.token_name
        return {
            "tokens": [name(token) for token in tokens],
            "token_logprobs": [None if value is None else max(value, LEAST) for value in values],
            "top_logprobs": [top and {name(t): max(value, LEAST) for t, value in top.items()} for top in tops] or None,
            "text_offset": offsets,
        }

    async def _all(self, asked: Completion, choices: list[_Choice], began: float) -> list[dict[str, Any]]:
        """Wait for all choices, side by side: a stop string ends its choice while others go on."""
        first = True

        async def one(choice: _Choice) -> dict[str, Any]:
            nonlocal first
            pieces = []
            while (piece := await self._next(asked, choice)) is not None:
                if first and choice.seen:
                    self.metrics.first.observe(time.monotonic() - began)
                    first = False
                pieces.append(piece)
            return _joined(pieces)

        return list(await asyncio.gather(*map(one, choices)))

    async def _events(
        self, asked: Completion, choices: list[_Choice], about: dict[str, Any], began: float
    ) -> AsyncIterator[bytes]:
        """The events of a stream, in the order in which tokens are drawn."""
        first = True

        def written(choice: _Choice, piece: dict[str, Any]) -> bytes:
            nonlocal first
            if first:
                self.metrics.first.observe(time.monotonic() - began)
                first = False
            if choice.error is not None and piece["finish_reason"] is not None:
                # The text that was held back, since a stop string may begin in it, comes before the error.
                held = piece["text"] and choice.seen
                text = _event({**about, "choices": [{**piece, "finish_reason": None}]}) if held else b""
                return text + _event({"error": error_body(choice.error)})
            if piece["text"] or piece.get("tokens") or piece["finish_reason"] or asked.logprobs is not None:
                return _event({**about, "choices": [piece]})
            return b""

        try:
            pieces = self._pieces_of_one(asked, choices[0]) if len(choices) == 1 else self._pieces(asked, choices)
            async with contextlib.aclosing(pieces):
                async for some in pieces:
                    if not some:
                        yield b": ping\n\n"
                    elif text := b"".join(written(choice, piece) for choice, piece in some):
                        yield text
            if asked.usage:
                yield _event({**about, "choices": [], "usage": self._usage(asked, choices)})
            yield b"data: [DONE]\n\n"
        finally:
            self._drop(choices)

    async def _pieces_of_one(self, asked: Completion, choice: _Choice) -> AsyncGenerator[list[_Piece], None]:
        """The pieces of one choice, those that have arrived together; nothing after ``PING`` seconds without any."""
        while choice.finish is None:
            try:
                async with asyncio.timeout(PING):
                    token = await choice.queue.get()
            except TimeoutError:
                yield []
                continue
            some = [(choice, await self._taken(asked, choice, token))]
            while choice.finish is None and not choice.queue.empty():
                some.append((choice, await self._taken(asked, choice, choice.queue.get_nowait())))
            yield some

    async def _pieces(self, asked: Completion, choices: list[_Choice]) -> AsyncGenerator[list[_Piece], None]:
        """The pieces of several choices, as they arrive."""
        waiting = {asyncio.create_task(self._next(asked, choice)): choice for choice in choices}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, timeout=PING, return_when=asyncio.FIRST_COMPLETED)
                some: list[_Piece] = []
                for task in sorted(done, key=lambda task: waiting[task].index):
                    choice = waiting.pop(task)
                    if (piece := task.result()) is not None:
                        some.append((choice, piece))
                    if choice.finish is None:
                        waiting[asyncio.create_task(self._next(asked, choice))] = choice
                if some or not done:
                    yield some
        finally:
            for task in waiting:
                task.cancel()

    def _echo(self, asked: Completion, choice: _Choice, prompt: list[int]) -> dict[str, Any]:
        """The piece of a choice that is its prompt; the tokens of its session before it are not part of it."""
        parts, offsets = [], []
        if self.codec is not None:
            decoding = self.codec.decoder()
            for token in prompt:
                offsets.append(choice.offset)
                parts.append(decoding.add(token))
                choice.offset += len(parts[-1])
            parts.append(decoding.end())
            choice.offset += len(parts[-1])
        found = {"index": choice.index, "text": "".join(parts), "finish_reason": None, "logprobs": None}
        if self.codec is None:
            found["tokens"], offsets = list(prompt), [0] * len(prompt)
        stream = choice.stream
        # A stream that ended while its prompt was read has fewer.
        if asked.logprobs is not None and (first := len(stream.prompt_log_probs) - len(prompt)) >= 0:
            values, tops = stream.prompt_log_probs[first:], stream.prompt_top_log_probs[first:]
            found["logprobs"] = self._logprobs(prompt, values, tops, offsets)
        return found

    def _usage(self, asked: Completion, choices: list[_Choice]) -> dict[str, Any]:
        read, drawn = sum(map(len, asked.prompts)), sum(choice.seen for choice in choices)
        cached = sum(max(0, choice.stream.cached - 1) for choice in choices[:: asked.n])
        return {
            "prompt_tokens": read,
            "completion_tokens": drawn,
            "total_tokens": read + drawn,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _deliver(self) -> None:
        """Pass on all tokens that the model's thread has drawn since the last call: waking the loop takes long."""
        self.woken = False
        while self.outbox:
            self._put(*self.outbox.popleft())

    def _put(self, queues: dict[int, asyncio.Queue], stream: Stream, token: int | None, most: int) -> None:
        """Pass a token on. A stream whose client does not keep up is cancelled; it ends after what is queued."""
        queue = queues.setdefault(id(stream), asyncio.Queue())  # of a stream that is still being submitted
        if token is not None and queue.qsize() >= most:
            self.worker.cancel(stream)
        if token is None or not stream.cancelled:
            queue.put_nowait(token)

    def _drop(self, choices: list[_Choice], *, count: bool = True) -> None:
        """Cancel the streams of a request that has ended; a session without a finished turn stays as it was."""
        for choice in choices:
            self.worker.cancel(choice.stream, count=count)
            if choice.turn is not None:
                choice.turn.release()


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


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


def _joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the pieces of a choice together."""
    found = {**pieces[-1], "text": "".join(piece["text"] for piece in pieces)}
    if "tokens" in found:
        found["tokens"] = [token for piece in pieces for token in piece["tokens"]]
    if given := [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]:
        found["logprobs"] = {name: [one for some in given for one in some[name] or ()] or None for name in given[0]}
    return found
