"""Pooling of neighboring tokens into slots, and attention of every token to the slots.

With kernel K and stride S, slot s holds tokens s S ... s S + K - 1 of its row. ``windows`` returns the tokens of each
slot. ``mean``, ``largest``, ``mixed`` or a product with learned weights reduces them to one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import select_backend
from ..operands import transformed
from ..softmax import dense
from ..sparse import sparse_attention


def number(tokens: int, kernel: int, stride: int, *, whole: bool) -> int:
    """Return the number of slots of ``tokens`` tokens: only full slots if ``whole``, else enough to hold all tokens."""
    if whole:
        return max((tokens - kernel) // stride + 1, 0)
    return 0 if not tokens else 1 + max(-(-(tokens - kernel) // stride), 0)


def windows(
    x: Tensor, kernel: int, stride: int, *, whole: bool, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gather the tokens of each slot.

    Args:
        x: (B,H,N,D) tokens.
        kernel: Tokens per slot, K.
        stride: Tokens from one slot to the next, S.
        whole: Return only full slots. Otherwise the last slot may hold fewer tokens, and zeros in their place.
        lengths: (B,) number of real tokens of each row, which come first; None: all are real.

    Returns:
        The tokens (B,H,slots,K,D), and which of them are real, bool (B|1,slots,K), or None if all are.
    """
    n = x.shape[2]
    slots = number(n, kernel, stride, whole=whole)
    # Pad to at least one slot, because ``unfold`` needs as many tokens as a slot has.
    end = (max(slots, 1) - 1) * stride + kernel
    found = F.pad(x, (0, 0, 0, max(end - n, 0)))[:, :, :end].unfold(2, kernel, stride).mT[:, :, :slots]
    if whole or (end == n and lengths is None):
        return found, None
    places = torch.arange(slots, device=x.device)[:, None] * stride + torch.arange(kernel, device=x.device)
    valid = places < (torch.full((1,), n, device=x.device) if lengths is None else lengths)[:, None, None]
    return found.masked_fill(~valid[:, None, ..., None], 0.0), valid


