"""Linearization: a trained model with softmax attention becomes one with other attentions.

The student begins with the teacher's weights and is trained in two stages, each a run of ``longspan.train``. First each
converted layer learns the outputs of the teacher's layer. Then the whole model learns the teacher's distribution of the
next token, after MOHAWK (2408.10189) and LoLCATs (2410.10254), or the embeddings of texts if the teacher is an encoder.

| in the folder | content |
|---|---|
| ``linearize.yaml`` | the recipe |
| ``layers/`` | the run of the first stage; ``learned.jsonl`` has the error of each layer at each evaluation |
| ``measured.json`` | what each converted layer costs after the first stage |
| ``logits/``, ``embeddings/`` | the run of the second stage of a decoder or an encoder |
| ``report.json``, ``report.md``, ``report.png`` | the losses and the layers as numbers, a table and a picture |
| ``model/`` | the student, a checkpoint: the better one of both stages by the validation split |

The loss is bits per byte or token for a decoder, and 1 - cosine between the embeddings of student and teacher for an
encoder, also where metrics call it ``bits``.

A linearization that is stopped and resumed gives bit for bit the result of an uninterrupted one.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from .. import data as datasets
from .._utils import atomic_io
from .._utils.progress import say
from .._utils.typecheck import check_fields
from ..data import Dataset, Tokens
from ..data.dataset import sha256
from ..models import checkpoint
from ..models.decoder import Decoder
from ..models.encoder import Encoder
from ..train import run_dir as runs
from ..train import train_job
from ..train.config import TrainConfig, refuse_new_model
from . import measure, report
from .mapping import Plan, left_out, plan, student_of
from .stages import Layers, Logits, Stage, Vectors
from .tasks import task_of

__all__ = ["LinearizeConfig", "Linearized", "Plan", "linearize", "plan", "student_of"]

KIND = "linearize"  # what stands for the data in the runs of the stages, which no other command can resume
RECIPE = "linearize.yaml"


@dataclass(frozen=True)
class LinearizeConfig:
    """What a teacher becomes."""

    source: str = ""
    """the teacher, as it was named"""
    attention: str = "hedgehog"
    """specs that the teacher's softmax layers become, tiled over these; softmax keeps a layer, and other layers stay"""
    keep: int = 0
    """number of further softmax layers to keep: those whose conversion is measured to cost most after the first
    stage"""
    keep_layers: tuple[int, ...] = ()
    """further softmax layers to keep, by number, from 0"""
    layer_steps: int = 500
    """steps of the first stage; 0: leave it out"""
    layer_learning_rate: float = 1e-3
    """peak learning rate of the first stage"""
    text: float = 0.0
    """of a decoder: share of the loss on the text in the second stage; the rest is the divergence from the teacher"""
    tokens: float = 0.5
    """of an encoder: share of the loss on the outputs of tokens in the second stage; the rest is on the embeddings"""
    positions: int = 0
    """of an encoder: number of learned positions of the student, at least those of the teacher, which they repeat; 0:
    as many"""

    def __post_init__(self):
        check_fields(self)
        for name in ("keep", "layer_steps", "positions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("text", "tokens"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1], a share of the loss")
        if self.keep and not self.layer_steps:
            raise ValueError(f"keep={self.keep} is chosen after the first stage, which layer_steps=0 leaves out")


@dataclass(frozen=True)
class Linearized:
    """The result of ``linearize``."""

    folder: Path
    """the folder; ``longspan.load(folder / "model")`` loads the student"""
    attention: str
    """the specs of the student's layers"""
    losses: dict[str, float]
    """losses on held-out text: ``teacher``, ``carried over``, after each stage, and with ``keep``, ``kept`` for the
    student of the first stage with these softmax layers; bits per byte or token of a decoder,
    1 - cosine between the embeddings of student and teacher of an encoder"""
    best: str
    """the stage whose student has the lowest loss on the validation split, which is the result"""
    split: str
    """the held-out part: test, or validation where there is no test"""
    closed: float | None
    """share of the loss between the weights carried over and the teacher that training closed; None if they have no
    higher loss than the teacher"""
    layers: tuple[dict[str, Any], ...]
    """for each converted layer its number, errors and costs; see the report"""


