"""Registries of attentions by name, with the allowed values of their parameters."""

from collections.abc import Callable as Function
from collections.abc import Sequence
from typing import Any

from .events import EventDispatcher


class Spec:
    """Allowed values of a parameter.

    Args:
        predicate: a function that returns a value in its canonical form, or raises ValueError.
        name: the text of ``repr``.
    """

    def __init__(self, predicate: Function[[Any], Any], name: str = "CustomSpec"):
        self._predicate, self._name = predicate, name

    def get(self, x):
        """Return the value in its canonical form; raise ValueError if it is not allowed."""
        return self._predicate(x)

    def check(self, x) -> bool:
        """Return whether the value is allowed."""
        try:
            self.get(x)
        except ValueError:
            return False
        return True

    def __repr__(self):
        return self._name


class Choice(Spec):
    """One of ``choices``."""

    def __init__(self, choices):
        super().__init__(self._pick, f"Choice({choices!r})")
        self._choices = choices

    def _pick(self, x):
        if x not in self._choices:
            raise ValueError(f"{x!r} is not one of {self._choices!r}")
        return x

    def __eq__(self, other):
        return isinstance(other, Choice) and self._choices == other._choices

    __hash__ = None  # pyright: ignore[reportAssignmentType] (makes it unhashable)


class Optional(Spec):
    """A value that ``spec`` allows, or None, which means ``default``."""

    def __init__(self, spec: Spec, default=None):
        super().__init__(lambda x: default if x is None else spec.get(x), f"Optional[{spec!r}, {default!r}]")
        self._spec, self._default = spec, default

    def __eq__(self, other):
        return isinstance(other, Optional) and (self._spec, self._default) == (other._spec, other._default)

    __hash__ = None  # pyright: ignore[reportAssignmentType] (makes it unhashable)


def _boolean(x):
    # bool("False") is True, which would be wrong for a command-line flag.
    words = {"true": True, "false": False}
    if isinstance(x, str):
        if x.lower() not in words:
            raise ValueError(f"{x!r} is neither true nor false")
        return words[x.lower()]
    return bool(x)


def _function(x):
    if not callable(x):
        raise ValueError(f"{x!r} cannot be called")
    return x


def _dispatcher(x):
    if not isinstance(x, str | EventDispatcher):
        raise ValueError(f"{x!r} is neither an event dispatcher nor the name of one")
    return x


Int, Float, Bool = Spec(int, "Int"), Spec(float, "Float"), Spec(_boolean, "Bool")
Callable, EventDispatcherInstance = Spec(_function, "Callable"), Spec(_dispatcher, "EventDispatcherInstance")


class Registry:
    """Attention classes by name, each with the parameters that a builder passes to it.

    A parameter's name has one meaning for all attentions of a registry.
    """

    def __init__(self):
        self._entries: dict[str, tuple[type, list[str]]] = {}
        self._specs: dict[str, Spec] = {}

    def register(self, key: str, class_object: type, parameter_tuples: Sequence[tuple[str, Spec]]) -> None:
        """Add an attention.

        Args:
            key: name of the attention.
            class_object: its class.
            parameter_tuples: names of its parameters with their specs.

        Raises:
            ValueError: the name is taken, or a parameter is already registered with a different spec.
        """
        if key in self._entries:
            raise ValueError(f"{key!r} is already registered, for {self._entries[key][0].__name__}")
        for name, spec in parameter_tuples:
            known = self._specs.get(name, spec)
            if known != spec:
                raise ValueError(f"parameter {name!r} is already registered as {known!r}, so it cannot be {spec!r}")
        self._specs.update(parameter_tuples)
        self._entries[key] = class_object, [name for name, _ in parameter_tuples]

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __getitem__(self, key: str) -> tuple[type, list[str]]:
        """Return the class and the names of its parameters."""
        return self._entries[key]

    @property
    def keys(self) -> list[str]:
        """All names, in the order of registration."""
        return list(self._entries)

    def contains_parameter(self, key: str) -> bool:
        """Return whether an attention has a parameter of that name."""
        return key in self._specs

    def validate_parameter(self, key: str, value):
        """Return the value in its canonical form; raise ValueError if it, or the parameter, is unknown."""
        if key not in self._specs:
            raise ValueError(f"no attention has a parameter {key!r}; known: {', '.join(self._specs)}")
        try:
            return self._specs[key].get(value)
        except Exception as error:
            raise ValueError(f"Invalid value {value!r} for parameter {key!r}: {self._specs[key]!r} expected") from error


AttentionRegistry, RecurrentAttentionRegistry, RecurrentCrossAttentionRegistry = Registry(), Registry(), Registry()
