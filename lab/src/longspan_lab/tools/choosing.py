"""Put the figures of ``longspan bench members`` into the docs: the mechanisms page, its CSV files, and the chooser.

    longspan bench members --lengths 1024,4096,16384,32768 --out FOLDER
    longspan bench members --members 'linformer(length=16384, slots=64); ...' --lengths 16384 --out OTHER
    longspan bench members --lengths 1024 --out AGAIN
    python -m longspan_lab.tools choosing FOLDER+AGAIN OTHER=budget
    longspan bench members --members 'mamba; ...' --lengths 1024,4096,16384,32768 --out NEW
    python -m longspan_lab.tools choosing NEW=new

copies FOLDER's members.json, .csv and .png to ``benchmarks/results/MACHINE`` as ``every.json``, .csv and .png. AGAIN is
optional: a later run of some lengths, whose figures replace FOLDER's there; the exponents are then fitted anew. OTHER
becomes ``every_budget``. NEW adds mechanisms, or measures them again, with ratios to the softmax of the same run.
Without an argument the script only writes

* docs/results/mechanisms/*.csv and the picture there,
* the marked blocks of docs/results/mechanisms.md, docs/how-to/choose-a-mechanism.md and README.md.

Figures of tasks come from the JSON files in docs/results/reproduction.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from longspan._utils.spec import head
from longspan.attention.base import REGISTRY
from longspan.attention.families import FAMILIES
from longspan.attention.registry import list_mechanisms

from .._utils import plots
from ..bench import figures, members
from ..bench.report import rows_csv
from . import DOCS, ROOT
from .blocks import replace

CHOOSER, PAGE = DOCS / "how-to" / "choose-a-mechanism.md", DOCS / "results" / "mechanisms.md"
README = ROOT / "README.md"
TABLES, RESULTS = DOCS / "results" / "mechanisms", ROOT / "benchmarks" / "results"
TASKS = DOCS / "results" / "reproduction"
MACHINE, NAME = "epyc-2-cores", "every"
AT = 16384  # tokens of the main table
DELTA = ("deltanet", "fast_weights", "gated_deltanet", "kda", "preconditioned_deltanet", "rwkv7")
# What the chooser distinguishes, by its name in tables: the family of the registry, when to use it, and the default.
# The family of gated mechanisms has two.
KINDS = {
    "softmax": ("softmax", "exact attention, up to about 2,000 tokens", "softmax"),
    "sparse": ("sparse", "mostly nearby tokens, exactly", "local"),
    "linear": ("linear", "the highest speed", "linear"),
    "gated": ("gated", "a language model with a small state", "gla"),
    "delta rule": ("gated", "recall of facts from a small state", "gated_deltanet"),
    "content": ("content", "distant tokens, chosen by content", "routing"),
    "compressed": ("compressed", "a summary of long inputs", "luna"),
}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PICTURE = "defaults.png"
FORWARD, TRAINING, STEP = members.MODES
Result = dict[str, Any]


def group(candidate: str) -> str:
    """Return the kind that a mechanism belongs to."""
    family = REGISTRY[head(candidate)].family
    if head(candidate) in DELTA:
        return "delta rule"
    return next(name for name, (of, _, _) in KINDS.items() if of == family)


class Figures:
    """Access to the figures of one ``longspan bench members`` result."""

    def __init__(self, result: Result):
        self.result = result
        self.at = {(row["candidate"], row["mode"], row["length"]): row for row in result["rows"]}
        self.lengths = sorted({row["length"] for row in result["rows"]})
        self.growth = {one["candidate"]: one for one in result["growth"]}

    def value(self, candidate: str, mode: str, what: str, length: int = AT) -> Any:
        """Return one figure; None where it was not measured."""
        return self.at.get((candidate, mode, length), {}).get(what)

    def by_length(self, candidate: str, mode: str) -> dict[int, float]:
        """Return the seconds by length."""
        return {n: self.at[candidate, mode, n]["seconds"] for n in self.lengths if (candidate, mode, n) in self.at}

    def crossing(self, candidate: str, mode: str) -> str:
        """Return from how many tokens on a mechanism is faster than softmax; "" where it never is."""
        said = figures.crossover(self.by_length(candidate, mode), self.by_length("softmax", mode))
        return str(self.lengths[0]) if said == "at every size" else said[5:] if said.startswith("from") else ""


def link(candidate: str) -> str:
    """Return a mechanism's name or spec with a link to its section in the reference."""
    name = head(candidate)
    return f"[`{candidate}`](../reference/mechanisms/{REGISTRY[name].family}.md#{name.replace('_', '-')})"


