"""Stick-breaking attention (Tan et al. 2024, 2410.17980): sigmoids in place of the softmax, from the nearest key on."""

from typing import Any

from .....attention.stick_breaking import StickBreaking
from ..family import Family
from ..mechanism import Mechanism
from ..mixer import RMSNorm


class StickBreakingAttention(Mechanism, StickBreaking):
    """The original computes in half precision only, and has no cache."""

    def __init__(self, config: Any, layer: int):
        hidden, count = config.hidden_size, config.num_heads
        super().__init__(hidden, count, kv_heads=config.num_kv_heads or 0, current=config.attend_current)
        self.rename(hidden, config.qkv_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(hidden // count, config.norm_eps) for _ in range(2))


FAMILIES = (
    Family(
        "stickbreaking_attn",
        "StickBreakingAttention",
        StickBreakingAttention,
        options={
            "num_heads": 32,
            "num_kv_heads": None,
            "qkv_bias": False,
            "qk_norm": False,
            "attend_current": False,
            "use_cache": False,
        },
    ),
)
