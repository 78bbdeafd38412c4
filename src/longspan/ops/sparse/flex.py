"""FlexAttention backend for GPUs: attention under a pattern, with the block lists of the pattern."""

import importlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import patterns
from .schedule import plan, tabled

SIZE = 128  # tokens per block of FlexAttention
CHANNELS = 16  # smallest head dimension of FlexAttention


def why_not(q: Tensor, k: Tensor, v: Tensor, text: str, layer: int) -> str:
    """Return why FlexAttention should not run these operands, or "" if it should."""
    if not q.is_cuda:
        return f"it needs a GPU: on {q.device.type} it has no backward and no log-sum-exp"
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace the block lists"
    if torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportAttributeAccessIssue] (torch's stubs lack it)
        return "its kernels are invisible to the dispatch mode that follows the operations of torch"
    if v.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels support float32, bfloat16 and float16, not {v.dtype}"
    heads = range(q.shape[1] if patterns.parse(text).per_head else 1)
    if any(plan(text, k.shape[2], head, layer, True)[1] for head in heads):
        return "strided parts run as dense products over classes of tokens"
    return ""


def attend(q: Tensor, k: Tensor, v: Tensor, text: str, layer: int, scale: float) -> tuple[Tensor, Tensor]:
    """``blockwise.attend`` with a gradient of the log-sum-exps: output (B,H,N,E) and log-sum-exps (B,H,N)."""
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
    """Convert the block list of a pattern to a ``BlockMask`` of O((N / 128)^2) integers.

    Its predicate looks up the masks of partial blocks instead of computing the pattern. So one compiled kernel serves
    all patterns.
    """
    blocks = tabled(patterns.parse(text).at(head, layer), n, SIZE, head, layer)
    count = len(blocks.offsets) - 1
    row = torch.repeat_interleave(torch.arange(count), blocks.offsets.diff())
    # Mask 0 hides all pairs, mask 1 hides none.
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
    """(nb,nb) bool -> count of True in each row (1,1,nb), and column indices, those of True first (1,1,nb,nb)."""
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], order.int()[None, None]


def _call(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> tuple[Tensor, Tensor]:
    grouped = q.shape[1] != k.shape[1]
    return _compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)


def _module() -> Any:
    # Imported on first use, because the import is slow.
    return importlib.import_module("torch.nn.attention.flex_attention")


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_flex())


def _flex() -> Callable[..., tuple[Tensor, Tensor]]:
    """FlexAttention with log-sum-exps, by the argument of the installed version of torch."""
    flex = _module()
    if not hasattr(flex, "AuxRequest"):
        return partial(flex.flex_attention, return_lse=True)

    def attention(*operands: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        o, aux = flex.flex_attention(*operands, **options, return_aux=flex.AuxRequest(lse=True))
        return o, aux.lse

    return attention