def table(titles: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> str:
    """Return a Markdown table whose first ``left`` columns are aligned to the left, the others to the right."""
    titles = list(titles)
    align = [":---"] * left + ["---:"] * (len(titles) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, align, *rows))


def number(value: float | None, factor: float = 1.0) -> str:
    """Return three significant digits; a dash for None.

    >>> number(0.0738, 1e3), number(3.95, 1e3), number(None)
    ('73.8', '3,950', '-')
    """
    if value is None:
        return "-"
    value *= factor
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def row(found: Figures, name: str) -> list[str]:
    """Return the figures at ``AT`` tokens: times in ms, speed-ups, peak MB, state kB, the us of a decode step."""
    step = {n: found.value(name, STEP, n) for n in ("state_bytes", "seconds")}
    return [
        number(found.value(name, FORWARD, "seconds"), 1e3),
        number(found.value(name, TRAINING, "seconds"), 1e3),
        number(found.value(name, FORWARD, "ratio")),
        number(found.value(name, TRAINING, "ratio")),
        number(found.value(name, TRAINING, "mb")),
        number(step["state_bytes"], 1 / 1024),
        number(step["seconds"], 1e6),
    ]


COLUMNS = (
    "forward, ms",
    "with backward, ms",
    "speed-up, forward",
    "speed-up, with backward",
    "peak MB",
    "state, kB",
    "decode step, us",
)


def every(found: Figures) -> str:
    """Return the sortable table of all mechanisms, the fastest to train first."""
    titles = ("mechanism", "kind", "causal", *COLUMNS, "faster from, tokens")
    rows = [
        (
            link(name),
            group(name),
            "yes" if one["causal"] else "no",
            *row(found, name),
            f"{int(found.crossing(name, TRAINING)):,}" if found.crossing(name, TRAINING) else "-",
        )
        for name, one in sorted(found.growth.items(), key=lambda item: found.value(item[0], TRAINING, "seconds") or 1e9)
    ]
    # Raw HTML, so that the page is a plain table where no script runs.
    return f'<div class="sortable">\n\n{table(titles, rows, 3)}\n\n</div>'


def defaults(found: Figures) -> str:
    """Return the table of the kinds with the recommended default of each."""
    titles = ("kind", "default", *COLUMNS)
    rows = [(name, link(spec), *row(found, spec)) for name, (_, _, spec) in KINDS.items()]
    return f'<div class="compact">\n\n{table(titles, rows, 2)}\n\n</div>'


def summary(found: Figures) -> str:
    """Return the part of the README: how many mechanisms there are, and the default of each kind."""
    names = list_mechanisms()
    counts = NUMBERS[len({REGISTRY[name].family for name in names})], NUMBERS[len(KINDS)]
    opening = (
        f"longspan has {len(names)} mechanisms in {counts[0]} families. "
        f"Find your case among these {counts[1]}, and start with its default:"
    )
    titles = ("you need", "kind", "default", "speed-up, forward", "with backward", "state")
    rows = [
        (
            need,
            (FAMILIES[family] if family == name else name).removesuffix(" and the delta rule").lower(),
            f"`{spec}`",
            *(number(found.value(spec, mode, "ratio")) for mode in (FORWARD, TRAINING)),
            plots.readable_bytes(found.value(spec, STEP, "state_bytes")),
        )
        for name, (family, need, spec) in KINDS.items()
    ]
    return f"{opening}\n\n{table(titles, rows, 3)}"


def picture(found: Figures) -> str:
    """Return the picture of the defaults."""
    return f"![Time and state of the defaults by length](../results/mechanisms/{PICTURE})"


def where(found: Figures) -> str:
    """Return how and on which machine the figures were measured."""
    options, facts = found.result["options"], found.result["machine"]
    lengths, limit = ",".join(map(str, options["lengths"])), f"{options['limit']:g}"
    line = f"longspan bench members --lengths {lengths} --limit {limit} --rounds {options['rounds']}"
    machine = "; ".join(f"{name} {value}" for name, value in facts.items())
    again = ",".join(map(str, found.result.get("again", ())))
    more = f" The figures at {again} tokens come from a later run with `--lengths {again}`." if again else ""
    if new := found.result.get("added", ()):
        names = ", ".join(f"`{name}`" for name in new)
        more += f" Those of {names} come from a later run on the same machine, compared with its own softmax."
    return f"```sh\n{line}\n```\n\nMethod: {found.result['how']}.{more}\n\nMachine: {machine}."


