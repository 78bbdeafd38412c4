"""Runs of ``longspan bench`` at small sizes, on a machine that is always quiet."""

import csv
import json
from pathlib import Path

from PIL import Image

from longspan.cli.entry import main
from longspan_lab.bench import candidates, guard


def in_quiet(folder, monkeypatch):
    """Work in a separate folder; samples are short, and all are kept."""
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(guard.Guard, "quiet", lambda self: True)
    monkeypatch.setattr(candidates, "LEAST", 0.0)


def weigh_nothing(monkeypatch):
    """No process is started for memory."""
    monkeypatch.setattr(candidates.Process, "ask", lambda self, **request: {"mb": 3.0})


def run_into_o(capsys, kind, *words, code=0):
    """A run: what was printed, and its JSON; the CSV has the same rows, and there is a picture."""
    assert main(["bench", kind, *words, "--out", "o", "--debug"]) == code
    out, err = capsys.readouterr()
    assert not err
    result = json.loads(Path(f"o/{kind}.json").read_text(encoding="utf-8"))
    rows = list(csv.DictReader(Path(f"o/{kind}.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == len(result["rows"]) > 0
    for read, row in zip(rows, result["rows"], strict=True):
        assert {name: text for name, text in read.items() if text} == {k: str(v) for k, v in row.items()}
    with Image.open(f"o/{kind}.png") as image:
        assert min(image.size) > 300
    return out, result
