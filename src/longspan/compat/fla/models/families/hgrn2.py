"""HGRN2 (Qin et al. 2024, 2404.07904): gates with a lower bound per layer, whose complements are the keys."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....ops import gated
from .....ops.tensors import merge, upcast_half
from ..causal_lm import Body
from ..family import Family
from ..mixer import Call, ConvolvedMixer, RMSNorm, ShortConv, heads

EPS = 1e-5  # of the output norm, whatever norm_eps is


class Hgrn2State(NamedTuple):
    """The sums, and the tokens of the convolutions of queries, gates and inputs; without them (B,0,0)."""

    sums: Tensor  # (B,H,D,E)
    q: Tensor  # (B,taps-1,HD)
    f: Tensor  # (B,taps-1,HD)
    i: Tensor  # (B,taps-1,HE)


class BoundedBody(Body):
    """Adds the lower bounds of the gates: a softmax over layers, summed over earlier ones; 0 in layer 0."""

    def __init__(self, config: Any):
        super().__init__(config)
        if config.use_lower_bound:
            self.lower_bounds = nn.Parameter(torch.zeros(config.num_hidden_layers, config.hidden_size))

    def forward(self, x: Tensor, states: list[Any] | None, call: Call) -> tuple[Tensor, list[Any]]:
        if isinstance(bounds := getattr(self, "lower_bounds", None), Tensor):
            shares = upcast_half(bounds).softmax(0)
            call.shared["lower_bounds"] = shares.cumsum(0) - shares[0]
        return super().forward(x, states, call)


def log_gate(f: Tensor, layer: int, call: Call) -> Tensor:
    """Return log(b + (1 - b) sigmoid(f)) for the lower bound b of the layer, f (B,N,width)."""
    g = F.logsigmoid(upcast_half(f))
    bounds = call.shared.get("lower_bounds")
    if bounds is None or layer == 0:
        return g
    return torch.logaddexp(bounds[layer].log(), torch.log1p(-bounds[layer]) + g)


class Hgrn2(ConvolvedMixer):
    """S = Diag(e^g) S + (1 - e^g) v^T, o = S^T silu(q) / sqrt(D); RMS norm over all heads."""

    letters = "qfi"

    def __init__(self, config: Any, layer: int):
        super().__init__()
        hidden, self.layer = config.hidden_size, layer
        self.heads, keys = sizes(config)
        self.sizes = keys, hidden // self.heads
        widths = self.heads * keys, self.heads * keys, hidden
        self.q_proj, self.f_proj, self.i_proj = (nn.Linear(hidden, width, bias=False) for width in widths)
        self.q_conv1d, self.f_conv1d, self.i_conv1d = (
            ShortConv(width, config.conv_size, activation=None) if config.use_short_conv else None for width in widths
        )
        self.g_norm = RMSNorm(hidden, EPS, config.elementwise_affine)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def start(self, batch: int) -> Hgrn2State:
        return Hgrn2State(upcast_half(self.like.new_zeros(batch, self.heads, *self.sizes)), *self.start_convs(batch))

    def forward(self, x: Tensor, state: Hgrn2State | None, call: Call) -> tuple[Tensor, Hgrn2State | None]:
        sums, *recent = self.start(len(x)) if state is None else state
        mixed, recent = self.project(x, recent, call)
        g = log_gate(mixed[1], self.layer, call)
        k = (-torch.expm1(g)).to(x.dtype)
        q, k, g = (heads(t, self.sizes[0]) for t in (F.silu(mixed[0]), k, g))
        o, sums = gated.recur(q, k, heads(mixed[2], self.sizes[1]), log_decay=g, state=sums, **call.packing)
        return self.o_proj(self.g_norm(merge(o))), None if state is None else Hgrn2State(sums, *recent)


def sizes(config: Any) -> tuple[int, int]:
    """Return the number of heads, and their channels of keys."""
    if config.expand_ratio is not None:
        return config.hidden_size // config.expand_ratio, config.expand_ratio
    return config.num_heads, config.hidden_size // config.num_heads


def _check(config: Any) -> str:
    if config.expand_ratio is None and config.num_heads is None:
        return "one of expand_ratio and num_heads must be given"
    count, keys = sizes(config)
    if not count or config.hidden_size % count or (config.use_lower_bound and count * keys != config.hidden_size):
        return f"hidden_size={config.hidden_size} does not divide into {count} heads of {keys} channels"
    return ""


FAMILIES = (
    Family(
        "hgrn2",
        "HGRN2",
        Hgrn2,
        options={
            "num_heads": None,
            "expand_ratio": 128,
            "use_short_conv": False,
            "conv_size": 4,
            "use_lower_bound": True,
        },
        check=_check,
        body=BoundedBody,
    ),
)
