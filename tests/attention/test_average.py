"""The average attention network: worked by hand, and as the paper's equations over all pairs."""

import math

import torch

import longspan
from support.mechanisms import DIM, B, N, fill, seeded, tokens


def test_by_hand():
    module = longspan.build("average(inner=1)", 1, 1).double()
    fill(module, gates__weight=0.0, gates__bias=[0.0, math.log(3)])  # i = 1/2, f = 3/4
    fill(module, feedforward__expand__weight=1.0, feedforward__expand__bias=0.0)
    fill(module, feedforward__contract__weight=2.0, feedforward__contract__bias=1.0)
    # Means 1, 2, 0 become 3, 5, 1.
    expected = tokens((0.5 + 2.25,), (1.5 + 3.75,), (-2.0 + 0.75,))
    torch.testing.assert_close(module(tokens((1,), (3,), (-4,)))[0], expected)


def test_is_the_paper_s_equations():
    module, x = seeded("average")
    g = module.feedforward(torch.stack([x[:, : t + 1].mean(1) for t in range(N)], 1))
    i, f = (torch.cat([x, g], -1) @ module.gates.weight.T + module.gates.bias).sigmoid().chunk(2, -1)
    torch.testing.assert_close(module(x)[0], i * x + f * g)
    assert module.feedforward.expand.out_features == 4 * DIM


def test_heads_play_no_part():
    (one, x), (other, _) = seeded("average", heads=1), seeded("average", heads=4, seed=1)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x)[0], other(x)[0])


def test_the_state_is_a_sum_and_a_count():
    module, x = seeded("average")
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0, [0, 5]] = False
    _, state = module(x, module.init_state(B), mask=mask)
    assert state.count.tolist() == [N - 2, N]
    torch.testing.assert_close(state.total, (x * mask[..., None]).sum(1))


def test_a_segment_does_not_suffer_from_a_large_one_before_it():
    module, x = seeded("average")
    module, x = module.float(), x.float()
    row = torch.cat([1e6 * x, x], 1)
    segments = torch.arange(2).repeat_interleave(N).expand(B, -1)
    torch.testing.assert_close(module(row, segments=segments)[0][:, N:], module(x)[0], rtol=1e-6, atol=1e-6)
