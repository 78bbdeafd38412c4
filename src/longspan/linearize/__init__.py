"""Linearization: a trained model with softmax attention becomes one with other attentions.

The student begins with the teacher's weights and is trained in two stages, each a run of ``longspan.train``. First each
converted layer learns the outputs of the teacher's layer. Then the whole model learns the teacher's distribution of the
next token, after MOHAWK (2408.10189) and LoLCATs (2410.10254).

| in the folder | content |
|---|---|
| ``linearize.yaml`` | the recipe |
| ``layers/`` | the run of the first stage; ``learned.jsonl`` has the error of each layer at each evaluation |
| ``measured.json`` | what each converted layer costs after the first stage |
| ``logits/`` | the run of the second stage |
| ``report.json``, ``report.md``, ``report.png`` | the losses and the layers as numbers, a table and a picture |
| ``model/`` | the student, a checkpoint |

A linearization that is stopped and resumed gives bit for bit the result of an uninterrupted one.
"""

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
from ..train import run_dir as runs
from ..train import train_job
from ..train.config import TrainConfig, refuse_new_model
from . import measure, report
from .mapping import Plan, left_out, plan, student_of
from .stages import Layers, Logits, Stage

__all__ = ["LinearizeConfig", "Linearized", "Plan", "linearize", "plan", "student_of"]

KIND = "linearize"  # what stands for the data in the runs of the stages, which no other command can resume
RECIPE = "linearize.yaml"


@dataclass(frozen=True)
class LinearizeConfig:
    """What a teacher becomes."""

    source: str = ""
    """the teacher, as it was named"""
    attention: str = "hedgehog"
    """specs of the student's layers, tiled over the depth; softmax keeps the teacher's layer"""
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
    """share of the loss on the text in the second stage; the rest is the divergence from the teacher"""

    def __post_init__(self):
        check_fields(self)
        for name in ("keep", "layer_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if not 0 <= self.text <= 1:
            raise ValueError(f"text={self.text} must be in [0, 1], a share of the loss")
        if self.keep and not self.layer_steps:
            raise ValueError(f"keep={self.keep} is chosen after the first stage, which layer_steps=0 leaves out")


@dataclass(frozen=True)
class Linearized:
    """The result of ``linearize``."""

    folder: Path
    """the folder; ``longspan.load(folder / "model")`` loads the student"""
    attention: str
    """the specs of the student's layers"""
    bits: dict[str, float]
    """bits per byte or token on held-out text: ``teacher``, ``carried over``, and after each stage"""
    split: str
    """the held-out part: test, or validation where there is no test"""
    closed: float | None
    """share of the loss between the weights carried over and the teacher that training closed; None if they have no
    higher loss than the teacher"""
    layers: tuple[dict[str, Any], ...]
    """for each converted layer its number, errors and costs; see the report"""


def linearize(
    teacher: Decoder,
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
        ValueError: The teacher is not a decoder, or has layers that cannot be mapped; the specs are wrong or keep all
            layers; the folder has another linearization; and as ``longspan.train.fit`` does.
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
        teacher: Decoder,
        data: Dataset | Tokens,
        config: LinearizeConfig,
        run: TrainConfig,
        resume: bool,
        progress: bool,
    ):
        if not isinstance(teacher, Decoder):
            raise ValueError(f"the teacher must be a longspan.Decoder, not {type(teacher).__name__}")
        if data.vocab != teacher.config.vocab:
            raise ValueError(f"the teacher has vocab={teacher.config.vocab}, but {data.name} has {data.vocab} levels")
        refuse_new_model(run, "a linearization")
        if run.seconds:
            raise ValueError(f"seconds={run.seconds} would end a stage before the next one; pass seconds=0")
        self.teacher, self.data, self.config, self.run = teacher.eval(), data, config, run
        self.folder, self.progress = Path(run.out), progress
        # Raises for a number of layers to keep before anything is trained.
        self.plan = plan(teacher, config.attention, config.keep_layers)
        if config.keep >= len(self.plan.converted):
            raise ValueError(
                f"keep={config.keep} must be less than the {len(self.plan.converted)} layers that would be converted"
            )
        self.student = self._carried()
        self._claim(resume)
        self.split = "test" if "test" in data.splits else "validation"

    def done(self) -> Linearized:
        """Run the stages, or what is left of them."""
        config, count = self.config, self.run.evaluate_examples
        models = {"teacher": self.teacher, "carried over": self.student}
        self.bits = {name: measure.bits_of(one, self.data, self.split, count) for name, one in models.items()}
        before = measure.errors(self.student, self.teacher, self.data, self.plan.converted, "validation", count)
        layers = []
        for i, error in zip(self.plan.converted, before, strict=True):
            old: Any = self.teacher.stack.attentions()[i]
            lost = left_out(old, self.student.stack.attentions()[i])
            found = {"teacher": old.spec, "student": self.plan.specs[i], "left_out": list(lost), "before": error}
            layers.append({"layer": i} | found)
        first = self.student
        if config.layer_steps:
            layer_run = replace(self.run, steps=config.layer_steps, learning_rate=config.layer_learning_rate)
            first = self._stage("layers", self._carried, Layers, layer_run, self.plan)
            measured = measure.kept_or_new(
                self.folder / "measured.json", first, self.teacher, self.data, self.plan.converted, config.keep, count
            )
            for one, found in zip(layers, measured.layers, strict=True):
                one |= found
            kept = (*config.keep_layers, *measured.kept)
            self.plan = plan(self.teacher, config.attention, kept)
            for one in layers:
                one["kept"] = one["layer"] not in self.plan.converted
        last = self._stage("logits", lambda: measure.spliced(first, self.teacher, self.plan), Logits, self.run, None)
        return self._written(last, layers)

    def _carried(self) -> Decoder:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(self.run.seed)
            return student_of(self.teacher, self.plan)

    def _stage(self, name: str, start: Any, kind: Any, run: TrainConfig, chosen: Plan | None) -> Decoder:
        """Run a stage, or what is left of it -> the best student."""
        folder = self.folder / name
        run = replace(run, out=str(folder), data=KIND, length=self.data.length)
        own = self.config.text if chosen is None else chosen.converted
        job = Stage(
            start,
            lambda run: kind(run, self.data, self.teacher, own),
            self.data,
            self.plan.config,
            chosen and chosen.converted,
        )
        if self.progress:
            say(f"stage {name} of {self.folder}")
        self.bits[name] = train_job(job, run, runs.begun(folder), self.progress).bits[self.split]
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

    def _written(self, student: Decoder, layers: Sequence[dict[str, Any]]) -> Linearized:
        """Write the model and the report."""
        teacher, start = self.bits["teacher"], self.bits["carried over"]
        gap = start - teacher
        closed = {name: (start - bits) / gap for name, bits in self.bits.items()} if gap > 0 else {}
        result = Linearized(
            self.folder,
            self.plan.config.attention,
            self.bits,
            self.split,
            closed.get("logits"),
            tuple(layers),
        )
        extra = {"run": {"data": datasets.absolute(self.data.name), "length": self.data.length}}
        checkpoint.save(student, self.folder / "model", extra=extra)
        report.write(result, self.config, self.run, self.data)
        return result
