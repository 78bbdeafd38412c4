"""The forgetting transformer: softmax attention whose logits fall with learned forget gates."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.operands import zero_masked
from ..ops.softmax import forgetting
from ..ops.tensors import merge, split
from ..states import kv_cache
from ..states.kv_cache import KeyValues
from .cached import Cached, places


class ForgettingState(NamedTuple):
    """All tokens so far, and the sum of the logarithms of the gates up to each."""

    past: KeyValues
    gates: KeyValues  # its keys are the sums (B,H,capacity,1) float64; its values have no channels


class Forgetting(Cached[ForgettingState]):
    r"""Softmax attention that forgets: each token has a gate per head, which lowers the logits of all tokens before it.

    ``kv_heads``: heads of keys and values, each shared by heads / kv_heads query heads (0: as many as heads). Gates
    belong to query heads.

    The gates replace positions: with all gates at 1/2 the logits fall with the distance, as in ``alibi``. The C++
    kernels leave out blocks of keys whose weights certainly add up to less than $2^{-24}$ of a query's, so that heads
    that forget take less time. The state is all keys and values, and the sums of the gates, in float64: sums of many
    gates are large, and their differences are not.

    Source: Lin et al. 2025, eq. 5; the gates of section 3.1.

    Raises:
        ValueError: For ``kv_heads`` that do not divide heads.
    """

    name, paper, cost = "forgetting", "2503.02130", "N^2 D"
    family = "softmax"
    equations = (
        r"o_i = \sum_{j \le i} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \le i} "
        r"\left( \frac{q_i \cdot k_j}{\sqrt D} + \sum_{l = j + 1}^i \log f_l \right)",
        r"f_l = \sigma(w_h \cdot x_l + b_h)",
    )
    citation = (
        "Lin, Zhixuan and Nikishin, Evgenii and He, Xu Owen and Courville, Aaron",
        "Forgetting Transformer: Softmax Attention with a Forget Gate",
        2025,
    )
    examples = ("forgetting", "forgetting(kv_heads=1)")
    states = (ForgettingState,)

    def __init__(self, dim: int, heads: int, *, causal: bool = True, kv_heads: int = 0):
        super().__init__(dim, heads, causal=causal)
        self.create(kv_heads)
        self.forget = nn.Linear(dim, heads)

    def start(self, batch: int, capacity: int) -> ForgettingState:
        like = self.weight_like
        past = kv_cache.empty(batch, self.groups, capacity, self.dim // self.heads, like)
        sums = like.new_zeros(batch, self.heads, capacity, 1, dtype=torch.float64)
        return ForgettingState(past, KeyValues(sums, sums[..., :0], past.length.clone()))

    def _run(
        self, x: Tensor, state: ForgettingState | None, real: Tensor | None, donate: bool
    ) -> tuple[Tensor, ForgettingState | None]:
        q, k, v = self.heads_of(x, real=real)
        (gates,) = zero_masked(real, F.logsigmoid(split(self.forget(x), self.heads).double()))  # (B,H,N,1)
        sums = gates.cumsum(2)
        if state is None:
            return self.out(merge(forgetting.attend(q, k, v, sums[..., 0]))), None
        start = state.past.length
        if state.gates.keys.shape[2]:
            last = (start - 1).clamp(min=0)[:, None, None, None].expand(-1, self.heads, 1, 1)
            sums = sums + state.gates.keys.gather(2, last).masked_fill((start == 0)[:, None, None, None], 0.0)
        view, past = kv_cache.extend(state.past, k, v, mask=real, donate=donate)
        gone, gates = kv_cache.extend(state.gates, sums, sums[..., :0], mask=real, donate=donate)
        at = places(view, past, start, x.shape[1], real)
        o = forgetting.attend(q.to(view.keys.dtype), view.keys, view.values, gone.keys[..., 0], at)
        return self.out(merge(o)), ForgettingState(past, gates)
