"""Report the replacements of ``accelerate``, the backends of their calls, and what was left unchanged."""

from collections import Counter
from typing import NamedTuple

from ..._utils.optional_deps import install
from . import decoding, softmax
from .models import MODELS, WRAPPERS
from .record import replaced, untouched


class Status(NamedTuple):
    """Which functions of transformers run on longspan's kernels; ``print`` shows those that were called."""

    functions: dict[str, dict[str, dict[str, int]]]
    """replaced functions by model type and name, with the number of calls by backend; for the original also why"""
    untouched: dict[str, str]
    """what was left unchanged, by model type, with the reason"""
    softmax: dict[str, int] = {}  # noqa: RUF012
    """number of calls of ``attn_implementation="longspan"`` by backend"""
    parts: dict[str, str] = {}  # noqa: RUF012
    """what of a model type runs on longspan's kernels; of a model around a text model, what of the latter does"""

    def __str__(self) -> str:
        lines = []
        used = [model for model, functions in self.functions.items() if any(functions.values())]
        for model in used:
            lines.append(f"{model}: {self.parts.get(model) or ', '.join(self.functions[model])}")
            for name, calls in self.functions[model].items():
                lines += [f"  {name}: {count} calls by {what}" for what, count in calls.items()]
        lines += [f"softmax layers: {count} calls by {what}" for what, count in self.softmax.items()]
        if waiting := {*self.functions, *self.parts} - {*used}:
            others = f"{len(waiting)} other model types" if lines else f"{len(waiting)} model types"
            lines.append(f"{others} run on longspan's kernels once they are called: see .parts")
        if self.untouched:
            lines.append(f"{len(self.untouched)} model types or layers are unchanged: see .untouched")
        return "\n".join(lines) or "nothing is replaced; call longspan.compat.transformers.accelerate()"


def status() -> Status:
    """Return the current replacements, the number of their calls by backend, and what was left unchanged."""
    functions: dict[str, dict[str, Counter[str]]] = {}
    for one in replaced:
        if one.counts:
            # Layers of one class that hold the function as an attribute count as one.
            functions.setdefault(one.model, {}).setdefault(one.name, Counter()).update(one.calls)
    # Those of flash-linear-attention are replaced by no function.
    for model, calls in decoding.stepped.items():
        functions.setdefault(model, {"ForCausalLM.forward": calls})
    counts = {model: {name: dict(calls) for name, calls in names.items()} for model, names in functions.items()}
    return Status(counts, dict(untouched), dict(softmax.calls), _parts())


def _parts() -> dict[str, str]:
    of: dict[str, dict[str, None]] = {}
    for one in replaced:
        if one.part:
            of.setdefault(one.model, {})[one.part] = None
    parts = {model: ", ".join(names) for model, names in of.items()}
    inner = {outer: f"of its text model {kind}: {parts[kind]}" for outer, kind in WRAPPERS.items() if kind in parts}
    return parts | inner


def summary() -> str:
    """Return one line for ``longspan doctor``: transformers' version and the supported model types."""
    from importlib.util import find_spec

    if find_spec("transformers") is None:
        return f"not installed; {install('transformers')}"
    from importlib.metadata import version as installed

    return f"{installed('transformers')}; longspan.compat.transformers supports {', '.join(MODELS)}"
