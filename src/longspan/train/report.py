"""Reports of a run: progress bar and lines, CSV and TensorBoard files."""

import csv
import io
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
from tensorboard.summary.writer.record_writer import RecordWriter

from .._utils import atomic_io, progress
from .._utils.atomic_io import named
from ..models.checkpoint import write_text

COLUMNS: tuple[str, ...] = (
    "step",
    "loss",
    "bits",
    "validation_bits",
    "validation_exact",
    "accuracy",
    "validation_accuracy",
    "penalty",
    "auxiliary",
    "span",
    "ponder",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
    "seconds",
)
EVERY = 10


class Table:
    """metrics.csv, written row by row. Lightning's CSV logger would empty the file of a resumed run."""

    def __init__(self, path: Path, start: int):
        """Keep the rows up to step ``start``, where the run resumes. Raises ValueError for a corrupt file."""
        kept = []
        if path.exists():
            try:
                file = io.StringIO(atomic_io.read_text(path), newline="")
                # A process killed while writing leaves an incomplete last row.
                kept = [row for row in csv.DictReader(file) if _complete(row) and int(row["step"]) <= start]
            except (ValueError, csv.Error) as error:
                raise ValueError(f"{path} is corrupt: {error}; move it away to continue without its rows") from error
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        # A table of an older version has fewer columns.
        writer.writerows({name: row.get(name, "") for name in COLUMNS} for row in kept)
        write_text(path, text.getvalue())
        self.path = path

    def write(self, row: dict[str, Any]) -> None:
        """Append a row. Raises OSError with the name of the file."""
        with named(self.path), self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n").writerow(row)


class Events:
    """A TensorBoard file. TensorBoard's writer has a thread whose errors cannot be caught."""

    def __init__(self, folder: Path, start: int):
        """``start``: the step where the run resumes; TensorBoard drops later steps of earlier files."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        with named(self.path):
            # Unbuffered, since a full disk would prevent closing a buffered file.
            self.file = self.path.open("wb", buffering=0)
            self.records = RecordWriter(self.file)
            self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
            if start:
                begin = SessionLog(status=SessionLog.START)
                self._add(Event(wall_time=time.time(), step=start + 1, session_log=begin))

    def write(self, row: dict[str, Any], step: int) -> None:
        """Append scalars. Raises OSError with the name of the file."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        with named(self.path):
            self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _add(self, event: Any) -> None:
        self.records.write(event.SerializeToString())


class Bar:
    """Progress (step, loss, bits, tokens/s, time left) as a bar or occasional lines, and permanent lines."""

    def __init__(self, steps: int, unit: str):
        self.steps, self.unit = steps, unit
        self.bar: progress.Bar | None = None

    def start(self, step: int) -> None:
        """Start after ``step`` steps of earlier processes."""
        self.lines = progress.Lines(self.steps, step)
        if progress.watched():
            self.bar = progress.Bar(self.steps, "step", step)

    def step(self, step: int, loss: float, bits: float, speed: float, penalty: float | None = None) -> None:
        own = "" if penalty is None else f"penalty {penalty:.4g}, "
        figures = f"loss {loss:.4f}, {bits:.3f} bits/{self.unit}, {own}{_short(speed)} tokens/s"
        if self.bar is None:
            self.lines.at(step, "step", figures)
        else:
            self.bar.set_postfix_str(figures, refresh=False)
            self.bar.update(step - self.bar.n)

    def line(self, text: str) -> None:
        if self.bar is not None:
            self.bar.clear()
        progress.say(text)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Clock:
    """Wall time of a run, and tokens per second without evaluations, smoothed over about twenty steps."""

    def __init__(self, tokens: float):
        """``tokens``: tokens per step on all devices."""
        self.tokens, self.begin, self.mark, self.step = tokens, time.monotonic(), time.monotonic(), 0.0

    def lap(self) -> float:
        """End a step and return the tokens per second."""
        spent = time.monotonic() - self.mark
        self.step = 0.95 * self.step + 0.05 * spent if self.step else spent
        return self.tokens / max(self.step, 1e-9)

    def resume(self) -> None:
        """Begin the next step."""
        self.mark = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self.begin


def _complete(row: dict) -> bool:
    return None not in row and None not in row.values() and row["step"].isdigit()


def _short(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
