"""The forgetting transformer (Lin et al. 2025, 2503.02130): softmax attention with a forget gate per head."""

from typing import Any

from torch import Tensor, nn

from .....attention.forgetting import Forgetting
from ..family import Family
from ..mechanism import QKV, HeadNorm, Mechanism


class ForgettingAttention(Mechanism, Forgetting):
    """Logits fall by the sums of log sigmoid(f); a sigmoid gates the output if ``use_output_gate``."""

    names = QKV | {"forget": "f_proj"}

    def __init__(self, config: Any, layer: int):
        hidden, count = config.hidden_size, config.num_heads
        super().__init__(hidden, count, kv_heads=config.num_kv_heads or 0)
        self.rename(hidden, config.qkv_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (HeadNorm(number, hidden // count) for number in (count, self.groups))
        self.g_proj = nn.Linear(hidden, hidden, bias=False) if config.use_output_gate else None

    def gated(self, o: Tensor, x: Tensor) -> Tensor:
        return o if self.g_proj is None else self.g_proj(x).sigmoid() * o


def no_window(config: Any) -> str:
    """Return why a config with a window is not supported; "" without one."""
    if config.window_size is not None:
        return f"window_size={config.window_size} must be null: in the original it cuts the cache in decoding alone"
    return ""


FAMILIES = (
    Family(
        "forgetting_transformer",
        "ForgettingTransformer",
        ForgettingAttention,
        options={
            "num_heads": 32,
            "num_kv_heads": None,
            "qkv_bias": False,
            "qk_norm": False,
            "window_size": None,
            "use_output_gate": False,
        },
        check=no_window,
    ),
)
