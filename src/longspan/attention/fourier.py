"""Linear attention with the RBF kernel, estimated with random Fourier features."""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from ..ops.linear import random_features
from ..ops.tensors import merge, split, upcast_half
from ..states import sums
from ..states.sums import ContextSums
from .base import AllArguments, Attention


class FourierState(NamedTuple):
    """Running sums, in float32 or better. A redraw of the features invalidates the state."""

    sums: Tensor  # (B,H,2m,E+1) sum of phi(k) v^T; last column: sum of phi(k)


class Fourier(Attention[FourierState | ContextSums]):
    r"""Linear attention whose random Fourier features estimate the RBF kernel of query and key.

    It estimates ``kernel(similarity='rbf')``. The estimates of the kernel may be negative, and so may the denominator
    d. So d is replaced by $\mathrm{sign}(d) \max(\lvert d \rvert, \epsilon)$. More features make small denominators
    rarer.

    ``features``: m, the number of random rows per head, with two features each (0: D log D rounded up, at least D).
    ``bandwidth``: b; the weight is $e^{-1/2}$ at a distance of $b D^{1/4}$. ``rows``: orthogonal (in blocks of D) or
    iid. ``radii``: the lengths of the rows: chi (those of Gaussian rows, unbiased), sqrt (all $\sqrt D$), quantiles or
    midpoints (at even levels of chi). ``seed``: the seed of the rows, combined with layer and head. ``eps``:
    $\epsilon$, the smallest absolute value of the denominator. ``context_dim``: the width of the context of cross
    attention (0: dim).

    The rows are a buffer in ``state_dict``. Only ``redraw(step)`` changes them.

    Source: Rahimi and Recht 2007, "Random Features for Large-Scale Kernel Machines"; in attention Peng et al. 2021;
    orthogonal rows as in Yu et al. 2016.
    """

    name, paper, cost = "fourier", "1610.09072", "N D^2 log D"
    family = "linear"
    learned_state = ("sums",)
    parallel_by = "sums"
    equations = (
        r"o_i = \frac{\sum_{j \in \mathcal{A}_i} (\phi(q_i) \cdot \phi(k_j)) v_j}{\sum_{j \in \mathcal{A}_i} "
        r"\phi(q_i) \cdot \phi(k_j)}, \quad "
        r"\mathrm{E} \, \phi(q) \cdot \phi(k) = \exp\left(-\frac{\lVert q - k \rVert^2}{2 b^2 \sqrt D}\right)",
        r"\phi(x) = \frac{1}{\sqrt m} [\cos w_r \cdot x^\prime, \sin w_r \cdot x^\prime]_{r = 1, \ldots, m}, \quad "
        r"x^\prime = \frac{x}{b D^{1/4}}, \quad w_r \sim \mathcal{N}(0, I)",
    )
    citation = (
        "Yu, Felix X. and Suresh, Ananda Theertha and Choromanski, Krzysztof and Holtmann-Rice, Daniel and "
        "Kumar, Sanjiv",
        "Orthogonal Random Features",
        2016,
    )
    examples = ("fourier(features=103, bandwidth=2.0, eps=0.001)",)
    states, contexts = (FourierState,), (ContextSums,)
    projection: Tensor  # (H,m,D)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        layer: int = 0,
        features: int = 0,
        bandwidth: float = 1.0,
        rows: str = "orthogonal",
        radii: str = "chi",
        seed: int = 0,
        eps: float = 1e-6,
        context_dim: int = 0,
    ):
        super().__init__(dim, heads, causal=causal)
        if features < 0:
            raise ValueError(f"features={features} is a number of rows; it must be positive, or 0 for D log D")
        if bandwidth <= 0:
            raise ValueError(f"bandwidth={bandwidth} must be positive")
        if eps <= 0:
            raise ValueError(f"eps={eps} must be positive: the denominator can vanish")
        self.layer, self.features, self.bandwidth, self.rows, self.radii = layer, features, bandwidth, rows, radii
        self.seed, self.eps, self.context_dim = seed, eps, context_dim
        self.query = nn.Linear(dim, dim)
        self.key, self.value = (nn.Linear(context_dim or dim, dim) for _ in range(2))
        self.out = nn.Linear(dim, dim)
        self.register_buffer("projection", self._draw(0).to(self.out.weight))

    def redraw(self, step: int) -> None:
        """Replace the random rows, in place.

        Call it between optimizer steps, with the same ``step`` on all processes. It invalidates existing states.

        Args:
            step: the number of the redraw; 0 restores the initial rows. The rows depend on it, seed, layer and head.
        """
        self.projection.copy_(self._draw(step))

    def _draw(self, step: int) -> Tensor:
        size = self.dim // self.heads
        count, rows, radii = self.features or random_features.enough(size), self.rows, self.radii
        return random_features.projections(
            self.heads, count, size, rows=rows, radii=radii, seed=self.seed, layer=self.layer, step=step
        )

    def _parts(self, x: Tensor) -> random_features.Parts:
        """Features of projected tokens of all heads: (B,N,dim) -> (B,H,N,2m)."""
        with torch.autocast(x.device.type, enabled=False):
            x = upcast_half(split(x, self.heads))
            return random_features.fourier(x * (x.shape[-1] ** -0.25 / self.bandwidth), upcast_half(self.projection))

    def start(self, batch: int, capacity: int) -> FourierState:
        size = self.dim // self.heads
        return FourierState(
            upcast_half(self.weight_like.new_zeros(batch, self.heads, 2 * self.projection.shape[1], size + 1))
        )

    def attend(
        self, x: Tensor, state: FourierState | ContextSums | None, **given: Unpack[AllArguments]
    ) -> tuple[Tensor, FourierState | ContextSums | None]:
        form = sums.stable(lambda found: FourierState(found.sums), self.eps)
        q = self._parts(self.query(x))
        o, state = sums.attend(form, q, self._project, x, state, causal=self.causal, **given)
        return self.out(merge(o)), state

    def _project(self, x: Tensor) -> tuple[random_features.Parts, Tensor]:
        return self._parts(self.key(x)), split(self.value(x), self.heads)
