"""Stick-breaking attention against its definition, and where its kernels stop."""

import pytest
import torch

from longspan import backend
from longspan.ops.native.call import available
from longspan.ops.softmax import stick_breaking
from support.sparse import build
from support.sparse import data as tokens
from support.tensors import data, kernels_agree, same

compiled = pytest.mark.skipif(not available("pattern/stick"), reason="no compiler")


def definition(q, k, v):
    """One query after the other breaks its stick, from the nearest key on."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    outs = []
    for i in range(k.shape[2] - q.shape[2], k.shape[2]):
        query, left, o = q[:, :, i - k.shape[2]], torch.ones_like(q[:, :, 0, :1]), torch.zeros_like(v[:, :, 0])
        for j in range(i - 1, -1, -1):
            share = ((query * k[:, :, j]).sum(-1, keepdim=True) * q.shape[-1] ** -0.5).sigmoid()
            o, left = o + left * share * v[:, :, j], left * (1 - share)
        outs.append(o)
    return torch.stack(outs, 2)


@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_its_definition(groups):
    module, x = build(f"stick_breaking(kv_heads={groups})"), tokens(23).requires_grad_()
    q, k, v = (part(x).unflatten(-1, (-1, 3)).transpose(1, 2) for part in (module.query, module.key, module.value))
    expected = module.out(definition(q, k, v).transpose(1, 2).flatten(-2))
    same(module(x)[0], expected, (x, *module.parameters()))


# Of outputs and gradients. Those in bfloat16 are rounded once.
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (2**-8, 2**-8)}


@compiled
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("strength", [0.1, 1.0, 8.0])
@pytest.mark.parametrize(("n", "m", "groups"), [(150, 150, 3), (77, 201, 1), (1, 70, 3)])
def test_kernels_are_the_definition(n, m, groups, strength, dtype):
    """Also where sticks are used up after a few keys."""
    q, k, v = strength * data(2, 3, n, 5), data(2, groups, m, 5, seed=1), data(2, groups, m, 4, seed=2)
    kernels_agree(stick_breaking.attend, (q, k, v), *TOLERANCES[dtype], dtype)


@compiled
def test_keys_beyond_a_used_stick_are_not_read():
    """All logits are 1, so that 13 keys leave less than 2^-24; the tile before that of a query may hold anything."""
    q = k = torch.ones(1, 1, 256, 1)
    v = data(1, 1, 256, 3).float()
    v[:, :, :64] = torch.inf
    with backend("native"):
        y = stick_breaking.attend(q, k, v)[0, 0]
    assert y[192:].isfinite().all()
    assert not y[1:64].isfinite().any()
