"""HGRN (Qin et al. 2023, 2311.04823): a decaying sum per channel, whose gates have a lower bound per layer."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....ops import scan
from .....ops.tensors import upcast_half
from ..family import Family
from ..mixer import Call, ConvolvedMixer, RMSNorm, ShortConv, whole
from .hgrn2 import BoundedBody, log_gate


class HgrnState(NamedTuple):
    """The sums, and the tokens of the convolutions of inputs and gates; without them (B,0,0)."""

    sums: Tensor  # (B,width)
    i: Tensor  # (B,taps-1,width)
    f: Tensor  # (B,taps-1,width)


class Hgrn(ConvolvedMixer):
    """h = e^g h + silu(i) (1 - e^g), o = RMSNorm(h) silu(W x), the norm over all channels."""

    letters = "if"

    def __init__(self, config: Any, layer: int):
        super().__init__()
        hidden, self.layer = config.hidden_size, layer
        self.width = whole(hidden * config.expand_ratio, "expand_ratio")
        self.i_proj, self.f_proj, self.g_proj = (nn.Linear(hidden, self.width, bias=False) for _ in range(3))
        self.i_conv1d, self.f_conv1d = (
            ShortConv(self.width, config.conv_size, activation=None) if config.use_short_conv else None
            for _ in range(2)
        )
        self.g_norm = RMSNorm(self.width, config.norm_eps, config.elementwise_affine)
        self.o_proj = nn.Linear(self.width, hidden, bias=False)

    def start(self, batch: int) -> HgrnState:
        return HgrnState(upcast_half(self.like.new_zeros(batch, self.width)), *self.start_convs(batch))

    def forward(self, x: Tensor, state: HgrnState | None, call: Call) -> tuple[Tensor, HgrnState | None]:
        sums, *recent = self.start(len(x)) if state is None else state
        mixed, recent = self.project(x, recent, call)
        g = log_gate(mixed[1], self.layer, call)
        i = F.silu(upcast_half(mixed[0])) * -torch.expm1(g)
        h, sums = scan.diagonal(i, g, state=sums, **call.packing)
        y = self.o_proj(self.g_norm(h, self.g_proj(x)).to(x.dtype))
        return y, None if state is None else HgrnState(sums, *recent)


def _check(config: Any) -> str:
    if not config.expand_ratio or config.expand_ratio < 0:
        return f"expand_ratio={config.expand_ratio} must be positive"
    if config.use_lower_bound and config.expand_ratio != 1:
        return (
            f"expand_ratio={config.expand_ratio} must be 1 with use_lower_bound, whose bounds have hidden_size channels"
        )
    return ""


FAMILIES = (
    Family(
        "hgrn",
        "HGRN",
        Hgrn,
        options={"expand_ratio": 1, "use_short_conv": False, "conv_size": 4, "use_lower_bound": True},
        check=_check,
        body=BoundedBody,
    ),
)
