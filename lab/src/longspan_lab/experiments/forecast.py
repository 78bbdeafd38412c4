"""Informer's experiment: an electricity transformer's loads and oil temperature, predicted for a day to a month."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from longspan._utils import model_memory as weights
from longspan._utils import spec
from longspan.data.order import batch_indices

from .._utils import palette, plots
from .._utils.tables import Table
from ..data import series
from ..data.series import Series
from . import published
from .experiment import DEVICES, Buildable, Experiment, Place, Result, Row, check_device, drawing, setting
from .forecaster import PENALTIES, Forecaster, Ridge, last_day, last_value
from .learning import Learning, learn, parameters

VALUE, DAY, LINEAR = "the last value again", "the last day again", "linear map, ridge"
BASELINES: dict[str, Callable[[Tensor, int], Tensor] | None] = {VALUE: last_value, DAY: last_day, LINEAR: None}
# Predicted hours -> (hours that the encoder reads, hours that the decoder starts with), from the authors' scripts.
WINDOWS = {
    "all": {24: (48, 48), 48: (96, 48), 168: (168, 168), 336: (168, 168), 720: (336, 336)},
    "one": {24: (720, 168), 48: (720, 168), 168: (720, 336), 336: (720, 336), 720: (720, 336)},
}
# Values of a batch in tests, so that it needs no more memory than a training step.
TESTED = 2**15


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale.

    At the paper scale those of the authors' scripts for ETTh1; six epochs of its windows are about as many steps.
    """

    data: str = setting("ett", "ett (ETTh1, downloaded once), ett:FILE, ett:FOLDER, or synthetic", quick="synthetic")
    series: str = setting(
        "all", "all: predict every series from all; or a name: that series from itself (published: OT)"
    )
    specs: str = setting(
        "informer; softmax; linear; gla",
        "attentions, separated by semicolons; one model each",
        quick="informer(factor=1); linear",
    )
    horizons: tuple[int, ...] = setting((24, 48, 168, 336, 720), "numbers of hours to predict", least=1, quick=(6, 12))
    reads: int = setting(0, "hours that the encoder reads; 0: the published number for each horizon", least=0, quick=24)
    label: int = setting(0, "how many of these the decoder starts with; 0: the published number", least=0, quick=12)
    seeds: tuple[int, ...] = setting((0,), "seeds of weights, order of the windows and synthetic series", least=0)
    dim: int = setting(64, "width of the models", least=1, quick=8, gpu=512)
    heads: int = setting(4, "heads of each attention", least=1, quick=2, gpu=8)
    depth: int = setting(2, "number of encoder blocks; the decoder has one", least=1)
    feedforward: int = setting(128, "inner width of the feed-forward networks", least=1, quick=16, gpu=2048)
    steps: int = setting(150, "number of training steps", least=1, quick=4, gpu=1600)
    tokens: int = setting(
        4000, "hours per training step, which set the number of windows, at least 4", least=1, quick=200
    )
    batch: int = setting(0, "windows per training step; 0: set by --tokens", least=0, gpu=32)
    rate: float = setting(3e-3, "peak learning rate of a cosine schedule", positive=True, gpu=1e-4)
    every: int = setting(
        25, "steps between two evaluations on validation windows; the best weights are kept", least=1, quick=2, gpu=250
    )
    looked: int = setting(32, "validation windows per evaluation, evenly spaced; 0: all", least=0, quick=4, gpu=0)
    tests: int = setting(128, "test windows, evenly spaced; 0: all", least=0, quick=8, gpu=0)
    device: str = setting("cpu", "device: cpu or cuda", among=DEVICES, gpu="cuda")

    def __post_init__(self):
        super().__post_init__()
        series.parsed(self.data)
        if self.data == "synthetic" and len(self.seeds) > 1:
            raise ValueError("data=synthetic is made from the seed, so that several seeds would have several data")
        for horizon in self.horizons:
            self.window(horizon)

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        for one in spec.split(self.specs):
            if one in BASELINES:
                continue
            weights.shapes(lambda one=one: self.model(one, 1, 0))

    def window(self, horizon: int) -> tuple[int, int]:
        """Hours that the encoder reads, and how many of them the decoder starts with.

        Raises ValueError if nothing is published or set, and for a label longer than the input.
        """
        usual = WINDOWS["all" if self.series == "all" else "one"].get(horizon, (0, 0))
        reads, label = self.reads or usual[0], self.label or usual[1]
        if not reads or not label:
            raise ValueError(f"horizons={horizon}: nothing is published for it, so --reads and --label must say it")
        if label > reads:
            raise ValueError(f"label={label} hours are more than the {reads} that are read for horizon {horizon}")
        return reads, label

    def model(self, attention: str, channels: int, seed: int) -> Forecaster:
        """A model with initial weights that depend on the seed alone."""
        size = self.same("dim", "heads", "depth", "feedforward")
        with drawing(seed, "weights"):
            return Forecaster(attention, channels, **size)


