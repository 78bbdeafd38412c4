"""Softmax attention to a fixed number of slots, each a learned weighted sum of the keys and values."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .._utils.spec import known
from ..ops.compress.project import project
from ..ops.rows import ragged
from ..ops.softmax import dense
from ..ops.tensors import merge, split, visible
from .base import Attention

SHARING = {
    "none": "matrices of its own for each head",
    "headwise": "one pair of matrices for all heads",
    "key-value": "one matrix for all heads, keys and values",
}


class LinformerContext(NamedTuple):
    """All that queries need of a context, whatever its length."""

    keys: Tensor  # (B,H,slots,D)
    values: Tensor  # (B,H,slots,D)


class Linformer(Attention):
    r"""Softmax over slots instead of tokens: matrices over the length shorten keys and values to a fixed number.

    ``length``: L, most tokens of a sequence, a size of the weights E and F. ``slots``: S, rows of these. ``share``:
    none, each head has its own; headwise, one pair for all heads; key-value, E = F for all heads. (One matrix for all
    layers, the paper's layerwise sharing, is left out, since here a layer owns its weights.)

    Columns belong to positions, which count real tokens, so a shorter sequence uses the first columns and a masked
    token is no term of any sum. Each slot mixes all tokens: there is no causal form, and weights need not sum to one.
    Slots of a context are its state, (B,H,slots,D).

    Source: Wang et al. 2020, eq. 7 and section 4. Raises ValueError for an unknown way of sharing, length < 1,
    slots < 1, and for a sequence of more than ``length`` tokens (compiled calls count masked ones, too).
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
    exempt: ClassVar = {"cross": "the columns of E and F are positions, so the order of a context matters"}

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
        self.length, self.slots, self.share = length, slots, known(share, SHARING, "way of sharing projections")
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        shape = (heads if share == "none" else 1, slots, length)
        # Of variance 1 / S, as in the paper's theorem 2: products keep their size on average.
        self.key_slots = nn.Parameter(torch.randn(shape) * slots**-0.5)
        if share != "key-value":
            self.value_slots = nn.Parameter(torch.randn(shape) * slots**-0.5)

    @property
    def positional(self) -> bool:
        return True

    def attend(self, x, state, *, mask=None, segments=None, context=None, context_mask=None, record=None):
        q = split(self.query(x), self.heads)
        if context is None and state is not None:
            return self.out(merge(dense.attend(q, *state))), state
        source, real = (x, mask) if context is None else (context, context_mask)
        k, v = split(self.key(source), self.heads), split(self.value(source), self.heads)
        self._check(k.shape[2], real)
        if record is not None:
            # The heads' output is linear in the values, so that of the unit vectors is the matrix.
            unit = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:3], -1)
            seen = visible(source, causal=False, mask=real, segments=segments)
            record.update(mask=seen.expand(-1, -1, x.shape[1], -1) if context is None else seen[:, :, :1])
            record["matrix"] = self._read(q, k, unit, real, segments)
        if context is not None:
            state = LinformerContext(*self._pack(k, v, real))
            return self.out(merge(dense.attend(q, *state))), state
        return self.out(merge(self._read(q, k, v, mask, segments))), None

    def _check(self, n, mask):
        if mask is not None and not torch.compiler.is_compiling() and n > self.length:
            n = int(mask.sum(1).max()) if len(mask) else 0
        if n > self.length:
            raise ValueError(
                f"{n} tokens are more than the length={self.length} that this linformer was built for; shorten the "
                f"sequence, or train with a larger length="
            )

    def _pack(self, k, v, mask):
        values = self.key_slots if self.share == "key-value" else self.value_slots
        return project(k, self.key_slots, mask), project(v, values, mask)

    def _read(self, q, k, v, mask, segments):
        if segments is None:
            return dense.attend(q, *self._pack(k, v, mask))
        return ragged(q, k, v, lambda q, k, v: dense.attend(q, *self._pack(k, v, None)), mask, segments, exact=True)
