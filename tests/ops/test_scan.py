"""The diagonal and the selective scan: all forms equal the equations, whatever is masked, packed, cut or cleared."""

import itertools
import subprocess
import sys
import warnings

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import longspan
from longspan import backend, diagonal_scan, selective_scan
from scan_cases import (
    HAVE_KERNELS,
    SCANS,
    TOKENS,
    assert_close,
    by,
    defined,
    extras,
    operands,
    outcome,
    packing,
)

needs_kernels = pytest.mark.skipif(not HAVE_KERNELS, reason="no C++ compiler")
BACKENDS = ["reference", "torch", pytest.param("native", marks=needs_kernels)]
KINDS = list(SCANS)
EXACT, ROUNDED = 1e-10, 1e-6


def cast(given, dtype):
    return {name: t.to(dtype) for name, t in given.items()}


@pytest.mark.whole
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", ["plain", "segments", "cu_seqlens"])
def test_values_and_gradients_are_those_of_the_equations(kind, name, packed):
    sizes = ((1, 5, 4), (63, 17, 16), (131, 70, 5)) if name == "native" else ((1, 5, 4), (67, 3, 2))
    for n, channels, size in sizes:
        for bare, masked in ((False, False), (True, True)):
            batch = 1 if packed == "cu_seqlens" else 2
            given = operands(kind, n, channels, size, batch=batch, states=7 if batch == 1 else None, bare=bare)
            options = extras(kind, given) | ({} if packed == "plain" else packing(packed, n, batch))
            if masked:
                options["mask"] = torch.rand(batch, n, generator=torch.Generator().manual_seed(1)) > 0.3
            expected = outcome(defined, given, **options)
            single = name == "native"
            found = outcome(by(kind, name), cast(given, torch.float32) if single else given, **options)
            assert_close(found, expected, ROUNDED if single else EXACT)


@needs_kernels
@pytest.mark.parametrize("size", [1, 3, 8, 16, 17, 40, 64])
def test_any_number_of_states(size):
    given = operands("selective", 70, 18, size)
    expected = outcome(defined, given, softplus=True)
    assert_close(outcome(by("selective", "native"), cast(given, torch.float32), softplus=True), expected, ROUNDED)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_cut_gives_one_answer(kind, name):
    given = operands(kind, 77, 19, dtype=torch.float32)
    options, rest = extras(kind, given), {k: t for k, t in given.items() if k not in TOKENS}
    whole, last = by(kind, name)(given, **options)
    for cuts in ([0, 33, 77], [0, 1, 3, 3, 76, 77]):
        parts, state = [], given["state"]
        for begin, end in itertools.pairwise(cuts):
            here = {k: t[:, begin:end] for k, t in given.items() if k in TOKENS}
            # Native kernels have nothing to do for no tokens.
            y, state = by(kind, name if begin < end else "auto")(rest | here | {"state": state}, **options)
            parts.append(y)
        assert_close({"y": torch.cat(parts, 1), "last": state}, {"y": whole, "last": last}, ROUNDED)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_one_by_one_are_the_sequence(kind, name):
    given = operands(kind, 9, 21, 16, dtype=torch.float32)
    options = extras(kind, given)
    with torch.no_grad():
        whole, last = by(kind, name)(given, **options)
        state, parts = given["state"], []
        for t in range(9):
            here = {k: x[:, t : t + 1] if k in TOKENS else x for k, x in given.items()} | {"state": state}
            y, state = by(kind, name)(here, **options)
            parts.append(y)
    assert_close({"y": torch.cat(parts, 1), "last": state}, {"y": whole, "last": last}, ROUNDED)