def fresh(
    pending: Tensor, x: Tensor, before: Tensor, lengths: Tensor, kernel: int, stride: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the tokens of the slots that new tokens complete.

    Args:
        pending: (B,H,K-1,D) the last tokens of earlier calls, the newest last.
        x: (B,H,N,D) new tokens.
        before: (B,) number of tokens in earlier calls.
        lengths: (B,) number of real tokens of each row of ``x``, which come first.
        kernel: Tokens per slot, K.
        stride: Tokens from one slot to the next, S.

    Returns:
        The windows (B,H,N // S + 1,K,D), which of them exist, bool (B,N // S + 1), and ``pending`` after these tokens.
    """
    tokens = torch.cat([pending, x.to(pending.dtype)], 2)
    first, after = (((t - kernel) // stride + 1).clamp(min=0)[:, None] for t in (before, before + lengths))
    slots = first + torch.arange(x.shape[2] // stride + 1, device=x.device)  # (B,slots)
    within = torch.arange(kernel, device=x.device)
    places = slots[..., None] * stride + within - before[:, None, None] + kernel - 1
    last = lengths[:, None] + within[1:] - 1
    found = (
        _gather_tokens(tokens, places.flatten(1).clamp(max=max(tokens.shape[2] - 1, 0))) if tokens.shape[2] else tokens
    )
    if not tokens.shape[2]:
        found = tokens.new_zeros(*tokens.shape[:2], places[0].numel(), tokens.shape[-1])
    return found.unflatten(2, (-1, kernel)), slots < after, _gather_tokens(tokens, last)


def _gather_tokens(tokens: Tensor, places: Tensor) -> Tensor:
    """Gather tokens (B,H,M,D) at places (B,P) -> (B,H,P,D)."""
    return tokens.gather(2, places[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[-1]))


def mean(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """Average the real tokens of each slot.

    Args:
        x: (B,H,slots,K,D) tokens, 0 where they are not real.
        valid: (B|1,slots,K) bool, True on real tokens; None: all are.

    Returns:
        The means (B,H,slots,D), 0 for a slot without tokens.
    """
    if valid is None:
        return x.mean(3)
    return x.sum(3) / valid.sum(-1).clamp(min=1)[:, None, :, None].to(x.dtype)


def largest(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the maximum of each channel over the real tokens of a slot; shapes and empty slots as in ``mean``."""
    if valid is None:
        return x.amax(3)
    found = x.masked_fill(~valid[:, None, ..., None], torch.finfo(x.dtype).min).amax(3)
    return found.masked_fill(~valid.any(-1)[:, None, :, None], 0.0)


def mixed(x: Tensor, weight: Tensor, valid: Tensor | None = None) -> Tensor:
    """Average the tokens of a slot with weights that a softmax computes from its middle token.

    If a slot has too few tokens to have that middle token, its last token takes the place.

    Args:
        x: (B,H,slots,K,D) tokens, 0 where they are not real.
        weight: (H,D,K) projection of the middle token to the logits of the weights.
        valid: (B|1,slots,K) bool, True on real tokens; None: all are.

    Returns:
        The means (B,H,slots,D).

    References:
        Wu et al. 2019 (1901.10430), section 4, for convolutions with such weights.
    """
    kernel = x.shape[3]
    if valid is None:
        logits = torch.einsum("bhsd,hdk->bhsk", x[:, :, :, (kernel - 1) // 2], weight)
        return (logits.softmax(-1)[..., None, :] @ x)[..., 0, :]
    middle = (valid.sum(-1) - 1).clamp(0, (kernel - 1) // 2)[:, None, :, None, None]
    chooser = x.gather(3, middle.expand(*x.shape[:3], 1, x.shape[-1]))[..., 0, :]
    logits = torch.einsum("bhsd,hdk->bhsk", chooser, weight)
    p = logits.masked_fill(~valid[:, None], torch.finfo(x.dtype).min).softmax(-1) * valid[:, None]
    return (p[..., None, :] @ x)[..., 0, :]


def visible(at: Tensor, slots: Tensor, kernel: int, stride: int, *, causal: bool, window: int | None = None) -> Tensor:
    """Return which slots a token sees.

    Args:
        at: (B,N) positions of the tokens.
        slots: (B,S) numbers of the slots.
        kernel: Tokens per slot.
        stride: Tokens from one slot to the next.
        causal: Hide slots whose last token comes after the query.
        window: Largest distance to a slot's first token; None: no limit.

    Returns:
        A bool tensor (B,N,S).
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
    """Attend from all tokens to the slots that ``visible`` allows, in O(N) memory.

    Tokens with the same remainder modulo the stride see a band of slots: from one to the next both move by one slot. So
    each remainder becomes a head of banded attention, and the N x S matrix is never stored.

    Args:
        q: (B,H,N,D) queries at positions 0 ... N - 1.
        k: (B,H,S,D) keys of all slots of these tokens.
        v: (B,H,S,E) values of the slots.
        kernel: Tokens per slot.
        stride: Tokens from one slot to the next.
        causal: Hide slots whose last token comes after the query.
        window: Largest distance to a slot's first token; None: no limit.
        null: The first slot is a null slot, which every token sees.

    Returns:
        The output (B,H,N,E), 0 for a token that sees no slot.

    Raises:
        ValueError: For a null slot with a window or with overlapping slots, and for a window below ``stride - 1``.
    """
    if null and (window is not None or kernel != stride):
        raise ValueError(f"a null slot needs kernel == stride and window=None, not {kernel=}, {stride=}, {window=}")
    if window is not None and window < stride - 1:
        raise ValueError(
            f"window={window} is too small: tokens between slots would see none; it must be at least {stride - 1}"
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
    # Token i becomes i + ahead = row * S + remainder, and slot s becomes row s + behind. Then the rule s S + K - 1 <= i
    # compares rows. The null slot, if there is one, comes before the others.
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
    """Slices of neighboring remainders, each with the pattern of its rows, or "" if they see no slot."""
    # Specs instead of patterns, which a compiler cannot trace.
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
