"""Laws of the operations with a state, for all families of ``families.py`` and all forms that a file names.

A test file sets ``FORMS`` and adds ``collected(FORMS)`` to its names; with ``PACKAGES`` it has the families of these
packages only, and with names some of the laws. A law takes ``family`` and ``form``, and maybe
``row``, which ``over`` draws from a table.
"""

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from longspan import ops
from longspan.testing.pairs import all_pairs
from ops.families import (
    DEVICE,
    FAMILIES,
    SEQUENCES,
    Family,
    Given,
    assert_close,
    cast,
    dtype_of,
    error,
    has_form,
    limit,
    packing,
    upstream,
)

KERNELS = ("native", "triton")
PACKAGES = {family.package for family in FAMILIES.values()}


def applies(law: Callable[..., None], family: Family, form: str) -> bool:
    """Whether the marker ``only`` of a law admits a family and a form."""
    admits = getattr(law, "admits", None)
    return has_form(family, form) and (admits is None or admits(family, form))


def only(admits: Callable[[Family, str], bool]) -> Callable[[Any], Any]:
    """Collect a law for some families and forms only."""

    def mark(law: Any) -> Any:
        law.admits = admits
        return law

    return mark


def cases(family: Family, form: str) -> list[dict[str, Any]]:
    """Sizes, options, masks and marks of packed sequences, so that each two of them meet."""
    # Triton's interpreter is slow.
    around = [one for one in family.around if form != "triton" or one != "segments"]
    rows = all_pairs(size=family.sizes[form], around=around, **family.shapes, **family.options)
    return [
        {"n": row["size"][0], "sizes": row["size"][1]} | {k: v for k, v in row.items() if k != "size"} for row in rows
    ]


def steps(family: Family, form: str) -> list[dict[str, Any]]:
    return all_pairs(sizes=widths(family, form), donate=(False, True), **family.shapes, **family.options)


def widths(family: Family, form: str) -> tuple[tuple[int, int], ...]:
    """Those of one token: kernels work on several vectors at a time, then on one, then number by number."""
    return family.step[:2] if form == "torch" else family.step[::2] if form == "triton" else family.step


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" not in metafunc.fixturenames:
        return
    found, ids = [], []
    packages = getattr(metafunc.module, "PACKAGES", PACKAGES)
    for family, form in itertools.product(FAMILIES.values(), metafunc.module.FORMS):
        if family.package in packages and applies(metafunc.function, family, form):
            rows = metafunc.function.rows(family, form) if hasattr(metafunc.function, "rows") else [None]
            for row in rows:
                found.append((family, form) if row is None else (family, form, row))
                around = [] if row is None else ["-".join(f"{k}={v}".replace(" ", "") for k, v in row.items())]
                ids.append("-".join([family.name, form, *around]))
    names = ["family", "form", *(["row"] if "row" in metafunc.fixturenames else [])]
    metafunc.parametrize(names, found, ids=ids)


def over(rows: Callable[[Family, str], list[dict[str, Any]]]) -> Callable[[Any], Any]:
    """Run a law once for each row."""

    def mark(law: Any) -> Any:
        law.rows = rows
        return law

    return mark


