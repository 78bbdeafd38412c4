"""Classifiers: pooling and its padding, loss and accuracy, a task that is learned, and what is said of new texts."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import yaml

import longspan
from longspan import data
from longspan.cli.entry import main
from longspan.models.config import EncoderConfig
from longspan.models.encoder import Encoder
from longspan.train import TrainConfig, fit, objectives
from longspan.train.evaluate import Share, classified
from training_process import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = EncoderConfig(
    dim=8, depth=1, heads=2, feedforward=12, attention="linear", vocab=256, outputs=2, labels="a b", pool="mean"
)


def made(**fields):
    torch.manual_seed(0)
    return Encoder(replace(TINY, **fields)).double().eval()


def texts(n=9, rows=3):
    return torch.randint(256, (rows, n), generator=torch.Generator().manual_seed(1))


class TestModel:
    @pytest.mark.parametrize("pool", ["mean", "first"])
    @pytest.mark.parametrize("attention", ["linear", "softmax"])
    def test_padding_changes_nothing(self, pool, attention):
        model, x = made(pool=pool, attention=attention), texts()
        mask = torch.arange(9) < torch.tensor([[9], [4], [1]])
        for shift in (False, True):
            mask = mask.flip(1) if shift else mask
            found = model(x, mask=mask)
            for row, real, y in zip(x, mask, found, strict=True):
                torch.testing.assert_close(model(row[real][None])[0], y)

    def test_the_pools_are_the_mean_and_the_first_real_token(self):
        mask = torch.tensor([[True] * 9, [False] * 2 + [True] * 7, [False] * 9])
        each = made(pool="none")(texts(), mask=mask)
        mean, first = (made(pool=pool)(texts(), mask=mask) for pool in ("mean", "first"))
        # The head is affine, so that a mean may be taken on either side of it.
        torch.testing.assert_close(mean[:2], torch.stack([each[0].mean(0), each[1, 2:].mean(0)]))
        torch.testing.assert_close(first[:2], torch.stack([each[0, 0], each[1, 2]]))
        for one in (mean, first):
            torch.testing.assert_close(one[2], made().head.bias)

    def test_new_texts_are_classified_as_in_training(self):
        model, lines = made(labels="bad good"), ["fine", "so-so and more", "\u00fc", "x"]
        labels, probabilities = model.classify(lines, batch=3)
        for line, label, found in zip(lines, labels, probabilities, strict=True):
            alone = model(torch.tensor([list(line.encode())]))[0].softmax(-1)
            torch.testing.assert_close(found, alone)
            assert label == ("bad", "good")[int(alone.argmax())]
        torch.testing.assert_close(
            model.classify([line[:2] for line in lines])[1][:2], model.classify(lines, length=2)[1][:2]
        )
        assert model.classify([]).labels == []
        assert model.classify([]).probabilities.shape == (0, 2)

    def test_learned_positions_bound_what_is_read(self):
        model = made(positions="learned", length=5)
        torch.testing.assert_close(model.classify(["abcdefgh"])[1], model.classify(["abcde"])[1])

    @pytest.mark.parametrize(
        ("fields", "given", "message"),
        [
            ({"labels": ""}, {}, "classify needs a model of bytes with labels"),
            ({"pool": "none"}, {}, "classify needs a model of bytes with labels"),
            ({"vocab": 300}, {}, "classify needs a model of bytes with labels"),
            ({}, {"texts": "text"}, "texts must be a list of strings"),
            ({}, {"texts": ["a", ""]}, "texts must be a list of strings"),
            ({}, {"length": -1}, "length=-1 must not be negative"),
            ({}, {"batch": 0}, "batch=0 must be at least 1"),
        ],
    )
    def test_what_it_cannot_classify_is_refused(self, fields, given, message):
        with pytest.raises(ValueError, match=message):
            made(**fields).classify(**{"texts": ["a"]} | given)


def run(folder, **fields):
    return tiny(folder, **{"data": "labels:majority"} | fields)


class TestTraining:
    def test_loss_and_accuracy_are_means_over_texts(self):
        model, found = made(), data.load("labels:majority")
        task = objectives.build(model, TrainConfig(batch=7, data="labels:majority"), found)
        batch = task.batch(0, 0, 1)
        loss, parts = task.loss(model, batch)
        logits = torch.cat([model(t[m][None]) for t, m in zip(batch.tokens, batch.mask, strict=True)])
        torch.testing.assert_close(loss, F.cross_entropy(logits, batch.labels))
        assert parts["loss"] == loss
        assert parts["accuracy"] == (logits.argmax(-1) == batch.labels).double().mean()

    def test_an_evaluation_does_not_depend_on_batches_and_ranks(self):
        model, found = made(), data.load("labels:majority")
        whole = classified(model, found, "test", 64)
        parts = [classified(model, found, "test", 5, Share(rank=rank, world=3)) for rank in range(3)]
        torch.testing.assert_close(sum(parts), whole)
        tokens, mask, labels = found.take("test", torch.arange(found.count("test")))
        logits = model(tokens, mask=mask)
        expected = [F.cross_entropy(logits, labels, reduction="sum").item(), (logits.argmax(-1) == labels).sum().item()]
        assert whole.tolist() == pytest.approx([*expected, found.count("test")])

    @pytest.mark.parametrize("pool", ["mean", pytest.param("first", marks=pytest.mark.slow)])
    def test_a_task_is_learned(self, pool, tmp_path):
        config = replace(TINY, pool=pool, dim=16, attention="softmax" if pool == "first" else "linear")
        fields = {"steps": 60, "batch": 32, "learning_rate": 0.03, "warmup": 5, "evaluate_every": 60}
        result = fit(config, run(tmp_path, **fields, evaluate_examples=100, save_every=1000), progress=False)
        assert min(result.accuracy.values()) > 0.9
        model = longspan.load(tmp_path / "run")
        assert model.config.labels == "a b"
        assert model.classify(["aababaa", "bbabb"]).labels == ["a", "b"]


class TestCommands:
    def test_train_eval_and_show(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        rows = [(f"{'x' * (i % 7)}{i}", "odd" if i % 2 else "even") for i in range(200)]
        lines = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
        (tmp_path / "a.jsonl").write_text(lines)
        words = ["--model.dim=8", "--model.heads=2", "--model.depth=1", "--run.steps=4", "--run.warmup=1"]
        words += ["--run.evaluate_every=2", "--run.save_every=2", "--run.data=labels:a.jsonl", "--run.out=run"]
        assert main(["train", "--config", "labels", *words]) == 0
        assert "; accuracy: validation " in capsys.readouterr().out
        recipe = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
        assert {name: recipe["model"][name] for name in ("kind", "vocab", "outputs", "labels")} == {
            "kind": "encoder",
            "vocab": 256,
            "outputs": 2,
            "labels": "even odd",
        }
        assert main(["eval", "run", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        model, labeled = longspan.load("run"), data.load("labels:a.jsonl")
        nats, right, count = classified(model, labeled, "test", 64).tolist()
        assert found["accuracy"] == right / count
        assert found["bits"] == pytest.approx(nats / count / 0.6931471805599453)
        assert main(["eval", "run"]) == 0
        assert f"{found['accuracy']:.2%} accuracy, {found['bits']:.4f} bits/label on {int(count)} examples" in (
            capsys.readouterr().out
        )
        assert main(["show", "run"]) == 0
        assert "accuracy" in capsys.readouterr().out
        # Other texts, whose labels come in another order or are fewer.
        (tmp_path / "b.tsv").write_text("label\ttext\n" + "".join(f"{label}\t{text}\n" for text, label in rows[::-1]))
        assert main(["eval", "run", "--data", "labels:b.tsv", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["accuracy"] == found["accuracy"]
        (tmp_path / "c.jsonl").write_text(lines.replace("odd", "strange"))
        for more, message in (
            (["--data", "labels:c.jsonl"], "has the label 'strange', but the labels of the model are even, odd"),
            (["--data", "digits"], "run holds an encoder, which cannot read digits"),
            (["--stepwise"], "--stepwise requires a model that generates tokens"),
        ):
            assert main(["eval", "run", *more]) == 2
            assert message in capsys.readouterr().err
        assert main(["generate", "run"]) == 2
        assert "run holds an encoder; only a decoder" in capsys.readouterr().err

    def test_a_recipe_of_an_encoder_has_its_own_fields(self, tmp_path, capsys):
        (tmp_path / "r.yaml").write_text("model: {kind: encoder, tied: true}\n")
        assert main(["train", "--config", str(tmp_path / "r.yaml")]) == 2
        assert "unknown field of model in" in capsys.readouterr().err
