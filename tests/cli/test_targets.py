"""The commands and models of pairs: trained, measured, asked for targets, shown and compared; beams for text."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from test_cli import refused, said

import longspan
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig, Seq2SeqConfig
from longspan.train import recipes

SMALL = {"dim": 8, "depth": 1, "heads": 2, "feedforward": 12}
TINY = [f"--model.{k}={v}" for k, v in SMALL.items()]
PAIRS = "".join(f"{a}{b}{c}\t{c}{b}{a}\n" for a in "abcde" for b in "abcde" for c in "abcde")
NUMBERS = "".join(json.dumps({"source": [i, i // 2], "target": [i // 2]}) + "\n" for i in range(100))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two runs on a file of pairs, one of them linear; a decoder of text; a model of numbers."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "words.tsv").write_text(PAIRS)
    (folder / "numbers.jsonl").write_text(NUMBERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, *more in (("one",), ("two", "--model.cross_attention", "linear")):
            words = [
                "--config",
                "dates",
                *TINY,
                "--run.data",
                "pairs:words.tsv",
                "--run.steps",
                "3",
                "--run.warmup",
                "1",
            ]
            words += ["--run.evaluate_every", "2", "--run.save_every", "2", "--run.out", name, *more]
            assert longspan.cli.main(["train", *words]) == 0
        torch.manual_seed(0)
        text = longspan.Decoder(DecoderConfig(**SMALL, vocab=256, length=23))
        checkpoint.save(text, "text", extra={"run": {"data": "text:stdlib", "length": 13}})
        checkpoint.save(
            longspan.Decoder(DecoderConfig(**SMALL, vocab=17, length=64)), "images", extra={"run": {"data": "digits"}}
        )
        numbers = longspan.Seq2Seq(Seq2SeqConfig(**SMALL, vocab=101, positions="none"))
        extra = {"run": {"data": f"pairs:{folder}/numbers.jsonl", "length": 9}}
        checkpoint.save(numbers, "numbers", extra=extra)
    return folder


@pytest.fixture(autouse=True)
def at(models, monkeypatch):
    monkeypatch.chdir(models)


class TestTrain:
    def test_the_recipe_is_an_encoder_decoder(self, capsys, tmp_path):
        shown = yaml.safe_load(said(capsys, "train", "--config", "dates", "--print_config"))
        config = checkpoint.config_of(shown["model"])
        assert type(config) is Seq2SeqConfig
        assert config == checkpoint.config_of(yaml.safe_load(recipes.find("dates").read_text())["model"])
        flags = [
            "--model.kind",
            "seq2seq",
            "--model.source-vocab",
            "300",
            "--run.data",
            "pairs:dates",
            "--print_config",
        ]
        assert yaml.safe_load(said(capsys, "train", *flags))["model"]["source_vocab"] == 300

    def test_a_run_goes_on_from_its_own_recipe(self, capfd):
        flags = ["--config", "one/config.yaml", "--run.steps", "5", "--run.out", "again"]
        assert longspan.cli.main(["train", *flags]) == 0
        line = capfd.readouterr().out
        assert line.startswith("again: 5 steps, ")
        assert "bits/token: validation " in line
        assert "; exact: validation 0.0%, test " in line
        assert longspan.cli.main(["train", *flags, "--resume", "--run.steps", "6"]) == 0

    def test_lines_say_how_many_are_exact(self, capfd):
        assert longspan.cli.main(["train", "--config", "one/config.yaml", "--run.out", "lines"]) == 0
        opening, *_, step, last = capfd.readouterr().err.splitlines()
        assert "parameters, softmax > softmax > softmax; pairs:" in opening
        assert "examples of up to 4 tokens, " in opening
        assert "bits/token, exact 0.0%" in step
        assert "examples); exact: validation 0.0%, test 0.0%; in lines" in last

    def test_help_names_the_fields_of_each_kind(self, capsys):
        plain = said(capsys, "train", "--help")
        assert "--model.kind" in plain
        assert "--model.cross-attention" not in plain
        assert "--model.cross-attention" in said(capsys, "train", "--model.kind", "seq2seq", "--help")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("--model.kind transcriber", "unknown kind of model to train 'transcriber'"),
            ("--model.cross-attention linear", "unknown option '--model.cross-attention'"),
            ("--config digits --run.data pairs:words.tsv --model.vocab 0", "model.kind=seq2seq"),
            (
                "--config dates --run.data digits --model.vocab 0",
                "digits requires a decoder, not model.kind=seq2seq",
            ),
            (
                "--config no-kind.yaml",
                "model.cross_attention of no-kind.yaml is a field of an encoder-decoder",
            ),
            ("--config typo.yaml", "unknown field of model in typo.yaml 'cross_atention'"),
            ("--config kind.yaml", "unknown kind of model to train 'seq'"),
        ],
    )
    def test_mistakes(self, capsys, words, message, models):
        Path("no-kind.yaml").write_text("model: {cross_attention: linear}")
        Path("typo.yaml").write_text("model: {kind: seq2seq, cross_atention: linear}")
        Path("kind.yaml").write_text("model: {kind: seq}")
        assert message in refused(capsys, "train", *words.split(), "--run.out", "none")
        assert not Path("none").exists()


class TestEval:
    def test_bits_and_exact_targets(self, capsys):
        first, second = said(capsys, "eval", "one").splitlines()
        model, data = longspan.load("one"), longspan.data.load("pairs:words.tsv")
        count = data.count("test")
        assert first.endswith(f" bits/token on {count} examples of pairs:{Path.cwd()}/words.tsv, test")
        batch = data.take("test", torch.arange(count))
        outputs = model(batch.source, model.shift(batch.target), source_mask=batch.source_mask, mask=batch.mask)
        bits = -model.likelihood.log_prob(outputs, batch.target)[batch.mask].mean() / torch.tensor(2.0).log()
        assert float(first.split()[0]) == pytest.approx(bits.item(), abs=1e-4)
        assert "0.00%" in second

    def test_beam_search(self, capsys):
        found = json.loads(
            said(capsys, "eval", "one", "--beams", "3", "--split", "validation", "--json", "--batch", "2")
        )
        assert found["beams"] == 3
        assert 0 <= found["exact_beams"] <= 1
        assert found["unit"] == "token"
        assert re.search(r"\d% .*\b2 beams\n$", said(capsys, "eval", "one", "--beams", "2"))


class TestGenerate:
    def test_a_source_and_a_file_of_sources(self, capsys):
        """Targets of sources of different lengths, each as alone, by the search that Python has."""
        sources = ["abc", "e", "bbbb"]
        Path("sources.txt").write_text("\n".join(sources) + "\n")
        model = longspan.load("one")
        together = said(capsys, "generate", "one", "--sources", "sources.txt").splitlines()
        for source, line in zip(sources, together, strict=True):
            assert said(capsys, "generate", "one", "--source", source) == line + "\n"
            tokens = torch.tensor([list(source.encode())])
            drawn = longspan.generate(model, source=tokens, max_new_tokens=256, stop=256, temperature=0.0, stream=True)
            row = [int(token) for token in drawn]
            row = row[: row.index(256)] if 256 in row else row
            assert bytes(row).decode("utf-8", "replace").replace("\n", "\ufffd") == line

    def test_beams_with_scores(self, capsys):
        words = ["--source", "abc", "--tokens", "5", "--beams", "4"]
        tokens = torch.tensor([list(b"abc")])
        for more, penalty in (([], 0.0), (["--length-penalty", "2.0"], 2.0)):
            lines = said(capsys, "generate", "one", *words, "--n-best", "3", *more).split("\n")[:-1]
            found = longspan.beam_search(
                longspan.load("one"), source=tokens, max_new_tokens=5, beams=4, best=3, stop=256, length_penalty=penalty
            )
            assert [line.split("\t")[0] for line in lines] == [f"{score:.4f}" for score in found.scores[0].tolist()]
            assert said(capsys, "generate", "one", *words, *more) == lines[0].split("\t")[1] + "\n"

    def test_draws_follow_the_seed(self, capsys):
        words = ["generate", "one", "--source", "abc", "--temperature", "1.0", "--tokens", "9", "--seed"]
        assert said(capsys, *words, "1") == said(capsys, *words, "1")
        assert said(capsys, *words, "1") != said(capsys, *words, "2")

    def test_numbers(self, capsys):
        line = said(capsys, "generate", "numbers", "--source", "3 7", "--tokens", "4")
        assert all(word.isdigit() and int(word) < 100 for word in line.split())

    def test_text_goes_on_by_beams(self, capsys):
        prompt = torch.tensor([list(b"ab")])
        found = longspan.beam_search(longspan.load("text"), prompt, max_new_tokens=4, beams=3, best=2)
        lines = said(capsys, "generate", "text", "--prompt", "ab", "--tokens", "4", "--beams", "3", "--n-best", "2")
        texts = [bytes([97, 98, *tokens]).decode("utf-8", "replace") for tokens in found.tokens[0].tolist()]
        scores = [f"{score:.4f}" for score in found.scores[0].tolist()]
        assert lines == "".join(f"{score}\t{text}\n" for score, text in zip(scores, texts, strict=True))
        shown = said(capsys, "generate", "text", "--prompt", "ab", "--tokens", "4", "--beams", "3")
        assert shown == texts[0] + "\n"
        assert said(capsys, "generate", "text", "--tokens", "2", "--beams", "2")


# A command line -> values that the message names, separated by " & ".
MISTAKES = {
    "generate one": "--source & --sources FILE",
    "generate one --source a --sources f": "--source & --sources FILE",
    "generate one --source=": "--source is empty",
    "generate one --sources none.txt": "none.txt",
    "generate one --sources words.tsv": "line 1 of words.tsv & tab",
    "generate one --source a --prompt b": "--prompt & --source",
    "generate one --source a --out a.png": "--out & --source",
    "generate one --source a --n-best 2": "--n-best & --beams N",
    "generate one --source a --length-penalty 1": "--length-penalty & --beams N",
    "generate one --source a --beams -1": "--beams=-1 must not be negative",
    "generate one --source a --beams 2 --n-best 3": "--n-best=3 & --beams=2",
    "generate one --source a --beams 2 --n-best 0": "--n-best=0 must be at least 1",
    "generate one --source a --beams 2 --temperature 1": "--temperature & --beams",
    "generate one --source a --beams 2 --seed 1": "--seed & --beams",
    "generate one --source a --beams 2 --length-penalty -1": "--length-penalty=-1.0 must not be negative",
    "generate one --source a --tokens -1": "--tokens=-1 must not be negative",
    "generate one --source a --tokens 999": "the table of learned positions has 256",
    "generate text --source a": "--source & text holds a decoder",
    "generate text --sources f": "--sources & text holds a decoder",
    "generate text --beams 2 --top_k 3": "--top-k & --beams",
    "generate images --beams 2": "--beams & digits",
    "generate one --source a --data digits": "one holds a seq2seq & digits & pairs:FILE",
    "generate text --data pairs:dates": "text holds a decoder & pairs:dates",
    f"generate one --source {'a' * 257}": " 257 tokens; this model has 256 ",
    "generate numbers --source '3 x'": "this model reads integers",
    "generate numbers --source '3 500'": "tokens range from 3 to 500; this model accepts 0 to 100",
    "eval one --stepwise": "--stepwise & decoder",
    "eval one --data digits": "one holds a seq2seq & digits & pairs:FILE",
    "eval one --data pairs:numbers.jsonl": "numbers.jsonl & --data",
    "eval one --length-penalty 1": "--length-penalty & --beams N",
    "eval images --beams 2": "--beams & digits",
    "eval text --data pairs:dates": "text holds a decoder & pairs:dates",
    "bench generate --like one": "one holds a seq2seq; only a decoder",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_code_2(line, capsys):
    message = refused(capsys, *shlex.split(line))
    assert all(part in message for part in MISTAKES[line].split(" & "))


def test_a_run_is_shown(capsys):
    shown = said(capsys, "show", "one")
    assert re.search("bits/token at step 3, 0.0% ", shown)
    assert "kind='seq2seq'" in shown
    assert json.loads(said(capsys, "show", "one", "--json"))["exact"] == 0.0


def test_runs_are_compared(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "curves.png"
    shown = said(capsys, "compare", "one", "two", "--out", str(out)).splitlines()
    assert shown[0].split() == [
        "run",
        "model.cross_attention",
        "parameters",
        "steps",
        "time",
        "bits/token",
        "at",
        "step",
        "exact",
    ]
    assert any(line.startswith("two") and "linear" in line and line.rstrip().endswith("0.0%") for line in shown)
    assert out.read_bytes().startswith(b"\x89PNG")
