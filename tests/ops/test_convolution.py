"""The causal convolution: all forms equal the definition in values and gradients, for any cut, layout and type."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from longspan import backend, causal_convolution
from longspan.ops.convolution import native as kernels
from longspan.ops.native.call import available

ROUNDED = 1e-5
WAYS = ("torch", *(("native",) if available() else ()))
needs_kernels = pytest.mark.skipif(not available(), reason="no native kernels here")


def arguments(n=29, channels=37, taps=4, *, rows=None, batch=2, bias=True, dtype=torch.float64, states=None):
    generator = torch.Generator().manual_seed(n + channels)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "x": random(batch, n, channels),
        "weight": random(channels, taps) / taps,
        "bias": random(channels) if bias else None,
        "state": random(states or batch, taps - 1 if rows is None else rows, channels),
    }


def outcome(given, name, **options):
    """y, the state and the gradients of all inputs from random ones of both, by a backend."""
    inputs = {which: None if t is None else t.detach().requires_grad_() for which, t in given.items()}
    with backend(name):
        outputs = causal_convolution(**inputs, **options)
    generator = torch.Generator().manual_seed(9)
    upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [t for t in inputs.values() if t is not None], upstream)]


def to(given, dtype):
    return {name: None if t is None else t.to(dtype) for name, t in given.items()}


def assert_close(found, expected, tolerance):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert not a.numel() or (a.double() - b.double()).abs().max() <= tolerance * b.abs().max().clamp(min=1)


def packing(kind, n, batch):
    """The arguments that mark the starts of sequences, empty ones included."""
    if kind == "segments":
        generator = torch.Generator().manual_seed(n)
        return {"segments": torch.randint(0, 2, (batch, n), generator=generator).cumsum(1) // 3}
    two = min(2, n)
    cuts = [0, 0, two, two, max(n // 2, two), max(n // 2, two) + (n > 40), n, n]
    return {"cu_seqlens": torch.tensor(cuts, dtype=torch.int32)}


def by_hand(x, weight, bias, state):
    """Each output as a sum written out, from the state's rows and the tokens side by side."""
    tokens, taps = torch.cat([state, x], 1), weight.shape[1]
    start = state.shape[1] - taps + 1
    windows = tokens[:, start:].unfold(1, taps, 1)  # (B,N,C,K)
    return (windows * weight).sum(-1) + bias, tokens[:, x.shape[1] :]


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_by_hand(name):
    given = arguments()
    y, state = by_hand(**given)
    with backend(name):
        assert_close(causal_convolution(**given), (y, state), 1e-12)
        assert_close(causal_convolution(**given, activation="silu"), (F.silu(y), state), 1e-12)


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_it_is_the_causal_conv1d_of_torch(name):
    given = arguments()
    given["state"].zero_()
    expected = F.conv1d(given["x"].mT, given["weight"][:, None], given["bias"], padding=3, groups=37)[..., :29].mT
    del given["state"]
    with backend(name):
        assert_close([causal_convolution(**given)[0]], [expected], 1e-12)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("kind", ["plain", "segments", "cu_seqlens"])
def test_every_form_is_the_definition(name, kind):
    """Sizes below and above a vector, a tile of 32 tokens, a unit of 256 or 512, a block of 128 or 512 channels."""
    for n, channels, taps, rows, activation in (
        (1, 1, 1, 0, None),
        (2, 5, 4, 3, "silu"),
        (3, 40, 3, 2, None),
        (29, 37, 2, 5, "silu"),
        (67, 131, 4, 3, "silu"),
        (67, 16, 7, 9, "silu"),
        (557, 18, 4, 3, "silu"),
        (9, 1043, 4, 4, None),
    ):
        batch = 1 if kind == "cu_seqlens" else 2
        packed = {} if kind == "plain" else packing(kind, n, batch)
        states = len(packed["cu_seqlens"]) - 1 if kind == "cu_seqlens" else None
        for bias in (True, False):
            given = arguments(n, channels, taps, rows=rows, batch=batch, states=states, bias=bias)
            expected = outcome(given, "reference", activation=activation, **packed)
            if name == "native":
                assert_close(
                    outcome(to(given, torch.float32), name, activation=activation, **packed), expected, ROUNDED
                )
            else:
                assert_close(outcome(given, name, activation=activation, **packed), expected, 1e-12)


