"""Power attention: even powers of q.k in place of the exponential, with a decay, in linear time."""

from typing import Literal, NamedTuple, Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.linear import polynomial as op
from ..ops.tensors import merge, split, upcast_half
from .base import Attention, TokenArguments


class PowerState(NamedTuple):
    """Decayed sums of features of keys; float32 or wider; F is D+p-1 choose p for the degree p."""

    sums: Tensor  # (B,H,F,E+1) sum of phi(k) v^T; last column: sum of phi(k)


class Power(Attention[PowerState]):
    r"""Attention whose weights are even powers of $q \cdot k$ with a decay per head, exact and in linear time.

    The features of the state are all products of p channels: the degree sets its size, apart from the number of
    weights.

    ``degree``: $p$, 2 or 4. ``channels``: channels D of each head's queries and keys (0: as many as of values); 16 give
    136 features of degree 2, and 3876 of degree 4. ``eps``: added to the denominator.

    The biases of the decays begin at 5, so that a head forgets half of what it has seen in about 100 tokens.

    Source: Buckman, Gelada and Zhang 2025 (2507.04239), sections 2 and 3.

    Raises:
        ValueError: For negative channels or eps.
    """

    name, paper, cost = "power", "2507.04239", "N D^(p+1)"
    family = "linear"
    learned_state = ("sums",)
    equations = (
        r"o_i = \frac{\sum_{j \le i} s_{ij} v_j}{\sum_{j \le i} s_{ij} + \epsilon}, \quad "
        r"s_{ij} = \left(\frac{q_i \cdot k_j}{\sqrt D}\right)^p e^{\sum_{t=j+1}^i g_t}, \quad "
        r"g_t = \log \sigma(w \cdot x_t + b)",
    )
    citation = (
        "Buckman, Jacob and Gelada, Carles and Zhang, Sean",
        "Scaling Context Requires Rethinking Attention",
        2025,
    )
    examples = ("power(eps=0.01)", "power(degree=4, channels=3)")
    directions, states = ("causal",), (PowerState,)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        degree: Literal[2, 4] = 2,
        channels: int = 0,
        eps: float = 1e-6,
    ):
        super().__init__(dim, heads, causal=causal)
        if channels < 0:
            raise ValueError(f"channels={channels} must be positive, or 0 for the number of channels of the values")
        if eps < 0:
            raise ValueError(f"eps={eps} is added to the denominator and must not be negative")
        self.degree, self.channels, self.eps = degree, channels, eps
        self.kernel = op.power(channels or dim // heads, degree, eps)
        self.query, self.key = (nn.Linear(dim, heads * channels or dim) for _ in range(2))
        self.value, self.decay, self.out = nn.Linear(dim, dim), nn.Linear(dim, heads), nn.Linear(dim, dim)
        nn.init.constant_(self.decay.bias, 5.0)

    def start(self, batch: int, capacity: int) -> PowerState:
        size = self.dim // self.heads
        return PowerState(upcast_half(self.weight_like.new_zeros(batch, self.heads, self.kernel.size, size + 1)))

    def attend(
        self, x: Tensor, state: PowerState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, PowerState | None]:
        q, k = (upcast_half(split(project(x), self.heads)) for project in (self.query, self.key))
        root = q.shape[-1] ** -0.25
        o, sums = op.attend(
            q * root,
            k * root,
            split(self.value(x), self.heads),
            self.kernel,
            causal=True,
            log_decay=F.logsigmoid(upcast_half(self.decay(x))).mT,
            state=None if state is None else state.sums,
            **given,
        )
        return self.out(merge(o)), None if state is None else PowerState(sums)
