"""What RWKV-6 and RWKV-7 share: blocks with LayerNorms and a feed-forward that sees the token before."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ....modules.token_shift import shift, shift_start
from .attention import Attention
from .causal_lm import Body
from .mixer import Call

# Options of both with their defaults.
OPTIONS = {"hidden_act": "sqrelu", "norm_eps": 1e-5, "norm_first": True, "norm_bias": True}


class RwkvState(NamedTuple):
    """The state of the mixer, and the last input of the feed-forward."""

    mixer: Any
    last: Tensor  # (B,1,hidden)


class LoRA(nn.Module):
    """A map of low rank: W2 act(W1 x) + b."""

    def __init__(self, hidden: int, width: int, rank: int, act: nn.Module, bias: bool = True):
        super().__init__()
        self.lora = nn.Sequential(nn.Linear(hidden, rank, bias=False), act, nn.Linear(rank, width, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.lora(x)


class RwkvBlock(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + ffn(norm(x)); layer 0 normalizes x first."""

    def __init__(self, config: Any, layer: int, mixer: Any, ffn: nn.Module):
        super().__init__()
        self.pre_norm = layer_norm(config) if config.norm_first and layer == 0 else None
        self.attn_norm = layer_norm(config)
        self.attn = mixer
        self.ffn_norm = layer_norm(config)
        self.ffn = ffn

    def start(self, batch: int) -> RwkvState:
        """Return the state of ``batch`` rows before the first token."""
        like = self.attn_norm.weight
        return RwkvState(self.attn.start(batch), shift_start(like, batch, like.shape[0]))

    def forward(self, x: Tensor, state: RwkvState | None, call: Call) -> tuple[Tensor, RwkvState | None]:
        """x (B,N,hidden) -> (B,N,hidden), the next state."""
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        y, after = self.attn(self.attn_norm(x), None if state is None else state.mixer, call)
        x = x + y
        x, last = self.feed(x, state, call)
        return x, None if state is None else RwkvState(after, last)

    def feed(self, x: Tensor, state: RwkvState | None, call: Call) -> tuple[Tensor, Tensor]:
        """Add the output of the feed-forward to x (B,N,hidden); return also its last input (B,1,hidden)."""
        normed = self.ffn_norm(x)
        last = shift_start(x, len(x), x.shape[2]) if state is None else state.last
        before, last = shift(normed, last, mask=call.mask, segments=call.segments, donate=call.donate)
        return x + self.ffn(normed, before - normed), last


class RwkvBody(Body):
    """A body whose final norm is a LayerNorm."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.norm = layer_norm(config)


def layer_norm(config: Any) -> nn.LayerNorm:
    """Return a LayerNorm over hidden channels."""
    return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)


def feed_forward_width(config: Any, ratio: float) -> int:
    """Return the width of a feed-forward; ``ratio`` is the default multiple of hidden channels."""
    if config.intermediate_size is not None:
        return config.intermediate_size
    return 32 * -(-int(config.hidden_size * (ratio if config.hidden_ratio is None else config.hidden_ratio)) // 32)


def group_norm(o: Tensor, norm: nn.GroupNorm) -> Tensor:
    """Normalize each head and token of o (B,H,N,E) -> (B,N,HE)."""
    flat = o.transpose(1, 2).flatten(-2)
    return norm(flat.flatten(0, 1)).view_as(flat)


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)^2."""
    return F.relu(x).square()


def mixer_of(config: Any, layer: int, mixer: Callable[[Any, int], nn.Module]) -> Any:
    """Return the recurrent layer, or the softmax attention of a hybrid model."""
    softmax = config.attention_of(layer)
    return mixer(config, layer) if softmax is None else Attention(config.hidden_size, **softmax)