def split(family: Family, row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a row that change the operands, and those of the call."""
    return {k: row[k] for k in family.shapes}, {k: row[k] for k in family.options}


def kernels(family: Family, form: str) -> bool:
    return form in KERNELS


def native(family: Family, form: str) -> bool:
    return form == "native"


def exactly(found: Any, right: Any) -> None:
    """The same bits."""
    found, right = (list(t.values()) if isinstance(t, dict) else list(t) for t in (found, right))
    assert all(a.equal(b) for a, b in zip(found, right, strict=True))


def length(form: str, n: int) -> int:
    """The tokens of a law: fewer for Triton's interpreter, which is slow."""
    return min(n, 29) if form == "triton" else n


def usual(family: Family, form: str) -> dict[str, Any]:
    """The first values of all options of a call."""
    return {name: domain[0] for name, domain in family.options.items()}


@only(lambda family, form: form != "reference")
@over(cases)
def test_values_and_gradients_equal_the_definition(family, form, row):
    shapes, options = split(family, row)
    packed = "cu_seqlens" in row["around"]
    batch = 1 if packed else 2
    given = family.operands(row["n"], row["sizes"], batch=batch, states=SEQUENCES if packed else None, **shapes)
    options |= packing(row["around"], row["n"], batch)
    single = cast(given, torch.float32) if form in KERNELS else given
    # The form in torch equals the loop to 12 digits, and is faster for many tokens.
    exact = "torch" if form in KERNELS and row["n"] > 60 else "reference"
    expected = family.outcome(exact, cast(single, torch.float64), **options)
    found = family.outcome(form, single, **options)
    if "mask" in options:
        hidden = ~family.at(options["mask"], found["output"])
        # Linear attention leaves arbitrary numbers there.
        assert family.package == "linear" or not found["output"].masked_select(hidden).any()
        found["output"], expected["output"] = (x["output"].masked_fill(hidden, 0.0) for x in (found, expected))
    errors = {name: error(found[name], right) for name, right in expected.items()}
    beyond = {name for name, worst in errors.items() if not worst <= limit(family, form)}
    if beyond and (form == "triton" or (family.package == "linear" and form in KERNELS)):
        # Where a sum cancels almost completely, every form in float32 loses digits.
        plain = family.outcome("torch", single, **options)
        if "mask" in options:
            plain["output"] = plain["output"].masked_fill(hidden, 0.0)
        beyond = {name for name in beyond if not errors[name] <= 1.5 * error(plain[name], expected[name])}
    assert not beyond, errors


@pytest.mark.parametrize("n", [1, 37])
def test_without_a_state_a_sequence_begins_from_zeros(family, form, n):
    given, options = family.operands(length(form, n), dtype=dtype_of(form)), usual(family, form)
    right = family.outcome(form, given | {"state": torch.zeros_like(given["state"])}, **options)
    del given["state"], right["state"]
    assert_close(family.outcome(form, given, **options), right, limit(family, form))


@only(lambda family, form: form in ("reference", "torch"))
def test_packed_sequences_equal_separate_calls(family, form):
    n, options = 67, usual(family, form)
    given = family.operands(n, batch=1, states=SEQUENCES)
    offsets = packing("cu_seqlens", n, 1)["cu_seqlens"]

    def separate(given: Given, **options: Any) -> tuple[Tensor, Tensor]:
        outputs, ends = [], []
        for s, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
            part = family.cut(given, begin, end) | {"state": given["state"][s : s + 1]}
            o, after = family.call(part, **options)
            outputs.append(o)
            ends.append(after)
        return torch.cat(outputs, family.axis), torch.cat(ends)

    expected = family._replace(call=separate).outcome(form, given, **options)
    assert_close(family.outcome(form, given, cu_seqlens=offsets, **options), expected, family.exact)


def test_masked_tokens_are_not_read(family, form):
    """Nor is the gradient of their outputs: the same bits whatever stands there."""
    n = length(form, 67)
    given, mask = family.operands(n, dtype=dtype_of(form)), packing("mask", n, 2)["mask"]
    hidden, found = ~mask, []
    for garbage in (0.0, torch.nan):
        leaves = {k: t.detach().requires_grad_() for k, t in family.fill(given, hidden, garbage).items()}
        o, end = family.run(form, leaves, mask=mask)
        above = upstream((o, end), None, family.axis)
        # Linear attention reads the gradient of what it leaves there.
        above[0] = above[0].masked_fill(family.at(hidden, o), 0.0 if family.package == "linear" else garbage)
        grads = torch.autograd.grad((o, end), list(leaves.values()), above)
        found.append([o.detach().masked_fill(family.at(hidden, o), 0.0), end, *grads])
        for name, grad in zip(leaves, grads, strict=True):
            if name in family.tokens:
                assert not grad.masked_select(family.at(hidden, grad)).any(), name
    exactly(*found)


@only(lambda family, form: family.name != "decay-none" and form != "triton")
def test_packed_sequences_do_not_reach_each_other(family, form):
    """No gradient crosses a border. NaN, infinity and overflows of one sequence or its gradients spoil no other."""
    segments = torch.tensor([[0] * 20 + [1] * 45 + [2] * 5, [0] * 40 + [5] * 30], device=DEVICE)
    inside = torch.zeros(2, 70, dtype=torch.bool, device=DEVICE)
    inside[0, 20:65] = True
    given = family.operands(70, dtype=dtype_of(form))
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    o, _ = family.run(form, leaves, segments=segments)
    grads = torch.autograd.grad(
        o.masked_select(family.at(inside, o)).square().sum(), leaves.values(), allow_unused=True
    )
    for (name, t), grad in zip(leaves.items(), grads, strict=True):
        if name in family.tokens:
            assert grad.masked_select(family.at(inside, t)).any(), name
            assert not grad.masked_select(family.at(~inside, t)).any(), name
    assert grads[list(leaves).index("state")] is None or not grads[list(leaves).index("state")].any()
    clean = family.outcome(form, given, segments=segments)
    limits, contents = 0.0 if family.package == "scan" else limit(family, form), [torch.nan, torch.finfo(o.dtype).max]

    def unchanged(found: Given) -> None:
        for part in ("output", *family.tokens):
            if part in found:
                spoilt = family.at(inside, found[part])
                assert_close([found[part].masked_fill(spoilt, 0.0)], [clean[part].masked_fill(spoilt, 0.0)], limits)

    # The definition multiplies infinity by 0.
    contents += [torch.inf] * (form != "reference")
    for name, content in itertools.product((name for name in family.tokens if name in given), contents):
        spoilt = given | {name: given[name].detach().clone()}
        # A decay is never positive; it can be endless.
        spoilt[name].narrow(family.axis, 33, 1)[:1] = -content if name == "log_decay" else content
        found = family.outcome(form, spoilt, segments=segments)
        unchanged(found)
        assert content == content or found["output"].masked_select(family.at(inside, found["output"])).isnan().any()
    outputs = family.run(form, leaves, segments=segments)
    above = upstream(outputs, None, family.axis)
    above[0] = above[0].masked_fill(family.at(inside, above[0]), torch.nan)
    unchanged(dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), above), strict=True)))


