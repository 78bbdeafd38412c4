"""Masks and segments together, for every operation with a state.

It equals separate calls on the real tokens of each segment. Any segment may be masked as a whole: it keeps the state of
the first and the next state of the last. What one segment holds reaches no other.
"""

import functools
import importlib.util

import pytest
import torch

from longspan.ops.triton import interpreted
from ops.families import FAMILIES, cast, dtype_of, has_form, upstream

IDS = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 5, 5])
# The segments that are masked as a whole, one row each; every row masks token 5 as well.
MASKED = ([], [0], [0, 1], [2, 5], [1, 2, 5], [0, 1, 2, 5])
SEGMENTS = IDS.expand(len(MASKED), -1)
MASK = torch.stack([~torch.isin(IDS, torch.tensor(gone)) & (torch.arange(len(IDS)) != 5) for gone in MASKED])
ONE = torch.zeros_like(IDS)  # one segment, masked as a whole
SEGMENTS, MASK = torch.cat([SEGMENTS, ONE[None]]), torch.cat([MASK, ONE[None].bool()])
ROWS, N = SEGMENTS.shape


NAMES = (
    "linear",
    "decay-head",
    "decay-channel",
    "delta-head",
    "general-channel",
    "diagonal",
    "selective",
    "convolution",
    "decay-value",
)
FORMS = ("reference", "torch", "native", *(["triton"] if importlib.util.find_spec("triton") and interpreted() else []))
KINDS = [
    # Triton's interpreter is slow.
    pytest.param(name, form, marks=[pytest.mark.full] if form == "triton" else [])
    for name in NAMES
    for form in FORMS
    if has_form(FAMILIES[name], form)
]


@functools.cache
def operands(name):
    """Small ones, with as many rows as there are cases."""
    sizes = {"convolution": (3, 4), "selective": (3, 2)}.get(name, (3, 3))
    more = {"convolution": {"more": 2}, "selective": {"bare": True}, "linear": {}, "diagonal": {}}
    given = FAMILIES[name].operands(N, sizes, batch=ROWS, **more.get(name, {"repeats": 1}))
    return given | ({"key": given["key"] / 2} if name == "linear" else {})


def made(name, form):
    return cast(operands(name), dtype_of(form))


def separate(family, given):
    """The outputs and states of calls on the real tokens of one segment, with the definition."""
    like, outputs, states = given[family.output], [], []
    for row in range(ROWS):
        y, now = torch.zeros_like(like[row : row + 1]), given["state"][row : row + 1]
        for number, segment in enumerate(SEGMENTS[row].unique().tolist()):
            now = torch.zeros_like(now) if number else now
            at = ((SEGMENTS[row] == segment) & MASK[row]).nonzero()[:, 0]
            if len(at):
                here = {
                    name: t[row : row + 1].index_select(family.axis, at) if name in family.tokens else t
                    for name, t in given.items()
                }
                out, now = family.run("reference", here | {"state": now})
                y = y.index_copy(family.axis, at, out)
        outputs.append(y)
        states.append(now)
    return torch.cat(outputs), torch.cat(states)


@pytest.mark.whole
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_it_equals_separate_calls(name, kind):
    """Whatever masked tokens hold."""
    family, packed = FAMILIES[name], {"mask": MASK, "segments": SEGMENTS}
    tolerance = 1e-12 if dtype_of(kind) == torch.float64 else 2e-5
    hidden = family.fill(operands(name), ~MASK, 0.0)
    wanted = family._replace(call=lambda given, mask: separate(family, given)).outcome("reference", hidden, mask=MASK)
    for fill in (0.0, torch.nan):
        given = cast(family.fill(hidden, ~MASK, fill), dtype_of(kind))
        found = family.outcome(kind, given, **packed)
        # Linear attention leaves arbitrary numbers there.
        found["output"] = found["output"].masked_fill(~family.at(MASK, found["output"]), 0.0)
        for part, right in wanted.items():
            error = (found[part] - right).abs().max() / right.abs().max()
            assert error <= tolerance, f"{part}, masked tokens hold {fill}: {error}"


@pytest.mark.whole
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_the_state_stays_in_the_first_segment(name, kind):
    family, given, packed = FAMILIES[name], made(name, kind), {"mask": MASK, "segments": SEGMENTS}
    later = SEGMENTS != SEGMENTS[:, :1]
    clean = family.run(kind, given, **packed)
    spoilt = family.run(kind, given | {"state": torch.full_like(given["state"], torch.nan)}, **packed)
    assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-6)
    assert_same(spoilt[0].movedim(family.axis, 1)[later], clean[0].movedim(family.axis, 1)[later])
    # The last row has one segment.
    assert_same(spoilt[1][:-1], clean[1][:-1])


@pytest.mark.whole
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_gradients_may_have_any_layout(name, kind):
    family = FAMILIES[name]
    leaves = {key: t.requires_grad_() for key, t in made(name, kind).items()}
    outputs, inputs = family.run(kind, leaves), list(leaves.values())
    above = upstream(outputs, None, family.axis)
    wanted = torch.autograd.grad(outputs, inputs, above, retain_graph=True)
    # The first axis last in memory.
    strided = [t.movedim(0, -1).contiguous().movedim(-1, 0) for t in above]
    found = torch.autograd.grad(outputs, inputs, strided)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


# The operations whose sums would carry NaN across a border.
SUMS = NAMES[:5]
SPOILT = SEGMENTS == 2
SPOILT[1:3] = False
SPOILT[2, N - 2 :] = True  # the last segment of one row alone


def spoilt_tokens(name, operand):
    """The operands, with NaN in the first token of a segment."""
    first = SPOILT & ~torch.nn.functional.pad(SPOILT[:, :-1], (1, 0))
    given = dict(operands(name))
    return given | {operand: given[operand].masked_fill(FAMILIES[name].at(first, given[operand]), torch.nan)}


OPERANDS = [(name, operand) for name in SUMS for operand in operands(name) if operand != "state"]


@pytest.mark.whole
@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_numbers_that_are_none_stay_in_their_segment_under_a_transform(name, operand):
    """Which cannot look at them; they spoil all later tokens of the segment there."""
    family, kept = FAMILIES[name], ~SPOILT

    def call(given):
        return family.run("torch", given, segments=SEGMENTS)

    clean = call(operands(name))
    y, after = torch.func.vjp(call, spoilt_tokens(name, operand))[0]
    torch.testing.assert_close(y.movedim(2, 1)[kept], clean[0].movedim(2, 1)[kept])
    assert y.movedim(2, 1)[SPOILT].isnan().all()
    torch.testing.assert_close(after[~SPOILT[:, -1]], clean[1][~SPOILT[:, -1]])
    assert operand == "query" or after[SPOILT[:, -1]].isnan().flatten(1).any(1).all()


@pytest.mark.whole
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_donated_state_is_not_read_twice(name, kind):
    """A token with a segment, of which one row is NaN: the other rows continue the state that came in."""
    family = FAMILIES[name]
    token = {key: t.clone() for key, t in family.cut(made(name, kind), 0, 1).items()}
    token[family.output][0] = torch.nan
    with torch.no_grad():
        wanted = family.run(kind, token, segments=SEGMENTS[:, :1])
        own = token | {"state": token["state"].clone()}
        found = family.run(kind, own, segments=SEGMENTS[:, :1], donate=True)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert wanted[0][1:].isfinite().all()
