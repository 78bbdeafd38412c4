"""The models inside the package: small, honest about their making, equal in parallel and as RNNs, recognisable."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from data_files import mnist_folder, shared
from longspan import data
from longspan.cli import generate as command
from longspan.cli import trained, transcribe
from longspan.cli.entry import WRONG, main
from longspan.data import images as sources
from longspan.generation.native_decoder import Engine
from longspan.generation.sampling import log_likelihood
from longspan.models import checkpoint, pretrained
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.train import TrainConfig, fit, recipes
from longspan_lab.tools import __main__ as tools
from longspan_lab.tools import shipped

ROOT = Path(__file__).parents[2]
MEGABYTES = 6
# What a model of characters needs: its tokenizer, and the licence of its texts.
MORE = {"poems": (checkpoint.TOKENIZER, "tokenizer_config.json", "LICENSE")}
TINY = DecoderConfig(dim=6, depth=1, heads=2, feedforward=7, vocab=256, length=784)


@pytest.fixture(scope="module")
def mnist():
    return data.load(f"mnist:{shared('mnist')}")


@pytest.fixture(scope="module")
def some(mnist):
    """100 evenly spaced test images (100,784)."""
    return mnist.take("test", torch.arange(100) * 100)


# What is in the package


@pytest.mark.parametrize("name", pretrained.names("decoder"))
def test_a_model_is_small_and_has_a_record(name):
    folder = pretrained.path(name)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(files) == {checkpoint.WEIGHTS, checkpoint.CONFIG, pretrained.RECORD, *MORE.get(name, ())}
    assert sum(files.values()) < MEGABYTES * 1e6
    record, header = pretrained.record(name), checkpoint.read_config(folder)
    assert record["command"] == shipped.command(header["config"], header["run"], name)
    assert (record["seed"], record["steps"]) == (header["run"]["seed"], header["step"])
    steps, seconds, bits = zip(*record["curve"], strict=True)
    assert (list(steps), list(seconds)) == (sorted(steps), sorted(seconds))
    unit = data.unit(header["run"]["data"])
    assert record[f"bits_per_{unit}"]["validation"] == min(bits) == bits[steps.index(record["steps"])]
    assert record["seconds"] == seconds[steps.index(record["steps"])]
    assert record["parameters"] == sum(p.numel() for p in Decoder(DecoderConfig(**header["config"])).parameters())
    assert re.fullmatch(r"[0-9a-f]{40}\+?", record["commit"])
    assert {"processor", "cores", "threads"} <= set(record["machine"])
    assert {"longspan", "torch"} <= set(record["versions"])
    # No folder of the machine that made it.
    assert name in command.HELP
    assert not any(
        re.search(r'"(/|~|\w:\\)', (folder / file).read_text()) for file in (checkpoint.CONFIG, pretrained.RECORD)
    )


def test_models_are_there_and_every_one_is_in_the_wheel_and_in_the_help():
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    packed = {file.distribution_path for file in builder.recurse_included_files()}
    assert pretrained.names() == ("digits", "mnist", "poems", "text")
    assert command.HELP.count(f"({', '.join(pretrained.names(*trained.WRITERS))})")
    assert f"({', '.join(pretrained.names(trained.TRANSCRIBER))})" in " ".join(
        transcribe.parser().format_help().split()
    )
    for name in pretrained.names():
        files = {path.relative_to(ROOT / "src").as_posix() for path in pretrained.path(name).iterdir()}
        assert len(files) == 3 + len(MORE.get(name, ()))
        assert files <= packed


@pytest.mark.parametrize("name", pretrained.names())
def test_weights_are_float32_of_bfloat16_values_or_have_8_bits(name):
    stored = checkpoint.load(pretrained.path(name)).state_dict()
    loaded, few = pretrained.load(name), checkpoint.QUANTIZED in checkpoint.read_config(pretrained.path(name))
    assert not loaded.training
    kinds = set()
    for key, tensor in loaded.state_dict().items():
        kinds.add((stored[key].dtype, tensor.dtype))
        assert torch.equal(tensor, stored[key].to(tensor.dtype))
    numbers = (torch.float32 if few else torch.bfloat16, torch.float32)
    assert kinds == ({numbers, (torch.uint8, torch.uint8)} if few else {numbers})


def by_engine(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Nats per image as generation steps: tokens (B,N) -> (B,) float64."""
    engine, inputs = Engine(model), model.shift(tokens)
    state, total = model.init_state(len(tokens)), torch.zeros(len(tokens), dtype=torch.float64)
    for i in range(tokens.shape[1]):
        outputs, state = engine(inputs[:, i : i + 1], state)
        total += model.likelihood.log_prob(outputs, tokens[:, i : i + 1])[:, 0].double()
    return total


