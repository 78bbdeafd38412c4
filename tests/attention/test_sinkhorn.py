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
BLOCK = torch.arange(N) // B


def build(options="block=4", causal=True, **more) -> Any:
    torch.manual_seed(0)
    return longspan.build(f"sinkhorn({options})", 6, 2, causal=causal).double().eval()


def counted(q, k, v, count):
    """Softmax attention in which key j counts count[i, j] times for query i."""
    weights = count * (q @ k.mT * q.shape[-1] ** -0.5).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


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


def hard(order):
    return torch.eye(U, dtype=torch.float64)[list(order)].expand(2, 3, U, U)


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

    def test_the_identity_is_local_attention(self):
        """Every key of the own block occurs twice, which does not change the softmax."""
        q, k, v, _ = operands()
        expected = counted(q, k, v, (BLOCK[:, None] == BLOCK).double())
        torch.testing.assert_close(op.attend(q, k, v, hard(range(U)), B), expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("order", [(1, 2, 3, 0), (3, 2, 1, 0), (2, 1, 3, 0)])
    def test_a_permutation_is_attention_to_two_blocks(self, order):
        """Including the last block, which is not full; a block that is sorted to itself counts twice."""
        q, k, v, _ = operands()
        count = (BLOCK[:, None] == BLOCK).double() + (torch.tensor(order)[BLOCK][:, None] == BLOCK)
        torch.testing.assert_close(op.attend(q, k, v, hard(order), B), counted(q, k, v, count), rtol=0, atol=1e-12)

    def test_causal_is_the_past_of_the_own_block_and_one_earlier_block(self):
        q, k, v, _ = operands()
        earlier = torch.tensor([-1, 0, 0, 2])
        sort = (earlier[:, None] == torch.arange(U)).double().expand(2, 3, U, U)
        own = (BLOCK[:, None] == BLOCK).double().tril()
        expected = counted(q, k, v, own + (earlier[BLOCK][:, None] == BLOCK))
        torch.testing.assert_close(op.attend(q, k, v, sort, B, causal=True), expected, rtol=0, atol=1e-12)

    def test_sortcut_of_all_blocks_is_full_attention(self):
        q, k, v, _ = operands()
        expected = counted(q, k, v, torch.ones(N, N, dtype=torch.float64))
        torch.testing.assert_close(op.attend(q, k, v, hard(range(U)), B, cut=U), expected, rtol=0, atol=1e-12)

    def test_values_come_from_values(self):
        q, k, v, sort = operands()
        for cut in (0, 2):
            assert not op.attend(q, k, 0 * v, sort, B, cut=cut).any()
            ones = op.attend(q, k, torch.ones_like(v), sort, B, cut=cut)
            torch.testing.assert_close(ones, torch.ones_like(v), rtol=0, atol=1e-13)


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

    def test_rows_do_not_depend_on_later_ones(self):
        """In contrast to a plain sum over columns."""
        scores = data(7, 7)
        other = torch.cat([scores[:4], 3 * data(3, 7, seed=1)])
        past = torch.ones(7, 7, dtype=torch.bool).tril(-1)[None, None]
        plain = [op.balance(s[None, None], 3, past)[0, 0, :4] for s in (scores, other)]
        assert (plain[0] - plain[1]).abs().max() > 0.01
        assert torch.equal(causal_shares(scores, 3)[:4], causal_shares(other, 3)[:4])

    def test_iterations_lead_to_the_block_before(self):
        """The shift by one is the only balanced sorting of the past."""
        shares = [1 - causal_shares(data(9, 9), t).diagonal(-1)[1:].mean().item() for t in (0, 5, 50, 500)]
        assert shares[0] > 0.5
        assert all(a > 2 * b for a, b in itertools.pairwise(shares))
        assert 5 < shares[2] / shares[3] < 20

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
    def test_by_hand(self):
        """With blocks of one token, the second token reads the first one and itself."""
        module: Any = longspan.build("sinkhorn(block=1)", 1, 1).double().eval()
        for name in ("query", "key", "value", "out"):
            getattr(module, name).weight.data.fill_(1.0)
            getattr(module, name).bias.data.zero_()
        y, _ = module(torch.tensor([[[1.0], [2.0]]], dtype=torch.float64))
        assert y[0, 0].item() == pytest.approx(1.0)
        assert y[0, 1].item() == pytest.approx((1 * math.exp(2) + 2 * math.exp(4)) / (math.exp(2) + math.exp(4)))

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
            if causal:
                state, expected_state = huge.init_state(2, N), whole.init_state(2, N)
                for part in x.split([4, 1, N - 5], 1):
                    (y, state), (expected, expected_state) = huge(part, state), whole(part, expected_state)
                    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)

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

    @pytest.mark.parametrize("options", ["block=4, cut=2", "block=4, cut=1, iterations=0", "block=4"])
    def test_padded_and_packed_rows_are_rows_alone(self, options):
        module, x = build(options, causal=False), data(2, N, 6)
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

    def test_the_state_keeps_every_token_and_whole_blocks(self):
        module, x = build("block=4, iterations=3"), data(2, N, 6)
        _, state = module(x, module.init_state(2))
        assert state.past.keys.shape == (2, 2, N, 3)
        assert state.offers.shape == (2, 2, 3, 3)
        assert state.sums.shape == (2, 2, 3, 3)
        torch.testing.assert_close(state.begun, x[:, 12:].sum(1), rtol=0, atol=1e-12)
        torch.testing.assert_close(state.queries, x.mean(1), rtol=0, atol=1e-12)
