"""Training of models, with exact resume.

| in the run directory | content |
|---|---|
| ``config.yaml`` | the model and the run as a recipe, accepted by ``longspan train --config`` |
| ``metrics.csv`` | one row every 10 steps and at each evaluation |
| ``learned.jsonl`` | learned spans and ponder times, one line per evaluation |
| ``tensorboard/`` | the metrics for TensorBoard, with ``logger="tensorboard"`` |
| ``checkpoints/step-00000100/`` | a checkpoint |
| ``checkpoints/last``, ``checkpoints/best`` | names of the last and the best checkpoint (lowest validation bits) |

A run that is stopped and resumed gives bit for bit the result of an uninterrupted run: batches and seeds are functions
of the micro-batch number, and the checkpoint holds everything else.
"""

import contextlib
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from .. import data
from .._utils import model_memory, signals
from .._utils.optional_deps import install, need
from ..attention.specs import parts
from ..data import Dataset, Labeled, Pairs, Tokens
from ..models import checkpoint
from ..models.config import DecoderConfig, EncoderConfig, Seq2SeqConfig
from ..models.stacks import kind_of
from ..ops.buffers import return_pages, reuse_pages
from . import launch, objectives, tbptt
from . import run_dir as runs
from .config import TrainConfig, rate
from .evaluate import bits
from .groups import parameter_groups

begun = runs.begun

__all__ = ["Result", "TrainConfig", "begun", "bits", "fit", "parameter_groups", "rate"]


@dataclass(frozen=True)
class Result:
    """The result of ``fit``."""

    folder: Path
    """the run directory; ``longspan.load(folder)`` loads its best model"""
    steps: int
    """optimizer steps, including those before a resume; fewer than ``run.steps`` if the time limit was reached"""
    seconds: float
    """wall time of this call in seconds"""
    bits: dict[str, float]
    """bits per dim, byte or token of the best checkpoint on "validation" and "test"; empty on ranks other than 0"""
    examples: dict[str, int] = field(default_factory=dict)
    """number of evaluated examples, by split"""
    exact: dict[str, float] = field(default_factory=dict)
    """of an encoder-decoder: share of targets that greedy decoding generates exactly, by split"""
    accuracy: dict[str, float] = field(default_factory=dict)
    """of a classifier: accuracy, by split"""


SPLITS = ("validation", "test")


class Made(NamedTuple):
    """What a run trains."""

    model: Any
    objective: objectives.Objective
    opening: str
    """the first lines of the output"""


class Job(Protocol):
    """What ``train_job`` trains: a new model, or a part of a trained one."""

    config: Any
    """the first part of the recipe; its ``checkpointing`` says whether the backward computes layers again"""

    def make(self, run: TrainConfig, start: Path | None) -> Made:
        """Make the model, drawn by ``run.seed``, for a run that begins at a checkpoint (None: at the beginning)."""
        ...

    def best(self, folder: Path, made: Made) -> tuple[Any, objectives.Objective]:
        """Load the best model of a run, and return it with its objective."""
        ...


def fit(config: DecoderConfig, run: TrainConfig, *, resume: bool = False, progress: bool = True) -> Result:
    """Train a decoder, an encoder-decoder on pairs, or an encoder on labeled texts.

    With ``run.devices`` > 1, Lightning's launcher starts the calling script once more for each further process, unless
    torchrun or SLURM has started all of them. Other processes cannot write into the run directory meanwhile.

    A resume with another number of devices reads the same examples in each step: ``run.accumulate`` changes.

    Args:
        config: the model: ``DecoderConfig``, ``Seq2SeqConfig`` or ``EncoderConfig``.
        run: the data, the optimizer, the lengths and the run directory.
        resume: continue from the last checkpoint in ``run.out``, or start if there is none yet.
        progress: print a bar (on a terminal) or occasional lines, and a line per evaluation, on stderr.

    Returns:
        The ``Result``, with figures of the best checkpoint.

    Raises:
        ValueError: for a run directory that is in use, not empty (without ``resume``), has nothing to resume, belongs
            to another run or other data, has a corrupt file or cannot be written; for a config that does not fit the
            data; if torchrun or SLURM started another number of processes than ``run.devices`` times ``run.nodes``; if
            the processes differ in the model, the run or the data, or one of them stops for ``run.timeout``; if the
            devices cannot share the examples of a step evenly; for a loss or gradient that is not finite (the
            last good checkpoint stays).
        KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGHUP, when the current step is finished and saved; immediately
            after a second signal. The message has the checkpoint.
        ImportError: without the extra ``train``.
    """
    return train_job(_NewModel(config), run, resume, progress)


