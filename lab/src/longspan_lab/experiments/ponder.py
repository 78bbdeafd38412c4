"""Adaptive computation time: number of steps for parities of increasing length."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder

from .._utils import plots
from .._utils.tables import Table
from .experiment import Buildable, Experiment, Place, Result, Row, generator, setting
from .learning import Learning, fresh, learn

FIXED = "all steps"


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale."""

    attention: str = setting("local(window=2)", "attention of the repeated block; window=2 adds one bit per step")
    penalties: tuple[float, ...] = setting(
        (0.002, 0.02), "weights of the ponder cost; one training each", quick=(0.01, 0.1)
    )
    bits: int = setting(6, "bits of a sequence; token t predicts the parity of the first t", least=1, quick=3)
    cap: int = setting(8, "maximum number of steps", least=1, quick=3)
    bias: float = setting(-2.0, "initial bias of the halting unit; -2 gives about eight steps")
    dim: int = setting(64, "width of the model", least=1, quick=8)
    heads: int = setting(2, "heads of the attention", least=1)
    feedforward: int = setting(128, "inner width of the feed-forward network", least=1, quick=8)
    batch: int = setting(64, "sequences per update", least=1, quick=3)
    steps: int = setting(600, "number of updates", least=1, quick=4)
    free: int = setting(300, "updates before steps have a price", least=0, quick=2)
    rate: float = setting(2e-3, "peak learning rate of a cosine schedule", positive=True)
    tests: int = setting(512, "test sequences", least=1, quick=5)
    seed: int = setting(0, "seed of weights and sequences", least=0)

    def __post_init__(self):
        super().__post_init__()
        if not self.penalties or not min(self.penalties) > 0:
            raise ValueError("penalties must be positive; a separate training without a penalty always runs")

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        fresh(self.config(1.0), self.seed)

    def config(self, penalty: float) -> DecoderConfig:
        """The model's config: one block that each token repeats until it halts, or ``cap`` times without a penalty."""
        stack = f"act(steps={self.cap}, bias={self.bias})" if penalty else f"universal(steps={self.cap})"
        size = self.same("dim", "heads", "feedforward")
        return DecoderConfig(**size, depth=1, attention=self.attention, vocab=2, positions="none", stack=stack)


def points(settings: Settings) -> list[Row]:
    """All steps for every token, and each weight of the ponder cost."""
    return [{"penalty": penalty} for penalty in (0.0, *settings.penalties)]


def draw_bits(settings: Settings, count: int, *names: object) -> tuple[Tensor, Tensor]:
    """Random bits (B,N), and the parity of those up to each: the same for the same names."""
    bits = torch.randint(0, 2, (count, settings.bits), generator=generator(settings.seed, *names))
    return bits, bits.cumsum(1) % 2


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """One training -> ``curve``: rows of ``step``, ``error`` (part of the parities that are wrong) and ``ponder`` (mean
    N + R); and at the end both by the number of bits, ``errors`` and ``ponders``, with ``steps``, the mean N.
    """
    penalty = point["penalty"]
    tests = draw_bits(settings, settings.tests, "test")

    def loss(model: Decoder, step: int) -> Tensor:
        bits, parity = draw_bits(settings, settings.batch, "train", step)
        record: dict = {"penalty": None}
        outputs, _ = model(bits, record=record)
        price = penalty if step >= settings.free else 0.0
        return F.cross_entropy(outputs.flatten(0, 1), parity.flatten()) + price * record.get("penalty", 0.0)

    def look(model: Decoder) -> Row:
        found = by_bits(model, *tests)
        return {"error": mean(found["errors"]), "ponder": mean(found["ponders"])}

    model = fresh(settings.config(penalty), settings.seed)
    learning = Learning(f"penalty-{penalty}", settings.seed, settings.steps, settings.rate, loss, look)
    curve = learn(model, learning, place)
    return {"curve": curve, **by_bits(model, *tests)}


