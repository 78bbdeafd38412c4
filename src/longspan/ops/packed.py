"""``cu_seqlens``, the offsets of sequences that are packed into one row: checks, and calls for each sequence."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .operands import in_memory, transformed


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
    if not torch.compiler.is_compiling() and not transformed() and in_memory(cu_seqlens):
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last != tokens or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens must rise from 0 to the number of tokens, {tokens}, not {_shortened(cu_seqlens.tolist())}"
            )
    return len(cu_seqlens) - 1


def by_sequence(
    form: Callable[..., tuple[Tensor, Tensor]],
    tokens: Sequence[Tensor | None],
    state: Tensor,
    *,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    along: int,
    like: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Call ``form``, which does not handle cu_seqlens, once, or for each sequence of the one row.

    Args:
        form: ``form(*tokens, state, mask=mask, segments=segments, **options)`` returns the output and the state.
        tokens: Operands whose axis ``along`` counts tokens, or None.
        state: (S,...), one per sequence.
        cu_seqlens: (S+1,), or None for one call.
        mask: (B,N) bool or None.
        segments: (B,N) or None.
        along: The axis of tokens in operands and output.
        like: Which operand has the shape of the output.
        options: Passed on to ``form``.
    """
    if cu_seqlens is None:
        return form(*tokens, state, mask=mask, segments=segments, **options)
    first = tokens[like]
    assert first is not None
    out, ends = [first.narrow(along, 0, 0)], [state[:0]]
    for s, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        one = state[s : s + 1]
        if begin < end:
            here = [None if t is None else t.narrow(along, begin, end - begin) for t in tokens]
            real = None if mask is None else mask[:, begin:end]
            o, one = form(*here, one, mask=real, segments=None, **options)
            out.append(o)
        ends.append(one)
    return torch.cat(out, along), torch.cat(ends)


def _shortened(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) < 9 else f"[{', '.join(map(str, numbers[:4]))}, ..., {numbers[-1]}]"
