"""Transformers of flash-linear-attention: plain, with ternary weights (2402.17764), with latent keys (2405.04434)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....modules.rotary import rotate
from .....ops.tensors import merge, positions
from .....states.kv_cache import KeyValues
from ..attention import Attention, attend
from ..family import Family
from ..mixer import Call, Mixer, RMSNorm, heads
from .moba import check_rotary

BIT_OPTIONS = ("num_heads", "num_kv_heads", "window_size", "rope_theta")
OPTIONS = (*BIT_OPTIONS, "qkv_bias", "qk_norm")


def attention(config: Any, layer: int) -> Attention:
    """Return the softmax attention of a layer."""
    return Attention(config.hidden_size, layers=None, **{name: getattr(config, name) for name in OPTIONS})


class BitLinear(nn.Linear):
    """A norm, then activations of 8 bits times weights -1, 0 or 1 with one scale; gradients ignore the rounding."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)
        self.norm = RMSNorm(inputs, 1e-8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        levels = 127 / x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-5)
        size = self.weight.detach().abs().mean().clamp(min=1e-5)
        # A half is rounded away from zero in activations, and to even in weights, as in the original.
        rounded = (x * levels).abs().add(0.5).floor().copysign(x).clamp(-128, 127) / levels
        ternary = (self.weight / size).round().clamp(-1, 1) * size
        return F.linear(x + (rounded - x).detach(), self.weight + (ternary - self.weight).detach())


class BitAttention(Attention):
    """Softmax attention whose projections are ``BitLinear``."""

    def __init__(self, config: Any, layer: int):
        given = {name: getattr(config, name) for name in BIT_OPTIONS}
        super().__init__(config.hidden_size, layers=None, **given)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            plain = self.get_submodule(name)
            assert isinstance(plain, nn.Linear)
            setattr(self, name, BitLinear(plain.in_features, plain.out_features))


class LatentAttention(Mixer):
    """Keys and values from few channels; a part of each query and key has rotary positions, that of keys shared."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        hidden, count, self.window_size = config.hidden_size, config.num_heads, config.window_size
        self.plain, self.turned, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.heads, self.size, self.rope_theta = count, self.plain + self.turned, config.rope_theta
        self.q_proj = low_rank(hidden, config.q_lora_rank, count * self.size)
        self.k_rope = nn.Linear(hidden, self.turned, bias=False)
        self.kv_proj = low_rank(hidden, config.kv_lora_rank, count * (self.plain + self.value))
        self.o_proj = nn.Linear(count * self.value, hidden, bias=False)

    def start(self, batch: int) -> KeyValues:
        keys, values = (self.like.new_zeros(batch, self.heads, 0, size) for size in (self.size, self.value))
        return KeyValues(keys, values, torch.zeros(batch, dtype=torch.long, device=keys.device))

    def forward(self, x: Tensor, state: KeyValues | None, call: Call) -> tuple[Tensor, KeyValues | None]:
        at, _ = positions(x, state and state.length, mask=call.mask, segments=call.segments)
        q, q_turned = heads(self.q_proj(x), self.size).split([self.plain, self.turned], -1)
        k, v = heads(self.kv_proj(x), self.plain + self.value).split([self.plain, self.value], -1)
        q_turned, k_turned = (rotate(t, at, self.rope_theta) for t in (q_turned, self.k_rope(x)[:, None]))
        q, k = torch.cat([q, q_turned], -1), torch.cat([k, k_turned.expand(-1, self.heads, -1, -1)], -1)
        o, state = attend(q, k, v, at, state, call, self.window_size)
        return self.o_proj(merge(o)), state


def low_rank(inputs: int, rank: int | None, outputs: int) -> nn.Module:
    """Return a map through ``rank`` normalized channels, or one matrix for None."""
    if rank is None:
        return nn.Linear(inputs, outputs, bias=False)
    first, second = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
    return nn.Sequential(first, RMSNorm(rank, 1e-5), second)


def _check_latent(config: Any) -> str:
    parts = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.qk_head_dim not in (None, parts):
        return f"qk_head_dim={config.qk_head_dim} must be qk_nope_head_dim + qk_rope_head_dim = {parts}"
    scaling = config.rope_parameters or {}
    if scaling.get("rope_type", "default") != "default":
        return f"rope_parameters={scaling!r} must have the rope_type default; the original ignores others"
    return check_rotary(config)


FAMILIES = (
    Family(
        "transformer",
        "Transformer",
        attention,
        options={
            "num_heads": 32,
            "num_kv_heads": None,
            "qkv_bias": False,
            "qk_norm": False,
            "window_size": None,
            "rope_theta": 10000.0,
        },
        check=check_rotary,
    ),
    Family(
        "bitnet",
        "BitNet",
        BitAttention,
        options={"num_heads": 32, "num_kv_heads": None, "window_size": None, "rope_theta": 10000.0},
        check=check_rotary,
    ),
    Family(
        "mla",
        "MLA",
        LatentAttention,
        options={
            "num_heads": 16,
            "q_lora_rank": 64,
            "qk_rope_head_dim": 64,
            "kv_lora_rank": 512,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "qk_head_dim": 192,
            "window_size": None,
            "rope_theta": 10000.0,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "max_position_embeddings": 2048,
        },
        check=_check_latent,
    ),
)
