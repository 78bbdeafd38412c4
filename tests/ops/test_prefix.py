"""Prefix mode against the dense form under its mask, by hand, in training, and in generation."""

import pytest
import torch
from torch import Tensor

import longspan
from longspan import backend, testing
from longspan.attention import REGISTRY
from longspan.generation.native_decoder import Engine
from longspan.generation.sampling import generate, prefill
from longspan.models.config import DecoderConfig, StackConfig
from longspan.models.decoder import Decoder
from longspan.models.stacks import Stack
from longspan.ops import gated, linear, prefix
from longspan.ops.linear import features
from longspan.ops.native.call import available
from longspan.ops.tensors import merge, split
from support.tensors import data as randn

LENGTHS = torch.tensor([17, 60])
N = 97  # a prime: chunks end inside


def unilm(lengths: list[int], mask: Tensor) -> Tensor:
    """Who sees whom, pair by pair: bool (B,N,N)."""
    allowed = torch.zeros(*mask.shape, mask.shape[1], dtype=torch.bool)
    for b, length in enumerate(lengths):
        real = [i for i in range(mask.shape[1]) if mask[b, i]]
        first = real[:length]
        for i in range(mask.shape[1]):
            for j in real:
                allowed[b, i, j] = j <= i or (i in first and j in first)
    return allowed


def holes(n: int = N) -> Tensor:
    """A mask whose second row begins with padding."""
    mask = torch.rand(2, n, generator=torch.Generator().manual_seed(3)) < 0.8
    mask[1, :3] = False
    return mask


def test_inside_counts_real_tokens():
    lengths = torch.tensor([2, 0, 4])
    assert prefix.inside(lengths, 4).tolist() == [[True, True, False, False], [False] * 4, [True] * 4]
    mask = torch.tensor([[False, True, False, True, True]] * 2 + [[True, True, True, False, True]])
    expected = [[False, True, False, True, False], [False] * 5, [True, True, True, False, True]]
    assert prefix.inside(lengths, 5, mask).tolist() == expected


def test_linear_by_hand():
    """Features 1, 2, 3 that are keys and values too; the query cancels. (1 + 4) / 3 for both of the prefix, 14 / 6."""
    module = longspan.build("linear(feature_map='relu', eps=0.0)", 1, 1).double()
    one = torch.ones(1, 1)
    parts = ("query", "key", "value", "out")
    module.load_state_dict({f"{p}.weight": one for p in parts} | {f"{p}.bias": torch.zeros(1) for p in parts})
    x = torch.tensor([[[1.0], [2.0], [3.0]]], dtype=torch.float64)
    y, _ = module(x, prefix=torch.tensor([2]))
    assert y.flatten().tolist() == pytest.approx([5 / 3, 5 / 3, 14 / 6])


SIMILARITIES = {
    "linear": lambda q, k: features.elu(q) @ features.elu(k).mT,
    "linear(feature_map='squared_relu')": lambda q, k: q.relu().square() @ k.relu().square().mT,
    "softmax": lambda q, k: (q @ k.mT / 2).exp(),
    "kernel(similarity='polynomial')": lambda q, k: (q @ k.mT / 2 + 1).square(),
}


