"""A pool of slots: each decode step advances all live streams, which come and go between steps."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import states
from .._utils.typecheck import as_int, check_type, format_value
from ..generation.native_decoder import Engine
from ..generation.sampling import afford_rows
from ..models.decoder import Decoder, DecoderState
from ..models.sampling import Sampling
from ..ops.backends import forced_backend
from ..states.utils import check_like, grow_capacity
from .adapters import servable, with_all_outputs
from .prefix_cache import Beginning, PrefixCache
from .sampler import sample

Reason = Literal["stop", "length", "cancelled", "error"]
NATIVE = ("auto", "native")  # forced backends with which the decode engine runs
COPIED = 1 << 27  # bytes of states that one reading of several prompts may copy
SCORED = 1 << 27  # outputs of all tokens that one reading of several scored prompts may have


class Full(Exception):
    """The queue of waiting streams is full; try again later."""


@dataclass(eq=False)
class Stream:
    """The tokens of one request, as they are drawn.

    Read ``tokens`` and ``finished`` at any time, or pass ``listener`` to ``Pool.submit``.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    listener: Callable[["Stream", int | None], None] | None = None
    tokens: list[int] = field(default_factory=list)
    """the tokens drawn so far; a stop token is the last one"""
    log_probs: list[float] = field(default_factory=list)
    """the log-probability of each of them, before temperature, top_k and top_p"""
    top: int = 0
    """how many of the most likely tokens are recorded at each place"""
    top_log_probs: list[dict[int, float]] = field(default_factory=list)
    """for each place the ``top`` most likely tokens with their log-probabilities"""
    prompt_log_probs: list[float | None] = field(default_factory=list)
    """with ``score_prompt=True``, the log-probability of each token of the prompt; None where nothing precedes it"""
    prompt_top_log_probs: list[dict[int, float] | None] = field(default_factory=list)
    """for each of them the ``top`` most likely tokens, if ``top`` > 0"""
    finished: Reason | None = None
    """why the stream has ended, None while it has not"""
    error: str = ""
    """what went wrong, if ``finished`` is ``error``"""
    cached: int = 0
    """tokens of the prompt that were read for an earlier stream"""
    keeps: bool = False
    state: DecoderState | None = None
    """with ``keep_state=True``, the state at the end, one row, which has read all tokens but the last; set
    before the listener is called with None"""
    cancelled: bool = False


# A token, its log-probability, and the most likely tokens at its place.
_Drawn = tuple[int, float, dict[int, float]]


@dataclass(eq=False)
class _Reading:
    """A prompt that is being read, for one or more streams."""

    streams: list[Stream]
    tokens: tuple[int, ...]  # the start token included, where the prompt begins a sequence
    state: DecoderState | None  # None until it is read, since many prompts may wait
    read: int = 0
    outputs: Tensor | None = None
    beginning: Beginning | None = None  # the tokens read so far; None if no state of them may be cached
    scored: bool = False

    def score(self, model: Any, outputs: Tensor, piece: Sequence[int]) -> None:
        """Record the log-probabilities of a piece of the prompt; its outputs (N,size) predict the token after each."""
        first = self.streams[0]
        top, values, tops = first.top, first.prompt_log_probs, first.prompt_top_log_probs
        before = outputs[:-1] if self.outputs is None else torch.cat([self.outputs, outputs[:-1]])
        scores = model.likelihood.log_probs(before)
        if scores.isnan().any():
            raise ValueError("the model's outputs are not numbers")
        known = [None] * (len(piece) - len(before))
        ids = torch.tensor(piece[len(known) :], device=scores.device)
        values += [*known, *scores.gather(-1, ids[:, None])[:, 0].tolist()]
        if top:
            best = scores.topk(top)
            rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            tops += [*known, *(dict(zip(*row, strict=True)) for row in rows)]
        if not self.read and len(self.tokens) > len(first.prompt):  # the start token is not part of the prompt
            del values[:1], tops[:1]


