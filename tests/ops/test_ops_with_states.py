"""Laws of every op that takes a mask, segments and a state.

It equals separate calls on the real tokens of each segment. Any segment may be masked as a whole: it keeps the state of
the first and the next state of the last. What one segment holds reaches no other.
"""

import functools
import importlib.util

import pytest
import torch

import longspan
from longspan import backend
from longspan.ops.native.call import available
from longspan.ops.triton import interpreted

HEADS, SIZE = 2, 3
IDS = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 5, 5])
# The segments that are masked as a whole, one row each; every row masks token 5 as well.
MASKED = ([], [0], [5], [0, 5], [0, 1], [2, 5], [0, 1, 2], [1, 2, 5], [0, 1, 2, 5])
SEGMENTS = IDS.expand(len(MASKED), -1)
MASK = torch.stack([~torch.isin(IDS, torch.tensor(gone)) & (torch.arange(len(IDS)) != 5) for gone in MASKED])
ONE = torch.zeros_like(IDS)  # one segment, masked as a whole
SEGMENTS, MASK = torch.cat([SEGMENTS, ONE[None]]), torch.cat([MASK, ONE[None].bool()])
ROWS, N = SEGMENTS.shape


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def heads(seed):
    return draw(ROWS, HEADS, N, SIZE, seed=seed)


def decays(*more):
    return -draw(ROWS, HEADS, N, *more, seed=4).abs()


THREE = {"query": heads(1), "key": heads(2) / 2, "value": heads(3)}
WIDE = draw(ROWS, HEADS, SIZE, SIZE, seed=5)
TOKENS = {"x": draw(ROWS, N, SIZE, seed=1)}
SELECTIVE = {"dt": draw(ROWS, N, SIZE, seed=2).abs(), "B": draw(ROWS, N, 2, seed=3), "C": draw(ROWS, N, 2, seed=4)}
# Operands with tokens, other operands, the state, and the axis of tokens.
OPS = {
    "linear": (longspan.linear_attention, THREE, {}, draw(ROWS, HEADS, SIZE, SIZE + 1, seed=6).abs(), 2),
    "decay": (longspan.decay_attention, THREE | {"log_decay": decays()}, {}, WIDE, 2),
    "channels": (longspan.decay_attention, THREE | {"log_decay": decays(SIZE)}, {}, WIDE, 2),
    "delta": (longspan.delta_rule, THREE | {"beta": draw(ROWS, HEADS, N, seed=7).sigmoid()}, {}, WIDE, 2),
    "general": (
        longspan.general_delta_rule,
        THREE | {"read": heads(8) / 3, "erase": heads(9) / 3, "log_decay": decays(SIZE)},
        {},
        WIDE,
        2,
    ),
    "diagonal": (
        longspan.diagonal_scan,
        TOKENS | {"log_decay": -draw(ROWS, N, SIZE, seed=2).abs()},
        {},
        draw(ROWS, SIZE),
        1,
    ),
    "selective": (longspan.selective_scan, TOKENS | SELECTIVE, {"A": -draw(SIZE, 2).abs()}, draw(ROWS, SIZE, 2), 1),
    "convolution": (
        longspan.causal_convolution,
        TOKENS,
        {"weight": draw(SIZE, 4), "activation": "silu"},
        draw(ROWS, 5, SIZE),
        1,
    ),
}


def run(op, tokens, others, state, **options):
    if op is not longspan.causal_convolution:
        options["return_state"] = True
    return op(**tokens, **others, state=state, **options)


def masked(x, axis, fill):
    return x.masked_fill(~MASK.view(ROWS, *(1,) * (axis - 1), N, *(1,) * (x.dim() - axis - 1)), fill)


def separate(op, tokens, others, state, axis):
    """The outputs and states of calls on the real tokens of one segment, with the definition."""
    like = tokens["value" if "value" in tokens else "x"]
    outputs, states = [], []
    for row in range(ROWS):
        y, now = torch.zeros_like(like[row : row + 1]), state[row : row + 1]
        for number, segment in enumerate(SEGMENTS[row].unique().tolist()):
            now = torch.zeros_like(now) if number else now
            at = ((SEGMENTS[row] == segment) & MASK[row]).nonzero()[:, 0]
            if len(at):
                here = {name: t[row : row + 1].index_select(axis, at) for name, t in tokens.items()}
                out, now = run(op, here, others, now)
                y = y.index_copy(axis, at, out)
        outputs.append(y)
        states.append(now)
    return torch.cat(outputs), torch.cat(states)


