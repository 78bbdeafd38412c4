"""Sharded models and training (FSDP2): equal to one process; checkpoints in parts, read by any number of processes."""

import json
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longspan.attention import list_mechanisms, mechanism_examples
from longspan.attention.base import REGISTRY
from longspan.cli import entry
from longspan.cli.entry import main
from longspan.models import checkpoint, parts, shards
from longspan.models.decoder import Decoder
from longspan.train import fit
from longspan.train.sharded import check
from support.runs import trained
from training_process import HANGS, TINY, in_parts, tiny

SIZES = {"dim": 8, "heads": 2, "feedforward": 12, "depth": 2, "vocab": 7, "positions": "none", "length": 64}
# Each process draws its own noise in training.
NOISY = ("sac", "sinkhorn")
CAUSAL = [name for name in list_mechanisms() if "causal" in REGISTRY[name].directions]
MIXED = SIZES | {"attention": "gated_deltanet; performer"}
MODELS = {
    "tied": MIXED | {"tied": True},
    "checkpointing": MIXED | {"checkpointing": True},
    "universal": MIXED | {"stack": "universal(steps=2)"},
    "learned positions and gates": MIXED | {"positions": "learned", "residual": "gru"},
    "chunks": MIXED | {"feedforward_chunk": 4},
    "seq2seq": SIZES
    | {"kind": "seq2seq", "attention": "linear", "encoder_attention": "linear", "cross_attention": "softmax"},
    "encoder": SIZES | {"kind": "encoder", "attention": "linear", "pool": "mean", "outputs": 3},
}


PARALLEL = {
    "tensor parallel linear": SIZES | {"attention": "linear"},
    "tensor parallel softmax": SIZES | {"attention": "softmax"},
}


def job(name):
    if name in PARALLEL:
        return {"model": PARALLEL[name], "does": ["tensor_parallel"]}
    if name in MODELS:
        decodes = [] if name == "encoder" else ["generation"]
        return {"model": MODELS[name], "does": ["gradients", "saved", "materialized", *decodes]}
    alone = name in NOISY or "gradients" in REGISTRY[name].exempt
    does = ["generation"] if alone else ["gradients", "generation"]
    return {"model": SIZES | {"depth": 1, "attention": mechanism_examples(name)[0]}, "does": does}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of two processes, for each job."""
    folder, names = tmp_path_factory.mktemp("sharded"), [*MODELS, *PARALLEL, *CAUSAL]
    (folder / "jobs.json").write_text(json.dumps([job(name) for name in names]))
    script = Path(__file__).parents[1] / "sharded_process.py"
    started = [subprocess.Popen([sys.executable, script, folder, str(rank), "2"]) for rank in range(2)]
    assert [process.wait(timeout=HANGS) for process in started] == [0, 0]
    return dict(zip(names, json.loads((folder / "results.json").read_text()), strict=True))


@pytest.mark.parametrize("name", [*MODELS, *PARALLEL, *CAUSAL])
def test_sharded_models_equal_whole_ones(name, results):
    assert set(results[name]) == set(job(name)["does"])
    for what, found in results[name].items():
        assert not isinstance(found, str), found
        assert found < 1e-12, what


@pytest.mark.parametrize(("stack", "message"), [("reversible", "stack='reversible'"), ("act(steps=2)", "stack='act'")])
def test_what_cannot_be_sharded_is_named(stack, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        check(Decoder(checkpoint.config_of(SIZES | {"stack": stack})))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A sharded run of two processes."""
    folder = tmp_path_factory.mktemp("run") / "two"
    trained(folder, **SHARDED)
    return folder


FIELDS = {"steps": 12, "dropout": 0.0, "evaluate_every": 6, "save_every": 3, "keep": 9}
SHARDED = FIELDS | {"batch": 3, "devices": 2, "strategy": "fsdp"}


def whole(folder, name):
    return checkpoint.load(folder / "run" / "checkpoints" / name).state_dict()


def assert_close(found, wanted, most=1e-5):
    assert list(found) == list(wanted)
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=most, msg=name)


def test_training_in_parts_equals_one_process(sharded, tmp_path):
    trained(tmp_path / "one", **FIELDS, batch=6)
    assert_close(whole(sharded, "step-00000012"), whole(tmp_path / "one", "step-00000012"))
    assert (sharded / "run/checkpoints/best").read_text() == (tmp_path / "one/run/checkpoints/best").read_text()
    first, second = (torch.load(sharded / f"weights-{rank}.pt") for rank in (0, 1))
    assert_close(first, second, 0.0)
    assert_close(first, whole(sharded, "step-00000012"), 0.0)


