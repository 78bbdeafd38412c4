"""The base of the mechanisms that are softmax attention under a pattern, and differ in the pattern alone."""

from typing import Unpack

from torch import Tensor, nn

from ..modules.rotary import check_rotary, rotate
from ..ops.tensors import merge, positions, split
from ..patterns import Pattern
from ..states import lookback
from ..states.kv_cache import KeyValues
from ..states.window import Window
from .base import Attention, SequenceArguments


class Patterned(Attention[Window | KeyValues]):
    """Softmax attention to the keys that a pattern allows. A subclass calls ``see(pattern)`` in ``__init__``."""

    states = lookback.STATES
    layer: int = 0
    kv_heads: int = 0
    rotary: float = 0.0
    rotary_layout: str = "halves"

    def see(self, pattern: Pattern, *, kv_heads: int = 0, rotary: float = 0.0, rotary_layout: str = "halves") -> None:
        """Set the pattern, and create the projections.

        Args:
            pattern: the keys that each query sees; a causal mechanism sees none after its own.
            kv_heads: the number of heads of keys and values; 0: one for each query head.
            rotary: the base of rotary positions; 0.0: none.
            rotary_layout: ``halves`` or ``interleaved``.

        Raises:
            ValueError: ``kv_heads`` does not divide the number of heads, or the heads cannot be rotated.
        """
        groups = kv_heads or self.heads
        if groups < 0 or self.heads % groups:
            raise ValueError(f"kv_heads={kv_heads} must divide heads={self.heads}")
        check_rotary(rotary, rotary_layout, self.dim // self.heads)
        self.key_pattern: Pattern = pattern  # pyright: ignore[reportIncompatibleVariableOverride] never None here
        self.kv_heads, self.groups = kv_heads, groups
        self.rotary, self.rotary_layout = rotary, rotary_layout
        self.query = nn.Linear(self.dim, self.dim)
        self.key, self.value = (nn.Linear(self.dim, self.dim // self.heads * groups) for _ in range(2))
        self.out = nn.Linear(self.dim, self.dim)

    def start(self, batch: int, capacity: int) -> Window | KeyValues:
        return lookback.empty(self.key_pattern, batch, self.groups, capacity, self.dim // self.heads, self.weight_like)

    def attend(
        self, x: Tensor, state: Window | KeyValues | None, **given: Unpack[SequenceArguments]
    ) -> tuple[Tensor, Window | KeyValues | None]:
        q, k, v = split(self.query(x), self.heads), split(self.key(x), self.groups), split(self.value(x), self.groups)
        if self.rotary:
            before = None if state is None else state.position if isinstance(state, Window) else state.length
            at, _ = positions(x, before, mask=given.get("mask"), segments=given.get("segments"))
            turn = at, self.rotary, self.rotary_layout
            q, k = rotate(q, *turn), rotate(k, *turn)
        o, state = self._read(q, k, v, state, given)
        return self.out(merge(o)), state

    def _read(
        self, q: Tensor, k: Tensor, v: Tensor, state: Window | KeyValues | None, given: SequenceArguments
    ) -> tuple[Tensor, Window | KeyValues | None]:
        return lookback.attend(q, k, v, state, self.key_pattern, layer=self.layer, **given)