@pytest.mark.parametrize("name", WAYS)
def test_packed_sequences_equal_separate_runs(name):
    """Exactly: one token of another sequence would be seen, however small its weight."""
    given = to(arguments(67, 21, batch=1, states=7), torch.float32)
    cuts = packing("cu_seqlens", 67, 1)["cu_seqlens"]
    with backend(name):
        y, state = causal_convolution(**given, cu_seqlens=cuts, activation="silu")
        for s, (begin, end) in enumerate(itertools.pairwise(cuts.tolist())):
            alone = given | {"x": given["x"][:, begin:end], "state": given["state"][s : s + 1]}
            # Native kernels have nothing to do for no tokens.
            with backend(name if begin < end else "auto"):
                part, last = causal_convolution(**alone, activation="silu")
            torch.testing.assert_close(y[:, begin:end], part, atol=1e-6, rtol=1e-6)
            assert state[s : s + 1].equal(last)
        spoilt = given | {"x": given["x"].clone()}
        spoilt["x"][:, : cuts[4]] = torch.nan
        after, _ = causal_convolution(**spoilt, cu_seqlens=cuts, activation="silu")
        assert after[:, cuts[4] :].equal(y[:, cuts[4] :])
        segments = torch.bucketize(torch.arange(67), cuts, right=True)[None]
        given |= {"state": None}
        both = [causal_convolution(**given, **p)[0] for p in ({"segments": segments}, {"cu_seqlens": cuts})]
        torch.testing.assert_close(*both, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("rows", [3, 4])
def test_any_cut_gives_one_answer(name, rows):
    given = to(arguments(29, rows=rows), torch.float32)
    with backend(name):
        y, last = causal_convolution(**given, activation="silu")
        parts, state = [], given["state"]
        for part in (slice(0, 1), slice(1, 3), slice(3, 3), slice(3, 20), slice(20, 21), slice(21, 29)):
            # Native kernels have nothing to do for no tokens.
            with backend("auto"):
                o, state = causal_convolution(**given | {"x": given["x"][:, part], "state": state}, activation="silu")
            parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1), y, atol=1e-6, rtol=1e-6)
    assert state.equal(last)


LAYOUTS = {
    "tokens last": lambda t: t.mT.contiguous().mT,
    "every other channel": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "a slice": lambda t: torch.cat([t, t], -1)[..., 1 : t.shape[-1] + 1].roll(1, -1)[..., : t.shape[-1]],
}


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_read_where_they_are(layout):
    for dtype, n, channels in ((torch.float32, 67, 37), (torch.bfloat16, 29, 48), (torch.float16, 3, 5)):
        given = to(arguments(n, channels), dtype)
        moved = {name: LAYOUTS[layout](t) if t.dim() == 3 else t for name, t in given.items()}
        moved["weight"] = given["weight"].mT.contiguous().mT
        for name, t in moved.items():
            assert t.equal(given[name]) or layout == "a slice"
        expected = outcome({name: t.contiguous() for name, t in moved.items()}, "native", activation="silu")
        found = outcome(moved, "native", activation="silu")
        for a, b in zip(found, expected, strict=True):
            assert a.equal(b)
        if layout == "tokens last":
            assert found[0].stride() == moved["x"].stride()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    """y to the nearest number of its type; the state holds the inputs as they came."""
    for n, channels in ((29, 37), (67, 64)):
        given = to(arguments(n, channels), dtype)
        expected = outcome(to(given, torch.float64), "reference", activation="silu")
        found = outcome(given, "native", activation="silu")
        assert found[0].dtype is dtype
        assert found[1].dtype is dtype
        assert found[1].double().equal(expected[1])
        assert_close(found, expected, torch.finfo(dtype).eps)


