"""Options on the command line: their spelling, bounds of every number, and a failed allocation as one line."""

from functools import partial

import pytest
import torch

from longspan import Decoder, DecoderConfig, beam_search, generate
from longspan._utils import model_memory
from longspan.cli.entry import COMMANDS, WRONG, load, main
from longspan.cli.parser import Number
from longspan_lab.cli import bench, reproduce
from longspan_lab.experiments import EXPERIMENTS

NEVER = ("1e30", "nan", "inf", "-inf", "1" + "0" * 30, "")


# What stands before the options: positional arguments, none of which is looked at before the numbers are.
WORDS = {
    "serve": ["m"],
    "chat": ["m"],
    "finetune": ["m", "--data=d"],
    "linearize": ["m", "--data=d"],
    "eval": ["m"],
    "generate": ["m"],
    "transcribe": ["m", "a.wav"],
    "export": ["m", "m.onnx"],
    "show": ["linear"],
    "compare": ["a"],
    "cite": ["linear"],
    "check": ["linear"],
}


PARSERS = {
    **{command: partial(lambda command: load(command).parser(), command) for command in COMMANDS},
    **{f"bench {kind}": partial(bench.subparser, kind) for kind in bench.BENCHMARKS},
    **{f"reproduce {name}": partial(reproduce.subparser, name) for name in EXPERIMENTS},
}


del PARSERS["train"], PARSERS["bench"], PARSERS["reproduce"]


def refusal(read, words):
    """The message of the ValueError that reading these words raises, which is one line; "" where there is none."""
    try:
        read(words)
    except ValueError as error:
        said = str(error)
    else:
        return ""
    assert said
    assert "\n" not in said
    return said


@pytest.mark.parametrize("name", PARSERS)
def test_every_numeric_option_has_bounds(name):
    parser = PARSERS[name]()
    before = WORDS.get(name, [])
    options = {a.option_strings[-1]: a for a in parser._actions if a.option_strings}
    for option, action in options.items():
        default = action.default
        numeric = isinstance(default, int | float) and not isinstance(default, bool)
        assert not numeric or action.dest in parser.numbers, f"{option} has no bounds"
    for dest, kind in parser.numbers.items():
        assert isinstance(kind, Number)
        option = next(o for o, action in options.items() if action.dest == dest)
        for text in NEVER:
            assert option.strip("-").replace("_", "-") in refusal(parser.read, [*before, f"{option}={text}"]), text
        for value in (kind.low, kind.high):
            assert not refusal(parser.read, [*before, f"{option}={value}"])
        assert refusal(parser.read, [*before, f"{option}={kind.low - 1 - abs(kind.low)}"])
        assert refusal(parser.read, [*before, f"{option}={2 * kind.high + 1}"])


@pytest.fixture(scope="module")
def train():
    return load("train"), load("train").parser()


@pytest.mark.parametrize("part", ["model", "run"])
def test_every_field_of_training_has_bounds(part, train, monkeypatch):
    command, parser = train
    monkeypatch.setattr("longspan.train.fit", lambda *_, **__: pytest.fail("trained"))
    monkeypatch.setattr("longspan.data.load", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(command, "_check", lambda fields: command.checkpoint.config_of(fields | {"vocab": 256}))

    def read(words):
        command.run(parser.read(words))

    numeric = [
        action.option_strings[-1]
        for action in parser._actions
        if action.dest.startswith(part + ".")
        and isinstance(action.default, int | float)
        and not isinstance(action.default, bool)
    ]
    assert len(numeric) > 5
    for option in set(numeric) - {"--model.vocab"}:
        for text in (*NEVER, "-1"):
            assert refusal(read, [f"{option}={text}"]), (option, text)


ALLOCATIONS = (
    MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1288 bytes."),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
)


@pytest.mark.parametrize("error", ALLOCATIONS)
def test_a_failed_allocation_names_what_to_reduce(error, capsys, monkeypatch):
    def run(args):
        raise error

    monkeypatch.setattr(load("generate"), "run", run)
    assert main(["generate", "text"]) == WRONG
    err = capsys.readouterr().err
    assert err.startswith("longspan: error: out of memory")
    assert err.endswith("; reduce --count, --beams or --tokens\n")
    assert ("1288 bytes" in err) == ("1288" in str(error))


def test_another_runtime_error_is_not_taken_for_one(monkeypatch):
    def run(args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(load("generate"), "run", run)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["generate", "text"])


def test_states_that_memory_cannot_hold_are_refused_before_they_are_made(monkeypatch):
    model = Decoder(
        DecoderConfig(dim=8, depth=1, heads=2, feedforward=16, vocab=5, attention="softmax", positions="none")
    )
    monkeypatch.setattr(model_memory, "memory", lambda: 1 << 20)
    generate(model.eval(), max_new_tokens=2, batch=100, stream=True)
    with pytest.raises(ValueError, match="the states of 100000 sequences would take .* this machine has 1 MiB"):
        generate(model, max_new_tokens=2, batch=100_000, stream=True)
    with pytest.raises(ValueError, match="the states of beams=50000 would take"):
        beam_search(model, torch.zeros(1, 1, dtype=torch.long), max_new_tokens=2, beams=50_000)


@pytest.mark.slow
def test_a_batch_and_a_text_that_memory_cannot_hold_are_refused(capsys, monkeypatch, tmp_path):
    pytest.importorskip("lightning", reason="trains")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("The quick brown fox. " * 1000)
    monkeypatch.setattr(model_memory, "memory", lambda: 1 << 26)
    words = "train --model.dim 8 --model.depth 1 --model.heads 2 --run.data text:a.txt --run.length 64".split()
    assert main([*words, "--run.batch", "1000000"]) == WRONG
    assert "batch=1000000 examples of 64 tokens would take" in capsys.readouterr().err
    with (tmp_path / "a.txt").open("ab") as file:
        file.truncate(1 << 30)
    assert main([*words, "--run.batch", "1"]) == WRONG
    assert "the text" in capsys.readouterr().err


@pytest.mark.parametrize("spelling", ["--run.save-every", "--run.save_every"])
@pytest.mark.parametrize("value", [["=7"], ["", "7"]])
def test_both_spellings_are_read(spelling, value, capsys):
    words = [spelling + value[0], *value[1:]]
    assert main(["train", "--run.data", "a_b", *words, "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "save_every: 7" in shown
    assert "data: a_b" in shown
