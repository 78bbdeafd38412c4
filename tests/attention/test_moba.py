"""Mixture of block attention against a loop over queries, and against flash-linear-attention's definition."""

import pytest
import torch

from support.sparse import build, data
from support.tensors import same

N = 29


def choice(q, k, block, top):
    """The blocks of each query of one head, by sorting: q, k (N,D)."""
    found = []
    for i, query in enumerate(q):
        own = i // block
        fits = [(-float(query @ k[u * block : (u + 1) * block].mean(0)), u) for u in range(own)]
        found.append({own, *(u for _, u in sorted(fits)[: top - 1])})
    return found


@pytest.mark.parametrize(("block", "top", "groups"), [(4, 3, 2), (5, 2, 1), (3, 4, 2), (1, 2, 2)])
def test_it_is_softmax_over_the_blocks_with_the_best_means(block, top, groups):
    module, x = build(f"moba(block={block}, top={top}, kv_heads={groups})"), data(N).requires_grad_()
    q, k, v = (part(x).unflatten(-1, (-1, 3)).transpose(1, 2) for part in (module.query, module.key, module.value))
    k, v = (t.repeat_interleave(2 // groups, 1) for t in (k, v))
    rows = []
    for b in range(len(x)):
        for h in range(2):
            seen = torch.tensor(
                [
                    [j <= i and j // block in own for j in range(N)]
                    for i, own in enumerate(choice(q[b, h].detach(), k[b, h].detach(), block, top))
                ]
            )
            p = (q[b, h] @ k[b, h].mT * 3**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
            rows.append(p @ v[b, h])
    expected = module.out(torch.stack(rows).view(len(x), 2, N, 3).transpose(1, 2).flatten(-2))
    same(module(x)[0], expected, (x, *module.parameters()))


def test_equal_means_take_the_first_blocks():
    """Whatever number of blocks there is: queries are 0, so that only the rule for ties decides."""
    module, x = build("moba(block=2, top=2)"), data(N)
    torch.nn.init.zeros_(module.query.weight)
    torch.nn.init.zeros_(module.query.bias)
    y = module(x)[0]
    for n in (5, 8, 27):
        torch.testing.assert_close(module(x[:, :n])[0], y[:, :n], rtol=0, atol=1e-14)
    v = module.value(x)
    torch.testing.assert_close(y[:, 27], module.out((v[:, :2].sum(1) + v[:, 26:28].sum(1)) / 4))
