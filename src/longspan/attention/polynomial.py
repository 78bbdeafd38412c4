"""Attention with a second-degree polynomial in place of the exponential, in linear time."""

from typing import Any, NamedTuple, Unpack

from torch import Tensor, nn

from ..ops.linear import polynomial as op
from ..ops.tensors import merge, split, upcast_half
from ..states import sums
from ..states.sums import ContextSums
from .base import AllArguments, Attention


class PolynomialState(NamedTuple):
    """Sums of features of keys; float32 or wider; F = (D+1)(D+2)/2."""

    sums: Tensor  # (B,H,F,E+1) sum of phi(k) v^T; last column: sum of phi(k)


class Polynomial(Attention[PolynomialState | ContextSums]):
    r"""Exact attention with polynomial weights, or $e^x$ to second order, in linear time.

    The weights are $(q \cdot k / \sqrt D + c)^2$, as in ``kernel(similarity='polynomial', constant=c)``. The features
    $\phi$ are all products of two channels, about $D^2 / 2$. By operation count it is cheaper than softmax from about
    $N = D^2$ tokens on.

    ``constant``: $c \ge 0$; with 0, a query that is orthogonal to all keys reads 0. ``taylor``: use the Taylor series
    of the exponential, which is at least 1/2. ``channels``: channels D of each head's queries and keys (0: as many as
    of values); Arora et al. 2024 use 16, since the state has (D+1)(D+2)/2 rows. ``eps``: added to the denominator.
    ``context_dim``: width of the context of cross attention (0: dim).

    Source: Katharopoulos et al. 2020 (2006.16236), section 3.2.1; the Taylor form is from Arora et al. 2024.

    Raises:
        ValueError: For a negative constant, channels or eps, or a constant with taylor=True.
    """

    name, paper, cost = "polynomial", "2402.18668", "N D^3"
    family = "linear"
    learned_state = ("sums",)
    equations = (
        r"o_i = \frac{\sum_{j \in \mathcal{A}_i} s_{ij} v_j}{\sum_{j \in \mathcal{A}_i} s_{ij} + \epsilon}, \quad "
        r"s_{ij} = \left(\frac{q_i \cdot k_j}{\sqrt D} + c\right)^2 = \phi(q_i) \cdot \phi(k_j)",
        r"\text{taylor:} \quad s_{ij} = 1 + u + \frac{u^2}{2}, \quad u = \frac{q_i \cdot k_j}{\sqrt D}",
    )
    citation = (
        "Arora, Simran and Eyuboglu, Sabri and Zhang, Michael and Timalsina, Aman and Alberti, Silas and "
        "Zinsley, Dylan and Zou, James and Rudra, Atri and Ré, Christopher",
        "Simple linear attention language models balance the recall-throughput tradeoff",
        2024,
    )
    examples = ("polynomial(constant=0.5, eps=0.01)", "polynomial(taylor=True, channels=3)")
    states, contexts = (PolynomialState,), (ContextSums,)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        constant: float = 1.0,
        taylor: bool = False,
        channels: int = 0,
        eps: float = 1e-6,
        context_dim: int = 0,
    ):
        super().__init__(dim, heads, causal=causal)
        if taylor and constant != 1.0:
            raise ValueError(f"constant={constant} needs taylor=False; the Taylor form has no constant")
        if constant < 0:
            raise ValueError(f"constant={constant} must not be negative, since the features contain its square root")
        if channels < 0:
            raise ValueError(f"channels={channels} must be positive, or 0 for the number of channels of the values")
        if eps < 0:
            raise ValueError(f"eps={eps} is added to the denominator and must not be negative")
        self.constant, self.taylor, self.channels, self.eps = constant, taylor, channels, eps
        self.context_dim = context_dim
        self.kernel = op.polynomial(channels or dim // heads, constant, taylor, eps)
        self.query = nn.Linear(dim, heads * channels or dim)
        self.key = nn.Linear(context_dim or dim, heads * channels or dim)
        self.value = nn.Linear(context_dim or dim, dim)
        self.out = nn.Linear(dim, dim)

    def start(self, batch: int, capacity: int) -> PolynomialState:
        size = self.dim // self.heads
        return PolynomialState(upcast_half(self.weight_like.new_zeros(batch, self.heads, self.kernel.size, size + 1)))

    def _scaled(self, x: Tensor) -> Tensor:
        """Projected tokens (B,N,H*D) -> (B,H,N,D), times the square root of the scale 1 / sqrt D."""
        x = upcast_half(split(x, self.heads))
        return x * x.shape[-1] ** -0.25

    def attend(
        self, x: Tensor, state: PolynomialState | ContextSums | None, **given: Unpack[AllArguments]
    ) -> tuple[Tensor, PolynomialState | ContextSums | None]:
        kernel, q = self.kernel, self._scaled(self.query(x))

        def attend(
            q: Tensor, k: Tensor, v: Tensor, *, before: PolynomialState | None = None, **options: Any
        ) -> tuple[Tensor, PolynomialState]:
            o, after = op.attend(q, k, v, kernel, state=before and before.sums, **options)
            return o, PolynomialState(after)

        def matrix(
            q: Tensor, k: Tensor, allowed: Tensor, *, before: PolynomialState | None = None, **options: Any
        ) -> Tensor:
            return op.matrix(q, k, allowed, kernel, options.get("segments"), before and before.sums)

        form = sums.Form(attend, matrix, lambda q, found: op.read(q, found, kernel))
        o, state = sums.attend(form, q, self._project, x, state, causal=self.causal, **given)
        return self.out(merge(o)), state

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._scaled(self.key(x)), split(self.value(x), self.heads)
