"""Training on tokens from disk: vocabulary and tokenizer of the model, segments, streams, and the commands after it."""

import json

import pytest
import torch

import longspan
from longspan.cli.entry import main
from longspan.cli.generate import _Bytes, _Tokens
from longspan.data import load, tokenization
from longspan.data.order import batch_indices
from longspan.data.streams import Stream
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig
from longspan.train import TrainConfig, fit, objectives, streaming_eval
from longspan.train.evaluate import default_batch_size

LINE = "a state reads each token once and forgets the past; größer is the state of rank {} at {}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokens of 120 documents, with 320 levels."""
    at = tmp_path_factory.mktemp("data")
    text = "<sep>".join(LINE.format(i, i * 7 % 40) * 3 for i in range(120))
    (at / "a.txt").write_text(text, encoding="utf-8")
    command = ["tokenize", str(at / "a.txt"), "--out", str(at / "tokens"), "--train-bpe", "320", "--separator", "<sep>"]
    assert main(command) == 0
    return at / "tokens"


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """The folder of a run from the command line."""
    out = tmp_path_factory.mktemp("run") / "run"
    model = {"dim": 16, "depth": 2, "heads": 2, "feedforward": 32, "attention": "linear", "positions": "none"}
    flags = [word for name, value in model.items() for word in (f"--model.{name}", str(value))]
    more = {"data": f"tokens:{folder}", "length": 24, "steps": 30, "batch": 4, "learning_rate": 3e-3, "out": str(out)}
    flags += [word for name, value in more.items() for word in (f"--run.{name}", str(value))]
    assert main(["train", *flags, "--run.evaluate_every", "15"]) == 0
    return out


def test_the_vocabulary_and_the_tokenizer_are_those_of_the_tokens(run, folder):
    model = longspan.load(run)
    assert (model.config.vocab, model.likelihood.size) == (320, 320)
    assert model.tokenizer == (folder / "tokenizer.json").read_text(encoding="utf-8")
    last = checkpoint.resolve(run, prefer="last")
    assert (last / "tokenizer.json").read_text(encoding="utf-8") == model.tokenizer


