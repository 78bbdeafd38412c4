"""The indexers of DeepSeek-V3.2 and GLM-5: which earlier tokens a softmax layer reads."""

from typing import Any

import torch
from torch import Tensor

from ...ops.sparse import picked


def why_not(
    self: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    *args: Any,
    **kwargs: Any,
) -> str:
    """Return why the original chooses: a mask under which a query does not see all tokens up to some place."""
    seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    places = torch.arange(seen.shape[-1], device=seen.device)
    return "" if bool((seen == (places < seen.sum(-1, keepdim=True))).all()) else "its mask hides earlier tokens"


def halves(
    self: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    cache: Any = None,
) -> Tensor:
    """Replace ``DeepseekV32Indexer.forward``: the numbers (B,N,S) int32 of the tokens with the largest scores.

    Among equal scores the first tokens win. A query that sees fewer than S tokens also gets later ones, which the mask
    of attention hides.
    """
    return _choose(self, hidden_states, q_resid, position_embeddings, attention_mask, cache, False)


def interleaved(
    self: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    cache: Any = None,
) -> Tensor:
    """Replace ``GlmMoeDsaIndexer.forward``: as ``halves``, with rotary positions of neighboring channels."""
    return _choose(self, hidden_states, q_resid, position_embeddings, attention_mask, cache, True)


@torch.no_grad()
def _choose(
    self: Any, x: Tensor, low: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor, cache: Any, interleaved: bool
) -> Tensor:
    cos, sin = (t[:, :, None] for t in turns)  # (B,N,1,R)

    def turned(t: Tensor) -> Tensor:
        rotary, rest = t.split([self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim], -1)
        if interleaved:
            rotary = torch.cat([rotary[..., 0::2], rotary[..., 1::2]], -1)
        first, second = rotary.chunk(2, -1)
        return torch.cat([rotary * cos + torch.cat([-second, first], -1) * sin, rest], -1)

    q = turned(self.wq_b(low).unflatten(-1, (self.n_heads, self.head_dim)))
    k = turned(self.k_norm(self.wk(x))[:, :, None])[:, :, 0]
    if cache is not None:
        k = cache.update_indexer(k, self.layer_idx)
    weights = self.weights_proj(x.to(self.weights_proj.weight.dtype)).float()
    weights = weights * (self.softmax_scale * self.n_heads**-0.5)
    seen = (mask if mask.dtype == torch.bool else mask == 0).sum(-1).expand(len(x), -1)
    index = picked.choose(q, k, weights, seen - 1, self.index_topk)
    return torch.where(index < 0, torch.arange(index.shape[-1], device=index.device), index).int()
