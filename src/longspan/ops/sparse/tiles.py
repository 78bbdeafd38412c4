"""Execution of a plan with dense matrix products in PyTorch, forward and backward."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .schedule import Classes, Part, Tiles

# Elements of keys that are copied at a time, if they are not in runs, and logits in memory at a time in the backward
# pass: on a CPU what its caches hold; on a GPU at least these, and as many as an operand has elements, since each piece
# costs launches.
GATHERED = {"cpu": 2**24, "cuda": 2**26}
LOGITS = {"cpu": 2**20, "cuda": 2**26}


def forward(
    parts: tuple[Part, ...], rows: list[Tensor], o: Tensor, log: Tensor, scale: float, softcap: float, *, begun: bool
) -> None:
    """Attend within each part.

    Args:
        parts: The parts of the plan.
        rows: q, k, v, (B',L,D) each.
        o: (B',L,D) output, written; with ``begun``, updated.
        log: (B',L) log-sum-exp of each row, written; with ``begun``, updated.
        scale: Factor of the logits.
        softcap: Cap of the logits; 0: none.
        begun: ``o`` and ``log`` hold results of other pairs.
    """
    for i, part in enumerate(parts):
        # Tiles do not share queries, so only classes of tokens merge with earlier parts.
        fresh = not begun and (isinstance(part, Tiles) or i == 0)
        for piece in _pieces(part, rows[0], backward=False):
            _accumulate(part, piece, rows, o, log, scale, softcap, fresh)


def backward(
    parts: tuple[Part, ...], rows: list[Tensor], log: Tensor, found: list[Tensor], scale: float, softcap: float
) -> None:
    """Add the gradients of each part; output and log-sum-exp are those of whole rows.

    Args:
        parts: The parts of the plan.
        rows: q, k, v, the gradient of the output, and the output, (B',L,D) each.
        log: (B',L) log-sum-exp of each row.
        found: Gradients of q, k, v (B',L,D), updated.
        scale: Factor of the logits.
        softcap: Cap of the logits; 0: none.
    """
    for part in parts:
        for piece in _pieces(part, rows[0], backward=True):
            _adjoint(part, piece, rows, log, found, scale, softcap)


def padded(x: Tensor, length: int) -> Tensor:
    """Pad (B,H,N,D) to (B H, length, D), contiguous."""
    x = x.flatten(0, 1)
    return F.pad(x, (0, 0, 0, length - x.shape[1])) if length > x.shape[1] else x.contiguous()


def _pieces(part: Part, x: Tensor, *, backward: bool) -> list[slice]:
    """Split the rows of a part into calls that bound the memory of copies and logits."""
    wide = part.count if isinstance(part, Classes) else part.keys.shape[1] * part.size
    total, count = _rows(part), _rows(part)
    if backward:
        each = len(x) * wide * (part.count if isinstance(part, Classes) else part.size)
        count = max(1, _budget(LOGITS, x) // each)
    elif isinstance(part, Tiles) and part.begin < 0:
        count = max(1, _budget(GATHERED, x) // (len(x) * wide * x.shape[-1]))
    return [slice(start, min(total, start + count)) for start in range(0, total, count)]


def _budget(limits: dict[str, int], x: Tensor) -> int:
    return max(limits["cuda"], x.numel()) if x.is_cuda else limits["cpu"]


def _rows(part: Part) -> int:
    return part.apart if isinstance(part, Classes) else len(part.rows)


def _blocks(part: Tiles, x: Tensor) -> Tensor:
    return x[:, : x.shape[1] // part.size * part.size].unflatten(1, (-1, part.size))


def _queries(part: Part, piece: slice, x: Tensor) -> Tensor:
    """Query-side operand of each dense product: x (B',L,...) -> (B',g,b,...), a view if possible."""
    if isinstance(part, Classes):
        classes = x[:, : part.apart * part.count].unflatten(1, (part.count, part.apart)).transpose(1, 2)
        return classes[:, piece]
    blocks = _blocks(part, x)
    if part.first >= 0:
        return blocks[:, part.first + piece.start : part.first + piece.stop]
    return blocks[:, part.rows[piece]]


def _keys(part: Part, piece: slice, x: Tensor) -> Tensor:
    """Key-side operand: x (B',L,D) -> (B',g,s b,D), an overlapping view for runs of keys, else a copy."""
    if isinstance(part, Classes):
        return _queries(part, piece, x)
    if part.begin < 0:
        return _blocks(part, x)[:, part.keys[piece]].flatten(2, 3)
    dim, wide, begin = x.shape[-1], part.keys.shape[1] * part.size, part.begin + piece.start * part.stride
    shape, strides = (len(x), piece.stop - piece.start, wide, dim), (x.stride(0), part.stride * part.size * dim, dim, 1)
    return x.as_strided(shape, strides, x.storage_offset() + begin * part.size * dim)


def _add_keys(part: Part, piece: slice, total: Tensor, grad: Tensor) -> None:
    """The adjoint of ``_keys``, added to total (B',L,D)."""
    if isinstance(part, Classes):
        _queries(part, piece, total).add_(grad)
        return
    blocks, count, wide = _blocks(part, total), grad.shape[1], part.keys.shape[1]
    grad = grad.unflatten(2, (wide, part.size))  # (B',g,s,b,D)
    begin = part.begin + piece.start * part.stride
    if part.begin < 0:
        blocks.index_add_(1, part.keys[piece].flatten(), grad.flatten(1, 2))
    elif part.stride:
        for r in range(wide):
            last = begin + r + (count - 1) * part.stride
            blocks[:, begin + r : last + 1 : part.stride].add_(grad[:, :, r])
    else:
        blocks[:, begin : begin + wide].add_(grad.sum(1))


def _own(part: Part, piece: slice, table: Tensor) -> Tensor:
    """Rows of a table for a piece; the table has one row per row of the part, or one for all; (1,g|1,...)."""
    return (table[piece] if len(table) == _rows(part) else table)[None]


def _bias(part: Part, piece: slice, like: Tensor) -> Tensor | None:
    """The mask (1,g|1,b,m): a bias of the logits, or bool, True where a pair is hidden."""
    if part.mask is None:
        return None
    mask = _own(part, piece, part.mask)
    return mask if mask.dtype == torch.bool else mask.to(torch.promote_types(like.dtype, torch.float32))


def _accumulate(
    part: Part, piece: slice, rows: list[Tensor], o: Tensor, log: Tensor, scale: float, softcap: float, fresh: bool
) -> None:
    """Attend within one part, and merge with earlier parts unless ``fresh``."""
    q, k, v = _queries(part, piece, rows[0]), _keys(part, piece, rows[1]), _keys(part, piece, rows[2])
    new, lse = _attend(q, k, v, _bias(part, piece, q), scale, softcap)
    if part.blind is not None:
        blind = _own(part, piece, part.blind)
        new, lse = new.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)
    if fresh:
        _put(part, piece, o, new)
        _put(part, piece, log, lse)
        return
    old, before = _queries(part, piece, o), _queries(part, piece, log)
    both = torch.logaddexp(before, lse)
    # If both rows are empty, both logs are -inf, and -inf - -inf would be NaN.
    some = both.masked_fill(both == -torch.inf, 0.0)
    merged = old * (before - some).exp()[..., None].to(old.dtype) + new * (lse - some).exp()[..., None].to(old.dtype)
    _put(part, piece, o, merged)
    _put(part, piece, log, both)


def _put(part: Part, piece: slice, total: Tensor, values: Tensor) -> None:
    if isinstance(part, Classes) or part.first >= 0:
        _queries(part, piece, total).copy_(values)
    else:
        _blocks(part, total)[:, part.rows[piece]] = values


def _adjoint(
    part: Part, piece: slice, rows: list[Tensor], log: Tensor, found: list[Tensor], scale: float, softcap: float
) -> None:
    q, grad, out = (_queries(part, piece, rows[i]) for i in (0, 3, 4))
    k, v = _keys(part, piece, rows[1]), _keys(part, piece, rows[2])
    lse = _queries(part, piece, log)
    dq, dk, dv = _attend_backward(grad, q, k, v, out, lse, _bias(part, piece, q), scale, softcap)
    if isinstance(part, Classes) or part.first >= 0:
        _queries(part, piece, found[0]).add_(dq)
    else:
        _blocks(part, found[0]).index_add_(1, part.rows[piece], dq)
    _add_keys(part, piece, found[1], dk)
    _add_keys(part, piece, found[2], dv)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """q (B',g,b,D), k, v (B',g,m,D), bias as of ``_bias`` -> output, log-sum-exp; undefined in rows without keys."""
    if q.device.type == "cpu" and not softcap:
        # Unlike the public function, this one returns the log-sum-exp, which the merge of parts needs.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
    logits = capped((q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale, softcap)
    logits = _biased(logits, bias)
    lse = logits.logsumexp(-1)
    return logits.softmax(-1).to(v.dtype) @ v, lse


def _biased(logits: Tensor, bias: Tensor | None) -> Tensor:
    """Hide the pairs of ``_bias``, in place."""
    if bias is None:
        return logits
    return logits.masked_fill_(bias, -torch.inf) if bias.dtype == torch.bool else logits.add_(bias)


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Return c tanh(logits / c) for a softcap c, or the logits if it is 0."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of ``_attend`` with ``out``, ``lse`` of whole rows: p = exp(logit - lse), dS = p (dP - grad . out)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = capped((q @ k.mT).to(wide).mul_(scale), softcap)
    slope = 1 - (logits / softcap) ** 2 if softcap else None
    p = _biased(logits, bias).sub_(lse[..., None]).exp_()
    delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    dv = p.to(q.dtype).mT @ grad
    ds = (grad @ v.mT).to(wide).sub_(delta).mul_(p).mul_(scale)
    ds = (ds if slope is None else ds.mul_(slope)).to(q.dtype)
    return ds @ k, ds.mT @ q, dv
