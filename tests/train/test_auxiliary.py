"""Auxiliary losses: layers below the last and tokens after the next one, by heads that are dropped afterwards."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

import longspan
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.train import fit
from longspan.train.auxiliary import Auxiliary, weight_of
from support.runs import rows
from training_process import tiny, weights

pytestmark = pytest.mark.usefixtures("one_thread")

DEEP = DecoderConfig(
    dim=8, heads=2, feedforward=12, depth=4, attention="linear; softmax", vocab=17, length=64, dropout=0.1
)


def made(config=DEEP, **options):
    torch.manual_seed(0)
    model = Decoder(config).double().eval()
    auxiliary = Auxiliary(model, **{"intermediate": True, "targets": 2, "steps": 16} | options).double()
    tokens = torch.randint(17, (3, 13), generator=torch.Generator().manual_seed(1))
    return model, auxiliary, tokens


def loss(model, auxiliary, tokens, made=0, segments=None):
    auxiliary.made.fill_(made)
    auxiliary.listen()
    model(model.shift(tokens))
    return auxiliary(model, tokens, segments)


class TestSchedule:
    @pytest.mark.parametrize("layers", [1, 2, 3, 4, 6, 7])
    @pytest.mark.parametrize("steps", [1, 10, 84, 97])
    def test_layer_l_of_n_stops_after_l_2n_of_the_training(self, layers, steps):
        for layer in range(1, layers):
            for step in range(steps):
                alive = Fraction(step, steps) < Fraction(layer, 2 * layers)
                assert weight_of(layer, layers, step, steps) == float(alive)
        assert {weight_of(layers, layers, step, steps) for step in range(steps)} == {1.0}


class TestLoss:
    def test_by_hand(self):
        """Each head on the hidden states that the blocks leave, one after the other."""
        model, auxiliary, tokens = made()
        hidden, states = [], model.embedding(model.shift(tokens))[0]
        for block in model.stack.blocks:
            states, *_ = block(states)
            hidden.append(states)
        hidden[-1] = model.stack.norm(hidden[-1])
        expected = 0.0
        for layer in (1, 2, 3, 4):
            for ahead in (1, 2):
                if (layer, ahead) == (4, 1):
                    continue
                outputs = auxiliary.heads[f"{layer}_{ahead}"](hidden[layer - 1])
                targets = tokens if ahead == 1 else tokens[:, 1:]
                chances = outputs[:, : targets.shape[1]].log_softmax(-1).gather(-1, targets[..., None])
                expected = expected - chances.mean() * (1.0 if ahead == 1 else 0.5)
        torch.testing.assert_close(loss(model, auxiliary, tokens), expected)

    def test_what_stands_at_a_place_is_about_the_token_after_the_next(self):
        """A head that only knows the input's own token learns a text of period three, target by target."""
        model, auxiliary, _ = made(
            replace(DEEP, depth=1, attention="linear", dropout=0.0), intermediate=False, targets=3
        )
        outputs = torch.full((2, 9, 17), -50.0, dtype=torch.float64)
        tokens = torch.arange(9).remainder(3).expand(2, 9)
        for ahead in (2, 3):
            wanted = (torch.arange(9) + ahead - 1).remainder(3).expand(2, 9)
            given = outputs.scatter(-1, wanted[..., None], 50.0)
            auxiliary.heads[f"1_{ahead}"] = Said(given)
        assert loss(model, auxiliary, tokens).item() < 1e-30

    def test_targets_of_the_next_document_do_not_count(self):
        model, auxiliary, tokens = made(intermediate=False, targets=2)
        segments = torch.zeros(3, 13, dtype=torch.long)
        segments[1, 5:] = 1
        auxiliary.listen()
        model(model.shift(tokens))
        x = auxiliary.heard[-1]
        chances = auxiliary.heads["4_2"](x[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        kept = torch.ones(3, 12, dtype=torch.bool)
        kept[1, 4] = False
        found = auxiliary(model, tokens, segments)
        torch.testing.assert_close(found, -0.5 * chances[kept].mean())

    def test_a_head_teaches_its_own_layer_and_those_below(self):
        model, auxiliary, tokens = made(targets=1)
        for name, head in list(auxiliary.heads.items()):
            if name != "2_1":
                auxiliary.heads[name] = Said(torch.zeros(3, 13, 17, dtype=torch.float64), head)
        grads = torch.autograd.grad(loss(model, auxiliary, tokens), list(model.stack.parameters()), allow_unused=True)
        reached = {
            name.split(".")[1]
            for (name, _), grad in zip(model.stack.named_parameters(), grads, strict=True)
            if grad is not None and grad.any()
        }
        assert reached == {"0", "1"}

    def test_heads_that_have_stopped_have_gradients_of_zero(self):
        model, auxiliary, tokens = made()
        loss(model, auxiliary, tokens, 2).backward()
        for name, head in auxiliary.heads.items():
            gradients = [p.grad for p in head.parameters()]
            assert all(grad is not None for grad in gradients)
            assert any(bool(grad.any()) for grad in gradients) == (name[0] != "1")

    def test_logits_are_the_same_with_and_without_heads(self):
        model, auxiliary, tokens = made()
        with torch.no_grad():
            auxiliary.listen()
            heard, _ = model(model.shift(tokens))
            plain = Decoder(DEEP).double().eval()
            plain.load_state_dict(model.state_dict())
            assert torch.equal(heard, plain(plain.shift(tokens))[0])
        assert not any("heads" in name for name in model.state_dict())

    def test_the_model_is_drawn_as_without_heads(self):
        torch.manual_seed(0)
        plain = Decoder(DEEP).double()
        model, *_ = made()
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))

    @pytest.mark.parametrize("changes", [{"checkpointing": True}, {"stack": "universal(steps=2)"}, {"prenorm": False}])
    def test_other_ways_to_run_the_blocks(self, changes):
        model, auxiliary, tokens = made(replace(DEEP, dropout=0.0, **changes))
        model.train()
        found = loss(model, auxiliary, tokens)
        steps = 2 if "stack" in changes else 1
        assert len(auxiliary.heads) == 2 * 4 * steps - 1
        grads = torch.autograd.grad(found, list(model.stack.blocks.parameters()))
        assert all(bool(grad.isfinite().all()) for grad in grads)
        if "checkpointing" in changes:
            plain, other, _ = made(replace(DEEP, dropout=0.0))
            same = torch.autograd.grad(loss(plain, other, tokens), list(plain.stack.blocks.parameters()))
            for grad, other in zip(grads, same, strict=True):
                assert torch.equal(grad, other)

    def test_later_targets_alone_go_with_every_stack(self):
        for stack in ("reversible", "act(steps=3)"):
            model, auxiliary, tokens = made(replace(DEEP, stack=stack, dropout=0.0), intermediate=False)
            assert list(auxiliary.heads) == ["4_2" if stack == "reversible" else "12_2"]
            assert loss(model, auxiliary, tokens).item() == pytest.approx(math.log(17) / 2, rel=0.2)

    def test_refused(self):
        for stack in ("reversible", "act(steps=3)"):
            with pytest.raises(ValueError, match=f"a hidden state after each layer.*{stack[:3]}"):
                made(replace(DEEP, stack=stack))
        with pytest.raises(ValueError, match="at least two layers.* one"):
            made(replace(DEEP, depth=1, attention="linear"))


