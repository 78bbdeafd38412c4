"""Attention under a pattern by torch's FlexAttention, whose kernels read our lists of blocks: the way on a GPU."""

import importlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import patterns
from .schedule import plan, tabled

SIZE = 128  # tokens of a block, as its kernels have them
CHANNELS = 16  # the fewest that they take


def why_not(q: Tensor, k: Tensor, v: Tensor, text: str, layer: int) -> str:
    """Why FlexAttention cannot serve these operands well; "" where it can."""
    if not q.is_cuda:
        return f"it is for GPUs: on {q.device.type} it has neither a backward nor log-sums"
    if torch.compiler.is_compiling():
        return "a compiler cannot take the lists of blocks into its graph"
    if v.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels are for float32, bfloat16 and float16, not {v.dtype}"
    heads = range(q.shape[1] if patterns.parse(text).per_head else 1)
    if any(plan(text, k.shape[2], head, layer, True)[1] for head in heads):
        return "strides become classes of tokens here, which are dense products"
    return ""


def attend(q: Tensor, k: Tensor, v: Tensor, text: str, layer: int, scale: float) -> tuple[Tensor, Tensor]:
    """As ``blockwise.attend``: output (B,H,N,E) and log-sums (B,H,N), here with gradients of their own."""
    n, width = q.shape[2], v.shape[-1]
    q, k, v = (F.pad(x, (0, max(0, CHANNELS - x.shape[-1]))) for x in (q, k, v))
    if not patterns.parse(text).per_head:
        o, lse = _call(q, k, v, block_mask(text, n, 0, layer, q.device), scale)
    else:
        shared = q.shape[1] // k.shape[1]
        found = []
        for head in range(q.shape[1]):
            one, group = slice(head, head + 1), slice(head // shared, head // shared + 1)
            found.append(_call(q[:, one], k[:, group], v[:, group], block_mask(text, n, head, layer, q.device), scale))
        o, lse = (torch.cat(x, 1) for x in zip(*found, strict=True))
    return o[..., :width], lse


@lru_cache(maxsize=64)
def block_mask(text: str, n: int, head: int, layer: int, device: torch.device) -> Any:
    """Our list of blocks as FlexAttention's; O((N / 128)^2) integers, never N x N.

    Its predicate does not compute the pattern but looks into the masks of partial blocks, so that all patterns are one
    kernel, compiled once.
    """
    blocks = tabled(patterns.parse(text).at(head, layer), n, SIZE, head, layer)
    count = len(blocks.offsets) - 1
    row = torch.repeat_interleave(torch.arange(count), blocks.offsets.diff())
    # Number 0 is the mask that hides all, 1 the one that hides nothing.
    table = torch.zeros(count, count, dtype=torch.int32)
    table[row, blocks.keys] = (blocks.which + 2).int()
    shape = (1, SIZE, SIZE)
    masks = torch.cat([torch.zeros(shape, dtype=torch.bool), torch.ones(shape, dtype=torch.bool), blocks.masks.bool()])
    table, masks = table.to(device), masks.to(device)

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return masks[table[i // SIZE, j // SIZE], i % SIZE, j % SIZE]

    lists = (*_ordered(table > 1), *_ordered(table == 1))
    return _module().BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=SIZE, mask_mod=allowed, seq_lengths=(n, n))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(nb,nb) bool -> numbers of True in each row (1,1,nb), and first where they are, then the others (1,1,nb,nb)."""
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], order.int()[None, None]


def _call(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> tuple[Tensor, Tensor]:
    grouped = q.shape[1] != k.shape[1]
    return _compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)


def _module() -> Any:
    # Imported late: few need it, and it takes long.
    return importlib.import_module("torch.nn.attention.flex_attention")


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_flex())


def _flex() -> Callable[..., tuple[Tensor, Tensor]]:
    """FlexAttention that returns log-sums too, by whichever argument this version of torch asks for them."""
    flex = _module()
    if not hasattr(flex, "AuxRequest"):
        return partial(flex.flex_attention, return_lse=True)

    def attention(*operands: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        o, aux = flex.flex_attention(*operands, **options, return_aux=flex.AuxRequest(lse=True))
        return o, aux.lse

    return attention
