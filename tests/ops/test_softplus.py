"""softplus(x) = log(1 + e^x) is x for large x, where e^x overflows: in every op and module that computes it."""

import copy
import functools
import math

import pytest
import torch

import longspan
from longspan import backend
from longspan.attention import luna
from longspan.compat.transformers import mamba, mamba2
from longspan.ops import tensors
from longspan.ops.native.call import available
from support.tensors import data as draw

VALUES = {torch.float32: (1e2, 1e4, 3e38), torch.bfloat16: (1e2, 1e4, 3e38), torch.float16: (1e2, 1e4)}
B, N, SIZE, STATES = 2, 5, 4, 3


RATES = -draw(SIZE, STATES, seed=9).abs().float()


def selective(kind, tokens, x, soft):
    x = x[:, :tokens]
    shapes = (B, tokens, SIZE), (B, tokens, STATES), (B, tokens, STATES)
    u, b, c = (0.1 * draw(*shape, seed=seed).to(x.dtype) for seed, shape in enumerate(shapes))
    state = draw(B, SIZE, STATES, seed=3).float()
    with backend(kind):
        options = {"softplus": soft, "state": state, "return_state": True}
        return longspan.selective_scan(u, x, RATES, b, c, **options)


def mamba_scan(x, soft):
    u, b = (0.1 * draw(B, size, N, seed=size).to(x.dtype) for size in (SIZE, STATES))
    return mamba.scan(u, x.mT, RATES, b, b, delta_softplus=soft, return_last_state=True)


def mamba_step(x, soft):
    state = draw(B, SIZE, STATES, seed=3).float()
    u, b = (0.1 * draw(B, size, seed=size).to(x.dtype) for size in (SIZE, STATES))
    return mamba.step(state, u, x[:, 0].detach(), RATES, b, b, dt_softplus=soft), state


def mamba2_scan(x, soft):
    u, b = 0.1 * draw(B, N, SIZE, 3, seed=1).to(x.dtype), 0.1 * draw(B, N, SIZE, STATES, seed=2).to(x.dtype)
    options = {"dt_softplus": soft, "return_final_states": True}
    return mamba2.scan(u, x, RATES[:, 0], b, b, 16, **options)


def mamba2_step(x, soft):
    state = draw(B, SIZE, 3, STATES, seed=3).float()
    u, b = 0.1 * draw(B, SIZE, 3, seed=1).to(x.dtype), 0.1 * draw(B, SIZE, STATES, seed=2).to(x.dtype)
    dt = x[:, 0, :, None].detach().expand(-1, -1, 3)
    return mamba2.step(state, u, dt, RATES[:, :1, None].expand(-1, 3, STATES), b, b, dt_softplus=soft), state


# What computes with numbers x (B,N,SIZE), or with softplus(x).
SWITCHES = {
    "softplus": lambda x, soft: (tensors.softplus(x) if soft else x,),
    "luna": lambda x, soft: (luna.softplus(x) if soft else x,),
    **{f"scan {kind}": functools.partial(selective, kind, N) for kind in ("reference", "torch")},
    **{f"scan native {n}": functools.partial(selective, "native", n) for n in (1, N) if available("scan")},
    "mamba scan": mamba_scan,
    "mamba step": mamba_step,
    "mamba2 scan": mamba2_scan,
    "mamba2 step": mamba2_step,
}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("dtype", "value"), [(dtype, value) for dtype, values in VALUES.items() for value in values], ids=str
)
@pytest.mark.parametrize("name", SWITCHES)
def test_of_large_numbers_is_the_number(name, dtype, value):
    def outcome(soft):
        x = torch.full((B, N, SIZE), value, dtype=dtype, requires_grad=True)
        outputs = SWITCHES[name](x, soft)
        if not outputs[0].requires_grad:
            return outputs
        return *outputs, *torch.autograd.grad(sum(t.float().sum() for t in outputs), x)

    for found, wanted in zip(outcome(True), outcome(False), strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, wanted)


# Parameters that make numbers large, or so small that a decay by their product with a large one is moderate.
LARGE, SMALL = "large", "small"
DECAY = {"dt_bias": LARGE, "a_log": SMALL}
MECHANISMS = {
    "mamba": DECAY,
    "ssd": DECAY,
    "gated_deltanet": DECAY,
    "kda": DECAY,
    "log_linear": DECAY,
    "log_linear, levels": {"level_scale": LARGE, "level.weight": 1.0},
    "mamba3": {"dt_bias": LARGE, "decay.weight": SMALL, "angle.weight": 0.0},
    "mamba3, rates": {"decay.weight": LARGE, "dt_bias": SMALL, "angle.weight": 0.0},
}


@torch.no_grad()
def fill(module, values, large):
    number = {LARGE: large, SMALL: -math.log(large) - 2}
    for name, kind in values.items():
        module.get_parameter(name).fill_(number.get(kind, kind))


def near(module, x, call, tolerance):
    """Values, and gradients but of half precision, equal those in double precision, where e^100 is finite."""

    def outcome(module, x):
        x = x.detach().requires_grad_()
        y = call(module, x)
        return y, *torch.autograd.grad(y.double().sum(), x)

    pairs = zip(outcome(module, x), outcome(copy.deepcopy(module).double(), x.double()), strict=True)
    for number, (found, wanted) in enumerate(pairs):
        assert found.isfinite().all()
        assert wanted.isfinite().all()
        if number and x.dtype != torch.float32:
            continue
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance * wanted.abs().max().item())


@pytest.mark.whole
@pytest.mark.parametrize(
    ("dtype", "large", "tolerance"),
    [
        (torch.float32, 1e2, 1e-4),
        (torch.float32, 1e4, 1e-4),
        (torch.bfloat16, 1e2, 0.05),
        (torch.bfloat16, 1e4, 0.05),
        (torch.float16, 1e2, 0.01),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanisms_take_large_numbers(name, dtype, large, tolerance):
    torch.manual_seed(0)
    attention = longspan.build(name.split(",")[0], dim=8, heads=2).to(dtype)
    fill(attention, MECHANISMS[name], large)
    # Sums of 1 are what a filled weight gets.
    x = draw(2, 6, 8).softmax(-1).to(dtype)
    near(attention, x, lambda module, x: module(x)[0], tolerance)
