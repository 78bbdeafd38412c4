"""Speculative decoding: a draft of several tokens is read in one call, and what was drawn otherwise is undone.

A token is drawn as without a draft, and a drafted token counts if it is the one drawn. So neither text nor outputs
depend on the draft.

References:
    Leviathan et al. 2022 (2211.17192). Drafts from the text itself: Saxena 2023, prompt lookup decoding.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .. import states
from ..models.decoder import Decoder
from .native_decoder import Engine

COMPARED = range(5, 1, -1)  # the last tokens that prompt lookup looks for, the longest first
MOST_PAUSE = 64  # steps without a draft, after drafts that failed

Propose = Callable[[Tensor, int], Tensor]
"""(tokens so far (B,T), count) -> drafted tokens (B,K), K at most count; K = 0 drafts none"""
Draft = Literal["prompt-lookup"] | Decoder | Propose
PROMPT_LOOKUP: Literal["prompt-lookup"] = "prompt-lookup"


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


class Pace:
    """The number of tokens to draft, from how many of the earlier drafts were accepted.

    After a draft that was accepted as a whole it doubles, up to ``most``. Otherwise the next draft has as many tokens
    as were accepted. After a draft without an accepted token, the next 4, 16 and then 64 steps have none. A draft with
    one halves the number of failures that count, so drafts that are wrong more often than right become rare.

    Args:
        most: Tokens of a draft at most.
    """

    def __init__(self, most: int):
        self.most = self.size = most
        self.pause = self.failures = 0
        self.drafted = self.accepted = 0

    def wanted(self, most: int) -> int:
        """Return how many tokens to draft in this step, at most ``most``."""
        if self.pause or most < 1:
            self.pause = max(0, self.pause - 1)
            return 0
        return min(self.size, most)

    def learn(self, drafted: int, accepted: int) -> None:
        """Note the end of a draft."""
        self.drafted += drafted
        self.accepted += accepted
        self.failures = self.failures // 2 if accepted else self.failures + 1
        self.pause = min(MOST_PAUSE, 4**self.failures) if self.failures else 0
        self.size = max(1, min(self.most, 2 * accepted) if accepted == drafted else accepted)


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
        self.engine, self.tokens, self.left = engine, prompt, total
        self.drawn: list[Tensor] = []  # tokens that ``tokens`` does not have yet
        self.propose = PromptLookup() if draft == PROMPT_LOOKUP else draft
        if isinstance(draft, Decoder):
            self.propose = DraftModel(draft)
        self.pace = Pace(most)
        self.ahead = prompt[:, :0]  # drafted tokens that were read and are still to be drawn
        self.hits = 0  # those of the same draft that were drawn
        self.length = 0  # of that draft
        self.outputs = torch.empty(0)  # (B,K+1,size) after the last token and those ahead

    def __call__(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the outputs (B,1,size) after ``token`` (B,1), and the next state."""
        self.drawn.append(token)
        self.left -= 1
        if self.ahead.shape[1]:
            if torch.equal(token, self.ahead[:, :1]):
                self.hits += 1
                self.ahead, self.outputs = self.ahead[:, 1:], self.outputs[:, 1:]
                if not self.ahead.shape[1]:
                    self.pace.learn(self.length, self.hits)
                return self.outputs[:, :1], state
            state = states.rewind(state, tokens=self.ahead.shape[1])
            self.pace.learn(self.length, self.hits)
            self.ahead = self.ahead[:, :0]
        draft = self._draft()
        if draft is None:
            return self.engine(token, states.settle(state))
        self.ahead, self.hits, self.length = draft, 0, draft.shape[1]
        self.outputs, state = self.engine.verify(torch.cat([token, draft], 1), state)
        return self.outputs[:, :1], state

    def _draft(self) -> Tensor | None:
        # The last token is drawn, and never read.
        if not (count := self.pace.wanted(self.left - 1)):
            return None
        self.tokens, self.drawn = torch.cat([self.tokens, *self.drawn], 1), []
        draft: Any = self.propose(self.tokens, count)  # pyright: ignore[reportCallIssue] (a function by now)
        fits = isinstance(draft, Tensor) and draft.dim() == 2 and len(draft) == len(self.tokens)
        if not fits or draft.dtype != torch.int64 or draft.shape[1] > count:
            came = f"{draft.dtype} {tuple(draft.shape)}" if isinstance(draft, Tensor) else type(draft).__name__
            raise ValueError(f"a draft must be int64 ({len(self.tokens)}, K) with K at most {count}, not {came}")
        return draft if draft.shape[1] else None


class Lookup:
    """Drafts what followed the last tokens of a text where they stood before, in the prompt or in what was drawn.

    Args:
        tokens: The text so far.
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self.tokens: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}  # where tokens in a row have ended
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the next tokens."""
        known, text = len(self.tokens), self.tokens
        text += tokens
        for end in range(max(1, known), len(text)):
            self.ends.update((tuple(text[end - n : end]), end) for n in COMPARED if n <= end)

    def draft(self, count: int) -> list[int]:
        """Return up to ``count`` tokens, none if the last ones are new."""
        text = self.tokens
        place = next((self.ends[last] for n in COMPARED if (last := tuple(text[-n:])) in self.ends), len(text))
        return text[place : place + count]


class PromptLookup:
    """Drafts the texts of a batch by ``Lookup``."""

    def __init__(self):
        self.rows: list[Lookup] = []
        self.known = 0

    def __call__(self, tokens: Tensor, count: int) -> Tensor:
        """See ``Propose``. Nothing is drafted unless every row finds something."""
        if not self.rows:
            self.rows = [Lookup() for _ in tokens]
        found = []
        for row, new in zip(self.rows, tokens[:, self.known :].tolist(), strict=True):
            row.extend(new)
            found.append(row.draft(count))
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
