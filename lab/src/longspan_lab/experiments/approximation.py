"""Random features as an approximation of softmax: errors of the kernel and the output by number of features."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from longspan._utils.spec import known
from longspan.ops.linear import random_features, stabilized
from longspan.ops.softmax import dense

from .._utils import palette
from .._utils.tables import Table
from .experiment import Buildable, Experiment, Place, Result, Row, generator, setting

Features = Callable[[Tensor, Tensor], random_features.Parts]
# name -> (feature map, features of one row)
ESTIMATORS: dict[str, tuple[Features, int]] = {
    "positive": (random_features.positive, 1),
    "hyperbolic": (random_features.hyperbolic, 2),
    "trigonometric": (random_features.trigonometric, 2),
}
ROWS = ("iid", "orthogonal")
COLORS = dict(zip(ESTIMATORS, palette.OTHERS, strict=False))
EPS = 1e-6


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale."""

    estimators: tuple[str, ...] = setting(tuple(ESTIMATORS), f"of {', '.join(ESTIMATORS)}")
    features: tuple[int, ...] = setting(
        (16, 32, 64, 128, 256, 512, 1024), "even numbers of features", least=2, quick=(8, 16)
    )
    size: int = setting(16, "channels of a head, D", least=2, quick=4)
    length: int = setting(512, "number of queries, keys and values, all Gaussian", least=1, quick=7)
    spreads: tuple[float, ...] = setting((0.5, 1.0), "standard deviations of queries and keys", quick=(0.5,))
    draws: int = setting(20, "independent sets of rows for the output", least=2, quick=3)
    pairs: int = setting(1000, "independent sets of rows for the kernel of single pairs", least=2, quick=5)
    angles: tuple[int, ...] = setting(
        tuple(range(0, 181, 15)),
        "degrees between a query and a key, scaled to length 1",
        least=0,
        quick=(0, 90, 135, 180),
    )
    seed: int = setting(0, "seed of queries, keys, values and rows")

    def __post_init__(self):
        super().__post_init__()
        for name in self.estimators:
            known(name, ESTIMATORS, "estimator")
        if min(self.spreads) <= 0:
            raise ValueError(f"spreads={min(self.spreads)} must be positive")
        if max(self.angles) > 180:
            raise ValueError(f"angles={max(self.angles)} must be at most 180 degrees")
        if odd := [f"{number}" for number in self.features if number % 2]:
            raise ValueError(f"features={odd[0]} must be even: most maps make two of each row")


def points(settings: Settings) -> list[Row]:
    """Every combination, the cheap ones first."""
    found = product(sorted(settings.features), settings.estimators, ROWS)
    return [dict(zip(("features", "estimator", "rows"), point, strict=True)) for point in found]


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """Errors of one number of features, with their standard errors.

    ``kernel``: for each angle the mean of (estimate / e^(q.k) - 1)^2, |q| = |k| = 1; ``formula``: its expectation
    for independent rows. ``output``: for each spread the geometric mean of |o - exact|^2 / |exact|^2, of which single
    draws may lie orders of magnitude apart; ``output_se`` is that of its natural logarithm.
    """
    features, each = ESTIMATORS[point["estimator"]]
    rows, random = point["features"] // each, generator(settings.seed, point)
    options = {"rows": point["rows"], "radii": "chi", "generator": random}
    queries, keys = pairs(settings)  # (A,1,D)
    w = random_features.sample(settings.pairs, rows, settings.size, **options)[:, None]  # (P,1,m,D)
    exact = (queries * keys).sum(-1).exp()  # (A,1)
    squares = (random_features.estimate(queries, keys, w, features)[..., 0] / exact - 1).square()[..., 0]  # (P,A)
    formula = random_features.variance(queries, keys, point["estimator"]) / (exact.square() * rows)
    w = random_features.sample(settings.draws, rows, settings.size, **options)
    logs = torch.stack([output_errors(settings, w, features, spread) for spread in settings.spreads]).log()  # (S,R)
    return {
        "kernel": _digits(squares.mean(0)),
        "kernel_se": _digits(squares.std(0) / settings.pairs**0.5),
        "formula": _digits(formula[:, 0]),
        "output": _digits(logs.mean(-1).exp()),
        "output_se": _digits(logs.std(-1) / settings.draws**0.5),
    }


def output_errors(settings: Settings, w: Tensor, features: Features, spread: float) -> Tensor:
    """|o - exact|^2 / |exact|^2 of bidirectional attention for each set of rows: w (R,m,D) -> (R,)."""
    random = generator(settings.seed, "inputs")
    q, k, v = torch.randn(3, 1, 1, settings.length, settings.size, generator=random, dtype=torch.float64)
    q, k, scale = spread * q, spread * k, settings.size**-0.25
    exact = dense.attend(q, k, v)
    errors = []
    # One by one: together they would take some hundred megabytes.
    for rows in w:
        o, _ = stabilized.attend(features(scale * q, rows), features(scale * k, rows), v, causal=False, eps=EPS)
        errors.append((o - exact).square().sum() / exact.square().sum())
    return torch.stack(errors)


def pairs(settings: Settings) -> tuple[Tensor, Tensor]:
    """A query and a key of length 1 for each angle, in directions that no coordinate singles out: (A,1,D) each."""
    random = generator(settings.seed, "directions")
    plane = random_features.haar(torch.randn(settings.size, settings.size, generator=random, dtype=torch.float64))[:2]
    angles = torch.tensor(settings.angles, dtype=torch.float64).deg2rad()[:, None]
    keys = angles.cos() * plane[0] + angles.sin() * plane[1]
    return plane[0].expand_as(keys)[:, None], keys[:, None]


