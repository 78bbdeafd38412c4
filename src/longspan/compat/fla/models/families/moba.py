"""Mixture of block attention (Lu et al. 2025, 2502.13189): the own block, and the best earlier ones by mean key."""

from typing import Any

from torch import Tensor, nn

from .....attention.moba import MoBA
from ..family import Family
from ..mechanism import Mechanism
from ..mixer import RMSNorm
from .forgetting_transformer import no_window


class BlockAttention(Mechanism, MoBA):
    """The original reads all keys in decoding; here a token reads the same blocks as in a whole sequence."""

    def __init__(self, config: Any, layer: int):
        hidden, count = config.hidden_size, config.num_heads
        super().__init__(
            hidden,
            count,
            block=config.moba_chunk_size,
            top=config.moba_topk,
            kv_heads=config.num_kv_heads or 0,
            rotary=config.rope_theta,
        )
        self.rename(hidden, config.qkv_bias)
        size = hidden // count
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(size, 1e-5), RMSNorm(size, 1e-5)
        low = nn.Linear(hidden, size, bias=False), nn.Linear(size, hidden, bias=False)
        self.g_proj = nn.Sequential(*low) if config.use_output_gate else None
        self.o_norm = RMSNorm(size, 1e-6)

    def gated(self, o: Tensor, x: Tensor) -> Tensor:
        shape = self.heads, -1
        gate = None if self.g_proj is None else self.g_proj(x).unflatten(-1, shape)
        return self.o_norm(o.unflatten(-1, shape), gate, Tensor.sigmoid).flatten(-2)


def check_rotary(config: Any) -> str:
    """Return why a config without rotary positions is not supported."""
    return f"rope_theta={config.rope_theta} must be a positive number" if not config.rope_theta else ""


FAMILIES = (
    Family(
        "moba",
        "MoBA",
        BlockAttention,
        options={
            "num_heads": 32,
            "num_kv_heads": None,
            "qkv_bias": False,
            "qk_norm": False,
            "window_size": None,
            "rope_theta": 10000.0,
            "moba_chunk_size": 256,
            "moba_topk": 4,
            "use_output_gate": False,
        },
        ignored=("use_flash_moba",),
        check=lambda config: no_window(config) or check_rotary(config),
    ),
)
