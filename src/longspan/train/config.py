"""Runs: how a model is trained, as plain fields, and the pure functions of the step that follow from them."""

import hashlib
import math
from dataclasses import dataclass, fields

from .._utils.spec import known
from .._utils.typecheck import check_fields, format_value

OPTIMIZERS = ("adamw", "radam")
SCHEDULES = ("cosine", "constant", "drop")
PRECISIONS = ("32", "bf16")
# The largest values of fields; of those that are not named, of all numbers.
HIGHEST = {"batch": 1_000_000, "targets": 1_000_000, "devices": 10_000, "learning_rate": 1e19, "seed": 2**63 - 1}
MANY = 10**9


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Together with a model's config it determines every bit of the result on one machine."""

    data: str = "digits"
    """digits | mnist | cifar10 | text:stdlib | text:FILE | text:FOLDER | mnist:FOLDER | pairs:dates | pairs:reverse |
    pairs:FILE | labels:majority | labels:FILE | labels:FOLDER; paths are kept absolute"""
    length: int = 0
    """tokens per example of a text, or the most that a source or a target of pairs may have; 0: 256. Of a labelled text
    as many bytes are read; 0: 1024"""
    stream: bool = False
    """read a text in its order: each row of the batch goes on where it was, with the state that it had, through which
    no gradient goes back; documents (files of a folder) begin anew; for attentions with a state of bounded size"""
    steps: int = 1000
    """optimiser steps"""
    batch: int = 32
    """examples in a micro-batch, per device"""
    accumulate: int = 1
    """micro-batches whose gradients make one step"""
    optimizer: str = "adamw"
    """adamw | radam"""
    learning_rate: float = 1e-3
    """the highest learning rate"""
    schedule: str = "cosine"
    """cosine: down to 0 at the last step | constant | drop: to a tenth after drop_at steps; each after the warm-up"""
    warmup: int = 0
    """steps in which the learning rate rises linearly"""
    drop_at: int = 0
    """steps before schedule=drop lowers the learning rate"""
    weight_decay: float = 0.0
    """decoupled weight decay of matrices; biases, gains, decays, embeddings and tables of positions have none"""
    penalty: float = 0.0
    """weight of the loss that mechanisms add of their own, such as the spans of adaptive_span, summed over layers, and
    of that by which picks, such as those of sac, learn from each row's likelihood"""
    intermediate: bool = False
    """layer l of n predicts too, by a head that only training has, until l / 2n of the training is done"""
    targets: int = 1
    """tokens that each position predicts; those after the next one by heads that only training has, with weight 0.5"""
    clip: float = 1.0
    """largest norm of a step's gradient; 0: no limit"""
    precision: str = "32"
    """32 | bf16 (autocast; weights, loss and evaluation stay in 32 bits)"""
    seed: int = 0
    """initial weights, order of the examples, dropout"""
    evaluate_every: int = 200
    """steps between evaluations on the validation split; the last step is always followed by one"""
    evaluate_examples: int = 0
    """examples of a split that an evaluation takes, evenly spaced; 0: all"""
    save_every: int = 200
    """steps between checkpoints; the best one and the last one are always kept"""
    keep: int = 2
    """latest checkpoints that are kept"""
    devices: int = 1
    """GPUs, or processes on the CPU"""
    seconds: float = 0.0
    """wall time after which to evaluate, save and stop; 0: no limit"""
    out: str = "runs/longspan"
    """folder of the run: config, metrics, checkpoints"""

    def __post_init__(self):
        check_fields(self)
        for name in ("steps", "batch", "accumulate", "evaluate_every", "save_every", "keep", "devices", "targets"):
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        for name in (
            "length",
            "warmup",
            "drop_at",
            "weight_decay",
            "penalty",
            "clip",
            "evaluate_examples",
            "seed",
            "seconds",
        ):
            value = getattr(self, name)
            _require(value >= 0, f"{name}={value} must be at least 0")
        for field in fields(self):
            value, high = getattr(self, field.name), HIGHEST.get(field.name, MANY)
            if isinstance(value, int | float):
                _require(value <= high, f"{field.name}={format_value(value)} must be at most {high}")
        _require(self.learning_rate > 0, f"learning_rate={self.learning_rate} must be positive")
        for name, choices in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("precision", PRECISIONS)):
            known(getattr(self, name), dict.fromkeys(choices), name)
        if self.schedule == "drop":
            _require(self.drop_at >= 1, "schedule='drop' needs drop_at, the steps before the learning rate drops")
        else:
            _require(
                self.drop_at == 0, f"drop_at={self.drop_at} is read by schedule='drop' only, not {self.schedule!r}"
            )
        for name in ("out", "data"):
            _require("\0" not in getattr(self, name), f"{name}={getattr(self, name)!r} holds a NUL, which no path may")
        _require(bool(self.out.strip()), "out is empty; name a folder for the run, e.g. runs/digits")


def rate(run: TrainConfig, step: int) -> float:
    """The learning rate of step number ``step``, counted from 0.

    Cosine: Loshchilov and Hutter, 1608.03983, equation 5, one period. Drop: the linear transformer's 1e-3, then 1e-4
    (Katharopoulos et al., 2006.16236, section 4.1).

    >>> [rate(TrainConfig(steps=4, warmup=2, learning_rate=1.0, schedule="constant"), step) for step in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """
    if step < run.warmup:
        return run.learning_rate * (step + 1) / run.warmup
    match run.schedule:
        case "cosine":
            part = min(1.0, (step - run.warmup) / max(1, run.steps - run.warmup))
            return run.learning_rate * (1 + math.cos(math.pi * part)) / 2
        case "drop":
            return run.learning_rate * (0.1 if step >= run.drop_at else 1.0)
    return run.learning_rate


def step_seed(seed: int, index: int, rank: int) -> int:
    """The random seed of micro-batch ``index`` on ``rank``: dropout needs no generator whose state would be saved."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index} {rank}".encode()).digest()[:8]) >> 1


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