@pytest.mark.parametrize("masked", [False, True], ids=["all real", "holes"])
@pytest.mark.parametrize("spec", SIMILARITIES)
def test_equals_the_dense_form(spec, masked):
    torch.manual_seed(0)
    module, x = longspan.build(spec, 8, 2).double(), randn(2, N, 8)
    mask = holes() if masked else torch.ones(2, N, dtype=torch.bool)
    q, k, v = (split(part(x), 2) for part in (module.query, module.key, module.value))
    weights = SIMILARITIES[spec](q, k) * unilm(LENGTHS.tolist(), mask)[:, None]
    eps = 1e-6 if spec.startswith("linear") else 0.0
    expected = module.out(merge(weights @ v / (weights.sum(-1, keepdim=True) + eps)))
    for state in (None, module.init_state(2), module.init_state(2, N)):
        y, _ = module(x, state, mask=mask if masked else None, prefix=LENGTHS)
        torch.testing.assert_close(y[mask], expected[mask], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("name", ["reference", "torch", "native"])
def test_ops_of_every_backend_are_folded(name, rotary):
    """Outputs, the last state and all gradients, from a first state and with padding."""
    if name == "native" and (rotary or not available()):
        pytest.skip("not served natively")
    n, mask = 211, holes(211)
    inside = prefix.inside(LENGTHS, n, mask)
    q, k, v, grad = (randn(2, 3, n, 5, seed=i).float() for i in range(4))
    state, grad_end = torch.rand(2, 3, 5, 6), randn(2, 3, 5, 6, seed=5).float()
    turn = torch.linalg.qr(randn(5, 5)).Q  # stands for a rotation: features of the numerator that are not positive

    def fast(q, k, v, state):
        fq, fk, turned = features.elu(q), features.elu(k), turn.to(q)
        folded, rest = linear.fold(fk, v, inside, mask=mask, state=state, key=fk @ turned if rotary else None)
        options = {"causal": True, "mask": rest, "state": folded, "eps": 0.1}
        with backend(name):
            if rotary:
                return linear.attend(fq, fk, v, numerator=(fq @ turned, fk @ turned), **options)
            return linear.named(q, k, v, feature_map="elu", **options)

    def dense(q, k, v, state):
        fq, fk, allowed = features.elu(q), features.elu(k), unilm(LENGTHS.tolist(), mask)[:, None]
        tq, tk = (fq @ turn, fk @ turn) if rotary else (fq, fk)
        above = (tq @ tk.mT * allowed) @ v + tq @ state[..., :-1]
        below = (fq @ fk.mT * allowed).sum(-1, keepdim=True) + fq @ state[..., -1:]
        real = mask[:, None, :, None]
        end = torch.cat([(tk * real).mT @ v, (fk * real).sum(2)[..., None]], -1)
        return above / (below + 0.1), state + end

    def everything(function, dtype):
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, v, state)]
        o, end = function(*inputs)
        o = o * mask[:, None, :, None]
        found = torch.autograd.grad((o, end), inputs, (grad.to(dtype), grad_end.to(dtype)))
        return [o.detach(), end.detach(), *found]

    expected = everything(dense, torch.float64)
    dtypes = [torch.float32] if name == "native" else [torch.float32, torch.float64]
    for dtype in dtypes:
        tolerance = 1e-10 if dtype is torch.float64 else 1e-5
        for a, b in zip(everything(fast, dtype), expected, strict=True):
            torch.testing.assert_close(a.double(), b, atol=tolerance * float(b.abs().max()), rtol=0)


@pytest.mark.parametrize("name", ["auto", "reference", "torch"])
def test_the_recurrence_without_decay_is_folded(name):
    """Its masked tokens read nothing, so keys are cleared instead."""
    q, k, v, state = randn(2, 3, N, 5), randn(2, 3, N, 5, seed=1), randn(2, 3, N, 4, seed=2), randn(2, 3, 5, 4, seed=3)
    mask = holes()
    folded, rest = prefix.fold(k, v, prefix.inside(LENGTHS, N, mask), state, mask)
    with backend(name):
        o, end = gated.recur(q, k * rest[:, None, :, None], v, scale=1.0, state=folded)
    allowed = unilm(LENGTHS.tolist(), mask)[:, None]
    expected = (q @ k.mT * allowed) @ v + q @ state
    real = mask[:, None, :, None]
    torch.testing.assert_close(o * real, expected * real)
    torch.testing.assert_close(end, state + (k * real).mT @ v)


def test_what_is_masked_may_be_infinite():
    x = randn(2, N, 8).masked_fill(~holes()[..., None], torch.inf)
    y, _ = longspan.build("linear", 8, 2).double()(x, mask=holes(), prefix=LENGTHS)
    assert y.isfinite().all()


@pytest.mark.parametrize("spec", ["linear", "linear(rotary=100.0)", "softmax", "kernel"])
def test_autocast(spec):
    torch.manual_seed(0)
    module, x = longspan.build(spec, 8, 2), randn(2, N, 8).float()
    expected = module(x, prefix=LENGTHS)[0]
    with torch.autocast("cpu", torch.bfloat16):
        for state in (None, module.init_state(2)):
            y, _ = module(x, state, prefix=LENGTHS)
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


def test_a_prompt_read_in_both_directions_is_another_one():
    model = decoder(attention="linear; softmax")
    one, two = (prefill(model, PROMPT, prefix=mode)[0] for mode in (False, True))
    assert (one - two).abs().amax(-1).min() > 1e-6


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
