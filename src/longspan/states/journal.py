"""States that can be rewound: a journal remembers the last inputs, and reads them again up to an earlier token.

A journal keeps two earlier states and the inputs of each call since. ``rewind`` takes an earlier state, and calls the
module with the inputs that remain. The next output is therefore the same, bit for bit, as if the other tokens had never
been read. This holds for every mechanism, since it needs no inverse of a recurrence, which would be unstable.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

TAKEN = ("mask", "segments", "donate")  # the arguments of a call with a journal


class Inputs(NamedTuple):
    """The inputs of one call."""

    x: Tensor  # (B,N,dim), or tokens (B,N)
    mask: Tensor | None  # (B,N) bool
    segments: Tensor | None  # (B,N) int64

    def cut(self, columns: slice) -> "Inputs":
        return self.map(lambda t: t[:, columns])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        mask, segments = (None if t is None else change(t) for t in (self.mask, self.segments))
        return Inputs(change(self.x), mask, segments)


class Mark(NamedTuple):
    """An earlier state, and the calls since."""

    state: Any
    calls: tuple[Inputs, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(call.x.shape[1] for call in self.calls)

    def real(self) -> Tensor:
        """(B,T) bool, the real tokens since."""
        return torch.cat([_mask(call) for call in self.calls], 1)


@dataclass(frozen=True, eq=False)
class Journal:
    """A state with a memory of the last tokens; pass it to the module like any state. See ``journal``."""

    state: Any
    """the ordinary state"""
    tokens: int
    """the number of tokens that can be undone, once as many were read"""
    older: Mark
    newer: Mark
    module: Callable[..., tuple[Tensor, Any]] | None = None
    """what has read the calls, and reads them again"""

    def read(self, module: Callable[..., tuple[Tensor, Any]], x: Tensor, given: dict[str, Any]) -> tuple[Tensor, Any]:
        """Call ``module(x, state, ...)`` and remember the inputs.

        More than ``tokens`` tokens are read in two calls, of which the second has the last ``tokens``.

        Raises:
            ValueError: for an argument that cannot be read again, or a journal of another module.
        """
        given = {name: value for name, value in given.items() if value is not None}
        if odd := [name for name in given if name not in TAKEN]:
            raise ValueError(f"a journal cannot read {odd[0]} again; call with {', '.join(TAKEN)}, or settle the state")
        if self.module not in (None, module):
            raise ValueError("the journal belongs to another module, which has read its last tokens; settle the state")
        inputs = Inputs(x, given.get("mask"), given.get("segments"))
        first = max(0, x.shape[1] - self.tokens)
        parts = [inputs.cut(slice(0, first)), inputs.cut(slice(first, None))] if first else [inputs]
        now, outputs = replace(self, module=module), []
        for part in parts:
            # The state of a mark is needed for later.
            donate = given.get("donate", False) and now.state is not now.newer.state
            y, state = _call(module, part, now.state, donate)
            outputs.append(y)
            now = now._after(part, state)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), now

    def _after(self, call: Inputs, state: Any) -> "Journal":
        if not call.x.shape[1]:
            return replace(self, state=state)
        # The caller may change its tensors later.
        newer = Mark(self.newer.state, (*self.newer.calls, call.map(torch.clone)))
        if newer.tokens < self.tokens:
            return replace(self, state=state, newer=newer)
        return replace(self, state=state, older=newer, newer=Mark(state))

    def rewindable(self) -> int:
        """See ``rewindable``."""
        return _fewest(Mark(None, self.older.calls + self.newer.calls))

    def settled(self) -> Any:
        """See ``settle``."""
        return self.state

    def rewound(self, counts: Tensor) -> "Journal":
        """See ``rewind``; ``counts`` are checked, and not all 0."""
        most = int(counts.max())
        # The calls since the older mark begin with those that it has, and end with those of the newer one.
        mark = self.newer
        if _fewest(mark) < most:
            mark = Mark(self.older.state, self.older.calls + self.newer.calls)
        calls = _without(mark, counts)
        state, donate = mark.state, False
        assert self.module is not None
        for call in calls:
            state, donate = _call(self.module, call, state, donate)[1], not torch.is_grad_enabled()
        kept = Mark(mark.state, calls)
        if mark is self.newer:
            return replace(self, state=state, newer=kept)
        return replace(self, state=state, older=Mark(mark.state), newer=kept)


def _call(module: Callable[..., tuple[Tensor, Any]], call: Inputs, state: Any, donate: bool) -> tuple[Tensor, Any]:
    given = {"mask": call.mask, "segments": call.segments, "donate": donate or None}
    return module(call.x, state, **{name: value for name, value in given.items() if value is not None})


def _mask(call: Inputs) -> Tensor:
    return torch.ones(call.x.shape[:2], dtype=torch.bool, device=call.x.device) if call.mask is None else call.mask


def _fewest(mark: Mark) -> int:
    """The number of real tokens since a mark, the least over the rows."""
    if all(call.mask is None for call in mark.calls):
        return mark.tokens
    return int(mark.real().sum(1).min())


def _without(mark: Mark, counts: Tensor) -> tuple[Inputs, ...]:
    """The calls since a mark without the last tokens: of all rows alike by fewer columns, else by masks."""
    if counts.dim() == 0 and all(call.mask is None for call in mark.calls):
        left, kept = mark.tokens - int(counts), []
        for call in mark.calls:
            kept.append(call.cut(slice(0, max(0, left))))
            left -= call.x.shape[1]
        return tuple(call for call in kept if call.x.shape[1])
    real = mark.real()
    from_end = real.flip(1).cumsum(1).flip(1)  # real tokens from here to the end
    real = real & (from_end > counts.to(real.device).reshape(-1, 1))
    used = int(real.any(0).nonzero().max()) + 1 if bool(real.any()) else 0
    calls, at = [], 0
    for call in mark.calls:
        n = min(call.x.shape[1], max(0, used - at))
        if n:
            calls.append(call.cut(slice(0, n))._replace(mask=real[:, at : at + n]))
        at += call.x.shape[1]
    return tuple(calls)


def _flatten(journal: Journal) -> tuple[list[Any], tuple[int, Any]]:
    """Flatten for pytree: tensors only, without the arguments that are None."""
    given = [
        (mark.state, [{name: t for name, t in call._asdict().items() if t is not None} for call in mark.calls])
        for mark in (journal.older, journal.newer)
    ]
    return [journal.state, *given], (journal.tokens, journal.module)


def _unflatten(parts: Any, facts: Any) -> Journal:
    state, *given = parts
    none = dict.fromkeys(Inputs._fields)
    older, newer = (Mark(before, tuple(Inputs(**(none | call)) for call in calls)) for before, calls in given)
    return Journal(state, facts[0], older, newer, facts[1])


pytree.register_pytree_node(Journal, _flatten, _unflatten)


def journal(state: Any, *, tokens: int) -> Any:
    """Return a state that remembers the inputs of its last tokens, so that they can be undone.

    Pass it to the same module in place of the state: an attention, a stack or a decoder. Each call reads its tokens
    once, as without a journal, and copies its inputs. A call of more than ``tokens`` tokens is read in two parts. The
    journal keeps two earlier states besides, and drops the older one every ``tokens`` tokens.

    Args:
        state: The state of an attention, a stack or a decoder.
        tokens: The number of last tokens that can be undone, at least 1.

    Returns:
        The journal. ``clone``, ``detach`` and ``select`` take it like any state; ``save``, ``join``, ``put`` and
        ``fix_capacity`` take what ``settle`` returns.

    Raises:
        ValueError: For a number below 1, or a state that is a journal.

    Example:
        >>> import torch, longspan
        >>> attention = longspan.build("gated_deltanet", dim=8, heads=2)
        >>> x = torch.randn(1, 6, 8)
        >>> state = longspan.states.journal(attention.init_state(1), tokens=4)
        >>> _, read = attention(x[:, :3], state)
        >>> _, state = attention(x[:, 3:5], read)
        >>> longspan.states.rewindable(state)
        5
        >>> state = longspan.states.rewind(state, tokens=2)
        >>> torch.equal(attention(x[:, 5:], state)[0], attention(x[:, 5:], read)[0])
        True
    """
    if isinstance(state, Journal):
        raise ValueError("the state is a journal already; settle it to begin another one")
    if type(tokens) is not int or tokens < 1:
        raise ValueError(f"tokens={tokens!r} must be a number of tokens, at least 1")
    return Journal(state, tokens, Mark(state), Mark(state))


def rewindable(state: Any) -> int:
    """Return how many of the last tokens can be undone, in every row; 0 for a state without a journal."""
    return state.rewindable() if hasattr(state, "rewindable") else 0


def rewind(state: Any, *, tokens: int | Tensor) -> Any:
    """Undo the last tokens.

    What is read next gives the same bits as if they had never been read, in calls that hold the other tokens alike. The
    module reads the remaining tokens since an earlier state again: fewer than three times the journal's ``tokens``.

    Args:
        state: A journal. It stays as it was, so that both can be continued.
        tokens: How many real tokens to undo: one number, or int64 (B,), one for each row. Rows that differ are read
            again with a mask.

    Returns:
        The journal before these tokens.

    Raises:
        ValueError: For a state without a journal, and for more tokens than ``rewindable``.
    """
    if not hasattr(state, "rewound"):
        raise ValueError(f"{type(state).__name__} cannot be rewound; begin with states.journal(state, tokens=...)")
    counts = torch.as_tensor(tokens)
    if counts.dim() > 1 or counts.is_floating_point() or counts.dtype == torch.bool:
        raise ValueError(f"tokens must be an integer, or integers (B,), not {counts.dtype} {tuple(counts.shape)}")
    least, most = (int(counts.min()), int(counts.max())) if counts.numel() else (0, 0)
    if least < 0 or most > rewindable(state):
        raise ValueError(
            f"tokens={most if least >= 0 else least} cannot be undone; this state can undo 0 to {rewindable(state)}"
        )
    return state.rewound(counts) if most else state


def settle(state: Any) -> Any:
    """Return the ordinary state of a journal; other states are returned as they are."""
    return state.settled() if hasattr(state, "settled") else state
