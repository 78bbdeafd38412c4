"""Softmax attention and general similarities against loops and identities; the cache's slots."""

import math

import pytest
import torch

import longspan
from longspan import backend
from longspan.ops.softmax import dense, similarity
from longspan.states import kv_cache
from support.tensors import data as randn

Q, K, V = randn(2, 4, 13, 3), randn(2, 2, 13, 3, seed=1), randn(2, 2, 13, 5, seed=2)


def loops(q, k, v, allowed):
    """Three loops, nothing shared with the op."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h * k.shape[1] // q.shape[1]
            for i in range(q.shape[2]):
                seen = [j for j in range(k.shape[2]) if allowed[b, i, j]]
                s = [math.exp(float(q[b, h, i] @ k[b, g, j]) / math.sqrt(q.shape[-1])) for j in seen]
                for weight, j in zip(s, seen, strict=True):
                    out[b, h, i] += weight / sum(s) * v[b, g, j]
    return out


@pytest.mark.parametrize("name", ["auto", "reference"])
@pytest.mark.parametrize("kind", ["all", "causal", "mask"])
def test_attend_equals_loops(name, kind):
    allowed = torch.ones(2, 13, 13, dtype=torch.bool)
    if kind == "causal":
        allowed = allowed.tril()
    if kind == "mask":
        allowed = torch.rand(2, 13, 13, generator=torch.Generator().manual_seed(3)) < 0.4
        allowed[0, 2] = False  # a query that sees nothing gets zero
    arguments = {"mask": allowed[:, None]} if kind == "mask" else {"causal": kind == "causal"}
    with backend(name):
        out = dense.attend(Q, K, V, **arguments)
    torch.testing.assert_close(out, loops(Q, K, V, allowed), atol=1e-12, rtol=1e-12)
    one = dense.attend(Q[:, :, -1:], K, V)
    torch.testing.assert_close(one, loops(Q[:, :, -1:], K, V, torch.ones(2, 1, 13)), atol=1e-12, rtol=1e-12)


def test_weights_by_hand():
    """One channel, logits 0 and ln 3: weights 1/4 and 3/4, log-sum ln 4."""
    k = torch.tensor([0.0, math.log(3)]).view(1, 1, 2, 1)
    p, lse = dense.weights(torch.ones(1, 1, 1, 1), k)
    torch.testing.assert_close(p.flatten(), torch.tensor([0.25, 0.75]))
    assert lse.item() == pytest.approx(math.log(4))


def test_dropped_weights_are_rescaled():
    ones = torch.ones(1, 1, 1, 1000, dtype=torch.float64)
    torch.manual_seed(0)
    q, v = torch.zeros(1, 1, 997, 3), torch.ones(1, 1, 997, 1)
    for name in ("auto", "reference"):
        with backend(name):
            out = dense.attend(q, q, v, dropout=0.5)
        assert out.mean().item() == pytest.approx(1, abs=0.02)
        assert out.std() > 0
    out = similarity.attend(ones / 1000, ones.mT, 0.5)
    assert out.item() == pytest.approx(1, abs=0.1)
    assert out.item() != 1


def test_attention_dropout_is_for_training_only():
    x = randn(2, 13, 8).float()
    for spec in ("softmax(dropout=0.5)", "kernel(dropout=0.5)"):
        module = longspan.build(spec, 8, 2)
        assert not torch.equal(module(x)[0], module(x)[0])
        module.eval()
        assert torch.equal(module(x)[0], module(x)[0])


class TestSimilarity:
    options = {"degree": 2, "constant": 1.0, "bandwidth": 1.0}  # noqa: RUF012
    q, k = randn(2, 2, 13, 3), randn(2, 2, 13, 3, seed=1)
    all = torch.ones(13, 13, dtype=torch.bool)

    def test_rbf_is_softmax_with_a_bias_of_the_key(self):
        p = similarity.weights(self.q, self.k, self.all, similarity="rbf", **self.options | {"bandwidth": 2.0})
        distance = torch.cdist(self.q, self.k).square()
        expected = (-distance / (2 * 4 * math.sqrt(3))).softmax(-1)
        torch.testing.assert_close(p, expected, atol=1e-12, rtol=1e-12)

    @pytest.mark.parametrize("degree", [2, 6])
    def test_polynomial(self, degree):
        options = {"degree": degree, "constant": 0.5, "bandwidth": 1.0}
        p = similarity.weights(self.q, self.k, self.all, similarity="polynomial", **options)
        s = (self.q @ self.k.mT / math.sqrt(3) + 0.5) ** degree
        torch.testing.assert_close(p, s / s.sum(-1, keepdim=True), atol=1e-12, rtol=1e-12)

    def test_a_query_orthogonal_to_all_keys_gets_zero(self):
        q, k = torch.zeros(1, 1, 1, 3), torch.ones(1, 1, 4, 3)
        options = {"degree": 2, "constant": 0.0, "bandwidth": 1.0}
        p = similarity.weights(q, k, torch.ones(1, 4).bool(), similarity="polynomial", **options)
        assert not p.any()

    def test_unknown(self):
        with pytest.raises(ValueError, match="unknown similarity 'cos'; known: exp, polynomial, rbf"):
            similarity.weights(self.q, self.k, self.all, similarity="cos", **self.options)


class TestCache:
    def test_slots_are_positions_of_real_tokens(self):
        start = kv_cache.empty(2, 1, 0, 1, torch.zeros(()))
        k = torch.arange(10.0).view(2, 1, 5, 1)
        mask = torch.tensor([[False, True, False, True, True], [True, True, False, False, False]])
        _, after = kv_cache.extend(start, k, k, mask=mask)
        assert after.length.tolist() == [3, 2]
        assert after.keys[0, 0, :3, 0].tolist() == [1, 3, 4]
        assert after.keys[1, 0, :2, 0].tolist() == [5, 6]

    def test_donated_slots_are_written_in_place_until_they_run_out(self):
        state = kv_cache.empty(1, 1, 2, 1, torch.zeros(()))
        one = torch.ones(1, 1, 1, 1)
        place = state.keys.data_ptr()
        for i in range(1, 6):
            _, state = kv_cache.extend(state, i * one, one, donate=True)
            assert (state.keys.data_ptr() == place) == (i <= 2)
        assert state.keys[0, 0, :5, 0].tolist() == [1, 2, 3, 4, 5]
        assert state.keys.shape[2] == 8  # 2, 4, 8

    def test_a_kept_state_takes_only_the_slots_it_needs(self):
        state = kv_cache.empty(1, 1, 7, 1, torch.zeros(()))
        _, state = kv_cache.extend(state, torch.ones(1, 1, 3, 1), torch.ones(1, 1, 3, 1))
        assert state.keys.shape[2] == 3


@pytest.mark.parametrize("kind", ["all", "causal", "mask"])
def test_gradients_of_gradients_in_a_batch(kind):
    """Those of the fused kernels are made by plain operations, for any number of rows."""
    seen = torch.ones(13, 13, dtype=torch.bool).tril(-2)  # nothing, for the first two queries
    options = {"mask": seen} if kind == "mask" else {"causal": kind == "causal"}
    inputs = [t.clone().requires_grad_() for t in (Q, K, V)]
    assert torch.autograd.gradgradcheck(lambda *given: dense.attend(*given, **options), inputs, fast_mode=True)
