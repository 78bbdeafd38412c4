"""Decay and the delta rule by the C++ kernels: equal to the definition in values and gradients, whatever the sizes."""

import itertools
import warnings

import pytest
import torch
from test_gated import KINDS, arguments, assert_close, of, outcome

import longspan
from longspan.ops import gated
from longspan.ops.gated import chunks, definition
from longspan.ops.gated import native as kernels
from longspan.ops.gated.operands import Recurrence
from longspan.ops.native.call import available

pytestmark = pytest.mark.skipif(not available(), reason="no native kernels here")
ROUNDED = 1e-5


def widened(given):
    return {name: None if t is None else t.double() for name, t in given.items()}


@pytest.mark.parametrize(("decay", "delta"), list(itertools.product(KINDS, (False, True))))
def test_kernels_are_the_chunks(decay, delta):
    """Which are the loop. Sizes are odd, primes, below and above a vector, a chunk of 32 and a span of 512 tokens."""
    cases = [
        (2, (5, 3), 2, True, True),
        (29, (17, 33), 2, True, True),
        (139, (5, 64), 1, False, True),
        (67, (64, 7), 1, True, False),
        (1103, (7, 5), 1, True, True),
    ]
    for n, sizes, repeats, masked, packed in cases:
        generator = torch.Generator().manual_seed(n)
        mask = torch.rand(2, n, generator=generator) < 0.7 if masked else None
        segments = torch.randint(0, 2, (2, n), generator=generator).cumsum(1) // 37 if packed else None
        given = arguments(n, decay=decay, delta=delta, repeats=repeats, dtype=torch.float32, sizes=sizes)
        options = {"scale": 0.7, "mask": mask, "segments": segments}
        expected = outcome(of(chunks.attend), widened(given), **options)
        assert_close(outcome(of(kernels.attend), given, **options), expected, ROUNDED)


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_heads_of_256_channels(decay, repeats):
    """Six of them are more than are read together."""
    given = arguments(67, decay=decay, dtype=torch.float32, repeats=repeats, sizes=(256, 256))
    options = {"scale": 0.1, "mask": None, "segments": None}
    expected = outcome(of(chunks.attend), widened(given), **options)
    assert_close(outcome(of(kernels.attend), given, **options), expected, ROUNDED)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_strong_decay(decay):
    given = arguments(139, decay=decay, dtype=torch.float32)
    strength = torch.tensor([0.0, 1.0, 1.0, 50.0, 1e4, torch.inf])
    picked = strength[torch.randint(6, given["log_decay"].shape, generator=torch.Generator().manual_seed(1))]
    given["log_decay"] = torch.where(picked.isinf(), -picked, given["log_decay"] * picked)
    options = {"scale": 0.7, "mask": None, "segments": None}
    assert_close(
        outcome(of(kernels.attend), given, **options),
        outcome(of(definition.attend), widened(given), **options),
        ROUNDED,
    )


@pytest.mark.parametrize("way", [chunks, kernels])
@pytest.mark.parametrize("decay", KINDS)
def test_masked_tokens_are_not_read(way, decay):
    """Nor is the gradient of what they return, whatever stands there."""
    given = arguments(67, decay=decay, dtype=torch.float32)
    mask = torch.rand(2, 67, generator=torch.Generator().manual_seed(2)) < 0.6

    def without(t, garbage):
        hidden = ~mask[:, None]
        return t.masked_fill(hidden if t.dim() == 3 else hidden[..., None], garbage)

    def everything(garbage):
        leaves = {name: t if t is None or name == "state" else without(t, garbage) for name, t in given.items()}
        wanted = [t.requires_grad_() for t in leaves.values() if t is not None]
        o, end = way.attend(Recurrence(**leaves, scale=0.7, mask=mask))
        upstream = without(torch.cos(torch.arange(o.numel()).view_as(o)), garbage), torch.ones_like(end)
        return o, end, *torch.autograd.grad((o, end), wanted, upstream)

    for found, expected in zip(everything(torch.nan), everything(0.0), strict=True):
        assert found.equal(expected)


