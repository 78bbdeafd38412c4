"""Infini-attention: against loops over segments, at both ends of its gate, and what its state holds."""

import math

import pytest
import torch
import torch.nn.functional as F

import longspan
from support.mechanisms import in_parts
from support.tensors import data

N, DIM, HEADS = 23, 8, 2
CUTS = ([N], [1] * N, [5, 8, 10], [1, 21, 1], [20, 3], [4, 4, 4, 4, 7])


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


def test_by_hand():
    """Segments of one token, weights 1, a gate of 1/2: half of its own value, and half of the mean before it."""
    module = build("segment=1, eps=1e-12", (0.0,), 1, 1)
    with torch.no_grad():
        for part in (module.query, module.key, module.value, module.out):
            part.weight.fill_(1.0)
            part.bias.zero_()
    y = module(torch.tensor([[[1.0], [3.0], [0.0]]], dtype=torch.float64))[0].flatten()
    # phi of the keys: 2, 4, 1. With one channel, the query's phi cancels.
    assert y.tolist() == pytest.approx([0.5, (1 + 3) / 2, (2 * 1 + 4 * 3) / 6 / 2])


def test_the_delta_rule_with_a_large_eps_by_hand():
    """Segments of one token and eps = 1: what a key reads in the memory is divided by its sum plus 1, too.

    phi is 2, 4, 1. S = 2, z = 2 after the first token; the second reads 2 4 / (2 4 + 1) = 8/9 and adds 4 (3 - 8/9).
    """
    module = build("segment=1, delta=True, eps=1.0", (0.0,), 1, 1)
    with torch.no_grad():
        for part in (module.query, module.key, module.value, module.out):
            part.weight.fill_(1.0)
            part.bias.zero_()
    x = torch.tensor([[[1.0], [3.0], [0.0]]], dtype=torch.float64)
    memory = 2 + 4 * (3 - 8 / 9)
    expected = [0.5, (8 / 9 + 3) / 2, memory / (6 + 1) / 2]
    assert module(x)[0].flatten().tolist() == pytest.approx(expected, rel=1e-12)
    for cuts in ([3], [1, 1, 1], [2, 1], [1, 2]):
        y, state = in_parts(module, x, cuts)
        assert y.flatten().tolist() == pytest.approx(expected, rel=1e-12)
        # phi(0) = 1 reads memory / 7 and adds 0 - memory / 7.
        assert state.sums.flatten().tolist() == pytest.approx([memory - memory / 7, 7.0], rel=1e-12)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("segment", [4, 7])
def test_eps_is_part_of_every_read(segment, cuts):
    module, x = build(f"segment={segment}, delta=True, eps=0.7"), data(1, N, DIM)
    expected, memory, z = oracle(module, x[0])
    y, state = in_parts(module, x, cuts)
    torch.testing.assert_close(module(x)[0][0], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(y[0], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state.sums[0, ..., :-1], memory, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state.sums[0, ..., -1], z, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("segment", [1, 4, 7, N, 40])
def test_it_is_the_loop_over_segments_however_it_is_cut(segment, delta, backend):
    module, x = build(f"segment={segment}, delta={delta}"), data(1, N, DIM)
    expected, memory, z = oracle(module, x[0])
    with longspan.backend(backend):
        torch.testing.assert_close(module(x)[0][0], expected, rtol=1e-10, atol=1e-10)
        for cuts in CUTS:
            y, state = in_parts(module, x, cuts)
            torch.testing.assert_close(y[0], expected, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(state.sums[0, ..., :-1], memory, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(state.sums[0, ..., -1], z, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("segment", [4, 40])
def test_a_gate_that_is_shut_is_softmax_within_segments(segment):
    module, x = build(f"segment={segment}", (-math.inf, -math.inf)), data(2, N, DIM)
    softmax = longspan.build("softmax", DIM, HEADS).double()
    softmax.load_state_dict({name: t for name, t in module.state_dict().items() if name != "gate"})
    ids = (torch.arange(N) // segment).expand(2, -1)
    torch.testing.assert_close(module(x)[0], softmax(x, segments=ids)[0], rtol=1e-11, atol=1e-11)


def test_a_gate_that_is_open_is_linear_attention_over_earlier_segments():
    module, x = build("segment=4", (math.inf, math.inf)), data(1, N, DIM)
    linear = longspan.build("linear", DIM, HEADS).double()
    linear.load_state_dict({name: t for name, t in module.state_dict().items() if name != "gate"})
    y = module(x)[0]
    torch.testing.assert_close(y[:, :4], module.out(torch.zeros_like(x[:, :4])))  # nothing came before
    for i in range(4, N):
        _, state = linear(x[:, : i // 4 * 4], linear.init_state(1))
        o = phi(linear.query(x[:, i]).unflatten(-1, (HEADS, 1, -1))) @ state.sums
        o = (o[..., :-1] / (o[..., -1:] + linear.eps)).flatten(1)
        torch.testing.assert_close(y[:, i], linear.out(o), rtol=1e-10, atol=1e-10)


def test_delta_adds_no_known_value_again():
    """A segment that comes a second time changes what the delta rule's memory reads less than the plain rule's."""
    x = data(1, 4, DIM)
    reads = {}
    for delta in (True, False):
        module = build(f"segment=4, delta={delta}")
        _, state = module(x, module.init_state(1))
        _, again = module(x, state)
        added = again.sums - state.sums
        reads[delta] = (added[..., :-1].norm() / state.sums[..., :-1].norm()).item()
        torch.testing.assert_close(added[..., -1], state.sums[..., -1])
    assert reads[False] == pytest.approx(1.0)
    assert reads[True] < 0.8


def test_the_recent_sums_are_those_of_the_segment_that_is_not_complete():
    module, x = build("segment=6"), data(1, 21, DIM)
    _, state = in_parts(module, x, [4, 9, 8])
    _, k, v = heads_of(module, x[0, 18:])
    torch.testing.assert_close(state.recent[0, ..., :-1], phi(k).mT @ v, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state.keys[0, :, :3], k, rtol=1e-12, atol=1e-12)


def test_a_damaged_count_is_refused():
    module = build("segment=6")
    with pytest.raises(ValueError, match="is -3"):
        module(data(1, 3, DIM), module.init_state(1)._replace(position=torch.tensor([-3])))
