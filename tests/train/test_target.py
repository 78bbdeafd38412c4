"""Encoder-decoders in training: the loss of real tokens alone, exact matches, and runs that resume to the same bits."""

import itertools
import math
from dataclasses import asdict, replace

import pytest
import torch
import yaml

import longspan
from longspan.data.pairs import Batch
from longspan.models import checkpoint
from longspan.models.config import Seq2SeqConfig
from longspan.models.seq2seq import Seq2Seq
from longspan.train import TrainConfig, fit, loop, objectives
from longspan.train.evaluate import Share, evaluate_seq2seq
from support.runs import rows
from training_process import TINY, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = ["".join(word) for n in (1, 2, 3, 4) for word in itertools.product("abc", repeat=n)]
SIZES = {"dim": 10, "depth": 1, "heads": 2, "feedforward": 14, "vocab": 257, "length": 8}
SMALL = Seq2SeqConfig(**SIZES, dropout=0.1, smoothing=0.2, attention="linear", encoder_attention="softmax")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "words.tsv"
    path.write_text("".join(f"{word}\t{word[::-1]}\n" for word in WORDS))
    return f"pairs:{path}"


@pytest.fixture(scope="module")
def dataset(file):
    return longspan.data.load(file)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, file):
    folder = tmp_path_factory.mktemp("whole")
    fit(SMALL, tiny(folder, data=file), progress=False)
    return folder


def build(**fields):
    torch.manual_seed(0)
    model = Seq2Seq(replace(SMALL, **fields)).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model


KINDS = (
    {},
    {"cross_attention": "linear", "attention": "softmax"},
    {"attention": "gated_deltanet", "stack": "reversible"},
)


class TestLoss:
    @pytest.mark.parametrize("fields", KINDS, ids=str)
    @pytest.mark.parametrize("smoothing", [0.0, 0.3])
    def test_padding_never_changes_it(self, dataset, fields, smoothing):
        """The loss of a batch is the mean over the tokens of its pairs, each alone and without any padding."""
        model = build(**fields, smoothing=smoothing)
        target = objectives.Target(TrainConfig(batch=5), dataset)
        indices = torch.tensor([0, 7, 50, 70, 33])
        batch = dataset.take("train", indices)
        assert not batch.mask.all()
        assert not batch.source_mask.all()
        alone = [dataset.take("train", i[None]) for i in indices]
        counts = [one.mask.sum() for one in alone]
        for take in (lambda b: target.loss(model, b).total, lambda b: target.loss(model, b).parts["loss"]):
            expected = sum(take(one) * count for one, count in zip(alone, counts, strict=True)) / sum(counts)
            torch.testing.assert_close(take(batch), expected, rtol=1e-6, atol=1e-6)

    def test_what_the_padding_holds_never_changes_it(self, dataset):
        model, target = build(), objectives.Target(TrainConfig(), dataset)
        batch = dataset.take("train", torch.tensor([0, 7, 50]))
        other = Batch(
            batch.source.masked_fill(~batch.source_mask, 99),
            batch.source_mask,
            batch.target.masked_fill(~batch.mask, 98),
            batch.mask,
        )
        torch.testing.assert_close(target.loss(model, other), target.loss(model, batch), rtol=1e-9, atol=1e-9)

    def test_a_step_goes_down_the_smoothed_loss_and_the_weighted_penalties(self, tmp_path, file, dataset, monkeypatch):
        """The gradient of one step, against all of it written out."""
        found = {}

        def kept(task, optimizer, *_, **__):
            found.update({name: p.grad.clone() for name, p in task.model.named_parameters()})
            found["model"] = task.model

        monkeypatch.setattr(loop.Task, "configure_gradient_clipping", kept)
        config = replace(SMALL, stack="act(steps=2)", positions="none", dropout=0.0)
        run = tiny(tmp_path, data=file, steps=1, penalty=0.25, learning_rate=1e-30, warmup=0, evaluate_examples=1)
        fit(config, run, progress=False)
        model = found.pop("model").train()
        batch = objectives.Target(run, dataset).batch(0, 0, 1)
        record = {"penalty": None}
        logs = model(
            batch.source, model.shift(batch.target), source_mask=batch.source_mask, mask=batch.mask, record=record
        )
        logs = logs.log_softmax(-1)[batch.mask]
        nats = -logs.gather(1, batch.target[batch.mask][:, None]).mean()
        ponder = [record[name]["penalty"] for name in ("encoder", "decoder")]
        assert all(cost > 0.1 for cost in ponder)
        loss = 0.8 * nats + 0.2 * -logs.mean() + 0.25 * sum(ponder)
        for name, grad in zip(found, torch.autograd.grad(loss, model.parameters()), strict=True):
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)
        (row,) = rows(tmp_path)
        assert float(row["loss"]) == pytest.approx(nats.item(), rel=1e-5)
        assert float(row["penalty"]) == pytest.approx(sum(ponder).item(), rel=1e-5)

    def test_statistics_of_both_stacks_move(self, tmp_path, file):
        routing = "routing(clusters=3, window=5)"
        config = replace(SMALL, attention=f"softmax; {routing}", encoder_attention=routing, depth=2, encoder_depth=1)
        fit(config, tiny(tmp_path, data=file, steps=2), progress=False)
        model = longspan.load(tmp_path / "run")
        fresh = [3 * 0.999**2] * 2
        for layer in (model.encoder.attentions()[0], model.stack.attentions()[1]):
            assert (layer.counts.sum(-1) > torch.tensor(fresh)).all()