class Said(torch.nn.Module):
    """A head that records its input."""

    def __init__(self, outputs, instead=None):
        super().__init__()
        self.outputs, self.instead = outputs, instead

    def forward(self, x):
        return self.outputs[:, : x.shape[1]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("auxiliary")
    fit(DEEP, tiny(folder, intermediate=True, targets=2), progress=False)
    return folder


class TestTraining:
    def test_a_saved_model_has_no_heads(self, whole):
        model = longspan.load(whole / "run")
        assert {name.split(".")[0] for name in model.state_dict()} == {"embedding", "stack", "head"}
        kept = checkpoint.load_training(checkpoint.resolve(whole / "run", prefer="last"))
        assert "state_dict" not in kept

    def test_what_they_add_is_logged_next_to_the_loss(self, tmp_path, whole):
        fit(DEEP, tiny(tmp_path, steps=1, intermediate=True, targets=2), progress=False)
        fit(DEEP, tiny(tmp_path / "plain", steps=1), progress=False)
        (one,), (plain,) = rows(tmp_path), rows(tmp_path / "plain")
        assert one["loss"] == plain["loss"]
        # Three heads for the next token and four, of half the weight, for the one after it; none knows anything.
        assert float(one["auxiliary"]) == pytest.approx(5 * math.log(17), rel=0.05)
        assert plain["auxiliary"] == ""
        # Of the last step, past the middle, one head is left.
        assert float(rows(whole)[-1]["auxiliary"]) < 0.6 * math.log(17)

    def test_they_change_what_is_learned(self, tmp_path, whole):
        fit(DEEP, tiny(tmp_path), progress=False)
        assert weights(tmp_path) != weights(whole)
