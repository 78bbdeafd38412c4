"""A performer with a softmax transformer's weights: the loss right after the swap and after finetuning."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from longspan import data
from longspan.attention.performer import Performer
from longspan.data import Dataset
from longspan.data.order import batch_indices
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.train import TrainConfig, bits, rate

from .._utils import palette
from .._utils.tables import Table
from .experiment import Buildable, Experiment, Place, Result, Row, drawing, setting
from .learning import finite, update

STARTS = ("swapped", "scratch")
# Additional weights of a performer: the random rows, which its seed determines.
ROWS = "projection"
# What a point in the picture shows -> (marker, filled, in words).
MARKS = {
    "swapped": ("o", False, "right after the swap"),
    "finetuned": ("o", True, "finetuned"),
    "redrawn": ("^", True, "finetuned, then other rows"),
    "scratch": ("X", True, "from scratch, as many steps"),
}


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale."""

    dim: int = setting(64, "width of the models", least=1, quick=8)
    depth: int = setting(3, "number of blocks", least=1, quick=1)
    heads: int = setting(4, "heads of each attention", least=1, quick=2)
    steps: int = setting(600, "training steps of the softmax transformer", least=1, quick=4)
    rate: float = setting(3e-3, "peak learning rate of its cosine schedule", positive=True)
    finetune: int = setting(150, "finetuning steps, and steps of the performer from scratch", least=1, quick=3)
    finetune_rate: float = setting(1e-3, "peak learning rate after the swap", positive=True)
    batch: int = setting(32, "images per step", least=1, quick=3)
    features: tuple[int, ...] = setting((16, 64, 256), "random rows per head of the performers", least=1, quick=(3,))
    draws: int = setting(5, "independent sets of rows for testing the swapped weights", least=1, quick=2)
    every: int = setting(10, "steps between two evaluations on validation images", least=1, quick=2)
    images: int = setting(0, "images per evaluation; 0: all", least=0, quick=2)
    seed: int = setting(0, "seed of weights, rows and order of the images")

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        self.config("softmax")

    def config(self, attention: str) -> DecoderConfig:
        """The decoder's: 64 pixels of 17 levels. Raises ValueError for inconsistent sizes."""
        size = {**self.same("dim", "depth", "heads"), "feedforward": 4 * self.dim}
        return DecoderConfig(attention=attention, vocab=17, positions="learned", length=64, **size)

    def performer(self, features: int) -> str:
        """The spec of a performer."""
        return f"performer(features={features}, seed={self.seed})"


def points(settings: Settings) -> list[Row]:
    """The softmax transformer, trained on as long as the performers; then both starts for each number of rows."""
    pairs = [{"start": start, "features": count} for count in sorted(settings.features) for start in STARTS]
    return [{"start": "softmax", "features": 0}, *pairs]


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """One training.

    -> ``curve``: [steps, bits per dim on the validation images], steps counted from the swap; of softmax its first
    training comes before, with steps below 0. ``test``: bits per dim of the test images at the end. Of a swapped one
    ``before``: test bits right after the swap, one for each set of rows, the first of which is the one that is trained;
    ``after``: the same with the finetuned weights.
    """
    if point["start"] == "scratch":
        model = fresh(settings, settings.performer(point["features"]))
        return {"curve": train(model, settings, settings.finetune, settings.rate, 0), "test": test(model, settings)}
    model, curve = trained(settings)
    if point["start"] == "softmax":
        found: Row = {"before": [test(model, settings)]}
        # A copy: other points start from the trained weights, too.
        model = swap(model, model.config.attention)
        more = train(model, settings, settings.finetune, settings.finetune_rate, settings.steps)
        return {**found, "curve": [*curve, *more[1:]], "test": test(model, settings)}
    model = swap(model, settings.performer(point["features"]))
    before = redrawn(model, settings)
    more = train(model, settings, settings.finetune, settings.finetune_rate, settings.steps)
    after = redrawn(model, settings)
    return {"before": before, "curve": more, "test": after[0], "after": after}


@lru_cache(maxsize=1)
def digits() -> Dataset:
    """The images inside scikit-learn, read once."""
    return data.load("digits")


