"""Text files as data, the first and last lines of training, and runs shown and compared."""

import gzip
import io
import json
import lzma
import math
import os
import shutil
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("lightning", reason="the runs are trained: pip install longspan[train]")

import longspan
from longspan import data
from longspan._utils import memory
from longspan.cli import entry as cli
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig, EncoderConfig, StackConfig
from longspan.train import run_summary

TEXT = bytes(range(97, 123)) * 40
SMALL = [f"--model.{k}={v}" for k, v in {"dim": 6, "depth": 1, "heads": 2, "feedforward": 7, "length": 16}.items()]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder in which two models were trained on a text file, named by a relative path."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "book.txt").write_bytes(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, attention in (("one", "linear"), ("two", "softmax")):
            words = ["--run.data", "text:book.txt", "--run.length", "16", "--run.steps", "3", "--run.batch", "2"]
            words += ["--run.evaluate_every", "2", "--run.out", name, "--model.attention", attention]
            assert cli.main(["train", *SMALL, *words]) == 0
    return folder


def said(capsys, *words):
    assert cli.main(words) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    assert cli.main(words) == 2
    return capsys.readouterr().err


def test_a_text_is_found_again_from_another_folder(home, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert yaml.safe_load((home / "one" / "config.yaml").read_text())["run"]["data"] == f"text:{home}/book.txt"
    assert "bits/byte on 3 examples" in said(capsys, "eval", str(home / "one"))


def test_a_text_that_has_changed_is_evaluated_only_if_it_is_named(home, capsys):
    before = (home / "book.txt").read_bytes()
    (home / "book.txt").write_bytes(before.swapcase())
    try:
        err = refused(capsys, "eval", str(home / "one"))
        assert f"text:{home}/book.txt has changed since the model was trained on it" in err
        assert "on 3 examples" in said(capsys, "eval", str(home / "one"), "--data", f"text:{home}/book.txt")
    finally:
        (home / "book.txt").write_bytes(before)


@pytest.mark.parametrize(("size", "more"), [(5, []), (30, []), (42, ["--sliding", "3"])])
def test_a_short_text_is_evaluated_as_a_whole(home, tmp_path, capsys, size, more):
    (tmp_path / "short.txt").write_bytes(TEXT[:size])
    words = ["eval", str(home / "one"), "--data", f"text:{tmp_path}/short.txt", "--json", *more]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found.get("sliding", found)["tokens"] == size
    assert "is too short for held-out parts" in err


def test_a_text_that_is_gone_is_named_with_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"no text at {tmp_path}/absent.txt: there is no such file or folder"):
        data.load("text:absent.txt")


def test_a_path_without_text_before_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_bytes(TEXT)
    with pytest.raises(ValueError, match="'book.txt' .*text:book"):
        data.load("book.txt")


def packed(kind):
    """A text inside an archive."""
    file = io.BytesIO()
    match kind:
        case "gzip":
            return gzip.compress(TEXT)
        case "xz":
            return lzma.compress(TEXT)
        case "zip":
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("book.txt", TEXT)
        case "tar":
            with tarfile.open(fileobj=file, mode="w") as archive:
                entry = tarfile.TarInfo("book.txt")
                entry.size = len(TEXT)
                archive.addfile(entry, io.BytesIO(TEXT))
    return file.getvalue()


@pytest.mark.parametrize("kind", ["gzip", "xz", "zip", "tar"])
def test_a_packed_text_is_refused(kind, tmp_path):
    path = tmp_path / "book"
    path.write_bytes(packed(kind))
    with pytest.raises(ValueError, match=f"{path} is packed by {kind}; unpack it first"):
        data.load(f"text:{path}", 16)


@pytest.mark.parametrize(("kind", "ending"), [("gzip", ".gz"), ("xz", ".xz")])
def test_a_text_with_the_ending_of_its_packing_is_unpacked(kind, ending, tmp_path):
    (tmp_path / f"book{ending}").write_bytes(packed(kind))
    tokens = data.load(f"text:{tmp_path}/book{ending}", 16).take("train", torch.tensor([0]))
    assert bytes(tokens[0].tolist()) == TEXT[:16]
    (tmp_path / "twice.tar.gz").write_bytes(gzip.compress(packed("tar")))
    with pytest.raises(ValueError, match="packed by tar"):
        data.load(f"text:{tmp_path}/twice.tar.gz", 16)


