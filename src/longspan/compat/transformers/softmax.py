"""``attn_implementation="longspan"``: softmax layers of transformers under windows, chunks, padding and sinks."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...ops import sparse
from ...ops.sparse import chosen, sums
from ...ops.tensors import upcast_half
from . import masks
from .counting import counted
from .masks import Seen
from .record import version

NAME = "longspan"
BLOCK = 512  # queries per block where scores are capped

calls: Counter[str] = Counter()


def register(name: str = NAME) -> None:
    """Register ``attn_implementation="longspan"`` with transformers. A second call changes nothing.

    Select it at loading or by ``model.set_attn_implementation("longspan")``. Softmax layers then use longspan's kernels
    where a pattern describes their mask: causal, windows, chunks, both directions, padding at either end, packed rows,
    learned sinks, scores capped by tanh (Gemma 2), prompts that are read in parts, dynamic and static caches. Layers
    with an indexer (DeepSeek-V3.2, GLM-5) read the tokens that it chose, and no others.

    The ``sdpa`` of transformers computes other masks, single tokens, dropout, other devices, and plain causal attention
    of a whole prompt. Capped scores or sinks that no pattern covers run in PyTorch in blocks of queries, because
    ``sdpa`` does not support them. ``status()`` counts the calls of each, with the reason.

    Args:
        name: the name to register.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers is older than 5.5 or newer than 5.24.
    """
    version()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    **kwargs,
) -> Seen | Tensor | None:
    """Return the mask for ``attend``: a pattern, or the mask (B,1,N,M) of ``sdpa``. Called by transformers.

    A static cache has room for future keys. No causal query sees them, so a pattern ends before them. Models with an
    indexer get the mask of ``sdpa``, which the indexer reads.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function
    served = not torch.compiler.is_compiling() and not torch.jit.is_tracing() and torch.device(device).type == "cpu"  # pyright: ignore[reportPrivateImportUsage] (documented by torch)
    if served and q_length > 1 and getattr(kwargs.get("config"), "index_topk", None) is None:
        offsets = int(q_offset), int(kv_offset)
        whole = not (allow_is_causal_skip or allow_is_bidirectional_skip)
        read = offsets[0] + q_length - offsets[1]
        found = "functions were added to the mask"
        if not use_vmap and q_length <= read <= kv_length:
            padding = None if attention_mask is None else attention_mask.bool()
            found = masks.read(function, batch_size, q_length, read, offsets, padding, local_size, whole)
            if isinstance(found, Seen) and read < kv_length and found.pattern.lookahead != 0:
                found = "it covers keys that the cache does not have yet"
        if isinstance(found, Seen):
            return found
        calls[f"mask by sdpa, since {found}"] += 1
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        function,
        attention_mask,
        local_size,
        allow_is_causal_skip,
        allow_is_bidirectional_skip,
        use_vmap=use_vmap,
        device=device,
        **kwargs,
    )


