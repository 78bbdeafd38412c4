"""Draw every committed picture again that has a JSON file next to it.

    python -m longspan_lab.tools redraw
    python -m longspan_lab.tools redraw benchmarks/results/epyc-2-cores/every.json

draws the pictures of benchmarks (``benchmarks/results``) and of experiments (``docs/results/reproduction``), all of
them or those of the JSON files that are named, each also as NAME-dark.png for dark pages.
``longspan_lab.tools figures --draw`` draws the pictures in ``docs/images``, and ``longspan_lab.tools choosing`` the one
of the defaults.
"""

import json
from pathlib import Path

from .._utils import plots
from ..experiments import EXPERIMENTS, runner
from . import ROOT

PLACES = ("benchmarks/results/*/*.json", "docs/results/reproduction/*.json")


def draw(path: Path) -> Path:
    """Draw the pictures of one JSON file, next to it; return the path of the light one."""
    result = json.loads(path.read_text(encoding="utf-8"))
    picture = path.with_suffix(".png")
    if "benchmark" in result:
        plots.draw(picture, result, dark=True)
    else:
        runner.picture(picture, EXPERIMENTS[result["experiment"]], result, dark=True)
    return picture


def main(*files: str) -> None:
    found = [Path(name) for name in files] or [path for place in PLACES for path in sorted(ROOT.glob(place))]
    for path in found:
        # A few results are tables without a picture.
        if path.with_suffix(".png").exists():
            print(draw(path))
