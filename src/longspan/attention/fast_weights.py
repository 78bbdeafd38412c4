"""Fast weight programmers: linear attention with DPFP features and the delta rule."""

from typing import NamedTuple, Unpack

from torch import Tensor, nn

from .._utils.spec import known
from ..ops import gated, linear
from ..ops.linear.features import MAPS, dpfp, sum_normalize
from ..ops.tensors import merge, split, upcast_half
from .base import Attention, TokenArguments

RULES = {"delta": "replaces the stored value of a key", "sum": "adds to it"}
DPFP = "dpfp"


class FastWeightsState(NamedTuple):
    """The fast weights, in float32 or better."""

    weights: Tensor  # (B,H,F,E), with rule='sum' (B,H,F,E+1), whose last column is sum phi(k)


class FastWeights(Attention[FastWeightsState]):
    r"""Linear attention with the delta rule and deterministic parameter-free features (DPFP).

    $\beta_t$ is one number per head.

    ``rule``: delta, or sum, which is linear attention. ``feature_map``: $\phi$, one of dpfp, elu, relu, squared_relu
    and exp; dpfp has $2 D \nu$ features, the products of each element of r with the next $\nu$ elements, cyclically.
    ``nu``: $\nu$ of dpfp; a larger value separates more keys. ``eps``: $\epsilon$ of rule='sum', added to the
    denominator.

    A query or key whose features are all 0 reads or writes nothing.

    Source: Schlag et al. 2021 (2102.11174), eqs 24 and 25 with sum normalization (section 4.2), section 5.3 for dpfp.
    """

    name, paper, cost = "fast_weights", "2102.11174", "N D^2"
    family = "gated"
    learned_state = ("weights",)
    parallel_by = "sums"
    equations = (
        r"\text{delta:} \quad W_t = W_{t-1} + \beta_t \hat k_t (v_t - W_{t-1}^\top \hat k_t)^\top, \quad "
        r"o_t = W_t^\top \hat q_t, \quad \hat x = \frac{\phi(x)}{\sum_c \phi(x)_c}, \quad "
        r"\beta_t = \sigma(w \cdot x_t + b)",
        r"\text{sum:} \quad W_t = W_{t-1} + \phi(k_t) v_t^\top, \quad "
        r"o_t = \frac{W_t^\top \phi(q_t)}{\phi(q_t) \cdot \sum_{j \le t} \phi(k_j) + \epsilon}",
        r"\text{dpfp:} \quad \phi(x) = [r_c \, r_{c+n}]_{c = 1, \ldots, 2 D; \, n = 1, \ldots, \nu}, \quad "
        r"r = \mathrm{relu}([x, -x])",
    )
    citation = (
        "Schlag, Imanol and Irie, Kazuki and Schmidhuber, Jürgen",
        "Linear Transformers Are Secretly Fast Weight Programmers",
        2021,
    )
    examples = ("fast_weights", "fast_weights(rule='sum', nu=1)")
    directions, states = ("causal",), (FastWeightsState,)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        rule: str = "delta",
        feature_map: str = DPFP,
        nu: int = 3,
        eps: float = 1e-6,
    ):
        super().__init__(dim, heads, causal=causal)
        known(rule, RULES, "rule")
        known(feature_map, {**MAPS, DPFP: dpfp}, "feature map")
        if feature_map != DPFP and nu != 3:
            raise ValueError(f"nu={nu} needs feature_map='dpfp', not {feature_map!r}")
        if rule != "sum" and eps != 1e-6:
            raise ValueError(f"eps={eps} needs rule='sum', not {rule!r}")
        if eps <= 0:
            raise ValueError(f"eps={eps} must be positive: it is added to a denominator that can be 0")
        self.rule, self.feature_map, self.nu, self.eps = rule, feature_map, nu, eps
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.rate = nn.Linear(dim, heads) if rule == "delta" else None
        self.out = nn.Linear(dim, dim, bias=False)
        self.width = self._phi(self.weight_like.new_zeros(1, dim // heads)).shape[-1]

    def _phi(self, x: Tensor) -> Tensor:
        """Features: (..., D) -> (..., F), in float32 or better."""
        return dpfp(upcast_half(x), self.nu) if self.feature_map == DPFP else MAPS[self.feature_map](upcast_half(x))

    def start(self, batch: int, capacity: int) -> FastWeightsState:
        values = self.dim // self.heads + (self.rule == "sum")
        return FastWeightsState(upcast_half(self.weight_like.new_zeros(batch, self.heads, self.width, values)))

    def attend(
        self, x: Tensor, state: FastWeightsState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, FastWeightsState | None]:
        q, k, v = (split(project(x), self.heads) for project in (self.query, self.key, self.value))
        q, k = self._phi(q), self._phi(k)
        before = None if state is None else state.weights
        if self.rate is None:
            o, weights = linear.attend(q, k, v, causal=True, eps=self.eps, state=before, **given)
        else:
            beta = upcast_half(self.rate(x)).sigmoid().mT
            q, k = sum_normalize(q), sum_normalize(k)
            o, weights = gated.recur(q, k, v, beta=beta, scale=1.0, state=before, **given)
        return self.out(merge(o)), None if state is None else FastWeightsState(weights)
