"""What a conversion costs: losses of models with some layers of the teacher and others of the student."""

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .._utils import atomic_io
from .mapping import Plan
from .stages import errors, replaced
from .tasks import Task

__all__ = ["Measured", "errors", "kept_or_new", "loss_of", "measure", "spliced"]


@dataclass(frozen=True)
class Measured:
    """The cost of each converted layer after the first stage, and the layers that should stay as they are."""

    layers: tuple[dict[str, float], ...]
    """for each converted layer: ``error``, its relative error; ``cost``, the loss that the teacher gains with this
    layer converted; ``gain``, the loss that the student saves with the teacher's layer"""
    kept: tuple[int, ...]
    """the layers to keep, in the order of the choice"""


def loss_of(model: Any, task: Task, split: str, examples: int) -> float:
    """Return the loss of a task on evenly spaced examples; 0: the whole split."""
    return task.loss(task.sums(model, split, examples))


def measure(student: Any, task: Task, layers: Sequence[int], keep: int, examples: int) -> Measured:
    """Measure on the validation split what each converted layer costs, and choose ``keep`` of them to stay softmax.

    They are chosen one after the other: each time the layer whose return to softmax lowers the loss most.
    """

    def loss(model: Any, other: Any, some: Sequence[int]) -> float:
        with replaced(model, other, some):
            return loss_of(model, task, "validation", examples)

    # A copy, as the task compares with the teacher.
    teacher = copy.deepcopy(task.teacher)
    found = errors(student, task, layers, "validation", examples)
    best, worst = loss(teacher, student, ()), loss(student, teacher, ())
    restored = {layer: loss(student, teacher, [layer]) for layer in layers}
    figures = tuple(
        {"error": error, "cost": loss(teacher, student, [layer]) - best, "gain": worst - restored[layer]}
        for layer, error in zip(layers, found, strict=True)
    )
    kept: list[int] = []
    while len(kept) < keep:
        left = [layer for layer in layers if layer not in kept]
        losses = {layer: loss(student, teacher, [*kept, layer]) for layer in left} if kept else restored
        kept.append(min(left, key=lambda layer: losses[layer]))
    return Measured(figures, tuple(kept))


def kept_or_new(path: Path, *given: Any) -> Measured:
    """Read what an earlier call measured, or measure and write it."""
    if path.exists():
        try:
            before = json.loads(atomic_io.read_text(path))
            return Measured(tuple(before["layers"]), tuple(before["kept"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is corrupt: {error}; remove it to measure again") from error
    found = measure(*given)
    atomic_io.write(path, f"{json.dumps(asdict(found), indent=2)}\n".encode())
    return found


@torch.no_grad()
def spliced(student: Any, teacher: Any, chosen: Plan) -> Any:
    """Return a student of this plan: the teacher's layers where it keeps them, the others as they are."""
    made = type(student)(chosen.config)
    own = dict(student.state_dict())
    for i, layer in enumerate(teacher.stack.attentions()):
        if i not in chosen.converted:
            place = f"stack.blocks.{i}.attention."
            own = {name: value for name, value in own.items() if not name.startswith(place)}
            own |= {place + name: value for name, value in layer.state_dict().items()}
    made.to(next(student.parameters()).dtype)
    made.load_state_dict(own)
    made.tokenizer = student.tokenizer
    return made
