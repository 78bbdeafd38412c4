"""The rows of a pool: the streams that draw tokens, and their states in one preallocated state."""

from array import array
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import states
from ..compat.servable import Servable
from ..generation.native_decoder import Engine
from ..models.decoder import Decoder, DecoderState
from ..ops.backends import forced_backend
from .prefix_cache import PrefixCache
from .sampler import sample
from .streams import Drawn, Reason, Stream, add_token, end, error_text

NATIVE = ("auto", "native")  # forced backends with which the decode engine runs
COLUMNS = 32  # tokens of all drafts that one step reads: with more, the products take longer and not the weights


class Rows:
    """Streams that draw tokens: rows 0 to n-1 of a state. One that ends leaves its row to the last one.

    Streams with drafts come first, so that their rows are read in one call. Of a shorter draft, the rest of the call is
    padding, which is undone as the tokens that were drawn otherwise.

    Args:
        model: The model.
        slots: The most streams.
        capacity: Tokens of a stream; required for a state that keeps every token.
        prefixes: Where states of streams are kept.

    Raises:
        ValueError: For a state that keeps every token, without a capacity.
    """

    def __init__(self, model: Servable, slots: int, capacity: int, prefixes: PrefixCache):
        self.model, self.capacity, self.prefixes = model, capacity, prefixes
        with torch.no_grad():
            empty = model.init_state(slots, capacity)
            self.fixed = bool(capacity) and states.nbytes(empty) != states.nbytes(model.init_state(slots, capacity + 1))
            self.state = states.fix_capacity(empty, capacity) if self.fixed else empty
            if not self.fixed and states.nbytes(model.init_state(1, 1)) != states.nbytes(model.init_state(1, 2)):
                raise ValueError("this model's state keeps every token; pass capacity=, the most tokens of a stream")
        config: Any = getattr(model, "config", None)
        self.table = config.length if getattr(config, "positions", "") == "learned" else 0
        limits = [limit for limit in (capacity if self.fixed else 0, self.table) if limit]
        self.places = min(limits, default=0)  # tokens of a stream, start token included; 0 for any number
        self.engine: Engine | None = None
        if isinstance(model, Decoder) and forced_backend() in NATIVE and not Engine.why_not(model):
            self.engine = Engine(model)
        self.streams: list[Stream] = []
        self.drafting = 0  # the first streams, which have drafts
        self.tokens_drawn = 0
        self.next_tokens: list[int] = []  # the token that each row reads next
        self._live: DecoderState | None = None  # the rows that the engine returned, while no stream came or went
        self._in_place = False  # whether it is in the pool's tensors, except for its position

    def slotted(self, state: DecoderState) -> DecoderState:
        """Return a state with the capacity of the pool's, so that both can be read in one call."""
        return states.fix_capacity(state, self.capacity) if self.fixed else state

    def clear(self) -> None:
        """Forget all streams."""
        self.streams.clear()
        self.drafting = 0
        self.next_tokens.clear()

    def remove_cancelled(self) -> None:
        """End the streams that were cancelled."""
        for i in reversed(range(len(self.streams))):
            if self.streams[i].cancelled:
                self._leave(i, "cancelled")

    def begin(self, streams: list[Stream], state: DecoderState, outputs: Tensor) -> None:
        """Draw the first token of streams whose prompt is read, and give those that go on a row.

        Args:
            streams: The streams of one prompt.
            state: The state after the prompt, one row.
            outputs: The outputs (1,size) after it.
        """
        first = outputs.expand(len(streams), -1)
        self.tokens_drawn += len(streams)
        for stream, drawn in zip(streams, self._draw_each(first, streams), strict=True):
            token, reason, error = add_token(stream, drawn)
            if stream.speculation is not None:
                stream.speculation.learn([], stream.tokens)
            if reason is None:
                self._live = None
                row = len(self.streams)
                self.streams.append(stream)
                self.next_tokens.append(token)
                if stream.speculation is not None:
                    self._move(self.drafting, row)
                    row, self.drafting = self.drafting, self.drafting + 1
                    self.streams[row], self.next_tokens[row] = stream, token
                states.put(self.state, [row], self.slotted(state))
            else:
                if stream.keeps and reason != "error":
                    stream.state = states.clone(state)
                end(stream, reason, error)

    def decode(self) -> None:
        """Advance every stream by one token, or by those of its draft that are drawn."""
        drafts = self._drafts()
        # The later rows first, whose ends move no earlier one.
        if len(self.streams) > len(drafts):
            self._step(len(drafts))
        if drafts:
            self._verify(drafts)

    def _step(self, first: int) -> None:
        """Advance the streams from row ``first`` on by one token."""
        n = len(self.streams)
        known = None if first else self._live
        rows = pytree.tree_map(lambda t: t[first:n], self.state) if known is None else known
        tokens = torch.tensor(self.next_tokens[first:], device=self.model.device)[:, None]
        try:
            outputs, after = self._advance(tokens, rows)
        except Exception as error:
            # Their states may be overwritten in part.
            for i in reversed(range(first, n)):
                self._leave(i, "error", error_text(error))
            return
        if known is None or not self._in_place:
            self._keep(after, first, n)
        else:
            self.state.position[:n] = after.position
        if first:
            self._live = None
        drawn = self._draw_each(outputs[:, 0], self.streams[first:])
        self.tokens_drawn += n - first
        for i in reversed(range(first, n)):
            self.next_tokens[i], reason, error = add_token(self.streams[i], drawn[i - first])
            if (speculation := self.streams[i].speculation) is not None:
                speculation.learn((), self.next_tokens[i : i + 1])
            self._go_on(i, outputs[i - first], reason, error)

    def _go_on(self, row: int, outputs: Tensor, reason: Reason | None, error: str) -> None:
        """Cache the state of a row if it is due, and free the row if its stream has ended."""
        if reason != "error":
            self._checkpoint(row, outputs, reason is not None)
        if reason is not None:
            self._leave(row, reason, error)

    def _drafts(self) -> list[list[int]]:
        """Return the drafts of the first streams; none if all are empty."""
        if not self.drafting or not self._native():
            return []
        streams = self.streams[: self.drafting]
        if (room := COLUMNS // len(streams) - 1) < 2:
            return []
        if self.places:
            # Rows with a shorter draft read padding.
            room = min(room, self.places - 1 - int(self.state.position[: self.drafting].max()))
        drafts = []
        for stream in streams:
            assert stream.speculation is not None
            # The last token is drawn, and never read.
            drafts.append(stream.speculation.draft(min(room, stream.max_new_tokens - len(stream.tokens) - 1)))
        return drafts if any(drafts) else []

    def _verify(self, drafts: list[list[int]]) -> None:
        """Advance the first streams by the tokens of their drafts that they draw, and one more."""
        n, width = len(drafts), 1 + max(map(len, drafts))
        rows = pytree.tree_map(lambda t: t[:n], self.state)
        read = [[token, *draft] for token, draft in zip(self.next_tokens, drafts, strict=False)]
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in read])
        self._live = None
        try:
            assert self.engine is not None
            outputs, after = self.engine.verify(tokens, rows)
        except Exception as error:
            for i in reversed(range(n)):
                self._leave(i, "error", error_text(error))
            return
        counts, ends = [0] * n, {}  # tokens that each stream has drawn, and why some have ended
        going = list(range(n))
        for place in range(width):
            drawn = self._draw_each(outputs[going, place], [self.streams[i] for i in going])
            for i, one in zip(going, drawn, strict=True):
                self.next_tokens[i], reason, error = add_token(self.streams[i], one)
                counts[i] += 1
                if reason is not None:
                    ends[i] = reason, error
            going = [i for i in going if i not in ends and drafts[i][place : place + 1] == [self.next_tokens[i]]]
            if not going:
                break
        self.tokens_drawn += sum(counts)
        undone = torch.tensor([width - count for count in counts])
        self._keep(states.settle(states.rewind(after, tokens=undone)), 0, n)
        for i in reversed(range(n)):
            stream = self.streams[i]
            assert stream.speculation is not None
            stream.speculation.learn(drafts[i], stream.tokens[-counts[i] :])
            self._go_on(i, outputs[i, counts[i] - 1 : counts[i]], *ends.get(i, (None, "")))

    def _checkpoint(self, row: int, outputs: Tensor, ended: bool) -> None:
        """Cache the state of a stream that has ended, or has drawn enough tokens since the last one.

        Args:
            row: Its row, whose state has read all tokens but the last.
            outputs: The outputs (1,size) from which the last token was drawn.
            ended: Whether it has ended.
        """
        stream = self.streams[row]
        if stream.path is None:
            return
        read = len(stream.path) + len(stream.tokens) - 1
        if ended or read - stream.kept >= self.prefixes.every:
            stream.kept = read
            state = pytree.tree_map(lambda t: t[row : row + 1], self.state)
            self.prefixes.keep(stream.path + array("q", stream.tokens[:-1]), state, outputs, likely=ended)

    def _keep(self, after: DecoderState, first: int, n: int) -> None:
        """Copy what a step of rows first to n-1 has not overwritten: it may return tensors that are not the pool's."""
        moved = 0
        for old, new in zip(pytree.tree_leaves(self.state), pytree.tree_leaves(after), strict=True):
            if new.data_ptr() != old[first:].data_ptr():
                old[first:n] = new
                moved += 1
        # Then only the position is new in each step, until a stream comes or goes.
        self._in_place = moved == 1 and after.position.data_ptr() != self.state.position.data_ptr()

    def _native(self) -> bool:
        """Whether the native decoder runs the steps."""
        return self.engine is not None and self.engine.model is self.model and forced_backend() in NATIVE

    def _advance(self, tokens: Tensor, rows: DecoderState) -> tuple[Tensor, DecoderState]:
        """Advance rows by a token, by the native decoder if it supports the model."""
        if self.engine is None or not self._native():
            self._live = None
            return self.model(tokens, rows, donate=True)
        # The native decoder checks a state unless it has returned it.
        outputs, self._live = self.engine(tokens, rows)
        return outputs, self._live

    def _draw_each(self, outputs: Tensor, streams: list[Stream]) -> list[Drawn | Exception]:
        """Draw the next token of each stream; an error is that of the rows that have it."""
        try:
            return list(self._draw(outputs, streams))
        except Exception as error:
            if len(streams) == 1:
                return [error]
            alone = (self._draw_each(outputs[i : i + 1], [stream]) for i, stream in enumerate(streams))
            return [drawn for one in alone for drawn in one]

    def _draw(self, outputs: Tensor, streams: list[Stream]) -> list[Drawn]:
        scores = allowed = self.model.likelihood.log_probs(outputs)
        for row, stream in enumerate(streams):
            if stream.constraint is not None and (tokens := stream.constraint.allowed()) is not None:
                allowed = scores.clone() if allowed is scores else allowed
                allowed[row].masked_fill_(~tokens.to(scores.device), -torch.inf)
        positions = torch.tensor([len(stream.tokens) for stream in streams], device=outputs.device)
        tokens = sample(allowed, [stream.sampling for stream in streams], positions)
        values = scores.gather(-1, tokens[:, None])[:, 0].tolist()
        tops: list[dict[int, float]] = [{} for _ in streams]
        for row, stream in enumerate(streams):
            if stream.top:
                best = scores[row].topk(stream.top)
                tops[row] = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return list(zip(tokens.tolist(), values, tops, strict=True))

    def _leave(self, row: int, reason: Reason, error: str = "") -> None:
        """Free a row: the last one takes its place."""
        self._live = None
        stream = self.streams[row]
        if stream.keeps and reason in ("stop", "length"):
            stream.state = states.select(self.state, [row])
        if row < self.drafting:
            self.drafting -= 1
            self._move(self.drafting, row)
            row = self.drafting
        self._move(len(self.streams) - 1, row)
        self.streams.pop()
        self.next_tokens.pop()
        end(stream, reason, error)

    def _move(self, row: int, to: int) -> None:
        """Give a stream another row."""
        if row != to:
            for t in pytree.tree_leaves(self.state):
                t[to] = t[row]
            self.streams[to], self.next_tokens[to] = self.streams[row], self.next_tokens[row]
