"""The Long Range Arena as tables and as one picture: accuracy, speed and memory."""

from statistics import mean
from typing import Any

from longspan._utils import spec
from longspan.attention.families import FAMILIES
from longspan.attention.registry import mechanism

from .._utils import plot_labels
from .._utils.tables import Table
from .experiment import Result, Row
from .lra_models import both
from .lra_published import TABLE
from .lra_published import TASKS as PUBLISHED

NONE = "none"
ERRORS = 2.0  # standard errors above a guess that count as learned
MARKS = (30.0, 900.0)  # sizes of the smallest and the largest mark, in square points


def order(result: Result) -> list[str]:
    """The mechanisms in measured order."""
    return list(dict.fromkeys(row["mechanism"] for row in result["rows"]))


def trainings(result: Result) -> dict[tuple[str, str], Row]:
    """Mechanism and task -> its row."""
    return {(row["mechanism"], row["task"]): row for row in result["rows"] if row["what"] == "training"}


def costs(result: Result) -> dict[str, Row]:
    """Mechanism -> cost of its step, where measured."""
    return {row["mechanism"]: row for row in result["rows"] if row["what"] == "cost" and "refused" not in row}


def learned(row: Row) -> bool:
    """Whether a test exceeds a guess of the most frequent class by ERRORS standard errors."""
    guess = row["majority"]
    return row["accuracy"] > guess + ERRORS * (guess * (1 - guess) / row["tests"]) ** 0.5


def common(result: Result) -> list[str]:
    """The tasks of all mechanisms."""
    return [task for task in result["settings"]["tasks"] if task != NONE]


def score(result: Result, name: str, tasks: list[str]) -> float | None:
    """Mean per cent over these tasks; None where one is not measured."""
    found = trainings(result)
    if not tasks or any((name, task) not in found for task in tasks):
        return None
    return 100 * mean(found[name, task]["accuracy"] for task in tasks)


def tables(result: Result) -> list[Table]:
    """Accuracies with what was not learned, ours compared with the published ones, and costs."""
    return [table for table in (_accuracies(result), _compared(result), _costs(result)) if len(table) > 1]


def _accuracies(result: Result) -> Table:
    found, tasks = trainings(result), [task for task in PUBLISHED if any(t == task for _, t in trainings(result))]
    table = [["test accuracy, %", "sees", "family", *tasks, "parameters", "not learned"]]
    if not tasks:
        return table
    guesses = [next(row["majority"] for (_, t), row in found.items() if t == task) for task in tasks]
    table.append(["a guess: the most frequent class", "", "", *(f"{100 * guess:.1f}" for guess in guesses), "", ""])
    for name in order(result):
        own = {task: found[name, task] for task in tasks if (name, task) in found}
        if not own:
            continue
        cells = [f"{100 * own[task]['accuracy']:.1f}" if task in own else "" for task in tasks]
        family = mechanism(spec.head(name) or name).family
        failed = [task for task, row in own.items() if not learned(row)]
        first = next(iter(own.values()))
        sees = "all" if both(name) else "the past"
        table.append([name, sees, family, *cells, f"{first['parameters']:,}", ", ".join(failed)])
    return table


def _compared(result: Result) -> Table:
    """Ours and the published ones, with the places of both among the rows of this table."""
    found = trainings(result)
    tasks = [task for task in PUBLISHED if all((row.mechanism, task) in found for row in TABLE)]
    table = [["ours | published, % (place)", *tasks]]
    if not tasks:
        return table
    ours = {task: {row.model: 100 * found[row.mechanism, task]["accuracy"] for row in TABLE} for task in tasks}
    theirs = {task: {row.model: row.accuracies[PUBLISHED.index(task)] for row in TABLE} for task in tasks}
    for row in TABLE:
        cells = []
        for task in tasks:
            one, other = ours[task], theirs[task]
            cells.append(
                f"{one[row.model]:.1f} ({place(one, row.model)}) | {other[row.model]:.2f} ({place(other, row.model)})"
            )
        table.append([f"{row.model}, {row.mechanism}", *cells])
    agree = [f"{agreement(list(ours[task].values()), list(theirs[task].values())):+.2f}" for task in tasks]
    table.append(["rank correlation", *agree])
    return table


def place(values: dict[str, float], name: str) -> int:
    """The place among these values, 1 for the highest."""
    return 1 + sum(value > values[name] for value in values.values())


def agreement(one: list[float], other: list[float]) -> float:
    """Spearman's rank correlation; equal values share their mean rank, and 0 stands for where all are equal.

    >>> agreement([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]), agreement([1.0, 1.0], [1.0, 2.0])
    (0.5, 0.0)
    """
    x, y = (_ranks(values) for values in (one, other))
    mx, my = mean(x), mean(y)
    spread = (sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y)) ** 0.5
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


def _ranks(values: list[float]) -> list[float]:
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


