"""Losses and statistics of mechanisms' own: what a record costs, how it goes through models, how training uses it."""

import csv
import re

import pytest
import torch
import yaml

import longspan
from longspan._utils import progress
from longspan.attention import adaptive_span
from longspan.models.config import DecoderConfig, EncoderConfig, StackConfig
from longspan.models.decoder import Decoder
from longspan.models.encoder import Encoder
from longspan.models.stacks import Stack
from longspan.states import lookback
from longspan.train import bits, fit, loop, objectives
from longspan.train.report import Bar
from support.runs import rows
from support.tensors import data
from training_process import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


SPANS = "adaptive_span(span=11, ramp=3, initial=4.0)"


SMALL = {"dim": 8, "heads": 2, "feedforward": 12}


LEARNING = DecoderConfig(**SMALL, depth=2, attention=SPANS, vocab=17, length=64)


MASK = torch.tensor([[True] * 9 + [False] * 4, [False] * 2 + [True] * 11])


def stack(*specs):
    torch.manual_seed(0)
    built = Stack(StackConfig(**SMALL, depth=len(specs), attention="; ".join(specs))).double()
    for i, part in enumerate(built.attentions()):
        if isinstance(part, adaptive_span.AdaptiveSpan):
            part.fraction.data = torch.tensor([0.1, 0.3 + 0.1 * i], dtype=torch.float64)
    return built


class TestRecord:
    def test_what_names_nothing_gets_all_and_what_names_something_gets_that(self):
        module, x = longspan.build(SPANS, 8, 2).double(), data(2, 13, 8)
        whole, some, other = {}, {"penalty": None}, {"matrix": None, "lse": None}
        y = [module(x, record=record, mask=MASK)[0] for record in (whole, some, other)]
        assert set(whole) == {"matrix", "mask", "lse", "penalty"}
        assert whole["penalty"].item() == pytest.approx(4.0)
        assert some == {"penalty": whole["penalty"]}
        assert set(other) == {"matrix", "lse"}
        torch.testing.assert_close(other["matrix"], whole["matrix"], rtol=0, atol=0)
        assert torch.equal(y[0], y[1])
        assert torch.equal(y[0], y[2])

    @pytest.mark.parametrize("spec", [SPANS, "kernel", "local(window=3)", "softmax"])
    def test_a_penalty_is_asked_for_without_the_matrix(self, spec, monkeypatch):
        """The matrix costs O(N M), which no training should pay for."""
        module, asked = longspan.build(spec, 8, 2).double(), {"penalty": None}
        found = []
        attend = type(module).attend

        def watched(self, x, state, *, record=None, **given):
            found.append(record)
            return attend(self, x, state, record=record, **given)

        def forbidden(*_, **__):
            raise AssertionError("the matrix was computed")

        monkeypatch.setattr(type(module), "attend", watched)
        monkeypatch.setattr(lookback, "_record", forbidden)
        module(data(2, 13, 8), record=asked)
        assert found == [None if spec != SPANS else {"penalty": asked["penalty"]}]
        assert set(asked) == ({"penalty"} if spec == SPANS else set())

    def test_a_record_that_is_used_again_is_filled_again(self):
        module, record = longspan.build(SPANS, 8, 2).double(), {}
        module(data(2, 13, 8), record=record)
        module(data(3, 5, 8), record=record)
        assert record["matrix"].shape == (3, 2, 5, 5)
        assert set(record) == {"matrix", "mask", "lse", "penalty"}

    @pytest.mark.parametrize("module", [longspan.build(SPANS, 8, 2), Stack(StackConfig(**SMALL, attention="gla"))])
    def test_a_name_that_is_not_known_is_refused(self, module):
        with pytest.raises(ValueError, match=r"unknown entry of a record 'penalties' \(did you mean 'penalty'\?\)"):
            module(torch.zeros(1, 3, 8), record={"penalties": None})
        with pytest.raises(ValueError, match="record must be a dict to write into, not bool"):
            module(torch.zeros(1, 3, 8), record=True)

    def test_no_token_no_penalty(self):
        module, record = longspan.build(SPANS, 8, 2), {"penalty": None}
        for x, mask in ((torch.zeros(2, 0, 8), None), (torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.bool))):
            module(x, mask=mask, record=record)
            assert record["penalty"] == 0


