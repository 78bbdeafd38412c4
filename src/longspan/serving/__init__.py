"""Continuous batching: many streams of one model, each with a state of its own in a preallocated pool."""

from ..compat.servable import Servable
from ..models.sampling import Sampling
from .conversation import Conversation
from .pool import Full, Pool, Stream
from .prefix_cache import PrefixCache
from .sessions import Session, SessionError, Sessions

__all__ = [
    "Conversation",
    "Full",
    "Pool",
    "PrefixCache",
    "Sampling",
    "Servable",
    "Session",
    "SessionError",
    "Sessions",
    "Stream",
]
