"""What ``accelerate`` has replaced, what has served the calls since, and what stays untouched."""

from collections import Counter
from typing import NamedTuple

from . import softmax
from .record import replaced, untouched


class Status(NamedTuple):
    """What runs by longspan's kernels in transformers; ``print`` shows it in words."""

    functions: dict[str, dict[str, dict[str, int]]]
    """by model type and name what was replaced: how many calls were served by what, and by the original why"""
    untouched: dict[str, str]
    """by model type, what was left as it is, and why"""
    softmax: dict[str, int] = {}  # noqa: RUF012
    """of ``attn_implementation="longspan"``: how many calls were served by what"""

    def __str__(self) -> str:
        lines = []
        for model, functions in self.functions.items():
            lines.append(f"{model}: {', '.join(functions)}")
            for name, calls in functions.items():
                lines += [f"  {name}: {count} calls by {what}" for what, count in calls.items()]
        lines += [f"softmax layers: {count} calls by {what}" for what, count in self.softmax.items()]
        lines += [f"{name}: untouched; {why}" for name, why in self.untouched.items()]
        return "\n".join(lines) or "nothing is replaced: longspan.compat.transformers.accelerate() does it"


def status() -> Status:
    """What is replaced now, with what its calls were served by since then, and what is untouched."""
    functions: dict[str, dict[str, Counter[str]]] = {}
    for one in replaced:
        if one.counts:
            # Layers of one class that keep the function themselves are told of as one.
            functions.setdefault(one.model, {}).setdefault(one.name, Counter()).update(one.calls)
    told = {model: {name: dict(calls) for name, calls in names.items()} for model, names in functions.items()}
    return Status(told, dict(untouched), dict(softmax.calls))


def summary() -> str:
    """In one line, for ``longspan doctor``: which transformers there are, and what could be served."""
    from importlib.util import find_spec

    from .families import TYPES

    if find_spec("transformers") is None:
        return "not here; pip install longspan[transformers]"
    from importlib.metadata import version as installed

    return f"{installed('transformers')}; longspan.compat.transformers serves {', '.join(TYPES)}"
