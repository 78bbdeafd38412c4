"""Record of the replacements in this process, and the check of transformers' version."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..._utils.optional_deps import need

OLDEST, NEWEST = (5, 5), (5, 24)  # of transformers


@dataclass
class Replaced:
    """A replaced attribute of a module, class or layer, with counts of its calls by backend."""

    model: str
    name: str
    owner: Any
    attribute: str
    original: Any
    counts: bool = False
    part: str = ""
    put: Any = None
    inherited: bool = False
    active: bool = True
    calls: Counter[str] = field(default_factory=Counter)


replaced: list[Replaced] = []
"""replacements, in the order in which they were made"""
untouched: dict[str, str] = {}
"""model types that were left unchanged, with the reason"""


def version() -> tuple[int, int]:
    """Return the first two numbers of transformers' version.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers is too old or too new.
    """
    need("longspan.compat.transformers", "transformers")
    import transformers

    words = transformers.__version__.split(".")
    found = int(words[0]), int(words[1])
    if found < OLDEST:
        raise ValueError(
            f"transformers {transformers.__version__} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest that longspan "
            f"supports; pip install 'transformers>={OLDEST[0]}.{OLDEST[1]}'"
        )
    if found > NEWEST:
        raise ValueError(
            f"transformers {transformers.__version__} is newer than {NEWEST[0]}.{NEWEST[1]}, the newest that "
            f"longspan supports; pip install 'transformers<{NEWEST[0]}.{NEWEST[1] + 1}'"
        )
    return found
