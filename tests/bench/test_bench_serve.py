"""``longspan bench serve``: every stream is counted, and percentiles are those of its times."""

import json
from pathlib import Path

import pytest

import longspan
from longspan.cli import trained
from longspan.cli.entry import main
from longspan_lab.bench import serve

CONFIG = longspan.DecoderConfig(vocab=256, dim=16, heads=2, depth=1, attention="gated_deltanet", feedforward=16)


pytestmark = pytest.mark.usefixtures("at")


def ran(*words):
    assert main(["bench", "serve", "--streams", "2,5", "--prompt", "7", "--tokens", "6", "--rounds", "1", *words]) == 0
    assert Path("bench/serve.png").stat().st_size > 1000
    return json.loads(Path("bench/serve.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("attention", ["gated_deltanet", "softmax"])
def test_a_pool_under_load(monkeypatch, attention):
    model = longspan.Decoder(longspan.DecoderConfig(**CONFIG.to_dict() | {"attention": attention})).eval()
    monkeypatch.setattr(trained, "model", lambda *given: (model, "text", 0))
    monkeypatch.setattr(serve, "LONG", 300)
    result = ran("--no-http")
    assert [(row["streams"], row["way"]) for row in result["rows"]] == [(2, "pool"), (5, "pool")]
    for row in result["rows"]:
        assert round(row["tokens_per_second"] * row["seconds"]) == 6 * row["streams"]
        assert 0 < row["first_p50"] <= row["first_p99"] <= row["seconds"]
        assert 0 < row["gap_p50"] <= row["gap_p99"]
        assert row["part_of_bare"] == pytest.approx(row["bare_step"] / row["step"])
    assert result["left_out"] == []


def test_a_server_under_load():
    pytest.importorskip("uvicorn", reason="the server: pip install longspan[serve]")
    result = ran()
    assert [(row["streams"], row["way"]) for row in result["rows"]] == [
        (count, way) for count in (2, 5) for way in ("pool", "HTTP")
    ]
    for row in result["rows"]:
        assert round(row["tokens_per_second"] * row["seconds"]) == 6 * row["streams"]


def test_figures_of_streams():
    found = serve.figures([[2.0, 3.0, 5.0], [4.0], []], begin=1.0)
    assert found["tokens_per_second"] == 1.0
    assert found["seconds"] == 4.0
    assert [found["first_p50"], found["first_p99"]] == [1.0, 3.0]
    assert [found["gap_p50"], found["gap_p99"]] == [1.0, 2.0]


def test_prompts_differ_and_have_the_length():
    prompts = {tuple(serve._prompt(i, 32)) for i in range(50)}
    assert len(prompts) == 50
    assert {len(prompt) for prompt in prompts} == {32}