KINDS = [(name, kind) for name in OPS for kind in ("reference", "torch", *(["native"] if available() else []))]
if importlib.util.find_spec("triton") and interpreted():
    KINDS += [(name, "triton") for name in OPS if name not in ("general", "diagonal", "selective")]


@pytest.mark.whole
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_it_equals_separate_calls(name, kind):
    op, tokens, others, state, axis = OPS[name]
    dtype, tolerance = (torch.float64, 1e-12) if kind in ("reference", "torch") else (torch.float32, 2e-5)

    def outcome(call, dtype, fill=0.0):
        leaves = {key: masked(t.to(dtype), axis, fill).requires_grad_() for key, t in tokens.items()}
        rest = {key: t.to(dtype).requires_grad_() if isinstance(t, torch.Tensor) else t for key, t in others.items()}
        before = state.to(dtype).requires_grad_()
        y, after = call(op, leaves, rest, before)
        y = masked(y, axis, 0.0)  # linear attention leaves arbitrary numbers there
        loss = (y * draw(*y.shape, seed=11)).sum() + (after * draw(*after.shape, seed=12)).sum()
        inputs = [*leaves.values(), *(t for t in rest.values() if isinstance(t, torch.Tensor)), before]
        return [y, after, *torch.autograd.grad(loss, inputs)]

    with backend("reference"):
        wanted = outcome(lambda *given: separate(*given, axis), torch.float64)
    for fill in (0.0, torch.nan):
        with backend(kind):
            found = outcome(lambda *given: run(*given, mask=MASK, segments=SEGMENTS), dtype, fill)
        for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
            error = (a - b).abs().max() / b.abs().max()
            assert error <= tolerance, f"number {number}, masked tokens hold {fill}: {error}"


@pytest.mark.whole
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_the_state_stays_in_the_first_segment(name, kind):
    op, tokens, others, state, axis = OPS[name]
    dtype = torch.float64 if kind in ("reference", "torch") else torch.float32
    to = {key: t.to(dtype) for key, t in tokens.items()}
    rest = {key: t.to(dtype) if isinstance(t, torch.Tensor) else t for key, t in others.items()}
    later = SEGMENTS != SEGMENTS[:, :1]
    with backend(kind):
        clean = run(op, to, rest, state.to(dtype), mask=MASK, segments=SEGMENTS)
        spoilt = run(op, to, rest, torch.full_like(state.to(dtype), torch.nan), mask=MASK, segments=SEGMENTS)
    assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-6)
    assert_same(spoilt[0].movedim(axis, 1)[later], clean[0].movedim(axis, 1)[later])
    # The last row has one segment.
    assert_same(spoilt[1][:-1], clean[1][:-1])


