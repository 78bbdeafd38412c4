"""Memory-compressed attention against its definition, slot by slot, and special cases of kernels."""

import pytest
import torch

from support.sparse import build, data, heads_of, softmax
from support.tensors import same

N = 23
BOTH = pytest.mark.parametrize("causal", [True, False])
CONV, MEAN = "memory_compressed(stride={})", "memory_compressed(stride={}, pool='mean')"


def slots_of(module, tokens, taps, whole):
    """(B,N,dim) -> (B,H,S,D), one slot after the other."""
    r, n = module.stride, tokens.shape[1]
    found = []
    for start in range(0, n, r):
        part = tokens[:, start : start + r]
        if part.shape[1] < r and whole:
            break
        if module.pool == "mean":
            found.append(part.mean(1))
        else:
            weight = taps.weight.unflatten(1, (r, -1))  # (dim,R,dim)
            found.append(sum(part[:, i] @ weight[:, i].mT for i in range(part.shape[1])))
    slots = torch.stack(found, 1) if found else tokens[:, :0]
    return slots.unflatten(-1, (module.heads, -1)).transpose(1, 2)


def definition(module, x):
    taps = (getattr(module, name, None) for name in ("compress_key", "compress_value"))
    k, v = (
        slots_of(module, part(x), tap, module.causal)
        for part, tap in zip((module.key, module.value), taps, strict=True)
    )
    n, s, r = x.shape[1], k.shape[2], module.stride
    allowed = torch.tensor([[not module.causal or j * r + r - 1 <= i for j in range(s)] for i in range(n)]).view(n, s)
    if module.null:
        null = (p[:, None].expand(len(x), -1, 1, -1) for p in (module.null_key, module.null_value))
        k, v = (torch.cat([first, rest], 2) for first, rest in zip(null, (k, v), strict=True))
        allowed = torch.cat([torch.ones(n, 1, dtype=torch.bool), allowed], 1)
    (q,) = heads_of(module, x, "query")
    return module.out(softmax(allowed, q, k, v).transpose(1, 2).flatten(-2))


@BOTH
@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("form", [CONV, MEAN])
@pytest.mark.parametrize(("stride", "n"), [(1, 5), (2, 9), (3, 2), (3, 3), (3, N), (4, N), (5, N + 1), (7, 1)])
def test_it_equals_the_definition(form, stride, n, null, causal):
    module, x = build(form.format(stride)[:-1] + f", null={null})", causal=causal), data(n).requires_grad_()
    same(module(x)[0], definition(module, x), (x, *module.parameters()))
