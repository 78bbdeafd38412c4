"""mamba_ssm's residual blocks, and the norms that add a residual before they normalize."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.tensors import rms_normalize, upcast_half


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    """Add a residual, and normalize the sum over its channels.

    Args:
        x: (...,C).
        weight: (C,).
        bias: (C,), or None.
        residual: (...,C), added to x, or None.
        x1: (...,C), added to x as well, or None.
        weight1: (C,), for a second output from the same sum, or None.
        bias1: (C,), that of the second output, or None.
        eps: added to the mean square.
        dropout_p: the part of x and of x1 that is set to 0.
        rowscale: (...), factors of x and of x1 before they are added, or None.
        prenorm: return the sum too, in the dtype of ``residual``, or else of x.
        residual_in_fp32: without ``residual``, return the sum in float32.
        is_rms_norm: divide by the root of the mean square, without taking the mean away first.

    Returns:
        The norm (...,C) in the dtype of x; with ``weight1`` also the second one, with ``prenorm`` also the sum.
    """
    wide = upcast_half(x)
    total = None if residual is None else residual.to(wide.dtype)
    for part in (wide,) if x1 is None else (wide, x1.to(wide.dtype)):
        scaled = F.dropout(part if rowscale is None else part * rowscale[..., None], dropout_p)
        total = scaled if total is None else total + scaled
    assert total is not None
    normalized = rms_normalize(total, eps) if is_rms_norm else F.layer_norm(total, total.shape[-1:], eps=eps)
    found = []
    for factor, shift in ((weight, bias), (weight1, bias1)):
        if factor is not None:
            y = normalized * factor.to(total.dtype)
            found.append((y if shift is None else y + shift.to(total.dtype)).to(x.dtype))
    if prenorm:
        first = torch.float32 if residual_in_fp32 else x.dtype
        found.append(total.to(first if residual is None else residual.dtype))
    return found[0] if len(found) == 1 else tuple(found)


rms_norm_fn = partial(layer_norm_fn, is_rms_norm=True)
"""``layer_norm_fn`` with the RMS norm."""


class RMSNorm(nn.Module):
    """``rms_norm_fn`` with weights for ``hidden_size`` channels.

    Args:
        hidden_size: channels.
        eps: added to the mean square.
        dropout_p: the part of x that is set to 0 in training.
        device: device of the weights.
        dtype: dtype of the weights.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps, self.dropout_p = eps, dropout_p
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        """x (...,C) -> its norm (...,C), with ``prenorm`` also the sum with the residual."""
        rate, wide = self.dropout_p if self.training else 0.0, residual_in_fp32
        return rms_norm_fn(
            x, self.weight, None, residual, eps=self.eps, dropout_p=rate, prenorm=prenorm, residual_in_fp32=wide
        )


class Block(nn.Module):
    """A mixer and an optional MLP, each after a norm. Returns the output and the residual, which it does not add.

    Args:
        dim: channels.
        mixer_cls: makes the mixer, from ``dim``.
        mlp_cls: makes the MLP, from ``dim``; ``nn.Identity`` for none.
        norm_cls: makes a norm, from ``dim``.
        fused_add_norm: normalize the sum in float32 at least, not in the dtype of the norm's weights.
        residual_in_fp32: keep the residual in float32.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        mlp_cls: Callable[[int], nn.Module] = nn.Identity,
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ):
        super().__init__()
        self.residual_in_fp32, self.fused_add_norm = residual_in_fp32, fused_add_norm
        self.norm, self.mixer = norm_cls(dim), mixer_cls(dim)
        self.mlp = None
        if mlp_cls is not nn.Identity:
            self.norm2, self.mlp = norm_cls(dim), mlp_cls(dim)

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None = None, inference_params: Any = None, **mixer_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """(B,L,dim) and the residual of the block before, None in the first -> the output and the residual."""
        y, total = self._added(self.norm, hidden_states, residual)
        y = self.mixer(y, inference_params=inference_params, **mixer_kwargs)
        if self.mlp is not None:
            y, total = self._added(self.norm2, y, total)
            y = self.mlp(y)
        return y, total

    def _added(self, norm: Any, x: Tensor, residual: Tensor | None) -> Any:
        """Return the norm of the sum, and the sum."""
        if self.fused_add_norm:
            given, rms, wide = (x, norm.weight, norm.bias, residual), isinstance(norm, RMSNorm), self.residual_in_fp32
            return layer_norm_fn(*given, eps=norm.eps, prenorm=True, residual_in_fp32=wide, is_rms_norm=rms)
        total = x if residual is None else x + residual
        return norm(total.to(norm.weight.dtype)), total.float() if self.residual_in_fp32 else total

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """Return the zero states of the mixer."""
        mixer: Any = self.mixer
        return mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)
