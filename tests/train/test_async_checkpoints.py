"""Checkpoints in parts that are written in the background: complete or absent, and errors are raised."""

import contextlib
import os
import signal
import threading

import pytest
import torch
from torch import distributed as dist

from longspan.models import checkpoint, parts, shards
from longspan.models.decoder import Decoder
from support.runs import start, trained, wait_while
from training_process import HANGS, TINY, checkpoints, in_parts

FIELDS = {"steps": 12, "dropout": 0.0, "evaluate_every": 12, "save_every": 4, "keep": 9, "evaluate_examples": 2}
TWO = FIELDS | {"batch": 3, "devices": 2, "strategy": "fsdp"}
LATER = TWO | {"async_checkpoints": True}


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def begun(folder, group, done=lambda: None):
    """A checkpoint of weights that change after the call, and their values before."""
    model = Decoder(TINY)
    tensors = {f"model.{name}": t for name, t in model.state_dict().items()}
    wanted = {name: t.clone() for name, t in model.state_dict().items()}
    saving = parts.save_async(model, tensors, folder, training={"a": 1}, extra={"step": 3}, group=group, done=done)
    for t in tensors.values():
        t.zero_()
    return saving, wanted


def test_the_checkpoint_has_the_weights_of_the_call_and_appears_when_it_is_complete(alone, tmp_path, monkeypatch):
    go, seen, folder = threading.Event(), [], tmp_path / "at"
    write = shards.FileSystemWriter.write_data
    monkeypatch.setattr(shards.FileSystemWriter, "write_data", lambda *args: (go.wait(20), write(*args))[1])
    saving, wanted = begun(folder, alone, lambda: seen.append(folder.is_dir()))
    assert (folder.exists(), seen) == (False, [])
    go.set()
    saving.wait()
    assert seen == [True]
    assert checkpoint.load_training(folder) == {"a": 1}
    found = checkpoint.load(folder).state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("where", ["write", "complete", "done"])
def test_errors_are_raised_by_wait(where, alone, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    if where == "write":
        monkeypatch.setattr(shards.FileSystemWriter, "write_data", fail)
    elif where == "complete":
        monkeypatch.setattr(parts.sealed_dir, "seal", fail)
    saving, _ = begun(tmp_path / "at", alone, fail if where == "done" else lambda: None)
    with pytest.raises(ValueError, match=r"cannot write the checkpoint .*at: .*No space left on device"):
        saving.wait()
    assert (tmp_path / "at").exists() == (where == "done")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.fixture(scope="module")
def sync(tmp_path_factory):
    """A run of two processes that writes its checkpoints at once."""
    folder = tmp_path_factory.mktemp("sync") / "run"
    trained(folder, **TWO)
    return folder


def assert_equal(found, wanted):
    """The last checkpoints and all others that both runs have are equal to the last bit."""
    own, other = (folder / "run" / "checkpoints" for folder in (found, wanted))
    for pointer in ("last", "best"):
        assert (own / pointer).read_text() == (other / pointer).read_text()
    for name in checkpoints(found):
        for prefix in ("model.", "optimizer."):
            one, two = (in_parts(folder / name, prefix) for folder in (own, other))
            assert list(one) == list(two)
            assert all(torch.equal(value, two[key]) for key, value in one.items())


# Each process waits before it writes its part of step 8, and trains on meanwhile. What is killed below and goes on
# writes the same ones, too.
@pytest.mark.slow
def test_a_run_writes_the_same_checkpoints(sync, tmp_path):
    trained(tmp_path, writing={"step": 8, "seconds": 1.0}, **LATER)
    assert checkpoints(tmp_path) == checkpoints(sync)
    assert_equal(tmp_path, sync)
    assert (tmp_path / "run/checkpoints/step-00000012/model.safetensors").exists()


@pytest.mark.full
def test_killed_while_writing_the_checkpoint_before_is_the_last(sync, tmp_path):
    process = start(tmp_path, writing={"step": 8, "seconds": 600.0}, **LATER)
    table = tmp_path / "run" / "metrics.csv"
    try:
        # Training goes on up to the next checkpoint.
        wait_while(lambda: not (table.exists() and "\n10," in table.read_text()), process, tmp_path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert checkpoints(tmp_path) == ["step-00000004"]
    at = tmp_path / "run" / "checkpoints"
    assert (at / "last").read_text() == "step-00000004\n"
    for prefix in ("model.", "optimizer."):
        one, two = (in_parts(folder / "run/checkpoints/step-00000004", prefix) for folder in (tmp_path, sync))
        assert all(torch.equal(value, two[key]) for key, value in one.items())
    trained(tmp_path, resume=True, **LATER)
    assert_equal(tmp_path, sync)
    assert not [path for path in (tmp_path / "run/checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize("step", [8, 12])
def test_an_error_in_the_background_ends_the_run(step, tmp_path):
    process = start(tmp_path, writing={"step": step, "rank": 1}, **LATER)
    assert process.wait(timeout=HANGS) != 0
    said = (tmp_path / "err").read_text()
    assert f"cannot write the checkpoint {tmp_path / 'run/checkpoints'}/step-{step:08d}: " in said
    assert "No space left on device; the last good checkpoint is step-" in said
    assert f"step-{step:08d}" not in checkpoints(tmp_path)
    assert (tmp_path / "run/checkpoints/last").read_text().strip() == checkpoints(tmp_path)[-1]
