"""Hashed attention, which is not carried over; builders know its name in order to say so."""

from ..absent import Absent
from ..attention_registry import AttentionRegistry, Bool, EventDispatcherInstance, Float, Int, Optional


class ReformerAttention(Absent):
    """Not carried over: raises NotImplementedError."""


_ALL = [
    ("softmax_temp", Optional(Float)),
    ("attention_dropout", Optional(Float, 0.1)),
    ("event_dispatcher", Optional(EventDispatcherInstance, "")),
    ("bits", Optional(Int, 63)),
]

AttentionRegistry.register(
    "reformer",
    ReformerAttention,
    [*_ALL, ("chunk_size", Optional(Int, 32)), ("rounds", Optional(Int, 4)), ("masked", Optional(Bool, False))],
)
