"""Learning to copy: the sequences, the loss on their second half, and trainings that go on where they stopped."""

from dataclasses import replace

import pytest
import torch

from longspan.models.decoder import Decoder
from longspan_lab.experiments import copying
from longspan_lab.experiments.experiment import Place
from support.experiments import unwatched

SMALL = replace(copying.EXPERIMENT.quick, steps=13, drop_at=7)


def test_a_sequence_is_a_separator_and_symbols_twice():
    settings = replace(SMALL, length=128, symbols=10)
    drawn = copying.draw(settings, 300, 0, "train", 1)
    assert drawn.shape == (300, 128)
    assert (drawn[:, :64] == drawn[:, 64:]).all()
    assert (drawn[:, 0] == 0).all()
    symbols = drawn[:, 1:64]
    shares = torch.bincount(symbols.flatten(), minlength=11)[1:] / symbols.numel()
    assert symbols.min() == 1
    # Four standard deviations of a share.
    assert (shares - 0.1).abs().max() < 4 * (0.1 * 0.9 / symbols.numel()) ** 0.5


def test_sequences_depend_on_seed_and_update_alone():
    def drawn(*names):
        return tuple(copying.draw(SMALL, 5, *names).flatten().tolist())

    assert drawn(0, "train", 3) == drawn(0, "train", 3)
    assert len({drawn(*names) for names in ((0, "train", 3), (1, "train", 3), (0, "train", 4), (0, "test"))}) == 4


def test_the_loss_counts_the_second_half_alone():
    torch.manual_seed(0)
    model = Decoder(SMALL.config("softmax")).double()
    tokens = copying.draw(SMALL, 3, 0, "test")
    outputs, _ = model(model.shift(tokens))
    logs = outputs.log_softmax(-1)
    # Of ten tokens the last four; each is predicted from those before it.
    expected = -sum(logs[b, i, tokens[b, i]] for b in range(3) for i in range(6, 10)) / 12
    torch.testing.assert_close(copying.loss(model, tokens), expected)


def test_first_weights_are_those_of_pytorch():
    model = copying.fresh(copying.Settings().config("linear"), 0)
    layer = model.stack.blocks[0].feedforward.expand
    # Uniform up to 1 / sqrt(columns).
    assert layer.weight.abs().max().item() == pytest.approx(128**-0.5, rel=1e-3)
    assert model.embedding.tokens.weight.std().item() == pytest.approx(1, abs=0.1)


@pytest.fixture
def often(monkeypatch):
    """Tests every 2 updates, and something to go on with after every 4."""
    monkeypatch.setattr(copying, "EVERY", 2)
    monkeypatch.setattr(copying, "KEEP", 4)


def test_every_attention_gets_the_same_sequences_and_weights(often, tmp_path, monkeypatch):
    draw, fresh, drawn, born = copying.draw, copying.fresh, {}, {}

    def watched(settings, count, *names):
        drawn.setdefault(point["spec"], []).append((count, names))
        return draw(settings, count, *names)

    def watched_fresh(*args):
        model = fresh(*args)
        born[point["spec"]] = {name: weight.clone() for name, weight in model.state_dict().items()}
        return model

    monkeypatch.setattr(copying, "draw", watched)
    monkeypatch.setattr(copying, "fresh", watched_fresh)
    for name in ("softmax", "linear"):
        point = {"spec": name, "seed": 1}
        copying.measure(SMALL, point, Place(tmp_path, unwatched))
    assert drawn["softmax"] == drawn["linear"]
    assert drawn["linear"] == [(2, (1, "test")), *((3, (1, "train", step)) for step in range(13))]
    assert all(torch.equal(born["linear"][name], weight) for name, weight in born["softmax"].items())


def test_the_learning_rate_drops_to_a_tenth(often, tmp_path, monkeypatch):
    rates = []

    class Watched(torch.optim.RAdam):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "RAdam", Watched)
    copying.measure(SMALL, {"spec": "linear", "seed": 0}, Place(tmp_path, unwatched))
    assert rates == pytest.approx([1e-3] * 7 + [1e-4] * 6)


@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_what_is_short_is_learned(name, tmp_path):
    settings = copying.Settings(
        length=6, symbols=3, dim=16, depth=2, heads=2, feedforward=32, steps=300, drop_at=250, rate=1e-2
    )
    row = copying.measure(settings, {"spec": name, "seed": 0}, Place(tmp_path, unwatched))
    assert row["test"] < copying.GOAL
    reached = dict(row["curve"])[row["reached"]]
    assert reached < copying.GOAL
    assert all(value >= copying.GOAL for step, value in row["curve"] if step < row["reached"])