def tables(result: Result) -> list[Table]:
    """The output's error by number of features, and the kernel's at one angle with its formula."""
    settings, columns = result["settings"], sorted({row["features"] for row in result["rows"]})
    angle = _shown(settings["angles"])
    at = settings["angles"].index(angle)
    found = [
        _table(result, columns, f"output, inputs of deviation {spread:g}: relative error by features", "output", i)
        for i, spread in enumerate(settings["spreads"])
    ]
    return [*found, _table(result, columns, f"kernel at {angle} degrees: relative error by features", "kernel", at)]


def _table(result: Result, columns: list[int], title: str, figure: str, at: int) -> Table:
    table = [[title, *map(str, columns)]]
    for (estimator, kind), rows in _series(result).items():
        names = {figure: f"{estimator}, {kind}"} | (
            {"formula": "  formula"} if (figure, kind) == ("kernel", "iid") else {}
        )
        for key, name in names.items():
            errors = {row["features"]: f"{row[key][at] ** 0.5:.3g}" for row in rows}
            table.append([name, *(errors.get(column, "") for column in columns)])
    return table


def _series(result: Result) -> dict[tuple[str, str], list[Row]]:
    """(estimator, rows) -> the points by number of features."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in result["rows"]:
        found.setdefault((row["estimator"], row["rows"]), []).append(row)
    return found


def draw(plt: Any, result: Result) -> Any:
    """The kernel by features and by angle with the formulas; the output by features for each spread."""
    settings = result["settings"]
    angles, spreads, counts = settings["angles"], settings["spreads"], sorted({r["features"] for r in result["rows"]})
    shown, count = _shown(angles), counts[len(counts) // 2]
    at = angles.index(shown)
    lines = -(-(2 + len(spreads)) // 2)
    figure, axes = plt.subplots(lines, 2, figsize=(9.0, 4.0 * lines), layout="constrained", squeeze=False)
    left, right, *outputs = axes.flat
    for (estimator, kind), rows in _series(result).items():
        color, filled = COLORS[estimator], kind == "orthogonal"
        look = {"color": color, "marker": "s" if filled else "o", "markersize": 5, "label": f"{estimator}, {kind}"}
        look |= {"markerfacecolor": color if filled else "white", "linewidth": 1}
        x = [row["features"] for row in rows]
        (same,) = (row for row in rows if row["features"] == count)
        _points(left, x, [row["kernel"][at] for row in rows], [row["kernel_se"][at] for row in rows], look)
        _points(right, angles, same["kernel"], same["kernel_se"], look)
        if kind == "iid":
            left.plot(x, [row["formula"][at] ** 0.5 for row in rows], color=color, linewidth=1)
            right.plot(angles, [error**0.5 for error in same["formula"]], color=color, linewidth=1)
        for i, axis in enumerate(outputs[: len(spreads)]):
            error = [row["output"][i] ** 0.5 for row in rows]
            spread = [
                [abs(math.expm1(s * row["output_se"][i] / 2)) * e for row, e in zip(rows, error, strict=True)]
                for s in (-1, 1)
            ]
            axis.errorbar(x, error, spread, linestyle="-" if filled else "--", **look)
    left.set(title=f"kernel e^(q.k), |q| = |k| = 1, {shown} degrees apart", xlabel="features")
    right.set(title=f"kernel with {count} features", xlabel="degrees between query and key", yscale="log")
    # Where the estimate has no variance, rounding remains, far below.
    right.set_ylim(1e-3, 3)
    right.set_xticks([angle for angle in angles if angle % 45 == 0])
    for axis, spread in zip(outputs, spreads, strict=False):
        axis.set(
            xlabel="features",
            title=f"output: {settings['length']} keys, D = {settings['size']},\nq and k of deviation {spread:g}",
        )
    for axis in outputs[len(spreads) :]:
        axis.set_axis_off()
    for axis in (left, *outputs[: len(spreads)]):
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(counts, [str(one) for one in counts])
    for axis in axes.flat:
        axis.set_ylabel("relative error")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.xaxis.minorticks_off()
        axis.grid(alpha=0.3)
    handles, labels = left.get_legend_handles_labels()
    title = "Upper row: marks are measured, lines the formulas for iid rows. Bars: one standard error."
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, title=title, title_fontsize=9)
    return figure


def _points(axis: Any, x: list, squares: list, errors: list, look: Row) -> None:
    """Roots of mean squares, with their standard errors."""
    roots = [max(square, 1e-30) ** 0.5 for square in squares]
    spread = [error / (2 * root) for error, root in zip(errors, roots, strict=True)]
    axis.errorbar(x, roots, spread, linestyle="none", **look)


def _shown(angles: list[int]) -> int:
    """The angle nearest to 135 degrees: a key that should get little weight."""
    return min(angles, key=lambda angle: abs(angle - 135))


def _digits(x: Tensor) -> list[float]:
    """Numbers with six digits: more would only be noise in the file."""
    return [float(f"{one:.6g}") for one in x.tolist()]


EXPERIMENT = Experiment(
    about="how well random features approximate softmax, by their number, kind and rows",
    scales=Settings.scales(),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=draw,
    source="Choromanski et al. 2020 (2009.14794), figures 2 and 4, and lemma 2, whose formulas the picture shows",
    differs=(
        "Queries, keys and values are Gaussian, 512 of them, so that a minute is enough. The axis counts the features "
        "that the rows make, one or two each, because time and state grow with features. The published pictures have "
        "no printed figures."
    ),
    minutes=1.1,
)