def train_job(job: Job, run: TrainConfig, resume: bool, progress: bool) -> Result:
    """Train what a job makes; the other arguments, the result and the errors are those of ``fit``."""
    # Store absolute paths of the data, so that a resumed run finds them from any directory.
    run = replace(run, data=data.absolute(run.data))
    launch.check(run.devices, run.nodes)
    folder, first, config = Path(run.out), launch.first(), job.config
    if resume:
        run = runs.adjusted(folder, run)
    engine = _engine()
    (return_pages if config.checkpointing or getattr(config, "stack", "") == "reversible" else reuse_pages)()
    with contextlib.ExitStack() as stack:
        if first:
            stack.enter_context(runs.held(folder))
            runs.claim(folder, runs.recipe(config, run), resume)
        return _train(engine, job, run, resume, progress and first)


def _train(engine: Any, job: Job, run: TrainConfig, resume: bool, progress: bool) -> Result:
    """``train_job`` in a locked folder, in one of the processes."""
    begin, folder = time.monotonic(), Path(run.out)
    start, remark = runs.start(folder) if resume else (None, "")
    # Seed inside fork_rng, so that the RNG state of the caller is untouched.
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        made = job.make(run, start)
        dataset = made.objective.dataset
        bar = engine.Bar(run.steps, dataset.unit) if progress else None
        if bar:
            bar.line(made.opening)
        if bar and remark:
            bar.line(remark)
        try:
            end = engine.train(
                made.model, run, made.objective, {"run": asdict(run), checkpoint.DATA: dataset.checksum}, start, bar
            )
        except OSError as error:
            where = error.filename or folder
            raise ValueError(f"cannot write {where}: {error.strerror or error}; {runs.kept(folder)}") from error
    if not end.first:
        # No exception, even after an interruption: the launcher kills rank 0 if another process fails before it.
        return Result(folder, end.steps, time.monotonic() - begin, {})
    if end.signal:
        last = folder / "checkpoints" / "last"
        where = f"{runs.pointer(last)} is saved" if last.exists() else "nothing was saved"
        raise signals.Interrupted(
            f"{end.why} at step {end.steps}; {where} in {folder}; continue with resume=True", end.signal
        )
    if run.strategy == "fsdp":
        from ..models import parts

        for name in ("best", "last"):
            parts.consolidate(checkpoint.resolve(folder, prefer=name))
    best, objective = job.best(folder, made)
    splits = [split for split in SPLITS if split in dataset.splits]
    figures = {split: objective.score(best, split) for split in splits}
    names = ("bits", "exact", "accuracy")
    scores, exact, accuracy = ({s: one[name] for s, one in figures.items() if name in one} for name in names)
    examples = {s: min(run.evaluate_examples or dataset.count(s), dataset.count(s)) for s in splits}
    if bar:
        shown = ", ".join(
            f"{split} {objective.shown(value)} ({examples[split]:,} examples)" for split, value in scores.items()
        )
        shown += parts_right(exact, accuracy)
        early = f" ({end.why})" if end.why else ""
        bar.line(f"{end.steps} steps{early}; best checkpoint: {shown}; in {folder}")
    return Result(folder, end.steps, time.monotonic() - begin, scores, examples, exact, accuracy)


class _NewModel:
    """A job: a model with the weights that ``run.seed`` draws."""

    def __init__(self, config: Any):
        self.config = config

    def make(self, run: TrainConfig, start: Path | None) -> Made:
        config, dataset = self.config, data.load(run.data, run.length)
        if start:
            runs.check_data(start, run.data, dataset)
        _check(config, run, dataset)
        torch.manual_seed(run.seed)
        # Of a sharded model the first process draws the weights, and the others receive their parts.
        with contextlib.nullcontext() if launch.first() or run.strategy != "fsdp" else torch.device("meta"):
            model = checkpoint.MODEL_CLASSES[checkpoint.kind_of(config)][1](config)
        if isinstance(dataset, Tokens):
            model.tokenizer = dataset.tokenizer
        return Made(model, objectives.build(model, run, dataset), _opening(model, run, dataset))

    def best(self, folder: Path, made: Made) -> tuple[Any, objectives.Objective]:
        model = checkpoint.load(folder)
        return model, objectives.build(model, made.objective.run, made.objective.dataset)


def parts_right(exact: dict[str, float], accuracy: dict[str, float]) -> str:
    """The end of a line about splits: exact match and accuracy."""
    found = {"exact": exact, "accuracy": accuracy}
    shown = {name: ", ".join(f"{split} {part:.1%}" for split, part in one.items()) for name, one in found.items()}
    return "".join(f"; {name}: {text}" for name, text in shown.items() if text)


