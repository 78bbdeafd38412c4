"""Checkpoints: what is saved comes back, whatever is killed when; what is not ours is refused in one line."""

import hashlib
import json
import os
import shutil
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from longspan._utils import sealed_dir
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig, EncoderConfig
from longspan.models.decoder import Decoder
from longspan.models.encoder import Encoder

SMALL = DecoderConfig(dim=10, depth=2, heads=2, feedforward=14, vocab=17, length=13)


def decoder(seed=0, config=SMALL):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(config)


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def folder(tmp_path):
    checkpoint.save(decoder(), tmp_path / "a", training={"step": 7, "moment": torch.arange(3.0)}, extra={"step": 7})
    return tmp_path / "a"


class TestRoundTrip:
    def test_decoder(self, folder):
        model = checkpoint.load(folder)
        assert isinstance(model, Decoder)
        assert model.config == SMALL
        assert not model.training
        assert same(model, decoder())

    def test_encoder(self, tmp_path):
        config = EncoderConfig(dim=10, depth=1, heads=2, feedforward=14, vocab=5, outputs=3)
        model = Encoder(config)
        checkpoint.save(model, tmp_path / "e")
        again = checkpoint.load(tmp_path / "e")
        assert isinstance(again, Encoder)
        assert again.config == config
        assert same(again, model)

    def test_training_state(self, folder):
        training = checkpoint.load_training(folder)
        assert training["step"] == 7
        assert torch.equal(training["moment"], torch.arange(3.0))

    def test_header(self, folder):
        header = checkpoint.read_config(folder)
        assert (header["format"], header["kind"], header["step"]) == (2, "decoder", 7)
        assert DecoderConfig.from_dict(header["config"]) == SMALL

    def test_global_random_numbers_are_left_alone(self, folder):
        before = torch.get_rng_state()
        checkpoint.load(folder)
        assert torch.equal(torch.get_rng_state(), before)

    def test_dtype(self, tmp_path):
        checkpoint.save(decoder().double(), tmp_path / "b")
        assert {p.dtype for p in checkpoint.load(tmp_path / "b").parameters()} == {torch.float64}

    def test_tied_weights_are_one_in_the_file_and_stay_tied(self, tmp_path, monkeypatch):
        class Tied(nn.Module):
            config = SMALL

            def __init__(self, config):
                super().__init__()
                self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
                self.second.weight = self.first.weight
                self.blocks = nn.ModuleList()

        monkeypatch.setitem(checkpoint.MODEL_CLASSES, "decoder", (DecoderConfig, Tied))
        model = Tied(SMALL)
        checkpoint.save(model, tmp_path / "t")
        assert list(load_file(tmp_path / "t" / "model.safetensors")) == ["first.weight"]
        again = checkpoint.load(tmp_path / "t")
        assert again.first.weight is again.second.weight
        assert same(again, model)

    def test_weights_are_as_readable_as_the_config(self, folder):
        modes = {stat.S_IMODE((folder / name).stat().st_mode) for name in ("model.safetensors", "config.json")}
        assert len(modes) == 1

    def test_an_empty_folder_may_be_used(self, tmp_path):
        (tmp_path / "a").mkdir()
        checkpoint.save(decoder(), tmp_path / "a")
        assert same(checkpoint.load(tmp_path / "a"), decoder())


STEPPED_ASIDE = ".c.0123456789abcdef.old"


class Killed(BaseException):
    """A kill in the middle of a system call: nothing of the process runs after it."""


