"""Attentions of ``compat.fast_transformers`` against their definitions, written out densely in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from longspan.compat.fast_transformers import attention as a
from longspan.compat.fast_transformers import feature_maps as maps
from longspan.compat.fast_transformers.builders import TransformerEncoderBuilder
from longspan.compat.fast_transformers.causal_product import CausalDotProduct, causal_dot_product
from longspan.compat.fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask

N, L, S, H, E, D = 3, 13, 11, 2, 5, 7


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def qkv(random):
    """``qkv(L, S, D)``: random queries (N,L,H,E), keys (N,S,H,E), values (N,S,H,D) in float64."""

    def make(length=L, size=S, width=D, dtype=torch.float64):
        shapes = (N, length, H, E), (N, size, H, E), (N, size, H, width)
        return tuple(torch.randn(*shape, generator=random, dtype=dtype) for shape in shapes)

    return make


def weighted(weights, values):
    return torch.einsum("nhls,nshd->nlhd", weights, values)


def logits(q, k, temp=None):
    return torch.einsum("nlhe,nshe->nhls", q, k) * (E**-0.5 if temp is None else temp)


def softmax(scores, allowed):
    """Softmax over what is allowed; a row without anything is zero."""
    top = scores.masked_fill(~allowed, -1e30).amax(-1, keepdim=True)
    weights = (scores - top).clamp(max=0).exp() * allowed
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)


def allowed_by(attn, lengths):
    return attn.bool_matrix[None, None] & lengths.bool_matrix[:, None, None, :]


def check(module, inputs, attn, lengths, expected, tolerance=1e-12):
    out = module.double().eval()(*inputs, attn, lengths, lengths)
    assert out.is_contiguous()
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)


# The second sequence is empty.
LENGTHS = torch.tensor([11, 0, 4])


def some_mask(random, length=L, size=S):
    return FullMask(torch.rand(length, size, generator=random) < 0.6)


@pytest.mark.parametrize("temp", [None, 0.3])
def test_full_attention_is_softmax_under_any_mask(qkv, random, temp):
    q, k, v = qkv()
    for attn in (FullMask(L, S), some_mask(random)):
        for lengths in (LengthMask(LENGTHS), LengthMask(torch.full((N,), S))):
            expected = weighted(softmax(logits(q, k, temp), allowed_by(attn, lengths)), v)
            check(a.FullAttention(temp), (q, k, v), attn, lengths, expected)
    q, k, v = qkv(L, L)
    whole = LengthMask(torch.full((N,), L))
    expected = weighted(softmax(logits(q, k, temp), allowed_by(TriangularCausalMask(L), whole)), v)
    check(a.FullAttention(temp), (q, k, v), TriangularCausalMask(L), whole, expected)


def linear_oracle(q, k, v, allowed, phi, eps):
    products = torch.einsum("nlhf,nshf->nhls", phi(q), phi(k)) * allowed
    return weighted(products / (products.sum(-1, keepdim=True) + eps), v)


def elu(x):
    return F.elu(x) + 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_linear_attention_is_its_formula(qkv, eps, causal):
    size = L if causal else S
    inputs, attn = qkv(L, size), TriangularCausalMask(L) if causal else FullMask(L, S)
    module = (a.CausalLinearAttention if causal else a.LinearAttention)(E, eps=eps)
    for lengths in (LengthMask(torch.tensor([size, 0, 4])), LengthMask(torch.full((N,), size))):
        check(module, inputs, attn, lengths, linear_oracle(*inputs, allowed_by(attn, lengths), elu, eps))


@pytest.mark.parametrize("size", [7, 17])
def test_causal_linear_attention_cuts_or_fills_up_keys(qkv, size):
    q, k, v = qkv(L, size)
    lengths = LengthMask(torch.tensor([size, 2, 5]))
    attn = FullMask(torch.ones(L, size, dtype=torch.bool).tril())
    for key_lengths in (lengths, LengthMask(torch.full((N,), size))):
        expected = linear_oracle(q, k, v, allowed_by(attn, key_lengths), elu, 1e-6)
        check(a.CausalLinearAttention(E), (q, k, v), TriangularCausalMask(L), key_lengths, expected)


@pytest.mark.parametrize("kind", [a.LinearAttention, a.CausalLinearAttention])
def test_the_feature_map_is_applied_to_queries_and_keys_each_in_its_way(qkv, kind):
    class Lopsided(maps.FeatureMap):
        drawn = 0

        def new_feature_map(self, device):
            self.drawn += 1

        def forward_queries(self, x):
            return torch.cat([x.exp(), x.square()], -1)

        def forward_keys(self, x):
            return torch.cat([x.square(), x.exp()], -1)

    q, k, v = qkv(L, L)
    lengths, causal = LengthMask(torch.tensor([13, 0, 4])), kind is a.CausalLinearAttention
    attn = TriangularCausalMask(L) if causal else FullMask(L)
    phi = Lopsided(E)
    products = torch.einsum("nlhf,nshf->nhls", phi.forward_queries(q), phi.forward_keys(k)) * allowed_by(attn, lengths)
    expected = weighted(products / (products.sum(-1, keepdim=True) + 1e-6), v)
    module = kind(E, Lopsided.factory())
    check(module, (q, k, v), attn, lengths, expected, 1e-10)
    assert module.feature_map.drawn == 1


@pytest.mark.parametrize("context", [1, 2, 5, 37])
@pytest.mark.parametrize("size", [11, 71])
def test_local_attention_sees_its_window(qkv, random, context, size):
    length = 67
    q, k, v = qkv(length, size)
    at, to = torch.arange(length)[:, None], torch.arange(size)
    near = (to >= at - context // 2) & (to < at + (context + 1) // 2)
    for attn in (FullMask(length, size), some_mask(random, length, size)):
        for lengths in (LengthMask(torch.tensor([size, 0, 5])), LengthMask(torch.full((N,), size))):
            expected = weighted(softmax(logits(q, k), allowed_by(attn, lengths) & near), v)
            check(a.LocalAttention(context), (q, k, v), attn, lengths, expected)


@pytest.mark.parametrize("topk", [1, 3, 40])
def test_exact_topk_attention_sees_the_best_of_what_is_allowed(qkv, random, topk):
    q, k, v = qkv(L, L)
    masks = (
        (FullMask(L), LengthMask(torch.tensor([13, 0, 4]))),
        (some_mask(random, L, L), LengthMask(torch.full((N,), L))),
    )
    for attn, lengths in (*masks, (TriangularCausalMask(L), LengthMask(torch.full((N,), L)))):
        scores, allowed = logits(q, k), allowed_by(attn, lengths)
        ranked = scores.masked_fill(~allowed, -torch.inf).sort(-1, descending=True).values
        best = scores >= ranked[..., min(topk, L) - 1, None]
        check(a.ExactTopKAttention(topk), (q, k, v), attn, lengths, weighted(softmax(scores, allowed & best), v))


def test_conditional_full_attention_requires_the_length(qkv):
    other = nn.Module()
    other.forward = lambda q, k, v, *masks: -torch.ones_like(q)
    module = a.ConditionalFullAttention(other, length_limit=L).eval()
    q, k, v = qkv(L, S)
    masks = FullMask(L, S), LengthMask(torch.full((N,), L)), LengthMask(LENGTHS)
    torch.testing.assert_close(module(q, k, v, *masks), a.FullAttention().eval()(q, k, v, *masks), rtol=0, atol=0)
    q, k, v = qkv(L, L + 1)
    assert (module(q, k, v, FullMask(L, L + 1), masks[1], LengthMask(torch.full((N,), L + 1))) == -1).all()
    q, k, v = qkv(L + 1, S)
    assert (module(q, k, v, FullMask(L + 1, S), masks[1], masks[2]) == -1).all()


def aft_oracle(q, k, v, bias, allowed):
    scores = k[:, None] + bias[None, :, :, None, None]  # (N,L,S,H,E)
    shown = allowed.permute(0, 2, 3, 1)[..., None]
    weights = softmax(scores.movedim(2, -1), shown.movedim(2, -1)).movedim(-1, 2)
    return q.sigmoid() * (weights * v[:, None]).sum(2)


def test_aft_full_attention_adds_the_bias_to_the_keys(qkv, random):
    length = 37
    q, k, v = qkv(length, S, E)
    module = a.AFTFullAttention(41, 3)
    with torch.no_grad():
        module.u.mul_(100)
        module.v.mul_(100)
    module.double()
    bias = module.u[:length] @ module.v[:S].mT
    causal = FullMask(torch.ones(length, S, dtype=torch.bool).tril())
    for attn in (FullMask(length, S), causal, some_mask(random, length, S)):
        lengths = LengthMask(LENGTHS)
        check(module, (q, k, v), attn, lengths, aft_oracle(q, k, v, bias, allowed_by(attn, lengths)))


def test_aft_simple_attention_is_the_same_without_a_bias(qkv):
    length = 67  # more than two blocks
    q, k, v = qkv(length, length, E)
    k = k * 30  # a sum of exponentials would over- or underflow here
    for lengths in (LengthMask(torch.tensor([67, 0, 4])), LengthMask(torch.full((N,), 67))):
        for attn in (FullMask(length), TriangularCausalMask(length)):
            expected = aft_oracle(q, k, v, torch.zeros(length, length), allowed_by(attn, lengths))
            check(a.AFTSimpleAttention(), (q, k, v), attn, lengths, expected)


SELF = {
    "full": a.FullAttention(),
    "linear": a.LinearAttention(E),
    "causal-linear": a.CausalLinearAttention(E),
    "favor": a.CausalLinearAttention(E, maps.Favor.factory(n_dims=6, deterministic_eval=True)),
    "local": a.LocalAttention(5),
    "exact-topk": a.ExactTopKAttention(3),
    "aft-full": a.AFTFullAttention(17, 3),
    "aft-simple": a.AFTSimpleAttention(),
}


def triangular(name):
    return name in ("causal-linear", "favor", "aft-simple")


@pytest.mark.parametrize("name", SELF)
def test_gradients_are_those_of_the_function_and_finite_for_empty_sequences(qkv, name):
    module, (q, k, v) = SELF[name].double().eval(), qkv(5, 5, E)
    attn = TriangularCausalMask(5) if triangular(name) else FullMask(5)
    lengths = LengthMask(torch.tensor([5, 0, 2]))
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: module(*x, attn, lengths, lengths), inputs, fast_mode=True)
    assert (module(*inputs, attn, lengths, lengths)[1] == 0).all()


# Which keys are the best is another question where products are rounded.
@pytest.mark.parametrize("name", [name for name in SELF if name != "exact-topk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_and_keeps_its_dtype(qkv, name, dtype):
    inputs = tuple(x.to(dtype) for x in qkv(L, L, E))
    attn, lengths = (TriangularCausalMask(L) if triangular(name) else FullMask(L)), LengthMask(torch.tensor([13, 0, 4]))
    exact = SELF[name].double().eval()(*(x.double() for x in inputs), attn, lengths, lengths)
    out = SELF[name].to(dtype)(*inputs, attn, lengths, lengths)
    SELF[name].double()
    assert out.dtype == dtype
    # Some roundings of numbers of order one: the input of each sum, the sum, the product with a gate.
    assert (out.double() - exact).abs().max() < 8 * torch.finfo(dtype).eps * exact.abs().max().clamp(min=1)


@pytest.mark.parametrize("kind", ["full", "linear", "causal-linear", "local"])
def test_a_model_runs_under_autocast(kind, random):
    options = {"n_layers": 2, "n_heads": 2, "query_dimensions": E, "value_dimensions": 3}
    options |= {"local_context": 3} if kind == "local" else {}
    model = TransformerEncoderBuilder.from_kwargs(attention_type=kind, **options).get().eval()
    x = torch.randn(2, L, 6, generator=random)
    mask = TriangularCausalMask(L) if kind == "causal-linear" else None
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, mask)
    assert (y.float() - model(x, mask)).abs().max() < 0.1
    y.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_linear_attentions_compile_whole(random):
    options = {"n_layers": 1, "n_heads": 2, "query_dimensions": E, "value_dimensions": 3}
    model = TransformerEncoderBuilder.from_kwargs(attention_type="linear", **options).get().eval()
    x = torch.randn(2, L, 6, generator=random)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(
    ("module", "mask", "error", "message"),
    [
        (a.LinearAttention(E), TriangularCausalMask(L), RuntimeError, "LinearAttention.*FullMask"),
        (a.CausalLinearAttention(E), FullMask(L), RuntimeError, "CausalLinearAttention.*TriangularCausalMask"),
        (a.AFTFullAttention(7), FullMask(L), ValueError, "max_sequence_length=7 .*13 queries and 13"),
        (a.AFTSimpleAttention(), LengthMask(torch.arange(13)), ValueError, "AFTSimpleAttention.*attn_mask"),
    ],
)
def test_attentions_refuse_what_they_cannot_do(qkv, module, mask, error, message):
    lengths = LengthMask(torch.full((N,), L))
    with pytest.raises(error, match=message):
        module(*qkv(L, L, E), mask, lengths, lengths)


def test_wrong_sizes_are_refused(qkv):
    lengths = LengthMask(torch.full((N,), L))
    for module in (a.AFTFullAttention(), a.AFTSimpleAttention()):
        with pytest.raises(ValueError, match="5.*7.*query_dimensions"):
            module(*qkv(L, L), FullMask(L), lengths, lengths)
    with pytest.raises(ValueError, match="local_context=0"):
        a.LocalAttention(0)
    with pytest.raises(ValueError, match="topk=0"):
        a.ExactTopKAttention(0)
    q, k, v = (x.transpose(1, 2) for x in qkv(L, L))
    with pytest.raises(ValueError, match="fit"):
        causal_dot_product(q[:, :, :-1], k, v)
    with pytest.raises(ValueError, match="1 heads.*2"):
        causal_dot_product(q[:, :1], k[:, :1], v)


# The causal product


def test_the_causal_product_is_its_formula_with_two_derivatives(qkv):
    q, k, v = (x.transpose(1, 2) for x in qkv(L, L))
    expected = ((q @ k.mT).tril() @ v).contiguous()
    torch.testing.assert_close(causal_dot_product(q, k, v), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(CausalDotProduct.apply(q, k, v), expected, rtol=0, atol=1e-12)
    inputs = tuple(x[:1, :, :3].clone().requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(causal_dot_product, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(causal_dot_product, inputs, fast_mode=True)
    single = causal_dot_product(*(x.float() for x in (q, k, v)))
    torch.testing.assert_close(single, expected.float(), rtol=1e-5, atol=1e-5)
    half = causal_dot_product(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert half.dtype == torch.bfloat16
    third = (x.transpose(1, 2) for x in (q, k, v))
    from_layer = a.causal_linear_attention.causal_linear(*third)
    torch.testing.assert_close(from_layer, expected.transpose(1, 2), rtol=0, atol=1e-12)