@pytest.mark.parametrize("cuts", [[0, 33, 77], [0, 1, 3, 3, 64, 76, 77], [0, 60, *range(61, 78)]], ids=len)
def test_any_cut_gives_one_answer(family, form, cuts):
    """In two parts, with an empty one, and with single tokens."""
    given, options = family.operands(77, dtype=dtype_of(form)), usual(family, form)
    with torch.no_grad():
        expected = family.run("reference", cast(given, torch.float64), **options)
        parts, state = [], given["state"]
        for begin, end in itertools.pairwise(cuts):
            part = family.cut(given, begin, end) | {"state": state}
            before = state.clone()
            # Kernels have nothing to do for no tokens.
            o, after = family.run(form if begin < end else "auto", part, **options)
            assert state.equal(before)
            parts.append(o)
            state = after
    assert_close([torch.cat(parts, family.axis), state], expected, limit(family, form))


@only(lambda family, form: form != "reference")
@over(steps)
def test_a_step_equals_the_definition(family, form, row):
    """Only a donated state is overwritten, whatever the strides of the state are."""
    shapes, options = split(family, row)
    dtype, donate = dtype_of(form), row["donate"]
    for tokens in ("plain", "masked"):
        given = family.operands(1, row["sizes"], batch=3, dtype=dtype, **shapes)
        packed = {} if tokens == "plain" else {"mask": torch.tensor([[True], [False], [True]], device=DEVICE)}
        right = family.run("reference", cast(given, torch.float64), **options, **packed)
        before = given["state"].clone()
        with torch.no_grad(), ops.watch() as seen:
            o, state = family.run(form, given, **options, **packed, donate=donate)
        assert form not in KERNELS or {use.backend for use in seen} == {form}
        if packed:
            assert state[1].equal(before[1])
            o, right = (t.clone() for t in (o, right[0])), right
            o, first = o
            o[1] = first[1] = 0.0
            right = first, right[1]
        elif form in KERNELS:
            assert (state.data_ptr() == given["state"].data_ptr()) is donate
        assert donate or given["state"].equal(before)
        assert_close([o, state], right, limit(family, form))


