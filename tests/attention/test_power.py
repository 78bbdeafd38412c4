"""Power attention, worked by hand, and pair by pair in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

import longspan
from support.hand import plain, read
from support.mechanisms import fill


def test_by_hand():
    for degree in (2, 4):
        module = plain(f"power(degree={degree}, eps=0.0)")
        # alpha = 1/2 for both tokens; the second one weighs the first key by (2 * 1)^p / 2, its own by (2 * 2)^p.
        fill(module, decay__weight=0.0, decay__bias=0.0)
        first, second = 2**degree / 2, 4**degree
        assert read(module, 1.0, 2.0) == pytest.approx([1.0, (first + 2 * second) / (first + second)])


@pytest.mark.parametrize(("degree", "channels"), [(2, 0), (2, 3), (4, 3)])
@pytest.mark.parametrize("around", ["", "mask", "segments", "mask segments"])
def test_is_the_sum_over_pairs(degree, channels, around):
    """Over several spans of 64 tokens."""
    n, heads = 150, 2
    torch.manual_seed(0)
    module = longspan.build(f"power(degree={degree}, channels={channels}, eps=0.5)", 8, heads).double()
    x = torch.randn(2, n, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    mask = torch.rand(2, n, generator=torch.Generator().manual_seed(2)) < 0.8
    segments = torch.tensor([[0] * 64 + [1] * 30 + [2] * 56, [0] * n])
    given = {name: t for name, t in (("mask", mask), ("segments", segments)) if name in around}
    q, k, v = (p(x).unflatten(-1, (heads, -1)).transpose(1, 2) for p in (module.query, module.key, module.value))
    steps = F.logsigmoid(module.decay(x)).mT
    steps = steps if "mask" not in given else steps.masked_fill(~mask[:, None], 0.0)
    total = steps.cumsum(-1)
    weights = (q @ k.mT / q.shape[-1] ** 0.5) ** degree * (total[..., :, None] - total[..., None, :]).exp()
    weights = weights.tril()
    if "mask" in given:
        weights = weights * mask[:, None, None]
    if "segments" in given:
        weights = weights * (segments[:, None, :, None] == segments[:, None, None])
    o = weights @ v / (weights.sum(-1, keepdim=True) + 0.5)
    right = module.out(o.transpose(1, 2).flatten(-2))
    found = module(x, **given)[0]
    if "mask" in given:
        right = right.masked_fill(~mask[..., None], 0.0)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)
    leaves = [x, *module.parameters()]
    grads = [torch.autograd.grad(y.sin().sum(), leaves) for y in (found, right)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_the_state_has_each_product_once():
    for degree in (2, 4):
        sums = longspan.build(f"power(degree={degree}, channels=5)", 8, 2).init_state(1).sums
        assert sums.shape == (1, 2, math.comb(4 + degree, degree), 5)
