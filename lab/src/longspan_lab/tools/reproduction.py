"""Put the figures and pictures of experiments into docs/results/reproduction.

    longspan reproduce NAME --out FOLDER
    python -m longspan_lab.tools reproduction FOLDER

copies the JSON and PNG files of the experiments in FOLDER to ``docs/results/reproduction`` and writes the marked
blocks of the pages there. ``FOLDER=WORD`` adds a run with other settings: ``images`` becomes ``images_WORD.json``,
with separate pictures and a separate marker. Without an argument it only writes the pages. The mechanisms page reads
the same files.

Markers, each ``<!-- NAME:begin -->`` ... ``<!-- NAME:end -->``:

* the name of a result: its pictures, tables, command and environment;
* ``deviations``: what differs from the publication, from the experiment that the page is named after;
* ``paper``: the figures and tables of the linear transformer's paper;
* ``verdicts``: the table of all pages, with the line that starts with ``**Verdict:`` in each.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._utils.tables import Table
from ..experiments import EXPERIMENTS, images_speed, page, paper, published, speech_report
from ..experiments.experiment import words
from . import DOCS, choosing
from .blocks import replace

OVERVIEW, RESULTS = DOCS / "results" / "reproduction.md", DOCS / "results" / "reproduction"
OPEN = "open"
SHA = 10  # digits of a commit

# What the linear transformer's paper measures -> the experiment that reproduces it.
PAPER = {
    "figure 1: time and memory by length": "scaling",
    "figure 2: learning to copy": "copy",
    "tables 1, 2, 4 and 5: images": "images",
    "table 3: speech": "speech",
}


def result(name: str) -> dict[str, Any] | None:
    """Return the JSON of an experiment; None where it has not been run."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def block(name: str, stem: str) -> str:
    """Return what belongs between the markers ``name`` on the page ``stem``."""
    special = {"paper": of_the_paper, "verdicts": verdicts}
    if name in special:
        return "\n" + "\n".join(special[name]()) + "\n\n"
    if name == "deviations":
        return f"\n{EXPERIMENTS[stem].differs}\n\n"
    found = result(name)
    if found is None:
        return f"\nNot measured yet: `longspan reproduce {name.partition('_')[0]}`.\n\n"
    experiment = EXPERIMENTS[found["experiment"]]
    first, *more = page.pictures(RESULTS, name) or [""]
    shown = [f"![{name}]({first})"] if first else []
    samples = []
    for image in more:
        what, _, model = Path(image).stem.removeprefix(f"{name}-").partition("-")
        samples.append(f"{what.capitalize()}, {model}:\n\n![{what} of {model}]({image})")
    tables = [markdown(table) for table in experiment.tables(found)]
    command = f"```sh\n{page.command(experiment, found)}\n```"
    return "\n" + "\n\n".join([*shown, *tables, *samples, command, environment(found)]) + "\n\n"


def markdown(table: Table) -> str:
    """Return a table of an experiment as Markdown, its first row as the head."""
    columns = max(map(len, table))
    head, *rows = [[_cell(row[i]) if i < len(row) else "" for i in range(columns)] for row in table]
    align = [":---", *["---:"] * (columns - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, align, *rows))


def _cell(text: str) -> str:
    inner = re.sub(r"([|<>*_$\\])", r"\\\1", text.strip())
    return ("&nbsp;" * 3 if text.startswith(" ") else "") + inner


def environment(found: dict[str, Any]) -> str:
    """Return the settings, versions and machines of a result as a block that the reader can open."""
    facts = [("Settings", "; ".join(f"{name} {words(value)}" for name, value in found["settings"].items()))]
    facts += [(key.capitalize(), found[key]) for key in ("scale",) if found.get(key)]
    facts += [("Commit", _short(found["commit"]))] if found.get("commit") else []
    facts += [(title, _listed(found.get(key))) for title, key in (("Versions", "versions"), ("Data, sha256", "data"))]
    facts += [("Machine", _listed(machine)) for machine in found["machines"]]
    clock = f", {found['clock_seconds']:.0f} s by the clock" if found.get("clock_seconds") else ""
    facts.append(("Time", f"{found['cpu_seconds']:.0f} s of processor time{clock}"))
    lines = "\n".join(f"* {title}: {_cell(text)}" for title, text in facts if text)
    return f"<details>\n<summary>Settings and environment</summary>\n\n{lines}\n\n</details>"


