"""Results as files (JSON, CSV, PNG) and as text."""

import contextlib
import csv
import io
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from longspan._utils import atomic_io, optional_deps, png, signals, terminal
from longspan._utils.locks import exclusive_lock
from longspan.models import checkpoint

from .._utils import plots
from .._utils.tables import Table, aligned

Result = dict[str, Any]


@contextlib.contextmanager
def claimed(out: Path, benchmark: str) -> Iterator[None]:
    """Lock the output files and check that they can be written, before any measurement.

    Raises ValueError, ImportError.
    """
    optional_deps.need("the benchmarks", "matplotlib", "PIL")
    png.claim_folder(out)
    png.check(out / f"{benchmark}.png")
    for end in ("json", "csv", "partial.json", "md"):
        atomic_io.check_output(out / f"{benchmark}.{end}")
    plots.pyplot()
    with exclusive_lock(out / f".{benchmark}.lock", str(out / f"{benchmark}.json")):
        yield


def collect(out: Path, benchmark: str, results: Generator[Result, None, None]) -> Result:
    """Run a benchmark and write its files atomically.

    Args:
        out: the output folder.
        benchmark: the name of the files ``BENCHMARK.json``, ``.csv`` and ``.png``.
        results: yields the growing result. Until the end it is in ``BENCHMARK.partial.json``, with ``"partial": true``.

    Returns:
        The last result.

    Raises:
        signals.Interrupted: after Ctrl-C or SIGTERM; the message has the partial file.
        ValueError: if a file cannot be written.
    """
    path = out / f"{benchmark}.partial.json"
    result: Result = {"rows": []}
    count = 0  # figures in the partial file
    try:
        with contextlib.closing(results):
            for result in results:
                _write(path, {"partial": True, **result})
                count = len(result["rows"])
        _write(out / f"{benchmark}.json", result)
        checkpoint.write_text(out / f"{benchmark}.csv", rows_csv(result["rows"]))
        plots.draw(out / f"{benchmark}.png", result)
    except KeyboardInterrupt as error:
        raise signals.with_text(error, f"interrupted: {_kept(path, count)}") from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ValueError(f"{where}{error.strerror or error}; {_kept(path, count)}") from error
    path.unlink(missing_ok=True)
    return result


def _kept(path: Path, count: int) -> str:
    return f"{count} figures so far are in {path}" if count else "before the first figure; nothing was written"


def _write(path: Path, result: Result) -> None:
    checkpoint.write_text(path, json.dumps(result, indent=2) + "\n")


def rows_csv(rows: Sequence[dict[str, Any]]) -> str:
    """CSV of rows, which can have different columns."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def show(result: Result, tables: Callable[[Result], list[Table]], width: int | None = None) -> str:
    """Format a result as text: tables, method, and which candidates are missing and why.

    Args:
        result: what a benchmark has measured.
        tables: the benchmark's function from a result to tables.
        width: columns of text; None: no limit.
    """
    parts = [aligned(table, width) for table in tables(result)]
    notes = [f"Method: {result['how']}."]
    notes += [f"Refused: {one['candidate']}: {one['reason']}" for one in result.get("refused", [])]
    notes += [f"Skipped: {one['candidate']}: {one['reason']}" for one in result.get("left_out", [])]
    rejected, disturbed = (sum(row.get(name) or 0 for row in result["rows"]) for name in ("rejected", "disturbed"))
    samples = sum(row.get("samples") or 0 for row in result["rows"])
    busy = f", {rejected} rejected" if rejected else ""
    busy += f", {disturbed} of them taken while the machine was busy" if disturbed else ""
    if samples or rejected:
        notes.append(f"Samples: {samples} kept{busy}.")
    notes.append("Machine: " + "; ".join(f"{name} {value}" for name, value in result["machine"].items()) + ".")
    if width:
        notes = [line for note in notes for line in terminal.wrapped(note, 2, first="", width=width)]
    return "\n\n".join([*parts, "\n".join(notes)])
