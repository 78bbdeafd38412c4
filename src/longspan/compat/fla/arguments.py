"""Arguments of flash-linear-attention's functions: which are supported, and their layout in longspan."""

from typing import Any, NamedTuple

from torch import Tensor

from ...ops.tensors import wide_dtype

# Arguments that change how the original computes, not its result. They are accepted and ignored.
HINTS = ("cu_seqlens_cpu", "chunk_indices", "chunk_size", "disable_recompute", "use_graph", "max_num_seqs")
REFUSED = {
    "head_first": "the layout is (B, T, H, D); call transpose(1, 2) on the operands",
    "gv": "longspan has no decays of the value channels",
    "reverse": "call flip(1) on the operands and the outputs",
    "state_v_first": "states are (N, H, K, V); transpose the last two axes",
    "transpose_state_layout": "states are (N, H, K, V); transpose the last two axes",
    "use_gate_in_kernel": "pass g = -A_log.exp() * softplus(g + dt_bias)",
    "A_log": "pass g = -A_log.exp() * softplus(g + dt_bias)",
    "dt_bias": "pass g = -A_log.exp() * softplus(g + dt_bias)",
    "use_beta_sigmoid_in_kernel": "pass beta=beta.sigmoid(), and twice that for allow_neg_eigval",
    "allow_neg_eigval": "pass beta=2 * beta.sigmoid()",
    "safe_gate": "pass the final decays as g",
    "lower_bound": "pass the final decays as g",
    "cp_context": "longspan does not spread a sequence over devices",
    "return_intermediate_states": "call the function once per part and keep the states",
    "output_attentions": "longspan does not compute the matrix of weights",
}


def refuse(function: str, options: dict[str, Any]) -> None:
    """Raise ValueError for an argument that is set and not supported, or that the function does not have."""
    for name, value in options.items():
        if name not in REFUSED and name not in HINTS:
            raise ValueError(f"{function} has no argument {name!r}")
        if name in REFUSED and value is not None and value is not False:
            raise ValueError(f"{function} does not support {name}={_shown(value)}: {REFUSED[name]}")


def _shown(value: Any) -> str:
    return f"Tensor{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def refuse_per_channel(g: Tensor | None) -> None:
    """Raise ValueError for decays that are not per head."""
    if g is not None and g.dim() != 3:
        raise ValueError(f"g must be (B, T, HV), decays per head, not {tuple(g.shape)}")


def refuse_per_head(g: Tensor | None, name: str = "g") -> None:
    """Raise ValueError for decays that are not per channel of the keys."""
    if g is not None and g.dim() != 4:
        raise ValueError(f"{name} must be (B, T, HV, K), decays per channel of the keys, not {tuple(g.shape)}")


class LaidOut(NamedTuple):
    """Operands in the layout of ``longspan.ops.gated``: heads before the sequence."""

    q: Tensor  # (B,H,T,K)
    k: Tensor  # (B,H,T,K)
    v: Tensor  # (B,HV,T,V)
    log_decay: Tensor | None  # (B,HV,T) or (B,HV,T,K)
    beta: Tensor | None  # (B,HV,T)
    state: Tensor | None  # (N,HV,K,V), float32 or wider


def laid_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> LaidOut:
    """Transpose operands of the original's layout without a copy; raise ValueError for shapes that do not fit."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise ValueError(f"{name} must be (B, T, H, D), not {tuple(t.shape)}")
    expected = tuple(v.shape[:3])
    if g is not None and tuple(g.shape) not in (expected, (*expected, k.shape[3])):
        raise ValueError(f"decays must be (B, T, HV) = {expected} or (B, T, HV, K), not {tuple(g.shape)}")
    if beta is not None and tuple(beta.shape) != expected:
        raise ValueError(f"beta must be (B, T, HV) = {expected}, not {tuple(beta.shape)}")
    if cu_seqlens is not None and len(q) != 1:
        raise ValueError(f"cu_seqlens needs operands with one row, not {len(q)}; flatten the batch first")
    wide = wide_dtype(v)
    over = (t if t is None else t.transpose(1, 2) for t in (q, k, v, g, beta))
    return LaidOut(*over, None if state is None else state.to(wide))  # pyright: ignore[reportCallIssue] (over has the other fields)