def linearize(
    teacher: Decoder | Encoder,
    data: Dataset | Tokens,
    config: LinearizeConfig,
    run: TrainConfig,
    *,
    resume: bool = False,
    progress: bool = True,
) -> Linearized:
    """Convert softmax layers of a model into other attentions, and write the result into a folder.

    Args:
        teacher: The model. It is put into evaluation mode, and its weights stay as they are.
        data: A text or tokens that it can read.
        config: What becomes of it.
        run: The optimizer, the steps of the second stage and the folder; ``data`` and ``length`` are recorded, not
            read.
        resume: Continue a linearization that was stopped, or start if there is none yet.
        progress: Print what is trained, a bar or occasional lines, and a line per evaluation, on stderr.

    Returns:
        The ``Linearized``, with the losses of teacher and student.

    Raises:
        ImportError: Without the extra ``train``.
        ValueError: The teacher is neither a decoder nor an encoder of tokens with pooling, or has layers that cannot be
            mapped; the specs are wrong or keep all layers; the folder has another linearization; and as
            ``longspan.train.fit`` does.
        KeyboardInterrupt: As ``fit`` does.

    References:
        Bick et al. 2024 (2408.10189), section 4; Zhang et al. 2024 (2410.10254), section 3; Wang et al. 2024
        (2408.15237), section 3, for the weights carried over.
    """
    return _Work(teacher, data, config, run, resume, progress).done()