def _opening(model: Any, run: TrainConfig, dataset: Dataset | Tokens | Pairs | Labeled) -> str:
    """The first line of the output: model, data and device."""
    count, config = sum(p.numel() for p in model.parameters()), model.config
    where = "cuda" if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    specs, most = config.attention, ""
    if isinstance(config, Seq2SeqConfig):
        specs, most = f"{config.encoder_attention} > {config.cross_attention} > {config.attention}", "up to "
    if isinstance(dataset, Labeled):
        most = "up to "
    return (
        f"{count:,} parameters, {specs}; {run.data}: {dataset.count('train'):,} examples of {most}"
        f"{dataset.length} tokens, {run.step_examples} per step; on {where}"
    )


def _engine() -> Any:
    try:
        from . import loop as engine
    except ImportError as error:
        raise ImportError(f"training requires {error.name}: {install('train')}", name=error.name) from error
    return engine


def _check(config: Any, run: TrainConfig, dataset: Dataset | Tokens | Pairs | Labeled) -> None:
    specs = {"attention": config.attention}
    if isinstance(dataset, Pairs):
        if not isinstance(config, Seq2SeqConfig):
            raise ValueError(f"{run.data} consists of pairs, which require an encoder-decoder; pass model.kind=seq2seq")
        if config.source_vocab and config.source_vocab < dataset.vocab - 1:
            raise ValueError(
                f"source_vocab={config.source_vocab} is too small for {run.data}, whose sources have "
                f"{dataset.vocab - 1} levels"
            )
        specs["encoder_attention"] = config.encoder_attention
    elif isinstance(dataset, Labeled):
        if not isinstance(config, EncoderConfig):
            raise ValueError(f"{run.data} has labels, which require an encoder; pass model.kind=encoder")
        if config.pool == "none":
            raise ValueError("pool='none' gives one output per token; a classifier requires pool='mean' or 'first'")
        if config.labels.split() != list(dataset.labels) or config.outputs != len(dataset.labels):
            raise ValueError(
                f"outputs={config.outputs} and labels={config.labels!r} do not fit {run.data}, whose "
                f"{len(dataset.labels)} labels are {' '.join(dataset.labels)!r}"
            )
    elif type(config) is not DecoderConfig:
        raise ValueError(
            f"{run.data} requires a decoder, not model.kind={checkpoint.kind_of(config)}; a seq2seq requires "
            "pairs:FILE, an encoder requires labels:FILE"
        )
    if config.vocab != dataset.vocab:
        raise ValueError(f"vocab={config.vocab} does not fit {run.data}, whose tokens have {dataset.vocab} levels")
    if config.positions == "learned" and config.length < dataset.length:
        raise ValueError(
            f"length={config.length} learned positions are too few for {run.data}: {dataset.length} tokens per example"
        )
    kinds = {name: cls.penalty or cls.samples for text in specs.values() for name, cls in parts(text)}
    if run.penalty and not any(kinds.values()) and not kind_of(config.stack).penalty:
        raise ValueError(
            f"penalty={run.penalty} weighs auxiliary losses of mechanisms, but {', '.join(kinds)} has none; "
            "pass penalty=0"
        )
    if run.logger == "wandb":
        need("the logger of Weights & Biases", "wandb")
    if run.peak_tflops and type(config) is not DecoderConfig:
        raise ValueError(f"peak_tflops={run.peak_tflops} is for the column mfu, which only a decoder has; pass 0")
    if run.compile and config.stack == "reversible":
        raise ValueError("compile=True has no effect on stack='reversible', which calls parts of blocks; pass False")
    if run.stream and isinstance(config, DecoderConfig):
        tbptt.check(config)
        if config.checkpointing:
            raise ValueError(
                "checkpointing=True has no effect with stream=True, which carries a state; pass checkpointing=False"
            )
    if run.segments and isinstance(config, DecoderConfig):
        tbptt.check_segments(config)
    if dataset.length < run.sequence_parallel:
        raise ValueError(
            f"sequence_parallel={run.sequence_parallel} processes cannot share examples of {dataset.length} tokens; "
            "each needs at least one"
        )
    if not dataset.count("train"):
        raise ValueError(f"{run.data} has no training examples")
    if not torch.accelerator.is_available():
        what = f"the activations of batch={run.batch} examples of {dataset.length} tokens"
        tokens = run.batch * -(-dataset.length // run.sequence_parallel)
        model_memory.check_fits_in_memory(tokens * _activations(config), what)


def _activations(config: DecoderConfig | EncoderConfig | Seq2SeqConfig) -> int:
    """A lower bound of the bytes that a step keeps for each token, in bfloat16."""
    if config.checkpointing or config.stack != "plain" or config.feedforward_chunk:
        return 2 * config.dim
    return 2 * config.depth * (config.dim + config.feedforward)
