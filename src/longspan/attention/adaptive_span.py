"""Softmax attention over a window whose length every head learns."""

import math

import torch
from torch import Tensor, nn

from ..ops.tensors import merge, split, upcast_half
from ..patterns import band
from ..states import lookback
from ..states.window import Window
from .base import Attention


class AdaptiveSpan(Attention):
    r"""Each head learns how far back it looks: the weights of farther keys fall to zero along a ramp.

    The soft mask m leaves full weight up to the span z, and exactly none from z + R on. Positions count real tokens.
    The token itself is seen, with m = 1; the paper's sum leaves it out.

    ``span``: S, the longest span. ``ramp``: R, over how many tokens weights fall. ``initial``: the span z, in tokens,
    that heads begin with. ``dynamic``: every token chooses its own span for each head; otherwise z is one number per
    head, learned as f, the ``fraction`` of S.

    A fraction outside 0 to 1 counts as 0 or 1. Its gradient is that of the span there, as if nothing was clamped, so
    that gradients of parts of a batch add up to that of the batch. Training clamps the fraction itself after each
    optimizer step, as the paper's code does; a training loop of your own calls ``project()`` there.

    ``record["penalty"]`` is the mean span, to be added to the loss times some small factor (``run.penalty`` of a
    training); ``spans(x)`` gives the spans. Keys that no head sees are not read. The state is a ring of the last
    $\max \lceil z + R \rceil$ keys and values, S + R of them if ``dynamic``; it serves as long as the spans do not
    outgrow it.

    Source: Sukhbaatar et al. 2019, section 3, eqs 3-4. Raises ValueError for span < 1, ramp < 1, an ``initial`` span
    outside 0 to S or beside ``dynamic``, and for a state whose ring is smaller than the spans have become since.
    """

    name, paper, cost = "adaptive_span", "1905.07799", "N W D"
    family = "sparse"
    equations = (
        r"o_i = \frac{\sum_{j \le i} m_{ij} e^{s_{ij}} v_j}{\sum_{j \le i} m_{ij} e^{s_{ij}}}, \quad "
        r"s_{ij} = \frac{q_i \cdot k_j}{\sqrt D}, \quad "
        r"m_{ij} = \min\left(\max\left(\frac{R + z - (i - j)}{R}, 0\right), 1\right)",
        r"z = S f, \quad \text{dynamic:} \quad z_i = S \, \sigma(w \cdot x_i + b)",
    )
    citation = (
        "Sukhbaatar, Sainbayar and Grave, Edouard and Bojanowski, Piotr and Joulin, Armand",
        "Adaptive Attention Span in Transformers",
        2019,
    )
    examples = ("adaptive_span(span=7, ramp=3, initial=2.5)", "adaptive_span(span=7, ramp=3, dynamic=True)")
    directions, states = ("causal",), (Window,)
    penalty = "the mean span of its heads and queries, in tokens"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        span: int = 1024,
        ramp: int = 32,
        initial: float = 0.0,
        dynamic: bool = False,
    ):
        super().__init__(dim, heads, causal=causal)
        for option, value in (("span", span), ("ramp", ramp)):
            if value < 1:
                raise ValueError(f"{option}={value} is a number of tokens; it must be at least 1")
        if not 0 <= initial <= span:
            raise ValueError(f"initial={initial} is a span in tokens; it must lie between 0 and span={span}")
        if dynamic and initial:
            raise ValueError(f"initial={initial} belongs to dynamic=False; a dynamic span begins where its tokens say")
        self.span, self.ramp, self.initial, self.dynamic = span, ramp, initial, dynamic
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        if dynamic:
            self.extent = nn.Linear(dim, heads)
        else:
            self.fraction = nn.Parameter(torch.full((heads,), initial / span))

    def spans(self, x: Tensor) -> Tensor:
        """z in tokens, that of each head and query: x (B,N,dim) -> (B,H,N), float32 at least."""
        if self.dynamic:
            return self.span * upcast_half(self.extent(x)).mT.sigmoid()
        return self._fixed()[:, 0].expand(len(x), -1, x.shape[1])

    def _fixed(self) -> Tensor:
        """z of each head, (H,1,1): that of the fraction in [0, 1], with the derivative of the fraction itself."""
        f = upcast_half(self.fraction)
        return self.span * (f.detach().clamp(0, 1) + (f - f.detach()))[:, None, None]

    @torch.no_grad()
    def project(self):
        """Clamp the fractions to [0, 1]."""
        if not self.dynamic:
            self.fraction.clamp_(0, 1)

    def keys_seen(self) -> int:
        """How many keys the widest head sees: max ceil(z + R), at most S + R."""
        # A compiled graph has no size that depends on weights; what is beyond the spans weighs nothing in it.
        if self.dynamic or torch.compiler.is_compiling():
            return self.span + self.ramp
        try:
            return math.ceil(self._fixed().max().item() + self.ramp)
        except RuntimeError:  # tensors without numbers, of which only the sizes are asked
            return self.span + self.ramp

    def start(self, batch, capacity):
        return self._ring(batch, self.keys_seen())

    def init_trainable_state(self, batch):
        return self._ring(batch, self.span + self.ramp)

    def state_sizes(self):
        return self._ring(1, 0)

    def _ring(self, batch, slots):
        empty = self.weight_like.new_zeros(batch, self.heads, slots, self.dim // self.heads)
        position = torch.zeros(batch, dtype=torch.long, device=empty.device)
        return Window(self._wider(empty, 0.0), empty.clone(), position)

    def _wider(self, x, channel):
        """(B,H,N,D) -> (B,H,N,D+1) if ``dynamic``, with that number, or those (B,H,N,1), as the last channel."""
        if not self.dynamic:
            return x
        last = channel.to(x.dtype) if isinstance(channel, Tensor) else torch.full_like(x[..., :1], channel)
        return torch.cat([x, last], -1)

    def attend(self, x, state, *, mask=None, segments=None, record=None, donate=False):
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        seen = self.keys_seen()
        if state is not None and not torch.compiler.is_compiling() and state.keys.shape[2] < seen:
            raise ValueError(
                f"the state keeps {state.keys.shape[2]} keys and the spans have grown to {seen}; start anew"
            )
        bias = _Ramp(self.span, self.ramp, None if self.dynamic else self._fixed())
        # A query takes the logit of its span along, in a channel where all keys are zero.
        q, k = self._wider(q, self.extent(x).mT[..., None] if self.dynamic else 0.0), self._wider(k, 0.0)
        o, state = lookback.attend(
            q,
            k,
            v,
            state,
            band(seen - 1),
            bias=bias,
            scale=v.shape[-1] ** -0.5,
            mask=mask,
            segments=segments,
            record=record if record and "matrix" in record else None,
            donate=donate,
        )
        if record and "penalty" in record:
            real = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask
            spans = self.spans(x).masked_fill(~real[:, None], 0.0)
            record["penalty"] = spans.sum() / (self.heads * real.sum()).clamp(min=1)
        return self.out(merge(o)), state


class _Ramp:
    """log m, to be added to the logits; of one span per head (H,1,1), or of those in the queries' last channel."""

    def __init__(self, span: int, ramp: int, spans: Tensor | None):
        self.span, self.ramp, self.spans = span, ramp, spans

    def score(self, q_tile: Tensor, i: Tensor, j: Tensor) -> Tensor:
        z = self.span * upcast_half(q_tile[..., -1:]).sigmoid() if self.spans is None else self.spans
        m = ((self.ramp + z - (i[:, None] - j[None])) / self.ramp).clamp(0, 1)
        # log 0 has no gradient that one could multiply by a weight of zero, so it is never taken.
        return m.masked_fill(m == 0, 1.0).log().masked_fill(m == 0, -torch.inf)
