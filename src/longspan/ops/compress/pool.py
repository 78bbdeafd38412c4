"""Slots that stand for several neighboring tokens, and causal attention of every token to the slots before it.

Slot s of kernel K and stride S holds tokens s S ... s S + K - 1 of its row. Its tokens come as ``windows`` and become
one by ``mean``, ``largest``, ``mixed``, or a product with weights of the caller's own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import select_backend
from ..operands import transformed
from ..softmax import dense
from ..sparse import sparse_attention


def number(tokens: int, kernel: int, stride: int, *, whole: bool) -> int:
    """How many slots so many tokens have: whole ones alone, or as many as it takes to hold every token."""
    if whole:
        return max((tokens - kernel) // stride + 1, 0)
    return 0 if not tokens else 1 + max(-(-(tokens - kernel) // stride), 0)


def windows(
    x: Tensor, kernel: int, stride: int, *, whole: bool, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The tokens of each slot: x (B,H,N,D) -> (B,H,slots,K,D), there (B|1,slots,K) or None where all are.

    Not ``whole``: the last slot may hold fewer tokens, and zeros in their place; ``lengths`` (B,) says how many tokens
    of each row are real, which come first.
    """
    n = x.shape[2]
    slots = number(n, kernel, stride, whole=whole)
    # One slot is laid out in any case, since nothing can be cut from fewer tokens than it has.
    end = (max(slots, 1) - 1) * stride + kernel
    found = F.pad(x, (0, 0, 0, max(end - n, 0)))[:, :, :end].unfold(2, kernel, stride).mT[:, :, :slots]
    if whole or (end == n and lengths is None):
        return found, None
    places = torch.arange(slots, device=x.device)[:, None] * stride + torch.arange(kernel, device=x.device)
    there = places < (torch.full((1,), n, device=x.device) if lengths is None else lengths)[:, None, None]
    return found.masked_fill(~there[:, None, ..., None], 0.0), there