def test_a_copy_of_the_model_keeps_its_tokenizer(run, tmp_path):
    longspan.save(longspan.load(run), tmp_path / "copy")
    assert longspan.load(tmp_path / "copy").tokenizer == longspan.load(run).tokenizer
    (tmp_path / "copy" / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json was changed or damaged"):
        longspan.load(tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json, which config\.json records"):
        longspan.load(tmp_path / "copy")


def test_examples_follow_the_keyed_order(folder):
    data = load(f"tokens:{folder}", 24)
    model = longspan.Decoder(DecoderConfig(dim=8, depth=1, heads=2, feedforward=8, vocab=320))
    objective = objectives.build(model, TrainConfig(seed=3, batch=5), data)
    expected = data.take("train", batch_indices(data.count("train"), 3, 7, 5, 1, 2, keyed=True))
    assert objective.batch(7, 1, 2).equal(expected)


def test_segments_keep_documents_apart(folder):
    """What a window reports is what each of its documents reports alone."""
    data = load(f"tokens:{folder}", 200)
    config = DecoderConfig(dim=8, depth=2, heads=2, feedforward=8, vocab=320, attention="linear", length=200)
    torch.manual_seed(0)
    model = longspan.Decoder(config).eval()
    objective = objectives.build(model, TrainConfig(segments=True, batch=3), data)
    stretch = objective.batch(0, 0, 1)
    expected = data.take("train", batch_indices(Stream(data, "train").count, 0, 0, 3, keyed=True))
    assert stretch.targets.equal(expected)
    assert stretch.segments.max() >= 1
    logits = model(stretch.inputs, segments=stretch.segments)[0]
    nats = -model.likelihood.log_prob(logits, stretch.targets).mean()
    assert objective.loss(model, stretch).total.item() == pytest.approx(nats.item(), rel=1e-6)
    alone = []
    for row, segments in zip(stretch.targets, stretch.segments, strict=True):
        for one in segments.unique():
            part = row[segments == one][None]
            alone.append(model.likelihood.log_prob(model(model.shift(part))[0], part).flatten())
    assert -torch.cat(alone).mean().item() == pytest.approx(nats.item(), rel=1e-5)


def test_segments_are_evaluated_apart(folder):
    data = load(f"tokens:{folder}", 40)
    model = longspan.Decoder(DecoderConfig(dim=8, depth=1, heads=2, feedforward=8, vocab=320, attention="linear"))
    objective = objectives.build(model, TrainConfig(segments=True), data)
    whole = objective.sums(model, "test")
    shares = [objective.sums(model, "test", rank, 2) for rank in range(2)]
    assert torch.allclose(sum(shares), whole, rtol=1e-6)
    stretch = Stream(data, "test").take(torch.arange(data.count("test")), fresh=True)
    outputs = model.eval()(stretch.inputs, segments=stretch.segments)[0]
    nats = -model.likelihood.log_prob(outputs, stretch.targets).double().sum()
    assert whole.tolist() == pytest.approx([nats.item(), stretch.targets.numel()], rel=1e-6)
    assert streaming_eval.apart(model, data, "test", 1).tolist() == pytest.approx(whole.tolist(), rel=1e-6)


@pytest.mark.parametrize("way", ["segments", "stream"])
def test_documents_in_training(folder, tmp_path, way):
    config = DecoderConfig(dim=8, depth=1, heads=2, feedforward=8, vocab=320, attention="linear", positions="none")
    run = TrainConfig(data=f"tokens:{folder}", length=40, steps=12, batch=2, out=str(tmp_path), **{way: True})
    result = fit(config, run, progress=False)
    assert result.bits["test"] < 9


def test_batches_of_an_evaluation_shrink_with_the_vocabulary():
    assert [default_batch_size(100, vocab) for vocab in (2, 256, 512, 50_000)] == [64, 64, 64, 1]
    assert [default_batch_size(400, vocab) for vocab in (256, 512)] == [32, 16]


def test_generate_reads_and_writes_text(run, capsys):
    tokenizer = tokenization.parsed(longspan.load(run).tokenizer)
    prompt = "a state größer"
    given = torch.tensor([tokenizer.encode(prompt).ids])
    options = {"max_new_tokens": 12, "temperature": 0.0}
    expected = longspan.generate(longspan.load(run), given, **options)[0].tolist()
    capsys.readouterr()
    flags = ["--prompt", prompt, "--tokens", "12"]
    assert main(["generate", str(run), *flags, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == tokenizer.decode([*given[0].tolist(), *expected]) + "\n"
    assert main(["generate", str(run), *flags, "--beams", "1"]) == 0
    assert capsys.readouterr().out == tokenizer.decode([*given[0].tolist(), *expected]) + "\n"
    # The stop token ends the text and is not written.
    stop = tokenizer.id_to_token(expected[5])
    known = expected[: expected.index(expected[5])]
    for way in (["--temperature", "0"], ["--beams", "1"]):
        assert main(["generate", str(run), *flags, *way, "--stop", stop]) == 0
        assert capsys.readouterr().out == tokenizer.decode([*given[0].tolist(), *known]) + "\n"
    assert main(["generate", str(run), "--stop", "</s>"]) == 2
    assert "the tokenizer has no token '</s>'" in capsys.readouterr().err
    assert main(["generate", "text", "--stop", "</s>"]) == 2
    assert "--stop '</s>' requires a model with a tokenizer" in capsys.readouterr().err


def test_incomplete_characters_are_written_at_the_end(run):
    tokens = tokenization.parsed(longspan.load(run).tokenizer).encode("ü", add_special_tokens=False).ids
    # The tokenizer's alphabet are bytes, so a rare character has two tokens.
    both = [(_Bytes(), list("ü".encode())), (_Tokens(longspan.load(run).tokenizer), tokens)]
    for coder, parts in both:
        if len(parts) == 2:
            assert [coder.step(parts[0]), coder.step(parts[1]), coder.rest()] == ["", "ü", ""]
    rare = _Tokens(longspan.load(run).tokenizer)
    first = rare.encode("\N{GREEK SMALL LETTER PI}")[0]
    assert rare.step(first) == ""
    assert rare.rest() == "\N{REPLACEMENT CHARACTER}"
    own = _Bytes()
    assert own.step("ü".encode()[0]) == ""
    assert own.rest() == "\N{REPLACEMENT CHARACTER}"


def test_eval(run, folder, tmp_path, capsys):
    capsys.readouterr()
    assert main(["eval", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    data = load(f"tokens:{folder}", 24)
    assert (found["unit"], found["examples"]) == ("token", data.count("test"))
    assert main(["eval", str(run), "--segments", "--json"]) == 0
    apart = json.loads(capsys.readouterr().out)
    model = longspan.load(run)
    nats, tokens = streaming_eval.apart(model, data, "test", 64).tolist()
    assert apart["bits"] == pytest.approx(nats / tokens / 0.6931471805599453, rel=1e-6)
    assert apart["bits"] != found["bits"]
    # A text is encoded by the model's tokenizer: the same tokens but the ends of documents.
    text = (folder.parent / "a.txt").read_text(encoding="utf-8").replace("<sep>", "")
    (tmp_path / "b.txt").write_text(text, encoding="utf-8")
    assert main(["eval", str(run), "--data", f"text:{tmp_path / 'b.txt'}", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["unit"] == "token"
    assert other["tokens"] % 24 == 0
    ids = tokenization.parsed(model.tokenizer).encode(text).ids
    assert other["examples"] == len(ids) // 20 // 24
    held = torch.tensor(ids[len(ids) - len(ids) // 20 :][: other["tokens"]]).view(-1, 24)
    expected = -model.likelihood.log_prob(model(model.shift(held))[0], held).double().mean().item()
    assert other["bits"] == pytest.approx(expected / 0.6931471805599453, rel=1e-5)


@pytest.mark.parametrize("more", [[], ["--stream"], ["--segments"]])
def test_a_short_text_is_evaluated_as_a_whole(run, tmp_path, capsys, more):
    text = "a state reads each token once; größer"
    (tmp_path / "short.txt").write_text(text, encoding="utf-8")
    capsys.readouterr()
    assert main(["eval", str(run), "--data", f"text:{tmp_path}/short.txt", "--json", *more]) == 0
    found = json.loads(capsys.readouterr().out)
    whole = len(tokenization.parsed(longspan.load(run).tokenizer).encode(text).ids)
    assert found.get("stream", found)["tokens"] in (whole - 1, whole)


def test_tokens_of_another_tokenizer_are_refused(run, folder, tmp_path, capsys):
    text = str(folder.parent / "a.txt")
    assert main(["tokenize", text, "--out", str(tmp_path / "other"), "--train-bpe", "320", "--separator", "state"]) == 0
    capsys.readouterr()
    assert main(["eval", str(run), "--data", f"tokens:{tmp_path / 'other'}"]) == 2
    assert "has tokens of another tokenizer" in capsys.readouterr().err


def test_the_exported_file_has_its_tokenizer_beside_it(run, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    assert main(["export", str(run), str(tmp_path / "m.onnx")]) == 0
    assert f"tokenizer: {tmp_path / 'm.tokenizer.json'}" in capsys.readouterr().out
    assert (tmp_path / "m.tokenizer.json").read_text(encoding="utf-8") == longspan.load(run).tokenizer


def test_transformers_read_the_tokenizer_of_a_checkpoint_and_of_a_folder_for_the_hub(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    from longspan.compat.transformers import LongspanForCausalLM

    model = LongspanForCausalLM.from_longspan(str(run))
    model.save_pretrained(tmp_path)
    own = tokenization.parsed(longspan.load(run).tokenizer)
    for folder in (checkpoint.resolve(run), tmp_path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer("a state größer").input_ids == own.encode("a state größer").ids
        assert tokenizer.decode(tokenizer("a  state , größer").input_ids) == "a  state , größer"
        assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == (None, "<|endoftext|>", 320)
    assert (tmp_path / "tokenizer.json").read_text(encoding="utf-8") == longspan.load(run).tokenizer
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokenizer("a state", return_tensors="pt").input_ids
    assert torch.equal(again(ids).logits, model(ids).logits)
