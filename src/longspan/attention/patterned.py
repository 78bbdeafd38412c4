"""The base of the mechanisms that are softmax attention under a pattern, and differ in the pattern alone."""

from typing import Unpack

from torch import Tensor

from ..ops.tensors import merge, positions
from ..patterns import Pattern
from ..states import lookback
from ..states.kv_cache import KeyValues
from ..states.window import Window
from .base import SequenceArguments
from .grouped import Grouped


class Patterned(Grouped[Window | KeyValues]):
    """Softmax attention to the keys that a pattern allows. A subclass calls ``see(pattern)`` in ``__init__``."""

    states = lookback.STATES
    layer: int = 0

    def see(self, pattern: Pattern, *, kv_heads: int = 0, rotary: float = 0.0, rotary_layout: str = "halves") -> None:
        """Set the pattern, the keys that each query sees, and create the projections as ``create``."""
        self.create(kv_heads, rotary, rotary_layout)
        self.key_pattern: Pattern = pattern  # pyright: ignore[reportIncompatibleVariableOverride] never None here

    def start(self, batch: int, capacity: int) -> Window | KeyValues:
        return lookback.empty(self.key_pattern, batch, self.groups, capacity, self.dim // self.heads, self.weight_like)

    def attend(
        self, x: Tensor, state: Window | KeyValues | None, **given: Unpack[SequenceArguments]
    ) -> tuple[Tensor, Window | KeyValues | None]:
        at = None
        if self.rotary:
            before = None if state is None else state.position if isinstance(state, Window) else state.length
            at, _ = positions(x, before, mask=given.get("mask"), segments=given.get("segments"))
        q, k, v = self.heads_of(x, at)
        o, state = self._read(q, k, v, state, given)
        return self.out(merge(o)), state

    def _read(
        self, q: Tensor, k: Tensor, v: Tensor, state: Window | KeyValues | None, given: SequenceArguments
    ) -> tuple[Tensor, Window | KeyValues | None]:
        return lookback.attend(q, k, v, state, self.key_pattern, layer=self.layer, **given)
