"""What a model has learned to choose for itself: the spans of its heads, and how long each token is pondered over."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._utils import atomic_io
from ..attention.adaptive_span import AdaptiveSpan
from ..data import Dataset
from ..models.checkpoint import write_text
from ..models.decoder import Decoder
from ..models.stacks import Act

FILE = "learned.jsonl"
LOOKED_AT = 16  # examples


@torch.no_grad()
def learned(model: Decoder, dataset: Dataset) -> dict[str, Any]:
    """Of evenly spaced validation examples: what there is of the following, as plain values.

    ``spans``: for each layer with ``adaptive_span`` its number, from 1, and the mean span of each head in tokens.
    ``ponder``: for ``stack="act"`` the mean over examples of $N + p_N$ (Graves 2016, section 2), and ``steps`` that of
    N, of each position in an example; ``example``: the tokens of the first one, and ``example_ponder`` of each of them.
    A model that chooses nothing has no entry.
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
        # A stack that repeats its blocks shows each of them more than one input.
        means = {i: torch.stack([a.spans(x).mean((0, 2)) for x in read[i]]).mean(0) for i, a in spanned.items()}
        found["spans"] = [[i + 1, [round(z, 3) for z in heads.tolist()]] for i, heads in means.items()]
    if ponders:
        ponder, steps = record["ponder"].float(), record["steps"].float()  # type: ignore[attr-defined]
        found["ponder"] = [round(value, 4) for value in ponder.mean(0).tolist()]
        found["steps"] = [round(value, 4) for value in steps.mean(0).tolist()]
        # What is predicted from a position is pondered there: the token that it reads stands before it.
        found["example"] = tokens[0].tolist()
        found["example_ponder"] = [round(value, 4) for value in ponder[0].tolist()]
    return found


def _read(inputs: list[Tensor], _: nn.Module, arguments: tuple) -> None:
    inputs.append(arguments[0])


def summary(found: dict[str, Any]) -> dict[str, float]:
    """The columns of metrics.csv: ``span``, the mean of all heads in tokens, and ``ponder``, that of all positions."""
    heads = [z for _, layer in found.get("spans", ()) for z in layer]
    means = {"span": heads, "ponder": found.get("ponder", [])}
    return {name: sum(values) / len(values) for name, values in means.items() if values}


def scalars(found: dict[str, Any]) -> dict[str, float]:
    """The same for TensorBoard, and each head's own span."""
    each = {f"span/layer{i}/head{h}": z for i, layer in found.get("spans", ()) for h, z in enumerate(layer, 1)}
    return summary(found) | each


class Diary:
    """``learned.jsonl``: a line of JSON for each evaluation, with its step; none where a model chooses nothing."""

    def __init__(self, folder: Path, start: int):
        """Keep the lines up to step ``start``, from where the run goes on. Raises ValueError for a foreign file."""
        self.path = folder / FILE
        if self.path.exists():
            kept = [one for one in history(folder) if one["step"] <= start]
            write_text(self.path, "".join(f"{json.dumps(one)}\n" for one in kept))

    def write(self, step: int, found: dict[str, Any]) -> None:
        """Add a line. Raises OSError, with the file's name."""
        if found:
            with atomic_io.named(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps({'step': step} | found)}\n")


def history(folder: Path) -> list[dict[str, Any]]:
    """What a run's folder has of this, a dict with its ``step`` for each evaluation; a line cut off by a kill is none.

    Raises ValueError for a file that training has not written.
    """
    path, found = folder / FILE, []
    if not path.exists():
        return []
    try:
        for line in atomic_io.read_text(path).splitlines(keepends=True):
            if line.endswith("\n"):
                found.append(_entry(json.loads(line)))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"{path} is corrupt: it is not what training writes; move it away to go on without it"
        raise ValueError(message) from error
    return found


def _entry(one: dict[str, Any]) -> dict[str, Any]:
    """A line of the file. Raises ValueError, KeyError or TypeError for what training does not write."""
    if type(one["step"]) is not int:
        raise TypeError("step is not a whole number")
    for _, heads in one.get("spans", ()):
        _check_figures(heads)
    for name in ("ponder", "steps", "example", "example_ponder"):
        if name in one:
            _check_figures(one[name])
    return one


def _check_figures(values: list[float]) -> None:
    if not values or not all(type(z) in (int, float) and math.isfinite(z) for z in values):
        raise ValueError("a list of finite numbers is something else")
