"""RecurrentGemma: the gated linear recurrence RG-LRU as a diagonal scan, with its states in the cache."""

import functools
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.scan import diagonal_scan
from ...ops.tensors import upcast_half
from . import convolution
from .packing import borders, real
from .states import carried
from .undoing import recur


def block(
    self,
    input_states: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None,
    use_cache: bool = True,
    cache=None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Replace ``RecurrentGemmaRecurrentBlock.forward``.

    The states are those of this layer in the cache. The original keeps them in the module, where another cache and the
    beams of a search find them too, and it drops the convolution's when several tokens follow a cache.

    Args:
        input_states: (B,N,dim).
        position_ids: (B,N) or (1,N); 0 begins a sequence.
        attention_mask: ignored, as in the original.
        use_cache: continue and keep the states of ``cache``.
        cache: a cache of transformers, or None.
        kwargs: boundaries of packed rows; see ``borders``.

    Returns:
        Outputs (B,N,dim), and None.

    References:
        De et al. 2024 (2402.19427), section 2.
    """
    n = input_states.shape[1]
    gate, x = self.act_fn(self.linear_y(input_states)), self.linear_x(input_states).mT
    weight, bias = self.conv_1d.weight.squeeze(1), self.conv_1d.bias
    cache = cache if use_cache else None
    layer = None if cache is None else self.layer_idx
    known = None if cache is None else cache.get_conv_state(layer, state_idx=0)
    if cache is not None and known is not None and n == 1 and not cache.is_recording_past(layer):
        x = convolution.update(x, known, weight, bias)
    elif cache is not None:
        x = convolution.convolve(cache.update_conv_state(x, layer, conv_kernel_size=self.conv1d_width), weight, bias)
        x = x[..., -n:]
    else:
        x = convolution.convolve(x, weight, bias, **kwargs)
    self.rg_lru.recurrent_states = None if cache is None else cache.get_recurrent_state(layer, state_idx=0)
    y = self.rg_lru(x.mT, position_ids, segments=borders(kwargs, *input_states.shape[:2]))
    if cache is not None:
        cache.update_recurrent_state(self.rg_lru.recurrent_states, layer)
    self.rg_lru.recurrent_states = None
    return self.linear_out(y * gate), None


def recurrence(self, activations: Tensor, position_ids: Tensor, segments: Tensor | None = None) -> Tensor:
    """Replace ``RecurrentGemmaRglru.forward``, which continues and overwrites ``self.recurrent_states`` (B,C).

    activations (B,N,C) of C channels, position_ids (B,N) or (1,N), where 0 clears the state, segments (B,N), the
    number of each token's sequence in packed rows -> states (B,N,C).

    References:
        De et al. 2024 (2402.19427), eq. 1 to 4.
    """
    x, first = upcast_half(activations), position_ids[:, :, None] == 0
    heads = activations.unflatten(-1, (self.num_attention_heads, self.block_width))

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.sigmoid(upcast_half(torch.einsum("bnhi,hij->bnhj", heads, weight) + bias).flatten(-2))

    rate = F.softplus(upcast_half(self.recurrent_param))
    log_decay = -8.0 * gate(self.recurrent_gate_weight, self.recurrent_gate_bias) * rate
    root = sys.modules[type(self).__module__].SqrtBoundDerivative.apply(-torch.expm1(2 * log_decay))
    x = x * gate(self.input_gate_weight, self.input_gate_bias) * torch.where(first, 1.0, root)
    state = self.recurrent_states
    operands = {"x": x, "log_decay": log_decay.masked_fill(first, -torch.inf)}
    y, self.recurrent_states = recur(
        diagonal_scan,
        operands | {"mask": real(x.shape[0], x.shape[1]), "segments": segments},
        axis=1,
        state=None if state is None else carried(state, x.dtype),
    )
    return y.to(activations.dtype)


def numbered(original: Callable) -> Callable:
    """Wrap ``RecurrentGemmaModel.__call__`` so that recurrent layers know their number, by which a cache has states."""

    @functools.wraps(original)
    def call(self, *args, **kwargs):
        # First, so that a compiler sees only the original.
        if not torch.compiler.is_compiling():
            for number, layer in enumerate(self.layers):
                if not hasattr(layer.temporal_block, "layer_idx"):
                    layer.temporal_block.layer_idx = number
        return original(self, *args, **kwargs)

    return call