@pytest.mark.parametrize("name", BACKENDS)
def test_minus_infinity_clears_the_state(name):
    """Also one that holds infinity or NaN, and their gradients stay on their side."""
    for bad in (torch.inf, torch.nan):
        given = operands("diagonal", 9, 3, dtype=torch.float32)
        given["log_decay"][:, 5] = -torch.inf
        clean = outcome(by("diagonal", name), given)
        after = {"x": given["x"][:, 5:], "log_decay": given["log_decay"][:, 5:], "state": torch.zeros(2, 3)}
        assert_close({"y": clean["y"][:, 5:]}, {"y": by("diagonal", name)(after)[0]}, ROUNDED)
        given["x"][:, 2] = bad
        found = outcome(by("diagonal", name), given)
        assert not found["y"][:, 4].isfinite().any()
        for part in ("y", "x", "log_decay"):
            assert found[part][:, 5:].equal(clean[part][:, 5:])
        assert found["x"].equal(clean["x"])
        assert found["log_decay"][:, 5].eq(0).all()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_segment_and_behind_the_mask(kind, name):
    given = operands(kind, 12, 4, dtype=torch.float32)
    options = extras(kind, given) | {"segments": (torch.arange(12) // 6).expand(2, -1)}
    options["mask"] = torch.arange(12).expand(2, -1) != 8
    clean = outcome(by(kind, name), given, **options)
    assert clean["y"][:, 8].eq(0).all()
    spoilt = {k: t.clone() for k, t in given.items()}
    for part in TOKENS:
        if part in given:
            spoilt[part][:, 8] = torch.nan
    assert_close(outcome(by(kind, name), spoilt, **options), clean, 0.0)
    spoilt["x"][:, 3] = torch.nan
    found = outcome(by(kind, name), spoilt, **options)
    assert not found["y"][:, 3].isfinite().any()
    for part in ("y", *TOKENS):
        if part in found:
            assert found[part][:, 6:].equal(clean[part][:, 6:]), part


LAYOUTS = {
    "tokens last": lambda t: t.mT.contiguous().mT,
    "every other": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "a slice": lambda t: torch.cat([t, t], 1)[:, t.shape[1] :],
    "one for all": lambda t: t[:, :, :1].expand_as(t),
}


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_strides_do_not_matter(kind, layout):
    for dtype, n, channels in ((torch.float32, 67, 37), (torch.bfloat16, 29, 48), (torch.float16, 3, 5)):
        given = operands(kind, n, channels, 16, dtype=dtype)
        given["state"] = given["state"].float()
        moved = {k: LAYOUTS[layout](t) if k in TOKENS else t for k, t in given.items()}
        moved["state"] = moved["state"].mT.contiguous().mT
        options = extras(kind, given)
        expected = outcome(by(kind, "native"), {k: t.contiguous() for k, t in moved.items()}, **options)
        found = outcome(by(kind, "native"), moved, **options)
        for part, right in expected.items():
            assert found[part].equal(right), part
        if layout == "tokens last":
            assert found["y"].stride() == moved["x"].stride()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_read_exactly_and_rounded_once(kind, dtype):
    given = operands(kind, 67, 37, 16, dtype=dtype)
    given["state"] = given["state"].float()
    options = extras(kind, given)
    expected = by(kind, "reference")(cast(given, torch.float64), **options)
    for tokens in (67, 1):
        y, last = by(kind, "native")({k: t[:, :tokens] if k in TOKENS else t for k, t in given.items()}, **options)
        assert (y.dtype, last.dtype) == (dtype, torch.float32)
        right = expected[0][:, :tokens]
        assert_close({"y": y}, {"y": right}, torch.finfo(dtype).eps / 2 + ROUNDED)
    assert_close({"last": by(kind, "native")(given, **options)[1]}, {"last": expected[1]}, ROUNDED)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_gives_the_same_bits(kind):
    given = operands(kind, 150, 150, 16, dtype=torch.float32)
    token = {k: t[:, :1] if k in TOKENS else t for k, t in operands(kind, 1, 700, 16, batch=9).items()}
    token, options = cast(token, torch.float32), extras(kind, given)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            with torch.no_grad():
                step = by(kind, "native")(token, **options)
            found.append([*outcome(by(kind, "native"), given, **options).values(), *step])
    finally:
        torch.set_num_threads(threads)
    for one in found[1:]:
        assert all(a.equal(b) for a, b in zip(one, found[0], strict=True))


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_only_a_donated_state_changes(kind):
    with torch.no_grad(), backend("native"):
        given = operands(kind, 1, 21, 16, dtype=torch.float32)
        before, options = given["state"].clone(), extras(kind, given)
        y, kept = SCANS[kind](**given, **options, return_state=True)
        assert given["state"].equal(before)
        again, given_away = SCANS[kind](**given, **options, return_state=True, donate=True)
    assert given_away.data_ptr() == given["state"].data_ptr()
    assert kept.data_ptr() != given["state"].data_ptr()
    assert given_away.equal(kept)
    assert again.equal(y)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_that_was_overwritten_is_noticed(kind):
    given = operands(kind, 4, dtype=torch.float32)
    given["x"].requires_grad_()
    given["state"].mul_(1)
    y, _ = by(kind, "native")(given, **extras(kind, given))
    token = {k: t[:, :1].detach() if k in TOKENS else t for k, t in given.items()}
    with torch.no_grad():
        SCANS[kind](**token, **extras(kind, given), donate=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_state_may_not_overlap_what_is_read():
    state = torch.zeros(1, 5)
    with pytest.raises(ValueError, match="overwrites the state, which shares memory with x"):
        diagonal_scan(state[None], torch.zeros(1, 1, 5), state=state, donate=True)
    state = torch.zeros(1, 5, 4)
    token, states = torch.zeros(1, 1, 5), torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match="overwrites the state, which shares memory with A"):
        selective_scan(token, token, state[0], states, states, state=state, donate=True)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_the_torch_form_and_their_derivatives_are_exact(kind):
    given = operands(kind, 5, 2, 3)
    names, options = list(given), extras(kind, given) | {"segments": torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])}
    if kind == "diagonal":
        options["mask"] = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()

    def call(*tensors):
        return by(kind, "torch")(dict(zip(names, tensors, strict=True)), **options)

    leaves = [t.requires_grad_() for t in given.values()]
    assert gradcheck(call, leaves, fast_mode=True)
    assert gradgradcheck(call, leaves, fast_mode=True)


