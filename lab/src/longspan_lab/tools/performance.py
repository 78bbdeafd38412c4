"""Put the figures and pictures of benchmarks into docs/results.

    longspan bench KIND --out FOLDER
    python -m longspan_lab.tools performance FOLDER

copies the JSON, CSV and PNG files in FOLDER to ``benchmarks/results/MACHINE``, where MACHINE is the first entry of
``MACHINES``. It then writes docs/results/benchmarks/MACHINE.md, the raw output of every run on that machine, and the
marked blocks of docs/results/performance.md, each with the picture of the first machine that has the benchmark. Without
an argument it only writes the pages.

Some results have another name in ``COMMANDS`` than the files of their command, such as ``serve_peer``: rename the three
files in FOLDER first.

A ``gpu.json`` of ``make gpu`` in FOLDER goes to ``benchmarks/results/CARD``. Its parts replace those of an earlier run
on the same card; other parts stay. Each card gets a page, and the block ``gpu`` has the main figures of all cards.

The blocks ``shares`` and ``token_steps`` are tables over all machines, from profile.json and profile_avx2.json. For a
machine without profile.json they take attention.json, gated.json and step.json.
"""

import importlib
import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from ..bench import profile, report
from . import DOCS, ROOT
from .blocks import replace

PAGE, RAW = DOCS / "results" / "performance.md", DOCS / "results" / "benchmarks"
RESULTS = ROOT / "benchmarks" / "results"
MACHINES = ("xeon-amx-2-cores", "xeon-avx512-2-cores", "epyc-2-cores", "epyc-avx2-2-cores")
TITLES = {
    "xeon-amx-2-cores": "Xeon with AMX, 2 cores",
    "xeon-avx512-2-cores": "Xeon with AVX-512, 2 cores",
    "epyc-2-cores": "EPYC, 2 cores",
    "epyc-avx2-2-cores": "EPYC with AVX2, 2 cores",
}
NOTES = {
    "xeon-avx512-2-cores": "These figures were measured with earlier versions of the kernels, on an older processor "
    "with smaller caches. Most ratios to `ft` are larger here, and decode steps of the delta rule for 64 sequences "
    "take more than 1.3 of their bound.",
}
# Kind of benchmark -> the module of longspan_lab.bench that formats it.
KINDS = {
    "limits": "limits",
    "attention": "attention",
    "step": "step",
    "generate": "decoding",
    "gated": "gated",
    "depth": "depth",
    "convolution": "convolution",
    "transformers": "hybrids",
    "pattern": "pattern",
    "rwkv7": "rwkv7",
    "serve": "serve",
    "serve_peer": "serve_peer",
    "profile": "profile",
}
# Name of a result -> the arguments of `longspan bench` that reproduce it.
COMMANDS = {
    "limits": "limits",
    "attention": "attention linear linear@torch sdpa ft performer --peers --lengths 256,512,4096,16384,65536 "
    "--rounds 3 --limit 14",
    "members": "attention softmax@module linear@module performer@module polynomial gated_deltanet 'gla(expand_k=1.0)' "
    "--lengths 256,1024,4096,16384 --no-backward --rounds 3",
    "degree2": "attention softmax@module polynomial --size 16 --lengths 256,1024,4096,16384 --no-backward --rounds 3",
    "gated": "gated",
    "shared": "gated --size 128 --heads 32 --key-heads 16 --length 2048 --batches 1,16",
    "pattern": "pattern --rounds 3 --matrix 16384 --limit 30",
    "convolution": "convolution",
    "depth": "depth --depths 2,8,24,64 --limit 6000",
    "transformers": "transformers kimi mamba2 --dtypes float32 --rounds 2",
    "transformers_bfloat16": "transformers kimi mamba2 --dtypes bfloat16",
    "transformers_qwen_granite": "transformers qwen3.5 granite",
    "transformers_recurrent": "transformers mamba mamba_layer rwkv4 recurrentgemma xlstm --dtypes float32 --rounds 2",
    "rwkv7": "rwkv7 --rounds 2",
    "serve": "serve --rounds 3",
    "serve_peer": "serve mamba2 --peer transformers --rounds 3",
    "profile": "profile",
    "profile_avx2": "profile",
    "step": "step --peers",
    "generate": "generate --peers",
    "positions": "generate linear@engine softmax@engine linear@engine@bf16 ft --positions 784,3072,16384 --batches 1 "
    "--images 0",
}
# The same for a result that a machine has with other arguments.
SPECIAL = {
    ("xeon-avx512-2-cores", "shared"): "gated 'gated delta' 'channel delta' --size 128 --heads 32 --key-heads 16 "
    "--length 2048 --batches 1,16 --rounds 3",
    ("epyc-2-cores", "attention"): "attention linear linear@torch ft --peers --lengths 512,4096,16384,65536 --rounds 3 "
    "--limit 14",
    ("epyc-2-cores", "profile"): "profile --rounds 5",
    ("epyc-2-cores", "profile_avx2"): "profile --rounds 5",
}
# What stands before the command of a result.
ENVIRONMENT = {"profile_avx2": "LONGSPAN_ISA=avx2 "}
# Results whose figures are columns of the tables over all machines -> what is added to the name of the machine.
PROFILES = {"profile": "", "profile_avx2": ", AVX2 kernels"}
GPU = "gpu"
COMMAND = "python -m longspan_lab.tools performance FOLDER"
UNMEASURED = f"Not measured yet. `make gpu` measures on a CUDA GPU, and `{COMMAND}` adds its gpu.json."
SCRIPT = ROOT / "lab" / "gpu.py"
# Operation -> its candidates in Triton, in torch and in flash-linear-attention.
CANDIDATES = {
    "linear attention": ("linear_attention, triton", "linear_attention, torch", "fla chunk_linear_attn"),
    "decay per head": ("decay_attention, head, triton", "decay_attention, head, torch", "fla chunk_simple_gla"),
    "delta rule": ("delta_rule, triton", "delta_rule, torch", "fla chunk_delta_rule"),
}


