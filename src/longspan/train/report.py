"""Reports of a run: the bar and the lines that people read, the CSV and TensorBoard files that programs read."""

import csv
import io
import time
from pathlib import Path
from typing import Any

from ..checkpoint import write_text

COLUMNS: tuple[str, ...] = (
    "step", "loss", "bits", "validation_bits", "penalty", "learning_rate", "gradient_norm", "tokens_per_second",
    "seconds",
)  # fmt: skip
EVERY = 10


class Table:
    """metrics.csv, one row at a time. Lightning's own CSV logger would empty the file of a run that is resumed."""

    def __init__(self, path: Path, start: int):
        """Keep the rows up to step ``start``, which is where the run goes on; later ones will be written again."""
        kept = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                # A process killed while writing leaves a last row that is cut off.
                kept = [row for row in csv.DictReader(file) if _complete(row) and int(row["step"]) <= start]
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        # A table that an older version began has fewer columns.
        writer.writerows({name: row.get(name, "") for name in COLUMNS} for row in kept)
        write_text(path, text.getvalue())
        self.path = path

    def write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n").writerow(row)


class Bar:
    """A line that moves: step, loss, bits, tokens/s, time left; and above it the lines that stay."""

    def __init__(self, steps: int, unit: str, console: Any = None):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = console or Console(stderr=True)
        self.unit = unit
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            # Where nobody watches, a file or a pipe, only the lines.
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("", total=steps, figures="")

    def step(self, step: int, loss: float, bits: float, speed: float, penalty: float | None = None) -> None:
        own = "" if penalty is None else f"penalty {penalty:.4g}  "
        figures = f"loss {loss:.4f}  {bits:.3f} bits/{self.unit}  {own}{_short(speed)} tokens/s"
        self.progress.update(self.task, completed=step, figures=figures)

    def line(self, text: str) -> None:
        self.progress.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def start(self, step: int) -> None:
        self.progress.update(self.task, completed=step)
        # Without this the steps of earlier processes would count as done in no time, and the time left be wrong.
        self.progress.reset(self.task, completed=step)
        self.progress.start()

    def stop(self) -> None:
        self.progress.stop()


class Clock:
    """Seconds spent on steps and nothing else, and tokens per second, both smoothed over some twenty steps."""

    def __init__(self, tokens: int):
        """``tokens``: how many one step takes in, on all devices together."""
        self.tokens, self.begin, self.mark, self.step = tokens, time.monotonic(), time.monotonic(), 0.0

    def lap(self) -> float:
        """A step has ended. -> tokens per second."""
        spent = time.monotonic() - self.mark
        self.step = 0.95 * self.step + 0.05 * spent if self.step else spent
        return self.tokens / max(self.step, 1e-9)

    def resume(self) -> None:
        """The next step begins."""
        self.mark = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the clock was made."""
        return time.monotonic() - self.begin


def _complete(row: dict) -> bool:
    return None not in row and None not in row.values() and row["step"].isdigit()


def _short(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
