"""Filters of events, which combine by ``&``, ``|`` and ``~``."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from .event import Event


class EventFilter:
    """A condition on events; ``&`` and ``|`` accept filters, Event classes and functions on either side."""

    def __call__(self, event: Event) -> bool:
        """Return whether the event passes."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(event)")

    def __and__(self, other):
        return _combined(self, other, lambda one, two: lambda event: one(event) and two(event))

    def __rand__(self, other):
        return _combined(self, other, lambda one, two: lambda event: two(event) and one(event))

    def __or__(self, other):
        return _combined(self, other, lambda one, two: lambda event: one(event) or two(event))

    def __ror__(self, other):
        return _combined(self, other, lambda one, two: lambda event: two(event) or one(event))

    def __invert__(self):
        return CallableEventFilter(lambda event: not self(event))


class CallableEventFilter(EventFilter):
    """Pass events for which a function returns True."""

    def __init__(self, event_filter: Callable[[Event], Any]):
        self._event_filter = event_filter

    def __call__(self, event: Event) -> bool:
        return self._event_filter(event)


class LayerNameEventFilter(EventFilter):
    """Pass events whose source has a name inside ``root`` that ``name_filter`` accepts; holds weak references."""

    def __init__(self, root: nn.Module, name_filter: Callable[[str], bool]):
        self._names = weakref.WeakKeyDictionary((module, name) for name, module in root.named_modules())
        self._name_filter = name_filter

    def __call__(self, event: Event) -> bool:
        name = self._names.get(event.source)
        return name is not None and self._name_filter(name)


def event_class(klass: type[Event]) -> EventFilter:
    """Return a filter of events of a class or its subclasses."""
    return CallableEventFilter(lambda event: isinstance(event, klass))


def from_layer(layer: nn.Module) -> EventFilter:
    """Return a filter of events of one module."""
    return CallableEventFilter(lambda event: event.source is layer)


def layer_name_contains(root: nn.Module, name: str) -> EventFilter:
    """Return a filter of events of modules whose name inside ``root`` contains ``name``."""
    return LayerNameEventFilter(root, lambda full: name in full)


def as_filter(what: Any) -> EventFilter:
    """Convert a filter, an Event class or a function to a filter; raise ValueError for anything else."""
    if isinstance(what, EventFilter):
        return what
    if isinstance(what, type) and issubclass(what, Event):
        return event_class(what)
    if callable(what):
        return CallableEventFilter(what)
    raise ValueError(f"an event filter must be an Event class, a filter or a function of the event, not {what!r}")


def _combined(one, two, how):
    """Combine two filters; NotImplemented for other operands, so that Python raises a TypeError."""
    if not callable(two):
        return NotImplemented
    return CallableEventFilter(how(one, as_filter(two)))
