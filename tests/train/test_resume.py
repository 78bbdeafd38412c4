"""Interrupted, killed and resumed, on one process and on two: the same bits as if nothing had happened."""

import functools
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
import yaml
from torch.utils._pytree import tree_leaves

from longspan import data, train
from longspan._utils import sealed_dir
from longspan.data import documents, token_shards, tokenization
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig, EncoderConfig, Seq2SeqConfig
from longspan.train import fit, loop
from longspan.train.report import COLUMNS, Table
from support.runs import fit_in_two, press_at, rows, start, trained, wait_for
from training_process import HANGS, TINY, best_at, checkpoints, tiny, weights

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run from beginning to end, to which interrupted ones are compared."""
    folder = tmp_path_factory.mktemp("whole")
    fit(TINY, tiny(folder), progress=False)
    return folder


class TestStopAndResume:
    # At the best step itself, whose evaluation is made up for, and after it, when its figure is remembered.
    @pytest.mark.parametrize("step", [4, 6])
    def test_goes_on_from_the_last_and_the_best_stays_the_best(self, tmp_path, monkeypatch, step):
        best_at(monkeypatch, 4)
        run = tiny(tmp_path, evaluate_every=2)
        with monkeypatch.context() as patch:
            press_at(patch, step - 1)
            with pytest.raises(KeyboardInterrupt):
                fit(TINY, run, progress=False)
        with monkeypatch.context() as patch:
            done = []
            seed = loop.step_seed
            patch.setattr(loop, "step_seed", lambda *arguments: done.append(arguments[1]) or seed(*arguments))
            fit(TINY, run, resume=True, progress=False)
        assert done == list(range(step, 11))
        assert (tmp_path / "run/checkpoints/best").read_text() == "step-00000004\n"

    @pytest.mark.parametrize(
        ("step", "said"),
        [(7, "stopped immediately at step 7; step-00000006 is saved in"), (1, "at step 1; nothing was saved in")],
    )
    def test_a_second_press_ends_at_once_and_what_is_saved_stays(self, step, said, tmp_path, whole, monkeypatch):
        with monkeypatch.context() as patch:
            press_at(patch, step, times=2)
            with pytest.raises(KeyboardInterrupt, match=said):
                fit(TINY, tiny(tmp_path), progress=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        fit(TINY, tiny(tmp_path), resume=True, progress=False)
        assert weights(tmp_path) == weights(whole)

    def test_out_of_time_evaluates_saves_and_can_go_on(self, tmp_path, whole):
        result = fit(TINY, tiny(tmp_path, seconds=1e-9), progress=False)
        assert result.steps == 1
        assert set(result.bits) == {"validation", "test"}
        assert fit(TINY, tiny(tmp_path), resume=True, progress=False).steps == 11
        assert weights(tmp_path) == weights(whole)

    def test_lines_name_the_reason(self, tmp_path, capfd):
        fit(TINY, tiny(tmp_path, seconds=1e-9))
        assert capfd.readouterr().err.splitlines()[-1].startswith("1 steps (out of time); best checkpoint: validation ")
        fit(TINY, tiny(tmp_path / "b", seconds=1e-9, steps=1))
        assert capfd.readouterr().err.splitlines()[-1].startswith("1 steps; best checkpoint: validation ")

    def test_steps_may_grow(self, tmp_path):
        constant = {"schedule": "constant"}
        fit(TINY, tiny(tmp_path / "a", **constant), progress=False)
        fit(TINY, tiny(tmp_path / "b", steps=5, **constant), progress=False)
        fit(TINY, tiny(tmp_path / "b", **constant), resume=True, progress=False)
        assert weights(tmp_path / "a") == weights(tmp_path / "b")
        assert yaml.safe_load((tmp_path / "b/run/config.yaml").read_text())["run"]["steps"] == 11

    def test_resuming_what_is_finished_changes_nothing(self, tmp_path):
        first = fit(TINY, tiny(tmp_path, steps=2), progress=False)
        before = weights(tmp_path)
        again = fit(TINY, tiny(tmp_path, steps=2), resume=True, progress=False)
        assert weights(tmp_path) == before
        assert (again.steps, again.bits) == (first.steps, first.bits)

    def test_metrics_of_steps_done_again_are_not_there_twice(self, tmp_path):
        fit(TINY, tiny(tmp_path, steps=8, schedule="constant"), progress=False)
        (tmp_path / "run/checkpoints/last").write_text("step-00000006\n")
        fit(TINY, tiny(tmp_path, steps=11, schedule="constant"), resume=True, progress=False)
        assert [row["step"] for row in rows(tmp_path)] == ["4", "8", "10", "11"]

    def test_a_row_cut_off_by_a_kill_is_dropped(self, tmp_path):
        row = "5," + ",".join("1" * (len(COLUMNS) - 1))
        (tmp_path / "m.csv").write_text(",".join(COLUMNS) + f"\n{row}\n6,2.5,3")
        Table(tmp_path / "m.csv", 9).write(dict.fromkeys(COLUMNS, 7))
        assert [line.split(",")[0] for line in (tmp_path / "m.csv").read_text().splitlines()] == ["step", "5", "7"]

    def test_what_a_kill_left_half_written_is_removed(self, tmp_path):
        for name in (f".step-00000003.{7:016x}.{end}" for end in ("tmp", "old")):
            (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "run" / "config.yaml").write_text(
            yaml.safe_dump({"model": TINY.to_dict(), "run": vars(tiny(tmp_path, steps=5))})
        )
        fit(TINY, tiny(tmp_path, steps=5), resume=True, progress=False)
        assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


SMALL = {"dim": 8, "heads": 2, "feedforward": 12, "dropout": 0.1}
SPANS = DecoderConfig(**SMALL, depth=2, attention="adaptive_span(span=11, ramp=3, initial=4.0)", vocab=17, length=64)
LAYERS = {"intermediate": True, "targets": 2}
# Kinds of runs -> model and fields; their data are made by the fixture.
RUNS = {
    "plain": (TINY, {}),
    "average": (TINY, {"ema": 0.9}),
    "radam": (TINY, {"optimizer": "radam", "schedule": "drop", "drop_at": 7}),
    "auxiliary": (replace(SPANS, depth=4, attention="linear; softmax"), LAYERS),
    "labels": (
        EncoderConfig(**SMALL, depth=1, attention="linear", vocab=256, outputs=2, labels="a b", pool="mean"),
        {"data": "labels:majority", "weight_decay": 0.1},
    ),
    "pairs": (
        Seq2SeqConfig(**SMALL, depth=1, vocab=257, length=8, smoothing=0.2, encoder_attention="softmax"),
        {"data": "pairs"},
    ),
    "penalty": (SPANS, {"penalty": 0.01}),
    "statistics": (replace(SPANS, attention="routing(clusters=3, window=5); softmax"), {"accumulate": 2}),
    "stream": (
        DecoderConfig(**SMALL, depth=2, attention="transformer_xl(memory=9)", vocab=256, positions="none"),
        {"data": "text", "length": 11, "stream": True, "batch": 3},
    ),
}
# Kind, the step of Ctrl-C, and how often it comes. Step 5: between two checkpoints. Step 8: an evaluation is due.
# Step 2: an auxiliary loss has just stopped. What comes twice loses the steps since the checkpoint of step 6.
CUTS = [*((kind, 5, 1) for kind in RUNS), *((kind, 8, 1) for kind in ("plain", "pairs"))]
CUTS += [("stream", 8, 2), ("labels", 8, 2), ("auxiliary", 2, 1)]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """``wholes(kind)``: the model of a kind of run, the fields, and a folder of one from beginning to end."""
    files = tmp_path_factory.mktemp("data")
    words = ["".join(word) for n in (1, 2, 3, 4) for word in itertools.product("abc", repeat=n)]
    (files / "words.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
    (files / "texts").mkdir()
    for i, size in enumerate((770, 500, 640, 900, 811)):
        (files / "texts" / f"{i}.txt").write_bytes(bytes((i * 7 + j * j) % 88 + 32 for j in range(size)))
    data_of = {"pairs": f"pairs:{files / 'words.tsv'}", "text": f"text:{files / 'texts'}"}

    @functools.cache
    def of(kind):
        config, fields = RUNS[kind]
        fields = fields | {"data": data_of.get(fields.get("data"), fields.get("data", "digits"))}
        folder = tmp_path_factory.mktemp(kind)
        fit(config, tiny(folder, **fields), progress=False)
        return config, fields, folder

    return of


@pytest.mark.parametrize(("kind", "step", "times"), CUTS)
def test_every_kind_of_run_is_resumed_to_the_last_bit(kind, step, times, wholes, tmp_path, monkeypatch):
    config, fields, whole = wholes(kind)
    handler = signal.getsignal(signal.SIGINT)
    fit_in_two(config, tiny(tmp_path, **fields), step, monkeypatch, times)
    assert signal.getsignal(signal.SIGINT) is handler
    assert weights(tmp_path) == weights(whole)
    assert (tmp_path / "run/checkpoints/best").read_text() == (whole / "run/checkpoints/best").read_text()
    one, other = (checkpoint.load_training(checkpoint.resolve(at / "run", prefer="last")) for at in (tmp_path, whole))
    pairs = [(a, b) for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True) if isinstance(a, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in pairs)
    found, wanted = ({k: v for k, v in rows(at)[-1].items() if "validation" in k} for at in (tmp_path, whole))
    assert found == wanted


def changing(kind, folder, word):
    """A model, and the name of data of this kind whose content depends on a word of three letters."""
    lines = [f"the {word} is {i:03d}" for i in range(200)]
    fields = TINY.to_dict() | {"vocab": 256}
    if kind == "text":
        (folder / "a.txt").write_text("\n".join(lines))
        return DecoderConfig(**fields), f"text:{folder / 'a.txt'}"
    if kind == "pairs":
        (folder / "a.tsv").write_text("".join(f"{line}\t{line[:3]}\n" for line in lines))
        return Seq2SeqConfig(dim=10, depth=1, heads=2, feedforward=14, vocab=257), f"pairs:{folder / 'a.tsv'}"
    if kind == "labels":
        rows = [json.dumps({"text": line, "label": int(line[-1]) % 2}) for line in lines]
        (folder / "a.jsonl").write_text("\n".join(rows))
        options = {"outputs": 2, "labels": "0 1", "pool": "mean", "vocab": 256}
        return EncoderConfig(dim=10, depth=1, heads=2, feedforward=14, **options), f"labels:{folder / 'a.jsonl'}"
    (folder / "b.txt").write_text("\n".join(lines))
    inputs = documents.sources([str(folder / "b.txt")])
    shutil.rmtree(folder / "tokens", ignore_errors=True)
    with token_shards.new_or_continued(folder / "tokens"):
        tokenization.write(folder / "tokens", inputs, tokenization.train_bpe(inputs, 260))
    return DecoderConfig(**fields | {"vocab": 260}), f"tokens:{folder / 'tokens'}"


class TestRefused:
    @pytest.mark.parametrize("text", ["", "- 1\n", "{", "run: {}\n", "model: 1\nrun: 2\n"])
    def test_no_run_to_resume(self, tmp_path, text):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / ("config.yaml" if text else "notes.txt")).write_text(text)
        message = "config.yaml is corrupt: it holds no model and run" if text else "holds no run: it has no config.yaml"
        with pytest.raises(ValueError, match=message):
            fit(TINY, tiny(tmp_path), resume=True, progress=False)

    @pytest.mark.parametrize(
        ("depth", "fields", "message"),
        [
            (3, {"batch": 7, "keep": 5, "seconds": 9.0}, r"model.depth \(1 -> 3\), run.batch \(5 -> 7\)$"),
            (1, {"steps": 5}, r"run.steps \(11 -> 5; it may only grow\)"),
        ],
    )
    def test_other_settings_are_named(self, whole, depth, fields, message):
        with pytest.raises(ValueError, match=rf"cannot resume .* with other settings.*{message}"):
            fit(replace(TINY, depth=depth), tiny(whole, **fields), resume=True, progress=False)

    @pytest.mark.parametrize("kind", ["text", "pairs", "labels", "tokens"])
    def test_other_data_are_refused(self, tmp_path, kind):
        config, name = changing(kind, tmp_path, "one")
        run = tiny(tmp_path, data=name, length=16, steps=2, batch=2, evaluate_examples=2)
        fit(config, run, progress=False)
        last = (tmp_path / "run/checkpoints/last").read_text()
        changing(kind, tmp_path, "two")
        with pytest.raises(ValueError, match=f"with other data: {re.escape(name)} has changed"):
            fit(config, replace(run, steps=3), resume=True, progress=False)
        assert (tmp_path / "run/checkpoints/last").read_text() == last
        changing(kind, tmp_path, "one")
        assert fit(config, replace(run, steps=3), resume=True, progress=False).steps == 3

    def test_another_tokenizer_is_refused_by_checkpoints_without_a_sha256_of_the_data(self, tmp_path):
        config, name = changing("tokens", tmp_path, "one")
        run = tiny(tmp_path, data=name, length=16, steps=2, batch=2, evaluate_examples=2)
        fit(config, run, progress=False)
        last = checkpoint.resolve(tmp_path / "run", prefer="last")
        header = json.loads((last / "config.json").read_text())
        del header[checkpoint.DATA]
        (last / "config.json").write_text(json.dumps(header | {"sha256": sealed_dir.digest(header)}))
        changing("tokens", tmp_path, "two")
        with pytest.raises(ValueError, match="with another tokenizer"):
            fit(config, replace(run, steps=3), resume=True, progress=False)

    def test_folder_that_cannot_be_written_before_any_work(self, tmp_path, monkeypatch):
        monkeypatch.setattr(data, "load", None)
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=r"cannot write the run's folder .*: Not a directory"):
            fit(TINY, tiny(tmp_path / "file"), progress=False)

    def test_without_lightning(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
        monkeypatch.delitem(sys.modules, "longspan.train.loop")
        monkeypatch.delattr(train, "loop")
        with pytest.raises(ImportError, match=r'training requires lightning.*: pip install "\.\[train\]"'):
            fit(TINY, tiny(tmp_path), progress=False)

    def test_diverged_run_keeps_the_last_good_checkpoint(self, tmp_path):
        run = tiny(tmp_path, learning_rate=1e19, clip=0.0, warmup=0, save_every=1, schedule="constant")
        with pytest.raises(ValueError, match=r"the (loss|gradient's norm) became (nan|inf) at step \d+; .* may help"):
            fit(TINY, run, progress=False)
        kept = checkpoint.load(checkpoint.resolve(tmp_path / "run", prefer="last"))
        assert all(p.isfinite().all() for p in kept.parameters())

    @pytest.mark.parametrize("gradient", [True, False])
    def test_loss_that_is_not_finite(self, tmp_path, monkeypatch, gradient):
        step = loop.Task.training_step

        def broken(task, batch, batch_idx):
            loss = step(task, batch, batch_idx)
            if batch[0] < 4:
                return loss
            loss = loss * math.nan if gradient else loss + math.inf
            task.parts[-1]["loss"] = loss.detach()
            return loss

        monkeypatch.setattr(loop.Task, "training_step", broken)
        with pytest.raises(
            ValueError, match=r"the loss became .* at step .; the last good checkpoint is step-00000003"
        ):
            fit(TINY, tiny(tmp_path, evaluate_every=99), progress=False)
        assert checkpoints(tmp_path) == ["step-00000003"]


class TestProcesses:
    @pytest.mark.slow
    def test_two_processes_stop_together_at_ctrl_c_and_go_on(self, tmp_path):
        config = {"batch": 3, "steps": 30, "devices": 2}
        process = start(tmp_path / "two", pause=0.05, **config)
        wait_for(tmp_path / "two", process, 3)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=HANGS) == 130
        said = (tmp_path / "two" / "err").read_text()
        assert len(re.findall(r"interrupted at step \d+; step-\d+ is saved in", said)) == 1
        assert "Traceback" not in said
        trained(tmp_path / "two", resume=True, **config)
        first, second = (torch.load(tmp_path / "two" / f"weights-{rank}.pt") for rank in (0, 1))
        assert all(torch.equal(value, second[name]) for name, value in first.items())
        assert checkpoints(tmp_path / "two")[-1] == "step-00000030"

    @pytest.mark.slow
    def test_sigterm_to_the_first_process_stops_both_and_loses_nothing(self, tmp_path):
        config = {"batch": 3, "steps": 30, "devices": 2, "save_every": 1000, "evaluate_every": 1000}
        process = start(tmp_path / "two", pause=0.05, **config)
        table = tmp_path / "two" / "run" / "tensorboard"
        while process.poll() is None and not table.exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=HANGS) == 143
        said = (tmp_path / "two" / "err").read_text()
        assert len(re.findall(r"interrupted at step \d+; step-\d+ is saved in", said)) == 1
        assert "Traceback" not in said
