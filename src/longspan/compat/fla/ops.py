"""The functions of flash-linear-attention 0.6 by name, each a call of ``decay_attention`` or ``delta_rule``.

Shapes are the original's: q, k (B,T,H,K), v (B,T,HV,V), where H divides HV; decays ``g`` (B,T,HV), their logarithms;
``beta`` (B,T,HV); states (N,HV,K,V), N = B, or the number of sequences that ``cu_seqlens`` (N+1,) packs into one row.
Each returns the outputs (B,T,HV,V) and the last state, in float32 at least, or None without ``output_final_state``.
``scale=None`` means 1 / sqrt(K). Every function raises ValueError for an argument that it does not serve.
"""

from typing import Any

import torch
from torch import Tensor

from ...ops import gated
from ...ops.operands import check_scale
from ...ops.tensors import upcast_half
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
    """The delta rule with a decay per head: Yang et al. 2024 (2412.06464), eq. 10."""
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
    """The same; ``gk`` (B,T,HV,K): decays per channel of the keys instead, or beside those per head."""
    refuse("fused_recurrent_gated_delta_rule", options | {"gv": gv})
    return _recur(
        q,
        k,
        v,
        _both(g, gk),
        _ones(v) if beta is None else beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        cu_seqlens,
    )


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
    """The delta rule without decay: Yang et al. 2024 (2406.06484), eq. 5."""
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
    """The same; without ``beta`` it is 1."""
    refuse("fused_recurrent_delta_rule", options)
    return chunk_delta_rule(
        q,
        k,
        v,
        _ones(v) if beta is None else beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        cu_seqlens,
    )


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
    """The delta rule with decays per channel of the keys, ``g`` (B,T,HV,K): Kimi Team 2025 (2510.26692), eq. 1."""
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
    """The same."""
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
    """A sum with decays per channel of the keys, ``g`` (B,T,HV,K): Yang et al. 2023 (2312.06635), eq. 3."""
    refuse("chunk_gla", options)
    refuse_per_head(g)
    return _recur(q, k, v, g, None, scale, initial_state, output_final_state, False, cu_seqlens)


def fused_chunk_gla(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """``chunk_gla`` under an older name."""
    return chunk_gla(*arguments, **options)


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
    """The same, the decays as ``gk``; without them nothing decays."""
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
    """A sum with decays per head: ``g`` (B,T,HV) of each token, ``g_gamma`` (HV,) of all, or their sum.

    Source: Dao and Gu 2024 (2405.21060), eq. 16.
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


def fused_chunk_simple_gla(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """``chunk_simple_gla``."""
    return chunk_simple_gla(*arguments, **options)


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
    """``chunk_simple_gla``."""
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
    r"""A sum in which head h decays by $1 - 2^{-5-h}$: Sun et al. 2023 (2307.08621), eqs 6 and 8."""
    refuse("chunk_retention", options)
    heads = torch.arange(q.shape[2], dtype=torch.float64, device=q.device)
    gamma = torch.log1p(-(2.0 ** (-5.0 - heads))).to(upcast_half(v[:0]).dtype)
    return chunk_simple_gla(q, k, v, None, gamma, scale, initial_state, output_final_state, cu_seqlens)


def fused_chunk_retention(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """``chunk_retention``."""
    return chunk_retention(*arguments, **options)


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
    """``chunk_retention``."""
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
    """Sums without decay; with ``normalize`` divided by c q . z + 1e-10, z the sum of the keys, c the scale.

    The state is then a pair: the sums (N,H,K,V), and z (N,1,H,K). Queries and keys come with their feature map applied.

    Source: Katharopoulos et al. 2020 (2006.16236), eqs 9-12.
    """
    refuse("chunk_linear_attn", options)
    if not normalize:
        return _recur(q, k, v, None, None, scale, initial_state, output_final_state, False, cu_seqlens)
    sums, keys = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    # The sum of the keys is the state of one more value, which is 1.
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


def fused_chunk_linear_attn(*arguments: Any, **options: Any) -> tuple[Tensor, Any]:
    """``chunk_linear_attn``."""
    return chunk_linear_attn(*arguments, **options)


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
    """``chunk_linear_attn``, by default without the normaliser."""
    refuse("fused_recurrent_linear_attn", options | {"reverse": reverse})
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def _recur(q, k, v, g, beta, scale, state, final, normalised, cu_seqlens) -> tuple[Tensor, Tensor | None]:
    check_scale(scale)
    given = laid_out(q, k, v, g, beta, state, cu_seqlens)
    options = {"scale": scale, "cu_seqlens": cu_seqlens, "normalise": "l2" if normalised else None}
    # By the public operations' own checks; their names for decays and steps are others.
    gated.check(
        given.q,
        given.k,
        given.v,
        given.log_decay,
        given.beta,
        options["normalise"],
        None,
        None,
        cu_seqlens,
        given.state,
    )
    named = {"log_decay": given.log_decay, "beta": given.beta, "state": given.state}
    out, end = gated.recur(given.q, given.k, given.v, **named, **options)
    return out.transpose(1, 2), end if final else None


def _both(g: Tensor | None, gk: Tensor | None) -> Tensor | None:
    """Decays per head (B,T,HV) and per channel (B,T,HV,K), one of them or both. Raises ValueError for other axes."""
    refuse_per_channel(g)
    refuse_per_head(gk, "gk")
    if g is None or gk is None:
        return gk if g is None else g
    if g.shape != gk.shape[:3]:
        raise ValueError(f"g must be (B, T, HV) = {tuple(gk.shape[:3])}, as gk has it, not {tuple(g.shape)}")
    return gk + g[..., None]


def _ones(v: Tensor) -> Tensor:
    return v.new_ones(v.shape[:3])