def fresh(settings: Settings, spec: str) -> Decoder:
    """A decoder with initial weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return Decoder(settings.config(spec))


@lru_cache(maxsize=1)
def trained(settings: Settings) -> tuple[Decoder, list[list]]:
    """The softmax transformer at the time of the swap, and its curve. Treat it as read-only: other points share it."""
    model = fresh(settings, "softmax")
    curve = train(model, settings, settings.steps, settings.rate, 0)
    return model, [[step - settings.steps, value] for step, value in curve]


def swap(model: Decoder, spec: str) -> Decoder:
    """A new decoder with other attentions and the same weights; only a performer's rows are new.

    Raises ValueError where the attentions' weights differ otherwise, in names or in shapes.
    """
    with torch.random.fork_rng(devices=[]):
        other = Decoder(replace(model.config, attention=spec))
    try:
        missing, unknown = other.load_state_dict(model.state_dict(), strict=False)
    except RuntimeError as error:
        raise ValueError(f"{spec} has weights of other shapes than {model.config.attention}") from error
    own = [name for name in (*missing, *unknown) if not name.endswith(f".{ROWS}")]
    if own:
        raise ValueError(
            f"{spec} cannot take over the weights of {model.config.attention}: {own[0]} is in one of them only"
        )
    return other


def train(model: Decoder, settings: Settings, steps: int, highest: float, first: int) -> list[list]:
    """Train in place on the batches from number ``first``: [[steps made, validation bits]], from 0 on."""
    dataset = digits()
    run = TrainConfig(steps=steps, warmup=min(20, steps), learning_rate=highest, batch=settings.batch)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    curve = [[0, validation(model, settings)]]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(run, step)
        chosen = batch_indices(dataset.count("train"), settings.seed, first + step, settings.batch)
        tokens = dataset.take("train", chosen)
        with drawing(settings.seed, "step", first + step):
            outputs, _ = model(model.shift(tokens))
            loss = -model.likelihood.log_prob(outputs, tokens).mean()
            update(model, optimizer, finite(loss, f"at step {step} of {model.config.attention}"))
        if (step + 1) % settings.every == 0 or step + 1 == steps:
            curve.append([step + 1, validation(model, settings)])
    return curve


def validation(model: Decoder, settings: Settings) -> float:
    """Bits per dim of the validation images, rounded to what a file needs."""
    return round(bits(model, digits(), "validation", examples=settings.images), 5)


def test(model: Decoder, settings: Settings) -> float:
    """Bits per dim of the test images."""
    return round(bits(model, digits(), "test", examples=settings.images), 5)


def redrawn(model: Decoder, settings: Settings) -> list[float]:
    """Test bits with each of the independent sets of rows; the model keeps the first."""
    found = []
    # The first comes last, and stays.
    for step in reversed(range(settings.draws)):
        for attention in model.stack.attentions():
            assert isinstance(attention, Performer)
            attention.redraw(step)
        found.append(test(model, settings))
    return found[::-1]


def tables(result: Result) -> list[Table]:
    """Test bits of the images: right after the swap, over the sets of rows, and at the end."""
    steps = result["settings"]["finetune"]
    table = [["test bits per dim", "right after the swap", "least", "most", f"after {steps} steps", "with other rows"]]
    for row in result["rows"]:
        before, others = row.get("before", []), row.get("after", [])[1:]
        shown = [_mean(before), *(f"{end(before):.3f}" for end in (min, max) if len(before) > 1)]
        table.append([_name(row), *shown, *[""] * (3 - len(shown)), f"{row['test']:.3f}", _mean(others)])
    return [table]


def draw(plt: Any, result: Result) -> Any:
    """Left: loss right after the swap by number of rows. Right: the trainings, counted from the swap."""
    rows, settings = result["rows"], result["settings"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 5.2), layout="constrained", width_ratios=(2, 3))
    counts = sorted({row["features"] for row in rows if row["features"]})
    # The performers are shades of one color; softmax has its own.
    shades = plt.get_cmap("RdPu")([0.4 + 0.5 * i / max(len(counts) - 1, 1) for i in range(len(counts))])
    for row in rows:
        color = shades[counts.index(row["features"])] if row["features"] else palette.color("softmax")
        look = {"color": color, "linestyle": "--" if row["start"] == "scratch" else "-", "linewidth": 1.5}
        right.plot(*zip(*row["curve"], strict=True), label=_name(row), **look)
        if row["start"] == "softmax":
            left.axhline(row["before"][0], color="black", linewidth=1)
            continue
        found = {"scratch": [row["test"]]}
        if row["start"] == "swapped":
            found = {"swapped": row["before"], "finetuned": row["after"][:1], "redrawn": row["after"][1:]}
        for what, values in found.items():
            marker, filled, _ = MARKS[what]
            look = {"color": color, "marker": marker, "markerfacecolor": color if filled else "white"}
            left.plot([row["features"]] * len(values), values, linestyle="none", **look)
    for marker, filled, label in MARKS.values():
        look = {"color": "grey", "marker": marker, "markerfacecolor": "grey" if filled else "white"}
        left.plot([], [], linestyle="none", label=label, **look)
    left.plot([], [], color="black", linewidth=1, label="softmax, at the swap")
    left.set(title="test images", xlabel="rows of a performer's head", ylabel="bits per dim", xscale="log")
    left.set_xticks(counts, [str(count) for count in counts])
    left.minorticks_off()
    right.axvline(0, color="grey", linewidth=1, linestyle=":")
    right.set(title="validation images, while training", xlabel="steps after the swap", ylabel="bits per dim")
    right.set_xlim(-2 * settings["finetune"], None)
    # The first steps from scratch would hide the rest.
    right.set_ylim(None, 1.05 * max((row["curve"][0][1] for row in rows if row["start"] == "swapped"), default=1.0))
    for axis in (left, right):
        axis.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=1 + (axis is right))
        axis.grid(alpha=0.3)
    return figure


def _name(row: Row) -> str:
    return f"performer, {row['features']} rows, {row['start']}" if row["features"] else "softmax, trained on"


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else ""


EXPERIMENT = Experiment(
    about="what a performer retains of a trained softmax transformer whose weights it takes over",
    scales=Settings.scales(),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=draw,
    source="Choromanski et al. 2020 (2009.14794), figure 5 (left), where the model is a language model",
    differs=(
        "The model generates the digits of scikit-learn and is small enough for minutes; the published one is a "
        "language model. The publication shows curves without printed figures."
    ),
    data=lambda _: {"digits": digits().checksum},
    minutes=6.1,
)
