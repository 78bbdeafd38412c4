"""Clustered attentions, which are not carried over; builders know their names in order to say so."""

from ..absent import Absent
from ..attention_registry import AttentionRegistry, Bool, EventDispatcherInstance, Float, Int, Optional


class ClusteredAttention(Absent):
    """Not carried over: raises NotImplementedError."""


class ImprovedClusteredAttention(Absent):
    """Not carried over: raises NotImplementedError."""


class ImprovedClusteredCausalAttention(Absent):
    """Not carried over: raises NotImplementedError."""


_ALL = [
    ("softmax_temp", Optional(Float)),
    ("attention_dropout", Optional(Float, 0.1)),
    ("event_dispatcher", Optional(EventDispatcherInstance, "")),
    ("bits", Optional(Int, 63)),
]
_CLUSTERED = [*_ALL, ("clusters", Int), ("iterations", Optional(Int, 10)), ("hash_bias", Optional(Bool, True))]
_IMPROVED = [*_CLUSTERED, ("topk", Optional(Int, 32))]

AttentionRegistry.register("clustered", ClusteredAttention, _CLUSTERED)
AttentionRegistry.register("improved-clustered", ImprovedClusteredAttention, _IMPROVED)
AttentionRegistry.register("causal-improved-clustered", ImprovedClusteredCausalAttention, _IMPROVED)
