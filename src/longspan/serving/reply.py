"""The response to one request for completions: its streams, and their text in one piece or as events."""

import asyncio
import contextlib
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import Histogram

from .guard import error_body
from .pool import Full, Stream
from .requests import Completion, Limits, RequestError
from .sessions import SessionError
from .state_adapters import StateAdapters
from .text import Stops
from .turns import Turn, refusal
from .worker import Worker

PING = 15.0  # seconds without a token after which a comment keeps the connection open
SHORT = 1 << 12  # bytes or tokens that the event loop reads itself; more go to a thread
LEAST = -9999.0  # the log-probability of impossible tokens, since JSON has no infinity

T = TypeVar("T")


class Outbox:
    """Passes tokens from the model's thread to the event loop, and wakes it once for all that wait."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self._waiting: deque[tuple[dict[int, asyncio.Queue], Stream, int | None, int]] = deque()
        self._woken = False  # whether the event loop will look into it

    def listener(
        self, loop: asyncio.AbstractEventLoop, queues: dict[int, asyncio.Queue], backlog: int
    ) -> Callable[[Stream, int | None], None]:
        """Return a listener for ``Pool.submit`` that puts the tokens of each stream into its queue.

        Args:
            loop: The event loop.
            queues: The queue of each stream, by the stream's ``id``.
            backlog: The most tokens in a queue.
        """

        def listener(stream: Stream, token: int | None) -> None:
            self._waiting.append((queues, stream, token, backlog))
            if not self._woken:
                self._woken = True
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._deliver)

        return listener

    def _deliver(self) -> None:
        """Pass on all tokens that the model's thread has drawn since the last call: waking the loop takes long."""
        self._woken = False
        while self._waiting:
            self._put(*self._waiting.popleft())

    def _put(self, queues: dict[int, asyncio.Queue], stream: Stream, token: int | None, backlog: int) -> None:
        """Pass a token on. A stream whose client does not keep up is cancelled; it ends after what is queued."""
        queue = queues.setdefault(id(stream), asyncio.Queue())  # of a stream that is still being submitted
        if token is not None and queue.qsize() >= backlog:
            self.worker.cancel(stream)
        if token is None or not stream.cancelled:
            queue.put_nowait(token)


