"""Mechanisms with the delta rule: identities between them, and initial decays."""

import math

import pytest
import torch
import torch.nn.functional as F

import longspan
from support.tensors import close, data


class TestMechanisms:
    x = data(2, 23, 8)

    def test_gated_deltanet_without_decay_and_gate_is_deltanet(self):
        torch.manual_seed(0)
        plain = longspan.build("deltanet", 8, 2).double()
        module = longspan.build("gated_deltanet(expand_v=1.0, gate=False)", 8, 2).double()
        assert module.load_state_dict(plain.state_dict(), strict=False).unexpected_keys == []
        assert (module(self.x)[0] - plain(self.x)[0]).abs().max() > 1e-3
        with torch.no_grad():
            module.a_log.fill_(-math.inf)
        close(module(self.x)[0], plain(self.x)[0], 1e-12)

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
        close(module(self.x)[0], shared(self.x)[0], 1e-12)
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