def unmeasured(result: Result) -> list[str]:
    """List the mechanisms that the run did not measure."""
    known = {one["candidate"] for one in result["growth"]}
    return [name for name in list_mechanisms() if name not in known]


def missing(found: Figures) -> str:
    """Return a sentence about mechanisms that are newer than the run."""
    names = unmeasured(found.result)
    return f"Not measured yet: {', '.join(map(link, names))}." if names else "The table has every mechanism."


def by_length(found: Figures) -> list[Result]:
    """Return the rows of by_length.csv: every measured figure."""
    keys = ("seconds", "mb", "state_bytes", "ratio")
    return [
        {"mechanism": one["candidate"], "mode": one["mode"], "tokens": one["length"]}
        | {{"mb": "peak_mb", "ratio": "speed_up"}.get(key, key): one.get(key) for key in keys}
        for one in found.result["rows"]
    ]


def growth(found: Figures) -> list[Result]:
    """Return the rows of growth.csv: declared cost, fitted exponents, and where each passes softmax."""
    return [
        {
            "mechanism": name,
            "cost": one["cost"],
            "declared_exponent": one["declared"],
            **{
                f"{what.replace('+', ' and ')} exponent".replace(", ", " ").replace(" ", "_"): round(one[what], 2)
                for mode in members.MODES
                for what in (mode, f"memory, {mode}")
                if what in one
            },
            **{
                f"faster_than_softmax_from_{word}": found.crossing(name, mode)
                for word, mode in (("forward", FORWARD), ("with_backward", TRAINING))
                if name != "softmax"
            },
        }
        for name, one in found.growth.items()
    ]


def left_out(found: Figures) -> list[Result]:
    """Return the rows of left_out.csv: what was not measured, and why."""
    result = found.result
    return [
        {"mechanism": one["candidate"], "reason": one["reason"]} for one in (*result["refused"], *result["left_out"])
    ]


def budget(_: Figures) -> list[Result]:
    """Return the rows of budget.csv: mechanisms with 64 slots, landmarks, points or clusters, and Reformer."""
    path = RESULTS / MACHINE / f"{NAME}_budget.json"
    return by_length(Figures(json.loads(path.read_text(encoding="utf-8")))) if path.exists() else []


def _task(name: str) -> Result | None:
    path = TASKS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def recall(_: Figures) -> list[Result]:
    """Return the rows of recall.csv: associative recall by width, with the bytes of the state."""
    result = _task("mqar")
    if result is None:
        return []
    pairs = result["settings"]["pairs"]
    rows = []
    for spec in dict.fromkeys(one["spec"] for one in result["rows"]):
        for dim in result["settings"]["dims"]:
            of = [one for one in result["rows"] if one["spec"] == spec and one["dim"] == dim]
            best = max(of, key=lambda one: one["accuracy"][-1])
            shares = {f"recalled_of_{n}": round(share, 4) for n, share in zip(pairs, best["accuracy"], strict=True)}
            rows.append({"mechanism": spec, "width": dim, "state_bytes": best["bytes"], **shares})
    return rows