def test_one_parallel_pass_is_stepping_on_test_images(some):
    model = pretrained.load("mnist")
    whole, served = log_likelihood(model, some), not Engine.why_not(model)
    # The decoder's own steps take longer; where generation has the engine, some images are enough for them.
    few = some[:10] if served else some
    assert (whole[: len(few)] - log_likelihood(model, few, chunk=1)).abs().max() < 1e-3
    if served:
        assert (whole - by_engine(model, some)).abs().max() < 1e-3


def test_the_record_holds_the_data_and_the_bits_that_these_images_have(mnist, some):
    record = pretrained.record("mnist")
    assert record["data"] == {"mnist": mnist.checksum}
    found = -log_likelihood(pretrained.load("mnist"), some) / mnist.length / math.log(2)
    # 100 of 10,000 images: four standard errors.
    assert abs(found.mean() - record["bits_per_dim"]["test"]) < 4 * found.std() / 10
    assert record["bits_per_dim"]["test"] < 1.0


def seen(found: dict) -> None:
    """What a classifier must see in the samples."""
    assert found["recognised"]["samples"] >= 0.8
    assert sum(found["classes"]) == found["count"] == 500
    assert min(found["classes"]) > 0


def test_the_recorded_samples_are_recognisable():
    found = pretrained.record("mnist")["samples"]
    seen(found)
    # The strict judge distinguishes digits from broken ones, and takes the samples for the former more often.
    strict = found["recognised_strictly"]
    assert strict["digits"] > 0.9
    assert strict["broken"] < 0.2 < strict["samples"]


@pytest.mark.slow
def test_samples_are_recognisable(mnist):
    model, count = pretrained.load("mnist"), shipped.SAMPLES
    drawn = shipped.generate(model, max_new_tokens=mnist.length, batch=count, seed=shipped.SEED)
    seen({"count": count, **shipped.recognised(drawn, mnist)})