class TestModels:
    def test_a_stack_tells_of_each_layer_and_adds_the_penalties(self):
        model, x = stack(SPANS, "gla", SPANS, "softmax"), data(2, 13, 8)
        plain = model(x, mask=MASK)[0]
        record, some = {}, {"penalty": None}
        assert torch.equal(model(x, mask=MASK, record=record)[0], plain)
        model(x, mask=MASK, record=some)
        first, second = (11 * (0.1 + b) / 2 for b in (0.3, 0.5))
        assert record["penalty"].item() == pytest.approx(first + second)
        assert [set(layer) for layer in record["layers"]] == [
            {"matrix", "mask", "lse", "penalty"},
            set(),
            {"matrix", "mask", "lse", "penalty"},
            {"matrix", "mask", "lse"},
        ]
        assert [set(layer) for layer in some["layers"]] == [{"penalty"}, set(), {"penalty"}, set()]
        assert some["penalty"] == record["penalty"]
        assert [layer["penalty"].item() for layer in some["layers"][::2]] == pytest.approx([first, second])

    def test_a_stack_without_a_penalty_has_no_such_entry(self):
        record = {}
        stack("linear", "gla")(data(1, 3, 8), record=record)
        assert sorted(record) == ["layers"]
        assert [sorted(layer) for layer in record["layers"]] == [["mask", "matrix"], []]

    def test_a_step_with_a_state_tells_too(self):
        model, record = stack(SPANS, "softmax"), {}
        with torch.no_grad():
            _, state = model(data(2, 7, 8), model.init_state(2))
            model(data(2, 1, 8), state, record=record)
        assert record["layers"][1]["matrix"].shape == (2, 2, 1, 8)
        assert record["penalty"].item() == pytest.approx(11 * 0.2)

    def test_a_decoder_hands_its_record_on(self):
        torch.manual_seed(0)
        model, record = Decoder(LEARNING), {"penalty": None}
        tokens = torch.arange(13).view(1, 13)
        outputs, _ = model(tokens, record=record)
        assert torch.equal(outputs, model(tokens)[0])
        assert record["penalty"].item() == pytest.approx(8.0)
        assert len(record["layers"]) == 2

    def test_an_encoder_hands_its_record_on(self):
        torch.manual_seed(0)
        model, record = Encoder(EncoderConfig(**SMALL, depth=2, attention="softmax; kernel")), {}
        model(torch.randn(2, 13, 8), record=record, mask=MASK)
        assert [layer["matrix"].shape for layer in record["layers"]] == [(2, 2, 13, 13)] * 2
        torch.testing.assert_close(record["layers"][1]["matrix"].sum(-1), torch.ones(2, 2, 13))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with a penalty from beginning to end, to which interrupted ones are compared."""
    folder = tmp_path_factory.mktemp("penalized")
    fit(LEARNING, tiny(folder, penalty=0.01), progress=False)
    return folder


class TestTraining:
    def test_a_step_goes_down_the_loss_and_the_weighted_penalty(self, tmp_path, monkeypatch):
        """The gradient of one step, against both parts written out."""
        found = {}

        def kept(task, optimizer, *_, **__):
            found.update({name: p.grad.clone() for name, p in task.model.named_parameters()})
            found["model"] = task.model

        monkeypatch.setattr(loop.Task, "configure_gradient_clipping", kept)
        run = tiny(tmp_path, steps=1, penalty=0.25, learning_rate=1e-30, warmup=0, evaluate_examples=1)
        fit(LEARNING, run, progress=False)
        model = found.pop("model").train()
        tokens = objectives.NextToken(run, longspan.data.load("digits")).batch(0, 0, 1)
        outputs, _ = model(model.shift(tokens))
        spans = sum(11 * part.fraction.mean() for part in model.stack.attentions())
        loss = -model.likelihood.log_prob(outputs, tokens).mean() + 0.25 * spans
        for name, grad in zip(found, torch.autograd.grad(loss, model.parameters()), strict=True):
            torch.testing.assert_close(found[name], grad, msg=name)

    def test_it_is_logged_next_to_a_loss_without_it(self, tmp_path, whole):
        fit(LEARNING, tiny(tmp_path, steps=1, penalty=0.01), progress=False)
        fit(LEARNING, tiny(tmp_path / "plain", steps=1), progress=False)
        (one,), (plain,) = rows(tmp_path), rows(tmp_path / "plain")
        assert one["loss"] == plain["loss"]
        assert float(one["penalty"]) == pytest.approx(8.0)
        assert plain["penalty"] == ""
        assert [bool(row["penalty"]) for row in rows(whole)] == [True] * 4

    def test_accumulated_batches_count_it_once(self, tmp_path):
        run = tiny(tmp_path, steps=2, penalty=0.01, accumulate=3)
        fit(LEARNING, run, progress=False)
        # Of the two steps, whose spans differ by one update.
        assert float(rows(tmp_path)[0]["penalty"]) == pytest.approx(8.0, rel=0.01)

    def test_evaluation_is_without_it(self, tmp_path):
        run = tiny(tmp_path, steps=2, penalty=100.0)
        result = fit(LEARNING, run, progress=False)
        digits, model = longspan.data.load("digits"), longspan.load(tmp_path / "run")
        tokens = digits.take("test", torch.tensor([i * digits.count("test") // 7 for i in range(7)]))
        with torch.no_grad():
            chances = model.likelihood.log_prob(model(model.shift(tokens))[0], tokens).double()
        assert result.bits["test"] == pytest.approx(-chances.mean().item() / 0.6931471805599453)
        assert float(rows(tmp_path)[-1]["validation_bits"]) == pytest.approx(
            bits(model, digits, "validation", examples=7), rel=1e-9
        )

    def test_a_run_begun_before_there_were_penalties_goes_on(self, tmp_path):
        """Its recipe has no such field, its table no such column."""
        fit(LEARNING, tiny(tmp_path, steps=8, schedule="constant"), progress=False)
        path = tmp_path / "run" / "config.yaml"
        recipe = yaml.safe_load(path.read_text())
        del recipe["run"]["penalty"]
        path.write_text(yaml.safe_dump(recipe))
        before = [{name: value for name, value in row.items() if name != "penalty"} for row in rows(tmp_path)]
        with (tmp_path / "run" / "metrics.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, list(before[0]))
            table.writeheader()
            table.writerows(before)
        fit(LEARNING, tiny(tmp_path, steps=9, schedule="constant"), resume=True, progress=False)
        assert [row["step"] for row in rows(tmp_path)] == ["4", "8", "9"]
        assert rows(tmp_path)[:2] == [row | {"penalty": ""} for row in before]

    def test_the_lines_show_it(self, tmp_path, capfd, monkeypatch):
        fit(LEARNING, tiny(tmp_path, steps=4, penalty=0.01), progress=True)
        assert re.search(r"bits/dim, penalty 7\.9\d+  \(best so far\)$", capfd.readouterr().err.splitlines()[1])
        monkeypatch.setattr(progress, "EVERY", 0.0)
        bar = Bar(100, "byte")
        bar.start(40)
        bar.step(50, 1.25, 1.8034, 12345.0, 31.4159)
        bar.stop()
        assert "1.803 bits/byte, penalty 31.42, 12.3k tokens/s" in capfd.readouterr().err


SPEC = "routing(clusters=3, window=5); softmax"


ROUTED = DecoderConfig(dim=8, heads=2, feedforward=12, depth=2, attention=SPEC, vocab=17, length=64)


def counts(folder):
    return longspan.load(folder / "run").stack.attentions()[0].counts


def test_they_move_with_and_without_a_penalty(tmp_path):
    """Of 11 steps of 5 examples of 64 digits; a step's counts join with weight 1/1000."""
    for penalty in (0.0, 0.01):
        folder = tmp_path / str(penalty)
        fit(ROUTED, tiny(folder, penalty=penalty), progress=False)
        total, seen = 3 * 0.999**11, 5 * 64 * (1 - 0.999**11)
        assert counts(folder).sum(-1).tolist() == pytest.approx([total + seen] * 2, rel=0.05)


def test_micro_batches_are_added_up(tmp_path):
    fit(ROUTED, tiny(tmp_path, steps=1, accumulate=3), progress=False)
    assert counts(tmp_path).sum(-1).tolist() == pytest.approx([3 * 0.999 + 3 * 5 * 64 / 1000] * 2, rel=1e-5)