def points(settings: Settings) -> list[Row]:
    """For each horizon the baselines, then the trainings. Raises ValueError if the requested GPU is
    asked for.
    """
    check_device(settings.device)
    found: list[Row] = []
    for horizon in sorted(settings.horizons):
        found += [{"model": name, "horizon": horizon} for name in BASELINES]
        trained = [(seed, name) for seed in settings.seeds for name in spec.split(settings.specs)]
        found += [{"model": name, "horizon": horizon, "seed": seed} for seed, name in trained]
    return found


@lru_cache(maxsize=1)
def loaded(name: str, only: str, seed: int) -> Series:
    """The series, read once."""
    return series.load(name, seed).only(only)


def data(settings: Settings) -> dict[str, str]:
    """The checksum of the file; nothing for synthetic series. Raises ValueError if the windows do not fit in it."""
    found = loaded(settings.data, settings.series, settings.seeds[0])
    for horizon, split in product(settings.horizons, series.SPLITS):
        found.windows(split, settings.window(horizon)[0], horizon)
    return {"ett": found.checksum} if found.checksum else {}


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """One forecast by one model, on unseen test windows.

    -> ``mse`` and ``mae``: mean squared and absolute errors of the standardized numbers. Of a training also ``curve``:
    validation errors by step; ``best``: the step whose weights are tested; ``parameters``. Of the linear map
    ``penalty``, which validation chose.
    """
    found = loaded(settings.data, settings.series, settings.seeds[0])
    horizon = point["horizon"]
    reads, _ = settings.window(horizon)
    begins = {split: found.windows(split, reads, horizon) for split in series.SPLITS}
    chosen = spaced(begins["test"], settings.tests)
    if point["model"] == LINEAR:
        return _ridge(found, begins, chosen, reads, horizon)
    if (same := BASELINES.get(point["model"])) is not None:
        return errors(lambda known, _: same(known, horizon), found, chosen, reads, horizon)
    return _trained(settings, point, place, found, begins, chosen)


def _ridge(found: Series, begins: dict[str, range], chosen: Tensor, reads: int, horizon: int) -> Row:
    ridge = Ridge(found.values, begins["train"], reads, horizon)
    validation = spaced(begins["validation"], 0)
    tried = {}
    for penalty in PENALTIES:
        weights = ridge.weights(penalty)
        error = errors(lambda known, _, w=weights: ridge.foretold(w, known), found, validation, reads, horizon)
        tried[penalty] = error["mse"]
    penalty = min(tried, key=tried.__getitem__)
    weights = ridge.weights(penalty)
    tested = errors(lambda known, _: ridge.foretold(weights, known), found, chosen, reads, horizon)
    return {**tested, "penalty": penalty, "parameters": weights.numel()}


