"""How much a state of given size recalls: accuracy of multi-query associative recall, mechanism by mechanism."""

import math
import time
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from longspan._utils import model_memory, spec
from longspan.attention import build
from longspan.train import TrainConfig, rate

from .._utils import palette
from .._utils.tables import Table
from . import recall
from .experiment import Buildable, Experiment, Place, Result, Row, drawing, generator, setting
from .learning import closest, parameters, update

SPECS = (
    "softmax",
    "linear",
    "polynomial(taylor=True)",
    "performer",
    "rfa(gate=True)",
    "fast_weights",
    "retention",
    "gla",
    "ssd",
    "deltanet",
    "gated_deltanet",
    "kda",
    "rwkv7",
    "mamba",
    "mamba3",
    "mlstm",
    # Levels for the 64 tokens of the longest sequences; a level more only makes the state larger.
    "log_linear(levels=7)",
)
EVERY, DONE = 50, 0.995
REFERENCE, RATIO = "softmax", 4  # the model whose number of weights others match, and its feed-forward's width / dim
EQUAL = {"width": "feed-forward networks of width 2 dim", "weights": "as many weights as the reference"}


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale."""

    specs: str = setting(
        "; ".join(SPECS), "attentions, separated by semicolons; one model each", quick="softmax; deltanet"
    )
    dims: tuple[int, ...] = setting(
        (8, 16, 32), "widths of the models, which set the size of the states", least=1, quick=(4, 8)
    )
    rates: tuple[float, ...] = setting((1e-2, 3e-2), "learning rates; the best one counts", quick=(1e-2,))
    heads: int = setting(1, "heads of each attention", least=1)
    depth: int = setting(1, "number of blocks", least=1)
    pairs: tuple[int, ...] = setting(
        (2, 4, 8, 16), "numbers of key-value pairs in a sequence, in turns during training", least=1, quick=(2, 3)
    )
    tokens: int = setting(
        4, "tokens per pair in a sequence; more than 4 leave blanks between queries", least=4, quick=5
    )
    vocab: int = setting(32, "vocabulary size: half keys, half values", quick=8)
    steps: int = setting(
        500, f"training steps at most; fewer where all but {1 - DONE:.1%} is recalled", least=1, quick=9
    )
    equal: str = setting(
        "width",
        "what the models share: width (with feed-forward networks twice as wide) | weights (of one width, and with "
        "feed-forward networks that make their numbers of weights equal)",
        among=EQUAL,
    )
    seconds: float = setting(
        0.0, "seconds of processor time to train each model, instead of steps; tests do not count (0: steps)", least=0
    )
    batch: int = setting(32, "sequences per training step", least=1, quick=4)
    tests: int = setting(256, "test sequences for each number of pairs", least=1, quick=8)
    seed: int = setting(0, "seed of weights and sequences")

    def __post_init__(self):
        super().__post_init__()
        if not all(rate > 0 for rate in self.rates):
            raise ValueError(f"rates={','.join(map(str, self.rates))} must be positive")
        if self.vocab < 2 * max(self.pairs):
            raise ValueError(f"vocab={self.vocab} must be at least {2 * max(self.pairs)}, twice the number of pairs")

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        for name, dim in product(spec.split(self.specs), self.dims):
            build(name, dim, self.heads)
            feedforward(self, name, dim)


def points(settings: Settings) -> list[Row]:
    """Every training, the narrow models first."""
    found = product(sorted(settings.dims), spec.split(settings.specs), settings.rates)
    return [dict(zip(("dim", "spec", "rate"), point, strict=True)) for point in found]


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """Train once: accuracy for each number of pairs on new sequences, bytes of the state, steps made.

    With equal weights or time also ``parameters``, and ``seconds`` of the processor.
    """
    random = generator(settings.seed, point)
    inner = feedforward(settings, point["spec"], point["dim"])
    with drawing(settings.seed, point):
        model = recall.Recaller(point["spec"], point["dim"], settings.heads, settings.depth, settings.vocab, inner)
    run = TrainConfig(steps=settings.steps, warmup=min(50, settings.steps), learning_rate=point["rate"])
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    if settings.seconds:
        # What the first call compiles and allocates is not timed.
        model.loss(draw(settings, max(settings.pairs), settings.batch, generator(0))).backward()
    step, spent = 0, 0.0
    while (part := spent / settings.seconds if settings.seconds else step / settings.steps) < 1:
        optimizer.param_groups[0]["lr"] = rate(run, int(part * settings.steps) if settings.seconds else step)
        begin = time.process_time()
        sequences = draw(settings, settings.pairs[step % len(settings.pairs)], settings.batch, random)
        with drawing(settings.seed, point, "step", step):
            update(model, optimizer, model.loss(sequences))
        spent += time.process_time() - begin
        step += 1
        if step % EVERY == 0 and min(test(model, settings, settings.batch, random)) >= DONE:
            break
    found = test(model, settings, settings.tests, generator(settings.seed, "test"))
    held = model.state_bytes(settings.tokens * max(settings.pairs))
    row = {"accuracy": [round(one, 4) for one in found], "bytes": held, "steps": step}
    if settings.seconds or inner:
        row |= {"parameters": parameters(model), "seconds": round(spent, 1)}
    return row


def feedforward(settings: Settings, name: str, dim: int) -> int:
    """The width of a model's feed-forward networks, 0 for that of ``Recaller``.

    Raises ValueError where the attention alone has more weights than a whole block of softmax.
    """
    if settings.equal == "width":
        return 0

    def count(name: str, inner: int) -> int:
        sizes = dim, settings.heads, settings.depth, settings.vocab, inner
        return parameters(model_memory.shapes(lambda: recall.Recaller(name, *sizes)))

    target = count(REFERENCE, RATIO * dim)
    if count(name, 1) > target:
        raise ValueError(f"dims={dim}: {name} has more than the {target:,} weights of {REFERENCE}; leave it out")
    return closest(lambda inner: count(name, inner), target)


def draw(settings: Settings, pairs: int, count: int, random: torch.Generator) -> recall.Sequences:
    """Sequences of the settings' size."""
    return recall.draw(count, pairs, settings.tokens * pairs, settings.vocab, random)


