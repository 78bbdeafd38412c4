"""Attention with a second-degree polynomial in place of the exponential, in time that is linear in the length."""

from typing import NamedTuple

from torch import Tensor, nn

from ..ops.linear import polynomial as op
from ..ops.tensors import merge, split, upcast_half
from ..states import sums
from ..states.sums import ContextSums
from .base import Attention


class PolynomialState(NamedTuple):
    """float32 at least; F = (D+1)(D+2)/2."""

    sums: Tensor  # (B,H,F,E+1) sum of phi(k) v^T; last column: sum of phi(k)


class Polynomial(Attention):
    r"""Exact attention with $(q \cdot k / \sqrt D + c)^2$, or with $e^x$ to second order, by products of two channels.

    It equals ``kernel(similarity='polynomial', constant=c)`` in linear time. The features $\phi$ are all products of
    two channels, $D^2 / 2$ of them, so that by its operations it pays from about $N = D^2$ on. It has no kernel of its
    own: with heads of 64 channels it is no faster than fused softmax at 16384 tokens.

    ``constant``: $c \ge 0$; with 0, a query at right angles to all keys sees nothing. ``taylor``: the exponential's
    series instead, never below 1/2. ``channels``: of each head's queries and keys (0: as many as of values),
    the D of these formulas; 16 in Arora et al. 2024, as the state has (D+1)(D+2)/2 rows. ``eps``: added to the
    denominator. ``context_dim``: width of the context of cross attention (0: dim).

    Source: Katharopoulos et al. 2020 (2006.16236), section 3.2.1; the Taylor form is that of Arora et al. 2024.
    """

    name, paper, cost = "polynomial", "2402.18668", "N D^3"
    family = "linear"
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
            raise ValueError(f"constant={constant} belongs to taylor=False; the Taylor form has none")
        if constant < 0:
            raise ValueError(f"constant={constant} must not be negative: the features would need its square root")
        if channels < 0:
            raise ValueError(f"channels={channels} must be positive, or 0 for as many as of values")
        if eps < 0:
            raise ValueError(f"eps={eps} is added to the denominator and must not be negative")
        self.constant, self.taylor, self.channels, self.eps = constant, taylor, channels, eps
        self.context_dim = context_dim
        self.query = nn.Linear(dim, heads * channels or dim)
        self.key = nn.Linear(context_dim or dim, heads * channels or dim)
        self.value = nn.Linear(context_dim or dim, dim)
        self.out = nn.Linear(dim, dim)

    def start(self, batch, capacity):
        size, d = self.dim // self.heads, self.query.out_features // self.heads
        return PolynomialState(
            upcast_half(self.weight_like.new_zeros(batch, self.heads, (d + 1) * (d + 2) // 2, size + 1))
        )

    def _scaled(self, x: Tensor) -> Tensor:
        """Projected tokens (B,N,H*D) -> (B,H,N,D), with half of the scale 1 / sqrt D."""
        x = upcast_half(split(x, self.heads))
        return x * x.shape[-1] ** -0.25

    def attend(
        self,
        x,
        state,
        *,
        mask=None,
        segments=None,
        prefix=None,
        context=None,
        context_mask=None,
        record=None,
        donate=False,
    ):
        q, kernel = self._scaled(self.query(x)), {"constant": self.constant, "taylor": self.taylor, "eps": self.eps}

        def attend(q, k, v, *, before=None, **options):
            o, after = op.attend(q, k, v, state=before and before.sums, **options, **kernel)
            return o, PolynomialState(after)

        def matrix(q, k, allowed, *, before=None, segments=None, **_):
            return op.matrix(q, k, allowed, state=before and before.sums, segments=segments, **kernel)

        form = sums.Form(attend, matrix, lambda q, found: op.read(q, found, **kernel))
        o, state = sums.attend(
            form,
            q,
            self._project,
            x,
            state,
            causal=self.causal,
            mask=mask,
            segments=segments,
            prefix=prefix,
            context=context,
            context_mask=context_mask,
            record=record,
            donate=donate,
        )
        return self.out(merge(o)), state

    def _project(self, x):
        return self._scaled(self.key(x)), split(self.value(x), self.heads)
