"""Transformer-XL against loops over all pairs, and its memory."""

import pytest
import torch

import longspan
from support.mechanisms import in_parts, wave
from support.tensors import data

N, DIM, HEADS = 23, 8, 2


def build(options="", dim=DIM, heads=HEADS, **place):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = longspan.build(f"transformer_xl({options})", dim, heads, **place).double()
        torch.nn.init.normal_(module.u)
        torch.nn.init.normal_(module.v)
        return module


def oracle(module, x, sees, clamp=10**9):
    """Pair by pair: x (N,dim), sees(i) the keys of query i -> y (N,dim), weights (H,N,N)."""
    n, size = len(x), module.dim // module.heads
    q, k, v = (part.weight @ x[..., None] for part in (module.query, module.key, module.value))
    o, p = x.new_zeros(n, module.dim), x.new_zeros(module.heads, n, n)
    for h in range(module.heads):
        own = slice(h * size, (h + 1) * size)
        for i in range(n):
            scores = []
            for j in sees(i):
                r = module.distance.weight[own] @ wave(max(-clamp, min(clamp, i - j)), module.dim)
                content = (q[i, own, 0] + module.u[h]) @ k[j, own, 0]
                scores.append((content + (q[i, own, 0] + module.v[h]) @ r) / size**0.5)
            weights = torch.stack(scores).softmax(0)
            p[h, i, sees(i)] = weights
            o[i, own] = sum(w * v[j, own, 0] for w, j in zip(weights, sees(i), strict=True))
    return o @ module.out.weight.mT, p


FORMS = {
    "memory=6": lambda i: list(range(max(0, i - 6), i + 1)),
    "memory=6, clamp=2": lambda i: list(range(max(0, i - 6), i + 1)),
    "memory=4, same_length=False, segment=5": lambda i: list(range(max(0, i // 5 * 5 - 4), i + 1)),
    "memory=100": lambda i: list(range(i + 1)),
}


@pytest.mark.parametrize("options", FORMS)
def test_it_equals_the_sum_over_pairs(options):
    module, x, record = build(options), data(1, N, DIM), {}
    y, p = oracle(module, x[0], FORMS[options], module.clamp or 10**9)
    torch.testing.assert_close(module(x, record=record)[0][0], y, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(record["matrix"][0], p, rtol=1e-10, atol=1e-12)
    assert torch.equal(record["mask"].expand(1, HEADS, N, N)[0], p > 0)
    assert torch.equal(module.key_pattern.dense(N)[0], p[0] > 0)


@pytest.mark.parametrize("memory", [3, 100])
def test_the_bidirectional_form_distinguishes_before_and_after(memory):
    module, x = build(f"memory={memory}", causal=False), data(1, N, DIM)
    y, _ = oracle(module, x[0], lambda i: list(range(max(0, i - memory), min(N, i + memory + 1))))
    torch.testing.assert_close(module(x)[0][0], y, rtol=1e-10, atol=1e-10)
    assert (module(x.flip(1))[0].flip(1) - y).abs().max() > 0.01


@pytest.mark.parametrize("split", [1, 9, 22])
@pytest.mark.parametrize("options", ["memory=6", "memory=30", "memory=4, same_length=False, segment=5"])
def test_gradients_are_those_of_one_pass_whose_first_segment_is_detached(options, split):
    """The weights of keys and values learn from the memory; the inputs get no gradient."""
    module, upstream = build(options), data(1, N, DIM, seed=2)
    x = data(1, N, DIM).requires_grad_()
    y, _ = in_parts(module, x, [split, N - split])
    found = torch.autograd.grad((y * upstream).sum(), [x, *module.parameters()])
    first = module(x[:, :split])[0]
    later = module(torch.cat([x[:, :split].detach(), x[:, split:]], 1))[0][:, split:]
    expected = torch.autograd.grad((torch.cat([first, later], 1) * upstream).sum(), [x, *module.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    whole = torch.autograd.grad((module(x)[0] * upstream).sum(), x)[0]
    assert (whole - found[0])[:, :split].abs().max() > 1e-3


def test_a_memory_has_no_gradient_and_no_graph():
    module, x = build("memory=6"), data(1, N, DIM).requires_grad_()
    _, state = module(x, module.init_state(1))
    assert not state.hidden.requires_grad
    given = state._replace(hidden=state.hidden.clone().requires_grad_())
    y, after = module(x, given)
    assert torch.autograd.grad(y.sum(), given.hidden, allow_unused=True)[0] is None
    assert not after.hidden.requires_grad
    through = build("memory=6, stop_gradient=False")
    _, state = through(x, through.init_state(1))
    assert state.hidden.requires_grad


@pytest.mark.parametrize("options", ["memory=6", "memory=4, same_length=False, segment=5", "memory=6, clamp=2"])
def test_absorbed_projections_give_the_same(options):
    """A step absorbs the key weights into its queries, but only those of a plain nn.Linear."""
    module, x = build(options), data(2, N, DIM)

    class Other(torch.nn.Linear):
        pass

    _, state = module(x[:, :9], module.init_state(2))
    step = module(x[:, 9:10], state)[0]
    module.key.__class__ = Other
    torch.testing.assert_close(module(x[:, 9:10], state)[0], step, rtol=1e-12, atol=1e-12)
    called = []
    module.key.register_forward_hook(lambda *_: called.append(1))
    module(x[:, 9:10], state)
    assert called


def test_a_damaged_count_is_refused():
    module = build("memory=6")
    state = module.init_state(1)._replace(position=torch.tensor([-1]))
    with pytest.raises(ValueError, match="is -1"):
        module(data(1, 3, DIM), state)
