"""Speculative decoding: a draft of several tokens is read in one call, and what was drawn otherwise is undone.

A token is drawn as without a draft, and a drafted token counts if it is the one drawn. So neither text nor outputs
depend on the draft.

References:
    Leviathan et al. 2022 (2211.17192). Drafts from the text itself: Saxena 2023, prompt lookup decoding.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from .. import states
from ..models.decoder import Decoder
from .native_decoder import Engine

COMPARED = range(5, 1, -1)  # the last tokens that prompt lookup looks for, the longest first
MOST_PAUSE = 32  # steps without a draft, after drafts that failed

Propose = Callable[[Tensor, int], Tensor]
"""(tokens so far (B,T), count) -> drafted tokens (B,K), K at most count; K = 0 drafts none"""
Draft = Literal["prompt-lookup"] | Decoder | Propose
PROMPT_LOOKUP = "prompt-lookup"


def why_not(model: Any, draft: Any) -> str:
    """Return why a model cannot read drafts, or this is not a draft for it; "" if all is well."""
    if not isinstance(model, Decoder):
        return f"a {type(model).__name__} cannot undo tokens"
    if reason := Engine.why_not(model):
        return f"only the decode engine can undo tokens, and it does not support this decoder: {reason}"
    if isinstance(draft, Decoder):
        if draft.config.vocab != model.config.vocab:
            return f"the draft has {draft.config.vocab} tokens, and the model has {model.config.vocab}"
        return f"the draft needs the decode engine: {reason}" if (reason := Engine.why_not(draft)) else ""
    if draft == PROMPT_LOOKUP or (callable(draft) and not isinstance(draft, torch.nn.Module)):
        return ""
    return f"a draft is {PROMPT_LOOKUP!r}, a Decoder or a function of tokens and a count, not {draft!r}"


class Speculation:
    """A decode step that reads drafts: it takes and returns what the engine does, with the same bits.

    The number of drafted tokens follows the number of accepted ones. After a draft that failed as a whole, no more are
    drafted for a while.

    Args:
        engine: The engine of the model.
        draft: What drafts.
        prompt: (B,P) int64.
        most: Tokens of a draft at most.
        total: Tokens that will be drawn.
    """

    def __init__(self, engine: Engine, draft: Draft, prompt: Tensor, most: int, total: int):
        self.engine, self.tokens, self.most, self.end = engine, prompt, most, prompt.shape[1] + total
        self.propose = PromptLookup() if draft == PROMPT_LOOKUP else draft
        if isinstance(draft, Decoder):
            self.propose = DraftModel(draft)
        self.size, self.pause, self.failures = most, 0, 0
        self.drafted = self.accepted = 0
        self.ahead = prompt[:, :0]  # drafted tokens that were read and are still to be drawn
        self.hits = 0  # those of the same draft that were drawn
        self.outputs = torch.empty(0)  # (B,K+1,size) after the last token and those ahead

    def __call__(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the outputs (B,1,size) after ``token`` (B,1), and the next state."""
        self.tokens = torch.cat([self.tokens, token], 1)
        if self.ahead.shape[1]:
            if torch.equal(token, self.ahead[:, :1]):
                self.hits += 1
                self.ahead, self.outputs = self.ahead[:, 1:], self.outputs[:, 1:]
                if not self.ahead.shape[1]:
                    self._learn(min(self.most, 2 * self.hits))
                return self.outputs[:, :1], state
            state = states.rewind(state, tokens=self.ahead.shape[1])
            self._learn(self.hits)
        draft = self._draft()
        if not draft.shape[1]:
            return self.engine(token, states.settle(state))
        self.ahead, self.hits = draft, 0
        self.drafted += draft.shape[1]
        self.outputs, state = self.engine.verify(torch.cat([token, draft], 1), state)
        return self.outputs[:, :1], state

    def _learn(self, size: int) -> None:
        """Note the end of a draft, and how many tokens to draft next."""
        self.accepted += self.hits
        self.failures = 0 if self.hits else self.failures + 1
        self.pause = 0 if self.hits else min(MOST_PAUSE, 2**self.failures)
        self.size, self.ahead = max(1, size), self.ahead[:, :0]

    def _draft(self) -> Tensor:
        # The last token is drawn, and never read.
        count = min(self.size, self.end - self.tokens.shape[1] - 1)
        if self.pause or count < 1:
            self.pause = max(0, self.pause - 1)
            return self.tokens[:, :0]
        draft: Any = self.propose(self.tokens, count)  # pyright: ignore[reportCallIssue] (a function by now)
        fits = isinstance(draft, Tensor) and draft.dim() == 2 and len(draft) == len(self.tokens)
        if not fits or draft.dtype != torch.int64 or draft.shape[1] > count:
            came = f"{draft.dtype} {tuple(draft.shape)}" if isinstance(draft, Tensor) else type(draft).__name__
            raise ValueError(f"a draft must be int64 ({len(self.tokens)}, K) with K at most {count}, not {came}")
        return draft


class PromptLookup:
    """Drafts what followed the last tokens where they stood before, in the prompt or in what was drawn."""

    def __init__(self):
        self.rows: list[list[int]] = []
        self.ends: list[dict[tuple[int, ...], int]] = []  # of each row, where tokens in a row have ended
        self.known = 0

    def __call__(self, tokens: Tensor, count: int) -> Tensor:
        """See ``Propose``. Nothing is drafted unless every row finds something."""
        if not self.rows:
            self.rows, self.ends = [[] for _ in tokens], [{} for _ in tokens]
        found = []
        for row, ends, new in zip(self.rows, self.ends, tokens[:, self.known :].tolist(), strict=True):
            row += new
            for end in range(max(1, self.known), len(row)):
                ends.update((tuple(row[end - n : end]), end) for n in COMPARED if n <= end)
            place = next((ends[last] for n in COMPARED if (last := tuple(row[-n:])) in ends), len(row))
            found.append(row[place : place + count])
        self.known = tokens.shape[1]
        shortest = min(map(len, found), default=0)
        return torch.tensor([draft[:shortest] for draft in found], dtype=torch.int64).reshape(len(tokens), shortest)


class DraftModel:
    """Drafts the most likely tokens of a smaller decoder."""

    def __init__(self, model: Decoder):
        self.model, self.engine = model, Engine(model)
        self.state: Any = None
        self.known = 0

    @torch.no_grad()
    def __call__(self, tokens: Tensor, count: int) -> Tensor:
        """See ``Propose``."""
        if self.state is None:
            start = tokens.new_full((len(tokens), 1), self.model.start)
            state = self.model.init_state(len(tokens), tokens.shape[1] + count)
            outputs, self.state = self.model(torch.cat([start, tokens], 1), state, donate=True)
        else:
            outputs, self.state = self.engine.verify(tokens[:, self.known :], self.state)
        self.state, self.known = states.settle(self.state), tokens.shape[1]
        # What it drafts is read on a copy, since it may be undone.
        drafted, state, output = [], states.clone(self.state), outputs[:, -1]
        for i in range(count):
            drafted.append(self.model.likelihood.sample(output, temperature=0.0))
            if i + 1 < count:
                outputs, state = self.engine(drafted[-1][:, None], state)
                output = outputs[:, 0]
        return torch.stack(drafted, 1)
