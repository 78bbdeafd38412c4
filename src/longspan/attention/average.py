"""The average attention network: every token reads the plain mean of what came before it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..modules.feedforward import FeedForward
from ..ops.linear import recurrence
from ..ops.tensors import positions, upcast_half
from .base import Attention


class AverageState(NamedTuple):
    total: Tensor  # (B,dim) sum of the inputs so far, float32 at least
    count: Tensor  # (B,) int64, how many there were


class Average(Attention):
    """Every token reads the mean of all inputs so far, whatever it asks for, and gates decide what it keeps of both.

    $i_t$ and $f_t$ are the input and the forget gate.

    ``inner``: hidden width of the network, two layers with relu (0: 4 dim). Heads play no part, as the mean of a head
    is a part of the mean; their number is taken so that the mechanism fits where others do. Nothing is asked for,
    so there is no query, key or value to project.

    Source: Zhang et al. 2018 (1805.00631), eqs 1-3; residual and norm (eq. 4) belong to the block around it.
    """

    name, paper, cost = "average", "1805.00631", "N D"
    family = "linear"
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

    def start(self, batch, capacity):
        like = self.weight_like
        count = torch.zeros(batch, dtype=torch.long, device=like.device)
        return AverageState(upcast_half(like.new_zeros(batch, self.dim)), count)

    def attend(self, x, state, *, mask=None, segments=None, donate=False):
        before = self.start(x.shape[0], 0) if state is None else state
        wide = x.to(before.total.dtype)[:, None]  # (B,1,N,dim)
        ones = torch.ones_like(wide[..., :1])
        real = torch.ones_like(ones) if mask is None else mask[:, None, :, None].to(ones)
        # A mean is linear attention with one feature that is always 1.
        with torch.autocast(x.device.type, enabled=False):
            total, sums = recurrence.scan(
                ones, real, wide, before.total[:, None, None], segments=segments, donate=donate
            )
        at, count = positions(x, before.count, mask=mask, segments=segments)
        g = self.feedforward((total[:, 0] / (at[..., None] + 1)).to(x.dtype))
        i, f = self.gates(torch.cat([x, g], -1)).sigmoid().chunk(2, -1)
        return i * x + f * g, None if state is None else AverageState(sums[:, 0, 0], count)