def resumed_from(folder, other, step, **fields):
    """A copy of the run in ``folder`` as it was after ``step``, resumed."""
    shutil.copytree(folder / "run", other / "run")
    for name in ("best", "last"):
        (other / "run" / "checkpoints" / name).write_text(f"step-{step:08d}\n")
    for path in (other / "run" / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    trained(other, resume=True, **SHARDED | fields)


@pytest.mark.slow
def test_resumed_on_as_many_devices_is_uninterrupted_to_the_last_bit(sharded, tmp_path):
    resumed_from(sharded, tmp_path / "again", 6)
    assert_close(whole(tmp_path / "again", "step-00000012"), whole(sharded, "step-00000012"), 0.0)
    folders = [folder / "run/checkpoints/step-00000012" for folder in (tmp_path / "again", sharded)]
    found, wanted = (in_parts(folder, "optimizer.") for folder in folders)
    assert_close(found, wanted, 0.0)
    assert len(wanted) > 2 * len(list(Decoder(TINY).parameters()))


@pytest.mark.parametrize(("devices", "batch", "accumulate"), [(1, 3, 2), pytest.param(3, 2, 1, marks=pytest.mark.slow)])
def test_resumed_on_other_devices_reads_the_same_examples(sharded, tmp_path, devices, batch, accumulate):
    other = tmp_path / "other"
    # With the same batch, the number of micro-batches follows; with another one, the product must fit.
    resumed_from(sharded, other, 6, devices=devices, batch=batch)
    assert_close(whole(other, "step-00000012"), whole(sharded, "step-00000012"))
    assert examples(other, devices, accumulate) == {s: e for s, e in examples(sharded, 2, 1).items() if s >= 6}


def examples(folder, devices, accumulate):
    """The examples of each step, of all processes together."""
    found = {}
    for rank in range(devices):
        for index, taken in json.loads((folder / f"taken-{rank}.json").read_text()).items():
            found.setdefault(int(index) // accumulate, []).extend(taken)
    return {step: sorted(taken) for step, taken in found.items() if step < 12}


def test_the_end_has_the_weights_in_one_file_and_consolidate_adds_it(sharded, tmp_path, capsys):
    at = shutil.copytree(sharded / "run", tmp_path / "run") / "checkpoints"
    final = at / (at / "last").read_text().strip()
    assert (final / checkpoint.WEIGHTS).exists()
    early = at / "step-00000003"
    names = {path.name for path in early.iterdir()}
    assert checkpoint.WEIGHTS not in names
    wanted = checkpoint.load(early).state_dict()
    assert main(["consolidate", str(early), "--out", str(tmp_path / "plain")]) == entry.OK
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {checkpoint.WEIGHTS, "config.json"}
    assert main(["consolidate", str(early)]) == entry.OK
    assert {path.name for path in early.iterdir()} == names | {checkpoint.WEIGHTS}
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {at.parents[1] / 'plain' / checkpoint.WEIGHTS}",
        f"wrote {early / checkpoint.WEIGHTS}",
    ]
    for folder in (early, tmp_path / "plain"):
        assert_close(checkpoint.load(folder).state_dict(), wanted, 0.0)
    assert main(["consolidate", str(tmp_path / "run")]) == entry.OK
    assert main(["consolidate", str(tmp_path)]) == entry.WRONG


@pytest.mark.parametrize(
    ("name", "read"),
    [("__0_0.distcp", checkpoint.load), (checkpoint.INDEX, checkpoint.load), (checkpoint.INDEX, parts.shapes)],
)
def test_changed_files_are_refused_before_they_are_parsed(sharded, tmp_path, name, read):
    early = shutil.copytree(sharded / "run" / "checkpoints" / "step-00000003", tmp_path / "early")
    content = bytearray((early / name).read_bytes())
    content[len(content) // 2] ^= 1
    (early / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(name)} was changed or damaged since it was written"):
        read(early)


class Evil:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize("content", [pickle.dumps(Evil()), pickle.dumps([1]), b"", b"\x80"])
def test_an_index_runs_no_code(content, tmp_path, capsys):
    with pytest.raises(ValueError, match="metadata is corrupt or foreign"):
        shards.parse_index(tmp_path / checkpoint.INDEX, content)
    assert capsys.readouterr().out == ""


def test_fsdp_and_ddp_runs_do_not_mix(sharded, tmp_path):
    shutil.copytree(sharded / "run", tmp_path / "run")
    run = tiny(tmp_path, **{k: v for k, v in SHARDED.items() if k != "dropout"} | {"strategy": "ddp"})
    with pytest.raises(ValueError, match=r"other settings: run.strategy \(fsdp -> ddp\)"):
        fit(replace(TINY, dropout=0.0), run, resume=True, progress=False)
