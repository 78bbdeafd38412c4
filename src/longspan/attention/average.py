"""The average attention network: each token reads the mean of all tokens so far."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..modules.feedforward import FeedForward
from ..ops.linear import recurrence
from ..ops.tensors import positions, upcast_half
from .base import Attention


class AverageState(NamedTuple):
    """The sum and the number of the inputs so far."""

    total: Tensor  # (B,dim), in float32 or better
    count: Tensor  # (B,) int64  # pyright: ignore[reportIncompatibleMethodOverride] hides tuple.count


class Average(Attention[AverageState]):
    """Each token reads the mean of all inputs so far, through a feed-forward network and two gates.

    $i_t$ and $f_t$ are the input and the forget gate.

    ``inner``: the hidden width of the feed-forward network, two layers with relu (0: 4 dim).

    The weights do not depend on the content, so there are no queries, keys or values. ``heads`` has no effect, since
    the mean is taken channel by channel; the argument exists for a common signature.

    Source: Zhang et al. 2018 (1805.00631), eqs 1-3; residual and norm (eq. 4) belong to the block around it.
    """

    name, paper, cost = "average", "1805.00631", "N D"
    family = "linear"
    learned_state = ("total",)
    parallel_by = "sums"
    equations = (
        r"y_t = i_t \odot x_t + f_t \odot g_t, \quad "
        r"g_t = \mathrm{FFN}\left(\frac{1}{t} \sum_{j \le t} x_j\right), \quad "
        r"[i_t; f_t] = \sigma(W [x_t; g_t] + b)",
    )
    citation = (
        "Zhang, Biao and Xiong, Deyi and Su, Jinsong",
        "Accelerating Neural Transformer via an Average Attention Network",
        2018,
    )
    directions, states = ("causal",), (AverageState,)

    def __init__(self, dim: int, heads: int, *, causal: bool = True, inner: int = 0):
        super().__init__(dim, heads, causal=causal)
        if inner < 0:
            raise ValueError(f"inner={inner} is a width; it must be positive, or 0 for 4 dim")
        self.inner = inner
        self.gates = nn.Linear(2 * dim, 2 * dim)
        self.feedforward = FeedForward(dim, inner or 4 * dim, "relu")

    def start(self, batch: int, capacity: int) -> AverageState:
        like = self.weight_like
        count = torch.zeros(batch, dtype=torch.long, device=like.device)
        return AverageState(upcast_half(like.new_zeros(batch, self.dim)), count)

    def attend(
        self,
        x: Tensor,
        state: AverageState | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, AverageState | None]:
        before = self.start(x.shape[0], 0) if state is None else state
        wide = x.to(before.total.dtype)[:, None]  # (B,1,N,dim)
        ones = torch.ones_like(wide[..., :1])
        real = torch.ones_like(ones) if mask is None else mask[:, None, :, None].to(ones)
        # The mean is linear attention with a single feature that is 1 for every token.
        with torch.autocast(x.device.type, enabled=False):
            total, sums = recurrence.scan(
                ones, real, wide, before.total[:, None, None], segments=segments, donate=donate
            )
        at, count = positions(x, before.count, mask=mask, segments=segments)
        g = self.feedforward((total[:, 0] / (at[..., None] + 1)).to(x.dtype))
        i, f = self.gates(torch.cat([x, g], -1)).sigmoid().chunk(2, -1)
        return i * x + f * g, None if state is None else AverageState(sums[:, 0, 0], count)
