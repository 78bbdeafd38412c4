"""Preconditioned Gated DeltaNet: a delta rule that takes shorter steps along channels that many keys have used."""

from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.init import time_steps
from ..modules.norms import HeadNorm, expanded
from ..modules.short_conv import ShortConvolution
from ..ops.gated import preconditioned as op
from ..ops.gated.decays import log_decay
from ..ops.tensors import merge, split, unit, upcast_half
from .base import Attention, TokenArguments


class PreconditionedDeltaNetState(NamedTuple):
    """The fast weights, the squares of the keys, and the tokens of the short convolution; float32 or wider."""

    sums: Tensor  # (B,H,D,E) the fast weights
    curvature: Tensor  # (B,H,D) decayed sum of the squares of the keys
    recent: Tensor  # (B,convolution-1,2HD+HE) the last projected queries, keys and values, concatenated


class PreconditionedDeltaNet(Attention[PreconditionedDeltaNetState]):
    r"""Gated DeltaNet with a diagonal preconditioner: its steps are longer along channels that few keys have used.

    $\alpha_t$, $\beta_t$, $\gamma_t$ and $\omega_t$ are one number per head; $\gamma_t$ is computed as $\alpha_t$, and
    $\omega_t$ as $\beta_t$, from other weights. The norm is RMS.

    ``span``: the scales $M_t$ lie between 1 / r and r. ``expand_v``: the value dimension E of a head, as a multiple of
    dim / heads. ``convolution``: the width of the short convolution in tokens (0: none).

    Both decays are initialized as in ``gated_deltanet``, and $c = -0.2$. With r up to 2 no step overshoots, since
    $\beta_t M_t \le 2$.

    Source: Tumma, Loo and Rus 2026 (2604.21100), the preconditioned gated delta rule; the form of $M_t$ and the
    defaults are those of flash-linear-attention 0.6.

    Raises:
        ValueError: For a ``span`` outside (1, 2], or an ``expand_v`` that leaves each head a fraction of a channel.
    """

    name, paper, cost = "preconditioned_deltanet", "2604.21100", "N D^2"
    family = "gated"
    learned_state = ("sums", "recent")
    equations = (
        r"P_t = \alpha_t S_{t-1}, \quad S_t = P_t + \beta_t (M_t \odot k_t) (v_t - P_t^\top k_t)^\top, \quad "
        r"o_t = \mathrm{norm}\left(\frac{S_t^\top q_t}{\sqrt D}\right) \odot \mathrm{silu}(W_g x_t)",
        r"A_t = \gamma_t A_{t-1} + \omega_t \, k_t \odot k_t, \quad M_t = r^{-u_t / (1 + |u_t|)}, \quad "
        r"u_t = \log(A_t + \epsilon) - c",
        r"\log \alpha_t = -e^a \, \mathrm{softplus}(w \cdot x_t + b), \quad \beta_t = \sigma(u \cdot x_t)",
        r"[q_t; k_t; v_t] = \mathrm{silu}(\mathrm{convolution}(W x)_t), \quad "
        r"q_t \leftarrow \frac{q_t}{\lVert q_t \rVert}, \quad k_t \leftarrow \frac{k_t}{\lVert k_t \rVert}",
    )
    citation = (
        "Tumma, Neehal and Loo, Noel and Rus, Daniela",
        "Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences",
        2026,
    )
    examples = ("preconditioned_deltanet", "preconditioned_deltanet(span=2.0, expand_v=1.0, convolution=2)")
    directions, states = ("causal",), (PreconditionedDeltaNetState,)
    kernels = ("convolution", "scan", "general")

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        span: float = 1.5,
        expand_v: float = 2.0,
        convolution: int = 4,
    ):
        super().__init__(dim, heads, causal=causal)
        if not 1 < span <= 2:
            raise ValueError(f"span={span} must be above 1 and at most 2")
        self.span, self.expand_v, self.convolution = span, expand_v, convolution
        self.sizes = dim // heads, expanded(dim // heads, expand_v, "expand_v")
        self.widths = (dim, dim, heads * self.sizes[1])
        self.query, self.key, self.value = (nn.Linear(dim, width, bias=False) for width in self.widths)
        self.rate, self.decay, self.weight, self.fade = (nn.Linear(dim, heads, bias=False) for _ in range(4))
        # 1 - rand is never 0: weight decay would turn the logarithm of 0 into NaN.
        self.a_log, self.fade_log = (nn.Parameter((16 * (1 - torch.rand(heads))).log()) for _ in range(2))
        self.dt_bias, self.fade_bias = (nn.Parameter(time_steps(heads)) for _ in range(2))
        self.center = nn.Parameter(torch.full((heads,), -0.2))
        self.mix = ShortConvolution(sum(self.widths), convolution) if convolution else None
        self.out_gate = nn.Linear(dim, self.widths[2], bias=False)
        self.norm = HeadNorm(self.sizes[1], gate="silu")
        self.out = nn.Linear(self.widths[2], dim, bias=False)

    def start(self, batch: int, capacity: int) -> PreconditionedDeltaNetState:
        like, (keys, values) = upcast_half(self.weight_like), self.sizes
        sums, curvature = (like.new_zeros(batch, self.heads, *shape) for shape in ((keys, values), (keys,)))
        recent = self.mix.start(batch) if self.mix else like.new_zeros(batch, 0, sum(self.widths))
        return PreconditionedDeltaNetState(sums, curvature, recent)

    def attend(
        self, x: Tensor, state: PreconditionedDeltaNetState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, PreconditionedDeltaNetState | None]:
        sums, curvature, recent = self.start(x.shape[0], 0) if state is None else state
        mixed = torch.cat([self.query(x), self.key(x), self.value(x)], -1)
        if self.mix is not None:
            mixed, recent = self.mix(mixed, recent, activation="silu", **given)
        else:
            mixed = F.silu(mixed)
        q, k, v = (split(t, self.heads) for t in mixed.split(self.widths, -1))
        o, after = op.attend(
            unit(upcast_half(q)),
            unit(upcast_half(k)),
            v,
            beta=upcast_half(self.rate(x)).sigmoid().mT,
            log_decay=log_decay(self.a_log, self.decay(x), self.dt_bias).mT,
            weight=upcast_half(self.weight(x)).sigmoid(),
            log_fade=log_decay(self.fade_log, self.fade(x), self.fade_bias),
            center=upcast_half(self.center),
            span=self.span,
            state=(sums, curvature),
            **given,
        )
        y = self.out(merge(self.norm(o, split(self.out_gate(x), self.heads))))
        return y, None if state is None else PreconditionedDeltaNetState(*after, recent)
