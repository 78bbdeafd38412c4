"""DeltaFormer (2505.19488): softmax attention to values from which attention to earlier values was taken away."""

from typing import Any

import torch
from torch import Tensor, nn

from .....ops.tensors import merge, per_root, upcast_half
from .....states import kv_cache
from .....states.kv_cache import KeyValues
from ..attention import Attention
from ..family import Family
from ..mixer import Call
from .transformer import check_rotary


class DeltaFormerAttention(Attention):
    """u_t = v_t - b_t sum_(j<t) w_tj u_j and o_t = sum_(j<=t) p_tj u_j, both weights a softmax of q_t k_j / sqrt(D).

    The cache holds u in place of the values. The original has no cache, and its first sum reads padding.
    """

    def __init__(self, config: Any, layer: int):
        names = "num_heads", "qkv_bias", "qk_norm", "rope_theta"
        super().__init__(config.hidden_size, layers=None, **{name: getattr(config, name) for name in names})
        self.b_proj = nn.Linear(config.hidden_size, config.num_heads)

    def forward(self, x: Tensor, state: KeyValues | None, call: Call) -> tuple[Tensor, KeyValues | None]:
        q, k, v, at = self.heads_of(x, state, call)
        view, after = kv_cache.continued(k, v, state, causal=True, **call.packing)
        n, batch = x.shape[1], len(x)
        keys, values = upcast_half(view.keys), upcast_half(view.values)
        # Where the new tokens are among the keys: at their positions, or last.
        slots = at
        if state is None or call.segments is not None:
            slots = torch.arange(keys.shape[2] - n, keys.shape[2], device=x.device).expand(batch, n)
        real = x.new_ones(batch, n, dtype=keys.dtype) if call.mask is None else call.mask.to(keys.dtype)
        allowed = view.allowed(n).expand(batch, -1, -1, -1)
        own = torch.zeros_like(allowed).scatter(3, slots[:, None, :, None], True)
        logits = q.to(keys.dtype) @ keys.mT * per_root(self.size)
        shares, earlier = (_softmax(logits, seen) for seen in (allowed, allowed & ~own))
        new = slots[:, None, None, :].expand(batch, q.shape[1], n, n)
        beta = (upcast_half(self.b_proj(x)).to(keys.dtype) * real[..., None]).mT[..., None]
        # With e = u - v, and V the values with v for new tokens: (1 + b W) e = -b w V, for w's columns W of new tokens.
        within = beta * earlier.gather(3, new) * real[:, None, None, :]
        e = torch.linalg.solve_triangular(within, -beta * (earlier @ values), upper=False, unitriangular=True)
        o = shares @ values + (shares.gather(3, new) * real[:, None, None, :]) @ e
        if after is not None:
            if call.segments is not None:
                e = e * (call.segments == call.segments[:, -1:])[:, None, :, None]
            place = at[:, None, :, None].expand(e.shape).clamp(max=after.values.shape[2] - 1)
            after = after._replace(values=after.values.scatter_add(2, place, e.to(after.values.dtype)))
        return self.o_proj(merge(o).to(x.dtype)), after


def _softmax(logits: Tensor, seen: Tensor) -> Tensor:
    """Softmax over the pairs that are seen; zeros in a row without any."""
    return logits.masked_fill(~seen, torch.finfo(logits.dtype).min).softmax(-1) * seen


def _check(config: Any) -> str:
    if config.num_kv_heads not in (None, config.num_heads):
        return f"num_kv_heads={config.num_kv_heads} must be num_heads={config.num_heads}; u has a value per query head"
    return check_rotary(config)


FAMILIES = (
    Family(
        "deltaformer",
        "DeltaFormer",
        DeltaFormerAttention,
        options={
            "num_heads": 8,
            "num_kv_heads": None,
            "qkv_bias": False,
            "qk_norm": False,
            "rope_theta": 10000.0,
            "use_cache": False,
        },
        ignored=("rope_max_position_embeddings",),
        check=_check,
    ),
)
