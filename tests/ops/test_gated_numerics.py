"""Decay and the delta rule at the limits of their numbers: finite, and equal to float64 within a stated bound.

A law of ``laws.py`` has decays of every strength side by side.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import longspan
from longspan.ops import gated
from longspan.testing.pairs import all_pairs
from support.tensors import data as randn

BACKENDS = ("torch", "native")
LONG = 4099  # tokens, a prime
# Relative to the largest expected value: of float32 (6e-8 for one operation) in sums of some hundred terms.
SINGLE = 1e-5


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
    wide = {name: None if t is None else t.double() for name, t in given.items()}
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


@pytest.mark.parametrize(
    "row",
    all_pairs(backend=BACKENDS, channels=(True, False), delta=(True, False), strength=(-50.0, -1e4, -float("inf"))),
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_strong_decay_everywhere_lets_each_token_see_itself_alone(row):
    backend, channels, delta, strength = row.values()
    given = operands(197) | {"log_decay": torch.full((1, 2, 197, 8) if channels else (1, 2, 197), strength)}
    beta = given["beta"][..., None] if delta else 1
    given |= {"state": randn(1, 2, 8, 4, seed=5).float(), "beta": given["beta"] if delta else None}
    found = measured(backend, given)
    assert_close(found, exact(given), SINGLE)
    q, k, v = (given[name] for name in "qkv")
    assert_close(found[:1], [(q * k).sum(-1, keepdim=True) / 8**0.5 * v * beta], SINGLE)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_strong_decays_have_exact_gradients(channels, delta):
    """A token reads its own write without decay, 3,000 times the remaining write of the previous token."""
    given = operands(67, d=16, e=16) | {"log_decay": -8.0 - randn(1, 2, 67, *([16] if channels else [])).abs().float()}
    given["beta"] = given["beta"] if delta else None
    found = []
    for call in (partial(measured, "native"), exact):
        g = given["log_decay"].clone().requires_grad_()
        o, _ = call(given | {"log_decay": g})
        found.append(torch.autograd.grad(o, g, randn(1, 2, 67, 16, seed=9).to(o))[0].double())
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-5


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
    given["beta"] = given["beta"] if delta else None
    assert_close(measured(backend, given), exact(given), 5 * SINGLE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_turns_over_at_each_token(backend):
    """beta |k|^2 is almost 2 and the keys are equal: each of the 1000 tokens that are remembered adds its rounding."""
    given = operands(LONG, beta=1.999, spread=0.0)
    assert_close(measured(backend, given), exact(given), 3000 * torch.finfo(torch.float32).eps)
