"""The softmax attention of hybrid models: rotary positions, shared key heads, an optional window."""

from typing import Any

import torch
from torch import Tensor, nn

from ....modules.rotary import rotate
from ....ops.softmax import dense
from ....ops.tensors import merge, positions
from ....states import kv_cache
from ....states.kv_cache import KeyValues
from .mixer import Call, Mixer, RMSNorm, heads


class Attention(Mixer):
    """Causal softmax attention. The state is a KV cache, also with a window."""

    def __init__(
        self,
        hidden_size: int,
        *,
        layers: Any,
        num_heads: int,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        window_size: int | None = None,
        rope_theta: float | None = 10000.0,
    ):
        super().__init__()
        self.size = hidden_size // num_heads
        self.groups = num_kv_heads or num_heads
        self.window_size, self.rope_theta = window_size, rope_theta
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.k_proj, self.v_proj = (nn.Linear(hidden_size, self.groups * self.size, bias=qkv_bias) for _ in range(2))
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(self.size, 1e-5) if qk_norm else None for _ in range(2))

    def start(self, batch: int) -> KeyValues:
        return kv_cache.empty(batch, self.groups, 0, self.size, self.like)

    def heads_of(self, x: Tensor, state: KeyValues | None, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries (B,H,N,D), keys, values (B,G,N,D), and the positions of the tokens (B,N)."""
        q, k, v = (heads(project(x), self.size) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        at, _ = positions(x, state and state.length, mask=call.mask, segments=call.segments)
        if self.rope_theta:
            q, k = rotate(q, at, self.rope_theta), rotate(k, at, self.rope_theta)
        return q, k, v, at

    def forward(self, x: Tensor, state: KeyValues | None, call: Call) -> tuple[Tensor, KeyValues | None]:
        o, state = attend(*self.heads_of(x, state, call), state, call, self.window_size)
        return self.o_proj(merge(o)), state


def attend(
    q: Tensor, k: Tensor, v: Tensor, at: Tensor, state: KeyValues | None, call: Call, window: int | None
) -> tuple[Tensor, KeyValues | None]:
    """Causal softmax attention after the tokens of ``state``: q (B,H,N,D), k (B,G,N,D), v (B,G,N,E) -> (B,H,N,E).

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        at: (B,N), the positions of the tokens.
        state: The cache, or None.
        call: The mask and the segments.
        window: The last tokens that a query sees, its own included; None for all.
    """
    if state is None:
        view = kv_cache.within(k, v, causal=True, mask=call.mask, segments=call.segments)
    else:
        view, state = kv_cache.extend(state, k, v, **call.packing)
    allowed, causal = view.mask, view.causal
    if window is not None:
        # Slots are positions, except without a state, where padding takes slots too.
        slots = torch.arange(view.keys.shape[2], device=q.device).expand(len(q), -1) if state is not None else at
        near = at[:, :, None] - slots[:, None, :] < window
        allowed, causal = view.allowed(q.shape[2]) & near[:, None], False
    return dense.attend(q.to(view.keys.dtype), view.keys, view.values, mask=allowed, causal=causal), state
