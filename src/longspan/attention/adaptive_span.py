"""Softmax attention over a window whose length each head learns."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.tensors import merge, split, upcast_half
from ..patterns import band
from ..states import lookback
from ..states.window import Window
from .base import Attention


class AdaptiveSpan(Attention[Window]):
    r"""Softmax attention over a span that each head learns, with a soft mask at the far end of the span.

    The soft mask m is 1 up to a distance of z, falls linearly over R tokens, and is 0 from z + R on. Positions count
    real tokens. A token sees itself, with m = 1; the paper's sum excludes it.

    ``span``: S, the largest span in tokens. ``ramp``: R, the width of the soft mask's slope in tokens. ``initial``: the
    span z of all heads at initialization, in tokens. ``dynamic``: whether each token computes its spans from its input,
    instead of one learned span per head.

    Without ``dynamic``, the learned parameter is f, the ``fraction`` of S. A fraction outside 0 to 1 counts as 0 or 1.
    Its gradient ignores this clamp, so that the gradients of the parts of a batch add up to that of the batch. Training
    clamps the fraction after each optimizer step, as the paper's code does. In your own training loop, call
    ``project()`` after each step.

    ``record["penalty"]`` is the mean span. Add it to the loss with a small factor (``run.penalty`` in a training).
    ``spans(x)`` returns the spans. Keys beyond the span of all heads are not read. The state is a ring of the last
    $\max \lceil z + R \rceil$ keys and values, or S + R if ``dynamic``. It is valid until the spans outgrow it.

    Source: Sukhbaatar et al. 2019, section 3, eqs 3-4. Raises ValueError for span < 1, ramp < 1, an ``initial`` span
    outside 0 to S or together with ``dynamic``, and for a state whose ring is smaller than the current spans.
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
            raise ValueError(f"initial={initial} needs dynamic=False; with dynamic=True the spans depend on the tokens")
        self.span, self.ramp, self.initial, self.dynamic = span, ramp, initial, dynamic
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        if dynamic:
            self.extent = nn.Linear(dim, heads)
        else:
            self.fraction = nn.Parameter(torch.full((heads,), initial / span))

    def spans(self, x: Tensor) -> Tensor:
        """Return the span z of each head and query, in tokens.

        Args:
            x: (B,N,dim) input.

        Returns:
            (B,H,N), in float32 or better.
        """
        if self.dynamic:
            return self.span * upcast_half(self.extent(x)).mT.sigmoid()
        return self._fixed()[:, 0].expand(len(x), -1, x.shape[1])

    def _fixed(self) -> Tensor:
        """z of each head (H,1,1): the value of the clamped fraction, with the gradient of the fraction itself."""
        f = upcast_half(self.fraction)
        return self.span * (f.detach().clamp(0, 1) + (f - f.detach()))[:, None, None]

    @torch.no_grad()
    def project(self) -> None:
        """Clamp the fractions to [0, 1]."""
        if not self.dynamic:
            self.fraction.clamp_(0, 1)

    def keys_seen(self) -> int:
        """Return the number of keys that the widest head sees: max ceil(z + R), at most S + R."""
        # In a compiled graph sizes cannot depend on weights; keys beyond the spans get weight 0 there.
        if self.dynamic or torch.compiler.is_compiling():
            return self.span + self.ramp
        try:
            return math.ceil(self._fixed().max().item() + self.ramp)
        except RuntimeError:  # fake and meta tensors have sizes, but no values
            return self.span + self.ramp

    def _keys_read(self, x: Tensor, state: Window | None) -> int:
        """``keys_seen``; in a decode step on CUDA all keys of the state, since reading the spans waits for the device.

        Keys beyond the spans have weight 0. That the state holds all others is asserted on the device.
        """
        if state is None or not x.is_cuda or x.shape[1] != 1 or self.dynamic or torch.compiler.is_compiling():
            return self.keys_seen()
        slots = state.keys.shape[2]
        fits = self._fixed().max() + self.ramp <= slots
        message = "the state has fewer keys than the spans see"
        torch._assert_async(fits, message)  # pyright: ignore[reportPrivateImportUsage]  # no public equivalent
        return slots

    def start(self, batch: int, capacity: int) -> Window:
        return self._ring(batch, self.keys_seen())

    def init_trainable_state(self, batch: int) -> Window:
        return self._ring(batch, self.span + self.ramp)

    def state_sizes(self) -> Window:
        return self._ring(1, 0)

    def _ring(self, batch: int, slots: int) -> Window:
        empty = self.weight_like.new_zeros(batch, self.heads, slots, self.dim // self.heads)
        position = torch.zeros(batch, dtype=torch.long, device=empty.device)
        return Window(self._wider(empty, 0.0), empty.clone(), position)

    def _wider(self, x: Tensor, channel: Tensor | float) -> Tensor:
        """Append a channel, a number or (B,H,N,1), if ``dynamic``: (B,H,N,D) -> (B,H,N,D+1)."""
        if not self.dynamic:
            return x
        last = channel.to(x.dtype) if isinstance(channel, Tensor) else torch.full_like(x[..., :1], channel)
        return torch.cat([x, last], -1)

    def attend(
        self,
        x: Tensor,
        state: Window | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, Window | None]:
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        seen = self._keys_read(x, state)
        if state is not None and not torch.compiler.is_compiling() and state.keys.shape[2] < seen:
            raise ValueError(
                f"the state keeps {state.keys.shape[2]} keys, and the spans have grown to {seen}; start a new state"
            )
        bias = _Ramp(self.span, self.ramp, None if self.dynamic else self._fixed())
        # The logit of the span is an additional channel of the query; all keys are 0 in this channel.
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
    """log m, added to the logits: of one span per head (H,1,1), or of the spans in the last channel of the queries."""

    def __init__(self, span: int, ramp: int, spans: Tensor | None):
        self.span, self.ramp, self.spans = span, ramp, spans

    def score(self, q_tile: Tensor, i: Tensor, j: Tensor) -> Tensor:
        z = self.span * upcast_half(q_tile[..., -1:]).sigmoid() if self.spans is None else self.spans
        m = ((self.ramp + z - (i[:, None] - j[None])) / self.ramp).clamp(0, 1)
        # log 0 has an infinite gradient, which is NaN times a weight of 0; so it is never computed.
        return m.masked_fill(m == 0, 1.0).log().masked_fill(m == 0, -torch.inf)
