"""The record of what has been replaced in this process, and which transformers it is."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..._utils.optional_deps import need

OLDEST, NEWEST = (5, 5), (5, 24)  # of transformers


@dataclass
class Replaced:
    """One attribute of a module, a class or a layer that has been replaced, and what its calls were served by."""

    model: str
    name: str
    owner: Any
    attribute: str
    original: Any
    counts: bool = False
    put: Any = None
    inherited: bool = False
    active: bool = True
    calls: Counter[str] = field(default_factory=Counter)


replaced: list[Replaced] = []
"""what has been replaced, in this order"""
untouched: dict[str, str] = {}
"""model types that were left as they are, and why"""


def version() -> tuple[int, int]:
    """Of transformers: the first two numbers. Raises ImportError without it, ValueError where it is too old or new."""
    need("longspan.compat.transformers", "transformers")
    import transformers

    words = transformers.__version__.split(".")
    found = int(words[0]), int(words[1])
    if found < OLDEST:
        raise ValueError(
            f"transformers {transformers.__version__} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest that "
            "longspan knows"
        )
    if found > NEWEST:
        raise ValueError(
            f"transformers {transformers.__version__} is newer than {NEWEST[0]}.{NEWEST[1]}, the newest whose layers "
            f"longspan knows; pip install 'transformers<{NEWEST[0]}.{NEWEST[1] + 1}'"
        )
    return found