def _trained(
    settings: Settings, point: Row, place: Place, found: Series, begins: dict[str, range], chosen: Tensor
) -> Row:
    horizon, seed = point["horizon"], point["seed"]
    reads, label = settings.window(horizon)
    order = spec.split(settings.specs).index(point["model"])
    name = f"{spec.head(point['model'])}-{order}-{horizon}-{seed}"
    model = settings.model(point["model"], found.values.shape[1], seed).to(settings.device)
    batch = settings.batch or max(4, settings.tokens // (reads + label + horizon))
    looked = spaced(begins["validation"], settings.looked)

    def foretold(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda known, times: model(known.to(settings.device), times.to(settings.device), label).cpu()

    def loss(model: nn.Module, step: int) -> Tensor:
        windows = begins["train"][0] + batch_indices(len(begins["train"]), seed, step, batch)
        known, times, targets = (one.to(settings.device) for one in taken(found, windows, reads, horizon))
        return (model(known, times, label) - targets).square().mean()

    def look(model: nn.Module) -> Row:
        error = errors(foretold(model), found, looked, reads, horizon)["mse"]
        kept = place.load(f"{name}-best")
        if kept is None or error < kept["mse"]:
            place.save(f"{name}-best", {"mse": error, "model": model.state_dict()})
        return {"mse": error}

    learning = Learning(name, seed, settings.steps, settings.rate, loss, look, settings.every)
    curve = learn(model, learning, place)
    best = place.load(f"{name}-best")
    assert best is not None
    model.load_state_dict(best["model"])
    tested = errors(foretold(model), found, chosen, reads, horizon)
    step = min(curve, key=lambda one: one["mse"])["step"]
    return {**tested, "curve": curve, "best": step, "parameters": parameters(model)}


def spaced(begins: range, count: int) -> Tensor:
    """``count`` of these, evenly spaced, the first and the last among them; all of them for 0 or more than there are.

    >>> spaced(range(10, 20), 4).tolist()
    [10, 13, 16, 19]
    """
    if not count or count >= len(begins):
        return torch.arange(begins.start, begins.stop)
    return begins.start + torch.arange(count) * (len(begins) - 1) // max(count - 1, 1)


def taken(found: Series, windows: Tensor, reads: int, horizon: int) -> tuple[Tensor, Tensor, Tensor]:
    """Windows (B,) by the first hour of the forecast -> known values (B,reads,C), the times of all of it
    (B,reads+horizon,4), and what comes (B,horizon,C).
    """
    at = windows[:, None] + torch.arange(-reads, horizon)
    values = found.values[at]
    return values[:, :reads], found.times[at], values[:, reads:]


@torch.no_grad()
def errors(
    foretold: Callable[[Tensor, Tensor], Tensor], found: Series, windows: Tensor, reads: int, horizon: int
) -> Row:
    """``mse`` and ``mae`` of ``foretold(known, times)`` over all hours and series of these windows."""
    squares, absolutes, count = 0.0, 0.0, 0
    for part in windows.split(max(1, TESTED // (reads + horizon))):
        known, times, targets = taken(found, part, reads, horizon)
        off = (foretold(known, times) - targets).double()
        squares, absolutes = squares + float(off.square().sum()), absolutes + float(off.abs().sum())
        count += off.numel()
    return {"mse": round(squares / count, 5), "mae": round(absolutes / count, 5)}


def means(result: Result) -> dict[str, dict[int, tuple[float, float]]]:
    """Model -> horizon -> squared and absolute error, means over the seeds."""
    found: dict[str, dict[int, list[Row]]] = {}
    for row in result["rows"]:
        found.setdefault(row["model"], {}).setdefault(row["horizon"], []).append(row)
    return {
        name: {
            horizon: (mean(row["mse"] for row in rows), mean(row["mae"] for row in rows))
            for horizon, rows in by.items()
        }
        for name, by in found.items()
    }


def of_the_paper(result: Result) -> dict[str, dict[int, tuple[float, float]]]:
    """The published errors for these series; empty for other data."""
    settings = result["settings"]
    return published.FORECAST.get(settings["series"], {}) if settings["data"].partition(":")[0] == "ett" else {}


def tables(result: Result) -> list[Table]:
    """Squared and absolute errors by horizon, ours and then the published; how each training went."""
    horizons = sorted(result["settings"]["horizons"])
    found, theirs = means(result), of_the_paper(result)
    head = ["squared / absolute error", *(f"{horizon} hours" for horizon in horizons)]
    first = [head, *(_line(name, errors, horizons) for name, errors in found.items())]
    shown = [first]
    if theirs:
        shown.append([["published", *head[1:]], *(_line(name, errors, horizons) for name, errors in theirs.items())])
    trainings = [["training", "hours", "seed", "parameters", "best step", "validation there", "validation at the end"]]
    for row in result["rows"]:
        if "curve" in row:
            best, last = min(one["mse"] for one in row["curve"]), row["curve"][-1]["mse"]
            trainings.append(
                [
                    row["model"],
                    str(row["horizon"]),
                    str(row["seed"]),
                    f"{row['parameters']:,}",
                    str(row["best"]),
                    f"{best:.3f}",
                    f"{last:.3f}",
                ]
            )
    return [*shown, trainings]


def _line(name: str, errors: dict[int, tuple[float, float]], horizons: list[int]) -> list[str]:
    cells = [errors.get(horizon) for horizon in horizons]
    return [name, *("" if cell is None else f"{cell[0]:.3f} / {cell[1]:.3f}" for cell in cells)]


def draw(plt: Any, result: Result) -> Any:
    """Squared and absolute errors by horizon: ours, the baselines dashed, the published dotted."""
    figure, axes = plt.subplots(1, 2, figsize=(9.4, 5.2), layout="constrained")
    horizons = sorted(result["settings"]["horizons"])
    lines = [(name, errors, "o-" if name not in BASELINES else "s--") for name, errors in means(result).items()]
    theirs = of_the_paper(result)
    looks = palette.looks(name for name, *_ in lines)
    for i, axis in enumerate(axes):
        for name, errors, look in lines:
            x = sorted(errors)
            axis.plot(
                x, [errors[one][i] for one in x], look, color=looks[name].color, label=name, markersize=5, linewidth=1.4
            )
        for name, errors in theirs.items():
            x = [one for one in horizons if one in errors]
            if name.startswith("Informer"):
                mark = "x:" if name == "Informer" else "+:"
                axis.plot(x, [errors[one][i] for one in x], mark, color=palette.BASELINE, label=f"{name}, published")
        if theirs:
            x = [one for one in horizons if all(one in errors for errors in theirs.values())]
            low, high = ([end(errors[one][i] for errors in theirs.values()) for one in x] for end in (min, max))
            axis.fill_between(x, low, high, color="grey", alpha=0.15, label="all that are published")
        axis.set(xscale="log", xlabel="hours predicted", title=("mean squared error", "mean absolute error")[i])
        axis.set_xticks(horizons, [str(horizon) for horizon in horizons])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    plots.legend(figure, axes, 3)
    return figure


EXPERIMENT = Experiment(
    about="forecasts of an electricity transformer by Informer, softmax, linear attention, GLA and a linear map",
    scales=Settings.scales("gpu", "paper"),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=draw,
    source=f"{published.FORECAST_SOURCE}, read in Gu et al. 2021 (2111.00396), tables 13 and 14",
    differs=(
        "Data, split, standardization and windows are as published. Test windows, which overlap by all but an hour, "
        "are subsampled at even distances, the same for all models. Published models are 512 wide with feed-forward "
        "networks of 2048 and dropout, and train for up to six epochs of batches of 32 with early stopping. Here they "
        "are small enough for minutes, train for one cosine schedule, and a step has as many windows as make equally "
        "many hours. `--scale paper` has the published sizes and batches, the cosine schedule, and no dropout. "
        "Distilling has no batch normalization, and the blocks normalize their inputs instead of their outputs. The "
        "decoder's ProbSparse attention is our causal form, which uses means instead of sums for inactive queries. "
        "The decoder reads the encoder by softmax attention in every model, so only the attention inside them "
        "differs. A recurrence has no bidirectional form and reads the encoder's input in order. The baselines (the "
        "last value, the last day, the linear map) are not in the publication. They read the same hours as the "
        "models, and show what a model must beat."
    ),
    data=data,
    minutes=4.6,
)
