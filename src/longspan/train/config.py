"""The config of a training run, and pure functions of it: learning rate and seeds by step."""

import hashlib
import math
from dataclasses import dataclass, fields

from .._utils.spec import known
from .._utils.typecheck import check_fields, format_value

OPTIMIZERS = ("adamw", "radam")
SCHEDULES = ("cosine", "constant", "drop", "wsd")
PRECISIONS = ("32", "bf16")
LOGGERS = ("tensorboard", "csv", "wandb")
STRATEGIES = ("auto", "ddp", "fsdp")
# The largest values of some fields, and of all other numbers.
HIGHEST = {
    "batch": 1_000_000,
    "targets": 1_000_000,
    "devices": 10_000,
    "nodes": 10_000,
    "sequence_parallel": 10_000,
    "learning_rate": 1e19,
    "seed": 2**63 - 1,
}
MANY = 10**9
# Fields that only the training of a new model supports, with the values that turn them off.
NEW_MODEL = {"stream": False, "segments": False, "intermediate": False, "targets": 1, "penalty": 0.0, "ema": 0.0}
NEW_MODEL |= {"sequence_parallel": 1, "compile": False, "peak_tflops": 0.0, "devices": 1, "nodes": 1}
NEW_MODEL |= {"strategy": "auto"}


