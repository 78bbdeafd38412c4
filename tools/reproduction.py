"""Put experiments' figures and pictures into docs/results/reproduction.md.

    longspan reproduce NAME --out FOLDER
    python tools/reproduction.py FOLDER

copies the JSON and PNG files of the experiments that FOLDER has to ``docs/results/reproduction`` and writes what the
JSON files hold between the page's markers. ``FOLDER=WORD`` keeps them apart from those with other settings: ``images``
becomes ``images_WORD.json`` and its pictures, for the marker of that name. Without an argument it only writes the page
again. docs/how-to/choose-a-mechanism.md reads the same files.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longspan.experiments import EXPERIMENTS, images_speed, page, paper, published, speech_report

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, RESULTS = DOCS / "results" / "reproduction.md", DOCS / "results" / "reproduction"
BLOCK = "<!-- {0}:begin -->\n{1}<!-- {0}:end -->"
OPEN = "open"

# What the linear transformer's paper measures -> the experiment that has it again.
PAPER = {
    "figure 1: time and memory by length": "scaling",
    "figure 2: learning to copy": "copy",
    "tables 1, 2, 4 and 5: images": "images",
    "table 3: speech": "speech",
}


def result(name: str) -> dict[str, Any] | None:
    """The JSON of an experiment; None where it has not been run."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def block(name: str) -> str:
    """What an experiment found, as it writes it itself; ``paper`` has the linear transformer's figures and tables."""
    if name == "paper":
        return "\n" + "\n".join(of_the_paper()) + "\n\n"
    found = result(name)
    if found is None:
        return f"\nNot measured yet: `longspan reproduce {name.partition('_')[0]}`.\n\n"
    images = [f"{RESULTS.name}/{image}" for image in page.pictures(RESULTS, name)]
    return f"\n{page.fragment(EXPERIMENTS[found['experiment']], found, images)}\n"


def of_the_paper() -> Iterator[str]:
    """Each figure and table with what there is beside it, and the rows that nothing stands beside yet."""
    yield from ("| published | here | measured |", "|---|---|---|")
    for what, name in PAPER.items():
        command = f"`longspan reproduce {name}`" if name in EXPERIMENTS else OPEN
        yield f"| {what} | {command} | {_measured(result(name))} |"
    yield from ("", f"{published.SPEECH_SOURCE}:", "")
    yield from ("| speech | phoneme errors, % | seconds an epoch | ours |", "|---|---|---|---|")
    yield from (f"| {row.name} | {row.errors:.2f} | {row.epoch} | {told(row.name)} |" for row in published.SPEECH)
    yield from ("", f"Reformer's rows of {paper.IMAGES_SOURCE}:", "")
    yield (
        "| images | bits per dim | images per second | seconds an image, CPU | seconds an image, GPU "
        "| ours: bits per dim | ours: images per second on a CPU |"
    )
    yield "|---|---|---|---|---|---|---|"
    for data, methods in paper.IMAGES.items():
        for row in methods:
            if row.name.startswith("lsh"):
                theirs = f"{row.bits} | {row.images_per_second} | {row.cpu} | {row.gpu}"
                yield f"| {row.name}, {data} | {theirs} | {' | '.join(drawn(data, row.name))} |"


def drawn(data: str, name: str) -> tuple[str, str]:
    """Our test bits per dim, and images per second, of what the paper calls ``name``, from every result that has it."""
    bits, speed = [], []
    for path in sorted(RESULTS.glob("images*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["settings"]["data"].partition(":")[0] != data:
            continue
        for row in found["rows"]:
            if row["what"] == "training" and paper.called(row["attention"]) == name:
                bits.append(f"{row['test']:.3f} after {row['curve'][-1][0]:,} steps")
            for own, value in row.get("images_per_second", {}).items():
                attention = own.removesuffix(images_speed.RECOMPUTED)
                if paper.called(attention) == name:
                    how = "prefix recomputed" if own != attention else "from a state"
                    speed.append(f"{value:.3g}, {row['batch']} at once, {how}")
    return "; ".join(bits) or OPEN, "; ".join(speed) or OPEN


def told(name: str) -> str:
    """Our errors on unseen speakers, and seconds of an epoch, of what the paper calls ``name``."""
    found = result("speech")
    rows = speech_report.rows(found, "training") if found else []
    for row in rows:
        if speech_report.called(row["encoder"]) == name:
            unit = found["settings"]["units"].removesuffix("s")  # type: ignore[index]
            errors = speech_report.percent(row["errors"]["test"]["greedy"]["labels"])
            return f"{errors} % {unit} errors, {row['seconds']:.3g} s an epoch, other data: see below"
    return OPEN


def _measured(found: dict[str, Any] | None) -> str:
    if found is None:
        return OPEN
    facts = [f"{key} {found[key]}" for key in ("scale", "commit") if found.get(key)]
    return ", ".join([*facts, f"longspan {found['longspan']}"])


def written(text: str) -> str:
    """The page with every marked block written anew."""
    return re.sub(
        r"<!-- (\w+):begin -->\n.*?<!-- \1:end -->",
        lambda found: BLOCK.format(found[1], block(found[1])),
        text,
        flags=re.DOTALL,
    )


def anywhere(value: Any) -> Any:
    """A setting without the folders of the machine where it was used: of mnist:SOME/WHERE/mnist mnist:mnist is left."""
    return re.sub(r"(?<=:)[^;,]*/", "", value) if isinstance(value, str) else value


def main(folders: list[str]) -> None:
    """Copy what is new, write the page."""
    RESULTS.mkdir(exist_ok=True)
    for text in folders:
        place, _, word = text.partition("=")
        for name in EXPERIMENTS:
            kept = f"{name}_{word}" if word else name
            if (Path(place) / f"{name}.json").exists():
                found = json.loads((Path(place) / f"{name}.json").read_text(encoding="utf-8"))
                found["settings"] = {key: anywhere(value) for key, value in found["settings"].items()}
                (RESULTS / f"{kept}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            for file in page.pictures(Path(place), name):
                shutil.copyfile(Path(place) / file, RESULTS / file.replace(name, kept, 1))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
    subprocess.run([sys.executable, Path(__file__).with_name("choosing.py")], check=True)
