"""Performer and Fourier attention: the definition without shifts, the estimated kernels, and causality."""

import copy

import pytest
import torch

import longspan
from longspan import testing
from longspan.ops.linear import random_features as rf
from longspan.ops.linear import stabilized
from support.tensors import data

MAPS = ["positive", "hyperbolic", "trigonometric", "exp", "relu"]


def make(spec, dim=8, heads=2, *, seed=0, **place):
    torch.manual_seed(seed)
    return longspan.build(spec, dim, heads, **place).double().eval()


def dense(module, x):
    """Causal attention by all pairs, from features that are not shifted."""
    q, k, v = (
        part(x).unflatten(-1, (module.heads, -1)).transpose(1, 2) for part in (module.query, module.key, module.value)
    )
    scale = 1.0 if module.map == "relu" else q.shape[-1] ** -0.25
    functions = {"positive": rf.positive, "hyperbolic": rf.hyperbolic, "trigonometric": rf.trigonometric}
    functions |= {"exp": rf.exponential, "relu": lambda x, w: rf.generalized(x, w, floor=module.floor)}
    weights = rf.estimate(q * scale, k * scale, module.projection, functions[module.map]).tril()
    o = weights / weights.sum(-1, keepdim=True) @ v
    return module.out(o.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("name", MAPS)
def test_shifts_cancel_in_the_ratio(name):
    module, x = make(f"performer(map={name!r}, features=23, eps=1e-300)"), 3 * data(2, 31, 8)
    torch.testing.assert_close(module(x)[0], dense(module, x), rtol=1e-9, atol=1e-9)


def test_fourier_estimates_the_rbf_kernel():
    module, x, context = make("fourier(features=20000, bandwidth=0.8)"), data(2, 13, 8), data(2, 5, 8, seed=1)
    kernel = make("kernel(similarity='rbf', bandwidth=0.8)")
    kernel.load_state_dict({key: t for key, t in module.state_dict().items() if key != "projection"})
    assert (module(x)[0] - kernel(x)[0]).abs().max() < 0.02
    assert (module(x, context=context)[0] - kernel(x, context=context)[0]).abs().max() < 0.02


class TestShift:
    """The running maximum of the keys' exponents: exact, finite and causal."""

    # A bound that some denominators reach, so that the ratio depends on the shift.
    spec = "performer(eps=0.3, features=7)"

    @pytest.mark.parametrize("law", ["causal", "beginning", "parallel_is_recurrent", "padding", "packed", "state"])
    def test_laws_hold_where_eps_shows_the_shift(self, law):
        row = testing.check(law, self.spec)
        assert row.status == "passed", row.note

    # Trigonometric estimates are differences, so float32 leaves them fewer digits.
    @pytest.mark.parametrize(
        ("name", "scale", "tolerance"), [("positive", 3, 1e-3), ("exp", 8, 1e-3), ("trigonometric", 3, 1e-2)]
    )
    def test_exponents_beyond_the_range_of_float32(self, name, scale, tolerance):
        """Keys whose unshifted features vanish or overflow: 40 tokens that shrink, then grow."""
        module = make(f"performer(map={name!r}, features=200)")
        x = scale * data(1, 40, 8) * torch.linspace(-4, 4, 40)[:, None].abs().double()
        keys = module._parts(module.key(x))
        assert keys.exponent is not None
        assert keys.exponent.abs().max() > 90  # e^89 is infinite in float32
        single, expected = copy.deepcopy(module).float(), module(x)[0]
        found = single(x.float())[0]
        assert found.isfinite().all()
        assert (found - expected).abs().max() < tolerance * expected.abs().max()

    def test_the_state_keeps_the_maximum_where_nothing_has_come(self):
        module = make("performer")
        state = module.init_state(2)
        assert (state.peak == -torch.inf).all()
        mask = torch.tensor([[False, False, True], [False, False, False]])
        x = data(2, 3, 8).requires_grad_()
        y, state = module(x, state, mask=mask)
        y.square().sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert state.peak.isfinite().tolist() == [[True] * 2, [False] * 2]
        # The empty row continues as a new one.
        torch.testing.assert_close(module(x, state)[0][1], module(x)[0][1])


@pytest.mark.parametrize(
    "spec", ["performer(features=9)", "performer(map='relu')", "fourier(features=50)", "polynomial"]
)
def test_the_recorded_matrix_includes_the_sums_of_the_state(spec):
    module, x, record, whole = make(spec), data(2, 12, 8), {}, {}
    _, state = module(x[:, :5], module.init_state(2))
    module(x[:, 5:], state, record=record)
    module(x, record=whole)
    torch.testing.assert_close(record["matrix"], whole["matrix"][:, :, 5:, 5:])


@pytest.mark.parametrize("spec", ["performer", "fourier", "polynomial"])
def test_the_recorded_matrix_of_a_context(spec):
    module, x, context = make(spec), data(2, 7, 8), data(2, 5, 8, seed=1)
    mask, record, seen = torch.tensor([[True] * 5, [True, False, True, True, False]]), {}, []
    module.out.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    module(x, context=context, context_mask=mask, record=record)
    values = module.value(context).unflatten(-1, (2, -1)).transpose(1, 2)
    torch.testing.assert_close((record["matrix"] @ values).transpose(1, 2).flatten(-2), seen[0])
    assert torch.equal(record["matrix"][1, 0, 0] != 0, mask[1])


class TestRows:
    @pytest.mark.parametrize("name", ["performer", "fourier"])
    def test_redraws_are_functions_of_their_number(self, name):
        module, x = make(name), data(2, 5, 8)
        first, before = module(x)[0], torch.get_rng_state()
        module.redraw(3)
        third = module(x)[0]
        assert (third - first).abs().max() > 1e-6
        assert torch.equal(module(x)[0], third)
        module.redraw(0)
        torch.testing.assert_close(module(x)[0], first, rtol=1e-6, atol=1e-6)  # the first rows were rounded to float32
        again = make(name)
        again.redraw(3)
        assert torch.equal(again(x)[0], third)
        assert torch.equal(torch.get_rng_state(), before)


def test_features_are_counted_in_rows():
    sizes = {name: make(f"performer(map={name!r}, features=5)").init_state(1)[0].shape[2] for name in MAPS}
    assert sizes == {"positive": 5, "hyperbolic": 10, "trigonometric": 10, "exp": 5, "relu": 5}


def test_small_denominators_keep_their_sign_and_zero_counts_as_positive():
    found = stabilized.divide(torch.tensor([[3.0, -2.0], [3.0, -0.1], [3.0, 0.0], [3.0, 0.1], [3.0, 2.0]]), 0.5)
    assert found[:, 0].tolist() == [-1.5, -6.0, 6.0, 6.0, 1.5]
