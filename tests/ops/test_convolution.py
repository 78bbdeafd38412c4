"""The causal convolution: the definition by hand, states of several layouts and types, rounding, and refusals.

``test_op_laws.py`` compares all forms with the definition.
"""

import pytest
import torch
import torch.nn.functional as F

from longspan import backend, causal_convolution
from longspan.ops.convolution import native as kernels
from longspan.ops.native.call import available
from longspan.testing.pairs import all_pairs
from ops.families import FAMILIES, assert_close, packing
from support.convolutions import check_step

FAMILY = FAMILIES["convolution"]
WAYS = ("torch", *(("native",) if available() else ()))
needs_kernels = pytest.mark.skipif(not available(), reason="no native kernels here")


def arguments(n=29, channels=37, taps=4, **options):
    return FAMILY.operands(n, (channels, taps), **options)


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


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("more", [0, 1])
def test_the_last_state_is_the_last_inputs_to_the_bit(name, more):
    given = arguments(29, more=more, dtype=torch.float32)
    for n in (2, 29):
        with backend(name):
            _, last = causal_convolution(**given | {"x": given["x"][:, :n]}, activation="silu")
        rows = given["state"].shape[1]
        assert last.equal(torch.cat([given["state"], given["x"][:, :n]], 1)[:, -rows:])


@needs_kernels
@pytest.mark.parametrize("tokens_last", [False, True])
def test_outputs_have_the_strides_of_the_inputs(tokens_last):
    given = arguments(67, dtype=torch.float32)
    if tokens_last:
        given |= {name: given[name].mT.contiguous().mT for name in ("x", "weight")}
    with backend("native"):
        assert causal_convolution(**given)[0].stride() == given["x"].stride()


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


HALF, SINGLE = torch.bfloat16, torch.float32
STEPS = all_pairs(
    dtypes=((SINGLE, SINGLE), (HALF, HALF), (HALF, SINGLE), (torch.float16, torch.float16)),
    sizes=FAMILY.step,
    more=(0, 1),
    tokens_last=(False, True),
    taps_first=(False, True),
    donate=(False, True),
)


@needs_kernels
@pytest.mark.parametrize("row", STEPS, ids=lambda row: "-".join(str(value).replace(" ", "") for value in row.values()))
def test_a_step_takes_states_of_any_strides_and_dtype(row):
    check_step("native", **row)


@needs_kernels
def test_the_backward_pass_keeps_the_inputs_alone():
    given, kept = arguments(67, dtype=torch.float32), []
    leaves = [t.requires_grad_() for t in given.values()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        causal_convolution(*leaves, activation="silu")
    assert {t.data_ptr() for t in kept} <= {t.data_ptr() for t in leaves}


# torch compiles some rules on first use, by what it calls deprecated itself.


@needs_kernels
def test_kernels_refuse_too_many_taps():
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
        ({"activation": "relu"}, "unknown activation 'relu'; known: silu"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message, tokens):
    given = {"x": torch.zeros(2, tokens, 5), "weight": torch.zeros(5, 4), "state": torch.zeros(2, 3, 5)} | changes
    with pytest.raises(ValueError, match=message):
        causal_convolution(**given)


def test_a_state_that_is_read_too_may_not_be_given_away():
    state = torch.zeros(1, 3, 5)
    with pytest.raises(ValueError, match="overwrites the state, which shares memory with x"):
        causal_convolution(state[:, :1], torch.zeros(5, 4), state=state, donate=True)


@pytest.mark.parametrize("kind", ["plain", "segments", "cu_seqlens"])
@pytest.mark.parametrize("more", [0, 2])
def test_masked_tokens_are_skipped(kind, more):
    """The real tokens alone, as a shorter call; what masked ones hold reaches nothing, and their outputs are 0."""
    n = 29
    packed = packing(kind, n, 1)
    states = len(packed["cu_seqlens"]) - 1 if kind == "cu_seqlens" else 1
    given = arguments(n, 3, batch=1, more=more, states=states)
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
