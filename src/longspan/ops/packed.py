"""``cu_seqlens``, the offsets of sequences that are packed into one row: checks, and calls for each sequence."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from .operands import followed, in_memory

R = TypeVar("R", bound=tuple[Any, ...])


def check_packed(cu_seqlens: Tensor | None, batch: int, tokens: int, segments: Tensor | None = None) -> int:
    """Return the number of states of a call: one per sequence of ``cu_seqlens`` (S+1,), else one per row.

    Raises:
        ValueError: the offsets do not cover the tokens of one row, or segments are given as well.
    """
    if cu_seqlens is None:
        return batch
    if segments is not None:
        raise ValueError("segments and cu_seqlens both mark where sequences begin; pass only one of them")
    if cu_seqlens.dim() != 1 or not len(cu_seqlens) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        found = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        raise ValueError(f"cu_seqlens must be int32 or int64 (S + 1,), not {found}")
    if batch != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row, so B must be 1, not {batch}")
    if not followed() and in_memory(cu_seqlens):
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last != tokens or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens must rise from 0 to the number of tokens, {tokens}, not {_shortened(cu_seqlens.tolist())}"
            )
    return len(cu_seqlens) - 1


def count_states(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return the number of states of a checked call on tokens x (B,...)."""
    return x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1


def one_token(r: Any) -> bool:
    """Return whether a call has one token for each state."""
    return getattr(r, r.OUTPUT).shape[r.AXIS] == 1 and r.cu_seqlens is None


def by_sequence(form: Callable[[R], tuple[Tensor, Tensor]], r: R) -> tuple[Tensor, Tensor]:
    """Call ``form``, which does not handle cu_seqlens, once, or for each sequence of the one row.

    Args:
        form: Returns the output, in the shape of the operand ``r.OUTPUT``, and the state.
        r: Operands. The ones named in ``r.TOKENS`` have tokens along ``r.AXIS``, or are None; ``r.state`` (S,...) has
            a row per sequence.
    """
    given: Any = r
    if given.cu_seqlens is None:
        return form(r)
    out, ends = [getattr(given, given.OUTPUT).narrow(given.AXIS, 0, 0)], [given.state[:0]]
    for s, (begin, end) in enumerate(pairwise(given.cu_seqlens.tolist())):
        one = given.state[s : s + 1]
        if begin < end:
            tokens = {name: getattr(given, name) for name in given.TOKENS}
            here = {name: t.narrow(given.AXIS, begin, end - begin) for name, t in tokens.items() if t is not None}
            mask = None if given.mask is None else given.mask[:, begin:end]
            o, one = form(given._replace(**here, state=one, mask=mask, segments=None, cu_seqlens=None))
            out.append(o)
        ends.append(one)
    return torch.cat(out, given.AXIS), torch.cat(ends)


def _shortened(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) < 9 else f"[{', '.join(map(str, numbers[:4]))}, ..., {numbers[-1]}]"