def test(model: recall.Recaller, settings: Settings, count: int, random: torch.Generator) -> list[float]:
    """Accuracy on ``count`` new sequences for each number of pairs."""
    return [model.accuracy(draw(settings, pairs, count, random)) for pairs in settings.pairs]


def best(rows: list[Row]) -> list[Row]:
    """The best learning rate of each spec and width, in measured order."""
    chosen: dict[tuple, Row] = {}
    for row in rows:
        key = row["spec"], row["dim"]
        if key not in chosen or sum(row["accuracy"]) > sum(chosen[key]["accuracy"]):
            chosen[key] = row
    return list(chosen.values())


def tables(result: Result) -> list[Table]:
    """One row for each spec and width: bytes of the state, accuracy by number of pairs."""
    order = spec.split(result["settings"]["specs"])
    rows = sorted(best(result["rows"]), key=lambda row: (order.index(row["spec"]), row["dim"]))
    head = ["attention", "dim", "bytes of the state", *(f"{pairs} pairs" for pairs in result["settings"]["pairs"])]
    several = len(result["settings"]["rates"]) > 1
    more = ["parameters", "seconds"] if result["rows"] and "seconds" in result["rows"][0] else []
    table = [[*head, "steps", *(["rate"] if several else []), *more]]
    for row in rows:
        shares = [f"{share:.3f}" for share in row["accuracy"]]
        rates = [f"{row['rate']:g}"] if several else []
        facts = [f"{row['parameters']:,}", f"{row['seconds']:.1f}"] if more else []
        table.append([row["spec"], str(row["dim"]), f"{row['bytes']:,}", *shares, str(row["steps"]), *rates, *facts])
    return [table]


def picture(plt: Any, result: Result) -> Any:
    """One panel for each number of pairs: accuracy over the bytes of the state, one line for each spec."""
    settings, rows = result["settings"], best(result["rows"])
    columns = min(2, len(settings["pairs"]))
    lines = -(-len(settings["pairs"]) // columns)
    size = {"figsize": (3.6 * columns + 1.9, 3.4 * lines + 0.5), "layout": "constrained"}
    figure, axes = plt.subplots(lines, columns, sharey=True, sharex=True, squeeze=False, **size)
    for axis in axes.flat[len(settings["pairs"]) :]:
        axis.remove()
    looks = palette.looks(spec.split(settings["specs"]))
    for i, (axis, pairs) in enumerate(zip(axes.flat, settings["pairs"], strict=False)):
        for name in spec.split(settings["specs"]):
            found = sorted((row for row in rows if row["spec"] == name), key=lambda row: row["bytes"])
            look = {**looks[name]._asdict(), "markersize": 6, "linewidth": 1.2, "alpha": 0.85}
            x, y = [row["bytes"] for row in found], [row["accuracy"][i] for row in found]
            axis.plot(x, y, label=name if i == 0 else None, **look)
        axis.axhline(1 / pairs, color="grey", linewidth=1, linestyle=":")
        axis.set(title=f"{pairs} pairs", xscale="log", ylim=(0, 1.04))
        axis.grid(alpha=0.3)
    # Whole powers of ten, since labels between them would overlap.
    low, high = axes.flat[0].get_xlim()
    axes.flat[0].set_xlim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    figure.supxlabel("bytes of the state of one sequence")
    figure.supylabel("share of the values recalled (dots: a guess among those that came)", fontsize="medium")
    figure.legend(loc="outside right center", fontsize=9)
    return figure


EXPERIMENT = Experiment(
    about="how much a state of given size recalls: accuracy of multi-query associative recall",
    scales=Settings.scales(),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=picture,
    source="Arora et al. 2023 (2312.04927), figure 2, of which no figures are published",
    differs=(
        "One block instead of two. One short convolution precedes it for every mechanism, softmax included; the "
        "published models have convolutions in some mechanisms only, and need the second block to bring a key to its "
        "value. Mechanisms with built-in short convolutions keep them. There is also a feed-forward network, and the "
        "task is small enough for a laptop: 16 keys and 16 values, 4 tokens for each pair, 500 steps at most."
    ),
    minutes=13.8,
)
