"""Recurrences in a graph of ONNX: the operator ``LinearAttention``, of onnxruntime or of the standard."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from .operands import zero_masked
from .tensors import unit

OPSET = 27  # of ai.onnx, the first with LinearAttention
DOMAINS = {
    "com.microsoft": "onnxruntime's own operator, which has a kernel",
    "ai.onnx": "the standard's operator of opset 27, which onnxruntime expands to a loop",
}
domain: ContextVar[str] = ContextVar("longspan_onnx_domain", default="com.microsoft")


def linear_attention(r: Any) -> tuple[Tensor, Tensor]:
    """Write one node for the operands of ``gated.serve`` into the graph that ``torch.onnx.export`` makes.

    Raises:
        ValueError: rows are packed.
    """
    q, k, v, log_decay, beta, state, mask, segments, cu_seqlens, scale, normalize = r
    if segments is not None or cu_seqlens is not None:
        raise ValueError("ONNX has no operator for packed sequences; export a call without segments and cu_seqlens")
    # A token of zeros writes nothing and decays nothing.
    q, k, v, log_decay, beta = zero_masked(mask, q, k, v, log_decay, beta)
    own, groups, heads = domain.get() == "com.microsoft", q.shape[1], v.shape[1]
    if normalize:
        q, k = unit(q), unit(k)
    if not own and groups != heads:
        # The standard's operator cannot share a key among values, so keys are repeated.
        q, k = (t.repeat_interleave(heads // groups, 1) for t in (q, k))
        groups = heads
    rules = {(False, False): "linear", (True, False): "gated", (False, True): "delta", (True, True): "gated_delta"}
    decay = None if log_decay is None else log_decay.mT if log_decay.dim() == 3 else _packed(log_decay)
    values = _packed(v)
    o, end = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::LinearAttention" if own else "LinearAttention",
        (_packed(q), _packed(k), values, state, decay, None if beta is None else beta.mT),
        {
            "q_num_heads": groups,
            "kv_num_heads": heads,
            "update_rule": rules[log_decay is not None, beta is not None],
            "scale": scale,
        },
        dtypes=(v.dtype, state.dtype),
        shapes=(values.shape, state.shape),
        version=1 if own else OPSET,
    )
    o = o.unflatten(-1, (heads, v.shape[-1])).transpose(1, 2)
    return o if mask is None else o.masked_fill(~mask[:, None, :, None], 0.0), end


def unrolled(form: Callable[[Any], tuple[Tensor, Tensor]]) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """Return a form whose loop over tokens a graph of ONNX unrolls; it raises ValueError if their number is free."""

    def call(r: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(getattr(r, r.OUTPUT).shape[r.AXIS], int):
            raise ValueError(
                f"ONNX has no operator for {r.op}, so the graph of it needs a fixed number of tokens; export without a "
                "dynamic dimension for them"
            )
        return form(r)

    return call


def _packed(x: Tensor) -> Tensor:
    """(B,H,N,D) -> (B,N,H*D)."""
    return x.transpose(1, 2).flatten(2)
