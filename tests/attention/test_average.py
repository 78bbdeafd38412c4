"""The average attention network as the paper's equations over all pairs."""

import torch

from support.mechanisms import DIM, B, N, seeded


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


def test_a_segment_does_not_suffer_from_a_large_one_before_it():
    module, x = seeded("average")
    module, x = module.float(), x.float()
    row = torch.cat([1e6 * x, x], 1)
    segments = torch.arange(2).repeat_interleave(N).expand(B, -1)
    torch.testing.assert_close(module(row, segments=segments)[0][:, N:], module(x)[0], rtol=1e-6, atol=1e-6)
