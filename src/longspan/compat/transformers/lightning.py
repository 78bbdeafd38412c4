"""MiniMax's lightning attention: linear attention with one fixed decay per head."""

import functools
import inspect
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ...ops.gated import decay_attention
from ...ops.tensors import upcast_half
from .packing import borders, real
from .states import carried


def forward(
    self,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values=None,
    cache=None,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Replace ``MiniMaxLightningAttention.forward``: (B,N,dim) -> (B,N,dim) and the state (B,H,D,D).

    ``attention_mask`` (B,N) is 0 on padding. The cache is ``past_key_values`` before transformers 5.24, and ``cache``
    from then on. ``kwargs`` may have the boundaries of packed rows; see ``borders``.

    References:
        Qin et al. 2024 (2405.17381), eq. 3.
    """
    batch, n = hidden_states.shape[:2]
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        # Before 5.15 it is the mask of all tokens so far.
        qkv = (qkv * attention_mask[:, -n:, None]).to(qkv.dtype)
    q, k, v = qkv.view(batch, n, self.num_attention_heads, -1).transpose(1, 2).split(self.head_dim, -1)
    cache = past_key_values if cache is None else cache
    state = None if cache is None else cache.get_linear_cache(self.layer_idx)
    rate = -upcast_half(self.slope_rate).view(1, -1, 1).expand(batch, -1, n)
    q, k, v = (upcast_half(t) for t in (q, k, v))
    o, state = decay_attention(
        q,
        k,
        v,
        log_decay=rate,
        scale=1.0,
        mask=real(batch, n),
        segments=borders(kwargs, batch, n),
        return_state=True,
        state=None if state is None else carried(state, rate.dtype),
    )
    o = self.norm(o.transpose(1, 2).flatten(2).to(qkv.dtype))
    o = self.out_proj(F.sigmoid(self.output_gate(hidden_states)) * o)
    if cache is not None:
        cache.set_linear_cache(self.layer_idx, state)
    return o, state


def from_layer_with_keys(original: Callable) -> Callable:
    """Make a length method of ``MiniMaxCache`` use the first layer with keys instead of a recurrent layer.

    transformers requests the length of layer 0, which is recurrent in MiniMax and has no keys. Positions would restart
    at 0 after a cache, and masks would cover the new tokens only.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def length(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        layer, lengths = given.arguments["layer_idx"], [one.get_seq_length() for one in self.layers]
        if layer < len(lengths) and not lengths[layer]:
            given.arguments["layer_idx"] = next((i for i, length in enumerate(lengths) if length), layer)
        return original(*given.args, **given.kwargs)

    return length


def with_states(original: Callable) -> Callable:
    """Make ``MiniMaxCache.reorder_cache`` reorder the recurrent states too, which the original leaves out."""

    @functools.wraps(original)
    def reorder_cache(self, beam_idx: Tensor) -> None:
        original(self, beam_idx)
        # A layer without a state has an empty list.
        self.linear_cache = [
            state.index_select(0, beam_idx.to(state.device)) if isinstance(state, Tensor) else state
            for state in self.linear_cache
        ]

    return reorder_cache
