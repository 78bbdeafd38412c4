"""Native sparse attention (Yuan et al. 2025, 2502.11089): means of blocks, the best blocks, and a window."""

from typing import Any

from .....attention.nsa import NSA
from .....states import block_sums
from .....states.block_sums import BlockCache
from ..family import Family
from ..mechanism import QKV, Mechanism
from .moba import check_rotary


class NativeSparseAttention(Mechanism, NSA):
    """Three branches with a sigmoid gate each; heads may be wider than hidden_size / num_heads."""

    names = QKV | {"gate": "g_proj"}

    def __init__(self, config: Any, layer: int):
        super().__init__(
            config.num_heads * config.head_dim,
            config.num_heads,
            block=config.block_size,
            top=config.block_counts,
            window=config.window_size,
            kv_heads=config.num_kv_heads or 0,
            rotary=config.rope_theta,
        )
        self.size = config.head_dim
        self.rename(config.hidden_size, config.qkv_bias)

    def start(self, batch: int, capacity: int = 0) -> BlockCache:
        return block_sums.empty(batch, self.groups, capacity, self.size, self.like, width=2 * self.size)


def _check(config: Any) -> str:
    for name, least in (("block_counts", 3), ("window_size", 1), ("block_size", 1)):
        if (getattr(config, name) or 0) < least:
            return f"{name}={getattr(config, name)} must be at least {least}"
    return check_rotary(config)


FAMILIES = (
    Family(
        "nsa",
        "NSA",
        NativeSparseAttention,
        options={
            "num_heads": 64,
            "num_kv_heads": 4,
            "head_dim": 32,
            "qkv_bias": False,
            "block_size": 64,
            "block_counts": 16,
            "window_size": 512,
            "rope_theta": 10000.0,
        },
        check=_check,
    ),
)
