"""The general delta rule in C++: whole sequences, forward and backward, and one token."""

from functools import partial

import torch
from torch import Tensor

from ..native import build, call
from ..native.build.openmp import threads
from ..native.call import HALVES, pointers, readable
from ..operands import mark_overwritten
from ..packed import by_sequence
from .general_chunks import composed
from .native import kind, sequences
from .operands import GeneralRecurrence, step_sizes


def why_not(r: GeneralRecurrence) -> str:
    """Return why the kernels cannot serve these operands; empty if they can."""
    if reason := call.why_not(r.q, r.k, r.v, r.state, *r[3:6], *r[7:10], family="general"):
        return reason
    return "" if r.read.dtype == r.erase.dtype == r.v.dtype else "they take reads and erasures in the dtype of values"


def _prepare(r: GeneralRecurrence) -> GeneralRecurrence:
    log_decay = None if r.log_decay is None else r.log_decay.float()
    offsets = None if r.cu_seqlens is None else r.cu_seqlens.long()
    return r._replace(log_decay=log_decay, cu_seqlens=offsets, early=r.early and log_decay is not None)


attend = sequences("general", GeneralRecurrence, 5, again=partial(by_sequence, composed), prepare=_prepare)
"""``general.serve`` in C++, for float32 or bfloat16 of any strides.

-> o (B,H,N,E) with dtype and strides of v, state (B,H,D,E) float32. All sums are in float32. Time is O(N (D E + 64 (D
+ E))). Memory, threads and MemoryError as in ``native.attend``. Only for operands for which ``why_not`` is empty.
"""


def step(r: GeneralRecurrence, donate: bool) -> tuple[Tensor, Tensor] | None:
    """One token of ``general.serve`` in one pass over the state (B,H,D,E), in place with ``donate``.

    q, k, read, erase (B,G,1,D), v (B,H,1,E), in float32, bfloat16 or float16, log_decay (B,H,1) or (B,H,1,D), state
    float32 -> o (B,H,1,E) in v's dtype, state. Returns None for other operands, and without kernels. It runs once per
    token and layer, so it is written for speed.
    """
    q, k, v, read, erase, log_decay, state, _, _, _, scale, early = r
    dtype, found = v.dtype, step_sizes(r)
    if found is None or dtype not in HALVES or not read.shape == erase.shape == q.shape:
        return None
    if log_decay is not None and dtype is not torch.float32 and log_decay.dtype in HALVES:
        log_decay = log_decay.float()
    if not readable(q, k, v, read, erase, dtype=dtype, wide=(state, log_decay)):
        return None
    if (library := build.loaded("general/step")) is None:
        return None
    batch, groups, heads, keys, values = found
    log_decay = log_decay if log_decay is None else log_decay.contiguous()
    q, k, v, read, erase = (t.contiguous() for t in (q, k, v, read, erase))
    state = state.contiguous() if donate else state.clone(memory_format=torch.contiguous_format)
    out = torch.empty_like(v)
    failed = library.longspan_general_step(
        *pointers(state, q, k, v, read, erase, log_decay, out),
        batch * heads,
        heads // groups,
        keys,
        values,
        kind(log_decay),
        early,
        HALVES[dtype],
        scale,
        threads(),
    )
    assert not failed
    if donate:
        mark_overwritten(state)
    return out, state
