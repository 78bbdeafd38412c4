"""causal_conv1d on longspan's operations, on any device and in any precision: functions of the package 1.6.

After ``longspan.compat.causal_conv1d.install()``, ``from causal_conv1d import causal_conv1d_fn`` finds them. Layouts
and arguments are the original's: channels first, (B,C,N), with C channels and N tokens. K is the number of taps.
"""

from types import ModuleType

import torch
from torch import Tensor

from ..ops.convolution import causal_convolution
from .stand_in import StandIn, shims
from .transformers.convolution import OURS, update
from .transformers.packing import borders
from .transformers.states import carried

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "install", "uninstall"]

NAME, VERSION = "causal_conv1d", "1.6.1"


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the causal depthwise convolution, as ``longspan.causal_convolution`` does.

    Args:
        x: (B,C,N).
        weight: (C,K).
        bias: (C,), or None.
        seq_idx: (B,N) integers, the number of each token's sequence in a packed row: a token sees only its own
            sequence, whose tokens are adjacent. Tokens with a negative number are padding; their output is 0.
        initial_states: the K - 1 inputs before the first token (B,C,K-1); None means zeros.
        return_final_states: also return the last K - 1 inputs.
        final_states_out: (B,C,K-1), receives the last inputs; only with ``return_final_states``.
        activation: ``"silu"``, its other name ``"swish"``, or None.

    Returns:
        (B,C,N) in x's dtype, with ``return_final_states`` a pair with the last inputs (B,C,K-1) in x's dtype.

    Raises:
        ValueError: shapes do not fit, ``seq_idx`` comes with states, or ``final_states_out`` without
            ``return_final_states``.
        NotImplementedError: an unknown activation.

    References:
        Gu and Dao 2023 (2312.00752), section 3.4.
    """
    _check_activation(activation)
    if seq_idx is not None and (initial_states is not None or return_final_states):
        raise ValueError("causal_conv1d_fn takes seq_idx without initial_states and return_final_states")
    if final_states_out is not None and not return_final_states:
        raise ValueError("causal_conv1d_fn writes final_states_out only with return_final_states=True")
    if initial_states is not None and initial_states.shape[-1] != weight.shape[1] - 1:
        raise ValueError(f"initial_states must hold {weight.shape[1] - 1} inputs, not {initial_states.shape[-1]}")
    mask = None
    if seq_idx is not None and bool((seq_idx < 0).any()):
        mask = seq_idx >= 0
    y, last = causal_convolution(
        x.mT,
        weight,
        bias,
        None if initial_states is None else initial_states.mT.to(x.dtype),
        activation=OURS.get(activation or ""),
        mask=mask,
        segments=borders({"seq_idx": seq_idx}, len(x), x.shape[-1]),
    )
    if not return_final_states:
        return y.mT
    last = last.mT.to(x.dtype)
    return y.mT, last if final_states_out is None else final_states_out.copy_(last)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Continue a causal depthwise convolution, usually by one token.

    Args:
        x: (B,C), or (B,C,N).
        conv_state: the last R >= K - 1 inputs (B,C,R), updated in place.
        weight: (C,K).
        bias: (C,), or None.
        activation: ``"silu"``, its other name ``"swish"``, or None.
        cache_seqlens: (B,) integers, the number of inputs so far. The state is then a circular buffer: input number i
            is at i % R.
        conv_state_indices: (B,) integers, the row of ``conv_state`` (M,C,R) that belongs to each row of x.

    Returns:
        Outputs of the shape and dtype of ``x``.

    Raises:
        ValueError: shapes do not fit.
        NotImplementedError: an unknown activation.
    """
    _check_activation(activation)
    if conv_state_indices is not None:
        rows = conv_state_indices.long()
        picked = conv_state[rows]
        y = causal_conv1d_update(x, picked, weight, bias, activation, cache_seqlens)
        conv_state[rows] = picked
        return y
    if x.dim() == 2:
        return causal_conv1d_update(x[..., None], conv_state, weight, bias, activation, cache_seqlens)[..., 0]
    if cache_seqlens is None:
        return update(x, conv_state, weight, bias, activation)
    size, taps = conv_state.shape[2], weight.shape[1] - 1
    if size < taps:
        raise ValueError(f"conv_state must hold at least {taps} inputs, not {size}")

    def places(begin: int, end: int) -> Tensor:
        """Return where inputs are in the buffer, (B,C,end-begin), counted from the first new one."""
        at = cache_seqlens.long()[:, None] + torch.arange(begin, end, device=x.device)
        return (at % size)[:, None].expand(-1, x.shape[1], -1)

    past = carried(conv_state, x.dtype).gather(2, places(-taps, 0))
    y, _ = causal_convolution(x.mT, weight, bias, past.mT, activation=OURS.get(activation or ""))
    kept = min(size, x.shape[2])
    conv_state.scatter_(2, places(x.shape[2] - kept, x.shape[2]), x[..., x.shape[2] - kept :].to(conv_state.dtype))
    return y.mT


def _check_activation(activation: str | None) -> None:
    if activation is not None and activation not in OURS:
        raise NotImplementedError(f"activation must be None, 'silu' or 'swish', not {activation!r}")


def _modules() -> dict[str, ModuleType]:
    """Return our modules by the original's names."""
    functions = {"causal_conv1d_fn": causal_conv1d_fn, "causal_conv1d_update": causal_conv1d_update}
    places = {
        NAME: functions | {"__version__": VERSION},
        f"{NAME}.causal_conv1d_interface": functions,
    }
    return shims(places, "causal_conv1d's names on longspan's operations.", "docs/how-to/from-mamba-ssm.md")


_stand_in = StandIn(NAME, _modules)
install, uninstall = _stand_in.install, _stand_in.uninstall
