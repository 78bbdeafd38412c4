"""Learned attention spans, with and without a penalty on their length."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from longspan import data
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.train import TrainConfig, bits
from longspan.train.evaluate import default_batch_size

from .._utils.tables import Table
from .experiment import Buildable, Experiment, Place, Result, Row, setting, training
from .learning import curve, train_decoder, trained

FREE, PRICED, WINDOW = "spans, no penalty", "spans, penalty", "fixed window"
VARIANTS = {FREE: "free", PRICED: "priced", WINDOW: "window"}


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale."""

    data: str = setting("text:stdlib", "a text: text:stdlib or text:PATH")
    length: int = setting(256, "bytes per example", quick=32)
    span: int = setting(128, "maximum span in tokens", quick=16)
    ramp: int = setting(16, "tokens over which the weights fall at the end of a span", quick=4)
    initial: float = setting(64.0, "initial span of all heads", quick=8.0)
    penalty: float = setting(
        3e-5, "weight of the spans in the loss: nats per token of mean span, per layer", quick=0.01
    )
    dim: int = setting(64, "width of the models", quick=8)
    depth: int = setting(3, "number of blocks", quick=2)
    heads: int = setting(4, "heads of each attention", quick=2)
    steps: int = setting(400, "number of training steps", quick=4)
    batch: int = setting(8, "examples per training step", quick=2)
    learning_rate: float = setting(3e-3, "peak learning rate of a cosine schedule")
    warmup: int = setting(50, "number of warm-up steps", quick=1)
    evaluate_every: int = setting(
        40, "steps between two records of the spans, with an evaluation on validation text", quick=2
    )
    evaluate_examples: int = setting(64, "validation examples per evaluation; 0: all", quick=2)
    tests: int = setting(256, "test examples at the end, evenly spaced; 0: all", least=0, quick=3)
    seed: int = setting(0, "seed of weights and order of the examples")

    def __post_init__(self):
        super().__post_init__()
        if self.data.partition(":")[0] != "text":
            raise ValueError(f"data={self.data}: spans are learned on text, text:stdlib or text:PATH")
        if self.penalty <= 0:
            raise ValueError(f"penalty={self.penalty} must be positive; the spans without one are learned in any case")
        self.run(PRICED, Path("work"))

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        with torch.random.fork_rng(devices=[]):
            Decoder(self.config(PRICED))

    def config(self, kind: str, window: int = 1) -> DecoderConfig:
        """A model's config. Raises ValueError for inconsistent sizes."""
        spans = f"adaptive_span(span={self.span}, ramp={self.ramp}, initial={self.initial})"
        attention = f"local(window={window})" if kind == WINDOW else spans
        size = self.same("dim", "depth", "heads", "length")
        return DecoderConfig(attention=attention, vocab=256, positions="learned", feedforward=4 * self.dim, **size)

    def run(self, kind: str, folder: Path) -> TrainConfig:
        """A training in a folder, with a checkpoint per evaluation. Raises ValueError for a field out of range."""
        penalty = self.penalty if kind == PRICED else 0.0
        return training(self, folder, penalty=penalty, keep=self.steps // max(self.evaluate_every, 1) + 1)


def points(settings: Settings) -> list[Row]:
    """Spans with and without a penalty, and a window of the same cost as the former."""
    return [{"kind": kind} for kind in VARIANTS]


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """Train, or resume an interrupted training.

    -> ``keys``: keys that a head reads for a query, mean over heads and layers; ``spans``: [steps made, the spans of
    the heads of each layer, in tokens], none for a window; ``curve``: [steps made, validation bits per byte]; ``test``:
    test bits of the checkpoint with the best validation.

    Raises ValueError for the window if the training with a penalty is missing.
    """
    kind = point["kind"]
    folder, dataset = place.folder / VARIANTS[kind], data.load(settings.data, settings.length)
    keys = round(cost(trained(place.folder / VARIANTS[PRICED]))) if kind == WINDOW else 0.0
    model, history = train_decoder(settings.config(kind, int(keys)), settings.run(kind, folder)), []
    if kind != WINDOW:
        keys, history = cost(model), learned(folder, settings)
    found = bits(model, dataset, "test", default_batch_size(dataset.length), examples=settings.tests)
    line = [[step, value] for step, _, value in curve(folder)]
    return {"keys": round(keys, 2), "spans": history, "curve": line, "test": round(found, 5)}


def spans(model: Decoder) -> list[list[float]]:
    """The spans of the heads of each layer, in tokens."""
    x = torch.zeros(1, 1, model.config.dim, device=model.device)
    return [attention.spans(x)[0, :, 0].tolist() for attention in model.stack.attentions()]  # pyright: ignore[reportCallIssue] (a method of the mechanism)


def cost(model: Decoder) -> float:
    """Keys with a weight above zero for a query far from the start: the mean of ceil(z + R)."""
    ramps = [attention.ramp for attention in model.stack.attentions()]
    return mean(math.ceil(z + ramp) for layer, ramp in zip(spans(model), ramps, strict=True) for z in layer)  # pyright: ignore[reportOperatorIssue] (ramp is a number)


def learned(folder: Path, settings: Settings) -> list[list]:
    """[steps made, spans] at the start and at each saved checkpoint."""
    found = [[0, [[settings.initial] * settings.heads] * settings.depth]]
    for path in sorted((folder / "checkpoints").glob("step-*")):
        layers = [[round(z, 2) for z in layer] for layer in spans(checkpoint.load(path))]
        found.append([checkpoint.read_config(path)["step"], layers])
    return found


def tables(result: Result) -> list[Table]:
    """What each costs and reaches; and the last spans, head by head."""
    rows = {row["kind"]: row for row in result["rows"]}
    first = [["", "mean span", "keys a query", "validation bits per byte", "test bits per byte"]]
    for kind, row in rows.items():
        layers = row["spans"][-1][1] if row["spans"] else []
        span = f"{mean(z for layer in layers for z in layer):.1f}" if layers else ""
        best = min(value for _, value in row["curve"])
        first.append([kind, span, f"{row['keys']:.1f}", f"{best:.4f}", f"{row['test']:.4f}"])
    second = [["spans of the heads", *(f"layer {i + 1}" for i in range(result["settings"]["depth"]))]]
    for kind, row in rows.items():
        if row["spans"]:
            second.append([kind, *(" ".join(f"{z:.0f}" for z in sorted(layer)) for layer in row["spans"][-1][1])])
    return [first, second]


def draw(plt: Any, result: Result) -> Any:
    """Spans by steps, a line for each head; the last spans by layer, in order; validation bits by steps."""
    figure, grid = plt.subplots(2, 2, figsize=(9.0, 7.4), layout="constrained")
    axes = grid.flat
    learning, longest = dict(zip((FREE, PRICED), axes, strict=False)), result["settings"]["span"]
    limits = (-0.03 * longest, longest)
    for i, row in enumerate(result["rows"]):
        label = f"{row['kind']}: {row['keys']:.0f} keys"
        axes[3].plot(*zip(*row["curve"], strict=True), color=f"C{i}", label=label)
        if row["spans"]:
            _by_steps(learning[row["kind"]], row["spans"])
            last = [z for layer in row["spans"][-1][1] for z in sorted(layer)]
            axes[2].plot(range(1, len(last) + 1), last, "o", color=f"C{i}", markersize=4, label=row["kind"])
    for kind, axis in learning.items():
        axis.set(title=kind, xlabel="training steps", ylabel="span of a head, tokens", ylim=limits)
    heads, depth = result["settings"]["heads"], result["settings"]["depth"]
    for layer in range(1, depth):
        axes[2].axvline(layer * heads + 0.5, color="grey", linewidth=0.8)
    ticks = [layer * heads + (heads + 1) / 2 for layer in range(depth)]
    axes[2].set_xticks(ticks, [f"layer {layer + 1}" for layer in range(depth)])
    axes[2].set(title="spans at the end", ylabel="span of a head, tokens", ylim=limits)
    axes[3].set(title="what they reach", xlabel="training steps", ylabel="validation bits per byte")
    for axis in axes:
        axis.grid(axis="y", alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=9)
    return figure


def _by_steps(axis: Any, history: list) -> None:
    steps = [step for step, _ in history]
    for layer, heads in enumerate(history[0][1]):
        for head in range(len(heads)):
            label = f"layer {layer + 1}" if head == 0 else None
            axis.plot(
                steps, [one[layer][head] for _, one in history], color=f"C{3 + layer}", linewidth=1.2, label=label
            )


EXPERIMENT = Experiment(
    about="learned attention spans on text, with and without a penalty, and a fixed window",
    scales=Settings.scales(),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=draw,
    source="Sukhbaatar et al. 2019 (1905.07799), the figure with the spans of every head, and the reported losses",
    differs=(
        "Published models are large, train on enwik8 and text8 for days, have spans of up to 8192 that start at 0, "
        "and relative positions. Here a small model trains on source code for minutes, with absolute positions. Its "
        "spans start in the middle, to show whether they grow or shrink, and the penalty is higher, because there is "
        "less time. The keys of a query are counted per head, ceil(z + R) for a span z and a ramp R; our kernels read "
        "as many keys for all heads of a layer as the widest needs. The fixed window is as long as the mean of these "
        "counts."
    ),
    data=lambda settings: {settings.data.partition(":")[0]: data.load(settings.data, settings.length).checksum},
    minutes=4.5,
)
