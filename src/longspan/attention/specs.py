"""The mechanisms in the spec of a stack, and their options."""

import inspect
from collections.abc import Callable
from typing import Any

from .._utils import spec
from . import REGISTRY, Attention
from .build import signature
from .registry import mechanism


def parts(text: str) -> list[tuple[str, type[Attention]]]:
    """Return the distinct specs of a stack, each with its class, without building modules.

    Args:
        text: The spec of a stack, such as ``"linear; softmax"``.

    Raises:
        ValueError: For an unknown mechanism or option.

    Example:
        >>> [(text, cls.__name__) for text, cls in parts("linear; softmax(kv_heads=1); linear")]
        [('linear', 'Linear'), ('softmax(kv_heads=1)', 'Softmax')]
    """

    return [(part, options(part)[0]) for part in dict.fromkeys(spec.split(text))]


def options(text: str) -> tuple[type[Attention], dict[str, Any]]:
    """Return the class that a spec names and the options that it sets, without building modules.

    Args:
        text: The spec of one mechanism, such as ``"local(window=64)"``.

    Raises:
        ValueError: For an unknown mechanism or option.
    """

    def maker(cls: type[Attention]) -> Callable[..., tuple[type[Attention], dict[str, Any]]]:
        takes = signature(cls)

        def found(*args: Any, **options: Any) -> tuple[type[Attention], dict[str, Any]]:
            given = dict(takes.bind(*args, **options).arguments)
            for option, value in given.items():
                if takes.parameters[option].annotation is spec.Spec:
                    parts(value)
            return cls, given

        # Read by ``inspect.signature``.
        found.__signature__ = takes  # pyright: ignore[reportFunctionMemberAccess]  # functions accept attributes
        return found

    if name := spec.head(text):
        mechanism(name, "name")
    found = spec.parse(text, {name: maker(cls) for name, cls in REGISTRY.items()})
    if not isinstance(found, tuple) or len(found) != 2 or not inspect.isclass(found[0]):
        raise ValueError(f"{text!r} names no attention; known: {', '.join(sorted(REGISTRY))}")
    return found
