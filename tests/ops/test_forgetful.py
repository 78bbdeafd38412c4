"""Kernels that leave blocks of keys out, since little of the weights is left for them: forgetting and sticks."""

import math

import pytest
import torch

from longspan import backend
from longspan.ops.native.call import available
from longspan.ops.softmax import forgetting, stick_breaking
from support.tensors import data, kernels_agree

forgets = pytest.mark.skipif(not available("pattern"), reason="no compiler")
breaks = pytest.mark.skipif(not available("pattern/stick"), reason="no compiler")


@forgets
@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
@pytest.mark.parametrize(("n", "m", "groups"), [(300, 300, 3), (77, 401, 1)])
def test_forgetting_kernels_are_the_reference(n, m, groups, strength):
    """Also where gates are so strong that most blocks are left out."""
    q, k, v = data(2, 3, n, 5), data(2, groups, m, 5, seed=1), data(2, groups, m, 4, seed=2)
    gates = -strength * data(2, 3, m, seed=3).abs()

    def call(q, k, v, gates):
        return forgetting.attend(q, k, v, gates.double().cumsum(-1))

    kernels_agree(call, (q, k, v, gates), 1e-5, 2e-4)


@forgets
def test_forgotten_blocks_that_are_left_out_hold_less_than_a_rounding():
    """Whatever they hold, even infinity, they add nothing; the blocks within reach add what they hold."""
    q, k, v = (data(1, 1, 512, 4, seed=s).float() for s in range(3))
    gates = torch.full((1, 1, 512), -1.0, dtype=torch.float64).cumsum(-1)
    bound = 2 * float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) / 2 + math.log(512) + 24 * math.log(2)
    assert 128 < bound + 128 < 384, "the last block of queries must reach some blocks and not others"
    v[:, :, :128] = torch.inf
    with backend("native"):
        y = forgetting.attend(q, k, v, gates)[0, 0]
    assert y[384:].isfinite().all()
    assert not y[:128].isfinite().any()


# Of outputs and gradients. Those in bfloat16 are rounded once.
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (2**-8, 2**-8)}


@breaks
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("strength", [0.1, 1.0, 8.0])
@pytest.mark.parametrize(("n", "m", "groups"), [(150, 150, 3), (77, 201, 1), (1, 70, 3)])
def test_stick_kernels_are_the_reference(n, m, groups, strength, dtype):
    """Also where sticks are used up after a few keys."""
    q, k, v = strength * data(2, 3, n, 5), data(2, groups, m, 5, seed=1), data(2, groups, m, 4, seed=2)
    kernels_agree(stick_breaking.attend, (q, k, v), *TOLERANCES[dtype], dtype)


@breaks
def test_keys_beyond_a_used_stick_are_not_read():
    """All logits are 1, so that 13 keys leave less than 2^-24; the tile before that of a query may hold anything."""
    q = k = torch.ones(1, 1, 256, 1)
    v = data(1, 1, 256, 3).float()
    v[:, :, :64] = torch.inf
    with backend("native"):
        y = stick_breaking.attend(q, k, v)[0, 0]
    assert y[192:].isfinite().all()
    assert not y[1:64].isfinite().any()