def _why_not(seen: Seen | None, q: Tensor, k: Tensor, v: Tensor, dropout: float, alone: bool) -> str:
    """Return why ``sdpa`` computes a call, or "" for the kernels. ``alone``: neither sinks nor a cap."""
    n, m = q.shape[2], k.shape[2]
    if dropout:
        return "dropout"
    if seen is None:
        return "one token" if n == 1 else "its mask"
    if seen.plain and alone and n == m:
        return "plain causal attention"
    # Without the kernels, queries are padded to the number of keys, and most would be padding.
    if m > 2 * n and (seen.mask is not None or seen.segments is not None or sparse.unserved(q, k, v)):
        return "far fewer queries than keys"
    return ""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    indices: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Compute attention: query (B,H,N,D), key (B,G,M,D), value (B,G,M,E) -> (B,N,H,E), None. Called by transformers.

    ``indices`` (B,N,S): the keys that an indexer chose for each query, among them some that the mask hides.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if indices is not None and indices.shape[-1] < key.shape[2]:
        index = indices.long().masked_fill(~_open(attention_mask[:, 0].gather(-1, indices.long())), -1)
        if not dropout and query.is_cpu and not torch.compiler.is_compiling():
            with counted(calls, ", for tokens that an indexer chose"):
                last = index.new_full(index.shape[:2], key.shape[2] - 1)
                out = chosen.attend(query * (scale * query.shape[-1] ** 0.5), key, value, last, index[:, None], 1)
            return out.transpose(1, 2).contiguous(), None
        # One more column for those that are hidden.
        shown = torch.zeros(*index.shape[:2], key.shape[2] + 1, dtype=torch.bool, device=index.device)
        shown = shown.scatter(-1, index.masked_fill(index < 0, key.shape[2]), True)
        attention_mask = shown[:, None, :, :-1]
    seen = attention_mask if isinstance(attention_mask, Seen) else None
    if seen is not None:
        # A static cache passes all of its slots.
        key, value = key[:, :, : seen.size[1]], value[:, :, : seen.size[1]]
    n, m = query.shape[2], key.shape[2]
    why = _why_not(seen, query, key, value, dropout, s_aux is None and not softcap)
    if why and (softcap or s_aux is not None):
        calls[f"torch, in blocks of queries, since {'scores are capped' if softcap else 'there are sinks'}"] += 1
        allowed: Any = attention_mask if seen is None else seen.dense()
        if allowed is None and n > 1 and kwargs.get("is_causal", getattr(module, "is_causal", True)) is not False:
            # As in sdpa, the first query sees the first key only: further keys are free slots of a static cache.
            allowed = torch.ones(n, m, dtype=torch.bool, device=query.device).tril()[None, None]
        out = _in_blocks(query, key, value, allowed, scale, softcap, s_aux, dropout if module.training else 0.0)
        return out.transpose(1, 2).contiguous(), None
    if why or seen is None:
        calls[f"sdpa, for {why}"] += 1
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attention_mask = attention_mask if seen is None else None if seen.plain and n == m else seen.dense()
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    with counted(calls, f", under {seen.pattern}"):
        out = _pattern(query, key, value, seen, scale, s_aux, softcap or 0.0)
    return out.transpose(1, 2).contiguous(), None


def _open(mask: Tensor) -> Tensor:
    """Return where a mask, bool or additive, hides nothing."""
    return mask if mask.dtype == torch.bool else mask == 0


def _pattern(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float, sink: Tensor | None, softcap: float) -> Tensor:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if sink is None:
            return sparse.attend(q, k, v, seen.pattern, scale=scale, softcap=softcap)
        return sums.with_sink(*sums.attend(q, k, v, seen.pattern, scale=scale, softcap=softcap), sink)

    if seen.mask is None and seen.segments is None:
        return run(q, k, v)
    before = k.shape[2] - q.shape[2]
    q = torch.nn.functional.pad(q, (0, 0, before, 0))
    out = sparse.ragged(q, k, v, run, seen.mask, seen.segments, exact=seen.pattern.lookahead != 0)
    return out[:, :, before:]


def _in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    scale: float,
    cap: float | None,
    sink: Tensor | None,
    dropout: float,
) -> Tensor:
    """Compute attention with capped scores and sinks (H,) in blocks of queries; mask (B|1,1,N,M), bool or additive.

    References:
        Gemma Team 2024 (2408.00118), section 2, logit soft-capping.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def one(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, sink: Tensor | None) -> Tensor:
        scores = upcast_half(q @ k.mT) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf) if allowed.dtype == torch.bool else scores + allowed
        if sink is not None:
            more = sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, more], -1)
        # A padding row sees no key; its output is 0, as under a pattern.
        blind = (scores == -torch.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)[..., : k.shape[2]].to(v.dtype)
        return torch.nn.functional.dropout(weights, dropout) @ v

    outs = []
    for begin in range(0, q.shape[2], BLOCK):
        rows = slice(begin, begin + BLOCK)
        part = None if allowed is None else allowed[..., rows, :]
        # The backward pass recomputes each block instead of storing it.
        outs.append(checkpoint(one, q[:, :, rows], k, v, part, sink, use_reentrant=False))
    return torch.cat(outs, 2)