def fresh(
    pending: Tensor, x: Tensor, before: Tensor, lengths: Tensor, kernel: int, stride: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of those slots that new tokens make whole.

    pending (B,H,K-1,D): the last tokens of earlier calls, the newest last; x (B,H,N,D), of which the first ``lengths``
    (B,) are real; before (B,): how many tokens came earlier. -> windows (B,H,N // S + 1,K,D), which of them exist
    (B,N // S + 1), pending after these tokens.
    """
    tokens = torch.cat([pending, x.to(pending.dtype)], 2)
    first, after = (((t - kernel) // stride + 1).clamp(min=0)[:, None] for t in (before, before + lengths))
    slots = first + torch.arange(x.shape[2] // stride + 1, device=x.device)  # (B,slots)
    within = torch.arange(kernel, device=x.device)
    places = slots[..., None] * stride + within - before[:, None, None] + kernel - 1
    last = lengths[:, None] + within[1:] - 1
    found = _pick(tokens, places.flatten(1).clamp(max=max(tokens.shape[2] - 1, 0))) if tokens.shape[2] else tokens
    if not tokens.shape[2]:
        found = tokens.new_zeros(*tokens.shape[:2], places[0].numel(), tokens.shape[-1])
    return found.unflatten(2, (-1, kernel)), slots < after, _pick(tokens, last)


def _pick(tokens: Tensor, places: Tensor) -> Tensor:
    """tokens (B,H,M,D), places (B,P) -> (B,H,P,D)."""
    return tokens.gather(2, places[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[-1]))


def mean(x: Tensor, there: Tensor | None = None) -> Tensor:
    """The mean of the tokens that there are: x (B,H,slots,K,D), there (B|1,slots,K) -> (B,H,slots,D).

    Those that are not there hold zeros. A slot without tokens gives 0.
    """
    if there is None:
        return x.mean(3)
    return x.sum(3) / there.sum(-1).clamp(min=1)[:, None, :, None].to(x.dtype)


def largest(x: Tensor, there: Tensor | None = None) -> Tensor:
    """Channel by channel the largest of the tokens that there are; shapes as in ``mean``. Without tokens it gives 0."""
    if there is None:
        return x.amax(3)
    found = x.masked_fill(~there[:, None, ..., None], torch.finfo(x.dtype).min).amax(3)
    return found.masked_fill(~there.any(-1)[:, None, :, None], 0.0)


def mixed(x: Tensor, weight: Tensor, there: Tensor | None = None) -> Tensor:
    """A mean whose weights the slot's middle token chooses by a softmax: shapes as in ``mean``, weight (H,D,K).

    In a slot that is cut off, the middle token is the last one where there are too few.

    Source: Wu et al. 2019 (1901.10430), section 4, for convolutions with such weights.
    """
    kernel = x.shape[3]
    if there is None:
        logits = torch.einsum("bhsd,hdk->bhsk", x[:, :, :, (kernel - 1) // 2], weight)
        return (logits.softmax(-1)[..., None, :] @ x)[..., 0, :]
    middle = (there.sum(-1) - 1).clamp(0, (kernel - 1) // 2)[:, None, :, None, None]
    chooser = x.gather(3, middle.expand(*x.shape[:3], 1, x.shape[-1]))[..., 0, :]
    logits = torch.einsum("bhsd,hdk->bhsk", chooser, weight)
    p = logits.masked_fill(~there[:, None], torch.finfo(x.dtype).min).softmax(-1) * there[:, None]
    return (p[..., None, :] @ x)[..., 0, :]


def visible(at: Tensor, slots: Tensor, kernel: int, stride: int, *, causal: bool, window: int | None = None) -> Tensor:
    """Which slots a token sees: at (B,N) positions, slots (B,S) numbers -> bool (B,N,S).

    ``causal``: once a slot's last token is not ahead. ``window``: slots whose first token is at most so far away.
    """
    first = slots[:, None] * stride
    allowed = (first + kernel - 1 <= at[..., None]) if causal else torch.ones_like(first <= at[..., None])
    if window is not None:
        allowed = allowed & ((at[..., None] - first).abs() <= window)
    return allowed


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel: int,
    stride: int,
    causal: bool,
    window: int | None = None,
    null: bool = False,
) -> Tensor:
    """Attention of all tokens to the slots that they see by the rule of ``visible``, in O(N) memory; 0 without any.

    q (B,H,N,D), k (B,H,S,D), v (B,H,S,E) -> (B,H,N,E). The tokens stand at positions 0 ... N - 1, the slots are all of
    theirs; ``null``: and before them one more, which every token sees.

    Tokens of one remainder modulo the stride meet the slots along a band, for from each to the next it is as far as
    from a slot to the next. So remainders are the heads of a pattern, of which no matrix is ever written out.

    Raises ValueError for a null slot beside a window or slots that overlap, and for a window below S - 1.
    """
    if null and (window is not None or kernel != stride):
        raise ValueError(f"a null slot needs slots side by side and no window, not {kernel=}, {stride=}, {window=}")
    if window is not None and window < stride - 1:
        raise ValueError(
            f"window={window} leaves tokens between the slots without any; it must be at least {stride - 1}"
        )
    (n, slots), device = (q.shape[2], k.shape[2] - null), q.device
    if not k.shape[2] or not q.numel():
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
    if not causal and window is None:
        return dense.attend(q, k, v)
    if (
        select_backend("attention to slots", ("reference", "torch", "native", "flex"), "torch") == "reference"
        or transformed()
    ):
        places = torch.arange(n, device=device)[None], torch.arange(slots, device=device)[None]
        allowed = visible(*places, kernel, stride, causal=causal, window=window)[:, None]
        return dense.attend(q, k, v, mask=F.pad(allowed, (int(null), 0), value=True))
    # Token i counts as i + ahead = row S + remainder, and slot s as row s + behind, so that the rule s S + K - 1 <= i
    # is that of rows; before the slots there is room for the null slot.
    behind = max(-(-(kernel - 1) // stride), int(null)) if causal else 0
    ahead = behind * stride - kernel + 1 if causal else 0
    rows = -(-(n + ahead) // stride)
    folded = F.pad(q, (0, 0, ahead, rows * stride - n - ahead)).unflatten(2, (rows, stride))
    empty = behind - null
    k, v = (F.pad(x, (0, 0, empty, rows - empty - x.shape[2])) for x in (k, v))
    parts = []
    for remainders, text in _bands(rows, slots, behind, ahead, empty, stride, window, causal):
        few = folded[:, :, :, remainders].transpose(2, 3)  # (B,H,remainders,rows,D)
        o = few.new_zeros(*few.shape[:-1], v.shape[-1])
        if text:
            o = sparse_attention(few.flatten(1, 2), k, v, text).unflatten(1, few.shape[1:3])
        parts.append(o.transpose(2, 3))
    return torch.cat(parts, 3).flatten(2, 3)[:, :, ahead : ahead + n]


def _bands(
    rows: int, slots: int, behind: int, ahead: int, empty: int, stride: int, window: int | None, causal: bool
) -> list[tuple[slice, str]]:
    """Remainders that follow each other, as a slice, with the pattern of their rows; "" where they see nothing."""
    # Written as specs, since a compiler cannot make the patterns themselves.
    exact = (f" - prefix({empty})" if empty else "") + (f" & prefix({slots})" if not causal and slots < rows else "")
    found: list[tuple[int, int, str]] = []
    for remainder in range(stride):
        text = "causal"
        if window is not None:
            left = (window + ahead - remainder) // stride - behind
            right = 0 if causal else (window + remainder) // stride
            text = f"band({left}, {right})" if left >= 0 else ""
        text = text and text + exact
        if found and found[-1][2] == text:
            found[-1] = (found[-1][0], remainder + 1, text)
        else:
            found.append((remainder, remainder + 1, text))
    return [(slice(start, stop), text) for start, stop, text in found]
