"""Names of the original that are not carried over: they raise an error that refers to the documentation."""

from collections.abc import Callable
from typing import Any

from torch import nn

# Functions of the original's native extensions by module.
FUNCTIONS = {"local_product": ("local_dot_product", "local_weighted_average")}


def refusal(what: str) -> NotImplementedError:
    """Return the error for a name of the original that is not carried over."""
    return NotImplementedError(
        f"{what} of fast-transformers is not carried over to longspan; "
        "docs/how-to/from-fast-transformers.md lists alternatives"
    )


def function(name: str) -> Callable[..., Any]:
    """Return a function that raises ``refusal(name)`` when it is called, not when it is imported."""

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise refusal(name)

    absent.__name__ = absent.__qualname__ = name.rpartition(".")[2]
    return absent


class Absent(nn.Module):
    """An attention that is not carried over: builders and constructors raise NotImplementedError."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()
        raise refusal(type(self).__name__)