@needs_kernels
@pytest.mark.parametrize("packed", ["segments", "cu_seqlens"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_can_be_differentiated_are_the_gradients(kind, packed):
    batch = 1 if packed == "cu_seqlens" else 2
    given = operands(kind, 29, batch=batch, states=7 if batch == 1 else None, dtype=torch.float32)
    leaves = {k: t.requires_grad_() for k, t in given.items()}
    y, state = by(kind, "native")(leaves, **extras(kind, given), **packing(packed, 29, batch))
    loss, every = y.sin().sum() + state.square().sum(), list(leaves.values())
    plain = torch.autograd.grad(loss, every, retain_graph=True)
    twice = torch.autograd.grad(loss, every, create_graph=True)
    assert_close(dict(zip(leaves, twice, strict=True)), dict(zip(leaves, plain, strict=True)), 1e-5)
    assert all(t.requires_grad for t in twice)


# torch compiles some rules on first use, by what it calls deprecated itself.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_transforms_take_plain_forms(kind, tokens):
    """Rows by vmap are rows of a batch, and forward mode agrees with backward mode."""
    given = operands(kind, tokens)
    options, moving = extras(kind, given), [k for k in given if k in TOKENS or k == "state"]
    fixed, inputs = {k: t for k, t in given.items() if k not in moving}, tuple(given[k] for k in moving)

    def call(*tensors):
        return SCANS[kind](**fixed, **dict(zip(moving, tensors, strict=True)), **options, return_state=True)

    rows = torch.func.vmap(lambda *tensors: [t[0] for t in call(*(t[None] for t in tensors))])(*inputs)
    assert_close(dict(enumerate(rows)), dict(enumerate(call(*inputs))), EXACT)
    tangents = tuple(t.cos() for t in inputs)
    (y, _), (slope, _) = torch.func.jvp(call, inputs, tangents)
    which = tuple(range(len(inputs)))
    grads = torch.func.grad(lambda *tensors: call(*tensors)[0].square().sum(), argnums=which)(*inputs)
    along = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))
    torch.testing.assert_close(2 * (y * slope).sum(), along)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_in_one_graph(kind):
    given = operands(kind, 37, dtype=torch.float32)
    options = extras(kind, given)

    def call(leaves):
        return SCANS[kind](**leaves, **options, return_state=True)

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
        found = outcome(torch.compile(call, fullgraph=True, backend="aot_eager"), given)
    assert_close(found, outcome(call, given), ROUNDED)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_program_takes_any_length(kind):
    given = operands(kind, 7, dtype=torch.float32)
    names, options = list(given), extras(kind, given)

    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return SCANS[kind](**dict(zip(names, tensors, strict=True)), **options, return_state=True)

    n = torch.export.Dim("n", min=2, max=512)
    dynamic = (tuple({1: n} if name in TOKENS else None for name in names),)
    program = torch.export.export(Module(), tuple(given.values()), dynamic_shapes=dynamic).module()
    longer = operands(kind, 70, dtype=torch.float32)
    found, right = program(*longer.values()), by(kind, "auto")(longer, **options)
    assert_close(dict(enumerate(found)), dict(enumerate(right)), ROUNDED)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_sign_that_is_still_to_be_changed(kind):
    for tokens in (1, 7):
        given = operands(kind, tokens, dtype=torch.float32)
        options = extras(kind, given)
        expected = SCANS[kind](**given, **options)
        for which in given:
            found = SCANS[kind](**given | {which: torch._neg_view(-given[which])}, **options)
            assert_close({which: found}, {which: expected}, ROUNDED)