def _costs(result: Result) -> Table:
    settings, found = result["settings"], costs(result)
    base = found.get("softmax")
    what = f"a training step, {settings['cost_batch']} x {settings['cost_length']} tokens"
    table = [[what, "built", "steps a second", "of softmax's speed", "peak MB", "of softmax's memory"]]
    for row in (row for row in result["rows"] if row["what"] == "cost"):
        built = "" if row["spec"] == row["mechanism"] else row["spec"].removeprefix(row["mechanism"])
        if "refused" in row:
            table.append([row["mechanism"], built, "", "", "", row["refused"]])
            continue
        speed, memory = row["steps_per_second"], row["mb"]
        relative = f"{speed / base['steps_per_second']:.2f}" if base else ""
        less = f"{memory / base['mb']:.2f}" if base and memory is not None and base["mb"] else ""
        weight = "" if memory is None else f"{memory:.0f}"
        table.append([row["mechanism"], built, f"{speed:.2f}", relative, weight, less])
    return table


def draw(plt: Any, result: Result) -> Any:
    """Top: accuracy by speed, the mark as large as the memory. Bottom: our accuracies over the published ones."""
    figure, (left, right) = plt.subplots(2, 1, figsize=(9.4, 12), layout="constrained", height_ratios=(1.7, 1))
    named = _arena(left, result)
    _ordering(right, result)
    if named:
        plot_labels.put(left, *zip(*named, strict=True))
    return figure


def _arena(axis: Any, result: Result) -> list[tuple[str, float, float, float]]:
    """-> name, place and size of each mark."""
    tasks, found = common(result), costs(result)
    drawn = {name: score(result, name, tasks) for name in order(result) if name in found}
    families = [family for family in FAMILIES if any(_family(name) == family for name in drawn)]
    largest = max((row["mb"] or 0.0 for row in found.values()), default=0.0) or 1.0
    named = []
    for name, accuracy in drawn.items():
        if accuracy is None:
            continue
        row, color = found[name], f"C{families.index(_family(name))}"
        area = MARKS[0] + (MARKS[1] - MARKS[0]) * (row["mb"] or 0.0) / largest
        look = {"color": color} if both(name) else {"facecolors": "none", "edgecolors": color, "linewidths": 1.2}
        axis.scatter(row["steps_per_second"], accuracy, s=area, alpha=0.6, **look)
        named.append((name, row["steps_per_second"], accuracy, area))
    for i, family in enumerate(families):
        axis.scatter([], [], s=60, color=f"C{i}", alpha=0.6, label=family)
    for part in (1.0, 0.25):
        area = MARKS[0] + (MARKS[1] - MARKS[0]) * part
        axis.scatter([], [], s=area, facecolors="none", edgecolors="grey", label=f"{part * largest:,.0f} MB")
    axis.set(
        xscale="log",
        xlabel=f"training steps a second at {result['settings']['cost_length']} tokens",
        ylabel=f"test accuracy, %: {', '.join(tasks)}",
        title="better: up and to the right, and small; hollow: sees the past alone",
    )
    axis.xaxis.set_major_formatter("{x:g}")
    speeds = [row["steps_per_second"] for row in found.values()]
    # Over many decades the labels would overlap.
    axis.xaxis.set_minor_formatter("{x:g}" if speeds and max(speeds) < 100 * min(speeds) else "")
    axis.grid(alpha=0.3)
    # Room for the largest mark.
    room = {"labelspacing": 1.6, "handlelength": 4.0, "borderpad": 1.6}
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), **room)
    return named


def _ordering(axis: Any, result: Result) -> None:
    found = trainings(result)
    for i, task in enumerate(PUBLISHED):
        both_ = [row for row in TABLE if (row.mechanism, task) in found]
        if not both_:
            continue
        x = [row.accuracies[PUBLISHED.index(task)] for row in both_]
        y = [100 * found[row.mechanism, task]["accuracy"] for row in both_]
        label = f"{task}, rank correlation {agreement(y, x):+.2f}" if len(both_) > 4 else task
        axis.scatter(x, y, s=28, color=f"C{i}", marker="osD^v"[i], label=label)
    axis.set(xlabel="published accuracy, %", ylabel="our accuracy, %", title="compared with the published table")
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _family(name: str) -> str:
    return mechanism(spec.head(name) or name).family


DIFFERS = (
    "Published models are larger, sized per task, and train for 5,000 to 62,400 updates on sequences of 1,024 to "
    "4,000 tokens. Here one configuration serves all tasks, and the sequences are short. Minutes are enough to "
    "separate what learns from what does not and to order the rest roughly; the accuracies do not predict those on "
    "longer sequences. Windows, blocks, clusters and landmarks are a fixed part of the length, and other options keep "
    "their defaults; the table names them. Mechanisms with only a causal form use it and are marked as seeing the "
    "past. Cuts of sequences, symbols and rules are as published, with these exceptions. The image task uses "
    "scikit-learn's digits of 8 x 8 pixels unless you select CIFAR-10. Retrieval matches passages of one document, "
    "because the published corpus of papers is not free. Pathfinder's pictures are generated, in three levels of "
    "gray, with discs equally far apart in both classes, so that the distance gives no hint. The picks of sac learn "
    "from the likelihood, and the centers of routing from their members, as in `longspan train`; no penalty of a "
    "mechanism is added. The published speed and memory were measured on TPUs at 4,000 bytes of text; only their "
    "picture is reproduced."
)
