"""PaTH attention: its memory, and its kernels."""

import pytest
import torch

from longspan.ops.backends import watch
from longspan.ops.softmax import path
from support.tensors import data


def operands(n=23, heads=2, groups=1, dim=3):
    q, k, v = data(2, heads, n, dim), data(2, groups, n, dim, seed=1), data(2, groups, n, 4, seed=2)
    w = torch.nn.functional.normalize(data(2, groups, n, dim, seed=3), dim=-1)
    return [t.requires_grad_() for t in (q, k, v, w, 2 * data(2, groups, n, seed=4).sigmoid())]


def test_memory_grows_less_than_the_pairs(monkeypatch):
    monkeypatch.setattr(path, "CHUNK", 4)
    given, kept = operands(n=512), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        path.attend(*given)
    assert sum(kept) < 2 * 512 * 512


@pytest.mark.parametrize(("groups", "n", "dim"), [(1, 65, 3), (2, 200, 16), (1, 333, 64)])
def test_kernels_equal_the_chunks_in_torch(groups, n, dim):
    """In values and gradients, for several chunks, the last of them partly filled."""
    wide = operands(n, 2, groups, dim)
    right = path.attend(*wide)[0]
    narrow = [t.detach().float().requires_grad_() for t in wide]
    with watch() as used:
        found = path.causal(*narrow)
    if [use.backend for use in used] != ["native"]:
        pytest.skip(f"no native kernels here: {used[0].why_not}")
    up = data(*right.shape, seed=9)
    grads = torch.autograd.grad(found, narrow, up.float()), torch.autograd.grad(right, wide, up)
    for ours, theirs in zip((found, *grads[0]), (right, *grads[1]), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-6 * max(1.0, theirs.abs().max().item()))