def kill_at(monkeypatch, number):
    """Make the ``number``-th change to the disk the last one."""
    count = [0]

    def fatal(function):
        def call(*arguments, **keywords):
            count[0] += 1
            if count[0] > number:
                raise Killed
            result = function(*arguments, **keywords)
            if count[0] == number:
                raise Killed
            return result

        return call

    places = [(os, name) for name in ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")]
    for module, name in (*places, (torch, "save")):
        monkeypatch.setattr(module, name, fatal(getattr(module, name)))
    return count


class TestKilled:
    @pytest.mark.full
    @pytest.mark.parametrize("again", [False, True], ids=["first kill", "second kill"])
    def test_a_kill_at_any_point_leaves_the_old_or_the_new_one_whole(self, tmp_path, monkeypatch, again):
        old, new, newest = decoder(1), decoder(2), decoder(3)
        seen = set()
        for number in range(100):
            folder = tmp_path / str(number) / "c"
            checkpoint.save(old, folder, training={"of": 1})
            if again:
                os.rename(folder, folder.with_name(STEPPED_ASIDE))
            with monkeypatch.context() as patch:
                kill_at(patch, number)
                try:
                    checkpoint.save(new, folder, training={"of": 2})
                    finished = True
                except Killed:
                    finished = False
            model, training = checkpoint.load(folder), checkpoint.load_training(folder)
            assert same(model, {1: old, 2: new}[training["of"]]), number
            seen.add(training["of"])
            checkpoint.save(newest, folder, training={"of": 3})
            assert same(checkpoint.load(folder), newest)
            assert [path.name for path in folder.parent.iterdir()] == ["c"]
            if finished:
                break
        assert finished
        assert seen == {1, 2}

    def test_each_file_is_synced_before_the_rename(self, tmp_path, monkeypatch):
        synced, events, fsync, rename = set(), [], os.fsync, os.rename

        def watched(descriptor):
            synced.add(os.fstat(descriptor).st_ino)
            events.append(os.fstat(descriptor).st_ino)
            fsync(descriptor)

        def checked(source, target):
            assert {source.stat().st_ino, *(path.stat().st_ino for path in source.iterdir())} <= synced
            events.append("rename")
            rename(source, target)

        monkeypatch.setattr(os, "fsync", watched)
        monkeypatch.setattr(os, "rename", checked)
        checkpoint.save(decoder(), tmp_path / "a", training={})
        assert events[-2:] == ["rename", tmp_path.stat().st_ino]

    def test_small_files_are_replaced_whole(self, tmp_path, monkeypatch):
        path = tmp_path / "last"
        checkpoint.write_text(path, "old")
        with monkeypatch.context() as patch:
            kill_at(patch, 1)
            with pytest.raises(Killed):
                checkpoint.write_text(path, "new")
        assert path.read_text() == "old"
        checkpoint.write_text(path, "new")
        assert path.read_text() == "new"


class TestResolve:
    @pytest.fixture
    def run(self, tmp_path):
        for name in ("step-1", "step-2"):
            checkpoint.save(decoder(), tmp_path / "run" / "checkpoints" / name)
        (tmp_path / "run" / "checkpoints" / "best").write_text("step-1\n")
        (tmp_path / "run" / "checkpoints" / "last").write_text("step-2\n")
        return tmp_path / "run"

    def test_a_checkpoint_means_itself_and_a_run_its_best_or_last(self, folder, run):
        assert checkpoint.resolve(folder) == folder
        assert checkpoint.resolve(run).name == "step-1"
        assert same(checkpoint.load(run), decoder())
        assert checkpoint.resolve(run, prefer="last").name == "step-2"
        (run / "checkpoints" / "best").unlink()
        assert checkpoint.resolve(run).name == "step-2"

    def test_a_pointer_cannot_lead_elsewhere(self, run, folder):
        (run / "checkpoints" / "best").write_text(f"../../{folder.name}")
        with pytest.raises(ValueError, match=r"points to 'a', .* no such checkpoint"):
            checkpoint.resolve(run)


def edit(folder, **entries):
    """As somebody does it who knows how to: the digests are those of what is there now."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
        if path.name != "config.json"
    }
    path = folder / "config.json"
    header = json.loads(path.read_text()) | {"files": files} | entries
    path.write_text(json.dumps(header | {"sha256": sealed_dir.digest(header)}))


def content(of):
    """Put bytes in the place of the config."""
    return lambda folder: (folder / "config.json").write_bytes(of)


def weightless(folder):
    (folder / "model.safetensors").unlink()


def emptied(folder):
    for path in folder.iterdir():
        path.unlink()


def blocked(folder):
    weightless(folder)
    (folder / "model.safetensors").mkdir()


def reweighted(change):
    """Change the dict of the weights in place, as somebody does it who knows how to."""

    def apply(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")
        edit(folder)

    return apply


def other_weights(weights):
    weights.clear()
    weights["x"] = torch.zeros(1)


def misfits(weights):
    del weights["head.bias"]
    weights.update({"tail": torch.zeros(2), "head.weight": torch.zeros(2, 3)})


def described(**fields):
    """A config with other fields than the model that was saved."""
    return lambda folder: edit(folder, config=SMALL.to_dict() | fields)


def nan(model):
    torch.nn.init.constant_(model.head.bias, torch.nan)
    return model


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda folder: shutil.rmtree(folder), "no checkpoint at .*: there is no such folder"),
            (emptied, "neither a checkpoint .* nor a training run"),
            (lambda folder: (folder / "config.json").unlink(), r"config\.json"),
            *[(content(of), "/a/config.json is corrupt") for of in (b"{", b"\xff\xfe\xfd", b'{"format": "\xff"}')],
            (content(b"[" * 100_000), "/a/config.json is corrupt"),
            (content(b'{"architectures": ["LlamaForCausalLM"]}'), "belongs to another program"),
            (lambda folder: edit(folder, format=1), "has format 1; this longspan .* reads format 2"),
            (lambda folder: edit(folder, kind="vocoder"), "has kind 'vocoder'; known: decoder, encoder"),
            (lambda folder: edit(folder, kind=[]), r"has kind \[\]; known: decoder, encoder"),
            (lambda folder: edit(folder, config=None), "is corrupt: it has no config"),
            (lambda folder: edit(folder, files=None), "config.json is corrupt: it names no files"),
            (weightless, "it has no model.safetensors"),
            (blocked, "cannot read .*/a.*: Is a directory"),
            (reweighted(other_weights), r"\d\d missing: [^,]+, [^,]+, [^,]+, \.\.\.; 1 unexpected: x$"),
            (
                reweighted(misfits),
                "fit the model; weights 1 missing: head.bias; 1 unexpected: tail; 1 of another shape",
            ),
            (reweighted(misfits), r"1 of another shape: head.weight \(2, 3\) instead of \(17, 10\)"),
            *[
                (
                    reweighted(
                        lambda weights, dtype=dtype: weights.update({"head.bias": torch.zeros(17, dtype=dtype)})
                    ),
                    f"1 of another kind: head.bias {dtype} instead of torch.float32",
                )
                for dtype in (torch.int64, torch.bool, torch.uint8)
            ],
            (
                reweighted(lambda weights: weights["head.bias"][3].fill_(torch.nan)),
                "model.safetensors has NaN weights: 1 of 17 in head.bias",
            ),
            # A config that describes no model, or one that is much larger than the weights.
            (described(width=3), "config.json does not describe a decoder: .*width"),
            (described(heads=3), "config.json does not describe a decoder: .*heads"),
            (described(dim="wide"), "config.json does not describe a decoder: .*(a whole number|integer|int)"),
            (described(positions=None), "does not describe a decoder: positions=None must be a string"),
            (described(depth=10**9), "does not describe a decoder: depth=1000000000 must be at most 10000"),
            (described(dim=10**6), r"its weights would take .* bytes, .*model.safetensors has "),
            (described(dim=64, depth=10**4), r"its weights would take .* bytes, .*model.safetensors has "),
        ],
    )
    def test_damaged_folder(self, folder, change, message):
        change(folder)
        with pytest.raises(ValueError, match=message):
            checkpoint.load(folder)

    @pytest.mark.parametrize("keep", [0, 5, 50, -1])
    @pytest.mark.parametrize(
        ("name", "read"), [("model.safetensors", checkpoint.load), ("training.pt", checkpoint.load_training)]
    )
    def test_truncated_file(self, folder, name, read, keep):
        path = folder / name
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ValueError, match=rf"{name} was changed or damaged since it was written: it has"):
            read(folder)
        edit(folder)
        with pytest.raises(ValueError, match=rf"{name} is corrupt"):
            read(folder)

    def test_code_in_the_training_state_is_not_run(self, folder):
        class Attack:
            def __reduce__(self):
                return (os.mkdir, (str(folder / "owned"),))

        torch.save({"a": Attack()}, folder / "training.pt")
        edit(folder)
        with pytest.raises(ValueError, match=r"training.pt is corrupt or foreign"):
            checkpoint.load_training(folder)
        assert not (folder / "owned").exists()

    @pytest.mark.parametrize("file", [True, False])
    def test_anything_else_is_not_replaced(self, tmp_path, file):
        if file:
            (tmp_path / "a").write_text("precious")
        else:
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "thesis.tex").write_text("precious")
        with pytest.raises(ValueError, match=r"exists and is not a checkpoint .* will not be replaced"):
            checkpoint.save(decoder(), tmp_path / "a")
        assert (tmp_path / "a" if file else tmp_path / "a" / "thesis.tex").read_text() == "precious"

    @pytest.mark.parametrize(
        ("model", "place", "extra", "message"),
        [
            (nn.Linear(2, 2), "a", None, "cannot save a Linear; known: Decoder, Encoder"),
            (nan(decoder(1)), "a", None, "the model has NaN weights: 17 of 17 in head.bias"),
            (decoder(1), "a", {"kind": "mine"}, "extra must not contain 'kind'"),
            (decoder(1), "a", {"x": {1}}, "config.json holds plain values only: .* set is not JSON"),
            (decoder(1), "a/config.json/b", None, "cannot write the checkpoint .*: Not a directory"),
            (decoder(1), "a\0b", None, r"a\\x00b'.*NUL"),
        ],
    )
    def test_what_cannot_be_saved_leaves_the_old_one(self, folder, model, place, extra, message):
        with pytest.raises(ValueError, match=message):
            checkpoint.save(model, f"{folder.parent}/{place}", extra=extra)
        assert os.listdir(folder.parent) == ["a"]
        assert same(checkpoint.load(folder), decoder())

    def test_disk_that_fills_up_leaves_the_old_one(self, folder, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ValueError, match=r"cannot write the checkpoint .*: No space left on device"):
            checkpoint.save(decoder(1), folder)
        assert same(checkpoint.load(folder), decoder())
