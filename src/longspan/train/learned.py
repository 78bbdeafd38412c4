"""Learned quantities of a model: spans of its heads, and ponder times of tokens."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._utils import atomic_io
from ..attention.adaptive_span import AdaptiveSpan
from ..data import Dataset, Tokens
from ..models.checkpoint import write_text
from ..models.decoder import Decoder
from ..models.stacks import Act

FILE = "learned.jsonl"
LOOKED_AT = 16  # examples that are evaluated


@torch.no_grad()
def learned(model: Decoder, dataset: Dataset | Tokens) -> dict[str, Any]:
    """Measure learned spans and ponder times on evenly spaced validation examples.

    Returns:
        Plain values; a model without learned spans or ponder times has no entries. ``spans``: for each layer with
        ``adaptive_span`` its number, from 1, and the mean span of each head in tokens. ``ponder``: for
        ``stack="act"``, the mean of $N + p_N$ (Graves 2016, section 2) for each position, and ``steps``, that of N.
        ``example``: the tokens of the first example, and ``example_ponder``, their ponder times.
    """
    spanned = {i: a for i, a in enumerate(model.stack.attentions()) if isinstance(a, AdaptiveSpan)}
    ponders = isinstance(model.stack.run, Act)
    count = dataset.count("validation")
    if not count or not (spanned or ponders):
        return {}
    chosen = min(LOOKED_AT, count)
    tokens = dataset.take("validation", torch.arange(chosen) * count // chosen).to(model.device)
    read: dict[int, list[Tensor]] = {i: [] for i in spanned}
    hooks = [a.register_forward_pre_hook(functools.partial(_read, read[i])) for i, a in spanned.items()]
    training, record = model.training, {"penalty": None}
    model.eval()
    try:
        model(model.shift(tokens), record=record)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    found: dict[str, Any] = {}
    if spanned:
        # A stack that repeats its blocks calls each of them several times.
        means = {i: torch.stack([a.spans(x).mean((0, 2)) for x in read[i]]).mean(0) for i, a in spanned.items()}
        found["spans"] = [[i + 1, [round(z, 3) for z in heads.tolist()]] for i, heads in means.items()]
    if ponders:
        ponder, steps = record["ponder"].float(), record["steps"].float()  # pyright: ignore[reportAttributeAccessIssue] (the call filled both)
        found["ponder"] = [round(value, 4) for value in ponder.mean(0).tolist()]
        found["steps"] = [round(value, 4) for value in steps.mean(0).tolist()]
        # A position reads the token before it and predicts its own token.
        found["example"] = tokens[0].tolist()
        found["example_ponder"] = [round(value, 4) for value in ponder[0].tolist()]
    return found


def _read(inputs: list[Tensor], _: nn.Module, arguments: tuple) -> None:
    inputs.append(arguments[0])


def summary(found: dict[str, Any]) -> dict[str, float]:
    """The columns of metrics.csv: ``span``, the mean over heads in tokens, and ``ponder``, the mean over positions."""
    heads = [z for _, layer in found.get("spans", ()) for z in layer]
    means = {"span": heads, "ponder": found.get("ponder", [])}
    return {name: sum(values) / len(values) for name, values in means.items() if values}


def scalars(found: dict[str, Any]) -> dict[str, float]:
    """The same for TensorBoard, with the span of each head."""
    each = {f"span/layer{i}/head{h}": z for i, layer in found.get("spans", ()) for h, z in enumerate(layer, 1)}
    return summary(found) | each


class Diary:
    """``learned.jsonl``: one JSON line per evaluation with its step, if the model has learned quantities."""

    def __init__(self, folder: Path, start: int):
        """Keep the lines up to step ``start``, where the run resumes. Raises ValueError for a corrupt file."""
        self.path = folder / FILE
        if self.path.exists():
            kept = [one for one in history(folder) if one["step"] <= start]
            write_text(self.path, "".join(f"{json.dumps(one)}\n" for one in kept))

    def write(self, step: int, found: dict[str, Any]) -> None:
        """Append a line. Raises OSError with the name of the file."""
        if found:
            with atomic_io.named(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps({'step': step} | found)}\n")


def history(folder: Path) -> list[dict[str, Any]]:
    """The entries of a run directory, a dict with its ``step`` for each evaluation; incomplete lines are skipped.

    Raises ValueError for a corrupt file.
    """
    path, found = folder / FILE, []
    if not path.exists():
        return []
    try:
        for line in atomic_io.read_text(path).splitlines(keepends=True):
            if line.endswith("\n"):
                found.append(_entry(json.loads(line)))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"{path} is corrupt: it was not written by training; move it away to continue without it"
        raise ValueError(message) from error
    return found


def _entry(one: dict[str, Any]) -> dict[str, Any]:
    """Check a line of the file. Raises ValueError, KeyError or TypeError if training cannot have written it."""
    if type(one["step"]) is not int:
        raise TypeError("step is not an integer")
    for _, heads in one.get("spans", ()):
        _check_figures(heads)
    for name in ("ponder", "steps", "example", "example_ponder"):
        if name in one:
            _check_figures(one[name])
    return one


def _check_figures(values: list[float]) -> None:
    if not values or not all(type(z) in (int, float) and math.isfinite(z) for z in values):
        raise ValueError("expected a list of finite numbers")
