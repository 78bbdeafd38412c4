"""The mechanisms that a stack spec names, and the options of each."""

import inspect
from collections.abc import Callable
from typing import Any

from .._utils import spec
from . import REGISTRY, Attention
from .build import signature
from .registry import mechanism


def parts(text: str) -> list[tuple[str, type[Attention]]]:
    """The distinct specs of a stack, each with its class; nothing is built.

    Raises ValueError for an unknown mechanism or option.

    >>> [(text, cls.__name__) for text, cls in parts("linear; softmax(kv_heads=1); linear")]
    [('linear', 'Linear'), ('softmax(kv_heads=1)', 'Softmax')]
    """

    def maker(cls: type[Attention]) -> Callable[..., type[Attention]]:
        takes = signature(cls)

        def found(*args: Any, **options: Any) -> type[Attention]:
            for option, value in takes.bind(*args, **options).arguments.items():
                if takes.parameters[option].annotation is spec.Spec:
                    parts(value)
            return cls

        # ``inspect.signature`` reads it; the type of functions does not declare it.
        found.__signature__ = takes  # type: ignore[attr-defined]
        return found

    specs = list(dict.fromkeys(spec.split(text)))
    for name in filter(None, map(spec.head, specs)):
        mechanism(name, "name")
    makers = {name: maker(cls) for name, cls in REGISTRY.items()}
    classes = {part: spec.parse(part, makers) for part in specs}
    for part, cls in classes.items():
        if not inspect.isclass(cls):
            raise ValueError(f"{part!r} names no attention; known: {', '.join(sorted(REGISTRY))}")
    return list(classes.items())
