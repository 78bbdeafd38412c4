"""The command line: every command does its work, and every mistake is one line with exit code 2."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import longspan
from longspan import data, testing
from longspan.cli import entry
from longspan.cli.entry import COMMANDS, load, main
from longspan.cli.parser import kebab
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig, EncoderConfig
from longspan.models.decoder import Decoder
from longspan.models.encoder import Encoder
from longspan.train import bits

# The module; the package has a function of that name.
GENERATE = importlib.import_module("longspan.generation.sampling")
TINY = [f"--model.{k}={v}" for k, v in {"dim": 6, "depth": 1, "heads": 2, "feedforward": 7}.items()]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Untrained models as a training run would save them, and one that does not say what it was trained on."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    small = {"dim": 6, "depth": 1, "heads": 2, "feedforward": 7}
    digits = Decoder(DecoderConfig(**small, vocab=17, length=64))
    text = Decoder(DecoderConfig(**small, vocab=256, length=23, attention="softmax(kv_heads=1)"))
    checkpoint.save(digits, folder / "digits", extra={"run": {"data": "digits", "length": 0}})
    checkpoint.save(text, folder / "text", extra={"run": {"data": "text:stdlib", "length": 13}})
    checkpoint.save(
        Decoder(DecoderConfig(**small, vocab=17, length=63)), folder / "short", extra={"run": {"data": "digits"}}
    )
    checkpoint.save(digits, folder / "silent")
    checkpoint.save(Encoder(EncoderConfig(**small)), folder / "encoder")
    return folder


@pytest.fixture
def at(models, monkeypatch, tmp_path) -> Path:
    """A separate working folder, where ``m`` leads to the models."""
    (tmp_path / "m").symlink_to(models, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys, *argv: str, code: int = 0) -> str:
    """stdout of a command that is to end with ``code``; where it succeeds, stderr stays empty."""
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert code or not err
    return out


def refused(capsys, *argv: str) -> str:
    """The one line that a command prints when it refuses its arguments."""
    assert main(argv) == entry.WRONG
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("longspan: error: ")
    assert err.count("\n") == 1
    return err


def test_help_names_every_command(capsys):
    shown = said(capsys, "--help")
    assert said(capsys) == said(capsys, "-h") == shown
    assert all(re.search(rf"^  {name} +\w", shown, re.MULTILINE) for name in COMMANDS)
    assert max(map(len, shown.splitlines())) <= 80
    assert said(capsys, "--version").startswith("longspan ")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_documents_every_flag(command, capsys):
    module = load(command)
    shown = said(capsys, command, "--help")
    assert "examples:" in shown
    assert f"  longspan {command}" in shown
    assert "--debug" in shown
    assert [option for option in re.findall(r"(?<![\w-])--[a-z][\w.-]*", shown) if "_" in option] == []
    for action in module.parser()._actions:
        assert action.help, action.dest
        assert all(kebab(option) in shown for option in action.option_strings)


# A command line -> values that the message names, separated by " & ".
MISTAKES = {
    "trian": "unknown command 'trian' (did you mean 'train'?); known: bench, chat, check",
    "--vershun": "unknown option '--vershun'; known: --debug, --help, --import, --version",
    "list --jsn": "unknown option '--jsn' (did you mean '--json'?); known: --help, --json",
    "list more": "unrecognized arguments: more; see longspan list --help",
    "eval": "MODEL",
    "eval m/digits --batch x": "--batch: expected int, got x; see longspan eval --help",
    "eval m/digits --batch": "--batch: expected one argument",
    "eval m/digits --batch 0": "--batch=0 must be at least 1",
    "eval m/digits --stepwise -1": "--stepwise=-1 must not be negative",
    "eval m/nothing": "there is no such folder",
    "eval m": "checkpoint",
    "eval m/encoder": "m/encoder & labels",
    "eval m/silent": "m/silent & --data",
    "generate m/encoder": "holds an encoder; only a decoder",
    "eval m/digits --split tset": "unknown split 'tset' (did you mean 'test'?); known: test, train, validation",
    "eval m/digits --data moon": "unknown data set 'moon'; known: cifar10",
    "eval m/digits --data text:stdlib": "vocab=17 & text:stdlib & 256",
    "eval m/short": "63 & digits & 64",
    "eval m/digits --data cifar10:m": "no CIFAR-10 records in m",
    "generate m/digits --count 0": "--count=0 must be at least 1",
    "generate m/digits --temperature -1": "temperature=-1.0",
    "generate m/digits --top_p 0": "top_p=0.0",
    "generate m/digits --top_k -1": "--top-k=-1 must not be negative",
    "generate m/digits --prompt a": "--prompt & digits",
    "generate m/digits --complete tset": "unknown split 'tset'",
    "generate m/digits --complete test --top 1": "--top=1.0 & 0 & 1",
    "generate m/digits --complete test --count 999": "--count=999 & test & digits & 176",
    "generate m/digits --out x.jpg": "their names end in .png, unlike x.jpg",
    "generate m/text --out x.png": "--complete & --out",
    "generate m/text --beams 1e30": "--beams",
    f"generate m/text --beams {10**30}": "--beams",
    "generate mnist --count 1000000000": "--count",
    "generate m/text --tokens -1": "--tokens=-1 must not be negative",
    "generate m/text --prompt abc --tokens 21": "3 & 21 & 23",
    "show linaer": "unknown name 'linaer' (did you mean 'linear'?); known: ",
    "show linear(x=1)": "linear has no option 'x'; it has feature_map",
    "show linear;;softmax": "empty spec",
    "show 3": "'3' names no attention; known: ",
    "show linear --dim 66": "dim=66 is not a multiple of heads=8",
    "show linear --device oven": "device='oven'",
    "show m": "m is neither a checkpoint",
    "show m/digits --draw x.png": "--draw & m/digits",
    "cite m/nothing": "there is no such folder",
    "cite linaer": "unknown name 'linaer'",
    "check linaer": "unknown attention 'linaer'",
    "check linear --device gpu0": "device='gpu0' is not a device; pass cpu, cuda or cuda:1",
    "check linear --device meta": "device='meta' holds no values to check; pass cpu or cuda",
    f"bench attention --rounds {10**30}": "--rounds",
    f"bench attention --lengths {10**30}": "--lengths",
    "bench depth --depths 0": "--depths",
    "transcribe digits a.wav --beam 1000000000": "--beam",
    "reproduce mqar --rates nan": "--rates",
    "demo --out m/text/config.json": "cannot make the folder m/text/config.json",
    "demo --steps 0": "--steps=0 must be at least 1",
    "train --model.dimm 3": "unknown option '--model.dimm' (did you mean '--model.dim'?); known: --model.activation, ",
    "train --model.dim 6.5": "--model.dim: expected int, got 6.5; see longspan train --help",
    "train --model.dim 65": "dim=65 is not a multiple of heads=8",
    "train --run.batch 0": "batch=0 must be at least 1",
    "train --run.batch 1000000000": "batch",
    "train --run.save_evry 7": "unknown option '--run.save-evry' (did you mean '--run.save-every'?)",
    "train --run.save-every often": "--run.save-every",
    "train --config": "--config",
    "train --config none.yaml": "--config: cannot read 'none.yaml': No such file",
    "train --run.out m": "m is not empty and holds no run; choose another folder with out",
    "train --run.out m/text/config.json/run --model.vocab 17": "cannot write the run's folder m/text/config.json/run",
    "train --run.out new --resume": "nothing to resume in new",
}
if not torch.cuda.is_available():
    MISTAKES["check linear --device cuda"] = f"device='cuda': torch {torch.__version__} finds no CUDA GPU; pass cpu"


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_code_2(line, at, capsys):
    message = refused(capsys, *line.split())
    assert all(part in message for part in MISTAKES[line].split(" & "))


# A recipe -> values that the message names, separated by " & ".
RECIPES = {
    "model: {dim: 6, foo: 3}": "unknown field of model in r.yaml 'foo'; known: activation",
    "model: {foo: {}}": "unknown field of model in r.yaml 'foo'",
    "run: {stebs: 3}": "unknown field of run in r.yaml 'stebs' (did you mean 'steps'?)",
    "foo: {}": "unknown entry of r.yaml 'foo'; known: model, resume, run",
    "3: {}": "unknown entry of r.yaml '3'",
    "model:": "model & r.yaml & None",
    "- 3": "r.yaml & model & run",
    "model: [3": "r.yaml & YAML",
    "\xff": "r.yaml is not UTF-8",
    "model: {positions: null, vocab: 17}": "positions=None must be a string",
    "model: {attention: 5}": "--model.attention: expected str, got 5",
    "run: {keep: null}": "keep=None must be a whole number",
    "run: {warmup: null}": "warmup=None must be a whole number",
    "model: {depth: 1000000000, vocab: 17}": "depth=1000000000 must be at most 10000",
    "model: &a {dim: 16}\nrun: *a": "r.yaml & *name",
    "model: [[[[[[[[[1]]]]]]]]]": "r.yaml & 8",
}


@pytest.mark.parametrize("text", RECIPES)
@pytest.mark.parametrize("flag", [["--config", "r.yaml"], ["--config=r.yaml"]])
def test_a_recipe_with_unknown_entries_is_refused(text, flag, at, capsys):
    Path("r.yaml").write_bytes(text.encode("latin-1"))
    message = refused(capsys, "train", *flag)
    assert all(part in message for part in RECIPES[text].split(" & "))


def test_debug_shows_the_traceback(capsys):
    assert main(["show", "--debug", "linaer"]) == entry.WRONG
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("longspan: error: unknown name 'linaer'")


def test_a_missing_extra_is_named_and_other_import_errors_are_bugs(at, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert 'pip install ".[data]"' in refused(capsys, "generate", "m/digits")
    monkeypatch.setitem(sys.modules, "longspan.cli.listing", None)
    with pytest.raises(ImportError):
        main(["list"])


def test_system_errors_name_the_file(capsys, monkeypatch):
    def fail(args):
        raise PermissionError(13, "Permission denied", "a.txt")

    monkeypatch.setattr("longspan.cli.listing.run", fail)
    assert refused(capsys, "list") == "longspan: error: a.txt: Permission denied\n"


def test_interrupts_and_closed_pipes_have_their_codes(capsys, monkeypatch):
    for error, code, line in ((KeyboardInterrupt(), 130, "longspan: interrupted\n"), (BrokenPipeError(), 141, "")):

        def fail(args, error=error):
            raise error

        monkeypatch.setattr("longspan.cli.listing.run", fail)
        assert main(["list"]) == code
        assert capsys.readouterr().err == line


@pytest.mark.full
def test_as_a_process_and_without_a_reader():
    command = [sys.executable, "-m", "longspan", "list"]
    # With a buffer the closed pipe shows at the very end only.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=buffered) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == entry.PIPE_CLOSED
    done = subprocess.run([*command, "--foo"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("longspan: error: unknown option")


def test_list(capsys):
    rows = json.loads(said(capsys, "list", "--json"))
    assert [row["name"] for row in rows] == longspan.list_mechanisms()
    lines = said(capsys, "list")
    assert max(map(len, lines.splitlines())) <= 80
    shown = " ".join(lines.split())
    for row in rows:
        summary = row["summary"].replace("``", "")
        assert all(part in shown for part in (row["cost"], summary, row["paper"], ", ".join(row["forms"])))


@pytest.mark.full
def test_show(capsys):
    one, two = json.loads(
        said(capsys, "show", "linear; softmax(kv_heads=1); linear", "--dim=10", "--heads=2", "--json")
    )
    assert (one["spec"], two["spec"], one["dim"], two["heads"]) == ("linear", "softmax(kv_heads=1)", 10, 2)
    assert [count["tokens"] for count in one["counts"]] == [256, 1024, 4096, 16384, 65536]
    shown = said(capsys, "show", "linear", "--dim", "10", "--heads", "2")
    assert "eps=1e-06" in shown
    assert "https://arxiv.org/abs/2006.16236" in shown
    assert f"attention {one['parameters']['attention']:,}, feed-forward" in shown
    assert re.search("~ .*4096 tokens", shown)
    assert max(map(len, shown.splitlines())) <= 80


def test_cite(at, capsys):
    assert said(capsys, "cite", "linear; softmax", "linear").count("@misc{") == 2
    assert said(capsys, "cite", "m/text") == said(capsys, "cite", "softmax")


def test_check_refuses_what_its_laws_have_no_memory_for(capsys, monkeypatch):
    monkeypatch.setattr("longspan._utils.model_memory.memory", lambda: 1 << 20)
    assert main(["check", "synthesizer(length=3000)"]) == entry.WRONG
    said = capsys.readouterr().err
    assert "laws of synthesizer(length=3000) would take" in said
    assert "this machine has 1 MiB" in said


def test_check_prints_each_law_and_fails_with_code_1(capsys, monkeypatch):
    monkeypatch.setattr(testing, "laws", lambda: ("beginning", "carry"))
    shown = said(capsys, "check", "linear; softmax")
    assert "beginning" in shown
    assert "passed" in shown
    assert "does not apply" in shown
    seeds = []

    def fail(law, spec, *, seed, stack, device):
        seeds.append(seed)
        return testing.Row(law, "failed", 0.5, 0.1, "broken")

    monkeypatch.setattr(testing, "check", fail)
    assert "failed" in said(capsys, "check", "linear", "--seed", "7", code=1)
    assert seeds == [7, 7]


def test_demo_passes_its_arguments_on_and_prints_how_to_resume(at, capsys, monkeypatch):
    calls = []

    def run(*arguments, **options):
        calls.append((*arguments, options))
        if len(calls) > 1:
            raise KeyboardInterrupt("interrupted at step 3; step-00000003 is saved in a/b; continue with resume=True")

    monkeypatch.setattr("longspan_lab.experiments.demo.run", run)
    said(capsys, "demo", "--out", "a/b", "--steps", "2", "--seed", "3")
    assert calls == [(Path("a/b"), {"steps": 2, "seed": 3})]
    assert Path("a/b").is_dir()
    assert main(["demo"]) == 130
    assert capsys.readouterr().err.endswith("is saved in a/b; the same command goes on from there\n")


@pytest.mark.parametrize("batch", ["1", "64", "997"])
def test_eval_agrees_with_bits_for_any_batch(batch, at, capsys):
    result = json.loads(said(capsys, "eval", "m/digits", "--batch", batch, "--json"))
    digits = data.load("digits")
    assert result["bits"] == pytest.approx(bits(checkpoint.load("m/digits"), digits, "test"), abs=1e-6)
    assert (result["examples"], result["tokens"], result["unit"]) == (176, 176 * 64, "dim")


def test_eval_stepwise_agrees_with_one_pass(at, capsys, monkeypatch):
    chunks, score = [], GENERATE.log_likelihood
    monkeypatch.setattr(GENERATE, "log_likelihood", lambda *a, chunk=0: chunks.append(chunk) or score(*a, chunk=chunk))
    step = json.loads(said(capsys, "eval", "m/digits", "--stepwise", "29", "--json"))["stepwise"]
    assert step["examples"] == 29
    assert chunks == [0, 1, 0, 1]
    assert 0 <= step["largest_difference"] < 1e-3
    # Untrained: about as many nats as a fair die with 17 sides.
    assert step["mean"] == pytest.approx(64 * np.log(17), rel=0.05)
    shown = said(capsys, "eval", "m/digits", "--stepwise", "3")
    assert "bits/dim on 176 examples of digits, test" in shown
    assert re.search(r"\b64 steps\b.* [\d.]+e-\d\d nats", shown)


def test_eval_of_text_takes_other_data_and_its_own_length(at, capsys):
    Path("a.txt").write_text("The quick brown fox. " * 31)
    result = json.loads(said(capsys, "eval", "m/text", "--data", "text:a.txt", "--json"))
    held = 21 * 31 // 20
    assert (result["examples"], result["tokens"], result["unit"]) == (held // 13, held // 13 * 13, "byte")


def test_generate_writes_the_same_picture_for_the_same_seed(at, capsys):
    from PIL import Image

    for name, seed in (("samples", "1"), ("b", "1"), ("c", "2")):
        where = () if name == "samples" else ("--out", f"{name}.png")
        assert "5 samples" in said(capsys, "generate", "m/digits", "--count", "5", "--seed", seed, *where)
    assert Path("samples.png").read_bytes() == Path("b.png").read_bytes() != Path("c.png").read_bytes()
    with Image.open("c.png") as image:
        assert image.size == (3 * 68 + 4, 2 * 68 + 4)


def test_no_sample_is_drawn_for_a_picture_that_cannot_be_written(at, capsys, monkeypatch):
    monkeypatch.setattr(GENERATE, "generate", lambda *_, **__: pytest.fail("sampled first"))
    assert "there is no folder none" in refused(capsys, "generate", "m/digits", "--out", "none/x.png")


def test_complete_keeps_what_was_given_and_shows_the_original(at, capsys):
    from PIL import Image

    said(capsys, "generate", "m/digits", "--complete", "test", "--count", "2", "--top", "0.25", "--out", "c.png")
    with Image.open("c.png") as image:
        canvas = np.asarray(image)
    digits = data.load("digits")
    expected = digits.picture(digits.take("test", torch.tensor([0, 88]))).numpy()
    for row, picture in enumerate(expected):
        given, completed, original = (
            canvas[4 + row * 68 : 68 + row * 68 : 8, 4 + column * 68 : 68 + column * 68 : 8] for column in range(3)
        )
        np.testing.assert_array_equal(original, picture)
        np.testing.assert_array_equal(completed[:2], picture[:2])
        np.testing.assert_array_equal(given[:2], picture[:2])
        assert (completed[2:] != picture[2:]).any()
        assert len(np.unique(given[2:])) == 1


def test_text_streams_and_repairs_what_is_no_utf8(at, capsys, monkeypatch):
    asked = {}

    def fake(model, prompt, **options):
        asked.update(options, prompt=bytes(prompt[0].tolist()))
        return iter(torch.tensor(list(b"\xc3\xa9\xff!\xe2\x82"))[:, None])

    monkeypatch.setattr(GENERATE, "generate", fake)
    assert said(capsys, "generate", "m/text", "--prompt", "ü", "--seed", "5", "--top_k=3") == "üé\ufffd!\ufffd\n"
    assert asked == {
        "prompt": "ü".encode(),
        "max_new_tokens": 21,
        "stream": True,
        "seed": 5,
        "top_k": 3,
        "top_p": 1.0,
        "temperature": 1.0,
    }


def test_train_evaluates_and_goes_on(at, capfd):
    Path("r.yaml").write_text(
        "model: {length: 64}\nrun: {steps: 2, batch: 3, learning_rate: 1e-3, evaluate_examples: 5}\n"
    )
    flags = ["--config", "r.yaml", *TINY, "--run.out", "a b"]
    assert main(["train", *flags]) == 0
    line = capfd.readouterr().out
    assert line.startswith("a b: 2 steps, ")
    assert "vocab: 17" in Path("a b/config.yaml").read_text()  # the data's, since no flag said another
    assert line.count("\n") == 1
    assert "bits/dim: validation " in line
    assert main(["eval", "a b"]) == 0
    assert main(["train", "--config", "a b/config.yaml", "--resume", "--run.steps", "3"]) == 0
    assert "a b: 3 steps, " in capfd.readouterr().out


def test_print_config_shows_flags_over_recipes_over_defaults_and_reads_back(at, capsys):
    Path("r.yaml").write_text("model: {dim: 96, depth: 3}\nrun: {learning_rate: 1e-4}\n")
    shown = said(capsys, "train", "--config", "r.yaml", "--model.depth", "5", "--print_config")
    assert all(part in shown for part in ("dim: 96", "depth: 5", "heads: 8", "learning_rate: 0.0001"))
    Path("s.yaml").write_text(shown)
    assert said(capsys, "train", "--config", "s.yaml", "--print_config") == shown


def test_show_of_a_saved_model(at, capsys):
    shown = said(capsys, "show", "m/digits")
    assert shown.startswith("m/digits: a saved decoder\n")
    assert f"{sum(p.numel() for p in longspan.load('m/digits').parameters()):,} parameters" in shown
    assert "vocab=17" in shown
    assert "data='digits'" in shown
    found = json.loads(said(capsys, "show", "m/encoder", "--json"))
    assert (found["kind"], found["model"]["dim"], found["run"]) == ("encoder", 6, {})


def test_a_wrong_spec_is_refused_before_any_progress(capsys, monkeypatch):
    monkeypatch.setattr("longspan._utils.progress.track", lambda *_: pytest.fail("began"))
    assert "unknown attention" in refused(capsys, "check", "gla --causal")
    assert "unknown feature map" in refused(capsys, "check", "linear(feature_map='x')")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--model.attention=liner", "unknown name 'liner' (did you mean 'linear'?)"),
        ("--model.attention=linear(x=1)", "linear has no option 'x'"),
        ("--model.dim=65", "dim=65 is not a multiple of heads=8"),
        ("--run.batch=0", "batch=0 must be at least 1"),
    ],
)
def test_train_checks_its_flags_before_data_and_packages(flag, message, at, capsys, monkeypatch):
    def missing(*_):
        raise ImportError('missing: sklearn; pip install "longspan[train]"')

    monkeypatch.setattr(data, "load", missing)
    assert message in refused(capsys, "train", "--run.data", "digits", flag)


def test_a_folder_with_a_run_is_an_error_that_names_resume(at, capsys):
    Path("my run").mkdir()
    Path("my run/config.yaml").write_text("model: {}\nrun: {}\n")
    line = refused(capsys, "train", "--run.out", "my run", *TINY)
    assert "holds a run; resume it with `longspan train --config 'my run/config.yaml' --resume`" in line
    Path("other").mkdir()
    Path("other/a.txt").write_text("")
    assert "resume" not in refused(capsys, "train", "--run.out", "other", *TINY)


def test_help_needs_no_torch():
    """Its import takes seconds. The flags of three commands are fields of classes that need it."""
    light = [[name, "--help"] for name in COMMANDS if name not in ("train", "reproduce", "finetune")]
    code = (
        f"import sys; sys.argv = ['longspan']\nfrom longspan.cli import main\n"
        f"for words in {[['--help'], ['--version'], *light]}:\n"
        f"    assert main(words) == 0 and 'torch' not in sys.modules, words\n"
        f"import longspan; assert callable(longspan.build) and longspan.Decoder.__name__ in longspan.__all__\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "longspan", "--help"], capture_output=True, text=True
    )
    assert "usage: longspan COMMAND" in done.stdout
    assert not any(line.split("|")[-1].strip() == "torch" for line in done.stderr.splitlines())
