"""One color and one mark per mechanism, the same in every picture, distinct for color-blind readers."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from longspan._utils.pyplot import COLORS

MARKERS = "osD^vP*X<>"
DASHES = ("-", "--", "-.", ":")

# Shades that stay apart with the common kinds of color blindness, on paper and on a white panel of a dark page.
# The mechanisms of a row share its color and differ by their mark; those of one family have different colors.
# Black, blue, orange and green each belong to one mechanism, as these four are in most pictures.
TABLE: dict[str, tuple[str, ...]] = {
    "#222222": ("softmax",),
    "#0072b2": ("linear",),
    "#e69f00": ("local",),
    "#009e73": ("gated_deltanet",),
    "#d55e00": ("gla", "reformer", "bigbird", "alibi", "clustered", "moba"),
    "#56b4e9": ("ssd", "routing", "longformer", "kernel", "linformer", "power"),
    "#7a52c7": ("kda", "informer", "transformer_xl", "realformer", "compressive", "adaptive_span", "forgetting"),
    "#8a8a1f": ("retention", "fourier", "sac", "image", "synthesizer", "nystrom"),
    "#cc79a7": ("performer", "etc", "gaussian", "luna", "mamba", "dsa", "preconditioned_deltanet"),
    "#2fa8a0": ("deltanet", "sinkhorn", "bp", "talking_heads", "infini"),
    "#8c510a": (
        "fast_weights",
        "average",
        "exact_topk",
        "axial",
        "relative",
        "memory_compressed",
        "star",
        "nsa",
        "gsa",
    ),
    "#882255": ("polynomial", "lowrank_band", "improved_clustered", "mlstm", "path", "abc"),
    "#8a8a8a": ("rfa", "sparse", "poolingformer", "mamba3", "hedgehog", "stick_breaking", "longhorn"),
    "#332288": ("sparse_transformer", "set_transformer", "rwkv7", "log_linear", "mesa"),
}
# For all that is not a mechanism, in this order; none is a color that belongs to one mechanism alone.
OTHERS = COLORS
# Names of benchmarks for a mechanism.
SAME = {"sdpa": "softmax", "sdpa all": "softmax", "sdpa mask": "softmax"}
# Implementations in benchmarks, whose bars and lines never share a picture with the mechanisms of their color.
IMPLEMENTATIONS = {
    "longspan": "#332288",
    "native": "#332288",
    "torch": "#56b4e9",
    "loop": "#8a8a8a",
    "transformers": "#cc79a7",
    "ft": "#7a52c7",
    "lstm": "#8c510a",
}
# Stages of a kernel: waiting and what only moves data in pale colors, products in strong ones.
STAGES = {
    "states": "#bbbbbb",
    "reading": "#9ecae1",
    "mapping": "#e69f00",
    "scoring": "#0072b2",
    "from state": "#009e73",
    "within chunk": "#332288",
    "solving": "#d55e00",
    "updating": "#882255",
    "scanning": "#8c510a",
    "convolving": "#56b4e9",
    "summing": "#f0e442",
    "writing": "#cc79a7",
    "waiting": "#eeeeee",
}
BASELINE = "#666666"  # lines of reference

# On a dark page: its background and text, and brighter shades of the colors that would be hard to see there.
BACKGROUND, FOREGROUND = "#131416", "#e8e8e8"
DARK = {
    "#0072b2": "#3d9fe0",
    "#009e73": "#2cc295",
    "#d55e00": "#f0803c",
    "#56b4e9": "#8fd3f7",
    "#7a52c7": "#c29bff",
    "#8a8a1f": "#b5b53a",
    "#cc79a7": "#e39ac4",
    "#2fa8a0": "#4fd0c6",
    "#8c510a": "#c08344",
    "#882255": "#d0588f",
    "#332288": "#7d7dff",
}


class Look(NamedTuple):
    """How one series is drawn."""

    color: str
    marker: str
    linestyle: str


_FIXED = {
    name: (color, MARKERS[(row + i) % len(MARKERS)])
    for row, (color, names) in enumerate(TABLE.items())
    for i, name in enumerate(names)
} | {name: (color, MARKERS[i]) for i, (name, color) in enumerate(IMPLEMENTATIONS.items())}


def mechanism(name: str) -> str:
    """The mechanism in the name of a series, which may carry options or a variant.

    >>> mechanism("reformer(rounds=4)"), mechanism("linear@torch"), mechanism("softmax, cached")
    ('reformer', 'linear', 'softmax')
    """
    head = re.split(r"[(@,]", name, maxsplit=1)[0].strip()
    return SAME.get(head, head)


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Colors, marks and dashes for the series of one picture.

    Args:
        names: names of the series. A mechanism has its own color and mark; its further variants have the same color,
            other marks and dashes. Other names get the colors that the mechanisms leave free, in order.

    Returns:
        A look for each name.

    Example:
        >>> found = looks(["linear", "linear@torch", "loop"])
        >>> found["linear"].color == found["linear@torch"].color, found["linear@torch"].linestyle
        (True, '--')
    """
    names = list(dict.fromkeys(names))
    taken = {_FIXED[mechanism(name)][0] for name in names if mechanism(name) in _FIXED}
    free = [color for color in OTHERS if color not in taken] or list(OTHERS)
    found: dict[str, Look] = {}
    variants: Counter[str] = Counter()
    others = 0
    for name in names:
        base = mechanism(name)
        if base in _FIXED:
            color, marker = _FIXED[base]
            number = variants[base]
            variants[base] += 1
            marker = MARKERS[(MARKERS.index(marker) + number) % len(MARKERS)]
            found[name] = Look(color, marker, DASHES[number % len(DASHES)])
        else:
            marker = MARKERS[(others + others // len(free)) % len(MARKERS)]
            found[name] = Look(free[others % len(free)], marker, "-")
            others += 1
    return found


def color(name: str) -> str:
    """The color of a mechanism; a grey for any other name."""
    return _FIXED.get(mechanism(name), (BASELINE,))[0]


def on_dark(color: Iterable[float]) -> tuple[float, ...]:
    """The color on a dark page for one on a white page, both as red, green, blue and opacity from 0 to 1.

    Greys are mirrored between background and text. Colors of the palette have brighter shades, and others stay.

    >>> [round(255 * part) for part in on_dark((1.0, 1.0, 1.0, 1.0))]
    [19, 20, 22, 255]
    """
    *parts, opacity = color
    if max(parts) - min(parts) < 0.02:
        ends = zip(_parts(BACKGROUND), _parts(FOREGROUND), strict=True)
        return (*(text + (back - text) * parts[0] for back, text in ends), opacity)
    name = "#" + "".join(f"{round(255 * part):02x}" for part in parts)
    return (*_parts(DARK[name]), opacity) if name in DARK else (*parts, opacity)


def _parts(name: str) -> tuple[float, ...]:
    return tuple(int(name[at : at + 2], 16) / 255 for at in (1, 3, 5))
