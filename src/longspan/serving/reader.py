"""The prompts of a pool: they wait, are read in pieces that take turns, and begin their streams."""

import itertools
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import states
from ..compat.servable import with_all_outputs
from ..models.decoder import DecoderState
from .prefix_cache import PrefixCache
from .rows import Rows
from .streams import Stream, end, error_text

COPIED = 1 << 27  # bytes of states that one reading of several prompts may copy
SCORED = 1 << 27  # outputs of all tokens that one reading of several scored prompts may have


@dataclass(eq=False)
class Prompt:
    """A prompt that waits or is being read, for one or more streams."""

    streams: list[Stream]
    tokens: tuple[int, ...]  # the start token included, where the prompt begins a sequence
    state: DecoderState | None  # None until it is read, since many prompts may wait
    first: DecoderState | None = None  # the state before the start token; None: that of the model
    read: int = 0
    outputs: Tensor | None = None
    path: array | None = None  # all tokens with those of the given state; None if no state of them may be cached
    kept: int = 0  # tokens of the path before its last cached state
    parting: int = 0  # where the prompt parts from other ones, and a piece ends; 0 for nowhere
    scored: bool = False

    def piece(self, most: int) -> tuple[int, ...]:
        """Return the next tokens to read."""
        end = self.read + most
        return self.tokens[self.read : min(end, self.parting) if self.read < self.parting else end]

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


