"""Mamba-1's selective scan and step with the names and layouts of transformers, which have channels first."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.scan import selective_scan
from .packing import borders, cache_of, real, sequences
from .states import carried, may_be_overwritten
from .undoing import recur


class Known(NamedTuple):
    """What a layer knows and the scans in it do not receive."""

    segments: Tensor | None
    """number of each token's sequence (B,N) in packed rows"""
    states: Iterator[Tensor]
    """state (B,C,S) from which each scan continues, in the order of the calls; empty to start from zeros"""


# Of the layer that runs.
_known: ContextVar[Known | None] = ContextVar("longspan_mamba_layer", default=None)


def scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs,
) -> Tensor | tuple[Tensor, Tensor]:
    """Replace ``mamba_selective_scan``, in float32 or wider: C channels, S states of a channel.

    hidden_states, dt and z (B,C,N), A (C,S), B and C (B,S,N), D and delta_bias (C,) -> (B,C,N), and with
    ``return_last_state`` the state (B,C,S). ``kwargs`` may have the boundaries of packed rows; see ``borders``.

    Inside a layer that ``with_state`` wraps, it continues the layer's cached state and observes packed rows. The
    original starts from zeros, and reads a packed row as one sequence.

    References:
        transformers, ``mamba_selective_scan``; Gu and Dao 2023 (2312.00752), eq. 2.
    """
    batch, _, n = hidden_states.shape
    known = _known.get()
    segments, states = (borders(kwargs, batch, n), iter(())) if known is None else known
    state = next(states, None)
    y, last = recur(
        selective_scan,
        {"x": hidden_states.mT, "dt": dt.mT, "B": B.mT, "C": C.mT, "z": None if z is None else z.mT}
        | {"mask": real(batch, n), "segments": segments},
        axis=1,
        state=None if state is None else carried(state, A.dtype),
        A=A,
        D=D,
        dt_bias=delta_bias,
        softplus=delta_softplus,
    )
    return (y.mT, last) if return_last_state else y.mT


def step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs,
) -> Tensor:
    """Replace ``mamba_selective_state_update``: one decode step. Letters as in ``scan``.

    state (B,C,S), which is overwritten, hidden_states, dt and z (B,C), A (C,S), B and C (B,S), D and dt_bias (C,) ->
    (B,C) in the dtype of ``hidden_states``. ``kwargs`` are ignored.

    References:
        transformers, ``mamba_selective_state_update``.
    """
    operands = {"x": hidden_states, "dt": dt, "B": B, "C": C, "z": z}
    y, last = recur(
        selective_scan,
        {name: None if t is None else t[:, None] for name, t in operands.items()} | {"mask": real(len(state), 1)},
        axis=1,
        state=carried(state, A.dtype),
        A=A,
        D=D,
        dt_bias=dt_bias,
        softplus=dt_softplus,
        donate=may_be_overwritten(state),
    )
    if last.data_ptr() != state.data_ptr():
        state.copy_(last)
    return y[:, 0]


def with_state(original: Callable) -> Callable:
    """Wrap a layer's ``forward`` so that its scans know the cached state and the boundaries of packed rows.

    transformers starts the scan of several tokens from zeros, so it forgets the tokens before them, and passes the
    boundaries at most to the convolution.
    """
    names = tuple(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        # First, so that a compiler sees only the original.
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage] (documented by torch)
            return original(self, *args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        x, cache = given["hidden_states"], cache_of(given)
        batch, n = x.shape[:2]
        if given.get("seq_idx") is None and (ids := sequences(batch, n)) is not None:
            given["seq_idx"] = ids.int()
        if (mask := given.get("attention_mask")) is not None:
            given["attention_mask"] = mask[:, mask.shape[1] - n :]  # Mamba's model passes that of all tokens so far
        state = None if cache is None or n == 1 else cache.get_recurrent_state(self.layer_idx, state_idx=0)
        # With heads (B,H,C,S), as in Zamba, there is a scan for each.
        states = () if state is None else state.unbind(1) if state.dim() == 4 else (state,)
        token = _known.set(Known(borders(given, batch, n), iter(states)))
        try:
            return original(self, **given)
        finally:
            _known.reset(token)

    return forward
