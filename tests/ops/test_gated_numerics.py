"""Decay and the delta rule at the limits of their numbers: finite, and equal to float64 within a stated bound."""

import pytest
import torch
import torch.nn.functional as F

import longspan
from longspan.ops import gated

BACKENDS = ("torch", "native")
LONG = 4099  # tokens, a prime
# Relative to the largest expected value: of float32 (6e-8 for one operation) in sums of some hundred terms.
SINGLE = 1e-5


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def operands(n, dtype=torch.float32, *, heads=2, d=8, e=4, beta=None, spread=None):
    """In ``dtype``: q (1,heads,n,d), unit keys, v (1,heads,n,e), beta in (0,1) or constant.

    ``spread``: how far the keys are from one common direction; None for independent ones.
    """
    keys = randn(1, heads, n, d, seed=1)
    if spread is not None:
        keys = randn(1, heads, 1, d, seed=4) + spread * keys
    steps = randn(1, heads, n, seed=3).sigmoid() if beta is None else torch.full((1, heads, n), beta).double()
    given = {
        "q": randn(1, heads, n, d),
        "k": F.normalize(keys, dim=-1),
        "v": randn(1, heads, n, e, seed=2),
        "beta": steps,
    }
    return {name: t.to(dtype) for name, t in given.items()}


def exact(given, **options):
    """The loop in float64."""
    wide = {name: t.double() for name, t in given.items()}
    with longspan.backend("reference"):
        return gated.recur(**wide, **options)


def measured(backend, given, **options):
    """The same on a backend, in the operands' own precision; skips where it does not serve."""
    with longspan.backend(backend):
        try:
            return gated.recur(**given, **options)
        except ValueError as error:
            if f"backend {backend!r}" not in str(error):
                raise
            pytest.skip(str(error))


def assert_close(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all()
        assert (a.double() - b.double()).abs().max() <= tolerance * b.abs().max()


def strong(shape, strengths=(0.0, -1e-12, -0.1, -50.0, -1e4, -float("inf"))):
    """Logarithms of decays of every strength, mixed at random."""
    picks = torch.randint(len(strengths), shape, generator=torch.Generator().manual_seed(7))
    return torch.tensor(strengths)[picks]


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
class TestStrongDecay:
    def given(self, channels, delta, decay):
        given = operands(197) | {"log_decay": decay((1, 2, 197, 8) if channels else (1, 2, 197))}
        if not delta:
            del given["beta"]
        return given | {"state": randn(1, 2, 8, 4, seed=5).float()}

    def test_of_every_strength(self, backend, channels, delta):
        given = self.given(channels, delta, strong)
        assert_close(measured(backend, given), exact(given), SINGLE)

    @pytest.mark.parametrize("strength", [-50.0, -1e4, -float("inf")])
    def test_everywhere(self, backend, channels, delta, strength):
        given = self.given(channels, delta, lambda shape: torch.full(shape, strength))
        found = measured(backend, given)
        assert_close(found, exact(given), SINGLE)
        # Each token sees itself alone.
        q, k, v = (given[name] for name in "qkv")
        alone = (q * k).sum(-1, keepdim=True) / 8**0.5 * v * (given["beta"][..., None] if delta else 1)
        assert_close(found[:1], [alone], SINGLE)

    def test_gradients(self, backend, channels, delta):
        """Also that of a decay which forgets everything."""
        given = self.given(channels, delta, strong)
        found, expected = [], []
        for outputs, wide in ((found, False), (expected, True)):
            inputs = {name: (t.double() if wide else t).requires_grad_() for name, t in given.items()}
            o, state = exact(inputs) if wide else measured(backend, inputs)
            outputs += torch.autograd.grad(o.square().sum() + state.sum(), list(inputs.values()))
        assert_close(found, expected, 10 * SINGLE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spread", [0.01, 0.3])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_keys_that_are_nearly_equal(backend, spread, decay):
    """A chunk's triangular system is then as far from the identity as it gets: beta k_i . k_j = 0.99 everywhere."""
    given = operands(LONG, beta=0.99, spread=spread)
    shapes = {"none": None, "head": (1, 2, LONG), "channel": (1, 2, LONG, 8)}
    if shapes[decay]:
        given["log_decay"] = -0.01 * randn(*shapes[decay], seed=6).abs().float()
    assert_close(measured(backend, given), exact(given), 5 * SINGLE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("delta", [True, False])
def test_a_long_sequence_that_forgets_little(backend, delta):
    """A sum of thousands of terms whose decay, e^-0.001 a token, is almost 1."""
    given = operands(LONG) | {"log_decay": -0.001 * randn(1, 2, LONG, seed=6).abs().float()}
    if not delta:
        del given["beta"]
    assert_close(measured(backend, given), exact(given), 5 * SINGLE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_turns_over_at_each_token(backend):
    """beta |k|^2 is almost 2 and the keys are equal: each of the 1000 tokens that are remembered adds its rounding."""
    given = operands(LONG, beta=1.999, spread=0.0)
    assert_close(measured(backend, given), exact(given), 3000 * torch.finfo(torch.float32).eps)