class _Work:
    """One call of ``linearize``."""

    def __init__(
        self,
        teacher: Decoder | Encoder,
        data: Dataset | Tokens,
        config: LinearizeConfig,
        run: TrainConfig,
        resume: bool,
        progress: bool,
    ):
        self.task = task_of(teacher, data)
        if config.text and isinstance(teacher, Encoder):
            raise ValueError(f"text={config.text} is a share of the loss of a decoder, and the teacher is an encoder")
        refuse_new_model(run, "a linearization")
        if run.seconds:
            raise ValueError(f"seconds={run.seconds} would end a stage before the next one; pass seconds=0")
        self.teacher, self.data, self.config, self.run = teacher.eval(), data, config, run
        self.folder, self.progress = Path(run.out), progress
        # Raises for a number of layers to keep before anything is trained.
        self.plan = plan(teacher, config.attention, config.keep_layers, config.positions)
        if config.keep >= len(self.plan.converted):
            raise ValueError(
                f"keep={config.keep} must be less than the {len(self.plan.converted)} layers that would be converted"
            )
        self.student = self._carried()
        self._claim(resume)
        self.split = "test" if "test" in data.splits else "validation"

    def done(self) -> Linearized:
        """Run the stages, or what is left of them."""
        config, task, count = self.config, self.task, self.run.evaluate_examples
        models = {"teacher": self.teacher, "carried over": self.student}
        self.losses = {name: measure.loss_of(one, task, self.split, count) for name, one in models.items()}
        before = measure.errors(self.student, task, self.plan.converted, "validation", count)
        layers, converted = [], self.plan.converted
        for i, error in zip(converted, before, strict=True):
            old: Any = self.teacher.stack.attentions()[i]
            lost = left_out(old, self.student.stack.attentions()[i])
            found = {"teacher": old.spec, "student": self.plan.specs[i], "left_out": list(lost), "before": error}
            layers.append({"layer": i} | found)
        first, name = self.student, "carried over"
        if config.layer_steps:
            layer_run = replace(self.run, steps=config.layer_steps, learning_rate=config.layer_learning_rate)
            name = "layers"
            first = self._stage(name, self._carried, layer_run, lambda run: Layers(run, task, converted), converted)
            measured = measure.kept_or_new(
                self.folder / "measured.json", first, task, self.plan.converted, config.keep, count
            )
            for one, found in zip(layers, measured.layers, strict=True):
                one |= found
            self.plan = plan(self.teacher, config.attention, (*config.keep_layers, *measured.kept), config.positions)
            for one in layers:
                one["kept"] = one["layer"] not in self.plan.converted
        first = measure.spliced(first, self.teacher, self.plan)
        if config.keep:
            name = "kept"
            self.losses[name] = measure.loss_of(first, task, self.split, count)
        kind, share = (Logits, config.text) if isinstance(self.teacher, Decoder) else (Vectors, config.tokens)
        last = self._stage(task.stage, lambda: copy.deepcopy(first), self.run, lambda run: kind(run, task, share))
        models = {name: first, task.stage: last}
        found = {name: measure.loss_of(one, task, "validation", count) for name, one in models.items()}
        best = min(found, key=lambda name: found[name])
        if best != task.stage and self.progress:
            say(f"model/ is the student before the stage {task.stage}, which did not lower the loss on validation")
        return self._written(models[best], best, layers)

    def _carried(self) -> Any:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(self.run.seed)
            return student_of(self.teacher, self.plan)

    def _stage(self, name: str, start: Any, run: TrainConfig, objective: Any, trained: Any = None) -> Any:
        """Run a stage, or what is left of it -> the best student."""
        folder, task = self.folder / name, self.task
        run = replace(run, out=str(folder), data=KIND, length=self.data.length)
        job = Stage(start, objective, self.plan.config, trained, task.frozen if trained is None else ())
        if self.progress:
            say(f"stage {name} of {self.folder}")
        self.losses[name] = train_job(job, run, runs.begun(folder), self.progress).bits[self.split]
        return checkpoint.load(folder)

    def _claim(self, resume: bool) -> None:
        """Write the recipe, or compare it. Raises ValueError for a folder with another one, or with something else."""
        run = replace(self.run, data=datasets.absolute(self.data.name), length=self.data.length)
        weights = (weight.flatten().view(torch.uint8).numpy() for weight in self.teacher.cpu().state_dict().values())
        model = asdict(self.config) | {"keep_layers": list(self.config.keep_layers), "teacher_sha256": sha256(weights)}
        recipe = {"model": model, "run": asdict(run)}
        path = self.folder / RECIPE
        if path.exists():
            if not resume:
                raise ValueError(
                    f"{self.folder} holds a linearization; resume it with the same command and --resume, in Python "
                    "with resume=True, or choose another folder"
                )
            try:
                before = yaml.safe_load(atomic_io.read_text(path))
                differ = [
                    f"{name} ({before[part].get(name, 'absent')} -> {value})"
                    for part in recipe
                    for name, value in recipe[part].items()
                    if name != "out" and before[part].get(name, "absent") != value
                ]
            except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
                raise ValueError(f"{path} is corrupt: it holds no recipe of a linearization") from error
            if differ:
                raise ValueError(f"cannot resume {self.folder} with other settings: {', '.join(differ)}")
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} is not empty and holds no linearization; choose another folder")
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            checkpoint.write_text(path, yaml.safe_dump(recipe, sort_keys=False))

    def _written(self, student: Any, best: str, layers: Sequence[dict[str, Any]]) -> Linearized:
        """Write the model and the report."""
        teacher, start = self.losses["teacher"], self.losses["carried over"]
        gap = start - teacher
        closed = (start - self.losses[best]) / gap if gap > 0 else None
        attention = self.plan.config.attention
        result = Linearized(self.folder, attention, self.losses, best, self.split, closed, tuple(layers))
        extra = {"run": {"data": datasets.absolute(self.data.name), "length": self.data.length}}
        checkpoint.save(student, self.folder / "model", extra=extra)
        report.write(result, self.config, self.run, self.task)
        return result
