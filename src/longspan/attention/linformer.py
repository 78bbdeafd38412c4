"""Linformer: softmax attention to a fixed number of slots, learned weighted sums of keys and values."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._utils.spec import known
from ..ops.compress.project import project
from ..ops.rows import ragged
from ..ops.softmax import dense
from ..ops.tensors import merge, split, visible
from .base import Attention

SHARING = {
    "none": "separate matrices for each head",
    "headwise": "one pair of matrices for all heads",
    "key-value": "one matrix for all heads, keys and values",
}


class LinformerContext(NamedTuple):
    """The slots of a context, of fixed size."""

    keys: Tensor  # (B,H,slots,D)
    values: Tensor  # (B,H,slots,D)


class Linformer(Attention[LinformerContext]):
    r"""Softmax attention over a fixed number of slots, to which learned matrices project keys and values.

    ``length``: L, the number of columns of E and F, and the largest length of a sequence. ``slots``: S, the number of
    rows of E and F. ``share``: none for separate matrices per head; headwise for one pair for all heads; or key-value
    for E = F for all heads. The paper's layerwise sharing is not available, since each layer owns its weights.

    Columns belong to positions, which count real tokens: a shorter sequence uses the first columns, and masked tokens
    are not part of any sum. Each slot mixes all tokens, so there is no causal form, and weights need not sum to one.
    The state of a context is its slots, (B,H,slots,D).

    Source: Wang et al. 2020, eq. 7 and section 4. Raises ValueError for an unknown ``share``, length < 1, slots < 1,
    and for a sequence of more than ``length`` tokens (compiled calls also count masked tokens).
    """

    name, paper, cost = "linformer", "2006.04768", "N S D"
    family = "compressed"
    equations = (
        r"o_i = \sum_{s=1}^S p_{is} (F V)_s, \quad p_{is} = \mathrm{softmax}_s \frac{q_i \cdot (E K)_s}{\sqrt D}",
        r"(E K)_s = \sum_j E_{sj} k_j, \quad (F V)_s = \sum_j F_{sj} v_j",
    )
    citation = (
        "Wang, Sinong and Li, Belinda Z. and Khabsa, Madian and Fang, Han and Ma, Hao",
        "Linformer: Self-Attention with Linear Complexity",
        2020,
    )
    examples = (
        "linformer(length=307, slots=5)",
        "linformer(length=307, slots=3, share='none')",
        "linformer(length=307, slots=3, share='key-value')",
    )
    directions, contexts = ("bidirectional",), (LinformerContext,)
    exempt: Mapping[str, str] = {"cross": "the columns of E and F are positions, so the order of a context matters"}

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = False,
        length: int = 4096,
        slots: int = 256,
        share: str = "headwise",
    ):
        super().__init__(dim, heads, causal=causal)
        for option, value in (("length", length), ("slots", slots)):
            if value < 1:
                raise ValueError(f"{option}={value} must be at least 1")
        self.length, self.slots, self.share = length, slots, known(share, SHARING, "sharing of projections")
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        shape = (heads if share == "none" else 1, slots, length)
        # Variance 1 / S, as in the paper's theorem 2: products keep their size on average.
        self.key_slots = nn.Parameter(torch.randn(shape) * slots**-0.5)
        if share != "key-value":
            self.value_slots = nn.Parameter(torch.randn(shape) * slots**-0.5)

    @property
    def positional(self) -> bool:
        return True

    def attend(
        self,
        x: Tensor,
        state: LinformerContext | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        record: dict[str, Any] | None = None,
    ) -> tuple[Tensor, LinformerContext | None]:
        q = split(self.query(x), self.heads)
        if context is None and state is not None:
            return self.out(merge(dense.attend(q, *state))), state
        source, real = (x, mask) if context is None else (context, context_mask)
        k, v = split(self.key(source), self.heads), split(self.value(source), self.heads)
        self._check(k.shape[2], real)
        if record is not None:
            # The output is linear in the values: with unit vectors as values it is the matrix.
            unit = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:3], -1)
            seen = visible(source, causal=False, mask=real, segments=segments)
            record.update(mask=seen.expand(-1, -1, x.shape[1], -1) if context is None else seen[:, :, :1])
            record["matrix"] = self._read(q, k, unit, real, segments)
        if context is not None:
            state = LinformerContext(*self._pack(k, v, real))
            return self.out(merge(dense.attend(q, *state))), state
        return self.out(merge(self._read(q, k, v, mask, segments))), None

    def _check(self, n: int, mask: Tensor | None) -> None:
        if mask is not None and not torch.compiler.is_compiling() and n > self.length:
            n = int(mask.sum(1).max()) if len(mask) else 0
        if n > self.length:
            raise ValueError(
                f"{n} tokens are more than length={self.length} of this linformer; shorten the sequence, or train "
                f"with a larger length="
            )

    def _pack(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        values = self.key_slots if self.share == "key-value" else self.value_slots
        return project(k, self.key_slots, mask), project(v, values, mask)

    def _read(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, segments: Tensor | None) -> Tensor:
        if segments is None:
            return dense.attend(q, *self._pack(k, v, mask))
        return ragged(q, k, v, lambda q, k, v: dense.attend(q, *self._pack(k, v, None)), mask, segments, exact=True)
