"""Facts about training runs, read from their directories, for ``show`` and ``compare``."""

import csv
import io
import math
from pathlib import Path
from typing import Any

import yaml

from .. import data
from .._utils import atomic_io, sealed_dir
from .._utils.spec import known
from ..models import checkpoint

CONFIG, METRICS = "config.yaml", "metrics.csv"


def is_run_dir(folder: str) -> bool:
    """Whether ``folder`` is a run directory."""
    return (Path(folder) / CONFIG).is_file()


def facts(folder: str | Path) -> dict[str, Any]:
    """Facts about a run directory.

    Returns:
        Model and run configs, steps, seconds, parameters, the best validation bits with their step, bytes on disk, and
        exact match (``exact``) and ``accuracy`` at that step (None for models without).

    Raises:
        ValueError: for a directory without a training run, and for corrupt files.
    """
    folder = Path(folder)
    recipe, rows = _recipe(folder), metrics(folder)
    scored = [row for row in rows if math.isfinite(row["validation_bits"])]
    best = min(scored, key=lambda row: row["validation_bits"], default=None)
    saved = [path for path in (folder / "checkpoints").glob("*") if (path / checkpoint.CONFIG).is_file()]
    return {
        "folder": str(folder),
        **recipe,
        "steps": int(rows[-1]["step"]) if rows else 0,
        "seconds": rows[-1]["elapsed"] if rows else 0.0,
        "tokens_per_second": rows[-1]["tokens_per_second"] if rows else math.nan,
        "bits": None if best is None else best["validation_bits"],
        "exact": None if best is None or not math.isfinite(best["validation_exact"]) else best["validation_exact"],
        "accuracy": None
        if best is None or not math.isfinite(best["validation_accuracy"])
        else best["validation_accuracy"],
        "best_step": None if best is None else int(best["step"]),
        "unit": data.unit(str(recipe["run"].get("data", ""))),
        "parameters": _parameters(checkpoint.resolve(folder)) if saved else None,
        "checkpoints": len(saved),
        "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    }


def model_facts(folder: str | Path) -> dict[str, Any]:
    """Facts about a checkpoint: kind, config, parameters, bytes of its files, and its training run.

    ``run`` is empty for a model saved by ``longspan.save``. Raises ValueError for a folder that is not a checkpoint.
    """
    place = checkpoint.resolve(folder)
    header = checkpoint.read_config(place)
    return {
        "folder": str(folder),
        "kind": header["kind"],
        "model": header["config"],
        "run": header.get("run") or {},
        "parameters": _parameters(place),
        "bytes": sum(path.stat().st_size for path in Path(place).iterdir() if path.is_file()),
    }


def metrics(folder: str | Path) -> list[dict[str, float]]:
    """The rows of metrics.csv as numbers, NaN for an empty field; ``elapsed`` has the seconds including resumes.

    Raises ValueError for a corrupt file.
    """
    path = Path(folder) / METRICS
    if not path.exists():
        return []
    rows, before, last = [], 0.0, 0.0
    try:
        content = atomic_io.read_text(path)
        # A process that was killed while writing leaves an incomplete last row.
        for text in csv.DictReader(io.StringIO(content[: content.rfind("\n") + 1], newline="")):
            # Tables of older versions lack columns.
            row = {"validation_exact": math.nan, "validation_accuracy": math.nan}
            row |= {name: float(value) if value else math.nan for name, value in text.items()}
            _check_row(row)
            # A resumed process counts seconds from zero.
            before, last = before + (last if row["seconds"] < last else 0.0), row["seconds"]
            rows.append(row | {"elapsed": before + row["seconds"]})
    except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is corrupt: it is not a table of metrics ({reason})") from error
    return rows


def _check_row(row: dict[str, float]) -> None:
    """Raise ValueError for values that training never writes."""
    known("validation_bits", row)
    if not row["step"].is_integer() or row["step"] < 0:
        raise ValueError(f"step is {row['step']}, not an integer >= 0")
    for name in ("seconds", "tokens_per_second"):
        if not (math.isfinite(row[name]) and row[name] >= 0):
            raise ValueError(f"{name} is {row[name]}, not a finite number >= 0")


def _recipe(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no training run: it has no {CONFIG}")
    try:
        recipe = yaml.safe_load(atomic_io.read_text(path))
        return {"model": dict(recipe["model"]), "run": dict(recipe["run"])}
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is corrupt: it holds no model and run ({reason})") from error


def _parameters(folder: Path) -> int:
    from safetensors import SafetensorError, safe_open

    path = sealed_dir.resolve_replaced(folder) / checkpoint.WEIGHTS
    try:
        # safe_open maps the file by name, and would block on a FIFO.
        with atomic_io.reading(path), atomic_io.open_regular(path), safe_open(path, "pt") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt: {' '.join(str(error).split())}") from error
