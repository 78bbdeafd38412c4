"""Positions, rotations, short convolutions, norms and the feed-forward network."""

import pytest
import torch
import torch.nn.functional as F

from longspan import causal_convolution
from longspan.models.config import ACTIVATIONS
from longspan.modules.feedforward import FeedForward
from longspan.modules.init import time_steps
from longspan.modules.norms import HeadNorm, norm
from longspan.modules.rotary import rotate
from longspan.modules.short_conv import ShortConvolution
from longspan.ops.backends import watch
from longspan.ops.tensors import merge, positions, split, unit, visible
from support.tensors import data as randn


@pytest.mark.parametrize(
    ("start", "mask", "segments", "expected", "ends"),
    [
        ([0, 7], None, None, [0, 1, 2, 3, 4, 7, 8, 9, 10, 11], [5, 12]),
        ([0, 7], [[0, 1, 0, 1, 1], [1, 1, 1, 1, 0]], None, [0, 1, 2, 7, 8, 9, 10], [3, 11]),
        ([2, 7], None, [[0, 0, 1, 1, 1], [4, 4, 4, 4, 4]], [2, 3, 0, 1, 2, 7, 8, 9, 10, 11], [3, 12]),
        (None, [[1, 0, 1, 0, 1], [1, 1, 1, 1, 0]], [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]], [0, 0, 1, 0, 1, 2, 0], [2, 1]),
    ],
    ids=["plain", "masked tokens take none", "segments start anew", "segments with padding"],
)
def test_positions(start, mask, segments, expected, ends):
    given = {"start": start, "mask": mask, "segments": segments}
    given = {name: torch.tensor(value) for name, value in given.items() if value is not None}
    real = given.get("mask", torch.ones(2, 5)) > 0
    at, end = positions(torch.zeros(2, 5, 3), **given | ({"mask": real} if mask else {}))
    assert at[real].tolist() == expected
    assert end.tolist() == ends


def test_positions_of_no_tokens():
    at, end = positions(torch.zeros(2, 0, 3), torch.tensor([3, 4]), segments=torch.zeros(2, 0, dtype=torch.long))
    assert (at.shape, end.tolist()) == ((2, 0), [3, 4])


def test_split_and_merge():
    x = randn(2, 5, 12)
    assert split(x, 3).shape == (2, 3, 5, 4)
    torch.testing.assert_close(split(x, 3)[:, 1], x[..., 4:8])
    torch.testing.assert_close(merge(split(x, 3)), x)


def test_visible():
    mask = torch.tensor([[True, False, True, True]])
    allowed = visible(torch.zeros(1, 4), causal=True, mask=mask, segments=torch.tensor([[0, 0, 0, 1]]))
    assert allowed.int().tolist() == [[[[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]]]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward(activation):
    torch.manual_seed(0)
    layer, x = FeedForward(5, 7, activation).double(), randn(2, 3, 5)
    hidden = F.linear(x, layer.expand.weight, layer.expand.bias)
    first, second = hidden[..., :7], hidden[..., 7:]
    expected = {
        "relu": lambda: hidden.clamp(min=0),
        "gelu": lambda: hidden * torch.special.ndtr(hidden),
        "gelu_tanh": lambda: hidden * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)),
        "silu": lambda: hidden * hidden.sigmoid(),
        "squared_relu": lambda: hidden.clamp(min=0) ** 2,
        "geglu": lambda: first * torch.special.ndtr(first) * second,
        "swiglu": lambda: first * first.sigmoid() * second,
    }[activation]()
    torch.testing.assert_close(layer(x), F.linear(expected, layer.contract.weight, layer.contract.bias))


@pytest.mark.parametrize(("kind", "centered"), [("layer", True), ("rms", False)])
def test_norms(kind, centered):
    x = randn(3, 64)
    y = norm(kind, 64).double()(x)
    expected = (x - x.mean(-1, keepdim=True)) if centered else x
    expected = expected / expected.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def convolution():
    torch.manual_seed(0)
    return ShortConvolution(3, 4).double()


