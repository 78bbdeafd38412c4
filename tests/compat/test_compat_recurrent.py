"""Recurrent models of ``compat.fast_transformers``: they equal the batch models, and a state is never changed."""

import copy

import pytest
import torch
from torch import nn

from longspan.compat.fast_transformers import feature_maps as maps
from longspan.compat.fast_transformers import recurrent
from longspan.compat.fast_transformers.builders import (
    RecurrentDecoderBuilder,
    RecurrentEncoderBuilder,
    TransformerDecoderBuilder,
    TransformerEncoderBuilder,
)
from longspan.compat.fast_transformers.masking import LengthMask, TriangularCausalMask
from longspan.compat.fast_transformers.utils import make_mirror

N, L, S, H, E, D = 3, 11, 7, 2, 5, 3
SIZES = {"n_layers": 2, "n_heads": H, "query_dimensions": E, "value_dimensions": D, "feed_forward_dimensions": 7}
KINDS = {
    "full": ("full", {}),
    "linear": ("causal-linear", {}),
    "relu": ("causal-linear", {"feature_map": maps.ActivationFunctionFeatureMap.factory(lambda x: x.relu() + 0.1)}),
    "favor": ("causal-linear", {"feature_map": maps.Favor.factory(n_dims=6)}),
}


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


def encoders(kind, dtype=torch.float64):
    """A batch model and its mirror."""
    name, options = KINDS[kind]
    options = {**SIZES, **options, "attention_type": name}
    batch = TransformerEncoderBuilder.from_kwargs(**options).get().to(dtype).eval()
    stepwise = RecurrentEncoderBuilder.from_kwargs(**options).get().to(dtype).eval()
    make_mirror(batch, stepwise)
    return batch, stepwise


def run(model, x, *memory, state=None):
    parts = []
    for token in x.unbind(1):
        y, state = model(token, *memory, state=state)
        parts.append(y)
    return torch.stack(parts, 1), state


def frozen(state):
    return copy.deepcopy(state)


