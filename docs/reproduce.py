"""Put experiments' figures and pictures into docs/reproduce.md.

    longspan reproduce NAME --out FOLDER
    python docs/reproduce.py FOLDER

copies the JSON and PNG files of the experiments that FOLDER has to ``docs/reproduce`` and writes the tables between the
page's markers. Without an argument it only writes them again.
"""

import json
import re
import shutil
import sys
from pathlib import Path

from longspan.reproduce import EXPERIMENTS, experiment

DOCS = Path(__file__).resolve().parent
PAGE, RESULTS = DOCS / "reproduce.md", DOCS / "reproduce"
BLOCK = "<!-- {0}:begin -->\n{1}<!-- {0}:end -->"


def block(name: str) -> str:
    """The tables of one experiment, as they were printed, and its picture."""
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    text = experiment.show(EXPERIMENTS[name], result)
    return f"\n![{name}]({RESULTS.name}/{name}.png)\n\n```text\n{text}\n```\n\n"


def page(text: str) -> str:
    """The page with every marked block written anew."""
    return re.sub(
        r"<!-- (\w+):begin -->\n.*?<!-- \1:end -->",
        lambda found: BLOCK.format(found[1], block(found[1])),
        text,
        flags=re.DOTALL,
    )


def main(folders: list[str]) -> None:
    """Copy what is new, write the page."""
    RESULTS.mkdir(exist_ok=True)
    for folder in map(Path, folders):
        for name in EXPERIMENTS:
            for path in (folder / f"{name}.json", folder / f"{name}.png"):
                if path.exists():
                    shutil.copyfile(path, RESULTS / path.name)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