class TestEvaluation:
    @pytest.mark.parametrize("fields", KINDS, ids=str)
    def test_it_is_what_each_pair_alone_gives(self, dataset, fields):
        model, stop = build(**fields), dataset.stop
        # So that the answers are neither all right nor all wrong, and some end early.
        with torch.no_grad():
            model.head.bias[[97, 98, 99, stop]] += 30.0
        nats = tokens = exact = 0.0
        for i in range(dataset.count("validation")):
            one = dataset.take("validation", torch.tensor([i]))
            written, target = [], one.target[0].tolist()
            with torch.no_grad():
                nats -= model.likelihood.log_prob(model(one.source, model.shift(one.target)), one.target).sum().item()
                while len(written) < len(target) and stop not in written:
                    inputs = model.shift(torch.tensor([[*written, 0]]))
                    written.append(int(model(one.source, inputs)[0, -1].argmax()))
            tokens, exact = tokens + len(target), exact + (written == target)
        for batch in (1, 3, 64):
            found = evaluate_seq2seq(model, dataset, "validation", batch)
            assert found.tolist() == pytest.approx([nats, tokens, exact, dataset.count("validation")], rel=1e-5)
        beams = evaluate_seq2seq(model, dataset, "validation", 3, beams=1)
        assert beams.tolist() == pytest.approx(found.tolist())

    def test_beams_find_at_least_as_likely_targets(self, dataset):
        """As wide a beam as the tree finds the likeliest one, so that it is exact where that is the true one."""
        model = build(smoothing=0.0)
        found = evaluate_seq2seq(model, dataset, "test", 2, Share(4), beams=300)
        exact = 0
        count = dataset.count("test")
        for i in [j * count // 4 for j in range(4)]:
            one = dataset.take("test", torch.tensor([i]))
            best = longspan.beam_search(
                model, source=one.source, max_new_tokens=one.target.shape[1], beams=300, stop=dataset.stop
            )
            exact += best.tokens[0, 0, : best.lengths[0, 0]].tolist() == one.target[0].tolist()
        assert found[2] == exact

    def test_exact_means_every_token_and_the_stop_token(self, dataset, monkeypatch):
        """What is written where the padding is does not matter; one wrong token does, and so does a missing end."""

        def written(model, pairs, stop, *_):
            found = pairs.target.masked_fill(~pairs.mask, 97)
            found[0, 0] += 1
            found[1, pairs.target[1] == stop] = 97
            return found

        monkeypatch.setattr("longspan.train.evaluate._written", written)
        assert evaluate_seq2seq(build(), dataset, "test", 1000)[2] == dataset.count("test") - 2

    def test_the_ranks_shares_make_the_whole(self, dataset):
        model = build()
        parts = [evaluate_seq2seq(model, dataset, "test", 5, Share(4, rank, 3)) for rank in range(3)]
        torch.testing.assert_close(sum(parts), evaluate_seq2seq(model, dataset, "test", 5, Share(4)), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("training", [True, False])
    def test_dropout_is_off_and_the_mode_as_before(self, dataset, training):
        model = build().train(training)
        assert torch.equal(evaluate_seq2seq(model, dataset, "test", 5), evaluate_seq2seq(model, dataset, "test", 5))
        assert model.training is training


class TestRuns:
    def test_the_folder_has_all_that_is_needed(self, whole, file, dataset):
        recipe = yaml.safe_load((whole / "run" / "config.yaml").read_text())
        assert recipe["model"] == {"kind": "seq2seq"} | asdict(SMALL)
        assert checkpoint.config_of(recipe["model"]) == SMALL
        assert longspan.load(whole / "run").config == SMALL
        assert TrainConfig(**recipe["run"]).data == file
        evaluated = [row for row in rows(whole) if row["validation_bits"]]
        assert [int(row["step"]) for row in evaluated] == [4, 8, 11]
        assert all(0 <= float(row["validation_exact"]) <= 1 for row in evaluated)
        assert all(float(row["bits"]) == pytest.approx(float(row["loss"]) / math.log(2)) for row in rows(whole))

    def test_result_is_the_best_models(self, tmp_path, file, dataset):
        result = fit(SMALL, tiny(tmp_path, data=file, steps=3), progress=False)
        model = longspan.load(tmp_path / "run")
        for split in ("validation", "test"):
            nats, tokens, exact, pairs = evaluate_seq2seq(model, dataset, split, 64, Share(7)).tolist()
            assert result.bits[split] == pytest.approx(nats / tokens / math.log(2), rel=1e-6)
            assert (result.exact[split], result.examples[split]) == (exact / pairs, pairs)

    @pytest.mark.full
    def test_it_learns(self, tmp_path, file):
        config = replace(SMALL, dropout=0.0, dim=32, feedforward=64, attention="softmax", smoothing=0.0)
        fields = {"steps": 200, "batch": 32, "learning_rate": 0.01, "evaluate_every": 200, "save_every": 200}
        result = fit(config, tiny(tmp_path, data=file, **fields, evaluate_examples=0), progress=False)
        assert result.bits["validation"] < 0.5
        assert result.exact["validation"] > 0.5

    def test_other_settings_are_named(self, whole, file):
        with pytest.raises(ValueError, match=r"with other settings: model.smoothing \(0.2 -> 0.1\)"):
            fit(replace(SMALL, smoothing=0.1), tiny(whole, data=file), resume=True, progress=False)
        with pytest.raises(ValueError, match=r"with other settings: model.kind \(seq2seq -> decoder\), "):
            fit(TINY, tiny(whole, data=file), resume=True, progress=False)