def close(ours, expected, tolerance=1e-11):
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad", [True, False])
def test_a_mirror_is_the_batch_model_step_by_step(kind, grad, random):
    """Random features included, which the original draws anew on either side."""
    batch, stepwise = encoders(kind)
    x = torch.randn(N, L, H * D, generator=random, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        y = batch(x, TriangularCausalMask(L))
        close(run(stepwise, x)[0], y)
        # A redraw reaches the mirror too.
        again = batch(x, TriangularCausalMask(L))
        close(run(stepwise, x)[0], again)
    assert torch.equal(y, again) == (kind != "favor")


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_state_is_left_as_it_was(kind, random):
    """Forks and rollbacks need no copies."""
    _, stepwise = encoders(kind)
    x, y, z = torch.randn(3, N, L, H * D, generator=random, dtype=torch.float64)
    _, state = run(stepwise, x)
    before = frozen(state)
    one, _ = run(stepwise, y, state=state)
    two, _ = run(stepwise, z, state=state)
    torch.testing.assert_close(state, before, rtol=0, atol=0)
    close(one, run(stepwise, torch.cat([x, y], 1))[0][:, L:])
    close(two, run(stepwise, torch.cat([x, z], 1))[0][:, L:])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_the_state(kind, random):
    batch, stepwise = encoders(kind)
    x = torch.randn(N, L, H * D, generator=random, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(N, L, H * D, generator=random, dtype=torch.float64)
    grads = []
    for outputs in (batch(x, TriangularCausalMask(L)), run(stepwise, x)[0]):
        grads.append(torch.autograd.grad((outputs * weights).sum(), [x, *batch.parameters()]))
    close(grads[0], grads[1], 1e-10)


@torch.no_grad()
def test_states_have_the_shapes_of_the_original(random):
    q, k = torch.randn(2, N, H, E, generator=random)
    v, keys, values = (torch.randn(N, *shape, generator=random) for shape in ((H, D), (S, H, E), (S, H, D)))
    lengths = LengthMask(torch.full((N,), S))
    favor = maps.Favor.factory(n_dims=8)
    cases = {
        recurrent.attention.RecurrentFullAttention(): [(N, H, 1, E), (N, H, 1, D)],
        recurrent.attention.RecurrentLinearAttention(E): [(N, H, E, D), (N, H, E)],
        recurrent.attention.RecurrentLinearAttention(E, favor): [(N, H, 8, D), (N, H, 8)],
    }
    for module, shapes in cases.items():
        out, state = module.eval()(q, k, v)
        assert out.shape == (N, H, D)
        assert out.is_contiguous()
        assert [tuple(part.shape) for part in state] == shapes
        with pytest.raises(ValueError, match="3 sequences.*2"):
            module(q[:2], k[:2], v[:2], state)
    cross = {
        recurrent.attention.RecurrentCrossFullAttention(): [(N, S, H, E), (N, S, H, D)],
        recurrent.attention.RecurrentCrossLinearAttention(E): [(N, H, D, E), (N, H, E)],
        recurrent.attention.RecurrentCrossLinearAttention(E, favor): [(N, H, D, 8), (N, H, 8)],
    }
    for module, shapes in cross.items():
        out, state = module.eval()(q, keys, values, lengths)
        assert out.shape == (N, H, D)
        assert [tuple(part.shape) for part in state] == shapes
        close(module(q, None, None, lengths, state)[0], out, 1e-6)
        with pytest.raises(ValueError, match="3 sequences.*2"):
            module(q[:2], keys[:2], values[:2], lengths, state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@torch.no_grad()
def test_a_linear_state_is_float32_at_least(dtype, random):
    module = recurrent.attention.RecurrentLinearAttention(E)
    q, k, v = (torch.randn(N, H, size, generator=random).to(dtype) for size in (E, E, D))
    out, state = module(q, k, v)
    out, state = module(q, k, v, state)
    assert out.dtype == dtype
    assert {part.dtype for part in state} == {torch.promote_types(dtype, torch.float32)}
    # A state that another program saved in half precision is taken too.
    assert module(q, k, v, [part.bfloat16() for part in state])[0].isfinite().all()


@pytest.mark.parametrize(("own", "cross"), [("full", "full"), ("linear", "linear"), ("linear", "full")])
@torch.no_grad()
def test_a_recurrent_decoder_is_the_batch_decoder(own, cross, random):
    options = {**SIZES, "cross_attention_type": cross, "cross_n_heads": 3, "cross_model_dimensions": 5}
    causal = {"linear": "causal-linear"}.get(own, own)
    batch = TransformerDecoderBuilder.from_kwargs(**options, self_attention_type=causal).get().double().eval()
    stepwise = RecurrentDecoderBuilder.from_kwargs(**options, self_attention_type=own).get().double().eval()
    make_mirror(batch, stepwise)
    x = torch.randn(N, L, H * D, generator=random, dtype=torch.float64)
    memory = torch.randn(N, S, 5, generator=random, dtype=torch.float64)
    for lengths in (LengthMask(torch.tensor([7, 0, 2])), None):
        y = batch(x, memory, TriangularCausalMask(L), memory_length_mask=lengths)
        half, state = run(stepwise, x[:, :5], memory, lengths)
        before = frozen(state)
        rest, _ = run(stepwise, x[:, 5:], memory, lengths, state=state)
        close(torch.cat([half, rest], 1), y)
        torch.testing.assert_close(state, before, rtol=0, atol=0)
    assert len(state) == 2
    assert all(len(layer) == 2 for layer in state)  # of self and of cross attention


def test_lists_of_states_must_fit():
    _, stepwise = encoders("linear")
    with pytest.raises(ValueError, match="2 states.*1"):
        stepwise(torch.zeros(N, H * D, dtype=torch.float64), state=[None])


@torch.no_grad()
def test_memory_is_an_older_name_of_state(random):
    x = torch.randn(N, 2, H * D, generator=random, dtype=torch.float64)
    _, stepwise = encoders("linear")
    layer = stepwise.layers[0]
    for module in (stepwise, layer):
        _, state = module(x[:, 0])
        with pytest.warns(DeprecationWarning, match="memory=.*state="):
            old, _ = module(x[:, 1], memory=state)
        close(old, module(x[:, 1], state=state)[0], 0)
    token = x[:, 0]
    _, state = layer.attention(token, token, token)
    with pytest.warns(DeprecationWarning, match="memory="):
        layer.attention(token, token, token, memory=state)


def test_a_model_that_is_no_mirror_draws_for_each_sequence(random):
    name, options = KINDS["favor"]
    alone = RecurrentEncoderBuilder.from_kwargs(**SIZES, **options, attention_type=name).get().eval()
    phi = alone.layers[0].attention.inner_attention.feature_map
    token, first = torch.randn(N, H * D, generator=random), phi.omega
    _, state = alone(token)
    second = phi.omega
    alone(token, state=state)
    assert not torch.equal(first, second)
    assert phi.omega is second


# make_mirror


class Counter(nn.Module):
    def __init__(self, *extra):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("count", torch.zeros(()))
        for name in extra:
            self.register_buffer(name, torch.zeros(()))


def test_a_mirror_shares_parameters_and_buffers():
    one, two = nn.Sequential(Counter()), nn.Sequential(Counter())
    make_mirror(one, two)
    assert two[0].weight is one[0].weight
    one[0].count += 1
    assert two[0].count == 1
    one[0].count = torch.tensor(5.0)  # replaced, not changed
    assert two[0].count == 5
    assert list(two.state_dict()) == ["0.weight", "0.count"]


def test_a_mirror_keeps_its_separate_buffers():
    one, two = Counter("theirs"), Counter("ours")
    make_mirror(one, two)
    one.count += 1
    assert two.count == 1
    assert sorted(name for name, _ in two.named_buffers()) == ["count", "ours"]


def test_a_mirror_must_have_what_it_mirrors():
    with pytest.raises(ValueError, match=r"0.weight \(2,\).*none"):
        make_mirror(nn.Sequential(Counter()), nn.Sequential())
    other = Counter()
    other.weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"weight \(2,\).*\(3,\)"):
        make_mirror(Counter(), other)