class Reader:
    """Reads prompts, up to ``prefill`` tokens of all together in a call of ``read``.

    Args:
        rows: Where the streams of a prompt go once it is read.
        slots: The most streams.
        prefill: Tokens of all prompts together that are read per step.
        prefixes: States of prompts that were read before.
    """

    def __init__(self, rows: Rows, slots: int, prefill: int, prefixes: PrefixCache):
        self.rows, self.slots, self.prefill, self.prefixes = rows, slots, prefill, prefixes
        # Prompts that are read in one call: their states are copied.
        self._per_call = max(1, COPIED * slots // max(1, states.nbytes(rows.state)))
        self.waiting: deque[Prompt] = deque()
        self.reading: list[Prompt] = []
        self.lock = threading.RLock()  # prompts come from any thread
        self.tokens_read = 0

    @property
    def idle(self) -> bool:
        """Whether no prompt waits or is being read."""
        return not (self.waiting or self.reading)

    @property
    def streams(self) -> list[Stream]:
        """The streams whose prompt is not read yet."""
        with self.lock:
            return [stream for prompt in itertools.chain(self.waiting, self.reading) for stream in prompt.streams]

    def clear(self) -> None:
        """Forget all prompts."""
        with self.lock:
            self.waiting.clear()
            self.reading.clear()

    def remove_cancelled(self) -> None:
        """End the streams that were cancelled."""
        with self.lock:
            for prompts in (self.waiting, self.reading):
                for prompt in list(prompts):
                    for stream in [one for one in prompt.streams if one.cancelled]:
                        prompt.streams.remove(stream)
                        end(stream, "cancelled")
                    if not prompt.streams:
                        prompts.remove(prompt)

    def admit(self) -> None:
        """Begin to read the prompts for which there will be slots."""
        taken = len(self.rows.streams) + sum(len(prompt.streams) for prompt in self.reading)
        with self.lock:
            while self.waiting and taken + len(self.waiting[0].streams) <= self.slots:
                prompt = self.waiting[0]
                taken += len(prompt.streams)
                if prompt.path is not None and prompt.state is None and not prompt.scored:
                    self._begin_at_known(prompt, prompt.path)
                self.reading.append(self.waiting.popleft())

    def _begin_at_known(self, prompt: Prompt, path: array) -> None:
        """Begin to read where the state of the longest beginning is known."""
        if (known := self.prefixes.find(path)) is not None:
            prompt.read, prompt.state, prompt.outputs = known
            prompt.kept = prompt.read
            for stream in prompt.streams:
                stream.cached = prompt.read
        prompt.parting = self.prefixes.parting(path, prompt.read)

    def read(self) -> None:
        """Read the next pieces of prompts, many of them in one call, and begin the streams of those that end."""
        prompts, per_call = self._choose(), self._per_call
        if any(prompt.scored for prompt in prompts):  # outputs of all tokens take memory
            per_call = min(per_call, max(1, SCORED // (self.prefill * self.rows.model.likelihood.levels)))
        for i in range(0, len(prompts), per_call):
            for prompt, error in self._read_pieces(prompts[i : i + per_call]):
                self._remove(prompt)
                self._fail(prompt, error)
        for prompt in [prompt for prompt in self.reading if prompt.read == len(prompt.tokens)]:
            self._remove(prompt)
            try:
                self._begin(prompt)
            except Exception as error:
                self._fail(prompt, error)

    def _choose(self) -> list[Prompt]:
        """Return the prompts whose next pieces are read in this step, and let the others come before them in the next.

        Their pieces, with padding, have up to ``prefill`` tokens together. So the time of a step does not depend on the
        number of prompts.
        """
        prompts: list[Prompt] = []
        width = 0
        for prompt in self.reading:
            if size := len(prompt.piece(self.prefill)):
                width = max(width, size)
                if (len(prompts) + 1) * width > self.prefill:
                    break
                prompts.append(prompt)
        chosen = set(prompts)
        with self.lock:
            self.reading = [*(prompt for prompt in self.reading if prompt not in chosen), *prompts]
        return prompts

    def _remove(self, prompt: Prompt) -> None:
        with self.lock:
            self.reading.remove(prompt)

    def _read_pieces(self, prompts: list[Prompt]) -> list[tuple[Prompt, Exception]]:
        """Read the next piece of each of these prompts in one call -> prompts that the model rejects."""
        try:
            if prompts:
                self._read_in_one_call(prompts)
            return []
        except Exception as error:
            if len(prompts) == 1:
                return [(prompts[0], error)]
            # The states of several prompts were joined in a copy, so each can be read again without the others.
            unread = [prompt for prompt in prompts if prompt.read < len(prompt.tokens)]
            return [failed for prompt in unread for failed in self._read_pieces([prompt])]

    def _read_in_one_call(self, prompts: list[Prompt]) -> None:
        for prompt in prompts:
            if prompt.state is None:
                first = prompt.first
                fresh = self.rows.model.init_state(1, self.rows.capacity) if first is None else states.clone(first)
                prompt.state = self.rows.slotted(fresh)
        pieces = [prompt.piece(self.prefill) for prompt in prompts]
        width = max(map(len, pieces))
        tokens = torch.tensor(
            [[*piece, *[0] * (width - len(piece))] for piece in pieces], device=self.rows.model.device
        )
        mask = None
        if any(len(piece) < width for piece in pieces):
            lengths = torch.tensor([[len(piece)] for piece in pieces], device=self.rows.model.device)
            mask = torch.arange(width, device=self.rows.model.device) < lengths
        joined = prompts[0].state if len(prompts) == 1 else states.join([prompt.state for prompt in prompts])
        model: Any = with_all_outputs(self.rows.model) if any(prompt.scored for prompt in prompts) else self.rows.model
        outputs, after = model(tokens, joined, mask=mask, donate=True)
        for i, (prompt, piece) in enumerate(zip(prompts, pieces, strict=True)):
            if prompt.scored:
                prompt.score(self.rows.model, outputs[i, : len(piece)], piece)
            prompt.state = after if len(prompts) == 1 else states.select(after, [i])
            prompt.outputs = last = outputs[i : i + 1, len(piece) - 1].clone()
            prompt.read += len(piece)
            self.tokens_read += len(piece)
            if prompt.path is not None:
                self._keep(prompt, prompt.path, last)

    def _keep(self, prompt: Prompt, path: array, outputs: Tensor) -> None:
        """Cache the state after a piece, if enough tokens came since the last one, or prompts part or end here."""
        depth = len(path) - len(prompt.tokens) + prompt.read
        likely = prompt.read in (prompt.parting, len(prompt.tokens))
        if likely or depth - prompt.kept >= self.prefixes.every:
            prompt.kept = depth
            self.prefixes.keep(path[:depth], prompt.state, outputs, likely=likely)

    def _begin(self, prompt: Prompt) -> None:
        assert prompt.outputs is not None
        assert prompt.state is not None
        if prompt.streams[0].max_new_tokens:
            self.rows.begin(prompt.streams, prompt.state, prompt.outputs)
            return
        for stream in prompt.streams:
            end(stream, "length")

    def _fail(self, prompt: Prompt, error: Exception) -> None:
        """End the streams of a prompt that the model rejects."""
        for stream in prompt.streams:
            if stream not in self.rows.streams:
                end(stream, "error", error_text(error))
