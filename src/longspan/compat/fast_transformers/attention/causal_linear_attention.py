"""Causal linear attention: query i reads the sum over the keys up to i."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention_registry import AttentionRegistry
from ..causal_product import causal_dot_product
from ..masking import Masks, keys_of
from .attention_layer import SequenceAttention
from .linear_attention import LINEAR_PARAMETERS, Sums


def causal_linear(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Compute ``causal_dot_product`` with the heads third: (N,L,H,E), (N,L,H,E), (N,L,H,D) -> (N,L,H,D)."""
    return causal_dot_product(*(x.transpose(1, 2) for x in (Q, K, V))).transpose(1, 2).contiguous()


class CausalLinearAttention(Sums, SequenceAttention):
    """``LinearAttention`` over the keys up to each query.

    References:
        Katharopoulos et al. 2020 (2006.16236), eqs 8-9.
    """

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        """Return (N,L,H,D) for queries (N,L,H,E), keys (N,S,H,E) and values (N,S,H,D).

        If S > L, keys after the last query are ignored.

        Raises:
            RuntimeError: ``attn_mask`` is not triangular.
        """
        if not masks.attention.lower_triangular:
            raise RuntimeError("CausalLinearAttention is causal; attn_mask must be triangular, TriangularCausalMask(L)")
        self.feature_map.new_feature_map(queries.device)
        (batch, length), size, mask = queries.shape[:2], keys.shape[1], keys_of(masks.keys)
        if size != length:
            if mask is None:
                mask = torch.ones(batch, size, dtype=torch.bool, device=keys.device)
            # Cut, or padded with masked keys.
            keys, values = (F.pad(x, (0, 0, 0, 0, 0, length - size)) for x in (keys, values))
            mask = F.pad(mask, (0, length - size))
        return self.read(queries, keys, values, causal=True, mask=mask)


AttentionRegistry.register("causal-linear", CausalLinearAttention, LINEAR_PARAMETERS)
