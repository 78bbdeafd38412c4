"""Put the figures of ``longspan bench members`` into docs/how-to/choose-a-mechanism.md.

    longspan bench members --lengths 1024,4096,16384,32768 --out FOLDER
    longspan bench members --members 'linformer(length=16384, slots=64); ...' --lengths 16384 --out OTHER
    longspan bench members --lengths 1024 --out AGAIN
    python tools/choosing.py FOLDER+AGAIN OTHER=budget

copies FOLDER's members.json, .csv and .png to ``benchmarks/results/MACHINE`` as ``every.json``, .csv and .png, since
``members`` there is a comparison of few on the page of performance, and writes the tables between the page's markers.
AGAIN may be missing: a later run of lengths that something disturbed, whose figures take the place of FOLDER's there,
with exponents fitted anew, which the page says. OTHER's become ``every_budget`` and stand beside each other in the
table of that name. Without an argument it only writes them again. What tasks tell is from the JSON files in
``docs/results/reproduction``.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from longspan._utils import plots
from longspan._utils.spec import head
from longspan._utils.tables import duration
from longspan.attention.base import REGISTRY
from longspan.attention.registry import list_mechanisms
from longspan.bench import figures, members
from longspan.bench.report import rows_csv

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, RESULTS, TASKS = (
    DOCS / "how-to" / "choose-a-mechanism.md",
    DOCS.parent / "benchmarks" / "results",
    DOCS / "results" / "reproduction",
)
MACHINE, NAME = "epyc-2-cores", "every"
BLOCK = "<!-- {0}:begin -->\n\n{1}\n\n<!-- {0}:end -->"
AT = 16384  # tokens at which candidates are set beside each other
BEST = 8  # rows of a list of the best
OFF = 0.25  # by which a fitted exponent may miss the declared one before that is told
DELTA = ("deltanet", "fast_weights", "gated_deltanet", "kda")
GROUPS = {
    "sums": "linear",
    "decays": "gated",
    "delta": "gated",
    "patterns": "sparse",
    "content": "content",
    "compressed": "compressed",
    "softmax": "softmax",
}
FORWARD, TRAINING, STEP = members.MODES
Result = dict[str, Any]


def group(candidate: str) -> str:
    """The table that a mechanism stands in."""
    family = REGISTRY[head(candidate)].family
    return "delta" if head(candidate) in DELTA else next(name for name, of in GROUPS.items() if of == family)


class Figures:
    """A result of ``longspan bench members``, to be asked."""

    def __init__(self, result: Result):
        self.result = result
        self.at = {(row["candidate"], row["mode"], row["length"]): row for row in result["rows"]}
        self.lengths = sorted({row["length"] for row in result["rows"]})
        self.growth = {one["candidate"]: one for one in result["growth"]}

    def value(self, candidate: str, mode: str, what: str, length: int = AT) -> Any:
        """One figure; None where it was not measured."""
        return self.at.get((candidate, mode, length), {}).get(what)

    def by_length(self, candidate: str, mode: str) -> dict[int, float]:
        """Seconds by length."""
        return {n: self.at[candidate, mode, n]["seconds"] for n in self.lengths if (candidate, mode, n) in self.at}

    def factor(self, candidate: str, mode: str) -> str:
        """How many times as fast as softmax it is at AT tokens."""
        ratio = self.value(candidate, mode, "ratio")
        return f"{ratio:.3g}x" if ratio else "-"

    def constant(self, candidate: str) -> bool:
        """Whether the state has one size at all lengths."""
        sizes = {self.value(candidate, STEP, "state_bytes", n) for n in self.lengths} - {None}
        return len(sizes) == 1

    def best(self, names: Iterable[str], mode: str, what: str, most: int = BEST) -> list[str]:
        """Those with the smallest figure at AT tokens, the smallest first."""
        found = [(self.value(name, mode, what), name) for name in names]
        return [name for value, name in sorted((v, n) for v, n in found if v is not None)][:most]


def link(candidate: str) -> str:
    """A mechanism's name or spec, with the way to its own page."""
    name = head(candidate)
    return f"[`{candidate}`](../reference/mechanisms/{REGISTRY[name].family}.md#{name.replace('_', '-')})"


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown."""
    titles = list(titles)
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


def size(value: float | None) -> str:
    """Bytes with a unit.

    >>> size(1032), size(66560), size(17829888)
    ('1.01 kB', '65 kB', '17 MB')
    """
    if value is None:
        return "-"
    return f"{value / 2**20:.3g} MB" if value >= 2**20 else f"{value / 2**10:.3g} kB"


def _time(value: float | None) -> str:
    return "-" if value is None else duration(value)


def _columns(found: Figures, names: Iterable[str]) -> str:
    """What a list of the best shows of each."""
    titles = (
        "mechanism",
        "forward",
        "with backward",
        "as fast as softmax, forward",
        "as fast, with backward",
        "peak memory",
        "state",
        "one token",
    )
    rows = []
    for name in names:
        memory = found.value(name, TRAINING, "mb")
        rows.append(
            (
                link(name),
                _time(found.value(name, FORWARD, "seconds")),
                _time(found.value(name, TRAINING, "seconds")),
                found.factor(name, FORWARD),
                found.factor(name, TRAINING),
                "-" if memory is None else f"{memory:.3g} MB",
                size(found.value(name, STEP, "state_bytes")),
                _time(found.value(name, STEP, "seconds")),
            )
        )
    return table(titles, rows)


def length(found: Figures) -> str:
    """From which length on each takes less time than softmax, in classes."""
    bounds = [*found.lengths, None]
    classes: dict[tuple[str, int | None], list[str]] = {}
    for mode in (FORWARD, TRAINING):
        softmax = found.by_length("softmax", mode)
        for name in found.growth:
            if name == "softmax":
                continue
            said = figures.crossover(found.by_length(name, mode), softmax)
            least = found.lengths[0] if said == "at every size" else int(said[5:]) if said.startswith("from") else None
            bound = None if least is None else next(n for n in found.lengths if n >= least)
            classes.setdefault((mode, bound), []).append(name)
    rows = []
    for bound in bounds:
        text = "at no measured length" if bound is None else f"at {bound:,} tokens"
        cells = [", ".join(map(link, sorted(classes.get((mode, bound), ())))) or "-" for mode in (FORWARD, TRAINING)]
        rows.append((text, *cells))
    return table(("faster than softmax", "forward", "with backward"), rows)


def causal(found: Figures) -> str:
    """The fastest to train whose state does not grow."""
    names = [name for name, one in found.growth.items() if one["causal"] and found.constant(name)]
    return _columns(found, found.best(names, TRAINING, "seconds"))


def exact(found: Figures) -> str:
    """The fastest to train that keep keys and values of single tokens, all or the last ones."""
    names = [name for name, one in found.growth.items() if one["causal"] and group(name) in ("patterns", "content")]
    return _columns(found, found.best(names, TRAINING, "seconds"))


def bidirectional(found: Figures) -> str:
    """The fastest of those that see whole sequences only."""
    return _columns(found, found.best([n for n, one in found.growth.items() if not one["causal"]], TRAINING, "seconds"))


def memory(found: Figures) -> str:
    """The least memory of a training step."""
    return _columns(found, found.best(found.growth, TRAINING, "mb"))


def decoding(found: Figures) -> str:
    """The fastest token steps from a state of fixed size, and softmax."""
    names = [name for name in found.growth if found.constant(name)]
    return _columns(found, [*found.best(names, STEP, "seconds"), "softmax"])


def smallest(found: Figures) -> str:
    """The smallest states."""
    return _columns(found, found.best(found.growth, STEP, "state_bytes"))


def family(found: Figures, name: str) -> str:
    """All of one group: what ``bench members`` prints, and the factor against softmax."""
    (_, *titles), *rows = members.table(found.result)
    lines = []
    for (_, shown, *cells), one in zip(rows, found.result["growth"], strict=True):
        spec = one["candidate"]
        if group(spec) == name:
            factors = " / ".join(found.factor(spec, mode) for mode in (FORWARD, TRAINING))
            lines.append((shown.replace(spec, link(spec), 1), *cells, factors))
    return table((*titles, f"as fast as softmax at {AT}, forward / with backward"), lines)


def budget(_: Figures) -> str:
    """Those that shorten keys and queries, and Reformer, at one budget."""
    path = RESULTS / MACHINE / f"{NAME}_budget.json"
    if not path.exists():
        return "Not measured yet: `python tools/choosing.py OTHER=budget` puts a run of OTHER here."
    found = Figures(json.loads(path.read_text(encoding="utf-8")))
    return _columns(found, found.growth)


def grown(found: Figures) -> str:
    """Where the time that was measured does not grow as the declared cost says."""
    rows = []
    for name, one in found.growth.items():
        fitted = one.get(TRAINING, one.get(FORWARD))
        if fitted is not None and abs(fitted - one["declared"]) > OFF:
            rows.append(
                (
                    link(name),
                    f"${one['cost'].replace('log', chr(92) + 'log')}$",
                    f"N^{one['declared']:.2g}",
                    f"N^{one[FORWARD]:.2f}" if FORWARD in one else "-",
                    f"N^{fitted:.2f}",
                )
            )
    if not rows:
        return f"No exponent is off by more than {OFF}."
    return table(("mechanism", "cost", "declared", "forward", "with backward"), rows)


def left(found: Figures) -> str:
    """What was left out, and why."""
    result = found.result
    lines = [f"* `{one['candidate']}`: {one['reason']}" for one in (*result["refused"], *result["left_out"])]
    if missing := unmeasured(result):
        lines.append(f"* Newer than this run, and not measured yet: {', '.join(map(link, missing))}")
    return "\n".join(lines) or "Nothing was left out."


def unmeasured(result: Result) -> list[str]:
    """The mechanisms that a run of all of them did not know yet, or refused."""
    known = {one["candidate"] for one in result["growth"]}
    return [name for name in list_mechanisms() if name not in known]


def picture(found: Figures) -> str:
    """The picture that the command drew."""
    return f"![Time and memory of every mechanism by length](../../benchmarks/results/{MACHINE}/{NAME}.png)"


def where(found: Figures) -> str:
    """How and on what the figures were measured."""
    options, facts = found.result["options"], found.result["machine"]
    lengths, limit = ",".join(map(str, options["lengths"])), f"{options['limit']:g}"
    line = f"longspan bench members --lengths {lengths} --limit {limit} --rounds {options['rounds']}"
    machine = "; ".join(f"{name} {value}" for name, value in facts.items())
    again = ",".join(map(str, found.result.get("again", ())))
    more = f" Those of {again} tokens are of a run of their own, later, with `--lengths {again}`." if again else ""
    return f"```sh\n{line}\n```\n\nHow: {found.result['how']}.{more}\n\nMachine: {machine}."


def _task(name: str) -> Result | None:
    path = TASKS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def recall(_: Figures) -> str:
    """The share of queries answered right among the most pairs, by width, with the bytes of the state."""
    result = _task("mqar")
    if result is None:
        return "Not measured yet: `longspan reproduce mqar`."
    dims, pairs = result["settings"]["dims"], result["settings"]["pairs"][-1]
    rows = []
    for spec in dict.fromkeys(row["spec"] for row in result["rows"]):
        cells = []
        for dim in dims:
            of = [row for row in result["rows"] if row["spec"] == spec and row["dim"] == dim]
            best = max(of, key=lambda row: row["accuracy"][-1])
            cells.append(f"{100 * best['accuracy'][-1]:.1f} %, {size(best['bytes'])}")
        rows.append((f"`{spec}`", *cells))
    return table((f"{pairs} pairs to remember", *(f"width {dim}" for dim in dims)), rows)


def tasks(_: Figures) -> str:
    """What the experiments found, a line for each attention and task."""
    rows = []
    for path in sorted(TASKS.glob("copy*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for spec in dict.fromkeys(row["spec"] for row in found["rows"]):
            of = [row for row in found["rows"] if row["spec"] == spec]
            reached = ", ".join(str(row["reached"] or "never") for row in of)
            losses = ", ".join(f"{row['test']:.2g}" for row in of)
            rows.append(
                (
                    f"copy {found['settings']['length'] // 2 - 1} symbols",
                    f"`{spec}`",
                    f"loss {losses} nats; below 0.01 after {reached} updates",
                )
            )
    for path in sorted(TASKS.glob("images*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        data = found["settings"]["data"].partition(":")[0]
        for row in found["rows"]:
            if row["what"] == "training":
                steps, seconds, _ = row["curve"][-1]
                rows.append(
                    (
                        f"draw {data}",
                        f"`{row['attention']}`",
                        f"{row['test']:.3f} bits per dim after {steps:,} steps in {seconds:,.0f} s",
                    )
                )
    return table(("task", "attention", "found"), rows)


def forecasts(_: Figures) -> str:
    """Squared errors of the forecasts of ETTh1 by horizon, the smallest sum first."""
    found = json.loads((TASKS / "forecast.json").read_text(encoding="utf-8"))
    horizons, errors = found["settings"]["horizons"], {}
    for row in found["rows"]:
        errors.setdefault(row["model"], {}).setdefault(row["horizon"], []).append(row["mse"])
    means = {model: [sum(of[h]) / len(of[h]) for h in horizons] for model, of in errors.items()}
    attentions = found["settings"]["specs"].split("; ")
    rows = [
        (f"`{model}`" if model in attentions else model, *(f"{error:.3f}" for error in means[model]))
        for model in sorted(means, key=lambda model: sum(means[model]))
    ]
    return table(("squared error on ETTh1", *(f"{h} hours" for h in horizons)), rows)


BLOCKS: dict[str, Callable[[Figures], str]] = {
    "where": where,
    "length": length,
    "causal": causal,
    "exact": exact,
    "bidirectional": bidirectional,
    "memory": memory,
    "decoding": decoding,
    "smallest": smallest,
    "grown": grown,
    "left": left,
    "picture": picture,
    "recall": recall,
    "tasks": tasks,
    "budget": budget,
    "forecasts": forecasts,
}


def written(text: str, result: Result) -> str:
    """The page with every marked block written anew. Raises ValueError for a marker that nothing writes."""
    found = Figures(result)

    def block(match: re.Match) -> str:
        name = match[1]
        if name not in BLOCKS and name not in GROUPS:
            raise ValueError(f"nothing writes {name!r}; known: {', '.join([*BLOCKS, *GROUPS])}")
        return BLOCK.format(name, BLOCKS[name](found) if name in BLOCKS else family(found, name))

    return re.sub(r"<!-- (\w+):begin -->\n.*?<!-- \1:end -->", block, text, flags=re.DOTALL)


def measured_again(result: Result, again: Result) -> Result:
    """``result`` with the figures that ``again`` has of its lengths, and with exponents fitted to all."""
    lengths = again["options"]["lengths"]
    rows = [row for row in result["rows"] if row["length"] not in lengths]
    result = {**result, "rows": sorted([*again["rows"], *rows], key=lambda row: row["length"]), "again": lengths}
    found = Figures(result)
    for one in result["growth"]:
        name = one["candidate"]
        for mode in members.MODES:
            at = {n: found.at[name, mode, n] for n in found.lengths if (name, mode, n) in found.at}
            if mode in one:
                one[mode] = figures.exponent({n: row["seconds"] for n, row in at.items()})
            if f"memory, {mode}" in one:
                sizes = {n: max(row["mb"], 1e-3) for n, row in at.items() if "mb" in row}
                one[f"memory, {mode}"] = figures.exponent(sizes)
    return result


def main(folders: list[str]) -> None:
    """Copy what is new, write the page."""
    place = RESULTS / MACHINE
    for text in folders:
        both, _, word = text.partition("=")
        folder, _, again = both.partition("+")
        place.mkdir(parents=True, exist_ok=True)
        # A run at one length is a table here and no picture.
        for ending in (".json", ".csv") if word else (".json", ".csv", ".png"):
            kept = f"{NAME}_{word}" if word else NAME
            shutil.copyfile(Path(folder) / f"members{ending}", place / f"{kept}{ending}")
        if again:
            one, other = (json.loads((Path(at) / "members.json").read_text(encoding="utf-8")) for at in (folder, again))
            found = measured_again(one, other)
            (place / f"{kept}.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            (place / f"{kept}.csv").write_text(rows_csv(found["rows"]), encoding="utf-8")
            plots.draw(place / f"{kept}.png", found)
    result = json.loads((place / f"{NAME}.json").read_text(encoding="utf-8"))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