@dataclass(frozen=True, eq=False)
class Service:
    """What all requests of a server share."""

    name: str
    """the model's name in requests"""
    worker: Worker
    adapters: StateAdapters
    outbox: Outbox
    codec: Any
    """text to tokens and back, None for a model without text"""
    token_name: Callable[[int], str]
    """the text of a token in log-probabilities"""
    limits: Limits
    threads: ThreadPoolExecutor
    """threads for what would hold up the event loop"""
    first_token: Histogram
    """seconds to the first token of each request"""

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of work on a number of bytes or tokens; a thread does it if there are many."""
        return work() if size <= SHORT else await asyncio.get_running_loop().run_in_executor(self.threads, work)


@dataclass(eq=False)
class Choice:
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
    error: RequestError | None = None


_Piece = tuple[Choice, dict[str, Any]]


class Reply:
    """The response to one request. ``submit`` comes first and ``close`` last, however the request ends.

    Args:
        service: The server's part.
        body: The checked request.
        turn: The turn of its session, None without one.
        began: When the request arrived, by ``time.monotonic``.
    """

    kind = event_kind = "text_completion"

    def __init__(self, service: Service, body: Completion, turn: Turn | None, began: float):
        self.service, self.body, self.turn, self.began = service, body, turn, began
        self.choices: list[Choice] = []
        self._waits = True  # whether no token has arrived
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": self.event_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": service.name,
        }

    def submit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Submit the prompts to the pool.

        Raises:
            RequestError: If the pool does not accept them; the reply is closed.
        """
        body, codec, pool = self.body, self.service.codec, self.service.worker.pool
        # A response in one piece is read at its end, so its queue may hold all tokens.
        limits = self.service.limits
        backlog = limits.backlog if body.stream else limits.tokens
        try:
            if (total := len(body.prompts) * body.n) > pool.slots + pool.queue:
                raise RequestError(
                    f"{total} streams do not fit into {pool.slots} slots and a queue of {pool.queue}",
                    "prompt" if len(body.prompts) > 1 else "n",
                )
            if body.draft and (reason := pool.why_not_draft()):
                raise RequestError(reason, "draft")
            for i, prompt in enumerate(body.prompts):
                queues: dict[int, asyncio.Queue] = {}
                start: dict[str, Any] = {"prompt": prompt, "adapter": self.service.adapters.get(body.adapter)}
                if self.turn is not None:
                    start = self.turn.options()
                most = body.max_tokens
                if body.fits:
                    most = int(max(1, min(most, pool.room(len(start["prompt"]) + len(start.get("history") or ())))))
                streams = pool.submit(
                    **start,
                    max_new_tokens=most,
                    sampling=body.samplings(i),
                    stop=body.ends,
                    constraint=body.constraint,
                    top=body.logprobs or 0,
                    score_prompt=body.scores,
                    draft=body.draft,
                    listener=self.service.outbox.listener(loop, queues, backlog),
                )
                for stream in streams:
                    queue = queues.setdefault(id(stream), asyncio.Queue())
                    decoding = codec.decoder() if codec else None
                    self.choices.append(Choice(len(self.choices), stream, queue, decoding, Stops(body.stop)))
        except Exception as error:
            self.close(count=False)
            if isinstance(error, Full):
                raise RequestError(str(error), status=429, code="overloaded") from error
            if isinstance(error, ValueError):
                raise RequestError(str(error), "prompt") from error
            raise
        self.service.worker.wake()

    def close(self, *, count: bool = True) -> None:
        """Cancel the streams that have not ended; a session without a finished turn stays as it was."""
        for choice in self.choices:
            self.service.worker.cancel(choice.stream, count=count)
        if self.turn is not None:
            self.turn.release()

    async def whole(self) -> dict[str, Any]:
        """Return the response in one piece. All choices are read side by side: a stop string ends one of them.

        Raises:
            RequestError: If a choice has failed.
        """

        async def read(choice: Choice) -> dict[str, Any] | None:
            pieces = []
            while (piece := await self._next(choice)) is not None:
                if choice.seen:
                    self._observe()
                pieces.append(piece)
            return self._shown(choice, _join(pieces), event=False)

        choices = await asyncio.gather(*map(read, self.choices))
        if error := next((choice.error for choice in self.choices if choice.error is not None), None):
            raise error
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream, in the order in which tokens are drawn."""
        try:
            pieces = self._pieces_of_one(self.choices[0]) if len(self.choices) == 1 else self._pieces()
            async with contextlib.aclosing(pieces):
                async for arrived in pieces:
                    if not arrived:
                        yield b": ping\n\n"
                    elif text := b"".join(self._written(choice, piece) for choice, piece in arrived):
                        yield text
            if self.body.usage:
                yield _event({**self._head, "choices": [], "usage": self._usage()})
            yield b"data: [DONE]\n\n"
        finally:
            self.close()

    def _written(self, choice: Choice, piece: dict[str, Any]) -> bytes:
        """Return the event of a piece; b"" for a piece that says nothing."""
        self._observe()
        if choice.error is not None and piece["finish_reason"] is not None:
            # The text that was held back, since a stop string may begin in it, comes before the error.
            held = piece["text"] and choice.seen
            shown = self._shown(choice, {**piece, "finish_reason": None}, event=True) if held else None
            text = _event({**self._head, "choices": [shown]}) if shown else b""
            return text + _event({"error": error_body(choice.error)})
        if piece["text"] or piece.get("tokens") or piece["finish_reason"] or self.body.logprobs is not None:
            shown = self._shown(choice, piece, event=True)
            return _event({**self._head, "choices": [shown]}) if shown else b""
        return b""

    def _shown(self, choice: Choice, piece: dict[str, Any], event: bool) -> dict[str, Any] | None:
        """Return a piece of a choice as the client receives it: the piece of an event, or the whole choice."""
        return piece

    def _observe(self) -> None:
        """Record the time to the first token."""
        if self._waits:
            self._waits = False
            self.service.first_token.observe(time.monotonic() - self.began)

    async def _next(self, choice: Choice) -> dict[str, Any] | None:
        """Wait for the next piece of a choice; None after its end."""
        return None if choice.finish is not None else await self._take(choice, await choice.queue.get())

    async def _take(self, choice: Choice, token: int | None) -> dict[str, Any]:
        """Return the piece of a choice that a token, or its end, makes."""
        place, echo = choice.seen, None
        if self.body.echo and not choice.echoed:
            choice.echoed = True
            prompt = self.body.prompts[choice.index // self.body.n]
            echo = await self.service.run(len(prompt), lambda: self._echo(choice, prompt))
        if token is None:
            reason = choice.stream.finished
            text = "" if choice.decoding is None else choice.stops.add(choice.decoding.end()) + choice.stops.end()
            choice.finish = reason or "error"
            if choice.finish == "error":
                message = f"the model failed: {choice.stream.error}"
                choice.error = RequestError(message, status=500, code="model_error")
        else:
            choice.seen += 1
            text = "" if choice.decoding is None else choice.stops.add(choice.decoding.add(token))
            if choice.stops.stopped:
                choice.finish = "stop"
                self.service.worker.cancel(choice.stream, count=False)
        choice.parts.append(text)
        if self.turn is not None and choice.finish is not None:
            await self._finish(choice, self.turn)
        piece = self._piece(choice, text, [] if token is None else [token], place)
        return piece if echo is None else _join([echo, piece])

    async def _finish(self, choice: Choice, turn: Turn) -> None:
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

    def _piece(self, choice: Choice, text: str, tokens: list[int], place: int) -> dict[str, Any]:
        piece: dict[str, Any] = {"index": choice.index, "text": text, "finish_reason": choice.finish, "logprobs": None}
        if self.service.codec is None:
            piece["tokens"] = tokens
        if self.body.logprobs is not None:
            stream, places = choice.stream, slice(place, place + len(tokens))
            piece["logprobs"] = self._logprobs(
                tokens, stream.log_probs[places], stream.top_log_probs[places], [choice.offset] * len(tokens)
            )
        choice.offset += len(text)
        return piece

    def _logprobs(
        self, tokens: list[int], values: list[Any], tops: list[Any], offsets: list[int]
    ) -> dict[str, list[Any] | None]:
        """The log-probabilities of tokens in OpenAI's form; None for a token that nothing precedes."""
        name = self.service.token_name
        return {
            "tokens": [name(token) for token in tokens],
            "token_logprobs": [None if value is None else max(value, LEAST) for value in values],
            "top_logprobs": [top and {name(t): max(value, LEAST) for t, value in top.items()} for top in tops] or None,
            "text_offset": offsets,
        }

    async def _pieces_of_one(self, choice: Choice) -> AsyncGenerator[list[_Piece], None]:
        """The pieces of one choice, those that have arrived together; nothing after ``PING`` seconds without any."""
        while choice.finish is None:
            try:
                async with asyncio.timeout(PING):
                    token = await choice.queue.get()
            except TimeoutError:
                yield []
                continue
            arrived = [(choice, await self._take(choice, token))]
            while choice.finish is None and not choice.queue.empty():
                arrived.append((choice, await self._take(choice, choice.queue.get_nowait())))
            yield arrived

    async def _pieces(self) -> AsyncGenerator[list[_Piece], None]:
        """The pieces of several choices, as they arrive."""
        waiting = {asyncio.create_task(self._next(choice)): choice for choice in self.choices}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, timeout=PING, return_when=asyncio.FIRST_COMPLETED)
                arrived: list[_Piece] = []
                for task in sorted(done, key=lambda task: waiting[task].index):
                    choice = waiting.pop(task)
                    if (piece := task.result()) is not None:
                        arrived.append((choice, piece))
                    if choice.finish is None:
                        waiting[asyncio.create_task(self._next(choice))] = choice
                if arrived or not done:
                    yield arrived
        finally:
            for task in waiting:
                task.cancel()

    def _echo(self, choice: Choice, prompt: list[int]) -> dict[str, Any]:
        """The piece of a choice that is its prompt; the tokens of its session before it are not part of it."""
        parts, offsets = [], []
        if self.service.codec is not None:
            decoding = self.service.codec.decoder()
            for token in prompt:
                offsets.append(choice.offset)
                parts.append(decoding.add(token))
                choice.offset += len(parts[-1])
            parts.append(decoding.end())
            choice.offset += len(parts[-1])
        piece = {"index": choice.index, "text": "".join(parts), "finish_reason": None, "logprobs": None}
        if self.service.codec is None:
            piece["tokens"], offsets = list(prompt), [0] * len(prompt)
        stream = choice.stream
        # A stream that ended while its prompt was read has fewer.
        if self.body.logprobs is not None and (first := len(stream.prompt_log_probs) - len(prompt)) >= 0:
            values, tops = stream.prompt_log_probs[first:], stream.prompt_top_log_probs[first:]
            piece["logprobs"] = self._logprobs(prompt, values, tops, offsets)
        return piece

    def _usage(self) -> dict[str, Any]:
        read, drawn = sum(map(len, self.body.prompts)), sum(choice.seen for choice in self.choices)
        # A start token is not part of the prompt.
        own = int(self.service.worker.pool.model.start is not None)
        cached = sum(max(0, choice.stream.cached - own) for choice in self.choices[:: self.body.n])
        drafted, accepted = (
            sum(getattr(choice.stream, name) for choice in self.choices)
            for name in ("draft_tokens", "accepted_draft_tokens")
        )
        return {
            "prompt_tokens": read,
            "completion_tokens": drawn,
            "total_tokens": read + drawn,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
            "draft_tokens": drafted,
            "accepted_draft_tokens": accepted,
        }


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


def _join(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the pieces of a choice together."""
    whole = {**pieces[-1], "text": "".join(piece["text"] for piece in pieces)}
    if "tokens" in whole:
        whole["tokens"] = [token for piece in pieces for token in piece["tokens"]]
    if given := [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]:
        whole["logprobs"] = {name: [value for part in given for value in part[name] or ()] or None for name in given[0]}
    return whole
