"""Forward-mode derivatives and the transforms of torch.func: the operations have plain forms for them."""

import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap

import longspan
from longspan import backend, decay_attention, delta_rule, linear_attention, sparse_attention
from longspan.attention.base import REGISTRY
from longspan.attention.registry import list_mechanisms

B, H, D, E = 2, 2, 4, 3


@pytest.fixture(scope="module", autouse=True)
def _first_use_of_forward_derivatives():
    """torch compiles some rules on first use, by what it calls deprecated itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.randn(3)
        jvp(lambda x: x.softmax(0), (x,), (x,))


def operations(n: int):
    """By name, functions of query, key, value; laws of ``laws.py`` transform the rows of ``families.py``."""
    generator = torch.Generator().manual_seed(n)

    def uniform(*shape):
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    normalized, by_channel, beta = uniform(B, H, D, E + 1), -uniform(B, H, n, D), uniform(B, H, n)
    mask, segments = uniform(B, n) > 0.3, (torch.arange(n) // 3).expand(B, n).contiguous()
    mask[:, -1] = True
    packed = {"mask": mask, "segments": segments}
    made = {
        "linear, packed": lambda q, k, v: linear_attention(q, k, v, state=normalized, **packed),
        "linear, all keys": lambda q, k, v: linear_attention(q, k, v, causal=False),
        "linear, all keys, packed": lambda q, k, v: linear_attention(q, k, v, causal=False, **packed),
        "linear, a map of one's own": lambda q, k, v: linear_attention(q, k, v, feature_map=torch.exp),
        "delta, decay by channel": lambda q, k, v: delta_rule(q, k / 4, v, beta=beta, log_decay=by_channel, **packed),
    }
    bias = uniform(H, n, n)
    for text in ("band(3)", "causal & (band(3) | strided(4))", "random(2)"):
        made[text] = lambda q, k, v, text=text: sparse_attention(q, k, v, text)
        made[f"{text}, mask, bias"] = lambda q, k, v, text=text: sparse_attention(q, k, v, text, mask=mask, bias=bias)
    return made


@pytest.fixture(params=[1, 70])
def inputs(request):
    generator = torch.Generator().manual_seed(request.param)
    return [torch.randn(B, H, request.param, width, dtype=torch.float64, generator=generator) for width in (D, D, E)]


@pytest.mark.parametrize("name", list(operations(1)))
class TestOperations:
    def function(self, name, inputs):
        return operations(inputs[0].shape[2])[name]

    def test_forward_derivatives(self, name, inputs):
        """Equal to what reverse mode gives: u . (J t) = (J^T u) . t."""
        function, tangents = self.function(name, inputs), [t.flip(2).cos() for t in inputs]
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = function(*leaves)
        u = out.detach().sin()
        there = [
            g if g is not None else torch.zeros_like(t)
            for g, t in zip(torch.autograd.grad(out, leaves, u, allow_unused=True), leaves, strict=True)
        ]
        expected = sum((g * t).sum() for g, t in zip(there, tangents, strict=True))
        with forward_ad.dual_level():
            dual = function(*(forward_ad.make_dual(t, d) for t, d in zip(inputs, tangents, strict=True)))
            value, tangent = forward_ad.unpack_dual(dual)
        torch.testing.assert_close(value, out.detach())
        assert tangent is not None
        torch.testing.assert_close((u * tangent).sum(), expected)
        again, found = jvp(function, tuple(inputs), tuple(tangents))
        torch.testing.assert_close(again, out.detach())
        torch.testing.assert_close(found, tangent)

    def test_gradients_by_transforms(self, name, inputs):
        function = self.function(name, inputs)
        leaves = [t.clone().requires_grad_() for t in inputs]
        expected = torch.autograd.grad(function(*leaves).sin().sum(), leaves, materialize_grads=True)
        found = grad(lambda *x: function(*x).sin().sum(), argnums=(0, 1, 2))(*inputs)
        torch.testing.assert_close(found, expected)
        out, back = vjp(function, *inputs)
        torch.testing.assert_close(back(out.cos()), expected)

    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_vmap_equals_calls_one_by_one(self, name, inputs, which):
        function, dims = self.function(name, inputs), [None] * 3
        dims[which] = 0
        many = torch.stack([inputs[which], inputs[which].flip(3)])
        args = [many if i == which else t for i, t in enumerate(inputs)]
        expected = [function(*(one if i == which else t for i, t in enumerate(inputs))) for one in many]
        torch.testing.assert_close(vmap(function, tuple(dims))(*args), torch.stack(expected))

        def loss(x):
            return function(*(x if i == which else t for i, t in enumerate(inputs))).sin().sum()

        torch.testing.assert_close(vmap(grad(loss))(many), torch.stack([grad(loss)(one) for one in many]))


@pytest.mark.parametrize(
    "step",
    [
        lambda x, state: linear_attention(x, x, x, state=torch.nn.functional.pad(state, (0, 1), value=1.0)),
        lambda x, state: decay_attention(x, x, x, log_decay=-x[..., 0].square(), state=state),
        lambda x, state: delta_rule(x, x, x, beta=x[..., 0].sigmoid(), state=state),
    ],
    ids=["linear", "decay", "delta"],
)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_token_in_single_precision(step, gradients):
    """The native steps would leave the tangent out, whether gradients are on or not."""
    x, state = (torch.randn(B, H, n, D, generator=torch.Generator().manual_seed(n)) for n in (1, D))
    change = torch.ones_like(x)
    with torch.set_grad_enabled(gradients), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(step(forward_ad.make_dual(x, change), state)).tangent
    wide, wide_state, small = x.double(), state.double(), 1e-6 * change.double()
    expected = (step(wide + small, wide_state) - step(wide - small, wide_state)) / 2e-6
    assert tangent is not None
    torch.testing.assert_close(tangent.double(), expected, atol=1e-4, rtol=1e-4)


def test_a_donated_state_is_left_alone():
    x, state = torch.randn(B, H, 1, D), torch.randn(B, H, D, D)
    kept = state.clone()
    vmap(lambda x: decay_attention(x, x, x, log_decay=x[..., 0] - 9, state=state, donate=True))(x[None])
    assert torch.equal(state, kept)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: linear_attention(x, x, x),
        lambda x: delta_rule(x, x, x, beta=x[..., 0]),
        lambda x: sparse_attention(x, x, x, "band(3)"),
    ],
    ids=["linear", "delta", "sparse"],
)
def test_kernels_are_refused(call):
    with (
        backend("native"),
        pytest.raises(ValueError, match=r"backend 'native' cannot serve .*torch.func"),
    ):
        vmap(call)(torch.randn(2, B, H, 7, D))


MECHANISMS = (
    "linear",
    "gla",
    "gated_deltanet",
    "kda",
    "performer",
    "softmax",
    "local(window=5)",
    "polynomial",
    "rfa",
    "adaptive_span(span=5)",
)


# About batching rules that torch lacks and replaces by a loop.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("text", MECHANISMS)
def test_whole_mechanisms(text):
    """Per-sample gradients, directional derivatives and second derivatives, by ``functional_call``."""
    torch.manual_seed(0)
    module = longspan.build(text, 8, 2).double()
    weights = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(3, 13, 8, dtype=torch.float64)

    def loss(weights, x):
        return functional_call(module, weights, (x[None],))[0].sin().sum()

    found = vmap(grad(loss), (None, 0))(weights, x)
    for i in range(len(x)):
        module.zero_grad()
        loss(dict(module.named_parameters()), x[i]).backward()
        for name, p in module.named_parameters():
            torch.testing.assert_close(found[name][i], torch.zeros_like(p) if p.grad is None else p.grad)
    total = lambda w: loss(w, x[0])  # noqa: E731
    _, tangent = jvp(total, (weights,), ({name: torch.ones_like(w) for name, w in weights.items()},))
    torch.testing.assert_close(tangent, sum(g[0].sum() for g in found.values()))
    bias = next(iter(weights))
    second = hessian(lambda w: total(weights | {bias: w}))(weights[bias])
    assert torch.isfinite(second).all()


WAYS = [(name, way) for name in list_mechanisms() for way in REGISTRY[name].directions]
WAYS.remove(("transformer_xl", "bidirectional"))  # its example has segments, which that form has not


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_gradients_have_gradients(name, way):
    """What ``create_graph=True`` brings is the slope of the gradient, whatever computes that."""
    torch.manual_seed(0)
    module = longspan.build(REGISTRY[name].examples[0], 8, 2, causal=way == "causal").double().eval()
    x, along, by, h = *(torch.randn(2, 13, 8, dtype=torch.float64) for _ in range(3)), 1e-6

    def slope(x, again=False):
        x = x.clone().requires_grad_()
        return x, torch.autograd.grad((module(x)[0] * by).sin().sum(), x, create_graph=again)[0]

    moved, first = slope(x, again=True)
    (second,) = torch.autograd.grad((first * along).sum(), moved, materialize_grads=True)
    steeper = (slope(x + h * by)[1] - slope(x - h * by)[1]) / (2 * h)
    torch.testing.assert_close((second * by).sum(), (steeper * along).sum(), rtol=1e-5, atol=1e-6)
