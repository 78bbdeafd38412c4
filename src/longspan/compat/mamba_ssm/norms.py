"""The RMS norm of mamba_ssm with a gate, in float32 or wider."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.tensors import rms_normalize, upcast_half


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """Divide groups of channels by the root of their mean square, with an optional gate.

    Args:
        x: (...,C).
        weight: (C,).
        bias: (C,), or None.
        z: the gate (...,C), of which silu is taken, or None.
        eps: added to the mean square.
        group_size: channels of a group, a divisor of C; None is one group.
        norm_before_gate: norm(x) * silu(z); False: norm(x * silu(z)).

    Returns:
        (...,C) in the dtype of x.

    Raises:
        ValueError: ``group_size`` does not divide C.
    """
    size = group_size or x.shape[-1]
    if x.shape[-1] % size:
        raise ValueError(f"group_size={size} does not divide {x.shape[-1]} channels")
    y = upcast_half(x)
    gate = None if z is None else F.silu(upcast_half(z))
    if gate is not None and not norm_before_gate:
        y = y * gate
    y = rms_normalize(y.unflatten(-1, (-1, size)), eps).flatten(-2) * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


class RMSNorm(nn.Module):
    """``rmsnorm_fn`` with weights for ``hidden_size`` channels, which other modules import as ``RMSNormGated``."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Set the weights to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """x (...,C), gate z (...,C) or None -> (...,C)."""
        return rmsnorm_fn(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate)
