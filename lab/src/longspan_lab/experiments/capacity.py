"""Associations in a memory of fixed size: retrieval loss by number of keys, kernel and update rule."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from longspan._utils.spec import known

from .._utils import palette
from .._utils.tables import Table
from . import published, retrieval
from .experiment import Buildable, Experiment, Place, Result, Row, generator, setting
from .learning import finite

EVERY, DONE = 100, 1e-3
LIKE = {
    "gated": "mlstm",
    "levels": "log_linear",
    "general": "rwkv7",
    "regression": "mesa",
}  # the mechanism that has a rule


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale."""

    kinds: tuple[str, ...] = setting(
        tuple(retrieval.ENCODERS),
        f"without replacement: of {', '.join(retrieval.ENCODERS)}",
        quick=("linear", "dpfp1", "favor64-kept", "softmax"),
    )
    keys: tuple[int, ...] = setting(
        (60, 100, 200, 400), "without replacement: numbers of keys S", least=2, quick=(5, 13)
    )
    replacing: tuple[str, ...] = setting(
        ("linear", "dpfp1", "dpfp2"),
        "with replacement: kinds, each with the rules sum and delta, linear with all",
        quick=("linear",),
    )
    repeated: tuple[int, ...] = setting(
        (20, 60, 100, 200), "with replacement: numbers of keys S; 2 S tokens", least=2, quick=(5,)
    )
    size: int = setting(64, "channels of a key, D", least=1, quick=8)
    steps: int = setting(1000, "maximum number of training steps", least=1, quick=30)
    rate: float = setting(1e-3, "learning rate of Adam", positive=True)
    queries: int = setting(128, "minimum number of queries per step; a step reads whole sequences", least=1, quick=8)
    tests: int = setting(20, f"test sequences, every {EVERY} steps and at the end", least=1, quick=2)
    patience: int = setting(4, "tests without an improvement of 1 % before training stops", least=1)
    seed: int = setting(0, "seed of weights and sequences")

    def __post_init__(self):
        super().__post_init__()
        for name in (*self.kinds, *self.replacing):
            known(name, retrieval.ENCODERS, "kind")
        for name in self.replacing:
            if retrieval.ENCODERS[name].features is None:
                raise ValueError(f"replacing={name}: the delta rule needs a fixed feature map, which {name} has not")


def points(settings: Settings) -> list[Row]:
    """List every training, short sequences first, so that a useful picture exists early."""
    first = product(sorted(settings.keys), settings.kinds)
    rules = product(retrieval.RULES, settings.replacing)
    ways = [(rule, kind) for rule, kind in rules if rule in retrieval.BASIC or kind == "linear"]
    second = ((keys, *way) for keys, way in product(sorted(settings.repeated), ways))
    found: list[Row] = [{"keys": keys, "replaced": False, "rule": "sum", "kind": kind} for keys, kind in first]
    found += [{"keys": keys, "replaced": True, "rule": rule, "kind": kind} for keys, rule, kind in second]
    return sorted(found, key=lambda point: tokens(point["keys"], point["replaced"]))


