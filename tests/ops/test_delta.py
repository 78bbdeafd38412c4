"""The delta rule and its mechanisms: small cases by hand, and identities between them."""

import math

import pytest
import torch
import torch.nn.functional as F

import longspan
from longspan import decay_attention, delta_rule


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(n, *, heads=4, groups=4, d=6, e=5):
    """q, k (2,G,n,d) with unit keys, v (2,H,n,e), beta (2,H,n)."""
    q, k = randn(2, groups, n, d), F.normalize(randn(2, groups, n, d, seed=1), dim=-1)
    return {"query": q, "key": k, "value": randn(2, heads, n, e, seed=2), "beta": randn(2, heads, n, seed=3).sigmoid()}


def exactly(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


class TestByHand:
    """Two tokens x = (1, b), whose key is always (1, 0) and whose value is (silu(b), silu(1))."""

    X = torch.tensor([[[1.0, 3.0], [1.0, -2.0]]], dtype=torch.float64)

    @staticmethod
    def silu(x):
        return x / (1 + math.exp(-x))

    @staticmethod
    def layer(spec):
        module = longspan.build(spec, 2, 1).double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
            module.query.weight[0, 0] = module.key.weight[0, 0] = 1.0
            module.value.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
            module.norm.weight.fill_(1.0)
            module.out.weight.copy_(torch.eye(2))
        return module

    def expected(self, remains, written, gate):
        """The second output, where the first value weighs ``remains`` and the second ``written``."""
        a = (remains * self.silu(3) + written * self.silu(-2)) / math.sqrt(2)
        b = (remains + written) * self.silu(1) / math.sqrt(2)
        size = math.sqrt((a * a + b * b) / 2 + 1e-5)
        return [gate * a / size, gate * b / size]

    def test_gated_deltanet(self):
        """softplus(0) = log 2, and e^a = 1: the decay is 1/2. Without weights the gate is silu(0) = 0."""
        module = self.layer("gated_deltanet(convolution=0, expand_v=1.0)")
        assert not module(self.X)[0].any()
        with torch.no_grad():
            module.out_gate.weight[:, 0] = 2.0
        expected = self.expected(1 / 8, 1 / 2, self.silu(2))
        assert module(self.X)[0][0, 1].tolist() == pytest.approx(expected, abs=2e-5)

    def test_kda(self):
        """The gate is sigmoid(0) = 1/2. Only the first channel of the keys matters, with e^a = 2: a decay of 1/4."""
        module = self.layer("kda(convolution=0)")
        with torch.no_grad():
            module.a_log.fill_(math.log(2))
            module.dt_bias[0, 1] = 9.0
        expected = self.expected(1 / 16, 1 / 2, 1 / 2)
        assert module(self.X)[0][0, 1].tolist() == pytest.approx(expected, abs=2e-5)

    def test_the_convolution_comes_first(self):
        """A weight on the previous token alone: at the second token, query, key and value are those of the first."""
        module = self.layer("deltanet(convolution=2)")
        with torch.no_grad():
            module.mix.weight[:, 0] = 1.0
        y, state = module(self.X, module.init_state(1))
        assert y[0, 0].tolist() == [0, 0]
        assert y[0, 1].tolist() == pytest.approx(self.expected(1, 0, 1), abs=2e-5)
        assert state.recent[0, 0].tolist() == [1, 0, 1, 0, -2, 1]


class TestIdentities:
    """Between the forms of one recurrence."""

    given = operands(37)
    decay = -randn(2, 4, 37, seed=4).abs()

    @pytest.mark.parametrize("beta", [True, False])
    def test_tied_channels_are_a_decay_per_head(self, beta):
        """KDA with one decay for all channels is the gated delta rule."""
        given = dict(self.given)
        function = delta_rule if beta else decay_attention
        if not beta:
            del given["beta"]
        tied = self.decay[..., None].expand(-1, -1, -1, 6)
        found = function(**given, log_decay=tied, return_state=True)
        exactly(found, function(**given, log_decay=self.decay, return_state=True))

    @pytest.mark.parametrize("shape", [(2, 4, 37), (2, 4, 37, 6)])
    def test_a_decay_of_one_is_none(self, shape):
        still = torch.zeros(shape, dtype=torch.float64)
        found = delta_rule(**self.given, log_decay=still, return_state=True)
        exactly(found, delta_rule(**self.given, return_state=True))

    def test_a_constant_decay_per_head_is_retention(self):
        """o_t = sum_s gamma^(t-s) (q_t . k_s) v_s, the parallel form of RetNet (2307.08621), eq. 5."""
        q, k, v = (self.given[name] for name in ("query", "key", "value"))
        gamma = 1 - 2.0 ** (-5 - torch.arange(4, dtype=torch.float64))
        decay = gamma.log()[None, :, None].expand(2, -1, 37)
        distance = torch.arange(37)[:, None] - torch.arange(37)
        weights = torch.where(distance >= 0, gamma[:, None, None] ** distance, 0)
        exactly(decay_attention(q, k, v, log_decay=decay, scale=1.0), (q @ k.mT * weights) @ v)

    @pytest.mark.parametrize("decayed", [True, False])
    def test_a_whole_step_reads_back_what_it_wrote(self, decayed):
        given = {**self.given, "query": self.given["key"], "beta": torch.ones(2, 4, 37).double()}
        o = delta_rule(**given, log_decay=self.decay if decayed else None, scale=1.0)
        exactly(o, given["value"])

    def test_the_same_key_keeps_its_last_value(self):
        keys = torch.eye(6).double()[[0, 1, 0, 2, 1, 0]].expand(2, 4, -1, -1)
        values, ones = randn(2, 4, 6, 5), torch.ones(2, 4, 6).double()
        _, state = delta_rule(keys, keys, values, beta=ones, return_state=True)
        exactly(state[:, :, :3], values[:, :, [5, 4, 3]])
        assert not state[:, :, 3:].any()

    def test_a_step_of_two_changes_a_sign(self):
        """What ``negative`` is for: a parity, kept along one key."""
        key = torch.tensor([[[[0.6, 0.8]]]], dtype=torch.float64).expand(1, 1, 7, 2)
        bits = torch.tensor([[[0, 1, 1, 0, 1, 1, 1]]]).double()
        state = key[:, :, 0, :, None] * torch.ones(1, 1, 1, 1).double()
        o = delta_rule(key, key, torch.zeros(1, 1, 7, 1).double(), beta=2 * bits, state=state, scale=1.0)
        exactly(o.flatten(), (-1.0) ** bits.cumsum(-1).flatten())


class TestMechanisms:
    x = randn(2, 23, 8)

    @staticmethod
    def given(module, weights):
        missing = module.load_state_dict(weights, strict=False)
        assert missing.unexpected_keys == []
        return module

    def test_gated_deltanet_without_decay_and_gate_is_deltanet(self):
        torch.manual_seed(0)
        plain = longspan.build("deltanet", 8, 2).double()
        module = longspan.build("gated_deltanet(expand_v=1.0, gate=False)", 8, 2).double()
        self.given(module, plain.state_dict())
        assert (module(self.x)[0] - plain(self.x)[0]).abs().max() > 1e-3
        with torch.no_grad():
            module.a_log.fill_(-math.inf)
        exactly(module(self.x)[0], plain(self.x)[0])

    def test_shared_key_heads_are_equal_key_heads(self):
        torch.manual_seed(0)
        shared = longspan.build("gated_deltanet(key_heads=2, expand_k=1.5)", 8, 4).double()
        module = longspan.build("gated_deltanet(expand_k=1.5)", 8, 4).double()
        weights = shared.state_dict()

        def copied(rows):
            return rows.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)

        weights |= {name: copied(weights[name]) for name in ("query.weight", "key.weight")}
        q, k, v = weights["mix.weight"].split(shared.widths)
        weights["mix.weight"] = torch.cat([copied(q), copied(k), v])
        module.load_state_dict(weights)
        exactly(module(self.x)[0], shared(self.x)[0])
        assert shared.init_state(1).sums.shape == (1, 4, 3, 4)

    @pytest.mark.parametrize("spec", ["gated_deltanet", "kda", "kda(lower_bound=-5.0)"])
    def test_decays_start_where_the_papers_put_them(self, spec):
        torch.manual_seed(0)
        module = longspan.build(spec, 512, 128)
        rate, step = module.a_log.exp(), F.softplus(module.dt_bias)
        low, high = {"gated_deltanet": (0, 16), "kda": (1, 16)}.get(spec, (1, 1))
        assert low <= rate.min() < low + 1
        assert rate.max() <= high + 1e-5
        assert rate.mean().item() == pytest.approx((low + high) / 2, rel=0.15)
        assert 0.999e-3 <= step.min() <= step.max() <= 0.1001
        assert step.log10().mean().item() == pytest.approx(-2, abs=0.15)
        assert module.a_log.isfinite().all()