class TestShortConvolution:
    def test_by_hand(self):
        layer = ShortConvolution(1, 3)
        layer.weight.data = torch.tensor([[100.0, 10.0, 1.0]])
        y, state = layer(torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]))
        assert y.flatten().tolist() == [1, 12, 123, 234]
        assert state.flatten().tolist() == [3, 4]
        y, state = layer(torch.tensor([[[5.0]]]), state)
        assert (y.item(), state.flatten().tolist()) == (345, [4, 5])

    def test_starts_as_torchs_own(self):
        torch.manual_seed(0)
        ours = ShortConvolution(500, 4).weight
        theirs = torch.nn.Conv1d(500, 500, 4, groups=500).weight
        assert ours.abs().max() <= 0.5
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.05)

    def test_widths_that_reach_nothing_are_refused(self):
        with pytest.raises(ValueError, match="width=1 must be at least 2"):
            ShortConvolution(3, 1)

    def test_is_the_public_operation_and_reports_the_backend(self):
        layer = ShortConvolution(6, 4)
        x, mask = torch.randn(2, 9, 6), torch.rand(2, 9) > 0.3
        with watch() as seen:
            y, state = layer(x, activation="silu")
        assert [served.op for served in seen] == ["the causal convolution"]
        expected, last = causal_convolution(x, layer.weight, activation="silu")
        assert y.equal(expected)
        assert state.equal(last)
        for row in range(2):
            y, state = layer(x, mask=mask)
            alone, last = layer(x[row, mask[row]][None])
            torch.testing.assert_close(y[row, mask[row]][None], alone)
            torch.testing.assert_close(state[row][None], last)


class TestHeadNorm:
    x, gate = 3 * randn(2, 3, 5, 7) + 2, randn(2, 3, 5, 7, seed=1)

    def test_rms_has_unit_scale(self):
        layer = HeadNorm(7).double()
        layer.weight.data = torch.arange(1.0, 8.0).double()
        y = layer(self.x)
        torch.testing.assert_close(
            (y / layer.weight).square().mean(-1), torch.ones(2, 3, 5).double(), atol=1e-4, rtol=0
        )
        torch.testing.assert_close(y, F.rms_norm(self.x, (7,), layer.weight, eps=1e-5))

    def test_group_is_torchs_group_norm_token_by_token(self):
        y = HeadNorm(7, kind="group").double()(self.x)
        tokens = self.x.transpose(1, 2).reshape(10, 21)
        expected = F.group_norm(tokens, 3).unflatten(0, (2, 5)).unflatten(-1, (3, 7)).transpose(1, 2)
        torch.testing.assert_close(y, expected)

    @pytest.mark.parametrize("kind", ["rms", "group"])
    def test_gates(self, kind):
        plain = HeadNorm(7, kind=kind).double()(self.x)
        silu, sigmoid = (HeadNorm(7, kind=kind, gate=gate).double()(self.x, self.gate) for gate in ("silu", "sigmoid"))
        torch.testing.assert_close(sigmoid, plain / (1 + (-self.gate).exp()))
        torch.testing.assert_close(silu, plain * self.gate / (1 + (-self.gate).exp()))

    def test_half_precision_is_summed_in_single(self):
        x = (1e3 * self.x).half()
        y = HeadNorm(7).half()(x)
        assert y.dtype == torch.float16
        torch.testing.assert_close(y.double(), F.rms_norm(x.double(), (7,)), atol=2e-3, rtol=1e-3)

    def test_unknown_names_are_refused(self):
        with pytest.raises(ValueError, match="unknown head norm 'layer'; known: group, rms"):
            HeadNorm(7, kind="layer")
        with pytest.raises(ValueError, match="unknown gate of a head norm 'swish'; known: none, sigmoid, silu"):
            HeadNorm(7, gate="swish")


def test_unit():
    torch.testing.assert_close(unit(torch.tensor([3.0, 4.0])), torch.tensor([0.6, 0.8]))
    zero = torch.zeros(3, requires_grad=True)
    unit(zero).sum().backward()
    assert zero.grad.isfinite().all()
    assert unit(torch.tensor([600.0, 800.0]).half()).tolist() == pytest.approx([0.6, 0.8], abs=1e-3)


def test_angles_of_half_precision_are_those_of_single_precision():
    """At 3000 tokens an angle in bfloat16 would be off by radians; only what is turned may be rounded."""
    x, at = randn(1, 2, 3000, 32), torch.arange(3000)[None]
    exact = rotate(x.bfloat16().double(), at, 10000.0)
    error = (rotate(x.bfloat16(), at, 10000.0).double() - exact).abs().max()
    assert error < 4 * torch.finfo(torch.bfloat16).eps * x.abs().max()


def test_time_steps_are_log_uniform():
    torch.manual_seed(0)
    steps = F.softplus(time_steps(4000).double())
    assert 0.001 * (1 - 1e-4) < steps.min()
    assert steps.max() < 0.1 * (1 + 1e-4)
    quarters = (steps.log10() + 3).mul(2).long().bincount(minlength=4)
    assert (quarters - 1000).abs().max() < 150
