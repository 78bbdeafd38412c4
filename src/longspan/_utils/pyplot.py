"""matplotlib without a screen, in the style of all pictures."""

import io
from typing import Any, cast

from .optional_deps import install

# Shades that stay apart with the common kinds of color blindness, on paper and on a white panel of a dark page.
COLORS = ("#d55e00", "#56b4e9", "#7a52c7", "#8a8a1f", "#cc79a7", "#2fa8a0", "#8c510a", "#882255", "#8a8a8a", "#332288")
STYLE = {
    "figure.facecolor": "white",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.axisbelow": True,
    "grid.color": "#888888",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
}


def pyplot() -> Any:
    """matplotlib, without a screen. Raises ImportError where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f"pictures are drawn with matplotlib: {install('plot')}") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from cycler import cycler

    matplotlib.rcParams.update(cast(Any, STYLE))
    matplotlib.rcParams["axes.prop_cycle"] = cycler(color=COLORS)
    return plt


def png(figure: Any) -> bytes:
    """A figure with its margin as a PNG file, in 256 colors, which halves the file."""
    from PIL import Image  # matplotlib requires it

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=120, format="png", bbox_inches="tight", pad_inches=0.12)
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()
