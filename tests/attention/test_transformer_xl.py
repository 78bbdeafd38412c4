"""Transformer-XL against loops over all pairs, against XLNet's attention, and its memory."""

import types

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


@pytest.mark.parametrize(("bidirectional", "split"), [(True, 0), (False, 0), (False, 9)])
def test_it_is_xlnets_attention(bidirectional, split):
    """XLNet of transformers: all sines of r first, and distances of both signs if bidirectional."""
    xlnet = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    config = types.SimpleNamespace(d_model=DIM, n_head=HEADS, d_head=DIM // HEADS, layer_norm_eps=0.0, dropout=0.0)
    other, module = xlnet.XLNetRelativeAttention(config).double(), build(f"memory={N}", causal=not bidirectional)
    x = data(1, N, DIM)
    sines_first = torch.cat([torch.arange(0, DIM, 2), torch.arange(1, DIM, 2)])

    def heads(weight):
        return weight.mT.unflatten(-1, (HEADS, -1))

    with torch.no_grad():
        for name, weight in (("q", module.query), ("k", module.key), ("v", module.value)):
            getattr(other, name).copy_(heads(weight.weight))
        other.r.copy_(heads(module.distance.weight[:, sines_first]))
        other.o.copy_(module.out.weight.unflatten(-1, (HEADS, -1)))
        other.r_w_bias.copy_(module.u)
        other.r_r_bias.copy_(module.v)
        queries, keys = N - split, N
        # Its distances begin one before the first key; its shift drops that one.
        first, last = keys, -queries if bidirectional else -1
        rates = 10000 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
        angles = torch.arange(first, last, -1, dtype=torch.float64)[:, None] * rates
        r = torch.cat([angles.sin(), angles.cos()], -1)[:, None]
        hidden = torch.ones(queries, keys).triu(split + 1)[:, :, None, None].double()
        h, tokens = x[0, split:, None], x[0, :, None]
        k, v = (torch.einsum("ibh,hnd->ibnd", tokens, w) for w in (other.k, other.v))
        q, far = (torch.einsum("ibh,hnd->ibnd", t, w) for t, w in ((h, other.q), (r, other.r)))
        read = other.rel_attn_core(q, k, v, far, attn_mask=None if bidirectional else hidden)
        expected = torch.einsum("ibnd,hnd->ibh", read, other.o)[:, 0]
    y = module(x)[0] if not split else in_parts(module, x, [split, N - split])[0]
    torch.testing.assert_close(y[0, split:], expected, rtol=1e-10, atol=1e-10)


def test_a_damaged_count_is_refused():
    module = build("memory=6")
    state = module.init_state(1)._replace(position=torch.tensor([-1]))
    with pytest.raises(ValueError, match="is -1"):
        module(data(1, 3, DIM), state)