@needs_kernels
def test_every_float16_is_read_and_written_as_it_is():
    """By the vectors and by what is left of them, in sequences and steps."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = torch.cat([every, every[:5]])
    for layout in (every[None, None], every[None, :, None]):
        one = torch.ones(layout.shape[2], 1)
        for state in (None, torch.zeros(1, 0, layout.shape[2])):
            y, _ = causal_convolution(layout, one, state=state)
            assert y.isnan().equal(layout.isnan())
            assert y.nan_to_num(1.0, 2.0, 3.0).equal(layout.nan_to_num(1.0, 2.0, 3.0))
    numbers = torch.randn(1, 1, 4099) * torch.logspace(-9, 6, 4099)
    half, factor = numbers.half(), torch.rand(4099, 1)
    for state in (None, torch.zeros(1, 0, 4099)):
        y, _ = causal_convolution(half, factor, state=state)
        assert y.equal((half.float() * factor.mT).half())


@needs_kernels
def test_a_step_is_the_definition():
    kinds = ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float16,) * 2)
    # Some vectors and what is left of them, more than a block of channels; a state with a row more than the taps read.
    sizes = ((5, 4), (67, 4), (300, 3), (67, 2), (67, 6), (4105, 4))
    layouts = (0, 1), (False, True), (False, True)
    for (dtype, kept), (channels, taps), (more, tokens_last, taps_first) in itertools.product(
        kinds, sizes, itertools.product(*layouts)
    ):
        given = to(arguments(1, channels, taps, rows=taps - 1 + more, batch=3), dtype)
        given["state"] = given["state"].to(kept)
        if taps_first:
            given["weight"] = given["weight"].mT.contiguous().mT
        exact = outcome(to(given, torch.float64), "reference", activation="silu")[:2]
        if tokens_last:
            given["state"] = given["state"].mT.contiguous().mT
        before = given["state"].clone()
        with torch.no_grad(), backend("native"):
            for donate in (False, True):
                y, state = causal_convolution(**given, activation="silu", donate=donate)
                tolerance = ROUNDED if dtype is torch.float32 else torch.finfo(dtype).eps
                assert_close([y], exact[:1], tolerance)
                assert state.double().equal(exact[1])
                assert (state.data_ptr() == given["state"].data_ptr()) is donate
                assert state.dtype is kept
                assert state.stride() == given["state"].stride()
                assert donate or given["state"].equal(before)


@needs_kernels
def test_any_number_of_threads_gives_the_same_bits():
    given, token = (to(arguments(n, 530, batch=70 if n == 1 else 2), torch.float32) for n in (600, 1))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            with torch.no_grad(), backend("native"):
                step = causal_convolution(**token)
            found.append([*outcome(given, "native", activation="silu"), *step])
    finally:
        torch.set_num_threads(threads)
    for one in found[1:]:
        assert all(a.equal(b) for a, b in zip(one, found[0], strict=True))


@pytest.mark.parametrize("kind", ["plain", "segments", "cu_seqlens"])
def test_derivatives_and_their_derivatives_are_exact(kind):
    batch = 1 if kind == "cu_seqlens" else 2
    packed = {} if kind == "plain" else packing(kind, 5, batch)
    given = arguments(5, 2, 3, batch=batch, states=7 if kind == "cu_seqlens" else None)

    def call(*tensors):
        with backend("torch"):
            return causal_convolution(*tensors, activation="silu", **packed)

    leaves = [t.requires_grad_() for t in given.values()]
    assert gradcheck(call, leaves, fast_mode=True)
    assert gradgradcheck(call, leaves, fast_mode=True)


@needs_kernels
@pytest.mark.parametrize("kind", ["plain", "segments", "cu_seqlens"])
def test_gradients_that_can_be_differentiated_are_the_gradients(kind):
    batch = 1 if kind == "cu_seqlens" else 2
    packed = {} if kind == "plain" else packing(kind, 29, batch)
    given = to(arguments(29, batch=batch, states=7 if kind == "cu_seqlens" else None), torch.float32)
    leaves = [t.requires_grad_() for t in given.values()]
    with backend("native"):
        y, state = causal_convolution(*leaves, activation="silu", **packed)
    loss = y.sin().sum() + state.square().sum()
    plain = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert_close(torch.autograd.grad(loss, leaves, create_graph=True), plain, ROUNDED)


@needs_kernels
def test_the_backward_pass_keeps_the_inputs_alone():
    given, kept = to(arguments(67), torch.float32), []
    leaves = [t.requires_grad_() for t in given.values()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        causal_convolution(*leaves, activation="silu")
    assert {t.data_ptr() for t in kept} <= {t.data_ptr() for t in leaves}


@needs_kernels
def test_compiled_in_one_graph():
    given = to(arguments(37), torch.float32)

    def call(*tensors):
        return causal_convolution(*tensors, activation="silu")

    def run(function):
        leaves = [t.detach().requires_grad_() for t in given.values()]
        y, state = function(*leaves)
        return [y, state, *torch.autograd.grad(y.square().sum() + state.sum(), leaves)]

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
        found = run(torch.compile(call, fullgraph=True, backend="aot_eager"))
    assert_close(found, run(call), ROUNDED)


# torch compiles some rules on first use, by what it calls deprecated itself.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
@pytest.mark.parametrize("tokens", [1, 7])
def test_transforms_take_plain_forms(tokens):
    """Rows by vmap are rows of a batch, and forward mode agrees with backward mode."""
    given = to(arguments(tokens, 5), torch.float32)

    def call(x, state):
        return causal_convolution(x, given["weight"], given["bias"], state, activation="silu")

    inputs = given["x"], given["state"]
    rows = torch.func.vmap(lambda x, state: [t[0] for t in call(x[None], state[None])])(*inputs)
    assert_close(rows, call(*inputs), ROUNDED)
    tangents = tuple(t.cos() for t in inputs)
    (y, _), (slope, _) = torch.func.jvp(call, inputs, tangents)
    grads = torch.func.grad(lambda *both: call(*both)[0].square().sum(), argnums=(0, 1))(*inputs)
    assert_close([2 * (y * slope).sum()], [sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))], ROUNDED)


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_sign_that_is_still_to_be_changed(tokens):
    given = to(arguments(tokens, 5), torch.float32)
    expected = causal_convolution(**given)
    for which in given:
        found = causal_convolution(**given | {which: torch._neg_view(-given[which])})
        assert_close(found, expected, ROUNDED)


@needs_kernels
def test_what_the_kernels_cannot_serve_is_refused():
    with backend("native"), pytest.raises(ValueError, match="cannot serve this call of the causal convolution: they"):
        causal_convolution(**arguments(5))
    wide = {"x": torch.zeros(1, 5, 2), "weight": torch.zeros(2, kernels.MOST + 1)}
    with backend("native"), pytest.raises(ValueError, match="they take at most 256 taps and rows of a state"):
        causal_convolution(**wide)
    assert causal_convolution(**wide)[1].shape == (1, kernels.MOST, 2)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 7)}, r"^x .*torch.float32 \(2, 7\)"),
        ({"weight": torch.zeros(5, 1, 4)}, r"^weight .*\(C, K\) = \(5, at least 1\)"),
        ({"weight": torch.zeros(4, 5)}, "weight must be"),
        ({"weight": torch.zeros(5, 0)}, "weight must be"),
        ({"bias": torch.zeros(4)}, r"^bias .*\(5,\).*torch.float32 \(4,\)"),
        ({"state": torch.zeros(2, 2, 5)}, r"state must be torch.float32 \(B, R, C\) = \(2, at least 3, 5\), not"),
        ({"state": torch.zeros(1, 3, 5)}, "state must be"),
        ({"state": torch.zeros(2, 3, 5).double()}, "not torch.float64"),
        ({"activation": "relu"}, "unknown activation 'relu'; known: silu"),
        ({"segments": torch.zeros(2, 6)}, "segments must be int64"),
        ({"cu_seqlens": torch.tensor([0, 1])}, "so B must be 1, not 2"),
        ({"cu_seqlens": torch.zeros(2)}, r"cu_seqlens must be int32 or int64 \(S \+ 1,\), not torch.float32 \(2,\)"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message, tokens):
    given = {"x": torch.zeros(2, tokens, 5), "weight": torch.zeros(5, 4), "state": torch.zeros(2, 3, 5)} | changes
    with pytest.raises(ValueError, match=message):
        causal_convolution(**given)


@pytest.mark.parametrize("cuts", [[0, 3], [1, 7], [0, 5, 3, 7], [0, 9], []])
def test_offsets_that_are_none_of_the_row_are_refused(cuts):
    with pytest.raises(ValueError, match=r"rise from 0 to the number of tokens, 7, not \[|cu_seqlens must be int32"):
        causal_convolution(torch.zeros(1, 7, 5), torch.zeros(5, 4), cu_seqlens=torch.tensor(cuts, dtype=torch.int64))


def test_two_ways_of_packing_are_refused():
    ids, cuts = torch.zeros(1, 7, dtype=torch.int64), torch.tensor([0, 7])
    with pytest.raises(ValueError, match="segments and cu_seqlens"):
        causal_convolution(torch.zeros(1, 7, 5), torch.zeros(5, 4), segments=ids, cu_seqlens=cuts)


def test_a_state_that_is_read_too_may_not_be_given_away():
    state = torch.zeros(1, 3, 5)
    with pytest.raises(ValueError, match="overwrites the state, which shares memory with x"):
        causal_convolution(state[:, :1], torch.zeros(5, 4), state=state, donate=True)


@pytest.mark.parametrize("kind", ["plain", "segments", "cu_seqlens"])
@pytest.mark.parametrize("rows", [3, 5])
def test_masked_tokens_are_skipped(kind, rows):
    """The real tokens alone, as a shorter call; what masked ones hold reaches nothing, and their outputs are 0."""
    n = 29
    packed = {} if kind == "plain" else packing(kind, n, 1)
    states = len(packed["cu_seqlens"]) - 1 if kind == "cu_seqlens" else 1
    given = arguments(n, 3, batch=1, rows=rows, states=states)
    mask = torch.rand(1, n, generator=torch.Generator().manual_seed(1)) < 0.6
    real = mask[0]
    short = {**given, "x": given["x"][:, real]}
    if kind == "segments":
        shorter = {"segments": packed["segments"][:, real]}
    elif kind == "cu_seqlens":
        shorter = {"cu_seqlens": F.pad(real.cumsum(0), (1, 0))[packed["cu_seqlens"].long()]}
    else:
        shorter = {}
    y, state = causal_convolution(**given, mask=mask, **packed)
    expected, after = causal_convolution(**short, **shorter)
    torch.testing.assert_close(y[:, real], expected)
    torch.testing.assert_close(state, after)
    assert y[:, ~real].eq(0).all()
    x = given["x"].masked_fill(~mask[..., None], torch.nan).requires_grad_()
    again, after = causal_convolution(**{**given, "x": x}, mask=mask, **packed)
    torch.testing.assert_close(again, y)
    torch.testing.assert_close(after, state)
    (grad,) = torch.autograd.grad(again.square().sum(), x)
    assert grad.isfinite().all()
    assert grad[:, ~real].eq(0).all()


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"mask must be bool \(2, 29\)"):
        causal_convolution(**arguments(), mask=torch.ones(2, 28, dtype=torch.bool))