class Pool:
    """Continuous batching over a preallocated state.

    Live streams are rows 0 to n-1 of the state. A stream that ends leaves its row to the last one. Each call of
    ``step`` reads up to ``prefill`` tokens of the waiting prompts, which take turns, and draws one token for every live
    stream. ``submit`` and ``cancel`` may be called from any thread, ``step`` from one at a time.

    If the native decoder supports the model, it runs the decode steps with a copy of the weights, made by the
    constructor.

    Greedy tokens of a stream equal those of ``longspan.generate`` up to ties: products of a batch round differently
    from those of one row. Sampled tokens depend on the stream's seed and position only.

    Args:
        model: A decoder in evaluation mode, a ``LongspanForCausalLM``, whose decoder it takes, a model of
            ``longspan.compat.fla.load``, a model of transformers under ``longspan.compat.transformers.accelerate()``,
            or any ``longspan.serving.Servable``.
        slots: Streams that run at the same time.
        queue: Streams that may wait for a slot.
        capacity: Tokens of a stream, prompt included; required for attentions whose state keeps every token.
        prefill: Tokens of all prompts together that are read per step, so that long prompts do not stop the others. A
            prompt is read in pieces of up to this size.
        prefix_bytes: Memory for states of prompts that were read before; 0 for none.

    Raises:
        ValueError: For a model of another kind or in training mode, numbers out of range, and a pool that does not
            fit into the memory of this machine.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int = 64,
        queue: int = 128,
        capacity: int = 0,
        prefill: int = 256,
        prefix_bytes: int = 0,
    ):
        model = servable(model)
        if model.training:
            raise ValueError("the model is in training mode; call model.eval()")
        slots, queue, capacity, prefill, prefix_bytes = (
            _at_least(least, name, value)
            for name, value, least in (
                ("slots", slots, 1),
                ("queue", queue, 0),
                ("capacity", capacity, 0),
                ("prefill", prefill, 1),
                ("prefix_bytes", prefix_bytes, 0),
            )
        )
        afford_rows(cast(Any, model), slots, capacity, f"the states of {slots} slots")
        self.model, self.slots, self.queue, self.capacity, self.prefill = model, slots, queue, capacity, prefill
        self.prefixes = PrefixCache(prefix_bytes)
        with torch.no_grad():
            empty = model.init_state(slots, capacity)
            grows = bool(capacity) and states.nbytes(empty) != states.nbytes(model.init_state(slots, capacity + 1))
            self._fixed = grows
            self.state = states.fix_capacity(empty, capacity) if grows else empty
            if not grows and states.nbytes(model.init_state(1, 1)) != states.nbytes(model.init_state(1, 2)):
                raise ValueError("this model's state keeps every token; pass capacity=, the most tokens of a stream")
        # Prompts that are read in one call: their states are copied.
        self._together = max(1, COPIED * slots // max(1, states.nbytes(self.state)))
        native = isinstance(model, Decoder) and forced_backend() in NATIVE and not Engine.why_not(model)
        self._engine = Engine(model) if native else None
        self._live: DecoderState | None = None  # the rows that the engine returned, while no stream came or went
        self._in_place = False  # whether it is in the pool's tensors, except for its position
        self.rows: list[Stream] = []
        self._next: list[int] = []  # the token that each live row reads next
        self._waiting: deque[_Reading] = deque()
        self._reading: list[_Reading] = []
        self._lock = threading.RLock()

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.model.likelihood.levels

    @property
    def native(self) -> Engine | None:
        """The native decoder that runs the decode steps; None where the model runs them."""
        return self._engine

    @property
    def live(self) -> int:
        """Streams that draw tokens."""
        return len(self.rows)

    @property
    def waiting(self) -> int:
        """Streams whose prompt is not read yet."""
        with self._lock:
            return sum(len(job.streams) for job in itertools.chain(self._waiting, self._reading))

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.rows or self._waiting or self._reading)

    def submit(
        self,
        prompt: Sequence[int] | Tensor = (),
        *,
        max_new_tokens: int,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Sequence[int] = (),
        state: DecoderState | None = None,
        keep_state: bool = False,
        top: int = 0,
        score_prompt: bool = False,
        listener: Callable[[Stream, int | None], None] | None = None,
    ) -> list[Stream]:
        """Queue a prompt.

        Args:
            prompt: Tokens, without the start token.
            max_new_tokens: The most tokens to draw; 0 with ``score_prompt``.
            sampling: How to draw them, by default from the model's distribution with seed 0. Several draw several
                streams from one reading of the prompt.
            stop: Tokens that end a stream.
            state: The state of one row to continue, from an earlier stream; None begins a sequence. It is copied.
            keep_state: Keep each stream's state at its end.
            top: Record this many of the most likely tokens at each place.
            score_prompt: Record the log-probabilities of the prompt's tokens too. Such a prompt is read whole.
            listener: Called from ``step`` with each token of a stream, and with None at its end. An error that it
                raises ends its stream.

        Returns:
            The streams, one for each of ``sampling``.

        Raises:
            ValueError: For tokens and numbers of another type or out of range, a state that is not one row of this
                model, or more tokens than ``capacity``.
            Full: If the queue is full.
        """
        given, ends = _tokens("prompt", prompt, self.vocab), frozenset(_tokens("stop", stop, self.vocab))
        if (top := _at_least(0, "top", top)) > self.vocab:
            raise ValueError(f"top={top} must be a number of tokens from 0 to {self.vocab}")
        check_type("keep_state", keep_state, bool)
        check_type("score_prompt", score_prompt, bool)
        max_new_tokens = _at_least(0 if score_prompt and not keep_state else 1, "max_new_tokens", max_new_tokens)
        if not (listener is None or callable(listener)):
            raise ValueError(f"listener={format_value(listener)} must be a function of a stream and a token, or None")
        sampling = Sampling() if sampling is None else sampling
        ways = [sampling] if isinstance(sampling, Sampling) else sampling
        if not isinstance(ways, Sequence) or not all(isinstance(way, Sampling) for way in ways):
            raise ValueError(f"sampling={format_value(sampling)} must be a Sampling or a list of them")
        if not 1 <= len(ways) <= self.slots:
            raise ValueError(f"{len(ways)} streams of one prompt do not fit into {self.slots} slots")
        if state is not None and not given:
            raise ValueError("a state needs a prompt of at least one token, which it has not read")
        start = () if self.model.start is None else (self.model.start,)
        if not given and not start:
            raise ValueError("this model has no start token; a prompt needs at least one token")
        before = 0 if state is None else self._tokens_read(state)
        # Limits of positions and of KV caches. A start token takes a place; the last token drawn is never read.
        needed = before + len(given) + max_new_tokens + (len(start) if state is None else 0) - 1
        for limit, what in (
            (self.capacity if self._fixed else 0, "capacity"),
            (self._positions(), "the table of positions"),
        ):
            if limit and needed > limit:
                raise ValueError(
                    f"{len(given)} tokens of prompt and {max_new_tokens} new ones need {needed} places, but {what} has "
                    f"{limit}"
                )
        streams = [Stream(given, max_new_tokens, way, ends, listener, keeps=keep_state, top=top) for way in ways]
        tokens = given if state is not None else (*start, *given)
        with torch.no_grad():
            # Of one kind, so that prompts after a state and others are read in one call.
            own = None if state is None else self._slotted(states.clone(state))
        for stream in streams[1:]:
            stream.prompt_log_probs = streams[0].prompt_log_probs
            stream.prompt_top_log_probs = streams[0].prompt_top_log_probs
        cacheable = state is None and self.prefixes.limit
        beginning = Beginning() if cacheable else None
        job = _Reading(streams, tokens, own, beginning=beginning, scored=score_prompt)
        with self._lock:
            if self.waiting + len(streams) > self.queue + max(0, self.slots - self.live):
                raise Full(f"{self.waiting} streams wait for {self.slots} slots; try again later")
            self._waiting.append(job)
        return streams

    def cancel(self, stream: Stream) -> None:
        """End a stream before the next step; an ended one stays as it is."""
        stream.cancelled = True

    @torch.no_grad()
    def step(self) -> int:
        """Read a piece of the waiting prompts, and draw a token for every live stream -> the number of live streams."""
        self._reap()
        self._admit()
        self._read()
        if self.rows:
            self._decode()
        return self.live

    def fail(self, error: str) -> None:
        """End all streams with an error, after a step has raised one."""
        with self._lock:
            jobs = [*self._waiting, *self._reading]
            streams = [*self.rows, *(stream for job in jobs for stream in job.streams)]
            self._waiting.clear()
            self._reading.clear()
            self.rows.clear()
            self._next.clear()
        for stream in streams:
            self._end(stream, "error", error)

    def run(self) -> None:
        """Step until every stream has ended."""
        while not self.idle:
            self.step()

    def stream(
        self, prompt: Sequence[int] | Tensor = (), *, sampling: Sampling | None = None, **options: Any
    ) -> Iterator[int]:
        """Submit a prompt and yield its tokens; the other streams advance with it. Options as in ``submit``.

        Raises:
            RuntimeError: If the stream ends with an error.
        """
        check_type("sampling", sampling, Sampling | None)
        (found,) = self.submit(prompt, sampling=sampling, **options)
        given = 0
        try:
            while found.finished is None or given < len(found.tokens):
                if given == len(found.tokens):
                    self.step()
                else:
                    given += 1
                    yield found.tokens[given - 1]
        finally:
            if found.finished is None:
                self.cancel(found)
        if found.finished == "error":
            raise RuntimeError(f"the stream ended after {given} tokens: {found.error}")

    def _positions(self) -> int:
        config: Any = getattr(self.model, "config", None)
        return config.length if getattr(config, "positions", "") == "learned" else 0

    def _tokens_read(self, state: DecoderState) -> int:
        """Return the number of tokens that a given state has read. Raises ValueError unless it is one row of ours."""
        like = grow_capacity(self.model.init_state(1, 0))
        try:
            check_like(grow_capacity(state), like)
        except ValueError as error:
            raise ValueError(f"state does not fit this model: {error}") from error
        if (rows := len(state.position)) != 1:
            raise ValueError(f"state has {rows} rows; pass one of them, as longspan.states.select(state, [0])")
        return int(state.position[0])

    def _reap(self) -> None:
        """Remove streams that were cancelled."""
        for i in reversed(range(len(self.rows))):
            if self.rows[i].cancelled:
                self._leave(i, "cancelled")
        with self._lock:
            for jobs in (self._waiting, self._reading):
                for job in list(jobs):
                    for stream in [one for one in job.streams if one.cancelled]:
                        job.streams.remove(stream)
                        self._end(stream, "cancelled")
                    if not job.streams:
                        jobs.remove(job)

    def _admit(self) -> None:
        """Begin to read the prompts for which there will be slots."""
        taken = self.live + sum(len(job.streams) for job in self._reading)
        with self._lock:
            while self._waiting and taken + len(self._waiting[0].streams) <= self.slots:
                job = self._waiting[0]
                taken += len(job.streams)
                known = None if job.beginning is None or job.scored else self.prefixes.find(job.tokens)
                if known is not None and job.beginning is not None:
                    job.read, job.state, job.outputs = known
                    job.beginning.extend(job.tokens[: job.read])
                    for stream in job.streams:
                        stream.cached = job.read
                self._reading.append(self._waiting.popleft())

    def _read(self) -> None:
        """Read the next pieces of prompts, many of them in one call, and begin the streams of those that end."""
        jobs, together = self._next_jobs(), self._together
        if any(job.scored for job in jobs):  # outputs of all tokens take memory
            together = min(together, max(1, SCORED // (self.prefill * self.vocab)))
        for i in range(0, len(jobs), together):
            for job, error in self._read_pieces(jobs[i : i + together]):
                self._finish_reading(job)
                self._fail(job, error)
        for job in [job for job in self._reading if job.read == len(job.tokens)]:
            self._finish_reading(job)
            try:
                self._begin(job)
            except Exception as error:
                self._fail(job, error)

    def _next_jobs(self) -> list[_Reading]:
        """Return the prompts whose next pieces are read in this step, and let the others come before them in the next.

        Their pieces, with padding, have up to ``prefill`` tokens together. So the time of a step does not depend on the
        number of prompts.
        """
        jobs: list[_Reading] = []
        width = 0
        for job in self._reading:
            if size := min(self.prefill, len(job.tokens) - job.read):
                width = max(width, size)
                if (len(jobs) + 1) * width > self.prefill:
                    break
                jobs.append(job)
        chosen = set(jobs)
        with self._lock:
            self._reading = [*(job for job in self._reading if job not in chosen), *jobs]
        return jobs

    def _finish_reading(self, job: _Reading) -> None:
        with self._lock:
            self._reading.remove(job)

    def _read_pieces(self, jobs: list[_Reading]) -> list[tuple[_Reading, Exception]]:
        """Read the next piece of each of these prompts in one call -> prompts that the model rejects."""
        try:
            if jobs:
                self._read_together(jobs)
            return []
        except Exception as error:
            if len(jobs) == 1:
                return [(jobs[0], error)]
            # The states of several prompts were joined in a copy, so each can be read again without the others.
            unread = [job for job in jobs if job.read < len(job.tokens)]
            return [failed for job in unread for failed in self._read_pieces([job])]

    def _read_together(self, jobs: list[_Reading]) -> None:
        for job in jobs:
            if job.state is None:
                job.state = self._slotted(self.model.init_state(1, self.capacity))
        pieces = [job.tokens[job.read : job.read + self.prefill] for job in jobs]
        width = max(map(len, pieces))
        tokens = torch.tensor([[*piece, *[0] * (width - len(piece))] for piece in pieces], device=self.model.device)
        mask = None
        if any(len(piece) < width for piece in pieces):
            lengths = torch.tensor([[len(piece)] for piece in pieces], device=self.model.device)
            mask = torch.arange(width, device=self.model.device) < lengths
        joined = jobs[0].state if len(jobs) == 1 else states.join([job.state for job in jobs])
        model: Any = with_all_outputs(self.model) if any(job.scored for job in jobs) else self.model
        outputs, after = model(tokens, joined, mask=mask, donate=True)
        for i, (job, piece) in enumerate(zip(jobs, pieces, strict=True)):
            if job.scored:
                job.score(self.model, outputs[i, : len(piece)], piece)
            job.state = after if len(jobs) == 1 else states.select(after, [i])
            job.outputs = last = outputs[i : i + 1, len(piece) - 1].clone()
            job.read += len(piece)
            if job.beginning is not None:
                job.beginning.extend(piece)
                self.prefixes.keep(job.beginning, job.state, last)

    def _begin(self, job: _Reading) -> None:
        assert job.outputs is not None
        assert job.state is not None
        if not job.streams[0].max_new_tokens:
            for stream in job.streams:
                self._end(stream, "length")
            return
        first = job.outputs.expand(len(job.streams), -1)
        for stream, found in zip(job.streams, self._drawn(first, job.streams), strict=True):
            token, reason, error = self._emit(stream, found)
            if reason is None:
                slot = len(self.rows)
                states.put(self.state, [slot], self._slotted(job.state))
                self._live = None
                self.rows.append(stream)
                self._next.append(token)
            else:
                if stream.keeps and reason != "error":
                    stream.state = states.clone(job.state)
                self._end(stream, reason, error)

    def _slotted(self, state: DecoderState) -> DecoderState:
        return states.fix_capacity(state, self.capacity) if self._fixed else state

    def _decode(self) -> None:
        """Advance every live stream by one token."""
        n = len(self.rows)
        known = self._live
        rows = pytree.tree_map(lambda t: t[:n], self.state) if known is None else known
        tokens = torch.tensor(self._next, device=self.model.device)[:, None]
        try:
            outputs, after = self._advance(tokens, rows)
        except Exception as error:
            # Their states may be overwritten in part.
            for i in reversed(range(n)):
                self._leave(i, "error", _told(error))
            return
        if known is None or not self._in_place:
            self._keep(after, n)
        else:
            self.state.position[:n] = after.position
        drawn = self._drawn(outputs[:, 0], self.rows)
        for i in reversed(range(n)):
            self._next[i], reason, error = self._emit(self.rows[i], drawn[i])
            if reason is not None:
                self._leave(i, reason, error)

    def _keep(self, after: DecoderState, n: int) -> None:
        """Copy what a step has not overwritten: it may return new tensors instead of those of the pool."""
        moved = 0
        for old, new in zip(pytree.tree_leaves(self.state), pytree.tree_leaves(after), strict=True):
            if new.data_ptr() != old.data_ptr():
                old[:n] = new
                moved += 1
        # Then only the position is new in each step, until a stream comes or goes.
        self._in_place = moved == 1 and after.position.data_ptr() != self.state.position.data_ptr()

    def _advance(self, tokens: Tensor, rows: DecoderState) -> tuple[Tensor, DecoderState]:
        """Advance all rows by a token, by the native decoder if it supports the model."""
        if self._engine is None or self._engine.model is not self.model or forced_backend() not in NATIVE:
            self._live = None
            return self.model(tokens, rows, donate=True)
        # The native decoder checks a state unless it has returned it.
        outputs, self._live = self._engine(tokens, rows if self._live is None else self._live)
        return outputs, self._live

    def _drawn(self, outputs: Tensor, streams: list[Stream]) -> list[_Drawn | Exception]:
        """Draw the next token of each stream; an error is that of the rows that have it."""
        try:
            return list(self._draw(outputs, streams))
        except Exception as error:
            if len(streams) == 1:
                return [error]
            return [found for i, stream in enumerate(streams) for found in self._drawn(outputs[i : i + 1], [stream])]

    def _draw(self, outputs: Tensor, streams: list[Stream]) -> list[_Drawn]:
        scores = self.model.likelihood.log_probs(outputs)
        positions = torch.tensor([len(stream.tokens) for stream in streams], device=outputs.device)
        tokens = sample(scores, [stream.sampling for stream in streams], positions)
        values = scores.gather(-1, tokens[:, None])[:, 0].tolist()
        tops: list[dict[int, float]] = [{} for _ in streams]
        for row, stream in enumerate(streams):
            if stream.top:
                best = scores[row].topk(stream.top)
                tops[row] = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return list(zip(tokens.tolist(), values, tops, strict=True))

    def _emit(self, stream: Stream, found: _Drawn | Exception) -> tuple[int, Reason | None, str]:
        """Give a stream its next token -> the token, and why the stream ends with it, if it does."""
        if isinstance(found, Exception):
            return 0, "error", _told(found)
        token, value, top = found
        if value != value:
            return 0, "error", "the model's outputs are not numbers"
        stream.tokens.append(token)
        stream.log_probs.append(value)
        if stream.top:
            stream.top_log_probs.append(top)
        if error := self._tell(stream, token):
            return token, "error", error
        if token in stream.stop:
            return token, "stop", ""
        return token, "length" if len(stream.tokens) == stream.max_new_tokens else None, ""

    def _end(self, stream: Stream, reason: Reason, error: str = "") -> None:
        if stream.finished is None:
            stream.finished, stream.error = reason, error
            if (error := self._tell(stream, None)) and reason != "error":
                stream.finished, stream.error = "error", error

    def _tell(self, stream: Stream, token: int | None) -> str:
        """Call the listener of a stream -> the error that it raised; other streams go on."""
        try:
            if stream.listener is not None:
                stream.listener(stream, token)
        except Exception as error:
            return f"the listener raised {_told(error)}"
        return ""

    def _leave(self, row: int, reason: Reason, error: str = "") -> None:
        """Free a row: the last one takes its place."""
        self._live = None
        stream = self.rows[row]
        if stream.keeps and reason in ("stop", "length"):
            stream.state = states.select(self.state, [row])
        last = len(self.rows) - 1
        if row != last:
            for t in pytree.tree_leaves(self.state):
                t[row] = t[last]
            self.rows[row], self._next[row] = self.rows[last], self._next[last]
        self.rows.pop()
        self._next.pop()
        self._end(stream, reason, error)

    def _fail(self, job: _Reading, error: Exception) -> None:
        """End the streams of a prompt that the model rejects."""
        for stream in job.streams:
            if stream not in self.rows:
                self._end(stream, "error", _told(error))


def _at_least(least: int, name: str, value: Any) -> int:
    """Return a whole number. Raises ValueError if it is none, or below ``least``."""
    if (number := as_int(name, value)) < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    return number


def _tokens(name: str, given: Any, vocab: int) -> tuple[int, ...]:
    """Return tokens as ints; a million of them take milliseconds. Raises ValueError for what are no tokens."""
    if isinstance(given, Tensor):
        if given.dtype == torch.bool or given.is_floating_point() or given.is_complex():
            raise ValueError(f"{name} must be whole numbers, not {given.dtype}")
        if given.dim() != 1 and (given.dim() != 2 or len(given) != 1):
            raise ValueError(f"{name} must be (N,) or (1, N), not {tuple(given.shape)}; each prompt is its own stream")
        given = given.flatten().tolist()
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(
            f"{name} must be a list of tokens, not {format_value(given)}; the tokens of a model of bytes are those of "
            f"text.encode()"
        )
    found = tuple(given)
    if not set(map(type, found)) <= {int}:
        found = tuple(as_int(f"a token of {name}", token) for token in found)
    if odd := [token for token in set(found) if not 0 <= token < vocab]:
        raise ValueError(f"token {odd[0]} is not among 0 to {vocab - 1}")
    return found


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
