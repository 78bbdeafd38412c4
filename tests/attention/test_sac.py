"""Selected edges: dense attention under their mask, and a policy gradient equal to that of the expected reward."""

import itertools
from typing import Any

import pytest
import torch

import longspan
from longspan.data import load
from longspan.models.config import DecoderConfig
from longspan.ops import edges as op
from longspan.train import fit, loop, objectives
from support.sparse import softmax
from support.tensors import data, same
from training_process import tiny

N = 11
MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False] + [True] * 10])


def build(edges=2, causal=True, dim=6, heads=2) -> Any:
    torch.manual_seed(0)
    return longspan.build(f"sac(edges={edges})", dim, heads, causal=causal).double().eval()


def operands(n=N):
    return [data(2, 3, n, 5, seed=s).requires_grad_() for s in (1, 2, 3)]


class TestEdges:
    @pytest.mark.parametrize("backend", ["auto", "reference"])
    def test_any_edges_are_dense_attention_under_their_mask(self, backend):
        q, k, v = wanted = operands()
        generator = torch.Generator().manual_seed(4)
        index = torch.randint(N, (2, N, 7), generator=generator)  # many are repeated
        there = torch.rand(2, N, 7, generator=generator) < 0.8
        there[..., 0] = True
        allowed = torch.stack(
            [
                torch.stack([torch.tensor([j in index[b, i, there[b, i]] for j in range(N)]) for i in range(N)])
                for b in range(2)
            ]
        )
        assert torch.equal(op.mask_of(index, there, N), allowed)
        with longspan.backend(backend):
            found = op.attend(q, k, v, index, there)
        expected = softmax(allowed[:, None], q, k, v)
        same(found, expected, wanted)

    def test_a_repeated_edge_counts_once(self):
        index, there = torch.tensor([[[3, 1, 3, 1, 2]]]), torch.tensor([[[False, True, True, True, True]]])
        assert op.once(index, there).tolist() == [[[False, True, True, False, True]]]

    def test_levels_double(self):
        distances = torch.tensor([1, 2, 3, 4, 7, 8, 2**15 - 1, 2**15, 2**20])
        assert op.level(distances).tolist() == [0, 1, 1, 2, 2, 3, 14, 15, 15]

    def test_picks_are_drawn_by_their_probability(self):
        scores, allowed = torch.tensor([0.0, 1.0, 2.0, 9.0]).double(), torch.tensor([True, True, True, False])
        p = scores[:3].softmax(-1)
        torch.manual_seed(0)
        index, logs = op.pick(scores.expand(20_000, 4), allowed, True)
        share = index.bincount(minlength=4) / 20_000
        assert share[3] == 0
        assert ((share[:3] - p).abs() < 5 * (p * (1 - p) / 20_000).sqrt()).all()
        torch.testing.assert_close(logs, p.log()[index], rtol=0, atol=1e-14)
        assert op.pick(scores, allowed, False)[0] == 2
        index, logs = op.pick(scores[None], torch.zeros(1, 4, dtype=torch.bool), True)
        assert (index.item(), logs.item()) == (0, 0.0)


