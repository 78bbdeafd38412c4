"""PaTH attention (Yang et al. 2025, 2505.16381): products of Householder maps as positions."""

from typing import Any

from torch import Tensor

from .....attention.path import PaTH
from ..family import Family
from ..mechanism import QKV, Mechanism
from ..mixer import Call, ShortConv

RANK, TAPS = 32, 3


class DirectionConv(ShortConv):
    """The convolution of the directions, with the arguments of longspan's."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, state: Tensor, *, activation: str, mask: Tensor | None, donate: bool
    ) -> tuple[Tensor, Tensor]:
        return super().forward(x, state, Call(mask, None, donate))


class PathAttention(Mechanism, PaTH):
    """Keys move by I - b w w^T at each token, with directions w of low rank, or of one matrix."""

    names = QKV | {"direction": "w_proj", "mix": "w_conv1d", "rate": "bt_proj"}

    def __init__(self, config: Any, layer: int):
        hidden, rank = config.hidden_size, RANK if config.use_low_rank_w else 0
        taps = TAPS if config.use_w_shortconv else 0
        super().__init__(hidden, config.num_heads, kv_heads=config.num_kv_heads or 0, rank=rank, convolution=taps)
        self.rename(hidden)
        if not rank:
            self.w_proj = self.w_proj[0]
        if taps:
            self.w_conv1d = DirectionConv(self.key.out_features, taps)


def _check(config: Any) -> str:
    return "use_forget_gate must be false" if config.use_forget_gate else ""


FAMILIES = (
    Family(
        "path_attn",
        "PaTHAttention",
        PathAttention,
        options={
            "num_heads": 32,
            "num_kv_heads": None,
            "use_forget_gate": False,
            "use_w_shortconv": True,
            "use_low_rank_w": True,
        },
        check=_check,
    ),
)
