"""What PyTorch code does to a module: quantization, tracing, derivatives of derivatives, checkpoints."""

import re

import pytest
import torch
from torch import nn

import longspan
from longspan import Decoder, DecoderConfig
from longspan.attention import REGISTRY
from longspan.attention.linear import Linear
from longspan.cli import describe
from longspan.ops.softmax import dense

SPECS = [longspan.mechanism_examples(name)[0] for name in longspan.list_mechanisms()]


def built(spec, **arguments):
    """The attention, causal where it can be, with dim=24 and 2 heads."""
    causal = "causal" in REGISTRY[spec.partition("(")[0]].directions
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return longspan.build(spec, 24, 2, causal=causal, **arguments).eval()


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantize.*is deprecated")
@pytest.mark.parametrize("spec", SPECS)
def test_a_quantized_attention_reads_and_steps(spec):
    """Weights in float16: the outputs of the attention itself, to rounding; states are made without a weight."""
    attention, x = built(spec), randn(2, 29, 24)
    quantized = torch.ao.quantization.quantize_dynamic(attention, {nn.Linear}, dtype=torch.float16)
    assert not any(isinstance(part, nn.Linear) for part in quantized.modules())
    with torch.no_grad():
        y, _ = quantized(x)
        # The weights of that are rounded alike, so that nothing else rounds as much.
        for part in attention.modules():
            if isinstance(part, nn.Linear):
                part.weight.copy_(part.weight.half())
        torch.testing.assert_close(y, attention(x)[0], atol=1e-4, rtol=1e-4)
        if quantized.causal:
            first, state = quantized(x[:, :28], quantized.init_state(2, 29))
            last, _ = quantized(x[:, 28:], state)
            torch.testing.assert_close(torch.cat([first, last], 1), y, atol=1e-4, rtol=1e-4)


class Int8(nn.Module):
    """A linear map as other libraries quantize it: integers as the weight, which is no float, in a parameter."""

    def __init__(self, linear):
        super().__init__()
        self.scale = float(linear.weight.detach().abs().max()) / 127
        whole = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(whole, requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale).mT


def test_a_weight_of_integers_is_no_type_for_a_state():
    attention = built("deltanet")
    for name in ("query", "key", "value", "out"):
        setattr(attention, name, Int8(getattr(attention, name)))
    state = attention.init_state(2)
    assert {leaf.dtype for leaf in state} == {torch.float32}
    assert attention(randn(2, 5, 24), state)[0].shape == (2, 5, 24)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spec", ["linear", "softmax", "gla", "performer"])
def test_states_follow_the_dtype_of_the_weights(spec, dtype):
    state = built(spec).to(dtype).init_state(1, 3)
    floats = {leaf.dtype for leaf in torch.utils._pytree.tree_leaves(state) if leaf.is_floating_point()}
    assert floats == {dtype if spec == "softmax" else torch.promote_types(dtype, torch.float32)}


@pytest.mark.filterwarnings("ignore:.*quantiz.*deprecated")
def test_a_quantized_decoder_generates():
    config = DecoderConfig(dim=16, depth=2, heads=2, attention="linear; softmax", feedforward=32, vocab=7, length=13)
    model = torch.ao.quantization.quantize_dynamic(Decoder(config).eval(), {nn.Linear}, dtype=torch.qint8)
    tokens = longspan.generate(model, max_new_tokens=5, batch=3, seed=0)
    assert tokens.shape == (3, 5)
    assert longspan.log_likelihood(model, tokens).isfinite().all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("what", ["attention", "decoder", "op"])
def test_tracing_is_refused(what):
    """A trace stores the sizes of its example as constants, including sizes passed to kernels."""
    if what == "attention":
        subject, example = built("deltanet"), randn(2, 29, 24)
    elif what == "decoder":
        config = DecoderConfig(dim=8, depth=1, heads=2, feedforward=8, vocab=5, length=7)
        subject, example = Decoder(config).eval(), torch.zeros(2, 7, dtype=torch.int64)
    else:
        subject, example = longspan.linear_attention, (randn(2, 2, 29, 3),) * 3
    with pytest.raises(ValueError, match=r"torch.jit.trace.*torch.export.*torch.compile"):
        torch.jit.trace(subject, example, check_trace=False)


def test_second_derivatives_of_some_inputs():
    """A gradient penalty on the queries of a frozen memory."""
    q, k, v = randn(1, 2, 5, 3).requires_grad_(), randn(1, 2, 7, 3, seed=1), randn(1, 2, 7, 3, seed=2)
    (grad,) = torch.autograd.grad(dense.attend(q, k, v).square().sum(), q, create_graph=True)
    grad.square().sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0


def test_first_derivatives_of_softmax_are_those_of_the_fused_kernel():
    q, k, v = (randn(2, 2, 37, 8, seed=i).requires_grad_() for i in range(3))
    found = torch.autograd.grad(dense.attend(q, k, v, causal=True).sin().sum(), (q, k, v))
    fused = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for a, b in zip(found, torch.autograd.grad(fused.sin().sum(), (q, k, v)), strict=True):
        assert torch.equal(a, b)


def test_a_model_and_a_path_in_torchs_order(tmp_path):
    model = Decoder(DecoderConfig(dim=8, depth=1, heads=2, feedforward=8, vocab=5, length=7))
    with pytest.raises(ValueError, match=r"save\(model, folder\)"):
        longspan.save(tmp_path / "model", model)
    with pytest.raises(ValueError, match=r"folder .*int"):
        longspan.save(model, 3)
    assert list(tmp_path.iterdir()) == []


def test_what_show_offers_build_takes():
    """A spec is text, so a value that only Python can express belongs to the class, not to the option."""
    for cls in REGISTRY.values():
        for option in describe.options(built(cls.examples[0])):
            assert not re.search("callable|function of yours", option["meaning"]), (cls.name, option)
    own = Linear(8, 2, feature_map=torch.relu)
    assert own(randn(1, 3, 8))[0].shape == (1, 3, 8)
    for name in ("elu", "relu", "squared_relu", "exp"):
        assert name in describe.meaning(Linear, "feature_map")
        assert longspan.build(f"linear(feature_map={name!r})", 8, 2).phi is not None
