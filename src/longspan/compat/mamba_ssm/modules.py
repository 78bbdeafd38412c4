"""Mamba and Mamba-2 layers with mamba_ssm's options, parameter names and inference cache."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...modules.init import time_steps
from ...ops.tensors import upcast_half
from ..causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from ..transformers.mamba2 import step_sizes
from .norms import RMSNorm
from .ops import (
    NO_LIMIT,
    mamba_split_conv1d_scan_combined,
    selective_scan_fn,
    selective_state_update,
    sequence_numbers,
)


class Cached(nn.Module):
    """A layer whose states are in ``inference_params.key_value_memory_dict`` under its ``layer_idx``."""

    layer_idx: int | None

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return zero states for a batch of sequences of any length: those of the convolution and of the scan."""
        raise NotImplementedError

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read one token (B,1,d_model); return the output and the two states, which are overwritten."""
        raise NotImplementedError

    def _cached(self, inference_params: Any, batch: int) -> tuple[Tensor, Tensor]:
        """Return the states of this layer, which are zeros at first."""
        if self.layer_idx is None:
            raise ValueError(f"{type(self).__name__} needs layer_idx for inference_params")
        held = inference_params.key_value_memory_dict
        if self.layer_idx not in held:
            held[self.layer_idx] = self.allocate_inference_cache(batch, 0)
        return held[self.layer_idx]


class Mamba(Cached):
    """Mamba's layer: two projections around a short convolution and the selective scan.

    Args:
        d_model: channels of the input and the output.
        d_state: states of a channel.
        d_conv: taps of the convolution.
        expand: inner channels as a multiple of ``d_model``.
        dt_rank: channels from which step sizes are projected; ``"auto"`` is ``d_model`` / 16, rounded up.
        dt_min: smallest initial step size.
        dt_max: largest initial step size.
        dt_init: ``"random"`` or ``"constant"`` weights of the projection of step sizes.
        dt_scale: factor of these weights.
        dt_init_floor: what smaller initial step sizes are raised to.
        conv_bias: the convolution has a bias.
        bias: the first and the last projection have a bias.
        use_fast_path: how the original computes; it does not affect the result.
        layer_idx: number of the layer, required for ``inference_params``.
        device: device of the parameters.
        dtype: dtype of the parameters, except ``A_log`` and ``D``, which are float32.

    Raises:
        NotImplementedError: an unknown ``dt_init``.
        ValueError: a ``dt_rank`` that is another text.

    References:
        Gu and Dao 2023 (2312.00752), section 3.4.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner = int(expand * d_model)
        if isinstance(dt_rank, str) and dt_rank != "auto":
            raise ValueError(f"dt_rank={dt_rank!r} must be 'auto' or a number of channels")
        self.dt_rank = math.ceil(d_model / 16) if isinstance(dt_rank, str) else dt_rank
        self.use_fast_path, self.layer_idx = use_fast_path, layer_idx
        self.activation, self.act = "silu", nn.SiLU()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias, **made)
        self.conv1d = _convolution(self.d_inner, d_conv, conv_bias, made)
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False, **made)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner, **made)
        bound = self.dt_rank**-0.5 * dt_scale
        if dt_init == "constant":
            nn.init.constant_(self.dt_proj.weight, bound)
        elif dt_init == "random":
            nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        else:
            raise NotImplementedError(f"dt_init must be 'random' or 'constant', not {dt_init!r}")
        with torch.no_grad():
            self.dt_proj.bias.copy_(time_steps(self.d_inner, low=dt_min, high=dt_max, floor=dt_init_floor))
        rates = torch.arange(1, d_state + 1, dtype=torch.float32, device=device).log()
        self.A_log = nn.Parameter(rates.repeat(self.d_inner, 1))
        self.D = nn.Parameter(torch.ones(self.d_inner, device=device))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **made)
        _mark("_no_reinit", self.dt_proj.bias)
        _mark("_no_weight_decay", self.A_log, self.D)

    def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Tensor:
        """Map (B,L,d_model) to the same shape.

        Args:
            hidden_states: (B,L,d_model).
            inference_params: an object with ``key_value_memory_dict``, in which the layer keeps its states, and
                ``seqlen_offset``, the tokens read so far: 0, or one token follows them.
        """
        states = None
        if inference_params is not None:
            states = self._cached(inference_params, len(hidden_states))
            if inference_params.seqlen_offset > 0:
                return self.step(hidden_states, *states)[0]
        x, z = self.in_proj(hidden_states).mT.chunk(2, 1)
        if states is not None:
            _keep(states[0], x)
        x = causal_conv1d_fn(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu")
        assert isinstance(x, Tensor)
        dt, A, B, C = self._scanned(x.mT)
        y, last = selective_scan_fn(
            *(x, dt.mT, A, B.mT, C.mT, upcast_half(self.D), z, upcast_half(self.dt_proj.bias)),
            delta_softplus=True,
            return_last_state=True,
        )
        if states is not None:
            states[1].copy_(last)
        return self.out_proj(y.mT)

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read one token.

        Args:
            hidden_states: (B,1,d_model).
            conv_state: the last inputs of the convolution (B,d_inner,d_conv), overwritten.
            ssm_state: (B,d_inner,d_state), overwritten.

        Returns:
            The output (B,1,d_model) and the two states.

        Raises:
            ValueError: there is more than one token.
        """
        x, z = self.in_proj(_token(hidden_states)).chunk(2, -1)
        x = causal_conv1d_update(x, conv_state, self.conv1d.weight.squeeze(1), self.conv1d.bias, "silu")
        dt, A, B, C = self._scanned(x)
        y = selective_state_update(ssm_state, x, dt, A, B, C, self.D, z, self.dt_proj.bias, dt_softplus=True)
        return self.out_proj(y)[:, None], conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return zero states for a batch of sequences of any length: (B,d_inner,d_conv) and (B,d_inner,d_state)."""
        conv, scan = self.conv1d.weight, self.dt_proj.weight
        return (
            conv.new_zeros(batch_size, self.d_inner, self.d_conv, dtype=dtype),
            scan.new_zeros(batch_size, self.d_inner, self.d_state, dtype=dtype),
        )

    def _scanned(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the step sizes without their bias (...,d_inner), A, B and C for tokens (...,d_inner)."""
        dt, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], -1)
        return F.linear(dt, self.dt_proj.weight), -upcast_half(self.A_log).exp(), B, C


class Mamba2(Cached):
    """Mamba-2's layer: two projections around a short convolution, the scan with heads, and a gated norm.

    Args:
        d_model: channels of the input and the output.
        d_state: channels of B and C.
        d_conv: taps of the convolution.
        conv_init: bound of the uniform initial weights of the convolution; None is torch's.
        expand: inner channels as a multiple of ``d_model``.
        headdim: channels of a head.
        d_ssm: inner channels that the scan reads, the others pass a gate alone; None is all.
        ngroups: groups of heads that share B and C.
        A_init_range: bounds of the initial decay rates.
        D_has_hdim: ``D`` has a number per channel, instead of one per head.
        rmsnorm: normalize before the last projection.
        norm_before_gate: normalize before the gate, instead of after it.
        dt_min: smallest initial step size.
        dt_max: largest initial step size.
        dt_init_floor: what smaller initial step sizes are raised to.
        dt_limit: smallest and largest step size.
        bias: the first and the last projection have a bias.
        conv_bias: the convolution has a bias.
        chunk_size: tokens that the original computes together; it does not affect the result.
        use_mem_eff_path: how the original computes; it does not affect the result.
        layer_idx: number of the layer, required for ``inference_params``.
        process_group: None; layers are not spread over processes.
        sequence_parallel: how the original spreads a layer over ``process_group``.
        device: device of the parameters.
        dtype: dtype of the parameters, except ``D``, which is float32.

    Raises:
        ValueError: ``headdim`` or ``ngroups`` do not divide, or ``A_init_range`` is not positive and ascending.
        NotImplementedError: a ``process_group``.

    References:
        Dao and Gu 2024 (2405.21060), section 7.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: float = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = NO_LIMIT,
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: Any = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if process_group is not None:
            raise NotImplementedError("process_group is not supported: longspan's Mamba2 runs in one process")
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.conv_init, self.headdim, self.ngroups, self.D_has_hdim = conv_init, headdim, ngroups, D_has_hdim
        self.d_inner = int(expand * d_model)
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm
        self.nheads = self.d_ssm // headdim
        self.rmsnorm, self.norm_before_gate, self.dt_limit = rmsnorm, norm_before_gate, dt_limit
        self.chunk_size, self.use_mem_eff_path, self.layer_idx = chunk_size, use_mem_eff_path, layer_idx
        self.process_group, self.sequence_parallel = process_group, sequence_parallel
        self.activation, self.act = "silu", nn.SiLU()
        if self.d_ssm % headdim or self.nheads % ngroups:
            raise ValueError(
                f"{self.d_ssm} inner channels are not whole heads of headdim={headdim} in ngroups={ngroups} groups"
            )
        if not 0 < A_init_range[0] <= A_init_range[1]:
            raise ValueError(f"A_init_range={A_init_range} must be positive and ascending")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        mixed = self.d_ssm + 2 * ngroups * d_state
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner + 2 * ngroups * d_state + self.nheads, bias=bias, **made)
        self.conv1d = _convolution(mixed, d_conv, conv_bias, made)
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        self.dt_bias = nn.Parameter(time_steps(self.nheads, low=dt_min, high=dt_max, floor=dt_init_floor).to(**made))
        self.A_log = nn.Parameter(torch.empty(self.nheads).uniform_(*A_init_range).log().to(**made))
        self.D = nn.Parameter(torch.ones(self.d_ssm if D_has_hdim else self.nheads, device=device))
        if rmsnorm:
            self.norm = RMSNorm(self.d_ssm, 1e-5, self.d_ssm // ngroups, norm_before_gate, **made)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **made)
        _mark("_no_weight_decay", self.dt_bias, self.A_log, self.D)

    def forward(
        self,
        u: Tensor,
        seqlen: int | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """Map (B,L,d_model) to the same shape.

        Args:
            u: (B,L,d_model), or (B*L,d_model) with ``seqlen``.
            seqlen: L, if the rows of ``u`` follow each other.
            seq_idx: (B,L) integers, the number of each token's sequence in a packed row.
            cu_seqlens: (S+1,), offsets of the sequences of a single row.
            inference_params: an object with ``key_value_memory_dict``, in which the layer keeps its states, and
                ``seqlen_offset``, the tokens read so far: 0, or one token follows them.

        Raises:
            ValueError: ``seq_idx`` and ``cu_seqlens`` do not fit the tokens or each other.
            NotImplementedError: ``cu_seqlens`` with ``inference_params``.
        """
        if cu_seqlens is not None and inference_params is not None:
            raise NotImplementedError("cu_seqlens is not supported with inference_params: pass one sequence per row")
        x = u if seqlen is None else u.unflatten(0, (-1, seqlen))
        states = None
        if inference_params is not None:
            states = self._cached(inference_params, len(x))
            if inference_params.seqlen_offset > 0:
                out = self.step(x, *states)[0]
                return out if seqlen is None else out.flatten(0, 1)
        zxbcdt = self.in_proj(x)
        out, last = mamba_split_conv1d_scan_combined(
            *(zxbcdt, self.conv1d.weight.squeeze(1), self.conv1d.bias, self.dt_bias, -upcast_half(self.A_log).exp()),
            D=self.D.view(-1, self.headdim) if self.D_has_hdim else self.D,
            chunk_size=self.chunk_size,
            seq_idx=sequence_numbers(seq_idx, cu_seqlens, x),
            dt_limit=self.dt_limit,
            return_final_states=True,
            rmsnorm_weight=self.norm.weight if self.rmsnorm else None,
            rmsnorm_eps=self.norm.eps if self.rmsnorm else 1e-6,
            headdim=self.headdim,
            ngroups=self.ngroups,
            norm_before_gate=self.norm_before_gate,
        )
        if states is not None:
            _keep(states[0], self._parts(zxbcdt)[2].mT)
            states[1].copy_(last)
        out = self.out_proj(out)
        return out if seqlen is None else out.flatten(0, 1)

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read one token.

        Args:
            hidden_states: (B,1,d_model).
            conv_state: the last inputs of the convolution (B,d_ssm+2*ngroups*d_state,d_conv), overwritten.
            ssm_state: (B,nheads,headdim,d_state), overwritten.

        Returns:
            The output (B,1,d_model) and the two states.

        Raises:
            ValueError: there is more than one token.
        """
        skip, z, xBC, dt = self._parts(self.in_proj(_token(hidden_states)))
        xBC = causal_conv1d_update(xBC, conv_state, self.conv1d.weight.squeeze(1), self.conv1d.bias, "silu")
        keys = self.ngroups * self.d_state
        x, B, C = xBC.split([self.d_ssm, keys, keys], -1)
        heads, groups = (self.nheads, self.headdim), (self.ngroups, self.d_state)
        # The original's step leaves out dt_limit, with which it differs from its own scan.
        dt = step_sizes(dt, self.dt_bias, True).clamp(*self.dt_limit)
        y = selective_state_update(
            *(ssm_state, x.unflatten(-1, heads), dt[..., None].expand(-1, *heads)),
            (-upcast_half(self.A_log).exp())[:, None, None].expand(*heads, self.d_state),
            *(B.unflatten(-1, groups), C.unflatten(-1, groups)),
            self.D.view(heads) if self.D_has_hdim else self.D[:, None].expand(heads),
            z=None if self.rmsnorm else z.unflatten(-1, heads),
        ).flatten(-2)
        if self.rmsnorm:
            y = self.norm(y, z)
        gate, values = skip.chunk(2, -1)
        return self.out_proj(torch.cat([F.silu(gate) * values, y], -1))[:, None], conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return zero states: (B,d_ssm+2*ngroups*d_state,d_conv) and (B,nheads,headdim,d_state)."""
        conv, scan = self.conv1d.weight, self.in_proj.weight
        return (
            conv.new_zeros(batch_size, self.d_conv, len(conv), dtype=dtype).mT,
            scan.new_zeros(batch_size, self.nheads, self.headdim, self.d_state, dtype=dtype),
        )

    def _parts(self, zxbcdt: Tensor) -> tuple[Tensor, ...]:
        """Split the first projection: what skips the scan, its gate, what the convolution reads, and step sizes."""
        skipped = 2 * (self.d_inner - self.d_ssm)
        return zxbcdt.split([skipped, self.d_ssm, self.d_ssm + 2 * self.ngroups * self.d_state, self.nheads], -1)


def _convolution(channels: int, taps: int, bias: bool, made: dict[str, Any]) -> nn.Conv1d:
    """Return the weights of a causal depthwise convolution."""
    return nn.Conv1d(channels, channels, taps, groups=channels, padding=taps - 1, bias=bias, **made)


def _mark(name: str, *parameters: Tensor) -> None:
    """Set the attribute by which training code of mamba_ssm recognizes parameters."""
    for parameter in parameters:
        setattr(parameter, name, True)


def _token(x: Tensor) -> Tensor:
    if x.dim() != 3 or x.shape[1] != 1:
        raise ValueError(f"a step reads one token (B, 1, d_model), not {tuple(x.shape)}")
    return x[:, 0]


def _keep(conv_state: Tensor, x: Tensor) -> None:
    """Write the last inputs (B,C,L) into a state (B,C,R), with zeros before those of a shorter sequence."""
    size = conv_state.shape[2]
    conv_state.copy_(F.pad(x, (max(size - x.shape[2], 0), 0))[..., -size:])