@pytest.mark.parametrize("repeats", [1, 2])
def test_bfloat16_is_summed_in_float32(repeats):
    """Also the gradients of a query that several heads of values share."""
    given = arguments(139, decay="channel", dtype=torch.float32, repeats=repeats)
    low = given | {name: given[name].bfloat16() for name in "qkv"}
    exact = widened(low)
    options = {"scale": 0.7, "mask": None, "segments": None}
    found, expected = outcome(of(kernels.attend), low, **options), outcome(of(chunks.attend), exact, **options)
    assert found[0].dtype is torch.bfloat16
    assert_close(found[1:2], expected[1:2], ROUNDED)
    assert_close(found, expected, 2 * torch.finfo(torch.bfloat16).eps)


def test_any_strides_and_threads_give_the_same_bits():
    given = arguments(139, decay="channel", dtype=torch.float32, repeats=2)
    options = {"scale": 0.7, "mask": None, "segments": None}
    expected = outcome(of(kernels.attend), given, **options)
    moved = {
        name: t if name == "state" else t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in given.items()
    }
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for a, b in zip(outcome(of(kernels.attend), moved, **options), expected, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("decay", "delta"), list(itertools.product(KINDS, (False, True))))
def test_the_step_is_the_loop(decay, delta):
    # Columns are worked on 128, 64 or 32 at a time, then a vector at a time, then one by one.
    for sizes, repeats in itertools.product(((5, 3), (7, 23), (17, 64), (11, 119), (64, 128)), (1, 2)):
        given = arguments(1, decay=decay, delta=delta, dtype=torch.float32, repeats=repeats, sizes=sizes)
        exact = definition.attend(Recurrence(**widened(given), scale=0.7))
        before = given["state"].clone()
        with longspan.backend("native"):
            assert_close(gated.recur(**given, scale=0.7), exact, ROUNDED)
            assert torch.equal(given["state"], before)
            o, state = gated.recur(**given, scale=0.7, donate=True)
        assert_close([o, state], exact, ROUNDED)
        assert state.data_ptr() == given["state"].data_ptr()


@pytest.mark.parametrize("delta", [False, True])
def test_a_step_is_the_same_on_any_number_of_threads(delta):
    """Also where the 4 heads, whose states are large enough for a second thread, cannot be shared out evenly."""
    given = arguments(1, decay="head", delta=delta, dtype=torch.float32, sizes=(128, 64))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            with longspan.backend("native"):
                found.append(gated.recur(**given, scale=0.7))
    finally:
        torch.set_num_threads(threads)
    for one in found[1:]:
        assert all(a.equal(b) for a, b in zip(one, found[0], strict=True))


def test_what_the_kernels_cannot_serve_is_refused():
    given = arguments(5)
    with longspan.backend("native"), pytest.raises(ValueError, match="cannot serve this call of the delta rule: they"):
        gated.recur(**given)


def test_compiled_in_one_graph():
    given = arguments(37, decay="channel", dtype=torch.float32, repeats=2)
    names = list(given)

    def call(*tensors):
        return gated.recur(**dict(zip(names, tensors, strict=True)))

    def run(function):
        inputs = [t.clone().requires_grad_() for t in given.values()]
        o, state = function(*inputs)
        return [o, state, *torch.autograd.grad(o.square().sum() + state.sum(), inputs)]

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
        found = run(torch.compile(call, fullgraph=True, backend="aot_eager"))
    assert_close(found, run(call), ROUNDED)


@pytest.mark.parametrize("name", ["query", "key", "value", "log_decay", "beta", "state"])
@pytest.mark.parametrize("batch", [2, 4])
def test_a_token_of_another_shape_is_refused_and_not_read(name, batch):
    given = {
        "query": torch.zeros(batch, 2, 1, 3),
        "key": torch.zeros(batch, 2, 1, 3),
        "value": torch.zeros(batch, 4, 1, 5),
        "log_decay": torch.zeros(batch, 4, 1),
        "beta": torch.zeros(batch, 4, 1),
        "state": torch.zeros(batch, 4, 3, 5),
    }
    longspan.delta_rule(**given)
    given[name] = given[name][:3] if batch == 4 else torch.cat([given[name]] * 2)
    with pytest.raises(ValueError, match=r"must be|do not fit"):
        longspan.delta_rule(**given)
