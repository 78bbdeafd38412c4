"""Performer: softmax attention estimated by positive random features."""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from .._utils.spec import known
from ..ops.linear import random_features, stabilized
from ..ops.tensors import merge, split, upcast_half
from ..states import sums
from ..states.sums import ContextSums
from .base import AllArguments, Attention

MAPS = {
    "positive": random_features.positive,
    "hyperbolic": random_features.hyperbolic,
    "trigonometric": random_features.trigonometric,
    "exp": random_features.exponential,
    "relu": random_features.generalized,
}


class PerformerState(NamedTuple):
    """The state with ``map='relu'``, which has no exponents; float32 or wider."""

    sums: Tensor  # (B,H,F,E+1) sum of phi(k) v^T; last column: sum of phi(k)


class PeakState(NamedTuple):
    """The state of all other maps; float32 or wider. A redraw of the rows makes it invalid."""

    sums: Tensor  # (B,H,F,E+1) as above, divided by e^peak
    peak: Tensor  # (B,H) the largest exponent of the keys so far, -inf before the first


class Performer(Attention[PerformerState | PeakState | ContextSums]):
    r"""Softmax attention in linear time: random features estimate its kernel without bias.

    The kernel is $e^{q \cdot k / \sqrt D}$.

    ``features``: rows m drawn for each head (0: D log D rounded up, at least D, since the theory requires order D log
    D). ``map``: positive, the features of the second equation; hyperbolic, the same for w and -w (2 m features, less
    variance); trigonometric, $e^{\lVert x \rVert^2 / 2} [\cos w \cdot x, \sin w \cdot x]$ (2 m features; estimates may
    be negative); exp, $e^{w \cdot x}$, which also weights a key by $e^{\lVert k \rVert^2 / 2}$; relu, $\max(w \cdot x,
    0)$ of the unscaled x, a kernel other than softmax's. ``floor``: added to each feature of map='relu', so that every
    query shares a feature with every key. ``rows``: orthogonal (in blocks of D) or iid. ``radii``: lengths of the rows:
    chi (those of a Gaussian: unbiased), sqrt (all $\sqrt D$), quantiles or midpoints (at even levels of chi); all but
    chi are biased low. ``seed``: seed of the rows, together with the layer and the head. ``eps``: a denominator d
    becomes $\mathrm{sign}(d) \max(\lvert d \rvert, \epsilon)$. ``context_dim``: width of the context of cross attention
    (0: dim).

    The bound ``eps`` is relative: queries and keys are first divided by their largest features, those of the keys so
    far and never of later ones. The rows are a buffer in the ``state_dict``. Only ``redraw(step)`` changes them.

    Source: Choromanski et al. 2020, sections 2.2-2.4 and lemma 1; quantiles: Su 2020 (kexue.fm/archives/7921).

    Raises:
        ValueError: For an unknown map, rows or radii, features < 0, eps <= 0, a negative floor, or a floor without
            map='relu'.
    """

    name, paper, cost = "performer", "2009.14794", "N D^2 log D"
    family = "linear"
    parallel_by = "sums"
    equations = (
        r"o_i = \frac{\sum_{j \in \mathcal{A}_i} (\phi(q_i) \cdot \phi(k_j)) v_j}{\sum_{j \in \mathcal{A}_i} "
        r"\phi(q_i) \cdot \phi(k_j)}, \quad "
        r"\mathrm{E} \, \phi(q) \cdot \phi(k) = e^{q \cdot k / \sqrt D}",
        r"\text{positive:} \quad \phi(x) = "
        r"\frac{1}{\sqrt m} \left[e^{w_r \cdot x^\prime - \lVert x^\prime \rVert^2 / 2}\right]_{r = "
        r"1, \ldots, m}, \quad "
        r"x^\prime = \frac{x}{D^{1/4}}, \quad w_r \sim \mathcal{N}(0, I)",
    )
    citation = (
        "Choromanski, Krzysztof and Likhosherstov, Valerii and Dohan, David and Song, Xingyou and Gane, Andreea and "
        "Sarlos, Tamas and Hawkins, Peter and Davis, Jared and Mohiuddin, Afroz and Kaiser, Lukasz and "
        "Belanger, David and Colwell, Lucy and Weller, Adrian",
        "Rethinking Attention with Performers",
        2020,
    )
    examples = (
        "performer",
        "performer(map='trigonometric', features=101, rows='iid')",
        "performer(map='relu', radii='sqrt', floor=0.1)",
    )
    states, contexts = (PerformerState, PeakState), (ContextSums,)
    projection: Tensor  # (H,m,D)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        layer: int = 0,
        features: int = 0,
        map: str = "positive",
        rows: str = "orthogonal",
        radii: str = "chi",
        seed: int = 0,
        floor: float = 1e-3,
        eps: float = 1e-6,
        context_dim: int = 0,
    ):
        super().__init__(dim, heads, causal=causal)
        known(map, MAPS, "map")
        if features < 0:
            raise ValueError(f"features={features} must be positive, or 0 for D log D rows")
        if map != "relu" and floor != 1e-3:
            raise ValueError(f"floor belongs to map='relu', not {map!r}")
        if floor < 0:
            raise ValueError(f"floor={floor} must not be negative: a denominator could vanish or change sign")
        if eps <= 0:
            raise ValueError(f"eps={eps} must be positive: the denominator can vanish")
        self.layer, self.features, self.map, self.rows, self.radii = layer, features, map, rows, radii
        self.seed, self.floor, self.eps, self.context_dim = seed, floor, eps, context_dim
        self.query = nn.Linear(dim, dim)
        self.key, self.value = (nn.Linear(context_dim or dim, dim) for _ in range(2))
        self.out = nn.Linear(dim, dim)
        self.register_buffer("projection", self._draw(0).to(self.out.weight))

    def redraw(self, step: int) -> None:
        """Replace the rows by those of redraw ``step``, a function of step, seed, layer and head.

        Call it between updates, with the same step on every process. Earlier states cannot be continued afterwards.

        Args:
            step: Number of the redraw; 0 gives the initial rows.
        """
        self.projection.copy_(self._draw(step))

    def _draw(self, step: int) -> Tensor:
        """(H,m,D) float64."""
        size = self.dim // self.heads
        options = {"rows": self.rows, "radii": self.radii, "seed": self.seed, "layer": self.layer, "step": step}
        return random_features.projections(self.heads, self.features or random_features.enough(size), size, **options)

    def _parts(self, x: Tensor) -> random_features.Parts:
        """Features of projected tokens (B,N,dim), all heads at once: (B,H,N,F)."""
        with torch.autocast(x.device.type, enabled=False):
            x, w = upcast_half(split(x, self.heads)), upcast_half(self.projection)
            if self.map == "relu":
                return random_features.generalized(x, w, floor=self.floor)
            # Queries and keys each get the square root of the scale 1 / sqrt D.
            return MAPS[self.map](x * x.shape[-1] ** -0.25, w)

    def start(self, batch: int, capacity: int) -> PerformerState | PeakState:
        size, count = self.dim // self.heads, self.projection.shape[1]
        features = 2 * count if self.map in ("hyperbolic", "trigonometric") else count
        zeros = upcast_half(self.weight_like.new_zeros(batch, self.heads, features, size + 1))
        return (
            PerformerState(zeros)
            if self.map == "relu"
            else PeakState(zeros, zeros.new_full(zeros.shape[:2], -torch.inf))
        )

    def attend(
        self, x: Tensor, state: PerformerState | PeakState | ContextSums | None, **given: Unpack[AllArguments]
    ) -> tuple[Tensor, PerformerState | PeakState | ContextSums | None]:
        form, q = sums.stable(_state, self.eps), self._parts(self.query(x))
        o, state = sums.attend(form, q, self._project, x, state, causal=self.causal, **given)
        return self.out(merge(o)), state

    def _project(self, x: Tensor) -> tuple[random_features.Parts, Tensor]:
        return self._parts(self.key(x)), split(self.value(x), self.heads)


def _state(found: stabilized.Sums) -> PerformerState | PeakState:
    return PerformerState(found.sums) if found.peak is None else PeakState(found.sums, found.peak)
