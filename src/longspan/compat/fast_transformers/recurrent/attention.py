"""Attentions for one token at a time: each call returns a new state and leaves the old one unchanged."""

import warnings
from typing import Any

import torch
from torch import Tensor

from ....ops import linear
from ....ops.tensors import upcast_half, wide_dtype
from ..attention.attention_layer import Projections
from ..attention.full_attention import SOFTMAX_PARAMETERS, Softmax
from ..attention.linear_attention import LINEAR_PARAMETERS, Sums
from ..attention_registry import RecurrentAttentionRegistry, RecurrentCrossAttentionRegistry
from ..masking import BaseMask, keys_of


def check_state(state: Any = None, memory: Any = None) -> Any:
    """Return the state, or ``memory``, its older name, with a DeprecationWarning."""
    if memory is not None:
        warnings.warn(
            "memory= of a recurrent transformer is deprecated; use state= instead", DeprecationWarning, stacklevel=3
        )
    return memory if state is None else state


class RecurrentAttentionLayer(Projections):
    """``AttentionLayer`` for one token, with the same arguments and parameters."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, state: Any = None, memory: Any = None
    ) -> tuple[Tensor, Any]:
        """Attend with one token.

        Args:
            query: (N,d_model).
            key: (N,d_model_keys).
            value: (N,d_model_keys).
            state: the inner attention's state; None at the beginning.
            memory: an older name of ``state``.

        Returns:
            (N,d_model), and the new state.
        """
        state = check_state(state, memory)
        q = self.heads(self.query_projection, query)
        k, v = self.heads(self.key_projection, key), self.heads(self.value_projection, value)
        self.dispatch(q, k, v)
        out, state = self.inner_attention(q, k, v, state)
        return self.out_projection(out.flatten(-2)), state


class RecurrentCrossAttentionLayer(Projections):
    """``AttentionLayer`` for one query over another sequence, whose keys the state keeps."""

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor, key_lengths: BaseMask, state: Any = None
    ) -> tuple[Tensor, Any]:
        """Attend with one query.

        Args:
            query: (N,d_model).
            keys: (N,S,d_model_keys), ignored with a state.
            values: (N,S,d_model_keys), ignored with a state.
            key_lengths: (N,S).
            state: the inner attention's state; None at the beginning.

        Returns:
            (N,d_model), and the new state.
        """
        q, k, v = self.heads(self.query_projection, query), keys, values
        if state is None:
            k, v = self.heads(self.key_projection, keys), self.heads(self.value_projection, values)
            self.dispatch(q, k, v)
        out, state = self.inner_attention(q, k, v, key_lengths, state)
        return self.out_projection(out.flatten(-2)), state


class RecurrentFullAttention(Softmax):
    """Softmax attention over the past tokens; the state [keys (N,H,t,E), values (N,H,t,D)] grows by one per call."""

    recurrent = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, state: Any = None, memory: Any = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return (N,H,D) and the state for query, key (N,H,E) and value (N,H,D); ValueError for another batch size."""
        state = check_state(state, memory)
        k, v = key[:, :, None], value[:, :, None]
        if state is not None:
            _check_batch(query, state[0])
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        return self.attend(query[:, :, None], k, v)[:, :, 0].contiguous(), [k, v]


class RecurrentCrossFullAttention(Softmax):
    """Softmax attention over another sequence; the state is [keys (N,S,H,E), values (N,S,H,D)]."""

    recurrent = True

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor, key_lengths: BaseMask, state: Any = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return (N,H,D) and the state for query (N,H,E), keys (N,S,H,E), values (N,S,H,D); lengths (N,S)."""
        keys, values = (keys, values) if state is None else state
        _check_batch(query, keys)
        real = keys_of(key_lengths)
        mask = None if real is None else real[:, None, None, :]
        out = self.attend(query[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), mask)
        return out[:, :, 0].contiguous(), [keys, values]


class RecurrentSums(Sums):
    """Base class of linear attentions. A new sequence draws new random features, unless ``mirrors`` is set."""

    # Set by utils.make_mirror, which shares the features of the mirrored model.
    mirrors = False

    def begin(self, state: Any, device: torch.device) -> None:
        """Draw a new feature map if a sequence begins."""
        if state is None and not self.mirrors:
            self.feature_map.new_feature_map(device)


class RecurrentLinearAttention(RecurrentSums):
    """``CausalLinearAttention`` for one token; the state is [sum phi(k) v^T (N,H,F,D), sum phi(k) (N,H,F)].

    The state is float32 or wider.

    References:
        Katharopoulos et al. 2020 (2006.16236), eqs 16-20.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, state: Any = None, memory: Any = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return (N,H,D) and the state for query, key (N,H,E) and value (N,H,D); ValueError for another batch size."""
        state = check_state(state, memory)
        self.begin(state, query.device)
        if self.elu:
            q, k = query, key
        else:
            q = upcast_half(self.feature_map.forward_queries(query))
            k = upcast_half(self.feature_map.forward_keys(key))
        wide = wide_dtype(q)
        if state is None:
            sums = k.new_zeros(*k.shape, value.shape[-1] + 1, dtype=wide)
        else:
            _check_batch(query, state[0])
            # A copy, which the step may overwrite.
            sums = torch.cat([state[0].to(wide), state[1].to(wide)[..., None]], -1)
        token = (x[:, :, None] for x in (q, k, value))
        arguments = {"causal": True, "eps": self.eps, "state": sums, "donate": True}
        if self.elu:
            out, sums = linear.named(*token, feature_map="elu", **arguments)
        else:
            out, sums = linear.attend(*token, **arguments)
        return out[:, :, 0].contiguous(), [sums[..., :-1], sums[..., -1]]


class RecurrentCrossLinearAttention(RecurrentSums):
    """Linear attention of one query over another sequence; the state [S (N,H,D,F), Z (N,H,F)] does not change."""

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor, key_lengths: BaseMask, state: Any = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return (N,H,D) and the state for query (N,H,E), keys (N,S,H,E) and values (N,S,H,D).

        Raises:
            ValueError: the batch sizes of the query and the state differ.
        """
        self.begin(state, query.device)
        with torch.autocast(query.device.type, enabled=False):
            q = upcast_half(self.feature_map.forward_queries(query))
            if state is None:
                k, real = upcast_half(self.feature_map.forward_keys(keys)), keys_of(key_lengths)
                if real is not None:
                    k = k * real[:, :, None, None]
                state = [torch.einsum("nshf,nshd->nhdf", k, upcast_half(values)), k.sum(1)]
            sums, total = state
            _check_batch(query, sums)
            below = (q * total).sum(-1, keepdim=True) + self.eps
            out = torch.einsum("nhf,nhdf->nhd", q, sums) / below
        return out.to(query.dtype), [sums, total]


def _check_batch(query: Tensor, kept: Tensor) -> None:
    if len(query) != len(kept):
        raise ValueError(
            f"the state has {len(kept)} sequences and the query {len(query)}; the batch size cannot change"
        )


RecurrentAttentionRegistry.register("full", RecurrentFullAttention, SOFTMAX_PARAMETERS)
RecurrentAttentionRegistry.register("linear", RecurrentLinearAttention, LINEAR_PARAMETERS)
RecurrentAttentionRegistry.register("causal-linear", RecurrentLinearAttention, LINEAR_PARAMETERS)
RecurrentCrossAttentionRegistry.register("full", RecurrentCrossFullAttention, SOFTMAX_PARAMETERS)
RecurrentCrossAttentionRegistry.register("linear", RecurrentCrossLinearAttention, LINEAR_PARAMETERS)
