"""The arguments of flash-linear-attention's functions: what is served, and how it is laid out here."""

from typing import Any, NamedTuple

from torch import Tensor

from ...ops.tensors import upcast_half

# Arguments that change how the original computes and not what: a value other than these is refused all the same.
HINTS = ("cu_seqlens_cpu", "chunk_indices", "chunk_size", "disable_recompute", "use_graph", "max_num_seqs")
REFUSED = {
    "head_first": "the layout is (B, T, H, D); transpose(1, 2) the operands",
    "gv": "longspan has no decay of the values' channels",
    "reverse": "flip(1) the operands and the outputs",
    "state_v_first": "states are (N, H, K, V); transpose the last two axes",
    "transpose_state_layout": "states are (N, H, K, V); transpose the last two axes",
    "use_gate_in_kernel": "give g = -A_log.exp() * softplus(g + dt_bias)",
    "A_log": "give g = -A_log.exp() * softplus(g + dt_bias)",
    "dt_bias": "give g = -A_log.exp() * softplus(g + dt_bias)",
    "use_beta_sigmoid_in_kernel": "give beta.sigmoid(), twice that with allow_neg_eigval",
    "allow_neg_eigval": "give 2 * beta.sigmoid()",
    "safe_gate": "give the decays that are meant",
    "lower_bound": "give the decays that are meant",
    "cp_context": "a sequence is not spread over devices here",
    "return_intermediate_states": "call once for each part, and keep the states",
    "output_attentions": "longspan builds no matrix of weights for it",
}


def refuse(function: str, options: dict[str, Any]) -> None:
    """Raise ValueError for an argument that is set and not served, or that the function does not have."""
    for name, value in options.items():
        if name not in REFUSED and name not in HINTS:
            raise ValueError(f"{function} has no argument {name!r}")
        if name in REFUSED and value is not None and value is not False:
            raise ValueError(f"{function} does not serve {name}=: {REFUSED[name]}")


def refuse_per_channel(g: Tensor | None) -> None:
    """Raise ValueError for decays that are not per head."""
    if g is not None and g.dim() != 3:
        raise ValueError(f"g must be (B, T, HV), decays per head, not {tuple(g.shape)}")


def refuse_per_head(g: Tensor | None, name: str = "g") -> None:
    """Raise ValueError for decays that are not per channel of the keys."""
    if g is not None and g.dim() != 4:
        raise ValueError(f"{name} must be (B, T, HV, K), decays per channel of the keys, not {tuple(g.shape)}")


class LaidOut(NamedTuple):
    """The operands as ``longspan.ops.gated`` has them: heads before the sequence."""

    q: Tensor  # (B,H,T,K)
    k: Tensor  # (B,H,T,K)
    v: Tensor  # (B,HV,T,V)
    log_decay: Tensor | None  # (B,HV,T) or (B,HV,T,K)
    beta: Tensor | None  # (B,HV,T)
    state: Tensor | None  # (N,HV,K,V), in float32 at least


def laid_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> LaidOut:
    """Operands in the original's layout, transposed, none copied. Raises ValueError for shapes that cannot be meant."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise ValueError(f"{name} must be (B, T, H, D), not {tuple(t.shape)}")
    expected = tuple(v.shape[:3])
    if g is not None and tuple(g.shape) not in (expected, (*expected, k.shape[3])):
        raise ValueError(f"decays must be (B, T, HV) = {expected} or (B, T, HV, K), not {tuple(g.shape)}")
    if beta is not None and tuple(beta.shape) != expected:
        raise ValueError(f"beta must be (B, T, HV) = {expected}, not {tuple(beta.shape)}")
    if cu_seqlens is not None and len(q) != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row, and there are {len(q)}; flatten them first")
    wide = upcast_half(v[:0]).dtype
    over = (t if t is None else t.transpose(1, 2) for t in (q, k, v, g, beta))
    return LaidOut(*over, None if state is None else state.to(wide))  # type: ignore[misc]
