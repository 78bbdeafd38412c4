"""What a run has learned to choose, in its log, in ``longspan show`` and as a picture."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import longspan
from longspan import data
from longspan.cli.entry import main
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.train import fit
from longspan.train.learned import FILE, Diary, history, learned, scalars, summary
from longspan.train.plots import draw
from training_process import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"dim": 8, "heads": 2, "feedforward": 12, "vocab": 17, "length": 64}
SPECS = "adaptive_span(span=11, ramp=3, initial=4.0); softmax; adaptive_span(span=7, ramp=3, dynamic=True)"
SPANS = DecoderConfig(**SMALL, depth=3, attention=SPECS)
ACT = DecoderConfig(**SMALL, depth=1, attention="linear", stack="act(steps=5)")


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def made(config):
    torch.manual_seed(0)
    return Decoder(config).eval()


class TestLearned:
    def test_spans_are_those_of_each_layer_and_head(self, digits):
        model = made(SPANS)
        fixed, _, dynamic = model.stack.attentions()
        with torch.no_grad():
            fixed.fraction.copy_(torch.tensor([0.25, 1.5]))
            dynamic.extent.weight.zero_()
            dynamic.extent.bias.copy_(torch.tensor([0.0, 1.0]))
        found = learned(model.train(), digits)
        assert model.training
        assert sorted(found) == ["spans"]
        (first, ours), (third, theirs) = found["spans"]
        assert (first, third) == (1, 3)
        assert ours == pytest.approx([2.75, 11.0])
        assert theirs == pytest.approx([3.5, 7 * torch.tensor(1.0).sigmoid().item()], abs=1e-3)
        assert summary(found) == {"span": pytest.approx(sum(ours + theirs) / 4)}
        assert scalars(found)["span/layer3/head2"] == theirs[1]

    def test_a_span_that_the_token_chooses_is_the_mean_over_tokens(self, digits):
        model = made(SPANS)
        read = []
        dynamic = model.stack.attentions()[2]
        with torch.no_grad():
            dynamic.extent.weight.normal_(generator=torch.Generator().manual_seed(1))
        found = learned(model, digits)
        hook = dynamic.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
        tokens = digits.take("validation", torch.arange(16) * digits.count("validation") // 16)
        with torch.no_grad():
            model(model.shift(tokens))
        hook.remove()
        assert found["spans"][1][1] == pytest.approx(dynamic.spans(read[0]).mean((0, 2)).tolist(), abs=1e-3)

    def test_ponder_is_that_of_the_position_that_predicts_the_token(self, digits):
        model = made(ACT)
        with torch.no_grad():
            model.stack.run.halt.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
        tokens = digits.take("validation", torch.arange(16) * digits.count("validation") // 16)
        with torch.no_grad():
            record = {"penalty": None}
            model(model.shift(tokens), record=record)
            found = learned(model, digits)
            assert found["ponder"] == pytest.approx(record["ponder"].mean(0).tolist(), abs=1e-3)
            assert found["steps"] == pytest.approx(record["steps"].float().mean(0).tolist(), abs=1e-3)
            assert found["example"] == tokens[0].tolist()
            assert found["example_ponder"] == pytest.approx(record["ponder"][0].tolist(), abs=1e-3)
        assert len(set(found["ponder"])) > 9
        assert summary(found) == {"ponder": pytest.approx(sum(found["ponder"]) / 64)}

    def test_a_model_that_chooses_nothing(self, digits):
        assert learned(made(replace(ACT, stack="plain")), digits) == {}
        assert summary({}) == scalars({}) == {}


class TestDiary:
    def test_lines_of_steps_done_again_are_not_there_twice(self, tmp_path):
        for step, start in ((4, 0), (8, 4), (8, 4)):
            Diary(tmp_path, start).write(step, {"ponder": [1.0]})
        assert [one["step"] for one in history(tmp_path)] == [4, 8]

    def test_a_line_cut_off_by_a_kill_is_dropped(self, tmp_path):
        Diary(tmp_path, 0).write(4, {"ponder": [1.0]})
        with (tmp_path / FILE).open("a") as file:
            file.write('{"step": 8, "pon')
        Diary(tmp_path, 8).write(12, {"ponder": [2.0]})
        assert [one["step"] for one in history(tmp_path)] == [4, 12]

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_is_named(self, tmp_path):
        diary = Diary(tmp_path, 0)
        (tmp_path / FILE).symlink_to("/dev/full")
        with pytest.raises(OSError, match=r"No space left on device: .*learned\.jsonl"):
            diary.write(4, {"ponder": [1.0]})

    def test_nothing_is_no_file(self, tmp_path):
        Diary(tmp_path, 0).write(4, {})
        assert not (tmp_path / FILE).exists()
        assert history(tmp_path) == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learned")
    for name, config in (("spans", SPANS), ("act", ACT), ("plain", replace(ACT, stack="plain"))):
        fit(config, tiny(folder / name, penalty=0.0), progress=False)
    return folder


class TestRuns:
    def test_each_evaluation_is_logged(self, runs):
        for name in ("spans", "act"):
            entries = history(runs / name / "run")
            with (runs / name / "run" / "metrics.csv").open(newline="") as file:
                rows = {int(row["step"]): row for row in csv.DictReader(file)}
            assert [one["step"] for one in entries] == [4, 8, 11]
            for one in entries:
                for column, value in summary(one).items():
                    assert float(rows[one["step"]][column]) == pytest.approx(value)
            model = longspan.load(runs / name / "run" / "checkpoints" / f"step-{11:08d}")
            assert learned(model, data.load("digits")).items() <= entries[-1].items()
        assert not (runs / "plain" / "run" / FILE).exists()

    def test_heads_are_in_tensorboard(self, runs):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        entries = history(runs / "spans" / "run")
        events = EventAccumulator(str(runs / "spans" / "run" / "tensorboard")).Reload().Scalars("span/layer1/head2")
        assert {event.step: event.value for event in events} == pytest.approx(
            {one["step"]: one["spans"][0][1][1] for one in entries}
        )

    def test_show_tells_of_them(self, runs, capsys):
        assert main(["show", str(runs / "spans" / "run")]) == 0
        spans = history(runs / "spans" / "run")[-1]["spans"]
        shown = capsys.readouterr().out
        assert re.search("spans .*at step 11\n", shown)
        for layer, heads in spans:
            assert f"layer {layer}: {' '.join(f'{z:.4g}' for z in heads)}\n" in shown
        assert main(["show", str(runs / "act" / "run"), "--json"]) == 0
        last = history(runs / "act" / "run")[-1]
        assert json.loads(capsys.readouterr().out)["learned"] == last
        assert main(["show", str(runs / "act" / "run")]) == 0
        mean, low = sum(last["ponder"]) / 64, min(last["ponder"])
        said = " ".join(capsys.readouterr().out.split())
        assert f"ponder {mean:.3f} steps and remainder per token at step 11: from {low:.3f} at position " in said
        assert main(["show", str(runs / "plain" / "run")]) == 0
        assert "ponder" not in capsys.readouterr().out

    @pytest.mark.parametrize("name", ["spans", "act"])
    def test_a_picture_of_both(self, runs, tmp_path, name, capsys):
        path = tmp_path / "learned.png"
        assert main(["show", str(runs / name / "run"), "--draw", str(path)]) == 0
        assert path.read_bytes().startswith(b"\x89PNG")
        capsys.readouterr()

    def test_a_picture_of_spans_and_ponder_times_of_a_text(self, tmp_path, monkeypatch):
        figures = []
        monkeypatch.setattr("longspan.train.plots.png", lambda figure: figures.append(figure) or b"")
        one = {"step": 4, "spans": [[1, [3.0, 5.0]], [3, [2.0, 9.0]]], "ponder": [1.5, 2.5, 4.0]}
        one |= {"example": [32, 97, 36], "example_ponder": [1.0, 2.0, 7.0]}
        draw(tmp_path / "a.png", [one | {"step": 2, "ponder": [1.0, 1.0, 1.0]}, one], True)
        steps, heads, positions, example = figures[0].axes
        assert [line.get_ydata().tolist() for line in steps.lines] == [[z, z] for z in (3.0, 5.0, 2.0, 9.0)]
        assert [bar.get_height() for bar in heads.patches] == [3.0, 5.0, 2.0, 9.0]
        assert [line.get_ydata().tolist() for line in positions.lines] == [[1.0, 1.0, 1.0], [1.5, 2.5, 4.0]]
        assert [bar.get_height() for bar in example.patches] == [1.0, 2.0, 7.0]
        assert [label.get_text() for label in example.get_xticklabels()] == ["\u2423", "a", r"\$"]

    def test_nothing_to_draw(self, runs, tmp_path, capsys):
        assert main(["show", str(runs / "plain" / "run"), "--draw", str(tmp_path / "a.png")]) == 2
        assert "--draw" in capsys.readouterr().err
        assert main(["show", str(runs / "act" / "run"), "--draw", str(tmp_path / "a.jpg")]) == 2
        assert "their names end in .png" in capsys.readouterr().err