@torch.no_grad()
def by_bits(model: Decoder, bits: Tensor, parity: Tensor) -> dict[str, list[float]]:
    """bits and their parities (B,N) -> for each number of bits wrong answers, ponder time N + R, and steps N."""
    record: dict = {"penalty": None}
    outputs, _ = model(bits, record=record)
    wrong = (outputs.argmax(-1) != parity).double().mean(0)
    count = torch.full_like(wrong, float(model.stack.run.steps))
    steps = record["steps"].double().mean(0) if "steps" in record else count
    ponder = record["ponder"].double().mean(0) if "ponder" in record else count
    return {
        name: [round(float(v), 4) for v in t] for name, t in (("errors", wrong), ("ponders", ponder), ("steps", steps))
    }


def mean(values: list[float]) -> float:
    """With four digits."""
    return round(sum(values) / len(values), 4)


def label(row: Row) -> str:
    """A training in words."""
    return f"ponder cost {row['penalty']:g}" if row["penalty"] else FIXED


def tables(result: Result) -> list[Table]:
    """Ponder time and errors by the number of bits."""
    count = result["settings"]["bits"]
    head = [str(n + 1) for n in range(count)]
    ponder: Table = [["ponder time N + R, by bits", *head, "mean"]]
    errors: Table = [["wrong parities, %, by bits", *head, "mean"]]
    for row in result["rows"]:
        ponder.append([label(row), *(f"{v:.1f}" for v in row["ponders"]), f"{mean(row['ponders']):.1f}"])
        errors.append([label(row), *(f"{100 * v:.1f}" for v in row["errors"]), f"{100 * mean(row['errors']):.1f}"])
    return [ponder, errors]


def draw(plt: Any, result: Result) -> Any:
    """Ponder time by bits, errors by bits, and mean ponder time and errors by updates."""
    figure, grid = plt.subplots(2, 2, figsize=(9.0, 7.4), layout="constrained")
    axes = grid.flat
    for i, row in enumerate(result["rows"]):
        look = {"color": f"C{i}", "label": label(row)}
        bits = range(1, len(row["errors"]) + 1)
        axes[0].plot(bits, row["ponders"], "o-", markersize=4, **look)
        axes[1].plot(bits, [100 * v for v in row["errors"]], "o-", markersize=4, **look)
        steps = [one["step"] for one in row["curve"]]
        axes[2].plot(steps, [one["ponder"] for one in row["curve"]], **look)
        axes[3].plot(steps, [100 * one["error"] for one in row["curve"]], **look)
    axes[0].set(title="ponder time by difficulty", xlabel="bits", ylabel="steps N + R of a token")
    axes[1].set(title="errors by difficulty", xlabel="bits", ylabel="wrong parities, %")
    axes[2].set(title="ponder time as it is learned", xlabel="updates", ylabel="mean N + R")
    axes[3].set(title="errors", xlabel="updates", ylabel="wrong parities, %")
    for axis in axes:
        axis.grid(alpha=0.3)
    for axis in (axes[1], axes[3]):
        # Zero errors are a line at the bottom, not in the middle.
        axis.set_ylim(0, max(5.0, axis.get_ylim()[1]))
    plots.legend(figure, axes)
    return figure


EXPERIMENT = Experiment(
    about="adaptive computation time on parities: ponder time by difficulty, at several prices of a step",
    scales=Settings.scales(),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=draw,
    source="Graves 2016 (1603.08983), section 3.1, whose figures show the same of a recurrent network; per token as in "
    "Dehghani et al. 2018 (1807.03819), section 2.2",
    differs=(
        "The publication trains recurrent networks that read a vector of up to 64 bits as one input, for a million "
        "updates. Here a block of a Universal Transformer reads one bit per token and predicts the parity of the "
        "first t bits at token t. Its attention sees one token to the left only, so a bit t tokens away needs t "
        "steps, and the difficulty is known. The halting unit starts at -2, about eight steps, instead of 1, two "
        "steps, from which a token would have to discover that more steps help. Steps are free for the first half of "
        "the training."
    ),
    minutes=1.5,
)