@pytest.mark.parametrize("kind", [StackConfig, DecoderConfig, EncoderConfig])
def test_more_specs_than_layers_are_refused(kind):
    message = "has 3 specs, more than depth=2"
    with pytest.raises(ValueError, match=message):
        kind(depth=2, attention="gated_deltanet; gated_deltanet; softmax")
    assert kind(depth=4, attention="linear; linear; softmax").depth == 4


def test_a_mechanism_without_the_positions_is_refused_with_the_flag_that_helps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", *SMALL, "--model.attention", "kernel", "--run.data", "digits", "--run.steps", "1"]
    said = refused(capsys, *words, "--model.positions", "rotary", "--run.out", "r")
    assert "kernel has no rotary positions" in said
    assert "--model.positions" in said
    assert not list(tmp_path.iterdir())


def test_training_opens_and_ends_with_what_and_on_how_much(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_bytes(TEXT)
    words = ["--run.data", "text:book.txt", "--run.length", "16", "--run.steps", "1", "--run.batch", "2"]
    assert cli.main(["train", *SMALL, *words, "--run.evaluate_examples", "2", "--run.out", "r"]) == 0
    out, err = capfd.readouterr()
    weights = run_summary.facts("r")["parameters"]
    where = r"cuda" if torch.cuda.is_available() else "cpu, "
    first, *_, last = err.splitlines()
    assert first.startswith(f"{weights:,} parameters, linear; text:{tmp_path}/book.txt: 921 examples of 16 tokens, 2 ")
    assert f"on {where}" in first
    for line in (last, out):
        assert "(2 examples), test " in line


def test_show_tells_what_a_run_is(home, capsys):
    shown = said(capsys, "show", str(home / "one"))
    facts = json.loads(said(capsys, "show", str(home / "one"), "--json"))
    assert facts["steps"] == 3
    assert facts["model"]["attention"] == "linear"
    assert facts["run"]["data"] == f"text:{home}/book.txt"
    assert facts["parameters"] == sum(p.numel() for p in longspan.load(home / "one").parameters())
    bits = [
        row["validation_bits"] for row in run_summary.metrics(home / "one") if not math.isnan(row["validation_bits"])
    ]
    assert facts["bits"] == min(bits)
    for part in (
        f"a training run on text:{home}",
        f"{min(bits):.4f} bits/byte at step",
        "3 of 3",
        "attention='linear'",
    ):
        assert part in shown


def test_a_mechanism_comes_before_a_run_of_its_name(home, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linear").symlink_to(home / "one", target_is_directory=True)
    assert "2006.16236" in said(capsys, "show", "linear")
    assert "a training run" in said(capsys, "show", "./linear")


def test_compare_has_a_table_and_a_picture(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    pytest.importorskip("matplotlib", reason="the curves are drawn: pip install longspan[plot]")
    one, two, picture = str(home / "one"), str(home / "two"), tmp_path / "curves.png"
    head, *rows, last = said(capsys, "compare", one, two, "--out", str(picture)).splitlines()
    assert head.split()[:2] == ["run", "model.attention"]
    assert [row.split()[:2] for row in rows] == [[one, "linear"], [two, "softmax"]]
    assert f"{run_summary.facts(two)['bits']:.4f}" in rows[1]
    assert last == f"curves: {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [each["folder"] for each in json.loads(said(capsys, "compare", one, two, "--json"))] == [one, two]


def test_a_full_disk_leaves_the_older_curves(home, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib", reason="the curves are drawn: pip install longspan[plot]")
    picture = tmp_path / "curves.png"
    picture.write_bytes(b"older")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    said = refused(capsys, "compare", str(home / "one"), "--out", str(picture))
    assert said == f"longspan: error: {picture}: No space left on device\n"
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
    assert picture.read_bytes() == b"older"


def test_what_is_no_run_is_refused(home, tmp_path, capsys):
    assert f"{tmp_path} holds no training run: it has no config.yaml" in refused(capsys, "compare", str(tmp_path))
    assert "runs/absent" in refused(capsys, "show", "runs/absent")
    (tmp_path / "config.yaml").write_text("- 3")
    assert "config.yaml is corrupt: it holds no model and run" in refused(capsys, "compare", str(tmp_path))
    (tmp_path / "config.yaml").write_bytes((home / "one" / "config.yaml").read_bytes())
    assert "none yet" in said(capsys, "show", str(tmp_path))
    (tmp_path / "metrics.csv").write_text("a,b\n1,2\n")
    assert "metrics.csv is corrupt" in refused(capsys, "show", str(tmp_path))
    assert "pictures are PNG files" in refused(capsys, "compare", str(home / "one"), "--out", "curves.pdf")


def test_damaged_weights_are_named(home, tmp_path, capsys):
    shutil.copytree(home / "one", tmp_path / "one")
    path = checkpoint.resolve(tmp_path / "one") / "model.safetensors"
    path.write_bytes(b"garbage")
    for command in ("show", "compare"):
        assert f"{path} is corrupt: " in refused(capsys, command, str(tmp_path / "one"))


HEAD = "step,validation_bits,tokens_per_second,seconds\n1,3.0,5,10\n"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("inf,3.0,5,10", "step is inf"),
        (",3.0,5,10", "step is nan"),
        ("1.5,3.0,5,10", "step is 1.5"),
        ("-1,3.0,5,10", "step is -1"),
        ("2,3.0,inf,10", "tokens_per_second is inf"),
        ("2,3.0,5,nan", "seconds is nan"),
        ("2,3.0,5,-3", "seconds is -3"),
        ("2,3.0", "seconds is nan"),
        ("2,3.0,5,10,7", "not 'list'"),
        ("2,x,5,10", "could not convert string to float"),
    ],
)
def test_figures_that_no_training_writes_are_refused(row, said, tmp_path):
    (tmp_path / "metrics.csv").write_text(f"{HEAD}{row}\n")
    with pytest.raises(ValueError, match=f"metrics.csv is corrupt: .*{said}"):
        run_summary.metrics(tmp_path)
    # A row that a kill has cut off is none.
    (tmp_path / "metrics.csv").write_text(HEAD + row)
    assert [one["step"] for one in run_summary.metrics(tmp_path)] == [1]


def test_an_evaluation_that_gave_infinity_is_not_the_best(home, tmp_path, capsys):
    shutil.copytree(home / "one", tmp_path / "one")
    path = tmp_path / "one" / "metrics.csv"
    head = path.read_text().partition("\n")[0]
    usual = dict.fromkeys(head.split(","), "1")
    rows = [usual | {"step": step, "validation_bits": bits} for step, bits in ((1, "inf"), (2, "3"))]
    path.write_text("\n".join([head, *(",".join(map(str, row.values())) for row in rows), ""]))
    assert (run_summary.facts(tmp_path / "one")["bits"], run_summary.facts(tmp_path / "one")["best_step"]) == (3.0, 2)


class TestText:
    """A text is in memory once, and never more than fits."""

    @pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "folder/a.txt", "folder/a.txt.gz"])
    def test_is_held_once(self, name, tmp_path):
        path, size = tmp_path / name, 2**23
        path.parent.mkdir(exist_ok=True)
        with gzip.open(path, "wb") if name.endswith(".gz") else open(path, "wb") as file:
            file.write(bytes(size))
        tracemalloc.start()
        try:
            found = data.load(f"text:{path.parent if 'folder' in name else path}", 16)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert sum(map(len, found.splits.values())) == size
        assert peak < 1.5 * size

    @pytest.mark.parametrize("kind", ["hole", "gzip", "xz", "folder"])
    def test_that_does_not_fit_is_refused(self, kind, tmp_path, monkeypatch):
        monkeypatch.setattr(memory, "available", lambda: 2**22)
        path = tmp_path / {"hole": "a.txt", "gzip": "a.gz", "xz": "a.xz", "folder": "a.txt"}[kind]
        if kind in ("hole", "folder"):
            with open(path, "wb") as file:
                file.truncate(1 << 40)
        else:
            pack = gzip if kind == "gzip" else lzma
            path.write_bytes(pack.compress(bytes(2**23)))
        name = f"text:{tmp_path if kind == 'folder' else path}"
        with pytest.raises(ValueError, match=f"{path} .*2 times as much must be free in memory"):
            data.load(name, 16)

    def test_pairs_take_more_memory_than_text(self, tmp_path, monkeypatch):
        monkeypatch.setattr(memory, "available", lambda: 2**20)
        path = tmp_path / "a.txt"
        path.write_bytes(b"ab\tcd\n" * 2**13)
        with pytest.raises(ValueError, match="32 times as much must be free in memory"):
            data.load(f"pairs:{path}")
        monkeypatch.setattr(memory, "available", lambda: 2**22)
        with pytest.raises(ValueError, match="none of which is in"):
            data.load(f"pairs:{path}")


def test_a_resumed_run_counts_the_seconds_of_all_its_processes(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "step,validation_bits,tokens_per_second,seconds\n1,,5,10\n2,3.5,5,20\n3,,5,4\n4,3.0,5,8\n"
    )
    assert [row["elapsed"] for row in run_summary.metrics(tmp_path)] == [10, 20, 24, 28]
