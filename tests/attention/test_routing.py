"""Routing against the definition: clusters, windows, lists, and updates of the centers."""

import pytest
import torch
import torch.distributed as distributed
import torch.nn.functional as F

import longspan
from longspan.attention.routing import Statistics
from longspan.ops.tensors import merge, split
from support.tensors import data, same

N = 37
MASK = torch.tensor([[True] * 5 + [False] * 3 + [True] * 29, [False] * 2 + [True] * 35])
SPEC = "routing(clusters=3, window=5)"


def build(spec=SPEC, dim=8, heads=2, **place):
    torch.manual_seed(0)
    return longspan.build(spec, dim, heads, **place).double()


def parts(module, x):
    q, v = (split(part(x), module.heads) for part in (module.query, module.value))
    k = q if module.causal else split(module.key(x), module.heads)
    return *(F.layer_norm(t, t.shape[-1:]) for t in (q, k)), v


def definition(module, x, allowed):
    q, k, v = parts(module, x)
    p = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    p = p.masked_fill(~allowed.any(-1, keepdim=True), 0.0).softmax(-1).masked_fill(~allowed, 0.0)
    return module.out(merge(p @ v)), p


@pytest.mark.parametrize("given", [{}, {"mask": MASK}])
def test_it_is_softmax_under_the_recorded_mask(given):
    module, x, record = build(), data(2, N, 8).requires_grad_(), {}
    real = given.get("mask", torch.ones_like(MASK))
    y = module(x, record=record, **given)[0]
    expected, matrix = definition(module, x, record["mask"])
    pairs = real[:, None, :, None]
    torch.testing.assert_close(record["matrix"] * pairs, matrix * pairs, rtol=1e-10, atol=1e-10)
    same(y[real], expected[real], (x, *module.parameters()))
    near = module.nearest(parts(module, x)[0])
    together = near[..., :, None] == near[..., None, :]
    assert not (record["mask"] & ~together).any()
    assert record["mask"].sum(-1).max() == 4


@pytest.mark.parametrize(("spec", "causal"), [("routing(clusters=3, window=7, published=True)", True), (SPEC, False)])
def test_lists_are_the_mean_of_their_dense_forms(spec, causal):
    module, x, record = build(spec, causal=causal), data(2, N, 8).requires_grad_(), {}
    y = module(x, record=record)[0]
    q, k, v = parts(module, x)
    toward = F.normalize(module.sums, dim=-1)
    total, lists = torch.zeros(2, 2, N, N, dtype=torch.float64), torch.zeros(2, 2, N)
    for c in range(3):
        queries, keys = (
            torch.zeros(2, 2, N, dtype=torch.bool).scatter(
                2, (t @ toward[:, c, :, None])[..., 0].topk(module.window).indices, True
            )
            for t in (q, k)
        )
        allowed = queries[..., None] & keys[..., None, :]
        if causal:
            before = allowed & torch.ones(N, N, dtype=torch.bool).tril(-1)
            allowed = before | (allowed & torch.eye(N, dtype=torch.bool) & ~before.any(-1, keepdim=True))
        total, lists = total + definition(module, x, allowed)[1], lists + queries
    expected = total / lists.clamp(min=1)[..., None]
    torch.testing.assert_close(record["matrix"], expected, rtol=1e-10, atol=1e-10)
    assert (lists == 0).any()
    same(y, module.out(merge(expected @ v)), (x, *module.parameters()))


class TestUpdate:
    def test_it_is_the_closed_formula(self):
        """m and n of the tokens of the call, by loops; masked tokens are not counted."""
        for causal in (True, False):
            module, x, record = build(causal=causal), data(2, N, 8), {"statistics": None}
            with torch.no_grad():
                module.counts.copy_(1 + data(2, 3).abs())
            sums, counts = module.sums.clone(), module.counts.clone()
            module(x, mask=MASK, record=record)
            assert set(record) == {"statistics"}
            toward = module.sums / module.counts[..., None]
            members, number = torch.zeros_like(sums), torch.zeros_like(counts)
            for t in parts(module, x)[:2]:
                for b, h, n in MASK[:, None].expand(-1, 2, -1).nonzero().tolist():
                    own = F.cosine_similarity(t[b, h, n], toward[h], dim=-1).argmax()
                    members[h, own] += t[b, h, n] / 2
                    number[h, own] += 0.5
            module.update(record)
            torch.testing.assert_close(module.sums, 0.999 * sums + 0.001 * members, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(module.counts, 0.999 * counts + 0.001 * number, rtol=1e-12, atol=1e-12)

    @pytest.mark.full
    def test_an_empty_cluster_stays(self):
        """Otherwise repeated updates would make its center 0 / 0."""
        module = build("routing(clusters=2, window=3, decay=0.5)")
        with torch.no_grad():
            for part in (module.query,):
                part.weight.zero_()
                part.bias.copy_(torch.tensor([3.0, 1.0, -1.0, -3.0] * 2))
            module.sums.copy_(torch.tensor([[3.0, 1.0, -1.0, -3.0], [-3.0, -1.0, 1.0, 3.0]]).expand(2, 2, 4))
        empty = module.sums[:, 1].clone(), module.counts[:, 1].clone()
        for _ in range(200):
            record = {"statistics": None}
            with torch.no_grad():
                module(data(1, 2, 8), record=record)
            module.update(record)
        assert torch.equal(module.sums[:, 1], empty[0])
        assert torch.equal(module.counts[:, 1], empty[1])
        assert module.counts[:, 0].tolist() == pytest.approx([2.0, 2.0])
        assert module.centers().isfinite().all()

    def test_only_updates_move_a_center(self):
        module = build().train()
        before = module.sums.clone(), module.counts.clone()
        y = module(data(2, N, 8), record={})[0]
        y.sum().backward()
        assert torch.equal(module.sums, before[0])
        assert torch.equal(module.counts, before[1])

    def test_processes_add_their_statistics(self, monkeypatch):
        """Two processes with equal statistics."""
        one, both, record = build(), build(), {"statistics": None}
        one(data(2, N, 8), record=record)
        both.update({"statistics": Statistics(*(2 * t for t in record["statistics"]))})
        kept = [t.clone() for t in record["statistics"]]
        monkeypatch.setattr(distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(distributed, "all_reduce", lambda t: t.mul_(2))
        one.update(record)
        assert torch.equal(one.sums, both.sums)
        assert torch.equal(one.counts, both.counts)
        assert all(map(torch.equal, record["statistics"], kept))

    def test_a_record_without_statistics_is_refused(self):
        with pytest.raises(ValueError, match="the record has no statistics"):
            build().update({})
        with pytest.raises(ValueError, match="softmax has no statistics: gradients alone move what it learns"):
            longspan.build("softmax", 8, 2).update({})


class TestPenalty:
    def test_it_is_the_mean_squared_distance(self):
        module, x, record = build(), data(2, N, 8), {"penalty": None}
        module(x, mask=MASK, record=record)
        q = parts(module, x)[0]
        near = module.nearest(q)
        center = torch.stack([module.centers()[h][near[:, h]] for h in range(2)], 1)
        apart = (q - center).square().mean(-1)[MASK[:, None].expand(-1, 2, -1)]
        assert record["penalty"].item() == pytest.approx(apart.mean().item())
        (grad,) = torch.autograd.grad(record["penalty"], module.query.weight)
        assert grad.abs().max() > 0

    def test_no_token_no_penalty(self):
        record = {}
        build()(data(2, 0, 8), record=record)
        assert record["penalty"] == 0
        assert record["statistics"].counts.sum() == 0
