"""Linear attention with the feature maps of flash-linear-attention."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....ops import gated, linear
from .....ops.tensors import merge, upcast_half
from ..family import Family
from ..mixer import Call, Mixer, RMSNorm, heads, whole

EPS = 1e-10  # added to the normalizer after the scale


class Hedgehog(nn.Module):
    """softmax([2 y, -2 y]) with y = W x + b (Zhang et al. 2024, 2402.04347)."""

    def __init__(self, size: int):
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * self.layer(x)
        return torch.cat([y, -y], -1).softmax(-1)


class T2R(nn.Module):
    """relu(W x) (Kasai et al. 2021, 2103.13076)."""

    def __init__(self, size: int):
        super().__init__()
        self.layer = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Hadamard(nn.Module):
    """(W1 x + b1) * (W2 x + b2)."""

    def __init__(self, size: int):
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer1(x) * self.layer2(x)


class Plain(nn.Module):
    """A feature map without weights."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def dpfp(x: Tensor) -> Tensor:
    """Return the products of y = relu([x, -x]) with itself, shifted by 1 to 4 (Schlag et al. 2021, 2102.11174)."""
    y = torch.cat([x.relu(), (-x).relu()], -1)
    return torch.cat([y * y.roll(shift, -1) for shift in range(1, 5)], -1)


LEARNED = {"hedgehog": Hedgehog, "t2r": T2R, "elementwise_product": Hadamard}
PLAIN = {"dpfp": dpfp, "elu": lambda x: F.elu(x) + 1, "relu": F.relu, "identity": lambda x: x}
FACTORS = {"hedgehog": 2, "dpfp": 8}  # features per channel, where not 1


class LinearAttentionState(NamedTuple):
    """The sums, with those of the keys in the last column if outputs are normalized."""

    sums: Tensor  # (B,H,F,E) or (B,H,F,E+1)


class LinearAttention(Mixer):
    """S = S + phi(k) v^T, o = S^T phi(q) / sqrt(F), divided by its normalizer on request; RMS norm per head."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        hidden, self.heads = config.hidden_size, config.num_heads
        self.repeats = self.heads // (config.num_kv_heads or self.heads)
        keys, values = whole(hidden * config.expand_k, "expand_k"), whole(hidden * config.expand_v, "expand_v")
        self.sizes, self.normalized = (keys // self.heads, values // self.heads), config.norm_feature_map
        self.features = self.sizes[0] * FACTORS.get(config.feature_map, 1)
        if (learned := LEARNED.get(config.feature_map)) is not None:
            self.feature_map_q = learned(self.sizes[0])
            self.feature_map_k = self.feature_map_q if config.tie_feature_map_qk else learned(self.sizes[0])
        else:
            self.feature_map_q = self.feature_map_k = Plain(PLAIN[config.feature_map])
        widths = keys, keys // self.repeats, values // self.repeats
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=False) for width in widths)
        self.norm = RMSNorm(self.sizes[1], config.norm_eps, config.elementwise_affine)
        self.o_proj = nn.Linear(values, hidden, bias=False)
        self.norm_q, self.norm_k = config.norm_q, config.norm_k

    def start(self, batch: int) -> LinearAttentionState:
        width = self.sizes[1] + (1 if self.normalized else 0)
        return LinearAttentionState(upcast_half(self.like.new_zeros(batch, self.heads, self.features, width)))

    def forward(
        self, x: Tensor, state: LinearAttentionState | None, call: Call
    ) -> tuple[Tensor, LinearAttentionState | None]:
        (sums,) = self.start(len(x)) if state is None else state
        q, k = heads(self.q_proj(x), self.sizes[0]), heads(self.k_proj(x), self.sizes[0])
        v = heads(self.v_proj(x), self.sizes[1])
        if self.repeats > 1:
            k, v = k.repeat_interleave(self.repeats, 1), v.repeat_interleave(self.repeats, 1)
        q, k = self.feature_map_q(q), self.feature_map_k(k)
        q = q / (q.sum(-1, keepdim=True) + 1e-4) if self.norm_q else q
        k = k / (k.sum(-1, keepdim=True) + 1e-4) if self.norm_k else k
        if self.normalized:
            # The scale cancels but for the number added to the normalizer.
            eps = EPS * self.features**0.5
            q, k = upcast_half(q), upcast_half(k)
            o, sums = linear.attend(q, k, v, causal=True, eps=eps, state=sums, **call.packing)
        else:
            o, sums = gated.recur(q, k, v, state=sums, **call.packing)
        return self.o_proj(merge(self.norm(o))), None if state is None else LinearAttentionState(sums)


def _check(config: Any) -> str:
    known = (*LEARNED, *PLAIN)
    if config.feature_map not in known:
        return f"feature_map={config.feature_map!r} must be one of {', '.join(known)}"
    return ""


def _tied(config: Any) -> dict[str, str]:
    if not config.tie_feature_map_qk or config.feature_map not in LEARNED:
        return {}
    names = LEARNED[config.feature_map](1).state_dict()
    return {f"attn.feature_map_k.{name}": f"attn.feature_map_q.{name}" for name in names}


FAMILIES = (
    Family(
        "linear_attn",
        "LinearAttention",
        LinearAttention,
        options={
            "expand_k": 1.0,
            "expand_v": 1.0,
            "num_heads": 4,
            "num_kv_heads": None,
            "feature_map": "elementwise_product",
            "tie_feature_map_qk": False,
            "norm_q": False,
            "norm_k": False,
            "norm_feature_map": False,
        },
        check=_check,
        tied=_tied,
    ),
)
