"""Draw every committed picture again that has a JSON file next to it.

    python tools/redraw.py
    python tools/redraw.py benchmarks/results/epyc-2-cores/every.json

draws the pictures of benchmarks (``benchmarks/results``) and of experiments (``docs/results/reproduction``), all of
them or those of the JSON files that are named, each also as NAME-dark.png for dark pages. ``tools/figures.py --draw``
draws the pictures in ``docs/images``, and ``tools/choosing.py`` the one of the defaults.
"""

import json
import sys
from pathlib import Path

from longspan._utils import plots
from longspan.experiments import EXPERIMENTS, runner

ROOT = Path(__file__).resolve().parents[1]
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


def main(arguments: list[str]) -> None:
    found = [Path(name) for name in arguments] or [path for place in PLACES for path in sorted(ROOT.glob(place))]
    for path in found:
        # A few results are tables without a picture.
        if path.with_suffix(".png").exists():
            print(draw(path))


if __name__ == "__main__":
    main(sys.argv[1:])
