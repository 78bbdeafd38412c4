"""Kernel attention with a choice of similarities, computed from the definition."""

from typing import Unpack

from torch import Tensor, nn

from .._utils.spec import known
from ..ops.softmax import similarity as op
from ..ops.tensors import merge, split
from ..states import kv_cache
from ..states.kv_cache import CachedContext, KeyValues
from .base import AllArguments, Attention


class Kernel(Attention[KeyValues | CachedContext]):
    r"""Attention with a non-negative similarity in place of $e^{q \cdot k}$, in quadratic time.

    It is the exact reference for the mechanisms that approximate these similarities in linear time.

    ``similarity``: s, one of exp, polynomial and rbf. ``degree``: n of polynomial, an even number. ``constant``: c of
    polynomial. ``bandwidth``: b of rbf. ``dropout``: the probability of dropping a weight in training. ``context_dim``:
    the width of the context of cross attention (0: dim).

    The scores are materialized, so this is slower than fused softmax at every length.

    Source: Katharopoulos et al. 2020, eq. 3; the view of attention as a kernel smoother is Tsai et al. 2019.
    """

    name, paper, cost = "kernel", "1908.11775", "N^2 D"
    family = "softmax"
    equations = (
        r"o_i = \frac{\sum_{j \in \mathcal{A}_i} s(q_i, k_j) v_j}{\sum_{j \in \mathcal{A}_i} s(q_i, k_j)}",
        r"\text{exp:} \quad s(q, k) = e^{q \cdot k / \sqrt D}",
        r"\text{polynomial:} \quad s(q, k) = \left(\frac{q \cdot k}{\sqrt D} + c\right)^n",
        r"\text{rbf:} \quad s(q, k) = \exp\left(-\frac{\lVert q - k \rVert^2}{2 b^2 \sqrt D}\right)",
    )
    citation = (
        "Tsai, Yao-Hung Hubert and Bai, Shaojie and Yamada, Makoto and Morency, Louis-Philippe and "
        "Salakhutdinov, Ruslan",
        "Transformer Dissection: A Unified Understanding of Transformer's Attention via the Lens of Kernel",
        2019,
    )
    examples = ("kernel", "kernel(similarity='polynomial', degree=4)", "kernel(similarity='rbf', bandwidth=2.0)")
    states, contexts = (KeyValues,), (CachedContext,)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        similarity: str = "exp",
        degree: int = 2,
        constant: float = 1.0,
        bandwidth: float = 1.0,
        dropout: float = 0.0,
        context_dim: int = 0,
    ):
        super().__init__(dim, heads, causal=causal)
        known(similarity, op.SIMILARITIES, "similarity")
        if similarity != "polynomial" and (degree, constant) != (2, 1.0):
            raise ValueError(f"degree and constant need similarity='polynomial', not {similarity!r}")
        if similarity != "rbf" and bandwidth != 1.0:
            raise ValueError(f"bandwidth={bandwidth} needs similarity='rbf', not {similarity!r}")
        if degree < 2 or degree % 2:
            raise ValueError(f"degree={degree} must be even and positive: odd powers can be negative")
        if bandwidth <= 0:
            raise ValueError(f"bandwidth={bandwidth} must be positive")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} must be in [0, 1)")
        self.similarity, self.degree, self.constant, self.bandwidth = similarity, degree, constant, bandwidth
        self.dropout, self.context_dim = dropout, context_dim
        self.query = nn.Linear(dim, dim)
        self.key, self.value = (nn.Linear(context_dim or dim, dim) for _ in range(2))
        self.out = nn.Linear(dim, dim)

    def start(self, batch: int, capacity: int) -> KeyValues:
        return kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, self.weight_like)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return split(self.key(x), self.heads), split(self.value(x), self.heads)

    def attend(
        self, x: Tensor, state: KeyValues | CachedContext | None, **given: Unpack[AllArguments]
    ) -> tuple[Tensor, KeyValues | CachedContext | None]:
        q = split(self.query(x), self.heads)
        view, state = kv_cache.view(self._project, x, state, causal=self.causal, **given)
        allowed = view.allowed(q.shape[2])
        p = op.weights(
            q,
            view.keys,
            allowed,
            similarity=self.similarity,
            degree=self.degree,
            constant=self.constant,
            bandwidth=self.bandwidth,
        )
        if (record := given.get("record")) is not None:
            record["matrix"] = p
        return self.out(merge(op.attend(p, view.values, self.dropout if self.training else 0.0))), state
