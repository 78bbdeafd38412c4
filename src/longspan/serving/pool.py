"""A pool of slots: each decode step advances all live streams, which come and go between steps."""

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from .. import states
from .._utils.typecheck import as_int, check_type, format_value
from ..adapt import FrozenStates
from ..attention.base import Attention
from ..compat.servable import Servable, servable
from ..generation import drafting
from ..generation.drafting import PROMPT_LOOKUP
from ..generation.native_decoder import Engine
from ..generation.sampling import afford_rows
from ..models.decoder import Decoder, DecoderState
from ..models.sampling import Sampling
from ..states.utils import check_like, grow_capacity
from .constraint import Constraint
from .prefix_cache import PrefixCache
from .reader import Prompt, Reader
from .rows import Rows
from .streams import Speculation, Stream, end


class Full(Exception):
    """The queue of waiting streams is full; try again later."""


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
        prefix_bytes: Memory for states of texts that were read or drawn before; 0 for none.
        checkpoint_every: Tokens of a text between these states; 0 takes ``prefill``. A prompt has them after whole
            pieces only, so at least ``prefill`` tokens apart, and where it parts from another one, and at its end.
        draft_tokens: Tokens of a draft at most, for streams that ask for drafts; 0 refuses them. Many such streams at a
            time have shorter drafts, and more than 10 have none.

    Raises:
        ValueError: For a model of another kind or in training mode, an attention whose states cannot be joined, such as
            ``informer``, numbers out of range, and a pool that does not fit into the memory of this machine.
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
        checkpoint_every: int = 0,
        draft_tokens: int = 4,
    ):
        model = servable(model)
        if model.training:
            raise ValueError("the model is in training mode; call model.eval()")
        if single := sorted({one.name for one in _attentions(model) if not one.joinable}):
            raise ValueError(
                f"a pool cannot serve {' and '.join(single)}, whose states after different numbers of tokens do not "
                "fit into one; use longspan.generate, which reads prompts of one length"
            )
        slots, queue, capacity, prefill, prefix_bytes, checkpoint_every, draft_tokens = (
            _at_least(least, name, value)
            for name, value, least in (
                ("slots", slots, 1),
                ("queue", queue, 0),
                ("capacity", capacity, 0),
                ("prefill", prefill, 1),
                ("prefix_bytes", prefix_bytes, 0),
                ("checkpoint_every", checkpoint_every, 0),
                ("draft_tokens", draft_tokens, 0),
            )
        )
        afford_rows(cast(Any, model), slots, capacity, f"the states of {slots} slots")
        self.slots, self.queue, self.capacity, self.prefill = slots, queue, capacity, prefill
        self.draft_tokens = draft_tokens
        self.prefixes = PrefixCache(prefix_bytes, checkpoint_every or prefill)
        self._rows = Rows(model, slots, capacity, self.prefixes)
        self._reader = Reader(self._rows, slots, prefill, self.prefixes)

    @property
    def model(self) -> Servable:
        """The model."""
        return self._rows.model

    @model.setter
    def model(self, model: Servable) -> None:
        self._rows.model = model

    @property
    def state(self) -> DecoderState:
        """The states of all slots."""
        return self._rows.state

    @property
    def rows(self) -> list[Stream]:
        """The streams that draw tokens, in the order of their rows."""
        return self._rows.streams

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.model.likelihood.levels

    @property
    def native(self) -> Engine | None:
        """The native decoder that runs the decode steps; None where the model runs them."""
        return self._rows.engine

    @property
    def live(self) -> int:
        """Streams that draw tokens."""
        return len(self.rows)

    @property
    def waiting(self) -> int:
        """Streams whose prompt is not read yet."""
        return len(self._reader.streams)

    @property
    def tokens_read(self) -> int:
        """Tokens of prompts read so far, without those whose state was known."""
        return self._reader.tokens_read

    @property
    def tokens_drawn(self) -> int:
        """Tokens drawn so far."""
        return self._rows.tokens_drawn

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.rows and self._reader.idle

    def room(self, tokens: int) -> float:
        """Return how many tokens can be drawn after this many; infinite if nothing limits them."""
        read = tokens + (self.model.start is not None) - 1
        return min((limit - read for limit, _ in self._places()), default=math.inf)

    def _places(self) -> list[tuple[int, str]]:
        """Return the limits of the tokens of a stream, with their names."""
        found = [(self.capacity if self._rows.fixed else 0, "capacity"), (self._rows.table, "the table of positions")]
        return [(limit, what) for limit, what in found if limit]

    def submit(
        self,
        prompt: Sequence[int] | Tensor = (),
        *,
        max_new_tokens: int,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Sequence[int] = (),
        state: DecoderState | None = None,
        history: Sequence[int] | Tensor | None = None,
        adapter: FrozenStates | None = None,
        keep_state: bool = False,
        top: int = 0,
        score_prompt: bool = False,
        draft: Literal["prompt-lookup"] | None = None,
        constraint: Callable[[], Constraint] | None = None,
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
            history: The tokens that this state has read, without the start token, so that the prefix cache can keep the
                states that follow. None keeps none.
            adapter: A state adapter from which the sequence starts, or has started before ``state``; see
                ``longspan.adapt``. Streams with different adapters run together at the same cost, and share no cached
                state.
            keep_state: Keep each stream's state at its end.
            top: Record this many of the most likely tokens at each place.
            score_prompt: Record the log-probabilities of the prompt's tokens too. Such a prompt is read whole.
            draft: Read several tokens in one step where the text repeats what stood before. The tokens are the same, to
                the bit; the number of drafted ones follows that of accepted ones. Requires a model that the native
                decoder supports.
            constraint: Makes an object for each stream: its ``allowed()`` returns which tokens may come next, (V,) bool
                or None for all, and ``add(token)`` notes the one that was drawn. Recorded log-probabilities are those
                of the model. None allows all tokens.
            listener: Called from ``step`` with each token of a stream, and with None at its end. An error that it
                raises ends its stream.

        Returns:
            The streams, one for each of ``sampling``.

        Raises:
            ValueError: For tokens and numbers of another type or out of range, a state that is not one row of this
                model or has read another number of tokens than ``history``, an adapter of another model, more tokens
                than ``capacity``, and drafts for a model that cannot have them.
            Full: If the queue is full.
        """
        given, ends = _check_tokens("prompt", prompt, self.vocab), frozenset(_check_tokens("stop", stop, self.vocab))
        if (top := _at_least(0, "top", top)) > self.vocab:
            raise ValueError(f"top={top} must be a number of tokens from 0 to {self.vocab}")
        check_type("keep_state", keep_state, bool)
        check_type("score_prompt", score_prompt, bool)
        max_new_tokens = _at_least(0 if score_prompt and not keep_state else 1, "max_new_tokens", max_new_tokens)
        if not (listener is None or callable(listener)):
            raise ValueError(f"listener={format_value(listener)} must be a function of a stream and a token, or None")
        if draft not in (None, PROMPT_LOOKUP):
            raise ValueError(f"draft={format_value(draft)} must be {PROMPT_LOOKUP!r} or None")
        if draft is not None and (reason := self.why_not_draft()):
            raise ValueError(reason)
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
        if not isinstance(adapter, FrozenStates | None):
            raise ValueError(f"adapter must be InitialStates.frozen() or None, not {type(adapter).__name__}")
        if adapter is not None and self._tokens_read(adapter.state, "adapter"):
            raise ValueError("adapter must have a state before the first token")
        before = 0 if state is None else self._tokens_read(state)
        known = None if history is None else (*start, *_check_tokens("history", history, self.vocab))
        if known is not None and (state is None or len(known) != before):
            came = "no state was given" if state is None else f"the state has read {before - len(start)}"
            raise ValueError(f"history has {len(known) - len(start)} tokens, but {came}")
        # Limits of positions and of KV caches. A start token takes a place; the last token drawn is never read.
        needed = before + len(given) + max_new_tokens + (len(start) if state is None else 0) - 1
        for limit, what in self._places():
            if needed > limit:
                raise ValueError(
                    f"{len(given)} tokens of prompt and {max_new_tokens} new ones need {needed} places, but {what} has "
                    f"{limit}"
                )
        streams = [Stream(given, max_new_tokens, way, ends, listener, keeps=keep_state, top=top) for way in ways]
        tokens = given if state is not None else (*start, *given)
        with torch.no_grad():
            # Of one kind, so that prompts after a state and others are read in one call.
            own = None if state is None else self._rows.slotted(states.clone(state))
        if constraint is not None:
            for stream in streams:
                stream.constraint = constraint()
        for stream in streams[1:]:
            stream.prompt_log_probs = streams[0].prompt_log_probs
            stream.prompt_top_log_probs = streams[0].prompt_top_log_probs
        if draft is not None:
            for stream in streams:
                stream.speculation = Speculation(self.draft_tokens, (*(known or ()), *tokens))
        path = None
        if self.prefixes.limit and (state is None or known is not None):
            path = array("q", (*(known or ()), *tokens))
            if adapter is not None:
                # In place of the first token, so that no state of another adapter has the same tokens.
                path[0] = -1 - int(hashlib.sha256(f"{adapter.sha256} {path[0]}".encode()).hexdigest()[:15], 16)
        for stream in streams:
            stream.path, stream.kept = path, len(tokens) + before
        first = None if adapter is None else adapter.state
        new = Prompt(streams, tokens, own, first=first, path=path, kept=before, scored=score_prompt)
        with self._reader.lock:
            if self.waiting + len(streams) > self.queue + max(0, self.slots - self.live):
                raise Full(f"{self.waiting} streams wait for {self.slots} slots; try again later")
            self._reader.waiting.append(new)
        return streams

    def why_not_draft(self) -> str:
        """Return why streams cannot have drafts; "" if they can."""
        if not self.draft_tokens:
            return "draft is refused by this pool: draft_tokens=0"
        reason = drafting.why_not(self.model, PROMPT_LOOKUP) if self.native is None else ""
        return f"draft is not possible with this model: {reason}" if reason else ""

    def cancel(self, stream: Stream) -> None:
        """End a stream before the next step; an ended one stays as it is."""
        stream.cancelled = True

    @torch.no_grad()
    def step(self) -> int:
        """Read a piece of the waiting prompts, and draw a token for every live stream -> the number of live streams."""
        self._rows.remove_cancelled()
        self._reader.remove_cancelled()
        self._reader.admit()
        self._reader.read()
        if self.rows:
            self._rows.decode()
        return self.live

    def fail(self, error: str) -> None:
        """End all streams with an error, after a step has raised one."""
        with self._reader.lock:
            streams = [*self.rows, *self._reader.streams]
            self._reader.clear()
            self._rows.clear()
        for stream in streams:
            end(stream, "error", error)

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

    def _tokens_read(self, state: DecoderState, name: str = "state") -> int:
        """Return the number of tokens that a given state has read. Raises ValueError unless it is one row of ours."""
        like = grow_capacity(self.model.init_state(1, 0))
        try:
            check_like(grow_capacity(state), like)
        except ValueError as error:
            raise ValueError(f"{name} does not fit this model: {error}") from error
        if (rows := len(state.position)) != 1:
            raise ValueError(f"{name} has {rows} rows; pass one of them, as longspan.states.select(state, [0])")
        return int(state.position[0])


def _attentions(model: Any) -> Iterator[Attention]:
    """All attentions of a decoder, those that are options of others included; none of other models."""
    return (part for part in model.modules() if isinstance(part, Attention)) if isinstance(model, Decoder) else iter(())


def _at_least(least: int, name: str, value: Any) -> int:
    """Return a whole number. Raises ValueError if it is none, or below ``least``."""
    if (number := as_int(name, value)) < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    return number


def _check_tokens(name: str, given: Any, vocab: int) -> tuple[int, ...]:
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
