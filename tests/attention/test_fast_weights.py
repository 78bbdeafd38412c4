"""Fast weight programmers: worked by hand, and as the paper's equations over all pairs."""

import pytest
import torch

import longspan
from longspan.ops.linear.features import dpfp
from support.mechanisms import HEADS, B, N, fill, seeded, tokens
from support.tensors import merge_heads, split_heads


def bare(beta_bias):
    module = longspan.build("fast_weights(feature_map='relu')", 2, 1).double()
    for part in ("query", "key", "value", "out"):
        fill(module, **{f"{part}__weight": torch.eye(2)})
    fill(module, rate__weight=0.0, rate__bias=beta_bias)
    return module


def test_by_hand():
    # beta = 1/2. W_1 = [[1/2, 0], [0, 0]]; then k = q = (1/2, 1/2) reads (1/4, 0), so the error is (3/4, 1) and
    # W_2 = W_1 + [[3/16, 1/4], [3/16, 1/4]].
    expected = tokens((0.5, 0), (7 / 16, 1 / 4))
    torch.testing.assert_close(bare(0.0)(tokens((1, 0), (1, 1)))[0], expected)


def test_with_a_step_size_of_one_a_key_returns_its_last_value():
    module = bare(50.0)
    y, state = module(tokens((3, 0), (0, 5), (7, 0)), module.init_state(1))
    torch.testing.assert_close(y, tokens((3, 0), (0, 5), (7, 0)))
    torch.testing.assert_close(state.weights[0, 0], tokens((7, 0), (0, 5))[0])


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
