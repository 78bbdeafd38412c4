"""The choice of keys: images learned under sparse patterns of equal cost."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan import data, patterns
from longspan._utils import spec
from longspan.models.config import DecoderConfig
from longspan.train import TrainConfig, bits
from longspan.train.evaluate import default_batch_size

from .._utils import plots
from .._utils.tables import Table
from .experiment import Buildable, Experiment, Place, Result, Row, setting, training
from .images import DATA
from .learning import curve, slug, train_decoder


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale."""

    data: str = setting("mnist", "mnist, cifar10 (each also with :FOLDER) or digits", quick="digits")
    patterns: str = setting(
        "band(28); band(14) | columns(28); causal",
        "patterns, separated by semicolons, each joined with causal; all are compared with the first",
        quick="band(8); band(4) | columns(8)",
    )
    seeds: tuple[int, ...] = setting(
        (0, 1), "seeds of weights and order of the images; one training per pattern and seed", least=0
    )
    dim: int = setting(64, "width of the models", quick=8)
    depth: int = setting(2, "number of blocks", quick=1)
    heads: int = setting(4, "heads of each attention", quick=2)
    steps: int = setting(400, "number of training steps", quick=4)
    batch: int = setting(10, "images per training step", quick=3)
    learning_rate: float = setting(3e-3, "peak learning rate of a cosine schedule")
    warmup: int = setting(50, "number of warm-up steps", quick=1)
    evaluate_every: int = setting(100, "steps between two evaluations on validation images", quick=2)
    evaluate_examples: int = setting(250, "validation images per evaluation; 0: all", quick=2)
    tests: int = setting(1000, "test images at the end, evenly spaced; 0: all", least=0, quick=3)

    def __post_init__(self):
        super().__post_init__()
        spec.known(self.data.partition(":")[0], dict.fromkeys(DATA), "data set of images")
        names = [repr(patterns.parse(name)) for name in self.names()]
        if len(set(names)) < len(names):
            raise ValueError(f"patterns={self.patterns}: each of them must come once")
        self.run(Path("work"), 0)

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        for name in self.names():
            self.config(name)

    def names(self) -> list[str]:
        """The patterns, one per model."""
        return spec.split(self.patterns)

    def config(self, pattern: str, vocab: int = 256, length: int = 784) -> DecoderConfig:
        """A model's config. Raises ValueError for inconsistent sizes."""
        kind = {"vocab": vocab, "length": length, "feedforward": 4 * self.dim, **self.same("dim", "depth", "heads")}
        return DecoderConfig(attention=f"sparse(pattern={pattern!r})", positions="learned", **kind)

    def run(self, folder: Path, seed: int) -> TrainConfig:
        """A training in a folder. Raises ValueError for a field out of range."""
        return training(self, folder, seed=seed)


def points(settings: Settings) -> list[Row]:
    """Every training, seed by seed."""
    return [{"seed": seed, "pattern": name} for seed in settings.seeds for name in settings.names()]


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """Train, or resume an interrupted training.

    -> ``keys``: keys that a query sees, on average; ``curve``: [steps made, validation bits per dim];
    ``test``: test bits of the checkpoint with the best validation.
    """
    dataset, folder = data.load(settings.data), place.folder / f"{slug(point['pattern'])}-{point['seed']}"
    config = settings.config(point["pattern"], dataset.vocab, dataset.length)
    model = train_decoder(config, settings.run(folder, point["seed"]))
    found = bits(model, dataset, "test", default_batch_size(dataset.length), examples=settings.tests)
    seen = patterns.causal() & patterns.parse(point["pattern"])
    keys = seen.dense(dataset.length, heads=settings.heads).sum(-1).double().mean().item()
    line = [[step, value] for step, _, value in curve(folder)]
    return {"keys": round(keys, 1), "curve": line, "test": round(found, 5)}


def tables(result: Result) -> list[Table]:
    """For each pattern its cost, test bits over the seeds, and how it differs from the first, seed by seed."""
    table = [["pattern", "keys a query", "test bits per dim", "less than the first", "standard errors"]]
    first = _tests(result, _names(result)[0])
    for name in _names(result):
        found = _tests(result, name)
        if not found:
            continue
        keys = next(row["keys"] for row in result["rows"] if row["pattern"] == name)
        less = [first[seed] - found[seed] for seed in found if seed in first]
        shown = ["", ""]
        if name != _names(result)[0] and less:
            error = statistics.stdev(less) / len(less) ** 0.5 if len(less) > 1 else 0.0
            mean = statistics.mean(less)
            shown = [f"{mean:+.4f}", f"{mean / error:+.1f}" if error else "one seed"]
        table.append([name, f"{keys:.1f}", f"{statistics.mean(found.values()):.4f}", *shown])
    return [table]


# Rows and columns of the images, for drawing where the data are not.
GRIDS = {"digits": (8, 8), "mnist": (28, 28), "cifar10": (32, 32)}


def draw(plt: Any, result: Result) -> Any:
    """Left: validation bits by steps, a line for each training. Right: which keys one query sees, as an image."""
    names = _names(result)
    figure, axes = plt.subplots(
        1,
        1 + len(names),
        figsize=(4.4 + 1.7 * len(names), 3.6),
        layout="constrained",
        width_ratios=(2.4, *(1,) * len(names)),
    )
    for i, name in enumerate(names):
        rows = [row for row in result["rows"] if row["pattern"] == name]
        for j, row in enumerate(rows):
            label = f"{name}, {row['keys']} keys" if j == 0 else None
            axes[0].plot(*zip(*row["curve"], strict=True), color=f"C{i}", linewidth=1.2, alpha=0.8, label=label)
    axes[0].set(xlabel="training steps", ylabel="validation bits per dim")
    axes[0].grid(alpha=0.3)
    plots.legend(figure, axes[:1], 3)
    height, width = GRIDS[result["settings"]["data"].partition(":")[0]]
    query = (height // 2) * width + width // 2
    for name, axis in zip(names, axes[1:], strict=True):
        seen = patterns.causal() & patterns.parse(name)
        line = seen.allow(torch.tensor(query), torch.arange(height * width)).double()
        line[query] = 2.0
        axis.imshow(line.view(height, width).numpy(), cmap="Blues", vmin=0, vmax=2)
        axis.set(title=name.replace(" | ", " |\n"), xticks=[], yticks=[])
        axis.title.set_fontsize(9)
    return figure


def _names(result: Result) -> list[str]:
    return spec.split(result["settings"]["patterns"])


def _tests(result: Result, name: str) -> dict[int, float]:
    """Seed -> test bits."""
    return {row["seed"]: row["test"] for row in result["rows"] if row["pattern"] == name}


EXPERIMENT = Experiment(
    about="the choice of keys: images learned under sparse patterns of equal cost",
    scales=Settings.scales(),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=draw,
    source="Child et al. 2019 (1904.10509), section 4.2, which argues for columns without such a comparison",
    differs=(
        "No figure of this comparison is published: the publication trains large models on CIFAR-10 and ImageNet. "
        "Here a small model trains on MNIST for minutes, under two patterns with equally many keys per query and one "
        "with all keys."
    ),
    data=lambda settings: {settings.data.partition(":")[0]: data.load(settings.data).checksum},
    minutes=14.8,
)