@dataclass(frozen=True)
class TrainConfig:
    """A training run. With a model's config it determines every bit of the result on one machine."""

    data: str = "digits"
    """data set: digits | mnist | cifar10 | text:stdlib | text:FILE | text:FOLDER | tokens:FOLDER | mnist:FOLDER |
    pairs:dates | pairs:reverse | pairs:FILE | labels:majority | labels:FILE | labels:FOLDER; paths are stored
    absolute"""
    length: int = 0
    """tokens per example of a text or of tokens, or largest number of tokens in a source or a target of pairs; 0: 256.
    Largest number of bytes read of a labeled text; 0: 1024"""
    stream: bool = False
    """read a text in order (truncated backpropagation through time): each row of the batch continues where it was, with
    its state, but without gradients through it. Each document (a file of a folder) starts with a fresh state. Requires
    attentions with a state of bounded size"""
    segments: bool = False
    """keep the documents of a text or of tokens apart: in a window, no token reads another document, and each document
    begins with the start token. Examples are then disjoint windows. Evaluations of the run do the same"""
    steps: int = 1000
    """optimizer steps"""
    batch: int = 32
    """examples per micro-batch and device, or group of ``sequence_parallel`` devices"""
    accumulate: int = 1
    """micro-batches per step (gradient accumulation)"""
    optimizer: str = "adamw"
    """optimizer: adamw | radam"""
    fused: bool = False
    """with adamw: PyTorch's fused kernel, one for all weights"""
    learning_rate: float = 1e-3
    """peak learning rate"""
    schedule: str = "cosine"
    """learning rate after warm-up: cosine (to 0 at the last step) | constant | drop (to a tenth after drop_at steps) |
    wsd (constant, then linearly to 0 in the last steps: warm-up, stable, decay)"""
    warmup: int = 0
    """steps of linear warm-up"""
    drop_at: int = 0
    """step at which schedule=drop lowers the learning rate"""
    decay: int = 0
    """steps of the decay of schedule=wsd; 0: a tenth of all steps"""
    final: float = 0.0
    """learning rate to which cosine and wsd fall, as a share of the peak"""
    weight_decay: float = 0.0
    """decoupled weight decay of matrices; not applied to biases, gains, decays, embeddings and position tables"""
    penalty: float = 0.0
    """weight of the auxiliary losses of mechanisms, summed over layers, such as the spans of adaptive_span, and of the
    policy-gradient loss of mechanisms that sample, such as sac"""
    intermediate: bool = False
    """intermediate losses: layer l of n also predicts, with a training-only head, until l / 2n of the training"""
    targets: int = 1
    """tokens predicted per position; those after the next one have training-only heads and weight 0.5"""
    clip: float = 1.0
    """largest gradient norm; 0: no clipping"""
    skip_nonfinite: int = 0
    """largest number of steps in a row that are skipped because their gradient is not finite: weights and optimizer
    stay, and the column skipped counts them. One more ends the training; 0: the first one does"""
    ema: float = 0.0
    """decay per step of an exponential moving average of the weights, such as 0.999. Checkpoints keep it for longspan
    eval --ema and longspan generate --ema; 0: none"""
    precision: str = "32"
    """precision: 32 | bf16 (autocast; weights, loss and evaluation stay in 32 bits)"""
    compile: bool = False
    """compile each block with torch.compile"""
    peak_tflops: float = 0.0
    """peak of one device in TFLOP/s, for the column mfu (model FLOPs utilization of a decoder): the share of it that
    products with weights reach. 0: that of the data sheet for known GPUs with precision=bf16, else no column"""
    logger: str = "tensorboard"
    """where metrics go besides metrics.csv: tensorboard | csv (nowhere else) | wandb (Weights & Biases)"""
    seed: int = 0
    """seed of initial weights, order of examples and dropout"""
    evaluate_every: int = 200
    """steps between evaluations on the validation split; the last step is always evaluated"""
    evaluate_examples: int = 0
    """examples per evaluation, evenly spaced over the split; 0: all"""
    save_every: int = 200
    """steps between checkpoints; the best and the last one are always kept"""
    keep: int = 2
    """number of latest checkpoints to keep"""
    devices: int = 1
    """number of GPUs of each machine, or of processes on the CPU"""
    nodes: int = 1
    """number of machines; torchrun or srun starts the processes on each of them"""
    strategy: str = "auto"
    """how several devices share the work: ddp (each has all weights) | fsdp (each has a part of the weights, gradients
    and optimizer states: FSDP2; checkpoints in parts) | auto (ddp)"""
    sequence_parallel: int = 1
    """number of devices that share each example of a text or of tokens: each has a part of its tokens, and trains as
    one device with the whole would. The other devices read other examples. It divides devices times nodes"""
    async_checkpoints: bool = False
    """with strategy fsdp: write checkpoints in the background, from a copy in CPU memory, while the training goes on"""
    timeout: int = 1800
    """seconds that one of several processes waits for another one, which may have stopped, before the training ends in
    an error. After a minute at one place, a process prints where it is"""
    seconds: float = 0.0
    """wall time in seconds after which to evaluate, save and stop; 0: no limit"""
    out: str = "runs/longspan"
    """run directory: config, metrics, checkpoints"""

    def __post_init__(self):
        check_fields(self)
        for name in (
            "steps",
            "batch",
            "accumulate",
            "evaluate_every",
            "save_every",
            "keep",
            "devices",
            "nodes",
            "sequence_parallel",
            "targets",
            "timeout",
        ):
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        for name in (
            "length",
            "warmup",
            "drop_at",
            "decay",
            "final",
            "skip_nonfinite",
            "ema",
            "peak_tflops",
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
        for name, choices in (
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("precision", PRECISIONS),
            ("logger", LOGGERS),
            ("strategy", STRATEGIES),
        ):
            known(getattr(self, name), dict.fromkeys(choices), name)
        _require(
            not (self.segments and self.stream),
            "segments=True has no effect with stream=True, which keeps documents apart anyway; pass segments=False",
        )
        self._check_devices()
        if self.schedule == "drop":
            _require(
                self.drop_at >= 1, "schedule='drop' requires drop_at >= 1, the step at which the learning rate drops"
            )
        else:
            _require(self.drop_at == 0, f"drop_at={self.drop_at} requires schedule='drop', not {self.schedule!r}")
        _require(
            not self.fused or self.optimizer == "adamw",
            f"fused=True requires optimizer='adamw', not {self.optimizer!r}",
        )
        _require(self.ema < 1, f"ema={self.ema} must be below 1")
        _require(self.final <= 1, f"final={self.final} must be at most 1, a share of learning_rate")
        if self.schedule not in ("cosine", "wsd"):
            _require(self.final == 0, f"final={self.final} requires schedule='cosine' or 'wsd', not {self.schedule!r}")
        if self.schedule != "wsd":
            _require(self.decay == 0, f"decay={self.decay} requires schedule='wsd', not {self.schedule!r}")
        for name in ("out", "data"):
            _require(
                "\0" not in getattr(self, name), f"{name}={getattr(self, name)!r} contains a NUL, which a path cannot"
            )
        _require(bool(self.out.strip()), "out is empty; name a folder for the run, e.g. runs/digits")

    def _check_devices(self) -> None:
        _require(
            not self.async_checkpoints or self.strategy == "fsdp",
            f"async_checkpoints=True requires strategy='fsdp', not {self.strategy!r}",
        )
        size = self.sequence_parallel
        if size == 1:
            return
        _require(
            self.world % size == 0,
            f"sequence_parallel={size} must divide the number of processes, which is {self.world} with "
            f"devices={self.devices} and nodes={self.nodes}",
        )
        for name, usual, why in (
            ("stream", False, "carries states from batch to batch"),
            ("intermediate", False, "has losses of whole rows"),
            ("targets", 1, "predicts tokens that other processes have"),
            ("penalty", 0.0, "weighs losses of whole rows"),
            ("compile", False, "compiles blocks, which exchange states then"),
        ):
            value = getattr(self, name)
            _require(
                value == usual,
                f"{name}={value} {why}, which sequence_parallel={size} does not support; pass {name}={usual} or "
                "sequence_parallel=1",
            )

    @property
    def world(self) -> int:
        """Number of processes on all machines."""
        return self.devices * self.nodes

    @property
    def readers(self) -> int:
        """Number of groups of processes that read different examples; without ``sequence_parallel`` each has one."""
        return self.world // self.sequence_parallel

    @property
    def step_examples(self) -> int:
        """Examples per optimizer step on all devices."""
        return self.batch * self.accumulate * self.readers


def refuse_new_model(run: TrainConfig, what: str) -> None:
    """Raise ValueError for a field in ``NEW_MODEL``, which ``what`` does not support."""
    for name, usual in NEW_MODEL.items():
        if getattr(run, name) != usual:
            raise ValueError(f"{what} does not support {name}={getattr(run, name)}; pass {name}={usual}")


def rate(run: TrainConfig, step: int) -> float:
    """The learning rate of a step.

    Args:
        run: the training run.
        step: number of the step, from 0.

    References:
        Cosine: Loshchilov and Hutter, 1608.03983, equation 5, one period. Drop: the linear transformer's 1e-3, then
        1e-4 (Katharopoulos et al., 2006.16236, section 4.1). Warm-up, stable, decay: Hu et al., 2404.06395, section 4;
        linear decay: Hägele et al., 2405.18392.

    >>> [rate(TrainConfig(steps=4, warmup=2, learning_rate=1.0, schedule="constant"), step) for step in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """
    if step < run.warmup:
        return run.learning_rate * (step + 1) / run.warmup
    match run.schedule:
        case "cosine":
            part = min(1.0, (step - run.warmup) / max(1, run.steps - run.warmup))
            return run.learning_rate * (run.final + (1 - run.final) * (1 + math.cos(math.pi * part)) / 2)
        case "drop":
            return run.learning_rate * (0.1 if step >= run.drop_at else 1.0)
        case "wsd":
            last = min(run.decay or max(1, run.steps // 10), max(1, run.steps - run.warmup))
            part = min(1.0, max(0.0, (step - run.steps + last) / last))
            return run.learning_rate * (1 - (1 - run.final) * part)
    return run.learning_rate


def step_seed(seed: int, index: int, rank: int) -> int:
    """The random seed of micro-batch ``index`` on ``rank``, so that no generator state needs to be saved."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index} {rank}".encode()).digest()[:8]) >> 1


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