def block(name: str) -> str:
    """Return the picture of a result with its machine and a link to the raw figures, or how to measure it.

    Some blocks are tables over all machines instead.
    """
    if name in TABLES:
        return TABLES[name]()
    machine = next((m for m in MACHINES if (RESULTS / m / f"{name}.json").exists()), None)
    if machine is None:
        return f"\nNot measured yet. `{COMMAND}` adds {name}.json of a run's FOLDER.\n\n"
    picture = f"../../benchmarks/results/{machine}/{name}.png"
    raw = f"[raw figures](benchmarks/{machine}.md#{name.replace('.', '')})"
    return f"\n![{name}]({picture})\n\n*{TITLES.get(machine, machine)}; {raw}.*\n\n"


class Column(NamedTuple):
    """The figures of the kernels on one processor, or with one instruction set."""

    title: str
    shares: dict[tuple[str, int, str], float]
    """kernel, tokens, mode -> the part of the GEMM peak"""
    steps: dict[tuple[str, int], float]
    """kernel, sequences -> the time of a token relative to scaling its state in place"""


def columns() -> list[Column]:
    """Return the figures of every machine."""
    found = []
    for machine in MACHINES:
        title = TITLES.get(machine, machine)
        results = {name: result_of(machine, name) for name in PROFILES}
        if not results["profile"]["rows"]:
            found.append(older(machine, f"{title}*"))
        for name, result in results.items():
            sequences, steps = ([r for r in result["rows"] if r["what"] == what] for what in ("sequence", "step"))
            shares = {(row["kernel"], row["length"], row["mode"]): row["share"] for row in sequences}
            bounds = {(row["kernel"], row["batch"]): row["to_bound"] for row in steps}
            found.append(Column(title + PROFILES[name], shares, bounds))
    return [column for column in found if column.shares or column.steps]


def result_of(machine: str, name: str) -> dict[str, Any]:
    """Return a result of a machine; one without rows if it was not measured."""
    path = RESULTS / machine / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}


def older(machine: str, title: str) -> Column:
    """Return what follows from the results of ``attention``, ``gated`` and ``step``."""
    attention, gated, step = (result_of(machine, name) for name in ("attention", "gated", "step"))
    shares = {
        ("linear", row["length"], row["mode"]): row["share"]
        for row in attention["rows"]
        if row["candidate"] == "linear"
    }
    bounds = {("linear", row["batch"]): row["to_bound"] for row in step["rows"] if row["candidate"] == "linear"}
    for row in gated["rows"]:
        if row["candidate"] != "native" or row["rule"] not in profile.KERNELS:
            continue
        if row["mode"] == "step":
            if row["rule"] in profile.STEPS:
                bounds[row["rule"], row["batch"]] = row["to_bound"]
            continue
        options = gated["options"]
        tokens = options["batch"] * options["heads"] * options["length"]
        operations = profile.operations(row["rule"], row["mode"], options["size"], tokens)
        share = operations / row["seconds"] / 1e9 / gated["gemm_gflops"]
        shares[row["rule"], options["length"], row["mode"]] = share
    return Column(title, shares, bounds)