# Finding them


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A package with one model, untrained, in a temporary folder."""
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "package")
    torch.manual_seed(0)
    checkpoint.save(Decoder(TINY).bfloat16(), pretrained.FOLDER / "toy", extra={"run": {"data": "mnist"}})
    monkeypatch.chdir(tmp_path)
    return pretrained.load("toy")


def test_models_are_found_by_name(toy):
    assert pretrained.names() == ("toy",)
    assert pretrained.path("toy") == pretrained.FOLDER / "toy"
    assert toy.config == TINY
    assert {parameter.dtype for parameter in toy.parameters()} == {torch.float32}
    checkpoint.write_text(pretrained.FOLDER / "toy" / pretrained.RECORD, '{"seed": 7}')
    assert pretrained.record("toy") == {"seed": 7}
    for what in (pretrained.path, pretrained.load, pretrained.record):
        with pytest.raises(ValueError, match=r"unknown .* 'tyo' \(did you mean 'toy'\?\); known: toy"):
            what("tyo")


def refused(capsys, *words: str) -> str:
    assert main(words) == WRONG
    return capsys.readouterr().err


def test_a_folder_comes_before_a_model_of_its_name(toy, capsys):
    assert pretrained.is_pretrained_name("toy")
    Path("toy").mkdir()
    assert not pretrained.is_pretrained_name("toy")
    assert "toy is neither a checkpoint" in refused(capsys, "generate", "toy")
    assert "(toy)" in refused(capsys, "eval", "tyo")
    assert refused(capsys, "eval", "a/b").endswith("there is no such folder\n")


def test_without_the_data_a_command_names_the_flag(toy, capsys, monkeypatch):
    def offline(urls, *_):
        raise ValueError(f"cannot download {urls[0].rpartition('/')[2]}")

    monkeypatch.setattr(sources, "fetch", offline)
    for line in (("generate", "toy", "--complete", "test"), ("eval", "toy")):
        message = refused(capsys, *line)
        assert "train-images-idx3-ubyte.gz" in message
        assert message.endswith("--data mnist:FOLDER\n")
    # A folder that was named and is wrong needs no such hint.
    assert "mnist:FOLDER" not in refused(capsys, "eval", "toy", "--data", "mnist:none")


def test_generate_and_eval_take_a_model_by_its_name(toy, capsys):
    assert main(["generate", "toy", "--count", "2"]) == 0
    assert re.fullmatch(r"samples\.png: 2 samples, [\d.e+]+ images/s\n", capsys.readouterr().out)
    folder = mnist_folder(Path("noise"))
    assert main(["eval", "toy", "--data", f"mnist:{folder}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tokens = data.load(f"mnist:{folder}").take("test", torch.arange(7))
    assert found["bits"] == pytest.approx(-log_likelihood(toy, tokens).mean().item() / 784 / math.log(2))


# Making them


def test_a_run_becomes_a_model(tmp_path, monkeypatch):
    source = f"mnist:{mnist_folder(tmp_path / 'noise')}"
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "package")
    for name, value in {"BROKEN": 7, "STEPPED": 3}.items():
        monkeypatch.setattr(shipped, name, value)
    monkeypatch.setattr(recipes, "FOLDER", tmp_path)
    (tmp_path / "mnist.yaml").write_text(
        "model: {dim: 6, depth: 1, heads: 2, feedforward: 7, length: 784}\nrun: {steps: 3}\n"
    )
    run = TrainConfig(
        data=source, steps=3, batch=2, evaluate_every=2, evaluate_examples=3, seed=5, out=str(tmp_path / "run")
    )
    fit(TINY, run, progress=False)
    record = shipped.ship(tmp_path / "run", source, samples=4)
    assert record == pretrained.record("mnist")
    header = checkpoint.read_config(pretrained.path("mnist"))
    assert (header["run"]["data"], header["run"]["out"], header["step"]) == ("mnist", "runs/mnist", record["steps"])
    flags = "--run.batch 2 --run.seed 5 --run.evaluate_every 2 --run.evaluate_examples 3"
    assert record["command"] == f"longspan train --config mnist {flags}"
    assert str(tmp_path) not in (pretrained.path("mnist") / checkpoint.CONFIG).read_text()
    dataset, best, loaded = data.load(source), checkpoint.load(tmp_path / "run"), pretrained.load("mnist")
    assert record["data"] == {"mnist": dataset.checksum}
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, best.state_dict()[key].bfloat16().float())
    # The bits are those of the rounded weights.
    bits = -log_likelihood(loaded, dataset.take("test", torch.arange(7))).mean().item() / 784 / math.log(2)
    assert record["bits_per_dim"]["test"] == pytest.approx(bits, abs=1e-5)
    assert (record["seed"], record["parameters"]) == (5, sum(p.numel() for p in best.parameters()))
    assert record["seconds"] > 0
    assert sum(record["samples"]["classes"]) == record["samples"]["count"] == 4
    with pytest.raises(ValueError, match=r"was trained on 'mnist:.*', not on digits"):
        shipped.ship(tmp_path / "run", "digits")


def test_errors_of_a_program_are_one_line(tmp_path):
    with pytest.raises(SystemExit) as stop:
        tools.main(["shipped", str(tmp_path / "none")])
    assert stop.value.code == f"shipped: no checkpoint at {tmp_path / 'none'}: there is no such folder"


def test_broken_images_are_pieces_at_their_places():
    rows = np.arange(5)[:, None] * 1000 + np.arange(784)
    broken = shipped.in_pieces(rows, 6, seed=0).reshape(6, 28, 28)
    assert (broken % 1000 == np.arange(784).reshape(28, 28)).all()
    for i, size in enumerate((1, 4, 7, 1, 4, 7)):
        which = broken[i] // 1000
        assert (which == which[::size, ::size].repeat(size, 0).repeat(size, 1)).all()
        assert len(np.unique(which[0])) > 1
        assert len(np.unique(which[:, 0])) > 1
