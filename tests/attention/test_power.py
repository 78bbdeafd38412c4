"""Power attention pair by pair in float64."""

import pytest
import torch
import torch.nn.functional as F

import longspan


@pytest.mark.parametrize(("degree", "channels"), [(2, 0), (2, 3), (4, 3)])
def test_is_the_sum_over_pairs(degree, channels):
    """Over several spans of 64 tokens."""
    n, heads = 150, 2
    torch.manual_seed(0)
    module = longspan.build(f"power(degree={degree}, channels={channels}, eps=0.5)", 8, heads).double()
    x = torch.randn(2, n, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    q, k, v = (p(x).unflatten(-1, (heads, -1)).transpose(1, 2) for p in (module.query, module.key, module.value))
    total = F.logsigmoid(module.decay(x)).mT.cumsum(-1)
    weights = (q @ k.mT / q.shape[-1] ** 0.5) ** degree * (total[..., :, None] - total[..., None, :]).exp()
    weights = weights.tril()
    o = weights @ v / (weights.sum(-1, keepdim=True) + 0.5)
    right = module.out(o.transpose(1, 2).flatten(-2))
    found = module(x)[0]
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)
    leaves = [x, *module.parameters()]
    grads = [torch.autograd.grad(y.sin().sum(), leaves) for y in (found, right)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)