def tasks(_: Figures) -> list[Result]:
    """Return the rows of tasks.csv: what the experiments on copying and images measured."""
    rows = []
    for path in sorted(TASKS.glob("copy*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        symbols = found["settings"]["length"] // 2 - 1
        rows += [
            {
                "task": f"copy {symbols} symbols",
                "attention": one["spec"],
                "seed": one["seed"],
                "test_nats": one["test"],
                "updates_until_below_0.01": one["reached"],
            }
            for one in found["rows"]
        ]
    for path in sorted(TASKS.glob("images*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        data = found["settings"]["data"].partition(":")[0]
        for one in found["rows"]:
            if one["what"] == "training":
                steps, seconds, _ = one["curve"][-1]
                rows.append(
                    {
                        "task": f"generate {data}",
                        "attention": one["attention"],
                        "test_bits_per_dim": round(one["test"], 3),
                        "steps": steps,
                        "seconds": round(seconds),
                    }
                )
    return rows


def forecasts(_: Figures) -> list[Result]:
    """Return the rows of forecasts.csv: squared errors on ETTh1 by horizon, the smallest sum first."""
    found = _task("forecast")
    if found is None:
        return []
    horizons = found["settings"]["horizons"]
    errors: dict[str, dict[int, list[float]]] = {}
    for one in found["rows"]:
        errors.setdefault(one["model"], {}).setdefault(one["horizon"], []).append(one["mse"])
    means = {model: {h: sum(of[h]) / len(of[h]) for h in horizons} for model, of in errors.items()}
    return [
        {"model": model} | {f"hours_{h}": round(means[model][h], 3) for h in horizons}
        for model in sorted(means, key=lambda model: sum(means[model].values()))
    ]


BLOCKS: dict[str, Callable[[Figures], str]] = {
    "every": every,
    "defaults": defaults,
    "summary": summary,
    "picture": picture,
    "where": where,
    "missing": missing,
}
CSV: dict[str, Callable[[Figures], list[Result]]] = {
    "by_length": by_length,
    "growth": growth,
    "budget": budget,
    "left_out": left_out,
    "recall": recall,
    "tasks": tasks,
    "forecasts": forecasts,
}


def written(text: str, result: Result) -> str:
    """Return the page with every marked block replaced. Raises ValueError for an unknown marker."""
    found = Figures(result)

    def block(name: str) -> str:
        if name not in BLOCKS:
            raise ValueError(f"unknown marker {name!r}; known: {', '.join(BLOCKS)}")
        return f"\n{BLOCKS[name](found)}\n\n"

    return replace(text, block)


def draw(path: Path, result: Result) -> None:
    """Draw time with backward and size of the state by length for the defaults: wide, and narrow for phones."""
    found, plt = Figures(result), plots.pyplot()
    names, rows = [spec for _, _, spec in KINDS.values()], []
    for name in names:
        rows += [{"candidate": name, "length": n, "seconds": t} for n, t in found.by_length(name, TRAINING).items()]
        states = {n: found.value(name, STEP, "state_bytes", n) for n in found.lengths}
        rows += [
            {"candidate": name, "length": n, "state_bytes": size} for n, size in states.items() if size is not None
        ]
    for narrow in (False, True):
        file = path.with_stem(f"{path.stem}-narrow") if narrow else path
        plots.save(plt, plots.time_and_state(plt, rows, narrow=narrow), file, dark=True)


def measured_again(result: Result, again: Result) -> Result:
    """Return ``result`` with the figures of ``again`` at its lengths, and with exponents fitted to all lengths."""
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


def added(result: Result, more: Result) -> Result:
    """Return ``result`` with the mechanisms of ``more``, new or measured again, except for softmax."""
    before = result.get("added", [])
    names = [one["candidate"] for one in more["growth"] if one["candidate"] != "softmax"]
    found = {**result, "added": list(dict.fromkeys([*before, *names]))}
    for part in ("rows", "growth", "left_out"):
        old = [one for one in result[part] if one["candidate"] not in names]
        found[part] = [*old, *(one for one in more[part] if one["candidate"] in names)]
    return found


def main(*folders: str) -> None:
    """Copy new results, and write the pages, the CSV files and the picture."""
    place = RESULTS / MACHINE
    for text in folders:
        both, _, word = text.partition("=")
        folder, _, again = both.partition("+")
        place.mkdir(parents=True, exist_ok=True)
        if word == "new":
            one, other = (
                json.loads(path.read_text(encoding="utf-8"))
                for path in (place / f"{NAME}.json", Path(folder) / "members.json")
            )
            _write(place, NAME, added(one, other))
            continue
        # A run at one length has no picture here.
        for ending in (".json", ".csv") if word else (".json", ".csv", ".png"):
            kept = f"{NAME}_{word}" if word else NAME
            shutil.copyfile(Path(folder) / f"members{ending}", place / f"{kept}{ending}")
        if again:
            one, other = (json.loads((Path(at) / "members.json").read_text(encoding="utf-8")) for at in (folder, again))
            _write(place, kept, measured_again(one, other))
    result = json.loads((place / f"{NAME}.json").read_text(encoding="utf-8"))
    TABLES.mkdir(parents=True, exist_ok=True)
    for name, rows in CSV.items():
        (TABLES / f"{name}.csv").write_text(rows_csv(rows(Figures(result))), encoding="utf-8")
    for path in (CHOOSER, PAGE, README):
        path.write_text(written(path.read_text(encoding="utf-8"), result), encoding="utf-8")
    draw(TABLES / PICTURE, result)


def _write(place: Path, name: str, result: Result) -> None:
    """Write a result with its CSV and picture."""
    (place / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    (place / f"{name}.csv").write_text(rows_csv(result["rows"]), encoding="utf-8")
    plots.draw(place / f"{name}.png", result)
