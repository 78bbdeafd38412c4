"""Events that layers dispatch while they run: queries and keys, attention matrices, intermediate outputs."""

from .event import AttentionEvent, Event, IntermediateOutput, QKVEvent
from .event_dispatcher import EventDispatcher

__all__ = ["AttentionEvent", "Event", "EventDispatcher", "IntermediateOutput", "QKVEvent"]
