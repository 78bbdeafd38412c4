"""Undo the last tokens of a cache, so that ``generate`` of transformers can read drafts with recurrent layers.

After ``cache.activate_past_recording()``, layers of softmax attention and convolutions can drop tokens by themselves.
Here recurrent layers can too: they keep the state before and the operands of their recurrence since the last ``crop``,
which runs the recurrence again over the tokens that remain.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEPT = 256  # the last tokens of a call that can be undone


class Call(NamedTuple):
    """A call of a recurrence."""

    op: Callable[..., tuple[Tensor, Tensor]]  # of the operands and a state
    operands: dict[str, Tensor]
    axis: int  # of the tokens, which is 1 in ``mask`` and ``segments``
    back: Callable[[Tensor], Tensor]  # from the operation's state to that of the cache

    @property
    def tokens(self) -> int:
        name, operand = next(iter(self.operands.items()))
        return operand.shape[self._axis(name)]

    def part(self, start: int, end: int) -> "Call":
        """The call for some of its tokens."""
        found = {name: t.narrow(self._axis(name), start, end - start) for name, t in self.operands.items()}
        return self._replace(operands=found)

    def run(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs and the last state."""
        return self.op(**self.operands, state=state, return_state=True)

    def _axis(self, name: str) -> int:
        return 1 if name in ("mask", "segments") else self.axis


class Past:
    """What one state of a cache has read since the last crop."""

    def __init__(self) -> None:
        self.before: Tensor | None = None
        self.calls: list[Call] = []
        self.all = 0  # tokens that the state has read

    @property
    def tokens(self) -> int:
        """The number of tokens that can be undone."""
        return sum(call.tokens for call in self.calls)

    def run(self, state: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
        """Make a call, and remember its last tokens."""
        self.all += call.tokens
        if (first := call.tokens - KEPT) > 0:
            y, state = call.part(0, first).run(state)
            self.before, self.calls = state, []
            rest, state = self._note(state, call.part(first, call.tokens)).run(state)
            return torch.cat([y, rest], call.axis), state
        # First, since the call may overwrite the state.
        return self._note(state, call).run(state)

    def _note(self, state: Tensor | None, call: Call) -> Call:
        if not self.calls:
            self.before = None if state is None else state.detach().clone()
        kept = {name: t.detach().clone() for name, t in call.operands.items()}
        self.calls.append(call._replace(operands=kept))
        return call

    def crop(self, tokens: int, cached: Tensor) -> None:
        """Undo the last tokens in the state of the cache, and forget the others."""
        if tokens:
            state, left = self.before, self.tokens - tokens
            for call in self.calls:
                if n := min(call.tokens, left):
                    state, left = call.part(0, n).run(state)[1], left - n
            cached.zero_() if state is None else cached.copy_(self.calls[0].back(state))
        self.before, self.calls, self.all = None, [], self.all - tokens


# Of the state that the running layer has just taken from a cache which records its past.
_past: ContextVar[Past | None] = ContextVar("longspan_past", default=None)


def recur(
    op: Callable[..., Any],
    operands: dict[str, Tensor | None],
    *,
    axis: int,
    state: Tensor | None,
    back: Callable[[Tensor], Tensor] = lambda state: state,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Call the recurrence of a layer, and remember the call if the layer's cache records its past.

    Args:
        op: ``op(**operands, state=state, return_state=True, **options)`` returns outputs and the last state.
        operands: operands with an axis of tokens; None is left out.
        axis: the axis of tokens in operands and outputs; it is 1 in ``mask`` and ``segments``.
        state: the state before, or None.
        back: converts a state of ``op`` to that of the cache.
        options: further arguments of ``op``.

    Returns:
        The outputs, and the last state of ``op``.
    """
    given = {name: t for name, t in operands.items() if t is not None}
    call, past = Call(functools.partial(op, **options), given, axis, back), _past.get()
    _past.set(None)
    return call.run(state) if past is None else past.run(state, call)


def noting(original: Callable) -> Callable:
    """Make ``Cache.get_recurrent_state`` note whose state the running layer takes."""

    @functools.wraps(original)
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state = original(self, layer_idx, state_idx)
        if not torch.compiler.is_compiling():
            layer = self.layers[layer_idx]
            _past.set(_pasts(layer).setdefault(state_idx, Past()) if layer.record_past else None)
        return state

    return get_recurrent_state


def whole_windows(original: Callable) -> Callable:
    """Make ``Cache.get_conv_state`` hide a window while it records, since some layers would shift it in place."""

    @functools.wraps(original)
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        layer = self.layers[layer_idx]
        recorded = not torch.compiler.is_compiling() and layer.record_past and state_idx in _pasts(layer)
        return None if recorded else original(self, layer_idx, state_idx)

    return get_conv_state


def counting(original: Callable) -> Callable:
    """Make ``Cache.get_seq_length`` count the tokens of a cache without keys while it records, for ``generate``."""

    @functools.wraps(original)
    def get_seq_length(self, layer_idx: int = 0) -> int:
        if not torch.compiler.is_compiling() and layer_idx < len(self.layers) and all(self.is_linear):
            layer = self.layers[layer_idx]
            if layer.record_past and 0 in _pasts(layer):
                return _pasts(layer)[0].all
        return original(self, layer_idx)

    return get_seq_length


def croppable(original: property) -> property:
    """Make ``is_croppable`` of a layer True if it has recorded the calls of its recurrence."""

    def is_croppable(self) -> bool:
        states = [i for i, known in self.is_recurrent_states_initialized.items() if known]
        recorded = bool(states) and all(i in _pasts(self) and _pasts(self)[i].calls for i in states)
        return original.__get__(self) or (self.record_past and recorded)

    return property(is_croppable, doc=original.__doc__)


def cropping(original: Callable) -> Callable:
    """Make ``crop`` of a layer undo tokens in its recurrent states too, where the original leaves them as they are."""

    @functools.wraps(original)
    def crop(self, tokens_to_remove: int) -> None:
        n, states = -min(tokens_to_remove, 0), [i for i, t in self.recurrent_states.items() if t is not None]
        pasts = [_pasts(self).get(i) or Past() for i in states]
        # Checked first, so that a refused call changes nothing.
        if n > (most := min((past.tokens for past in pasts), default=n)):
            raise RuntimeError(f"cannot crop {n} tokens: the states of the layer remember the last {most}")
        original(self, tokens_to_remove)
        for i, past in zip(states, pasts, strict=True):
            past.crop(n, self.recurrent_states[i])

    return crop


def _pasts(layer: Any) -> dict[int, Past]:
    """Return the record of a cache's layer, by state."""
    return layer.__dict__.setdefault("longspan_pasts", {})