def halves(family: Family, form: str) -> list[dict[str, Any]]:
    """One token of many widths, and sequences."""
    more = {"dtype": (torch.bfloat16, torch.float16), **family.shapes, **family.options}
    usual = family.sizes["torch"][-1][1]
    rows = [{"n": 1} | row for row in all_pairs(sizes=widths(family, form), **more)]
    sequences = [{"n": 67, "sizes": usual} | row for row in all_pairs(**more)]
    # Triton's interpreter is slow.
    return rows + (sequences if form != "triton" else sequences[:2])


@only(lambda family, form: form != "reference")
@over(halves)
def test_half_precision_is_summed_in_float32(family, form, row):
    """Only the output and the gradients of operands in half precision are rounded."""
    (shapes, options), dtype = split(family, row), row["dtype"]
    only_steps = form == "native" and dtype == torch.float16 and family.axis == 2
    if only_steps and row["n"] > 1:
        form = "auto"
    given = family.operands(row["n"], row["sizes"], dtype=dtype, seed=1, **shapes)
    exact = cast(given, torch.float64)
    right = family.run("reference", exact, **options)
    for donate in (False, True):
        own = given | {"state": given["state"].clone()}
        with torch.no_grad():
            o, state = family.run(form, own, **options, donate=donate)
        assert (o.dtype, state.dtype) == (dtype, torch.float32)
        assert_close([o], right[:1], torch.finfo(dtype).eps / (1 if form == "triton" else 2) + limit(family, form))
        assert_close([state], right[1:], 2e-5 if form == "triton" else max(limit(family, form), family.rounded))
    # Of linear attention, tests/ops/test_sequence.py bounds the gradients.
    if only_steps or (family.package == "linear" and form == "native"):
        return
    found, right = family.outcome(form, given, **options), family.outcome("reference", exact, **options)
    plain = family.outcome("torch", given, **options)
    for name, t in found.items():
        assert t.dtype == plain[name].dtype, name
        # Rounding alone takes half an epsilon. Triton multiplies in half precision.
        allowed = torch.finfo(dtype).eps / 2 + limit(family, form)
        if form == "triton":
            allowed = max(2 * torch.finfo(dtype).eps, 1.5 * error(plain[name], right[name]))
        assert error(t, right[name]) <= allowed, name


LAYOUTS = {
    "tokens before heads or after channels": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every other number": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "a slice": lambda t: torch.cat([t, t], 1)[:, t.shape[1] :],
    "one for all": lambda t: t[:, :1].expand_as(t),
    "last axes turned": lambda t: t.mT.contiguous().mT,
}


def layouts(family: Family, form: str) -> list[dict[str, Any]]:
    # Triton's interpreter is slow: one of the first two, by turns.
    turn = list(FAMILIES).index(family.name) % 2
    return [{"layout": layout} for layout in (LAYOUTS if form != "triton" else list(LAYOUTS)[turn : turn + 1])]


@only(kernels)
@over(layouts)
def test_strides_do_not_change_a_bit(family, form, row):
    layout = row["layout"]
    for n, dtype in ((length(form, 67), torch.float32), (1, torch.float32), (29, torch.bfloat16)):
        given, options = family.operands(n, dtype=dtype), usual(family, form)
        moved = {name: LAYOUTS[layout](t) if name in family.tokens else t for name, t in given.items()}
        moved["state"] = moved["state"].mT.contiguous().mT if moved["state"].dim() > 2 else moved["state"]
        plain = {name: t.contiguous() for name, t in moved.items()}
        with torch.no_grad():
            exactly(family.run(form, moved, **options), family.run(form, plain, **options))
        if n > 1:
            leaves = {name: t.detach().requires_grad_() for name, t in moved.items()}
            found = family.run(form, leaves, **options)
            grads = torch.autograd.grad(found, list(leaves.values()), upstream(found, None, family.axis))
            right = family.outcome(form, plain, **options)
            if form == "triton":  # whose tiles follow the strides, and sums over tokens the tiles
                rounded = max(limit(family, form), torch.finfo(dtype).eps)
                assert_close([*found, *grads], list(right.values()), rounded)
            else:
                exactly([*found, *grads], right)


