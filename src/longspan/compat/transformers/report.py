"""Report the replacements of ``accelerate``, the backends of their calls, and what was left unchanged."""

from collections import Counter
from typing import NamedTuple

from . import softmax
from .record import replaced, untouched


class Status(NamedTuple):
    """Which functions of transformers run on longspan's kernels; ``print`` shows it as text."""

    functions: dict[str, dict[str, dict[str, int]]]
    """replaced functions by model type and name, with the number of calls by backend; for the original also why"""
    untouched: dict[str, str]
    """what was left unchanged, by model type, with the reason"""
    softmax: dict[str, int] = {}  # noqa: RUF012
    """number of calls of ``attn_implementation="longspan"`` by backend"""

    def __str__(self) -> str:
        lines = []
        for model, functions in self.functions.items():
            lines.append(f"{model}: {', '.join(functions)}")
            for name, calls in functions.items():
                lines += [f"  {name}: {count} calls by {what}" for what, count in calls.items()]
        lines += [f"softmax layers: {count} calls by {what}" for what, count in self.softmax.items()]
        lines += [f"{name}: untouched; {why}" for name, why in self.untouched.items()]
        return "\n".join(lines) or "nothing is replaced; call longspan.compat.transformers.accelerate()"


def status() -> Status:
    """Return the current replacements, the number of their calls by backend, and what was left unchanged."""
    functions: dict[str, dict[str, Counter[str]]] = {}
    for one in replaced:
        if one.counts:
            # Layers of one class that hold the function as an attribute count as one.
            functions.setdefault(one.model, {}).setdefault(one.name, Counter()).update(one.calls)
    counts = {model: {name: dict(calls) for name, calls in names.items()} for model, names in functions.items()}
    return Status(counts, dict(untouched), dict(softmax.calls))


def summary() -> str:
    """Return one line for ``longspan doctor``: transformers' version and the supported model types."""
    from importlib.util import find_spec

    from .families import TYPES

    if find_spec("transformers") is None:
        return "not installed; pip install longspan[transformers]"
    from importlib.metadata import version as installed

    return f"{installed('transformers')}; longspan.compat.transformers supports {', '.join(TYPES)}"
