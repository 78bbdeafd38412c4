"""The forgetting transformer against its definition, and what its kernels leave out."""

import math

import pytest
import torch

from longspan import backend
from longspan.ops.native.call import available
from longspan.ops.softmax import forgetting
from support.sparse import build
from support.sparse import data as tokens
from support.tensors import close, data, kernels_agree, same

compiled = pytest.mark.skipif(not available("pattern"), reason="no compiler")


def definition(q, k, v, log_gates):
    """Every pair with its own sum of gates: (B,H,N,D) each, log_gates (B,H,N)."""
    n, heads = q.shape[2], q.shape[1]
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    rows = []
    for i in range(n):
        fall = torch.stack([log_gates[:, :, j + 1 : i + 1].sum(-1) for j in range(i + 1)], -1)
        logits = (q[:, :, i, None] * k[:, :, : i + 1]).sum(-1) * q.shape[-1] ** -0.5 + fall
        rows.append((logits.softmax(-1)[..., None] * v[:, :, : i + 1]).sum(2))
    return torch.stack(rows, 2)


@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_its_definition(groups):
    module, x = build(f"forgetting(kv_heads={groups})"), tokens(29).requires_grad_()
    q, k, v = (part(x).unflatten(-1, (-1, 3)).transpose(1, 2) for part in (module.query, module.key, module.value))
    o = definition(q, k, v, torch.nn.functional.logsigmoid(module.forget(x)).transpose(1, 2))
    same(module(x)[0], module.out(o.transpose(1, 2).flatten(-2)), (x, *module.parameters()))


def test_without_forgetting_it_is_softmax():
    module, x = build("forgetting"), tokens(29)
    torch.nn.init.zeros_(module.forget.weight)
    torch.nn.init.constant_(module.forget.bias, 80.0)
    same_weights = build("softmax")
    same_weights.load_state_dict({k: v for k, v in module.state_dict().items() if not k.startswith("forget")})
    close(module(x)[0], same_weights(x)[0])


@compiled
@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
@pytest.mark.parametrize(("n", "m", "groups"), [(300, 300, 3), (77, 401, 1)])
def test_kernels_are_the_definition(n, m, groups, strength):
    """Also where gates are so strong that most blocks are left out."""
    q, k, v = data(2, 3, n, 5), data(2, groups, m, 5, seed=1), data(2, groups, m, 4, seed=2)
    gates = -strength * data(2, 3, m, seed=3).abs()

    def call(q, k, v, gates):
        return forgetting.attend(q, k, v, gates.double().cumsum(-1))

    kernels_agree(call, (q, k, v, gates), 1e-5, 2e-4)


@compiled
def test_blocks_that_are_left_out_hold_less_than_a_rounding():
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