@only(native)
def test_threads_do_not_change_a_bit(family, form, threads):
    """Also of states that are large enough for several, and of heads or rows that cannot be shared out evenly."""
    given = family.operands(150, family.step[-2], batch=3, dtype=torch.float32)
    token = family.operands(1, family.step[-1], batch=9, dtype=torch.float32)
    found = []
    for count in (1, 2, 3, 1):
        threads(count)
        with torch.no_grad():
            step = family.run(form, token)
        found.append([*family.outcome(form, given).values(), *step])
    for one in found[1:]:
        exactly(one, found[0])


@only(kernels)
def test_autograd_notices_that_a_saved_state_was_overwritten(family, form):
    given = {name: t.requires_grad_() for name, t in family.operands(4, dtype=torch.float32).items() if name != "state"}
    state = family.operands(4, dtype=torch.float32)["state"]
    o, _ = family.run(form, given | {"state": state})
    token = {name: t.detach() for name, t in family.cut(given, 0, 1).items()}
    with torch.no_grad():
        _, after = family.run(form, token | {"state": state}, donate=True)
    assert after.data_ptr() == state.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@only(lambda family, form: form == "native" and family.name not in ("decay-none", "decay-value"))  # not public
@pytest.mark.parametrize("rows", [2, 4])
def test_a_token_of_another_shape_is_refused_and_not_read(family, form, rows):
    """Twice the rows, or one row less."""
    given = family.operands(1, batch=rows, dtype=torch.float32)
    family.run("auto", given)
    for name in (name for name in given if name in (*family.tokens, "state")):
        other = given[name][:3] if rows == 4 else torch.cat([given[name]] * 2)
        # All operands with rows must agree with the first one.
        with pytest.raises(ValueError, match=r"must be|must have|do not fit"):
            family.run("auto", given | {name: other})


@only(lambda family, form: form == "reference" and family.name not in ("decay-none", "decay-value"))  # not public
@pytest.mark.parametrize("n", [1, 7])
def test_what_does_not_fit_is_refused_by_name(family, form, n):
    given, ids = family.operands(n, dtype=torch.float32), torch.zeros(2, n, dtype=torch.int64, device=DEVICE)
    state, row, cuts = given["state"], family.operands(n, batch=1, dtype=torch.float32), torch.tensor([0, n])
    for operands, changes, message in (
        (given, {"state": state.double()}, "state must be torch.float32 .*not torch.float64"),
        (given, {"state": state[..., :-1]}, "state must be torch.float32"),
        (given, {"state": state[:1]}, "state must be torch.float32"),
        (given, {"mask": ids}, rf"mask must be bool \(2, {n}\).* not torch.int64"),
        (given, {"mask": ids[:1] == 0}, rf"mask must be bool \(2, {n}\)"),
        (given, {"segments": ids.float()}, rf"segments must be int64 \(2, {n}\).*torch.float32"),
        (given, {"segments": ids[:1]}, rf"segments must be int64 \(2, {n}\)"),
        (given, {"cu_seqlens": cuts}, "B must be 1, not 2"),
        (row, {"cu_seqlens": cuts.float()}, "cu_seqlens must be int32 or int64"),
        (row, {"cu_seqlens": cuts[:0]}, "cu_seqlens must be int32 or int64|rise from 0"),
        (row, {"cu_seqlens": torch.tensor([0, n + 2])}, f"rise from 0 to the number of tokens, {n}, not"),
        (row, {"cu_seqlens": torch.tensor([0, n, 0, n])}, f"rise from 0 to the number of tokens, {n}, not"),
        (row, {"cu_seqlens": torch.tensor([0, 0, n])}, "state must be torch.float32"),
        (row, {"cu_seqlens": cuts, "segments": ids[:1]}, "segments and cu_seqlens"),
    ):
        with pytest.raises(ValueError, match=message):
            family.call(operands | changes)