class TestMechanism:
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("training", [False, True])
    def test_output_and_gradients_are_dense_attention_under_the_emitted_mask(self, causal, training):
        module, x = build(causal=causal).train(training), data(2, N, 6).requires_grad_()
        record: dict = {}
        y = module(x, record=record)[0]
        q, k, v = (p(x).unflatten(-1, (2, 3)).transpose(1, 2) for p in (module.query, module.key, module.value))
        expected = module.out(softmax(record["mask"], q, k, v).transpose(1, 2).flatten(-2))
        assert torch.equal(record["mask"], record["matrix"][:, :1] > 0)
        wanted = [x, *(p for name, p in module.named_parameters() if "predictor" not in name)]
        same(y, expected, wanted)

    @pytest.mark.parametrize("causal", [True, False])
    def test_edges_are_few_and_its_own_is_there(self, causal):
        # Sampled, since the most likely edges of an untrained walk may all be the same pair.
        module, record = build(causal=causal).train(), {}
        torch.manual_seed(0)
        module(data(2, N, 6), record=record)
        mask = record["mask"][:, 0]
        assert mask.diagonal(dim1=1, dim2=2).all()
        others = mask.sum((1, 2)) - N
        assert (others > 0).all()
        assert (others <= 2 * N).all()
        if causal:
            assert not mask.triu(1).any()
            assert (mask.sum(-1) <= 3).all()

    def test_evaluation_takes_the_likeliest_and_training_draws(self):
        module, x = build(), data(2, N, 6)
        y = module(x)[0]
        torch.rand(3)
        assert torch.equal(module(x)[0], y)
        module.train()
        torch.manual_seed(1)
        drawn = module(x)[0]
        assert not torch.equal(drawn, y)
        torch.manual_seed(1)
        assert torch.equal(module(x)[0], drawn)

    def test_causal_picks_are_those_of_the_written_out_policy(self):
        """The LSTM of torch, and the largest W_m h . (n_j + e) over earlier tokens, one by one."""
        module, x, record = build(2), data(1, N, 6), {}
        module(x, record=record)
        part = module.predictor
        lstm = torch.nn.LSTM(6, 6, batch_first=True).double()
        lstm.load_state_dict(
            {
                "weight_ih_l0": part.read.weight,
                "weight_hh_l0": part.recur.weight,
                "bias_ih_l0": part.read.bias,
                "bias_hh_l0": torch.zeros(24),
            }
        )
        hidden, nodes = lstm(x)[0][0], part.node(x)[0]
        for i in range(N):
            seen = {i}
            for ask in part.ask(hidden[i]).unflatten(-1, (2, 6)):
                scores = [ask @ (nodes[j] + part.distance.weight[(i - j).bit_length() - 1]) for j in range(i)]
                seen |= {max(range(i), key=lambda j, s=scores: s[j].item())} if i else set()
            assert set(record["mask"][0, 0, i].nonzero()[:, 0].tolist()) == seen

    @pytest.mark.parametrize("causal", [True, False])
    def test_padded_and_packed_rows_are_rows_alone(self, causal):
        module, x = build(causal=causal), data(2, N, 6)
        record: dict = {"log_prob": None}
        packed: dict = {"log_prob": None}
        y = module(torch.where(MASK[..., None], x, 1e3), mask=MASK, record=record)[0]
        z = module(x, segments=torch.tensor([[0] * 5 + [1] * 6, [2] * 11]), record=packed)[0]
        logs = []
        for row in range(2):
            alone: dict = {"log_prob": None}
            expected = module(x[row : row + 1, MASK[row]], record=alone)[0][0]
            torch.testing.assert_close(y[row, MASK[row]], expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(record["log_prob"][row : row + 1], alone["log_prob"], rtol=0, atol=1e-12)
        for part in (slice(0, 5), slice(5, N)):
            alone = {"log_prob": None}
            torch.testing.assert_close(z[:1, part], module(x[:1, part], record=alone)[0], rtol=0, atol=1e-12)
            logs.append(alone["log_prob"])
        torch.testing.assert_close(packed["log_prob"][:1], logs[0] + logs[1], rtol=0, atol=1e-12)


class TestPolicy:
    def test_its_gradient_is_that_of_the_expected_reward(self, monkeypatch):
        """All 3^6 outcomes of three nodes with one edge each, against samples."""
        module, x = build(1, causal=False, dim=2, heads=1).train(), data(1, 3, 2)
        wanted = list(module.predictor.parameters())

        def played(rows):
            record: dict = {"log_prob": None}
            y = module(x.expand(rows, -1, -1), record=record)[0].detach()
            return record["log_prob"], -10 * (y - data(1, 3, 2, seed=1)).square().sum((1, 2))

        outcomes = torch.tensor(list(itertools.product(range(3), repeat=6)))
        turns = iter(range(6))

        def forced(scores, allowed, draw):
            index = outcomes[:, next(turns)]
            return index, scores.log_softmax(-1).gather(-1, index[:, None])[:, 0]

        with monkeypatch.context() as patch:
            patch.setattr(op, "pick", forced)
            logs, reward = played(3**6)
        torch.testing.assert_close(logs.exp().sum(), torch.tensor(1.0).double(), rtol=0, atol=1e-12)
        exact = torch.autograd.grad(-(logs.exp() * reward).sum(), wanted)
        exact = torch.cat([g.flatten() for g in exact])
        torch.manual_seed(2)
        draws = []
        for _ in range(100):
            logs, reward = played(400)
            found = torch.autograd.grad(op.reinforce(logs, reward), wanted)
            draws.append(torch.cat([g.flatten() for g in found]))
        mean, error = torch.stack(draws).mean(0), torch.stack(draws).std(0) / 10
        assert exact.norm() > 10 * error.norm()
        assert ((mean - exact).abs() <= 4.5 * error + 1e-12).all()

    def test_the_baseline_is_the_other_rows(self):
        logs, reward = data(3).requires_grad_(), torch.tensor([1.0, 2.0, 6.0]).double().requires_grad_()
        op.reinforce(logs, reward).backward()
        assert logs.grad is not None
        torch.testing.assert_close(logs.grad, torch.tensor([3.0, 1.5, -4.5]).double() / 3)
        assert reward.grad is None
        assert op.reinforce(data(1), data(1, seed=1), 0.5).item() == pytest.approx(
            -(data(1, seed=1).item() - 0.5) * data(1).item()
        )

    def test_training_follows_the_gradient_of_the_expected_loss(self, tmp_path, monkeypatch):
        """The gradient of one step, with the samples of that step repeated."""
        found: dict = {}

        def kept(task, optimizer, *_, **__):
            found.update({name: p.grad.clone() for name, p in task.model.named_parameters()})
            found["model"] = task.model

        monkeypatch.setattr(loop.Task, "configure_gradient_clipping", kept)
        config = DecoderConfig(dim=8, heads=2, feedforward=12, depth=2, attention="sac(edges=2)", vocab=17, length=64)
        run = tiny(tmp_path, steps=1, penalty=0.5, learning_rate=1e-30, warmup=0, evaluate_examples=1)
        fit(config, run, progress=False)
        model = found.pop("model").train()
        index, tokens = next(iter(loop.Batches(objectives.NextToken(run, load("digits")), 0, 0, 1)))
        torch.manual_seed(loop.step_seed(run.seed, index, 0))
        record: dict = {"log_prob": None}
        outputs, _ = model(model.shift(tokens), record=record)
        assert torch.equal(record["log_prob"], sum(layer["log_prob"] for layer in record["layers"]))
        reward = model.likelihood.log_prob(outputs, tokens).mean(1).detach()
        others = torch.stack([torch.cat([reward[:b], reward[b + 1 :]]).mean() for b in range(len(reward))])
        loss = -model.likelihood.log_prob(outputs, tokens).mean()
        loss = loss - 0.5 * ((reward - others) * record["log_prob"]).mean()
        for name, grad in zip(found, torch.autograd.grad(loss, model.parameters()), strict=True):
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)
        assert any(found[name].any() for name in found if "predictor" in name)

    def test_rewards_of_another_shape_are_refused(self):
        with pytest.raises(ValueError, match=r"log_prob and reward must be \(B,\), one per row, not \(3,\) and \(2,\)"):
            op.reinforce(data(3), data(2))

    def test_only_sampling_mechanisms_record_log_prob(self):
        record: dict = {"log_prob": None}
        longspan.build("softmax", 6, 2)(torch.randn(1, 3, 6), record=record)
        assert record == {}
        attention = build()
        attention(data(1, 3, 6), record=(everything := {}))
        assert set(everything) == {"matrix", "mask", "log_prob"}