def tokens(keys: int, replaced: bool) -> int:
    """The length of the sequences on which a training is made."""
    return 2 * keys if replaced else keys


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """Train once: the best test loss, also at the published length, and the steps made.

    Published tests with replacement have S tokens, after training with 2 S.
    """
    keys, replaced = point["keys"], point["replaced"]
    random = generator(settings.seed, point)
    model = retrieval.Retriever(keys, settings.size, point["kind"], point["rule"], random)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.rate)
    count, length = -(-settings.queries // keys), tokens(keys, replaced)
    best = {"loss": float("inf"), "loss_short": None}
    strikes = step = 0
    while step < settings.steps and strikes < settings.patience and best["loss"] > DONE:
        step += 1
        drawn = retrieval.draw(count, length, keys, replaced, random)
        loss = finite(model.loss(drawn, random), f"at step {step} of {point['kind']}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0 or step == settings.steps:
            found = test(model, length, replaced, settings.tests, random)
            strikes = 0 if found < 0.99 * best["loss"] else strikes + 1
            if found < best["loss"]:
                short = test(model, keys, replaced, settings.tests, random) if replaced else None
                best = {"loss": found, "loss_short": short}
    return {**{name: value for name, value in best.items() if value is not None}, "steps": step}


@torch.no_grad()
def test(model: retrieval.Retriever, length: int, replaced: bool, count: int, random: torch.Generator) -> float:
    """The mean loss over some sequences, one at a time: a batch of long ones would not fit the processor's cache."""
    drawn = (retrieval.draw(1, length, model.symbols, replaced, random) for _ in range(count))
    return sum(model.loss(sequences, random).item() for sequences in drawn) / count


def bound(capacity: int, keys: int) -> float:
    """The least loss of the sum rule without replacement, for all kernels with this many features.

    The weights W (S,S) have rank C at most, and half the squared error is |1 - W|^2 / (2 S), which by Eckart and Young
    is (S - C) / (2 S) at least.
    """
    return max(0.0, 1 - capacity / keys) / 2


def tables(result: Result) -> list[Table]:
    """One table without replacement and one with it: our losses, the published ones, the bound."""
    size, found = result["settings"]["size"], []
    for replaced, title in ((False, "no replacement: loss by keys"), (True, "replacement: loss by keys")):
        rows = [row for row in result["rows"] if row["replaced"] is replaced]
        columns = sorted({row["keys"] for row in rows})
        table = [[title, "features", *map(str, columns)]]
        for kind, rule in dict.fromkeys((row["kind"], row["rule"]) for row in rows):
            ours = {row["keys"]: row for row in rows if (row["kind"], row["rule"]) == (kind, rule)}
            features = capacity(kind, size)
            name = f"{kind}, {rule}" if replaced else kind
            table.append([name, str(features or "-"), *_losses(columns, {s: row["loss"] for s, row in ours.items()})])
            if replaced:
                short = {s: row["loss_short"] for s, row in ours.items()}
                table.append(["  tested with S tokens", "", *_losses(columns, short)])
            elif features and same(kind):
                table.append(["  bound by rank", "", *_losses(columns, {s: bound(features, s) for s in columns})])
            theirs = published.capacity(replaced, rule, kind) if size == 64 else {}
            if set(theirs) & set(columns):
                table.append(["  published", "", *_losses(columns, theirs)])
        if len(table) > 1:
            found.append(table)
    return found


def capacity(kind: str, size: int) -> int | None:
    """The number of features C; None for softmax."""
    features = retrieval.ENCODERS[kind].capacity
    return features and features(size)


def same(kind: str) -> bool:
    """Whether the kernel is the same in every call; only then the bound holds for a training."""
    one = retrieval.ENCODERS[kind]
    return one.kept or not one.rows


def _losses(columns: list[int], losses: dict[int, float]) -> list[str]:
    return [f"{losses[s]:.3f}" if s in losses else "" for s in columns]


def draw(plt: Any, result: Result) -> Any:
    """Loss by number of keys, without replacement and with it: lines are ours, crosses published, dots the bound."""
    settings = result["settings"]
    figure, axes = plt.subplots(2, 1, figsize=(8.4, 9.6), layout="constrained")
    looks = palette.looks(retrieval.ENCODERS)
    others = palette.looks(LIKE.values())
    for axis, replaced in zip(axes, (False, True), strict=True):
        rows = [row for row in result["rows"] if row["replaced"] is replaced]
        axis.set_title("keys drawn with replacement" if replaced else "each key once: sum rule")
        counts = sorted({row["keys"] for row in rows})
        for kind, rule in dict.fromkeys((row["kind"], row["rule"]) for row in rows):
            ours = [row for row in rows if (row["kind"], row["rule"]) == (kind, rule)]
            look = others[LIKE[rule]] if rule in LIKE else looks[kind]
            color, mark = look.color, look.marker
            style = "--" if replaced and rule == "sum" else "-"
            name, features = f"{kind}, {rule}" if replaced else kind, capacity(kind, settings["size"])
            label = f"{name}, {features}" if features else name
            # The published tests with replacement have S tokens, so these are shown there.
            losses = [row["loss_short" if replaced else "loss"] for row in ours]
            x = [row["keys"] for row in ours]
            axis.plot(x, losses, style, color=color, marker=mark, markersize=5, linewidth=0.8, label=label)
            theirs = published.capacity(replaced, rule, kind) if settings["size"] == 64 else {}
            both = [keys for keys in counts if keys in theirs]
            axis.plot(both, [theirs[keys] for keys in both], "x", color=color, markersize=8, markeredgewidth=1.6)
            if features and not replaced and same(kind) and counts[0] < counts[-1]:
                fine = [counts[0] + (counts[-1] - counts[0]) * i / 200 for i in range(201)]
                axis.plot(fine, [bound(features, keys) for keys in fine], ":", color=color, linewidth=1)
        axis.axhline(0.5, color="grey", linewidth=0.8)
        axis.set(xlabel="number of keys S", ylabel="loss (half the squared error); 0.5: chance", ylim=(-0.02, 0.56))
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.grid(alpha=0.3)
        if rows:
            place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
            axis.legend(fontsize=9, title="kind, features", title_fontsize=9, **place)
    figure.suptitle(
        "lines: ours; crosses: published; dots: least loss of any kernel with this number of features", fontsize=10
    )
    return figure


EXPERIMENT = Experiment(
    about="how many associations a memory of fixed size holds: retrieval loss by number of keys",
    scales=Settings.scales(),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=draw,
    source=f"Schlag et al. 2021 (2102.11174), section 6.1; published: {published.CAPACITY_SOURCE}",
    differs=(
        "A step here reads all keys of a few sequences; a published step reads one query of each of 32 sequences. "
        "Training makes at most 1000 steps instead of 100 000, so that minutes are enough. Where training was still "
        "improving at the last step (`steps` in the JSON file), the loss may lie above the published one for this "
        "reason."
    ),
    minutes=9.2,
)