@only(lambda family, form: form == "torch")
@pytest.mark.parametrize("around", ["plain", "mask+segments", "cu_seqlens"])
def test_derivatives_and_their_derivatives_equal_numerical_ones(family, form, around):
    packed = around == "cu_seqlens"
    given = family.operands(5, batch=1 if packed else 2, states=SEQUENCES if packed else None, **family.smallest)
    options = usual(family, form) | packing(around, 5, 1 if packed else 2)

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        o, end = family.run(form, dict(zip(given, tensors, strict=True)), **options)
        return (o.masked_fill(~family.at(options["mask"], o), 0.0) if "mask" in options else o), end

    leaves = [t.requires_grad_() for t in given.values()]
    assert gradcheck(call, leaves, fast_mode=True)
    assert gradgradcheck(call, leaves, fast_mode=True)


@only(lambda family, form: form != "reference")
@pytest.mark.parametrize("around", ["plain", "segments", "cu_seqlens"])
def test_gradients_that_can_be_differentiated_are_the_gradients(family, form, around):
    """They come from other code, with which second derivatives would agree even if it were wrong."""
    packed = around == "cu_seqlens"
    given = family.operands(29, batch=1 if packed else 2, states=SEQUENCES if packed else None, dtype=dtype_of(form))
    options = usual(family, form) | packing(around, 29, 1 if packed else 2)

    def loss(form: str, given: Given) -> tuple[Tensor, list[Tensor]]:
        leaves = [t.detach().requires_grad_() for t in given.values()]
        o, end = family.run(form, dict(zip(given, leaves, strict=True)), **options)
        return o.sin().sum() + end.square().sum(), leaves

    found, leaves = loss(form, given)
    plain = torch.autograd.grad(found, leaves, retain_graph=True)
    again = torch.autograd.grad(found, leaves, create_graph=True)
    assert_close(again, plain, 2 * limit(family, form))
    second = torch.autograd.grad(sum(t.sin().sum() for t in again), leaves)
    exact, wide = loss("reference", cast(given, torch.float64))
    first = torch.autograd.grad(exact, wide, create_graph=True)
    right = torch.autograd.grad(sum(t.sin().sum() for t in first), wide)
    assert_close(second, right, 1e-10 if dtype_of(form) is torch.float64 else 5e-5)


@only(lambda family, form: family.clears and form != "reference")
def test_strong_decay_keeps_the_digits_of_what_remains(family, form):
    """Log decays of 0, -1, -50, -1e4 and -inf in one chunk: sums of them must not swallow the small ones."""
    given = family.operands(length(form, 139), dtype=dtype_of(form))
    decay = given["log_decay"]
    strength = torch.tensor([0.0, 1.0, 1.0, 50.0, 1e4, torch.inf], dtype=decay.dtype)
    picked = strength[torch.randint(6, decay.shape, generator=torch.Generator().manual_seed(1))].to(decay)
    given["log_decay"] = torch.where(picked.isinf(), -picked, decay * picked)
    found = family.outcome(form, given)
    assert all(t.isfinite().all() for t in found.values())
    tolerance = {"triton": 3e-6, "torch": 1e-11}.get(form, family.rounded)
    assert_close(found, family.outcome("reference", cast(given, torch.float64)), tolerance)


@only(lambda family, form: family.clears and not family.name.startswith("general"))
def test_minus_infinity_clears_the_state(family, form):
    """However large it is."""
    for n, at in ((29, 9), (1, 0)):
        given = family.operands(n, dtype=dtype_of(form))
        given["log_decay"].select(family.axis, at).fill_(-torch.inf)
        given["state"] *= 1e30
        o, end = family.run(form, given)
        cut = family.cut(given, at, n) | {"state": torch.zeros_like(given["state"])}
        right = family.run(form, cut)
        assert n == 1 or o.narrow(family.axis, 0, at).abs().max() > 1e20
        assert_close([o.narrow(family.axis, at, n - at), end], right, limit(family, form))


