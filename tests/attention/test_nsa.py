"""Native sparse attention against loops over queries, and the choice that heads share."""

import pytest
import torch

from support.sparse import build, data
from support.tensors import same

N, BLOCK, TOP, WINDOW = 29, 4, 4, 5


def branches(q, k, v):
    """The three outputs of all query heads (H,N,D) that share one head of keys and values (N,D)."""
    n, scale = len(k), k.shape[-1] ** -0.5
    means = [(k[u : u + BLOCK].mean(0), v[u : u + BLOCK].mean(0)) for u in range(0, n - BLOCK + 1, BLOCK)]
    outs, chosen = [], []
    for i in range(n):
        whole = means[: (i + 1) // BLOCK]
        summary, shares = torch.zeros_like(q[:, 0]), torch.zeros(-(-n // BLOCK), dtype=q.dtype)
        if whole:
            keys, values = (torch.stack(part) for part in zip(*whole, strict=True))
            p = (q[:, i] @ keys.mT * scale).softmax(-1)
            summary = p @ values
            shares[: len(whole)] = p.sum(0).detach()
        own = i // BLOCK
        always = {0, own, max(own - 1, 0)}
        rest = sorted(set(range(own)) - always, key=lambda u, shares=shares: (-float(shares[u]), u))
        picked = always | set(rest[: TOP - len(always)])
        chosen.append(picked)
        parts = [[j for j in range(i + 1) if j // BLOCK in picked], list(range(max(0, i - WINDOW + 1), i + 1))]
        reads = [(q[:, i] @ k[part].mT * scale).softmax(-1) @ v[part] for part in parts]
        outs.append(torch.stack([summary, *reads], -1))
    return torch.stack(outs, 1), chosen


@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_three_branches_with_gates(groups):
    module = build(f"nsa(block={BLOCK}, top={TOP}, window={WINDOW}, kv_heads={groups})")
    x = data(N).requires_grad_()
    q, k, v = (part(x).unflatten(-1, (-1, 3)).transpose(1, 2) for part in (module.query, module.key, module.value))
    gates = module.gate(x).sigmoid().unflatten(-1, (2, 3)).transpose(1, 2)
    rows = []
    for b in range(len(x)):
        heads = [branches(q[b].unflatten(0, (groups, -1))[g], k[b, g], v[b, g])[0] for g in range(groups)]
        rows.append((torch.cat(heads) * gates[b][..., None, :]).sum(-1))
    expected = module.out(torch.stack(rows).transpose(1, 2).flatten(-2))
    same(module(x)[0], expected, (x, *module.parameters()))
