"""Prefix mode: which tokens are inside, what is refused, training, and generation."""

import pytest
import torch

import longspan
from longspan import backend, testing
from longspan.attention import REGISTRY
from longspan.generation.native_decoder import Engine
from longspan.generation.sampling import generate, prefill
from longspan.models.config import DecoderConfig, StackConfig
from longspan.models.decoder import Decoder
from longspan.models.stacks import Stack
from longspan.ops import prefix
from support.tensors import data as randn


def test_inside_counts_real_tokens():
    lengths = torch.tensor([2, 0, 4])
    assert prefix.inside(lengths, 4).tolist() == [[True, True, False, False], [False] * 4, [True] * 4]
    mask = torch.tensor([[False, True, False, True, True]] * 2 + [[True, True, True, False, True]])
    expected = [[False, True, False, True, False], [False] * 5, [True, True, True, False, True]]
    assert prefix.inside(lengths, 5, mask).tolist() == expected


@pytest.mark.parametrize("spec", ["linear", "linear(rotary=100.0)", "softmax", "kernel"])
def test_autocast(spec):
    torch.manual_seed(0)
    module, x, lengths = longspan.build(spec, 8, 2), randn(2, 97, 8).float(), torch.tensor([17, 60])
    expected = module(x, prefix=lengths)[0]
    with torch.autocast("cpu", torch.bfloat16):
        for state in (None, module.init_state(2)):
            y, _ = module(x, state, prefix=lengths)
            torch.testing.assert_close(y.float(), expected, atol=0.02, rtol=0)


LINEAR, X, TWO = longspan.build("linear", 8, 2), torch.zeros(2, 5, 8), torch.tensor([2, 2])
HIDDEN = torch.tensor([[True] * 5, [False, True, True, False, False]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefix": torch.tensor([1, 6])}, r"prefix\[1\]=6 must lie between 0 and the row's 5 real tokens"),
        ({"prefix": torch.tensor([-1, 6])}, r"prefix\[0\]=-1 must lie between 0 and the row's 5 real tokens"),
        ({"prefix": torch.tensor([1, 2, 3])}, r"prefix must be int64 \(2,\), .* not torch.int64 \(3,\)"),
        ({"prefix": torch.tensor([1.0, 2.0])}, r"prefix must be int64 \(2,\), .* not torch.float32 \(2,\)"),
        ({"prefix": torch.tensor([5, 3]), "mask": HIDDEN}, r"prefix\[1\]=3 must lie between 0 and the row's 2 real"),
        ({"prefix": TWO, "segments": torch.zeros(2, 5, dtype=torch.long)}, "prefix= and segments="),
        ({"prefix": TWO, "context": X}, "prefix= and context="),
        ({"prefix": TWO, "state": LINEAR(X, context=X)[1]}, "prefix= .* state of cross attention"),
    ],
)
def test_refusals(given, message):
    with pytest.raises(ValueError, match=message):
        LINEAR(X, **given)


def test_a_stack_with_a_mechanism_that_has_no_prefix_mode(monkeypatch):
    monkeypatch.setattr(REGISTRY["kernel"], "supported_args", REGISTRY["kernel"].supported_args - {"prefix"})
    assert testing.check("prefix_mode", "linear; kernel").note == "takes no prefix"
    model = decoder(attention="linear; kernel")
    with pytest.raises(ValueError, match="kernel does not support prefix=; it supports: context"):
        generate(model, PROMPT, max_new_tokens=3, prefix=True, stream=True)


PROMPT = torch.randint(0, 7, (3, 11), generator=torch.Generator().manual_seed(0))


def decoder(dtype=torch.float64, **fields):
    torch.manual_seed(0)
    small = {"dim": 8, "depth": 2, "heads": 2, "feedforward": 12, "vocab": 7, "length": 60}
    return Decoder(DecoderConfig(**small | fields)).to(dtype).eval()


SPECS = ["linear", "softmax", "linear; softmax(kv_heads=1)"]


def test_a_stack_that_is_all_prefix_is_the_bidirectional_one():
    config = StackConfig(dim=8, depth=3, heads=2, feedforward=12, attention="linear; softmax; kernel")
    one, both = (Stack(config, causal=causal).double().eval() for causal in (True, False))
    both.load_state_dict(one.state_dict())
    x = randn(2, 13, 8)
    torch.testing.assert_close(one(x, prefix=torch.tensor([13, 13]))[0], both(x)[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("attention", SPECS)
def test_greedy_generation_is_argmax_of_recomputed_outputs(attention):
    model, found = decoder(attention=attention, positions="rotary"), {}
    for mode in (True, False):
        found[mode] = generate(model, PROMPT, max_new_tokens=9, temperature=0, prefix=mode)
        sequence = PROMPT
        for _ in range(9):
            inputs = torch.cat([torch.full((3, 1), model.start), sequence], 1)
            outputs, _ = model(inputs, prefix=torch.full((3,), 12) if mode else None)
            sequence = torch.cat([sequence, outputs[:, -1:].argmax(-1)], 1)
        assert torch.equal(found[mode], sequence[:, 11:])


@pytest.mark.parametrize("attention", SPECS)
def test_training_and_generation_give_one_likelihood(attention):
    """The outputs of one call, which a loss is made of, are those of a prompt that is read first and of steps."""
    model, lengths = decoder(attention=attention), torch.tensor([11, 4, 0])
    sequence = torch.cat([PROMPT, PROMPT.flip(1)], 1)
    outputs, _ = model(model.shift(sequence), prefix=lengths + 1)
    outputs.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    for row, length in enumerate(lengths.tolist()):
        one = sequence[row : row + 1]
        last, state = prefill(model, one[:, :length], prefix=True)
        found = [last]
        for token in one[0, length:-1]:
            y, state = model(token.view(1, 1), state)
            found.append(y[:, 0])
        torch.testing.assert_close(torch.cat(found), outputs[row, length:], atol=1e-10, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_prompts_equal_separate_ones(side):
    model = decoder(attention="linear; softmax", positions="rotary")
    mask = torch.arange(11).expand(3, -1) < torch.tensor([11, 4, 0])[:, None]
    mask = mask.flip(1) if side == "left" else mask
    found = generate(model, PROMPT, mask=mask, max_new_tokens=6, temperature=0, prefix=True)
    for row in range(3):
        alone = generate(model, PROMPT[row : row + 1, mask[row]], max_new_tokens=6, temperature=0, prefix=True)
        assert torch.equal(found[row : row + 1], alone)


def test_the_engine_goes_on_from_a_prefix(monkeypatch):
    model, calls = decoder(torch.float32, attention="linear; softmax"), []
    if reason := Engine.why_not(model):
        pytest.skip(reason)
    real = Engine.__call__
    monkeypatch.setattr(Engine, "__call__", lambda self, *given: calls.append(1) or real(self, *given))
    mask = torch.arange(11).expand(3, -1) < torch.tensor([11, 4, 0])[:, None]
    found = generate(model, PROMPT, mask=mask, max_new_tokens=20, seed=1, prefix=True)
    assert len(calls) == 19
    with backend("torch"):
        expected = generate(model, PROMPT, mask=mask, max_new_tokens=20, seed=1, prefix=True)
    assert len(calls) == 19
    assert torch.equal(found, expected)


def test_a_prefix_needs_a_prompt():
    with pytest.raises(ValueError, match="prefix=True needs a prompt"):
        generate(decoder(), max_new_tokens=3, prefix=True, stream=True)
