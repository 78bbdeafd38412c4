"""PaTH attention against products of its maps."""

import pytest
import torch

from longspan.ops.backends import watch
from longspan.ops.softmax import path
from support.tensors import data, same


def definition(q, k, v, w, beta):
    """Every pair with the product of the maps between them: (B,H,N,D) each, w (B,H,N,D), beta (B,H,N)."""
    n, heads = q.shape[2], q.shape[1]
    k, v, w, beta = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v, w, beta))
    maps = torch.eye(q.shape[-1], dtype=q.dtype) - beta[..., None, None] * w[..., :, None] * w[..., None, :]
    outs = []
    for i in range(n):
        logits = []
        for j in range(i + 1):
            key = k[:, :, j]
            for step in range(j + 1, i + 1):
                key = (maps[:, :, step] @ key[..., None])[..., 0]
            logits.append((q[:, :, i] * key).sum(-1) * q.shape[-1] ** -0.5)
        outs.append((torch.stack(logits, -1).softmax(-1)[..., None] * v[:, :, : i + 1]).sum(2))
    return torch.stack(outs, 2)


def operands(n=23, heads=2, groups=1, dim=3):
    q, k, v = data(2, heads, n, dim), data(2, groups, n, dim, seed=1), data(2, groups, n, 4, seed=2)
    w = torch.nn.functional.normalize(data(2, groups, n, dim, seed=3), dim=-1)
    return [t.requires_grad_() for t in (q, k, v, w, 2 * data(2, groups, n, seed=4).sigmoid())]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_it_is_softmax_over_moved_keys(groups, chunk, monkeypatch):
    monkeypatch.setattr(path, "CHUNK", chunk)
    given = operands(groups=groups)
    same(path.attend(*given)[0], definition(*given), given)


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