def shares() -> str:
    """Return the table of shares of the GEMM peak."""
    found = columns()
    there = {key[:2] for column in found for key in column.shares}
    cells = [
        [kernel, f"{length:,}", *(_pair(column, kernel, length) for column in found)]
        for kernel in profile.KERNELS
        for length in sorted(n for name, n in there if name == kernel)
    ]
    above = "Percent of the rate of matrix products (GEMM) in the same run, forward / with backward. `-`: not measured."
    copied = [name for name, kernel in profile.KERNELS.items() if kernel.bound == profile.COPY]
    if {name for name, _ in there} & {*copied}:
        above += f" {', '.join(copied).capitalize()}: percent of the rate of a copy instead."
    return _across(above, "tokens", found, cells)


def _pair(column: Column, kernel: str, length: int) -> str:
    pair = [column.shares.get((kernel, length, mode)) for mode in profile.MODES]
    return "-" if pair == [None, None] else " / ".join("-" if one is None else f"{100 * one:.0f}" for one in pair)


def token_steps() -> str:
    """Return the table of token steps relative to their bound."""
    found = columns()
    there = {key for column in found for key in column.steps}
    cells = [
        [kernel, f"{batch:,}", *(_cell(column.steps.get((kernel, batch))) for column in found)]
        for kernel in profile.STEPS
        for batch in sorted(n for name, n in there if name == kernel)
    ]
    return _across("Time of a token relative to scaling its state in place.", "sequences", found, cells)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _across(above: str, by: str, found: list[Column], cells: list[list[str]]) -> str:
    """Return a table with a column for each processor, as a block."""
    if not cells:
        return f"\nNot measured yet. `{COMMAND}` adds profile.json of a run's FOLDER.\n\n"
    head = ["kernel", by, *(column.title for column in found)]
    lines = [above, "", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells))]
    if any(column.title.endswith("*") for column in found):
        lines += ["", "\\* from `bench attention`, `bench gated` and `bench step`, measured with earlier versions."]
    return "\n" + "\n".join(lines) + "\n\n"


def cards() -> list[str]:
    """List the folders of the GPUs that have been measured."""
    return sorted(path.parent.name for path in RESULTS.glob(f"*/{GPU}.json"))


def gpu_result(card: str) -> dict[str, Any]:
    """Return the figures of a GPU."""
    return json.loads((RESULTS / card / f"{GPU}.json").read_text(encoding="utf-8"))


def gpus() -> str:
    """Return the main figures of every GPU, or how to measure them."""
    if not cards():
        return f"\n{UNMEASURED}\n\n"
    parts = ["```{toctree}\n:hidden:\n\n" + "\n".join(f"benchmarks/{card}" for card in cards()) + "\n```"]
    for card in cards():
        result = gpu_result(card)
        parts.append(f"### {result['card']}")
        parts += [table for table in (operations(result), steps(result)) if table]
        parts.append(f"*[All figures and failures](benchmarks/{card}.md).*")
    return "\n" + "\n\n".join(parts) + "\n\n"


def operations(result: dict[str, Any]) -> str:
    """Return a table of times by operation and size; empty if none was measured."""
    rows = {
        (row["candidate"], row["mode"], row["n"], row["dim"]): row for row in result["rows"] if row["part"] == "bench"
    }
    sizes = sorted({key[2:] for key in rows})
    if not sizes:
        return ""

    def cell(name: str, n: int, dim: int) -> str:
        pair = [rows.get((name, mode, n, dim), {}) for mode in ("forward", "training")]
        return " / ".join(f"{row['ms']:.2f}" if "ms" in row else "-" for row in pair)

    lines = ["Milliseconds forward / with backward, bfloat16. `-`: not measured or not served.", ""]
    lines += [
        "| operation | tokens | head size | Triton | torch | fla | causal SDPA |",
        "|---|---|---|---|---|---|---|",
    ]
    for operation, names in CANDIDATES.items():
        for n, dim in sizes:
            cells = [cell(name, n, dim) for name in (*names, "sdpa causal")]
            lines.append(f"| {operation} | {n} | {dim} | {' | '.join(cells)} |")
    return "\n".join(lines)


