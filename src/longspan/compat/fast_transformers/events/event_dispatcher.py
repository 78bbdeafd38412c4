"""Dispatch events to handlers."""

from collections.abc import Callable
from typing import Any, ClassVar, Self

from .event import Event
from .filters import EventFilter, as_filter


class EventDispatcher:
    """Call each handler with the events that its filter accepts, in the order in which handlers were added."""

    _named: ClassVar[dict[str, Any]] = {}

    def __init__(self):
        self._listeners: dict[Callable[[Event], Any], EventFilter] = {}

    @property
    def listening(self) -> bool:
        """Whether an event can reach a handler; attention matrices are only computed if so."""
        return bool(self._listeners) or type(self) is not EventDispatcher

    def listen(self, event_filter, event_handler: Callable[[Event], Any]) -> None:
        """Add a handler, or replace its filter.

        Args:
            event_filter: an Event class, a filter, or a function of the event.
            event_handler: a function of the event.

        Raises:
            ValueError: the filter has another type.
        """
        self._listeners[event_handler] = as_filter(event_filter)

    def remove(self, event_handler: Callable[[Event], Any]) -> None:
        """Remove a handler, if present."""
        self._listeners.pop(event_handler, None)

    def clear(self) -> None:
        """Remove all handlers."""
        self._listeners.clear()

    def dispatch(self, event: Event) -> None:
        """Call the handlers whose filter accepts the event."""
        # A copy, since a handler may remove itself.
        for handler, passes in list(self._listeners.items()):
            if passes(event):
                handler(event)

    @classmethod
    def get(cls, key: "str | EventDispatcher" = "") -> "EventDispatcher | Self":
        """Return the dispatcher of that name, shared by the whole process; an instance is returned unchanged."""
        if isinstance(key, EventDispatcher):
            return key
        if key not in cls._named:
            cls._named[key] = cls()
        return cls._named[key]
