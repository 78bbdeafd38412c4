"""Streams: the tokens of one request as they are drawn."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..generation.drafting import Lookup, Pace
from ..models.decoder import DecoderState
from ..models.sampling import Sampling
from .constraint import Constraint

Reason = Literal["stop", "length", "cancelled", "error"]


class Speculation:
    """Drafts of one stream, from its own text.

    Args:
        most: Tokens of a draft at most.
        text: The tokens before those drawn.
    """

    def __init__(self, most: int, text: Sequence[int]):
        self.pace, self.lookup = Pace(most), Lookup(text)

    def draft(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that may be drawn next."""
        return self.lookup.draft(count) if (count := self.pace.wanted(most)) else []

    def learn(self, draft: Sequence[int], drawn: Sequence[int]) -> None:
        """Note a draft, and the tokens drawn after it: those of it that were right, and one more."""
        self.lookup.extend(drawn)
        if draft:
            self.pace.learn(len(draft), min(len(draft), sum(a == b for a, b in zip(draft, drawn, strict=False))))


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
    constraint: Constraint | None = None
    """which tokens may be drawn; None: all"""
    speculation: Speculation | None = None  # None without drafts
    path: array | None = None  # all tokens before those drawn; None if no state of the stream goes to the prefix cache
    kept: int = 0  # tokens before its last state there

    @property
    def draft_tokens(self) -> int:
        """Tokens that were drafted so far."""
        return 0 if self.speculation is None else self.speculation.pace.drafted

    @property
    def accepted_draft_tokens(self) -> int:
        """Those of them that were drawn."""
        return 0 if self.speculation is None else self.speculation.pace.accepted


# A token, its log-probability, and the most likely tokens at its place.
Drawn = tuple[int, float, dict[int, float]]


def add_token(stream: Stream, drawn: Drawn | Exception) -> tuple[int, Reason | None, str]:
    """Give a stream its next token -> the token, and why the stream ends with it, if it does."""
    if isinstance(drawn, Exception):
        return 0, "error", error_text(drawn)
    token, value, top = drawn
    if value != value:
        return 0, "error", "the model's outputs are not numbers"
    stream.tokens.append(token)
    stream.log_probs.append(value)
    if stream.constraint is not None:
        stream.constraint.add(token)
    if stream.top:
        stream.top_log_probs.append(top)
    if error := _call_listener(stream, token):
        return token, "error", error
    if token in stream.stop:
        return token, "stop", ""
    return token, "length" if len(stream.tokens) == stream.max_new_tokens else None, ""


def end(stream: Stream, reason: Reason, error: str = "") -> None:
    """End a stream, unless it has ended."""
    if stream.finished is None:
        stream.finished, stream.error = reason, error
        if (error := _call_listener(stream, None)) and reason != "error":
            stream.finished, stream.error = "error", error


def _call_listener(stream: Stream, token: int | None) -> str:
    """Call the listener of a stream -> the error that it raised; other streams go on."""
    try:
        if stream.listener is not None:
            stream.listener(stream, token)
    except Exception as error:
        return f"the listener raised {error_text(error)}"
    return ""


def error_text(error: Exception) -> str:
    """Return the name and the message of an error."""
    return f"{type(error).__name__}: {error}"