def steps(result: dict[str, Any]) -> str:
    """Return a table of the time of a generated token; empty if none was measured."""
    rows = {(row["mechanism"], row["batch"], row.get("how")): row for row in result["rows"] if row["part"] == "decode"}
    pairs = list(dict.fromkeys(key[:2] for key in rows))
    if not pairs:
        return ""
    lines = ["Milliseconds of a generated token, 12 layers of width 1024, bfloat16.", ""]
    lines += ["| attention | sequences | step by step | CUDA graph |", "|---|---|---|---|"]
    for spec, batch in pairs:
        measured = [rows.get((spec, batch, how), {}) for how in ("eager", "graph")]
        cells = [f"{row['token_ms']:.3f}" if "token_ms" in row else "-" for row in measured]
        lines.append(f"| `{spec}` | {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gpu_page(card: str) -> str:
    """Return the page of one GPU: the tables that the script printed."""
    result = gpu_result(card)
    text = runpy.run_path(str(SCRIPT), run_name="gpu")["tables"](result).strip("\n")
    source = f"benchmarks/results/{card}/{GPU}.json"
    return (
        f"# {result['card']}\n\nThe raw output behind [](../performance.md), from `{source}`."
        f"\n\n```sh\nmake gpu\n```\n\n```text\n{text}\n```\n"
    )


def add_gpu(path: Path) -> None:
    """Add the figures of a run of ``make gpu`` to those of its card."""
    new = json.loads(path.read_text(encoding="utf-8"))
    if new["quick"]:
        raise ValueError(f"{path} is of a trial with --quick; its figures are no measurements")
    folder = RESULTS / re.sub(r"[^a-z0-9]+", "-", new["card"].lower()).strip("-")
    target = folder / f"{GPU}.json"
    if target.exists() and not target.samefile(path):
        old = json.loads(target.read_text(encoding="utf-8"))
        kept = [row for row in old["rows"] if row["part"] not in new["parts"]]
        new |= {"rows": kept + new["rows"], "parts": old["parts"] | new["parts"]}
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")


def page(text: str) -> str:
    """Return the page with every marked block replaced."""
    return replace(text, block)


def names(machine: str) -> list[str]:
    """List the results of a machine that its page shows, in the order of ``COMMANDS``."""
    found = [path.stem for path in (RESULTS / machine).glob("*.json")]
    return [name for name in COMMANDS if name in found]


def raw(machine: str) -> str:
    """Return the page of one machine: every result as its command printed it."""
    parts = [f"# {TITLES.get(machine, machine)}"]
    parts.append(f"The raw output behind [](../performance.md), from the JSON files in `benchmarks/results/{machine}`.")
    parts += [NOTES[machine]] if machine in NOTES else []
    for name in names(machine):
        result = json.loads((RESULTS / machine / f"{name}.json").read_text(encoding="utf-8"))
        kind = result["benchmark"]
        text = report.show(result, importlib.import_module(f"longspan_lab.bench.{KINDS[kind]}").text)
        command = SPECIAL.get((machine, name), COMMANDS[name])
        command = f"{ENVIRONMENT.get(name, '')}longspan bench {command}"
        parts.append(f"## {name}\n\n```sh\n{command}\n```\n\n```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


# Name of a block without a picture -> its text.
TABLES = {GPU: gpus, "shares": shares, "token_steps": token_steps}


def main(*folders: str) -> None:
    """Copy new results and write the pages."""
    (RESULTS / MACHINES[0]).mkdir(parents=True, exist_ok=True)
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.json"))):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("benchmark") == GPU:
            add_gpu(path)
        # Other kinds, such as ``members``, belong to longspan_lab.tools choosing.
        if found.get("benchmark") in KINDS and not found.get("partial"):
            for ending in (".json", ".csv", ".png"):
                shutil.copyfile(path.with_suffix(ending), RESULTS / MACHINES[0] / path.with_suffix(ending).name)
    RAW.mkdir(parents=True, exist_ok=True)
    for machine in MACHINES:
        if names(machine):
            (RAW / f"{machine}.md").write_text(raw(machine), encoding="utf-8")
    for card in cards():
        (RAW / f"{card}.md").write_text(gpu_page(card), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
