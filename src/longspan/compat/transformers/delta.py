"""The gated delta rule, per head or per channel, with the names and the layout (B,N,H,D) of transformers."""

import torch
from torch import Tensor

from ...ops.gated import delta_rule
from ...ops.tensors import upcast_half, wide_dtype
from .packing import borders, real
from .states import carried, may_be_overwritten
from .undoing import recur


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Replace ``torch_chunk_gated_delta_rule`` and the recurrent and Kimi functions.

    query and key (B,N,G,D), value (B,N,H,E), g (B,N,H) or (B,N,H,D), the logarithms of the decays, beta (B,N,H),
    initial_state (B,H,D,E) -> (B,N,H,E) in the query's dtype, and the last state in float32, or None. A call of one
    token without gradients may overwrite ``initial_state``. ``chunk_size`` has no effect on the result. ``kwargs`` may
    have the boundaries of packed rows; see ``borders``.

    References:
        transformers, ``torch_chunk_gated_delta_rule`` and ``chunk_kimi_delta_attention``.
    """
    batch, n = query.shape[:2]
    segments = borders(kwargs, batch, n)
    q, k, v, decay, rate = (t.transpose(1, 2) for t in (query, key, value, g, beta))
    # In float16 the kernels support single tokens only.
    if v.dtype == torch.float16 and n > 1:
        q, k, v = (t.float() for t in (q, k, v))
    # The cache copies the new state over the old one, so a step may overwrite it directly.
    donate = n == 1 and output_final_state and initial_state is not None and may_be_overwritten(initial_state)
    operands = {"query": q, "key": k, "value": v, "beta": upcast_half(rate), "log_decay": upcast_half(decay)}
    o, state = recur(
        delta_rule,
        operands | {"mask": real(batch, n), "segments": segments},
        axis=2,
        state=None if initial_state is None else carried(initial_state, wide_dtype(v)),
        donate=donate,
        normalize="l2" if use_qk_l2norm_in_kernel else None,
    )
    return o.transpose(1, 2).to(query.dtype), state if output_final_state else None
