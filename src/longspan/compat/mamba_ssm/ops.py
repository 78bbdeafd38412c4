"""Functions of mamba_ssm 2.3 on longspan's scans.

Shapes are the original's, in its letters: B batch, L tokens, D channels, N states of a channel, H heads, P head dim, G
groups of heads or channels that share B and C.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.scan import diagonal_scan, selective_scan
from ...ops.tensors import upcast_half, wide_dtype
from ..causal_conv1d import causal_conv1d_fn
from ..transformers import mamba, mamba2
from ..transformers.packing import borders
from .norms import rmsnorm_fn

NO_LIMIT = (0.0, float("inf"))


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Mamba's selective scan.

    Args:
        u: (B,D,L).
        delta: step sizes (B,D,L).
        A: (D,N), real.
        B: (B,N,L), shared by all channels, (B,G,N,L), each shared by D / G consecutive ones, or constants (D,N).
        C: as ``B``; if one of the two is constant, so is the other.
        D: (D,), or None.
        z: a gate (B,D,L), or None.
        delta_bias: (D,), added to the step sizes, or None.
        delta_softplus: apply softplus to the step sizes.
        return_last_state: return the last state too. Its gradient counts, which the original leaves out.

    Returns:
        Outputs (B,D,L) in the dtype of ``u``, with ``return_last_state`` a pair with the last state (B,D,N).

    Raises:
        ValueError: shapes do not fit.
        NotImplementedError: A, B or C is complex, or only one of B and C is constant.

    References:
        Gu and Dao 2023 (2312.00752), eq. 2.
    """
    if A.is_complex() or B.is_complex() or C.is_complex():
        raise NotImplementedError("selective_scan_fn does not support complex A, B and C")
    if (B.dim() == 2) != (C.dim() == 2):
        raise NotImplementedError("selective_scan_fn does not support a constant (D, N) for only one of B and C")
    if B.dim() == 2:
        y, last = _scan_with_constants(u.mT, delta.mT, A, B, C, D, z, delta_bias, delta_softplus)
        return (y.mT, last) if return_last_state else y.mT
    B, C = (t if t.dim() == 4 else t[:, None] for t in (B, C))
    groups = B.shape[1]
    if C.shape[1] != groups or u.shape[1] % groups:
        raise ValueError(f"B and C have {groups} and {C.shape[1]} groups, for {u.shape[1]} channels")
    size = u.shape[1] // groups
    ys, states = [], []
    for group in range(groups):
        part = slice(group * size, (group + 1) * size)
        y, last = selective_scan(
            *(u[:, part].mT, delta[:, part].mT, A[part], B[:, group].mT, C[:, group].mT),
            D=None if D is None else D[part],
            z=None if z is None else z[:, part].mT,
            dt_bias=None if delta_bias is None else delta_bias[part],
            softplus=delta_softplus,
            return_state=True,
        )
        ys.append(y.mT)
        states.append(last)
    y, last = (parts[0] if groups == 1 else torch.cat(parts, 1) for parts in (ys, states))
    return (y, last) if return_last_state else y


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """Compute Mamba's layer after its first projection: convolution, projections, scan, and last projection.

    Args:
        xz: input and gate (B,2D,L).
        conv1d_weight: (D,1,K), with K taps.
        conv1d_bias: (D,), or None.
        x_proj_weight: (R+2N,D), to the step sizes' R channels, B and C.
        delta_proj_weight: (D,R).
        out_proj_weight: (E,D).
        out_proj_bias: (E,), or None.
        A: (D,N), real.
        B: as for ``selective_scan_fn``; None takes it from the input.
        C: likewise.
        D: (D,), or None.
        delta_bias: (D,), added to the step sizes, or None.
        B_proj_bias: (N,), added to a B that is taken from the input, or None.
        C_proj_bias: likewise for C.
        delta_softplus: apply softplus to the step sizes.
        checkpoint_lvl: 0 or 1, what the original's backward pass computes again; it does not affect the result.
        b_rms_weight: (N,), weights of an RMS norm of B, or None for no norm.
        c_rms_weight: likewise for C.
        dt_rms_weight: (D,), likewise for the step sizes before ``delta_bias``.
        b_c_dt_rms_eps: added to the mean squares of these norms.

    Returns:
        (B,L,E).

    Raises:
        ValueError: shapes do not fit, or a norm of a constant B or C.
        NotImplementedError: as for ``selective_scan_fn``.
    """
    if checkpoint_lvl not in (0, 1):
        raise ValueError(f"checkpoint_lvl must be 0 or 1, not {checkpoint_lvl!r}")
    states, rank = A.shape[1], delta_proj_weight.shape[1]
    x, z = xz.chunk(2, 1)
    x = causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
    assert isinstance(x, Tensor)
    projected = F.linear(x.mT, x_proj_weight)  # (B,L,R+2N)
    delta = F.linear(projected[..., :rank], delta_proj_weight).mT
    if B is None:
        B = _biased(projected[..., rank : rank + states], B_proj_bias).mT
    if C is None:
        C = _biased(projected[..., -states:], C_proj_bias).mT
    norms = ((B, b_rms_weight, "B"), (C, c_rms_weight, "C"), (delta, dt_rms_weight, "delta"))
    B, C, delta = (_normalized(*one, b_c_dt_rms_eps) for one in norms)
    y = selective_scan_fn(x, delta, A, B, C, D, z, delta_bias, delta_softplus)
    assert isinstance(y, Tensor)
    return F.linear(y.mT, out_proj_weight, out_proj_bias)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """Compute one decode step of Mamba, or with heads of Mamba-2.

    Decays that are the same in all channels of a head, as views that ``expand`` makes, take the faster way.

    Args:
        state: (B,D,N), with heads (B,H,P,N), overwritten.
        x: (B,D), with heads (B,H,P).
        dt: step sizes, of the shape of ``x``.
        A: (D,N), with heads (H,P,N).
        B: (B,N), with heads (B,G,N).
        C: as ``B``.
        D: (D,), with heads (H,P), or None.
        z: a gate of the shape of ``x``, or None.
        dt_bias: (D,), with heads (H,P), or None.
        dt_softplus: apply softplus to the step sizes.
        state_batch_indices: (B,) integers, the row of ``state`` (M,...) that belongs to each row of x.

    Returns:
        Outputs of the shape and dtype of ``x``.

    Raises:
        ValueError: shapes do not fit.
    """
    if state_batch_indices is not None:
        rows = state_batch_indices.long()
        picked = state[rows]
        y = selective_state_update(picked, x, dt, A, B, C, D, z, dt_bias, dt_softplus)
        state[rows] = picked
        return y
    if state.dim() == 3:
        return mamba.step(state, x, dt, A.to(wide_dtype(x)), B, C, D, dt_bias, dt_softplus, z)
    heads, groups = state.shape[1], B.shape[1]
    if x.shape != state.shape[:3] or dt.shape != x.shape or A.shape != state.shape[1:] or heads % groups:
        given = f"state {tuple(state.shape)}, x {tuple(x.shape)}, dt {tuple(dt.shape)} and A {tuple(A.shape)}"
        raise ValueError(f"{given}, with {groups} groups of B, are not (B,H,P,N), (B,H,P), (B,H,P) and (H,P,N)")
    if not mamba2.per_head(state, x, dt, A, dt_bias=dt_bias):
        return mamba2.step(state, x, dt, A, B, C, D, dt_bias, dt_softplus, z)
    outputs = []
    for head in range(heads):
        group, wide = head // (heads // groups), A[head].to(wide_dtype(x))
        bias, skip = (None if t is None else t[head] for t in (dt_bias, D))
        gate = None if z is None else z[:, head]
        given = (x[:, head], dt[:, head], wide, B[:, group], C[:, group], skip, bias, dt_softplus, gate)
        outputs.append(mamba.step(state[:, head], *given))
    return torch.stack(outputs, 1)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Compute Mamba-2's scan.

    Args:
        x: (B,L,H,P).
        dt: step sizes (B,L,H).
        A: (H,).
        B: (B,L,G,N).
        C: (B,L,G,N).
        chunk_size: tokens that the original computes together; it does not affect the result.
        D: (H,) or (H,P), or None.
        z: a gate (B,L,H,P), or None.
        dt_bias: (H,), added to the step sizes, or None.
        initial_states: (B,H,P,N), of the sequence that ``seq_idx`` numbers 0; None means zeros.
        seq_idx: (B,L) integers, the number of each token's sequence in a packed row. Each starts from zeros.
        cu_seqlens: (S+1,), offsets of the sequences of a single row. Alone, it separates them as ``seq_idx`` does; the
            original reads it only for ``return_varlen_states``.
        dt_softplus: apply softplus to the step sizes.
        dt_limit: smallest and largest step size.
        return_final_states: also return the last states (B,H,P,N).
        return_varlen_states: also return the last states of the sequences in ``cu_seqlens``, (S,H,P,N).
        state_dtype: None or float32; states are float32 or wider.

    Returns:
        Outputs (B,L,H,P) in the dtype of ``x``, or a tuple with the requested states after them.

    Raises:
        ValueError: shapes do not fit, ``seq_idx`` and ``cu_seqlens`` have different borders, ``cu_seqlens`` is missing,
            or ``initial_states`` come for rows whose first number is not 0.
        NotImplementedError: ``state_dtype`` is another dtype.

    References:
        Dao and Gu 2024 (2405.21060), eq. 16.
    """
    if state_dtype not in (None, torch.float32):
        raise NotImplementedError(f"state_dtype={state_dtype} is not supported: states are float32 or wider")
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("return_varlen_states=True needs cu_seqlens")
    if initial_states is not None and seq_idx is not None and bool((seq_idx[:, :1] != 0).any()):
        raise ValueError("initial_states belong to sequence 0, but seq_idx begins with another number")

    def run(part: slice, first: Tensor | None, ids: Tensor | None = None):
        operands = (x[:, part], dt[:, part], A, B[:, part], C[:, part], chunk_size)
        return mamba2.scan(*operands, D, dt_bias, first, dt_softplus, dt_limit, return_final_states=True, seq_idx=ids)

    y, last = run(slice(None), initial_states, sequence_numbers(seq_idx, cu_seqlens, x))
    states = [last] if return_final_states else []
    if return_varlen_states and cu_seqlens is not None:
        spans = pairwise(cu_seqlens.tolist())
        states.append(torch.cat([run(slice(*span), None if span[0] else initial_states)[1] for span in spans]))
    y = (y if z is None else y * F.silu(upcast_half(z))).to(x.dtype)
    return (y, *states) if states else y


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Mamba-2's layer after its first projection: convolution, scan, norm, gate and last projection.

    Args:
        zxbcdt: (B,L,2M+2HP+2GN+H): M channels of a gate and its values, which skip the scan, then HP of the scan's
            gate, HP + 2GN that the convolution reads, and step sizes.
        conv1d_weight: (HP+2GN,K), with K taps.
        conv1d_bias: (HP+2GN,), or None.
        dt_bias: (H,), added to the step sizes, of which softplus is taken.
        A: (H,).
        D: (H,) or (H,P).
        chunk_size: as for ``mamba_chunk_scan_combined``.
        initial_states: likewise.
        seq_idx: likewise; the convolution reads it too.
        dt_limit: likewise.
        return_final_states: likewise.
        activation: that of the convolution, as for ``causal_conv1d_fn``.
        rmsnorm_weight: (HP,), weights of an RMS norm over the channels of each group; None: no norm.
        rmsnorm_eps: added to the mean squares.
        outproj_weight: (E,M+HP), or None for no projection.
        outproj_bias: (E,), or None.
        headdim: P, required if ``D`` is (H,).
        ngroups: G.
        norm_before_gate: norm(y) * silu(z); False: norm(y * silu(z)).
        state_dtype: as for ``mamba_chunk_scan_combined``.

    Returns:
        (B,L,E), or (B,L,M+HP), with ``return_final_states`` a pair with the last states (B,H,P,N).

    Raises:
        ValueError: shapes do not fit, ``headdim`` is missing, or ``outproj_bias`` comes without ``outproj_weight``.
        NotImplementedError: as for ``mamba_chunk_scan_combined`` and ``causal_conv1d_fn``.
    """
    heads, size = len(D), headdim if D.dim() == 1 else D.shape[1]
    if size is None or headdim not in (None, size):
        raise ValueError(f"headdim={headdim} does not fit D {tuple(D.shape)}: pass headdim with D (H,)")
    if outproj_bias is not None and outproj_weight is None:
        raise ValueError("outproj_bias needs outproj_weight")
    width, mixed = heads * size, len(conv1d_weight)
    keys, skipped = (mixed - width) // 2, zxbcdt.shape[-1] - width - mixed - heads
    if keys < 0 or keys % ngroups or heads % ngroups or mixed != width + 2 * keys or skipped < 0 or skipped % 2:
        given = f"zxbcdt {tuple(zxbcdt.shape)} and conv1d_weight {tuple(conv1d_weight.shape)}"
        raise ValueError(f"{given} do not fit {heads} heads of {size} channels and {ngroups} groups")
    skip, z, xBC, dt = zxbcdt.split([skipped, width, mixed, heads], -1)
    xBC = causal_conv1d_fn(xBC.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation)
    assert isinstance(xBC, Tensor)
    x, B, C = xBC.mT.split([width, keys, keys], -1)
    x, B, C = (t.unflatten(-1, (n, -1)) for t, n in ((x, heads), (B, ngroups), (C, ngroups)))
    found = mamba_chunk_scan_combined(
        *(x, dt, A, B, C, chunk_size, D),
        z=z.unflatten(-1, (heads, -1)) if rmsnorm_weight is None else None,
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
        state_dtype=state_dtype,
    )
    y, last = found[0].flatten(-2), found[1]
    if rmsnorm_weight is not None:
        y = rmsnorm_fn(y, rmsnorm_weight, None, z, rmsnorm_eps, width // ngroups, norm_before_gate)
    if skipped:
        gate, values = skip.chunk(2, -1)
        y = torch.cat([F.silu(gate) * values, y], -1)
    if outproj_weight is not None:
        y = F.linear(y, outproj_weight, outproj_bias)
    return (y, last) if return_final_states else y


def sequence_numbers(seq_idx: Tensor | None, cu_seqlens: Tensor | None, x: Tensor) -> Tensor | None:
    """Return the number of each token's sequence (B,L), or None with one sequence per row.

    Raises:
        ValueError: the arguments do not fit the tokens of x (B,L,...), or each other.
    """
    batch, n = x.shape[:2]
    ids, other = borders({"seq_idx": seq_idx}, batch, n), borders({"cu_seqlens": cu_seqlens}, batch, n)
    if other is None:
        return ids
    other = other.to(x.device)
    if ids is not None and not torch.equal(ids, other):
        raise ValueError("seq_idx and cu_seqlens have different borders")
    return other


def _scan_with_constants(u, delta, A, B, C, D, z, bias, softplus) -> tuple[Tensor, Tensor]:
    """``selective_scan_fn`` for B and C (D,N), on u and delta (B,L,D)."""
    dt, x = mamba2.step_sizes(delta, bias, softplus), upcast_half(u)
    written = (dt * x)[..., None] * B.to(x.dtype)  # (B,L,D,N)
    states, last = diagonal_scan(written.flatten(-2), (dt[..., None] * A.to(dt.dtype)).flatten(-2), return_state=True)
    y = (states.unflatten(-1, B.shape) * C.to(x.dtype)).sum(-1)
    if D is not None:
        y = y + x * D.to(y.dtype)
    if z is not None:
        y = y * F.silu(upcast_half(z.mT))
    return y.to(u.dtype), last.unflatten(-1, B.shape)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype)


def _normalized(x: Tensor, weight: Tensor | None, name: str, eps: float) -> Tensor:
    """Apply an RMS norm over axis -2; without a weight return the input."""
    if weight is None:
        return x
    if x.dim() == 2:
        raise ValueError(f"a constant {name} (D, N) has no norm: pass None as its weight")
    return rmsnorm_fn(x.mT, weight, None, eps=eps).mT