@needs_kernels
def test_training_keeps_a_small_part_of_the_states():
    """At 2048 tokens: what the graph keeps beyond the operands, in numbers of B N channels S."""
    n, channels, size = 2048, 64, 16
    given, kept = operands("selective", n, channels, size, batch=1, dtype=torch.float32), {}
    leaves = {k: t.requires_grad_() for k, t in given.items()}

    def keep(t):
        kept[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        selective_scan(**leaves, softplus=True)
    own = {t.data_ptr() for t in leaves.values()}
    numbers = sum(t.numel() for place, t in kept.items() if place not in own)
    assert 0 < numbers <= n * channels * size / 64 + 2 * n * size


TRAINING = """
import torch, longspan

def train(n, channels=128, size=64):
    x, dt, B, C = (torch.randn(1, n, width, requires_grad=True) for width in (channels, channels, size, size))
    A = -torch.rand(channels, size).requires_grad_()
    longspan.selective_scan(x, dt, A, B, C, softplus=True).sum().backward()

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

train(65)
before = peak()
train(2048)
print((peak() - before) * 1024 / (2048 * 128 * 64 * 4))
"""


@pytest.mark.full
@needs_kernels
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc reports the peak")
def test_the_peak_of_training_is_a_small_part_of_the_states():
    """At 2048 tokens: operands, outputs and gradients are 6 times 1/64 of B N channels S numbers, and B and C 1/32."""
    done = subprocess.run([sys.executable, "-c", TRAINING], capture_output=True, text=True, check=True)
    assert 0.02 < float(done.stdout) < 0.25


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 0, 5, 4), (0, 3, 5, 4), (2, 3, 0, 4)])
def test_nothing_to_compute(kind, shape):
    batch, n, channels, size = shape
    given = operands(kind, n, channels, size, batch=batch, dtype=torch.float32)
    y, state = by(kind, "auto")(given, **extras(kind, given))
    assert y.shape == (batch, n, channels)
    assert state.equal(given["state"]) or n


def test_a_scan_without_states_is_the_skip():
    given = operands("selective", 3, 5, 0)
    y, state = by("selective", "auto")(given, softplus=True)
    torch.testing.assert_close(y, given["D"] * given["x"] * torch.nn.functional.silu(given["z"]))
    assert state.shape == (2, 5, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_watch_names_the_op(kind):
    given = operands(kind, 3)
    with longspan.ops.watch() as seen:
        by(kind, "auto")(given, **extras(kind, given))
    assert [(use.op, use.backend) for use in seen] == [(f"the {kind} scan", "torch")]
    assert seen[0].why_not == "they take float32, bfloat16 or float16"


@needs_kernels
def test_what_the_kernels_cannot_serve_is_refused():
    for kind in KINDS:
        given = operands(kind, 5)
        with pytest.raises(ValueError, match=f"cannot serve this call of the {kind} scan: they take float32"):
            by(kind, "native")(given, **extras(kind, given))
    with pytest.raises(ValueError, match="they take at most 64 states of a channel"):
        by("selective", "native")(operands("selective", 5, size=65, dtype=torch.float32), softplus=True)


TOKEN, STATE = torch.zeros(2, 7, 5), torch.zeros(2, 7, 4)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("diagonal", {"x": torch.zeros(2, 7)}, r"^x must be .*\(B, N, C\), not torch.float32 \(2, 7\)"),
        ("diagonal", {"log_decay": TOKEN[..., :4]}, r"^log_decay must be a floating-point tensor \(2, \d, 5\)"),
        ("diagonal", {"state": torch.zeros(2, 4)}, r"state must be torch.float32 \(B, C\) = \(2, 5\), not"),
        ("diagonal", {"state": torch.zeros(2, 5).double()}, "not torch.float64"),
        ("diagonal", {"segments": torch.zeros(2, 6)}, "segments must be int64"),
        ("diagonal", {"mask": torch.zeros(2, 7)}, "mask must be bool"),
        ("diagonal", {"cu_seqlens": torch.tensor([0, 1])}, "so B must be 1, not 2"),
        ("selective", {"dt": TOKEN[..., :4]}, r"^dt must be a floating-point tensor \(2, \d, 5\)"),
        ("selective", {"z": TOKEN[..., :4]}, r"^z must be"),
        ("selective", {"A": torch.zeros(4, 4)}, r"^A must be .*\(channels, S\) = \(5, S\)"),
        ("selective", {"B": STATE[..., :3]}, r"^B must be a floating-point tensor \(2, \d, 4\)"),
        ("selective", {"C": STATE[..., :3]}, r"^C must be a floating-point tensor \(2, \d, 4\)"),
        ("selective", {"D": torch.zeros(4)}, r"^D must be a floating-point tensor \(5,\)"),
        ("selective", {"dt_bias": torch.zeros(4)}, r"^dt_bias must be a floating-point tensor \(5,\)"),
        ("selective", {"state": torch.zeros(2, 5, 3)}, r"state must be .*\(B, channels, S\) = \(2, 5, 4\), not"),
    ],
)
def test_what_does_not_fit_is_refused(kind, changes, message, tokens):
    if kind == "diagonal":
        given = {"x": TOKEN, "log_decay": TOKEN, "state": torch.zeros(2, 5)}
    else:
        given = {"x": TOKEN, "dt": TOKEN, "A": torch.zeros(5, 4), "B": STATE, "C": STATE, "state": torch.zeros(2, 5, 4)}
    given = {k: t[:, :tokens] if k in TOKENS and t.dim() == 3 else t for k, t in (given | changes).items()}
    with pytest.raises(ValueError, match=message):
        SCANS[kind](**given)