def in_one_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@only(kernels)
@pytest.mark.parametrize("around", ["plain", "segments"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_call_is_one_graph(family, form, around):
    given = family.operands(37, dtype=torch.float32)
    # Packed rows are examined for NaN, which takes a decision; the operations without checks take none.
    options = packing(around, 37, 2) if family.package in ("convolution", "scan") else {}
    compiled = in_one_graph(lambda given: family.call(given, **options))
    found = family._replace(call=lambda given: compiled(given)).outcome(form, given)
    assert_close(found, family.outcome(form, given, **options), limit(family, form))


@only(lambda family, form: form == "reference")
def test_an_exported_program_takes_any_length(family, form):
    given, options = family.operands(7, dtype=torch.float32), usual(family, form)

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            return family.call(dict(zip(given, tensors, strict=True)), **options)

    n = torch.export.Dim("n", min=2, max=512)
    dynamic = (tuple({family.axis: n} if name in family.tokens else None for name in given),)
    program = torch.export.export(Module(), tuple(given.values()), dynamic_shapes=dynamic).module()
    longer = family.operands(70, dtype=torch.float32)
    assert_close(program(*longer.values()), family.run("auto", longer, **options), 1e-5)


@only(lambda family, form: form == "reference")
@pytest.mark.parametrize("n", [1, 7])
def test_transforms_take_plain_forms(family, form, n):
    """Rows by vmap are rows of a batch, and forward mode agrees with backward mode."""
    given, options = family.operands(n), usual(family, form)
    moving = [name for name in given if name in family.tokens or name == "state"]
    fixed, inputs = {k: t for k, t in given.items() if k not in moving}, tuple(given[k] for k in moving)

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return family.call(fixed | dict(zip(moving, tensors, strict=True)), **options)

    rows = torch.func.vmap(lambda *tensors: [t[0] for t in call(*(t[None] for t in tensors))])(*inputs)
    assert_close(rows, call(*inputs), 1e-10)
    tangents = tuple(t.cos() for t in inputs)
    with warnings.catch_warnings():
        # torch compiles some rules on first use, by what it calls deprecated itself.
        warnings.simplefilter("ignore")
        (o, _), (slope, _) = torch.func.jvp(call, inputs, tangents)
    every = tuple(range(len(inputs)))
    grads = torch.func.grad(lambda *tensors: call(*tensors)[0].square().sum(), argnums=every)(*inputs)
    along = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))
    torch.testing.assert_close(2 * (o * slope).sum(), along)


@only(native)
@pytest.mark.parametrize("n", [1, 40])
def test_negated_views_are_read_with_their_sign(family, form, n):
    """Their numbers lie in memory with the other sign."""
    given = family.operands(n, dtype=torch.float32)
    right = family.run("auto", given)
    for name in given:
        found = family.run("auto", given | {name: torch._neg_view(-given[name])})
        assert_close(found, right, family.rounded)


@only(lambda family, form: form == "reference")
@pytest.mark.parametrize("empty", ["tokens", "rows"])
def test_no_tokens_leave_the_state(family, form, empty):
    for name in ("auto", "torch", "reference"):
        given = family.operands(0 if empty == "tokens" else 3, batch=2 if empty == "tokens" else 0, dtype=torch.float32)
        o, state = family.run(name, given)
        assert o.shape == given[family.output].shape
        assert state.equal(given["state"])
        assert not state.numel() or state.data_ptr() != given["state"].data_ptr()


@only(lambda family, form: form in KERNELS)
def test_kernels_refuse_float64_by_name(family, form):
    given = family.operands(5)
    message = f"cannot serve this call of {family.op}: they take"
    with pytest.raises(ValueError, match=message):
        family.run(form, given)


@only(lambda family, form: form == "reference")
def test_watch_names_the_operation(family, form):
    with ops.watch() as seen:
        family.run("auto", family.operands(3))
    assert [(use.op, use.backend) for use in seen] == [(family.op, "torch")]
    assert "float32" in seen[0].why_not


@only(lambda family, form: form != "reference")
def test_two_calls_give_the_same_bits(family, form):
    given = family.operands(length(form, 70), dtype=torch.float32)
    exactly(family.outcome(form, given), family.outcome(form, given))


def collected(forms: Sequence[str], *names: str) -> dict[str, Any]:
    """What a test file needs: the laws of these names, or all that apply to some form, and their cases."""

    def anywhere(law: Any) -> bool:
        return any(applies(law, family, form) for family in FAMILIES.values() for form in forms)

    laws = {name: law for name, law in globals().items() if name.startswith("test_") and anywhere(law)}
    laws = {name: laws[name] for name in names} or laws
    return laws | {"pytest_generate_tests": pytest_generate_tests}
