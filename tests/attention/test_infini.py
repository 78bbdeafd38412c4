"""Infini-attention: against loops over segments, at both ends of its gate, and what its state holds."""

import pytest
import torch
import torch.nn.functional as F

import longspan
from support.mechanisms import in_parts
from support.tensors import data

N, DIM, HEADS = 23, 8, 2
CUTS = ([1] * N, [5, 8, 10])


def build(options, gates=(0.3, -0.7), dim=DIM, heads=HEADS):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = longspan.build(f"infini({options})", dim, heads).double()
    with torch.no_grad():
        module.gate.copy_(torch.tensor(gates[:heads]))
    return module


def heads_of(module, x):
    return (
        part(x).unflatten(-1, (module.heads, -1)).transpose(0, 1) for part in (module.query, module.key, module.value)
    )


def phi(x):
    return F.elu(x) + 1


def oracle(module, x):
    """Segment by segment and head by head, x (N,dim) -> y (N,dim), and the memory (H,D,D), (H,D) at the end."""
    n, size, out = len(x), module.dim // module.heads, torch.zeros_like(x)
    memories = []
    for h, (q, k, v) in enumerate(zip(*heads_of(module, x), strict=True)):
        memory, z, g = x.new_zeros(size, size), x.new_zeros(size), module.gate[h].sigmoid()
        for b in range(0, n, module.segment):
            e = min(b + module.segment, n)
            for i in range(b, e):
                p = (k[b : i + 1] @ q[i] / size**0.5).softmax(0)
                far = (phi(q[i]) @ memory) / (phi(q[i]) @ z + module.eps)
                out[i, h * size : (h + 1) * size] = g * far + (1 - g) * (p @ v[b : i + 1])
            if e - b < module.segment:
                break
            known = torch.stack([(phi(t) @ memory) / (phi(t) @ z + module.eps) for t in k[b:e]])
            new = v[b:e] - known if module.delta else v[b:e]
            memory = memory + sum(torch.outer(phi(a), c) for a, c in zip(k[b:e], new, strict=True))
            z = z + phi(k[b:e]).sum(0)
        memories.append((memory, z))
    return module.out(out), torch.stack([m for m, _ in memories]), torch.stack([z for _, z in memories])


@pytest.mark.parametrize("options", ["", ", delta=True", ", delta=True, eps=0.7"])
@pytest.mark.parametrize("segment", [1, 4, N, 40])
def test_it_is_the_loop_over_segments_however_it_is_cut(segment, options):
    module, x = build(f"segment={segment}{options}"), data(1, N, DIM)
    expected, memory, z = oracle(module, x[0])
    torch.testing.assert_close(module(x)[0][0], expected, rtol=1e-10, atol=1e-10)
    for cuts in CUTS:
        y, state = in_parts(module, x, cuts)
        torch.testing.assert_close(y[0], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state.sums[0, ..., :-1], memory, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state.sums[0, ..., -1], z, rtol=1e-10, atol=1e-10)


def test_a_damaged_count_is_refused():
    module = build("segment=6")
    with pytest.raises(ValueError, match="is -3"):
        module(data(1, 3, DIM), module.init_state(1)._replace(position=torch.tensor([-3])))
