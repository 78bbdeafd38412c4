"""The general delta rule by the C++ kernels: equal to the definition in values and gradients, whatever the sizes."""

import itertools
import warnings

import pytest
import torch
from test_general_delta import DECAYS, assert_close, made, outcome, widened

import longspan
from longspan import general_delta_rule
from longspan.ops.gated import general
from longspan.ops.native.call import available

pytestmark = pytest.mark.skipif(not available("general"), reason="no native kernels here")
ROUNDED = 2e-6
EARLY = (False, True)


@pytest.fixture
def threads():
    """``torch.set_num_threads``, undone afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(("decay", "early"), list(itertools.product(DECAYS, EARLY)))
def test_kernels_are_the_chunks(decay, early):
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
        given = made(n, decay=decay, repeats=repeats, dtype=torch.float32, sizes=sizes)
        options = {"scale": 0.7, "mask": mask, "segments": segments, "read_before_decay": early}
        expected = outcome("torch", widened(given), **options)
        assert_close(outcome("native", given, **options), expected, ROUNDED)


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_heads_of_256_channels(decay, early):
    given = made(67, decay=decay, dtype=torch.float32, repeats=3, sizes=(256, 256))
    options = {"scale": 0.1, "read_before_decay": early}
    expected = outcome("torch", widened(given), **options)
    assert_close(outcome("native", given, **options), expected, ROUNDED)


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_strong_decay(decay, early):
    given = made(139, decay=decay, dtype=torch.float32)
    strength = torch.tensor([0.0, 1.0, 1.0, 50.0, 1e4, torch.inf])
    picked = strength[torch.randint(6, given["log_decay"].shape, generator=torch.Generator().manual_seed(1))]
    given["log_decay"] = torch.where(picked.isinf(), -picked, given["log_decay"] * picked)
    options = {"read_before_decay": early}
    expected = outcome("reference", widened(given), **options)
    assert_close(outcome("native", given, **options), expected, ROUNDED)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_decay_of_rwkv7_over_a_long_sequence(rate):
    """At the strongest decay e^-0.6065 of each token and channel, for 4096 tokens, with a = 0 and a = 1."""
    given = made(4096, batch=1, sizes=(8, 8), dtype=torch.float32)
    given["log_decay"] = torch.full_like(given["log_decay"], -0.60653066)
    given["erase"] = given["read"] * rate
    expected = outcome("torch", widened(given), read_before_decay=True)
    assert_close(outcome("native", given, read_before_decay=True), expected, ROUNDED)


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("decay", DECAYS)
def test_masked_tokens_are_not_read(decay, early):
    """Nor is the gradient of what they return, whatever stands there."""
    given = made(67, decay=decay, dtype=torch.float32, repeats=2)
    mask = torch.rand(2, 67, generator=torch.Generator().manual_seed(2)) < 0.6

    def without(t, garbage):
        hidden = ~mask[:, None]
        return t.masked_fill(hidden if t.dim() == 3 else hidden[..., None], garbage)

    def everything(garbage):
        leaves = {name: t if t is None or name == "state" else without(t, garbage) for name, t in given.items()}
        wanted = [t.requires_grad_() for t in leaves.values() if t is not None]
        with longspan.backend("native"):
            o, end = general_delta_rule(**leaves, mask=mask, read_before_decay=early, return_state=True)
        upstream = without(torch.cos(torch.arange(o.numel()).view_as(o)), garbage), torch.ones_like(end)
        return o, end, *torch.autograd.grad((o, end), wanted, upstream)

    for found, expected in zip(everything(torch.nan), everything(0.0), strict=True):
        assert found.equal(expected)


@pytest.mark.parametrize("early", EARLY)
def test_no_gradient_crosses_a_border(early):
    segments = torch.tensor([[0] * 20 + [1] * 45 + [2] * 5, [0] * 40 + [5] * 30])
    given = {name: t.requires_grad_() for name, t in made(70, repeats=2, dtype=torch.float32).items()}
    with longspan.backend("native"):
        out = general_delta_rule(**given, segments=segments, read_before_decay=early)
    grads = torch.autograd.grad(out[0, :, 20:65].square().sum(), given.values())
    for (name, _), grad in zip(given.items(), grads, strict=True):
        inside = grad[0] if name == "state" else grad[0, :, 20:65]
        assert inside.any() == (name != "state")
        assert grad.count_nonzero() == inside.count_nonzero()


@pytest.mark.parametrize("name", ["query", "key", "value", "read", "erase", "log_decay"])
def test_neighbors_of_nan_stay_what_they_are(name):
    segments, others = torch.tensor([[0] * 20 + [1] * 30 + [2] * 20] * 2), torch.ones(2, 70, dtype=torch.bool)
    others[0, 20:50] = False
    given = made(70, repeats=2, dtype=torch.float32)
    spoilt = {key: t.clone() for key, t in given.items()}
    spoilt[name][0, :, 33] = torch.nan
    found, wanted = (
        [t if t.shape[2:] == (6, 5) else t.movedim(1, 2)[others] for t in outcome("native", one, segments=segments)]
        for one in (spoilt, given)
    )
    assert_close(found, wanted, ROUNDED)


@pytest.mark.parametrize("decay", DECAYS)
def test_offsets_are_separate_runs(decay):
    given, lengths = made(1300, decay=decay, batch=1, repeats=2, dtype=torch.float32), (3, 0, 600, 512, 185)
    generator = torch.Generator().manual_seed(3)
    given["state"] = torch.randn(len(lengths), 4, 6, 5, generator=generator)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.arange(1300)[None] % 5 > 0
    options = {"mask": mask, "read_before_decay": True, "cu_seqlens": offsets}
    expected = outcome("torch", widened(given), **options)
    assert_close(outcome("native", given, **options), expected, ROUNDED)


@pytest.mark.parametrize("repeats", [1, 2])
def test_bfloat16_is_summed_in_float32(repeats):
    """Also the gradients of a query that several heads of values share."""
    given = made(139, dtype=torch.float32, repeats=repeats)
    low = given | {name: given[name].bfloat16() for name in ("query", "key", "value", "read", "erase")}
    options = {"read_before_decay": True}
    found, expected = outcome("native", low, **options), outcome("torch", widened(low), **options)
    assert found[0].dtype is torch.bfloat16
    assert_close(found[1:2], expected[1:2], ROUNDED)
    assert_close(found, expected, torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("decay", DECAYS)
def test_any_strides_and_threads_give_the_same_bits(decay, threads):
    given, found = made(139, decay=decay, dtype=torch.float32, repeats=2, batch=3), []
    moved = {
        name: t if t is None or name == "state" else t.transpose(1, 2).contiguous().transpose(1, 2)
        for name, t in given.items()
    }
    for count, one in ((1, given), (2, given), (1, moved), (3, moved)):
        threads(count)
        found.append(outcome("native", one, read_before_decay=True))
    for other in found[1:]:
        assert all(a.equal(b) for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize(("decay", "early"), list(itertools.product(DECAYS, EARLY)))
def test_the_step_is_the_loop(decay, early):
    """Columns are worked on several vectors at a time, then a vector at a time, then one by one."""
    for sizes, repeats in itertools.product(((5, 3), (7, 23), (17, 64), (11, 119), (64, 128)), (1, 2)):
        given = made(1, decay=decay, dtype=torch.float32, repeats=repeats, sizes=sizes)
        options = {"scale": 0.7, "read_before_decay": early, "return_state": True}
        with longspan.backend("reference"):
            exact = general_delta_rule(**widened(given), **options)
        before = given["state"].clone()
        with longspan.backend("native"):
            assert_close(general_delta_rule(**given, **options), exact, ROUNDED)
            assert torch.equal(given["state"], before)
            o, state = general_delta_rule(**given, **options, donate=True)
        assert_close([o, state], exact, ROUNDED)
        assert state.data_ptr() == given["state"].data_ptr()


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_in_half_precision_has_a_state_in_float32(dtype, early):
    given = made(1, dtype=torch.float32, repeats=2, sizes=(37, 41))
    low = given | {name: given[name].to(dtype) for name in ("query", "key", "value", "read", "erase")}
    low["log_decay"] = given["log_decay"].to(dtype)
    exact = general_delta_rule(**widened(low), read_before_decay=early, return_state=True)
    with longspan.backend("native"):
        found = general_delta_rule(**low, read_before_decay=early, return_state=True)
    assert found[0].dtype is dtype
    assert_close(found[:1], exact[:1], torch.finfo(dtype).eps)
    assert_close(found[1:], exact[1:], ROUNDED)


@pytest.mark.parametrize("sizes", [(64, 64), (128, 96)])
def test_a_step_is_the_same_on_any_number_of_threads(sizes, threads):
    """Also where the 6 heads, whose states are large enough for more threads, cannot be shared out evenly."""
    given, found = made(1, dtype=torch.float32, sizes=sizes, repeats=3, batch=1), []
    for count in (1, 2, 4):
        threads(count)
        with longspan.backend("native"):
            found.append(general_delta_rule(**given, return_state=True))
    for one in found[1:]:
        assert all(a.equal(b) for a, b in zip(one, found[0], strict=True))


@pytest.mark.parametrize("decay", DECAYS)
def test_a_prompt_in_two_parts_and_tokens_are_the_whole(decay):
    given, options = made(700, decay=decay, dtype=torch.float32), {"read_before_decay": True, "return_state": True}

    def part(begin, end, state):
        cut = {name: t if t is None else t[:, :, begin:end] for name, t in given.items() if name != "state"}
        return general_delta_rule(**cut, state=state, **options)

    with longspan.backend("native"):
        expected = general_delta_rule(**given, **options)
        first, state = part(0, 677, given["state"])
        out = [first]
        for t in range(677, 700):
            one, state = part(t, t + 1, state)
            out.append(one)
    assert_close([torch.cat(out, 2), state], expected, ROUNDED)


def test_second_derivatives():
    """They come from the chunks, so the first ones on that way must be those of the kernels."""
    given = made(29, dtype=torch.float32, repeats=2)
    inputs = [t.requires_grad_() for t in given.values()]
    with longspan.backend("native"):
        o, end = general_delta_rule(**given, read_before_decay=True, return_state=True)
        loss = o.sin().sum() + end.square().sum()
        plain = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert_close(torch.autograd.grad(loss, inputs, create_graph=True), plain, ROUNDED)


def test_what_the_kernels_cannot_serve_is_refused():
    message = "cannot serve this call of the general delta rule: they take"
    given = made(5)
    with longspan.backend("native"), pytest.raises(ValueError, match=message):
        general_delta_rule(**given)
    mixed = made(5, dtype=torch.float32)
    mixed["read"] = mixed["read"].bfloat16()
    with longspan.backend("native"), pytest.raises(ValueError, match=f"{message} reads and erasures"):
        general_delta_rule(**mixed)


@pytest.mark.parametrize("name", ["query", "key", "value", "read", "erase", "log_decay", "state"])
@pytest.mark.parametrize("batch", [2, 4])
def test_a_token_of_another_shape_is_refused_and_not_read(name, batch):
    given = made(1, dtype=torch.float32, repeats=2, batch=batch)
    general_delta_rule(**given)
    given[name] = given[name][:3] if batch == 4 else torch.cat([given[name]] * 2)
    with pytest.raises(ValueError, match=r"must be|must have|do not fit"):
        general_delta_rule(**given)


@pytest.mark.parametrize("form", ["native", "torch"])
def test_compiled_in_one_graph(form):
    given = made(37, dtype=torch.float32, repeats=2)
    names = list(given)

    def call(*tensors):
        return general.recur(**dict(zip(("q", "k", "v", *names[3:]), tensors, strict=True)), read_before_decay=True)

    def run(function):
        inputs = [t.clone().requires_grad_() for t in given.values()]
        o, state = function(*inputs)
        return [o, state, *torch.autograd.grad(o.square().sum() + state.sum(), inputs)]

    torch._dynamo.reset()
    with warnings.catch_warnings(), longspan.backend(form):
        warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
        found = run(torch.compile(call, fullgraph=True, backend="aot_eager"))
        expected = run(call)
    assert_close(found, expected, ROUNDED)
