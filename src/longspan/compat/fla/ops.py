"""Functions of flash-linear-attention 0.6, each a call of ``decay_attention`` or ``delta_rule``.

Shapes are the original's, in its letters: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K
key dim, V value dim, N states. N equals B, or the number of sequences that ``cu_seqlens`` packs into one row.
``chunk_gated_delta_rule`` documents the arguments, results and errors that all functions share.
"""

from typing import Any

import torch
from torch import Tensor

from ...ops import gated
from ...ops.gated.operands import check
from ...ops.operands import check_scale
from ...ops.tensors import upcast_half, wide_dtype
from .arguments import laid_out, refuse, refuse_per_channel, refuse_per_head


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule, with a decay per head.

    Args:
        q: queries (B,T,H,K).
        k: keys (B,T,H,K).
        v: values (B,T,HV,V).
        g: logarithms of the decays (B,T,HV).
        beta: step sizes (B,T,HV).
        scale: factor of the queries; None means 1 / sqrt(K).
        initial_state: states (N,HV,K,V); None means zeros.
        output_final_state: return the last states.
        use_qk_l2norm_in_kernel: normalize queries and keys to length 1.
        cu_seqlens: offsets (N+1,) of the sequences that are packed into a single row.
        options: other arguments of the original. Those that do not affect the result are ignored.

    Returns:
        Outputs (B,T,HV,V) in the dtype of ``v``, and the last states (N,HV,K,V) in float32 or wider, or None without
        ``output_final_state``.

    Raises:
        ValueError: a shape does not fit, or an argument is not supported.

    References:
        Yang et al. 2024 (2412.06464), eq. 10.
    """
    refuse("chunk_gated_delta_rule", options)
    refuse_per_channel(g)
    return _recur(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule, with decays per head, per key channel or both.

    Other arguments, results and errors are those of ``chunk_gated_delta_rule``.

    Args:
        g: logarithms of the decays per head (B,T,HV); None means no decay.
        gk: logarithms of the decays per key channel (B,T,HV,K), added to ``g``.
        gv: not supported.
        beta: step sizes (B,T,HV); None means 1.
    """
    refuse("fused_recurrent_gated_delta_rule", options | {"gv": gv})
    g, beta = _both(g, gk), _ones(v) if beta is None else beta
    return _recur(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


chunk_gdn, fused_recurrent_gdn = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the delta rule without decay.

    Other arguments, results and errors are those of ``chunk_gated_delta_rule``.

    References:
        Yang et al. 2024 (2406.06484), eq. 5.
    """
    refuse("chunk_delta_rule", options)
    return _recur(q, k, v, None, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the delta rule without decay; ``beta=None`` means 1.

    Other arguments, results and errors are those of ``chunk_gated_delta_rule``.
    """
    refuse("fused_recurrent_delta_rule", options)
    beta = _ones(v) if beta is None else beta
    return _recur(q, k, v, None, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the delta rule with decays per key channel.

    Other arguments, results and errors are those of ``chunk_gated_delta_rule``.

    Args:
        g: logarithms of the decays (B,T,HV,K).

    References:
        Kimi Team 2025 (2510.26692), eq. 1.
    """
    refuse("chunk_kda", options)
    refuse_per_head(g)
    return _recur(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call ``chunk_kda``; ``A_log`` and ``dt_bias`` are not supported."""
    refuse("fused_recurrent_kda", options | {"A_log": A_log, "dt_bias": dt_bias})
    refuse_per_head(g)
    return _recur(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute gated linear attention, with decays per key channel.

    Other arguments, results and errors are those of ``chunk_gated_delta_rule``.

    Args:
        g: logarithms of the decays (B,T,HV,K).

    References:
        Yang et al. 2023 (2312.06635), eq. 3.
    """
    refuse("chunk_gla", options)
    refuse_per_head(g)
    return _recur(q, k, v, g, None, scale, initial_state, output_final_state, False, cu_seqlens)


fused_chunk_gla = chunk_gla


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute gated linear attention, with the decays as ``gk``.

    Other arguments, results and errors are those of ``chunk_gated_delta_rule``.

    Args:
        gk: logarithms of the decays (B,T,HV,K); None means no decay.
        gv: not supported.
        reverse: must be False.
    """
    refuse("fused_recurrent_gla", options | {"gv": gv, "reverse": reverse})
    refuse_per_head(gk, "gk")
    return _recur(q, k, v, gk, None, scale, initial_state, output_final_state, False, cu_seqlens)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute linear attention with decays per head.

    Other arguments, results and errors are those of ``chunk_gated_delta_rule``.

    Args:
        g: logarithms of the decays of each token (B,T,HV); None means 0.
        g_gamma: logarithms of decays that all tokens share (HV,), added to ``g``; None means 0.

    References:
        Dao and Gu 2024 (2405.21060), eq. 16.
    """
    refuse("chunk_simple_gla", options)
    refuse_per_channel(g)
    if g_gamma is not None:
        if g_gamma.shape != v.shape[2:3]:
            raise ValueError(f"g_gamma must be (HV,) = {tuple(v.shape[2:3])}, not {tuple(g_gamma.shape)}")
        same = g_gamma.expand(*v.shape[:3])
        if g is not None and g.shape != same.shape:
            raise ValueError(f"g must be (B, T, HV) = {tuple(same.shape)}, not {tuple(g.shape)}")
        g = same if g is None else g + same
    return _recur(q, k, v, g, None, scale, initial_state, output_final_state, False, cu_seqlens)


fused_chunk_simple_gla = chunk_simple_gla


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call ``chunk_simple_gla``; ``reverse`` must be False."""
    refuse("fused_recurrent_simple_gla", options | {"reverse": reverse})
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens)


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    r"""Compute retention: linear attention in which head h decays by $1 - 2^{-5-h}$ per token.

    Other arguments, results and errors are those of ``chunk_gated_delta_rule``.

    References:
        Sun et al. 2023 (2307.08621), eqs 6 and 8.
    """
    refuse("chunk_retention", options)
    heads = torch.arange(q.shape[2], dtype=torch.float64, device=q.device)
    gamma = torch.log1p(-(2.0 ** (-5.0 - heads))).to(wide_dtype(v))
    return chunk_simple_gla(q, k, v, None, gamma, scale, initial_state, output_final_state, cu_seqlens)


fused_chunk_retention = chunk_retention


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call ``chunk_retention``; ``reverse`` must be False."""
    refuse("fused_recurrent_retention", options | {"reverse": reverse})
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    r"""Compute linear attention without decay, from queries and keys with their feature map applied.

    Other arguments, results and errors are those of ``chunk_gated_delta_rule``.

    Args:
        initial_state: states (N,H,K,V). With ``normalize`` also a pair of these and the sums of the keys (N,1,H,K).
        normalize: divide by $c\, q \cdot z + 10^{-10}$, where z is the sum of the keys and c the scale.

    Returns:
        Outputs (B,T,HV,V), and the last states, with ``normalize`` the pair, or None without ``output_final_state``.

    References:
        Katharopoulos et al. 2020 (2006.16236), eqs 9-12.
    """
    refuse("chunk_linear_attn", options)
    if not normalize:
        return _recur(q, k, v, None, None, scale, initial_state, output_final_state, False, cu_seqlens)
    sums, keys = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    # The sum of the keys is the state of an additional value channel that is 1.
    wide = upcast_half(v)
    ones = wide.new_ones(*v.shape[:3], 1)
    if sums is not None or keys is not None:
        held = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
        first = wide.new_zeros(held, v.shape[2], q.shape[3], v.shape[3]) if sums is None else sums.to(wide.dtype)
        last = first.new_zeros(*first.shape[:3]) if keys is None else keys[:, 0].to(wide.dtype)
        sums = torch.cat([first, last[..., None]], -1)
    read, end = _recur(
        upcast_half(q), upcast_half(k), torch.cat([wide, ones], -1), None, None, scale, sums, True, False, cu_seqlens
    )
    out = (read[..., :-1] / (read[..., -1:] + 1e-10)).to(v.dtype)
    if not output_final_state:
        return out, None
    assert end is not None
    return out, (end[..., :-1], end[..., -1][:, None])


fused_chunk_linear_attn = chunk_linear_attn


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Call ``chunk_linear_attn``, by default without the normalizer; ``reverse`` must be False."""
    refuse("fused_recurrent_linear_attn", options | {"reverse": reverse})
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def _recur(q, k, v, g, beta, scale, state, final, normalized, cu_seqlens) -> tuple[Tensor, Tensor | None]:
    check_scale(scale)
    given = laid_out(q, k, v, g, beta, state, cu_seqlens)
    norm = "l2" if normalized else None
    named = {"log_decay": given.log_decay, "beta": given.beta, "state": given.state, "cu_seqlens": cu_seqlens}
    # The checks of the public operations, which name decays and step sizes differently.
    check(norm, query=given.q, key=given.k, value=given.v, **named)
    out, end = gated.recur(given.q, given.k, given.v, scale=scale, normalize=norm, **named)
    return out.transpose(1, 2), end if final else None


def _both(g: Tensor | None, gk: Tensor | None) -> Tensor | None:
    """Add decays per head (B,T,HV) and per channel (B,T,HV,K), each may be None; raise ValueError for other shapes."""
    refuse_per_channel(g)
    refuse_per_head(gk, "gk")
    if g is None or gk is None:
        return gk if g is None else g
    if g.shape != gk.shape[:3]:
        raise ValueError(f"g must be (B, T, HV) = {tuple(gk.shape[:3])}, as gk has it, not {tuple(g.shape)}")
    return gk + g[..., None]


def _ones(v: Tensor) -> Tensor:
    return v.new_ones(v.shape[:3])