@pytest.mark.whole
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("kind", ["auto", "reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_tokens_leave_the_state(name, kind, dtype):
    op, tokens, others, state, axis = OPS[name]
    none = {key: t.to(dtype).narrow(axis, 0, 0) for key, t in tokens.items()}
    rest = {key: t.to(dtype) if isinstance(t, torch.Tensor) else t for key, t in others.items()}
    with backend(kind):
        y, after = run(op, none, rest, state.to(dtype), mask=MASK[:, :0], segments=SEGMENTS[:, :0])
    assert y.shape[axis] == 0
    assert after.equal(state.to(dtype))


@pytest.mark.whole
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_gradients_may_have_any_layout(name, kind):
    op, tokens, others, state, _ = OPS[name]
    dtype = torch.float64 if kind in ("reference", "torch") else torch.float32
    leaves = {key: t.to(dtype).requires_grad_() for key, t in tokens.items()}
    rest = {key: t.to(dtype) if isinstance(t, torch.Tensor) else t for key, t in others.items()}
    before = state.to(dtype).requires_grad_()
    with backend(kind):
        outputs = run(op, leaves, rest, before)
        inputs = [*leaves.values(), before]
        upstream = [draw(*t.shape, seed=13).to(dtype) for t in outputs]
        wanted = torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)
        # The first axis last in memory.
        strided = [t.movedim(0, -1).contiguous().movedim(-1, 0) for t in upstream]
        found = torch.autograd.grad(outputs, inputs, strided)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


# The ops whose sums would carry NaN across a border.
SUMS = [name for name in OPS if name not in ("diagonal", "selective", "convolution")]
SPOILT = SEGMENTS == 2
SPOILT[1:3] = False
SPOILT[2, N - 2 :] = True  # the last segment of one row alone


def spoilt_tokens(name, operand):
    """The operands of an op, with NaN in the first token of a segment; whether each token sees it."""
    tokens = dict(OPS[name][1])
    first = SPOILT & ~torch.nn.functional.pad(SPOILT[:, :-1], (1, 0))
    at = first[:, None, :, *(None,) * (tokens[operand].dim() - 3)]
    return tokens | {operand: tokens[operand].masked_fill(at, torch.nan)}


@pytest.mark.whole
@pytest.mark.parametrize(("name", "operand"), [(name, operand) for name in SUMS for operand in OPS[name][1]])
@pytest.mark.parametrize("transformed", [False, True])
def test_numbers_that_are_none_stay_in_their_segment(name, operand, transformed):
    """Also where a transform cannot look at them; they spoil all later tokens of the segment there."""
    op, tokens, others, state, axis = OPS[name]

    def call(tokens):
        with backend("torch"):
            return run(op, tokens, others, state, segments=SEGMENTS)

    clean, spoilt = call(tokens), spoilt_tokens(name, operand)
    y, after = torch.func.vjp(call, spoilt)[0] if transformed else call(spoilt)
    kept = ~SPOILT
    torch.testing.assert_close(y.movedim(axis, 1)[kept], clean[0].movedim(axis, 1)[kept])
    assert y.movedim(axis, 1)[SPOILT].isnan().any()
    assert not transformed or y.movedim(axis, 1)[SPOILT].isnan().all()
    torch.testing.assert_close(after[~SPOILT[:, -1]], clean[1][~SPOILT[:, -1]])
    assert operand == "query" or after[SPOILT[:, -1]].isnan().flatten(1).any(1).all()


@pytest.mark.whole
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_gradients_that_are_none_stay_in_their_segment(name, used):
    """Those of the output, of the state, or of both."""
    op, tokens, others, state, axis = OPS[name]
    kept = ~SPOILT

    def gradients(factor):
        leaves = {key: t.detach().requires_grad_() for key, t in tokens.items()}
        with backend("torch"):
            outputs = run(op, leaves, others, state, segments=SEGMENTS)
        upstream = [torch.ones_like(t) for t in outputs]
        upstream[0].movedim(axis, 1)[SPOILT] *= factor
        upstream[1][SPOILT[:, -1]] *= factor
        inputs = [t for key, t in leaves.items() if key != "query"] if used == (1,) else [*leaves.values()]
        found = torch.autograd.grad([outputs[i] for i in used], inputs, [upstream[i] for i in used])
        return [t.movedim(axis, 1)[kept] for t in found]

    for a, b in zip(gradients(torch.nan), gradients(1.0), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.whole
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_donated_state_is_not_read_twice(name, kind):
    """A token with a segment, of which one row is NaN: the other rows continue the state that came in."""
    op, tokens, others, state, axis = OPS[name]
    dtype = torch.float64 if kind in ("reference", "torch") else torch.float32
    token = {key: t.to(dtype).narrow(axis, 0, 1).clone() for key, t in tokens.items()}
    token["value" if "value" in token else "x"][0] = torch.nan
    rest = {key: t.to(dtype) if isinstance(t, torch.Tensor) else t for key, t in others.items()}
    with torch.no_grad(), backend(kind):
        wanted = run(op, token, rest, state.to(dtype), segments=SEGMENTS[:, :1])
        found = run(op, token, rest, state.to(dtype, copy=True), segments=SEGMENTS[:, :1], donate=True)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert wanted[0][1:].isfinite().all()
