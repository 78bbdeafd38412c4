"""Sorted blocks against plain attention: special sortings, shares, and causality."""

import itertools
import math
from typing import Any

import pytest
import torch

import longspan
from longspan.ops.compress import sinkhorn as op
from support.tensors import data, same

N, B = 13, 4  # the last of 4 blocks has one token
U = -(-N // B)


def build(options="block=4", causal=True, **more) -> Any:
    torch.manual_seed(0)
    return longspan.build(f"sinkhorn({options})", 6, 2, causal=causal).double().eval()


def definition(q, k, v, sort, *, causal=False, cut=0):
    """The matrix of weights, place by place, and the output."""
    rows = []
    for i in range(N):
        logits, shares = [], []  # (B,H) each, (B,H,N) each
        for u in range(min(cut, U)) if cut else [i // B]:
            for place in range(B):
                share = torch.zeros(*q.shape[:2], N, dtype=q.dtype)
                share[..., place::B] = sort[:, :, u, : len(range(place, N, B))]
                mass = share.sum(-1)
                if (mass == 0).all():
                    continue
                shares.append(share / mass[..., None])
                key = (shares[-1][..., None] * k).sum(2)
                logits.append(mass.log() + (q[:, :, i] * key).sum(-1) * k.shape[-1] ** -0.5)
        for j in range(0) if cut else range(i // B * B, min(i // B * B + B, i + 1 if causal else N)):
            shares.append(torch.zeros(*q.shape[:2], N, dtype=q.dtype).index_fill(2, torch.tensor([j]), 1.0))
            logits.append((q[:, :, i] * k[:, :, j]).sum(-1) * k.shape[-1] ** -0.5)
        p = torch.stack(logits, -1).softmax(-1)
        rows.append((p[..., None] * torch.stack(shares, 2)).sum(2))
    matrix = torch.stack(rows, 2)
    return matrix, matrix @ v


def operands(causal=False):
    q, k, v = (data(2, 3, N, 5, seed=s).requires_grad_() for s in (1, 2, 3))
    scores = data(2, 3, U, U, seed=4)
    allowed = torch.ones(U, U, dtype=torch.bool).tril(-1 if causal else U)
    return q, k, v, op.balance(scores, 4, allowed.expand(2, 1, U, U)).requires_grad_()


class TestGivenSorting:
    @pytest.mark.parametrize("backend", ["auto", "reference"])
    @pytest.mark.parametrize("form", [{}, {"causal": True}, {"cut": 2}, {"cut": 9}])
    def test_output_and_gradients_are_those_of_the_written_out_matrix(self, form: Any, backend):
        q, k, v, sort = wanted = operands(form.get("causal", False))
        matrix, expected = definition(q, k, v, sort, **form)
        with longspan.backend(backend):
            found = op.attend(q, k, v, sort, B, **form)
            units = torch.eye(N, dtype=torch.float64).expand(2, 3, N, N)
            torch.testing.assert_close(op.attend(q, k, units, sort, B, **form), matrix, rtol=0, atol=1e-12)
        same(found, expected, wanted)


class TestShares:
    def test_rows_and_columns_sum_to_one(self):
        scores = data(2, 3, 7, 7)
        for iterations, columns in ((5, 0.05), (20, 1e-3), (200, 1e-10)):
            sort = op.balance(scores, iterations)
            torch.testing.assert_close(sort.sum(-1), torch.ones(2, 3, 7, dtype=torch.float64), rtol=0, atol=1e-14)
            assert (sort.sum(-2) - 1).abs().max() < columns
        assert op.balance(40 * scores, 5).min() < 1e-4  # nothing is clipped

    def test_cold_scores_are_the_best_permutation(self):
        scores = data(5, 5)
        best = max(itertools.permutations(range(5)), key=lambda order: sum(scores[i, j] for i, j in enumerate(order)))
        expected = torch.eye(5, dtype=torch.float64)[list(best)]
        # The other shares fall like 1 / iterations.
        torch.testing.assert_close(op.balance(scores / 0.01, 500), expected, rtol=0, atol=2e-3)

    def test_missing_blocks_have_no_share(self):
        scores, there = data(1, 1, 5, 5), torch.arange(5) < 3
        sort = op.balance(scores, 6, (there[:, None] & there)[None, None])
        torch.testing.assert_close(sort[..., :3, :3], op.balance(scores[..., :3, :3], 6), rtol=0, atol=1e-14)
        assert not sort[..., 3:, :].any()
        assert not sort[..., 3:].any()

    def test_causal_shares_are_loops(self):
        scores, iterations = data(7, 7), 3
        x = scores.exp().tril(-1)
        for _ in range(iterations):
            x = x / x.sum(-1, keepdim=True).clamp(min=1e-300)
            x = torch.stack([x[u] / x[: u + 1].sum(0).clamp(min=1e-300) for u in range(7)])
        x = x / x.sum(-1, keepdim=True).clamp(min=1e-300)
        torch.testing.assert_close(causal_shares(scores, iterations), x, rtol=0, atol=1e-12)

    def test_noise_has_the_gumbel_distribution(self):
        torch.manual_seed(0)
        drawn = op.gumbel(torch.empty(200_000, dtype=torch.float64))
        # Mean Euler's constant, variance pi^2 / 6; within 5 standard errors.
        assert abs(drawn.mean() - 0.5772) < 5 * math.sqrt(math.pi**2 / 6 / 200_000)
        assert abs(drawn.var() - math.pi**2 / 6) < 0.05


def causal_shares(scores, iterations):
    rows, columns = scores.shape
    past = torch.ones(rows, columns, dtype=torch.bool).tril(-1)[None, None]
    before = torch.full((1, 1, iterations, columns), op.EMPTY, dtype=scores.dtype)
    return op.balance_causal(scores[None, None], before, past)[0][0, 0]


class TestMechanism:
    @pytest.mark.parametrize("backend", ["torch", "reference"])
    @pytest.mark.parametrize(
        ("options", "causal"), [("", True), (", iterations=0", True), ("", False), (", cut=1", False)]
    )
    def test_a_block_that_no_sequence_fills_is_as_large_as_there_are_tokens(self, causal, options, backend):
        """It takes memory only for these, and equals a block of the same size."""
        x, real = data(2, N, 6), torch.arange(N) < torch.tensor([[N], [N - 3]])
        huge, whole = build(f"block={2**62}{options}", causal), build(f"block={N}{options}", causal)
        huge.load_state_dict(whole.state_dict())
        with longspan.backend(backend):
            for mask in (None, real):
                (y, _), (expected, _) = huge(x, mask=mask), whole(x, mask=mask)
                kept = slice(None) if mask is None else mask
                torch.testing.assert_close(y[kept], expected[kept], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("causal", [True, False])
    def test_scores_are_products_of_means(self, causal):
        module, x = build("block=4, temperature=0.3", causal), data(2, N, 6)
        means = torch.stack([x[:, : u + 1].mean(1) if causal else x[:, u : u + 4].mean(1) for u in range(0, N, 4)], 1)
        offers = torch.stack([x[:, u : u + 4].mean(1) for u in range(0, N, 4)], 1)
        heads = [part.unflatten(-1, (2, 3)).transpose(1, 2) for part in (module.ask(means), module.offer(offers))]
        scores = heads[0] @ heads[1].mT / math.sqrt(3) / 0.3
        if causal:
            sort = torch.stack([torch.stack([causal_shares(s, 5) for s in row]) for row in scores])
        else:
            sort = op.balance(scores, 5)
        q, k, v = (part(x).unflatten(-1, (2, 3)).transpose(1, 2) for part in (module.query, module.key, module.value))
        matrix, o = definition(q, k, v, sort, causal=causal)
        record: dict = {}
        y = module(x, record=record)[0]
        torch.testing.assert_close(record["matrix"], matrix, rtol=0, atol=1e-12)
        torch.testing.assert_close(y, module.out(o.transpose(1, 2).flatten(-2)), rtol=0, atol=1e-12)

    def test_padded_and_packed_rows_of_sortcut_are_rows_alone(self):
        module, x = build("block=4, cut=2", causal=False), data(2, N, 6)
        mask = torch.tensor([[True] * 3 + [False] * 2 + [True] * 8, [False] + [True] * 12])
        y = module(torch.where(mask[..., None], x, 1e3), mask=mask)[0]
        for row in range(2):
            torch.testing.assert_close(y[row, mask[row]], module(x[row : row + 1, mask[row]])[0][0], rtol=0, atol=1e-12)
        assert not y[~mask].any()
        packed = module(x, segments=torch.tensor([[0] * 5 + [1] * 8, [2] * 13]))[0]
        parts = (slice(0, 1), slice(0, 5)), (slice(0, 1), slice(5, N)), (slice(1, 2), slice(0, N))
        for part in parts:
            torch.testing.assert_close(packed[part], module(x[part])[0], rtol=0, atol=1e-12)

    def test_sortcut_records_what_it_read(self):
        module, x, record = build("block=4, cut=2", causal=False), data(2, N, 6), {}
        seen: dict = {}
        module.out.register_forward_pre_hook(lambda _m, i: seen.update(o=i[0]))
        module(x, record=record)
        v = module.value(x).unflatten(-1, (2, 3)).transpose(1, 2)
        product = (record["matrix"] @ v).transpose(1, 2).flatten(-2)
        torch.testing.assert_close(product, seen["o"], rtol=0, atol=1e-12)

    def test_noise_is_only_for_training(self):
        module, x = build(), data(2, N, 6)
        torch.manual_seed(1)
        quiet = module(x)[0]
        assert torch.equal(module(x)[0], quiet)
        module.train()
        torch.manual_seed(1)
        noisy = module(x)[0]
        assert (noisy - quiet).abs().max() > 1e-4
        torch.manual_seed(1)
        assert torch.equal(module(x)[0], noisy)
        module.noise = 0.0
        assert torch.equal(module(x)[0], quiet)
