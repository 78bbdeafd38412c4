"""``longspan bench depth``: what a step needs is measured, and what would not fit is computed and said."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from longspan.cli.entry import main
from longspan_lab.bench import candidates, depth

SMALL = ["--length", "32", "--dim", "8", "--heads", "2", "--feedforward", "16"]


pytestmark = pytest.mark.usefixtures("at")


def asked(monkeypatch, answer):
    """Memory by kind and depth instead of processes."""

    def ask(self, *, do, subject, task):
        assert do == "memory"
        seen.append((subject, task["config"]))
        return {"mb": answer(subject, task["config"]["depth"])}

    seen: list = []
    monkeypatch.setattr(candidates.Process, "ask", ask)
    return seen


def ran(capsys, *words):
    assert main(["bench", "depth", *SMALL, "--out", "o", *words]) == 0
    out, err = capsys.readouterr()
    assert not err
    with Image.open("o/depth.png") as image:
        assert min(image.size) > 300
    return out, json.loads(Path("o/depth.json").read_text(encoding="utf-8"))


def test_every_kind_at_every_depth(capsys, monkeypatch):
    seen = asked(monkeypatch, lambda kind, depth: 7.0 + 3.0 * depth)
    out, result = ran(capsys, "--depths", "4,2", "--feedforward-chunk", "8", "--attention", "gla; softmax")
    assert [(row["candidate"], row["depth"]) for row in result["rows"]] == [
        (k, n) for n in (2, 4) for k in depth.VARIANTS
    ]
    assert all(config["attention"] == "gla; softmax" and config["feedforward_chunk"] == 8 for _, config in seen)
    kinds = {kind: (config["stack"], config["checkpointing"]) for kind, config in seen}
    assert kinds == {"plain": ("plain", False), "checkpointed": ("plain", True), "reversible": ("reversible", False)}
    assert [line.split() for line in out.splitlines()[1:4]] == [[kind, "13", "19", "3.0"] for kind in depth.VARIANTS]


def test_what_would_take_too_much_is_on_the_line(capsys, monkeypatch):
    asked(monkeypatch, lambda kind, depth: 10.0 * depth if kind == "plain" else 5.0)
    out, result = ran(capsys, "--depths", "2,4,8", "--limit", "50")
    at = {(row["candidate"], row["depth"]): row for row in result["rows"]}
    assert "mb" not in at["plain", 8]
    assert at["plain", 8]["expected_mb"] == 80
    assert at["reversible", 8]["mb"] == 5
    assert [line.split() for line in out.splitlines()[1:2]] == [["plain", "20", "40", "~80", "10.0"]]
    assert "Skipped: plain: depth 8 would take about 80 MB, and 50 may be taken" in out


def test_what_fails_is_said(capsys, monkeypatch):
    def fails(kind, depth):
        if kind == "plain":
            raise candidates.Refused("killed")
        return 1.0

    asked(monkeypatch, fails)
    out, result = ran(capsys, "--depths", "2,4")
    assert "Skipped: plain: depth 2: killed" in out
    assert {row["candidate"] for row in result["rows"]} == {"checkpointed", "reversible"}


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_processes_measure(capsys):
    """There are enough tokens that activations dominate the memory of the process."""
    weigher = depth.weigher()
    try:
        options = depth.Options(depths=(2, 12), length=2048, dim=32, heads=2, feedforward=64)
        *_, result = depth.run(options, weigher, lambda items, *_: items)
    finally:
        weigher.close()
    at = {(row["candidate"], row["depth"]): row["mb"] for row in result["rows"]}
    assert at["plain", 12] > 3 * at["plain", 2]
    assert at["checkpointed", 12] < at["plain", 12] / 2
    # Of ten more blocks nothing is kept but the gradients of 8,000 weights each.
    assert at["reversible", 12] < at["reversible", 2] + (at["plain", 12] - at["plain", 2]) / 5
