"""Places labels next to the marks of a plot so that they overlap as little as possible."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Box(NamedTuple):
    """A rectangle in pixels of the figure."""

    left: float
    bottom: float
    right: float
    top: float

    def covers(self, other: "Box") -> float:
        """Return the overlap with another box, in square pixels.

        >>> Box(0, 0, 4, 2).covers(Box(3, 1, 9, 9)), Box(0, 0, 4, 2).covers(Box(4, 0, 5, 1))
        (1, 0)
        """
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(width, 0) * max(height, 0)


RINGS, TURNS = 16, 16  # candidate distances, and directions at each
STEP = 4.0  # points from one distance to the next
NEAR = 2  # rings within which a label needs no line to its mark


def put(axis: Any, names: Sequence[str], x: Sequence[float], y: Sequence[float], sizes: Sequence[float]) -> None:
    """Write a label next to each mark at (x, y); ``sizes`` are those of ``scatter``, in square points.

    From right to left, each label gets the nearest free place inside the axis, or the one with the least overlap. A
    line connects distant labels with their marks. Call it when limits and layout are final, since it draws the figure
    to measure texts.
    """
    figure = axis.figure
    figure.canvas.draw()
    unit, inside = figure.dpi / 72, _box(axis.bbox)
    at = axis.transData.transform(list(zip(x, y, strict=True)))
    radii = [unit * math.sqrt(size / math.pi) for size in sizes]
    marks = [Box(a - r, b - r, a + r, b + r) for (a, b), r in zip(at, radii, strict=True)]
    taken: list[Box] = []
    for i in sorted(range(len(names)), key=lambda i: (-at[i][0], -at[i][1])):
        text = axis.annotate(names[i], (x[i], y[i]), fontsize=7, ha="center", va="center", annotation_clip=False)
        own = _box(text.get_window_extent())
        width, height = own.right - own.left, own.top - own.bottom
        best, least = (0.0, 0.0, 0), math.inf
        for ring in range(RINGS):
            for turn in range(TURNS):
                angle, gap = 2 * math.pi * turn / TURNS, radii[i] + unit * (2 + STEP * ring)
                dx, dy = math.cos(angle) * (gap + width / 2), math.sin(angle) * (gap + height / 2)
                there = _moved(own, dx, dy)
                cost = sum(there.covers(other) for other in (*taken, *marks)) + width * height - inside.covers(there)
                cost = round(cost, 3)  # differences of rounding do not count
                if cost < least:
                    best, least = (dx, dy, ring), cost
            if not least:
                break
        dx, dy, ring = best
        text.remove()
        line = {"arrowstyle": "-", "color": "grey", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0}
        axis.annotate(
            names[i],
            (x[i], y[i]),
            (dx / unit, dy / unit),
            textcoords="offset points",
            fontsize=7,
            ha="center",
            va="center",
            annotation_clip=False,
            arrowprops=line if ring > NEAR else None,
        )
        taken.append(_moved(own, dx, dy))


def _moved(box: Box, dx: float, dy: float) -> Box:
    return Box(box.left + dx, box.bottom + dy, box.right + dx, box.top + dy)


def _box(extent: Any) -> Box:
    return Box(extent.x0, extent.y0, extent.x1, extent.y1)
