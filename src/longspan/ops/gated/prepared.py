"""Normalization and ``cu_seqlens`` for the forms in torch; the kernels do both inside."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..operands import zero_masked
from ..packed import by_sequence
from ..tensors import unit, upcast_half

NORMS = {"l2": "divide by the root of the sum of squares plus 1e-6"}


def prepared(
    form: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    normalize: bool,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Call ``form`` on operands as in ``gated.recur``; ``form`` handles neither ``normalize`` nor cu_seqlens."""
    if normalize:
        # Masked tokens are zeroed before the root. In float32 at least, as in the kernels.
        q, k = (unit(upcast_half(t)) for t in zero_masked(mask, q, k))
    options |= {"cu_seqlens": cu_seqlens, "mask": mask, "segments": segments}
    return by_sequence(form, (q, k, v, log_decay, beta), state, along=2, like=2, **options)