def _listed(facts: dict[str, Any] | None) -> str:
    return "; ".join(f"{name} {value}" for name, value in (facts or {}).items())


def _short(commits: str) -> str:
    return re.sub(rf"\b([0-9a-f]{{{SHA}}})[0-9a-f]+", r"\1", commits)


def verdicts() -> Iterator[str]:
    """Yield the table of all pages: experiment, paper, verdict, its figure and command."""
    yield from ("| experiment | paper | verdict | figure | command |", "|---|---|---|---|---|")
    for name, experiment in sorted(EXPERIMENTS.items()):
        path = RESULTS / f"{name}.md"
        text = path.read_text(encoding="utf-8")
        verdict = re.search(r"^\*\*Verdict: (.*?)\.\*\* (.*)\.$", text, re.MULTILINE)
        source = re.search(r"([A-Z][\w-]+(?: et al\.)? \d{4}) \((\d{4}\.\d{4,5})\)", experiment.source)
        if verdict is None or source is None:
            raise ValueError(
                f"{path} has no line **Verdict: ...**, or {name} names no paper as Author 2020 (2006.16236)"
            )
        title = text.partition("\n")[0].removeprefix("# ")
        cited = f"[{source[1]}](https://arxiv.org/abs/{source[2]})"
        row = (f"[{title}](reproduction/{name}.md)", cited, verdict[1], verdict[2], f"`longspan reproduce {name}`")
        yield f"| {' | '.join(row)} |"


def of_the_paper() -> Iterator[str]:
    """Yield each figure and table of the linear transformer's paper with ours, and the rows that lack a counterpart."""
    yield from ("| published | here | measured |", "|---|---|---|")
    for what, name in PAPER.items():
        command = f"`longspan reproduce {name}`" if name in EXPERIMENTS else OPEN
        yield f"| {what} | {command} | {_measured(result(name))} |"
    yield from ("", f"{published.SPEECH_SOURCE}:", "")
    yield from ("| speech | phoneme errors, % | seconds an epoch | ours |", "|---|---|---|---|")
    yield from (f"| {row.name} | {row.errors:.2f} | {row.epoch} | {recognized(row.name)} |" for row in published.SPEECH)
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
                yield f"| {row.name}, {data} | {theirs} | {' | '.join(generated(data, row.name))} |"


def generated(data: str, name: str) -> tuple[str, str]:
    """Return our test bits per dim and images per second for the paper's ``name``, from every result that has them."""
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
                    speed.append(f"{value:.3g}, batch {row['batch']}, {how}")
    return "; ".join(bits) or OPEN, "; ".join(speed) or OPEN


def recognized(name: str) -> str:
    """Return our errors on unseen speakers and seconds of an epoch for the paper's ``name``."""
    found = result("speech")
    rows = speech_report.rows(found, "training") if found else []
    for row in rows:
        if speech_report.called(row["encoder"]) == name:
            unit = found["settings"]["units"].removesuffix("s")  # pyright: ignore[reportOptionalSubscript] (the result exists)
            errors = speech_report.percent(row["errors"]["test"]["greedy"]["labels"])
            return f"{errors} % {unit} errors, {row['seconds']:.3g} s an epoch, other data"
    return OPEN


def _measured(found: dict[str, Any] | None) -> str:
    if found is None:
        return OPEN
    facts = [f"{key} {_short(found[key])}" for key in ("scale", "commit") if found.get(key)]
    return ", ".join([*facts, f"longspan {found['longspan']}"])


def written(text: str, stem: str) -> str:
    """Return the page ``stem`` with every marked block replaced."""
    return replace(text, lambda name: block(name, stem))


def pages() -> list[Path]:
    """List the pages, the overview last."""
    return [*sorted(RESULTS.glob("*.md")), OVERVIEW]


def anywhere(value: Any) -> Any:
    """Return a setting without the folders of its machine: ``mnist:SOME/WHERE/mnist`` becomes ``mnist:mnist``."""
    return re.sub(r"(?<=:)[^;,]*/", "", value) if isinstance(value, str) else value


def main(*folders: str) -> None:
    """Copy new results and write the pages."""
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
    for path in pages():
        path.write_text(written(path.read_text(encoding="utf-8"), path.stem), encoding="utf-8")
    choosing.main()
