"""``longspan bench rwkv7``: the candidates agree before they are timed, and a missing package is reported."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the model is one of transformers: pip install longspan[transformers]")

from longspan.cli.entry import WRONG, main
from longspan_lab.bench import rwkv7
from longspan_lab.bench.candidates import Refused

SMALL = ["--length", "16", "--layers", "2", "--width", "64", "--vocabulary", "31", "--rounds", "1", "--out", "o"]


pytestmark = pytest.mark.usefixtures("at")


def ran(code=0):
    assert main(["bench", "rwkv7", *SMALL]) == code
    return json.loads(Path("o/rwkv7.json").read_text(encoding="utf-8"))


class Same:
    """The package, as longspan's model: what the author's package is measured by, without it."""

    def __init__(self, made, factor=1.0):
        self.made, self.factor = made, factor

    @torch.no_grad()
    def forward(self, ids, state, full_output=False):
        found = self.made(torch.tensor([ids]), past_key_values=state, use_cache=True)
        return self.factor * found.logits[0], found.past_key_values


def test_modes_and_candidates(monkeypatch):
    monkeypatch.setattr(rwkv7, "package", Same)
    result = ran()
    assert Path("o/rwkv7.png").stat().st_size > 1000
    assert [(row["mode"], row["candidate"]) for row in result["rows"]] == [
        ("prefill", rwkv7.PACKAGE),
        ("prefill", rwkv7.TORCH),
        ("prefill", rwkv7.OURS),
        ("training step", rwkv7.TORCH),
        ("training step", rwkv7.OURS),
        ("decoding", rwkv7.PACKAGE),
        ("decoding", rwkv7.OURS),
    ]
    assert result["refused"] == []
    for row in result["rows"]:
        assert row["times_longspan"] > 0
        assert row["error"] < 1e-6


def test_a_package_that_disagrees_is_not_timed(monkeypatch):
    monkeypatch.setattr(rwkv7, "package", lambda made: Same(made, 1.01))
    result = ran(code=1)
    assert result["rows"] == []
    assert "differ from those of the package by 0.0099" in result["refused"][0]["reason"]


def test_without_the_package(monkeypatch):
    def missing(made):
        raise Refused("not installed: pip install rwkv")

    monkeypatch.setattr(rwkv7, "package", missing)
    result = ran()
    assert {row["candidate"] for row in result["rows"]} == {rwkv7.TORCH, rwkv7.OURS}
    assert result["refused"][0]["reason"] == "not installed: pip install rwkv"


def test_width_in_heads(capsys):
    assert main(["bench", "rwkv7", "--width", "100"]) == WRONG
    assert "width=100 must be a multiple of 64" in capsys.readouterr().err
