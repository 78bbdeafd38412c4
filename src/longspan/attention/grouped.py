"""The base of softmax mechanisms whose query heads share heads of keys and values, with or without rotary positions."""

from torch import Tensor, nn

from ..modules.rotary import check_rotary, rotate
from ..ops.operands import zero_masked
from ..ops.tensors import split
from .base import Attention, S


class Grouped(Attention[S]):
    """A subclass calls ``create`` in ``__init__``."""

    kv_heads: int = 0
    rotary: float = 0.0
    rotary_layout: str = "halves"

    def create(self, kv_heads: int = 0, rotary: float = 0.0, rotary_layout: str = "halves") -> None:
        """Create the projections.

        Args:
            kv_heads: The number of heads of keys and values; 0: one for each query head.
            rotary: The base of rotary positions; 0.0: none.
            rotary_layout: ``halves`` or ``interleaved``.

        Raises:
            ValueError: ``kv_heads`` does not divide the number of heads, or the heads cannot be rotated.
        """
        self.kv_heads, self.groups = kv_heads, check_groups(kv_heads, self.heads)
        check_rotary(rotary, rotary_layout, self.dim // self.heads)
        self.rotary, self.rotary_layout = rotary, rotary_layout
        self.query, self.out = nn.Linear(self.dim, self.dim), nn.Linear(self.dim, self.dim)
        self.key, self.value = (nn.Linear(self.dim, self.dim // self.heads * self.groups) for _ in range(2))

    def heads_of(
        self, x: Tensor, at: Tensor | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B,H,N,D), keys and values (B,G,N,D), rotated to the positions ``at`` (B,N), 0 if not real."""
        q, k, v = split(self.query(x), self.heads), split(self.key(x), self.groups), split(self.value(x), self.groups)
        q, k, v = zero_masked(real, q, k, v)
        return *self.rotated(q, k, at), v

    def rotated(self, q: Tensor, k: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return queries and keys rotated to the positions ``at`` (B,N), if the mechanism has rotary positions."""
        if not self.rotary or at is None:
            return q, k
        return rotate(q, at, self.rotary, self.rotary_layout), rotate(k, at, self.rotary, self.rotary_layout)


def check_groups(kv_heads: int, heads: int) -> int:
    """Return the number of heads of keys and values: ``kv_heads``, or ``heads`` if it is 0.

    Raises:
        ValueError: ``kv_heads`` does not divide ``heads``.
    """
    groups = kv_heads or heads
    if groups < 0 or heads % groups:
        raise ValueError(f"kv_heads={kv_heads} must divide heads={heads}")
    return groups
