"""Gradients of decays, which are sums of differences: as exact where little is left of a state as elsewhere."""

import pytest
import torch

from longspan.ops.gated import recur
from longspan.ops.native.call import available


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_strong_decays_have_exact_gradients(channels, delta):
    """A token reads its own write without decay, 3,000 times the remaining write of the previous token."""
    if not available():
        pytest.skip("no native kernels here")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 67, 16) for _ in range(3))
    decay = -8.0 - torch.rand(1, 2, 67, *([16] if channels else []))
    beta, up = torch.rand(1, 2, 67) if delta else None, torch.randn(1, 2, 67, 16)
    k = torch.nn.functional.normalize(k, dim=-1)
    found = []
    for dtype in (torch.float32, torch.float64):
        given = [t if t is None else t.to(dtype) for t in (q, k, v, beta)]
        g = decay.to(dtype).requires_grad_()
        o, _ = recur(*given[:3], log_decay=g, beta=given[3])
        found.append(torch.autograd.grad(o, g, up.to(dtype))[0].double())
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-5
