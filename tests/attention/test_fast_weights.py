"""Fast weight programmers as the paper's equations over all pairs."""

import pytest
import torch

from longspan.ops.linear.features import dpfp
from support.mechanisms import HEADS, B, N, fill, seeded
from support.tensors import merge_heads, split_heads


def test_is_the_loop_of_the_paper():
    module, x = seeded("fast_weights")
    q, k, v = (split_heads(project(x)) for project in (module.query, module.key, module.value))
    q, k = (dpfp(t, 3) / dpfp(t, 3).sum(-1, keepdim=True) for t in (q, k))
    beta, w = module.rate(x).sigmoid().mT, torch.zeros(B, HEADS, 4, 24, dtype=torch.float64)
    y = []
    for t in range(N):
        old = torch.einsum("bhef,bhf->bhe", w, k[:, :, t])
        new = beta[:, :, t, None] * v[:, :, t] + (1 - beta[:, :, t, None]) * old
        w = w + torch.einsum("bhe,bhf->bhef", new - old, k[:, :, t])
        y.append(torch.einsum("bhef,bhf->bhe", w, q[:, :, t]))
    torch.testing.assert_close(module(x)[0], module.out(merge_heads(torch.stack(y, 2))))


def test_the_sum_rule_is_linear_attention():
    (module, x), (linear, _) = seeded("fast_weights(rule='sum', feature_map='elu')"), seeded("linear")
    linear.load_state_dict(module.state_dict(), strict=False)
    fill(linear, **{f"{part}__bias": 0.0 for part in ("query", "key", "value", "out")})
    torch.testing.assert_close(module(x)[0], linear(x)[0])


@pytest.mark.parametrize("spec", ["fast_weights", "fast_weights(rule='sum', nu=1)"])
def test_a_token_without_features_reads_and_writes_nothing(spec):
    module, x = seeded(spec)
    holes = x.clone()
    holes[:, [0, 4, 5]] = 0.0
    holes.requires_grad_()
    y, state = module(holes, module.init_state(B))
    assert not y[:, [0, 4, 5]].any()
    rest = torch.tensor([t for t in range(N) if t not in (0, 4, 5)])
    expected, after = module(x[:, rest], module.init_state(B))
    torch.testing.assert_close((y[:, rest], state), (expected, after))
    y.square().sum().backward()
    assert holes.grad.isfinite().all()
