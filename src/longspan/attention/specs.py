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

    def maker(cls: type[Attention]) -> Callable[..., type[Attention]]:
        takes = signature(cls)

        def found(*args: Any, **options: Any) -> type[Attention]:
            for option, value in takes.bind(*args, **options).arguments.items():
                if takes.parameters[option].annotation is spec.Spec:
                    parts(value)
            return cls

        # Read by ``inspect.signature``.
        found.__signature__ = takes  # pyright: ignore[reportFunctionMemberAccess]  # functions accept attributes
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
