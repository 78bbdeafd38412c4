"""Positions, rotations and the feed-forward network."""

import pytest
import torch
import torch.nn.functional as F

from longspan.config import ACTIVATIONS
from longspan.layers import FeedForward, norm, positions, rotate, sinusoid, visible
from longspan.ops.heads import merge, split


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class TestPositions:
    x = torch.zeros(2, 5, 3)

    def test_plain(self):
        at, end = positions(self.x, torch.tensor([0, 7]))
        assert at.tolist() == [[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]]
        assert end.tolist() == [5, 12]

    def test_masked_tokens_take_none(self):
        mask = torch.tensor([[False, True, False, True, True], [True, True, True, True, False]])
        at, end = positions(self.x, torch.tensor([0, 7]), mask=mask)
        assert at[mask].tolist() == [0, 1, 2, 7, 8, 9, 10]
        assert end.tolist() == [3, 11]

    def test_segments_start_anew(self):
        segments = torch.tensor([[0, 0, 1, 1, 1], [4, 4, 4, 4, 4]])
        at, end = positions(self.x, torch.tensor([2, 7]), segments=segments)
        assert at.tolist() == [[2, 3, 0, 1, 2], [7, 8, 9, 10, 11]]
        assert end.tolist() == [3, 12]

    def test_segments_with_padding(self):
        segments = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]])
        mask = torch.tensor([[True, False, True, False, True], [True, True, True, True, False]])
        at, end = positions(self.x, mask=mask, segments=segments)
        assert at[mask].tolist() == [0, 0, 1, 0, 1, 2, 0]
        assert end.tolist() == [2, 1]

    def test_no_tokens(self):
        at, end = positions(self.x[:, :0], torch.tensor([3, 4]), segments=torch.zeros(2, 0, dtype=torch.long))
        assert (at.shape, end.tolist()) == ((2, 0), [3, 4])


class TestRotary:
    def test_products_depend_on_the_distance_only(self):
        q, k = randn(1, 1, 1, 8), randn(1, 1, 1, 8, seed=1)
        at = lambda x, p: rotate(x, torch.tensor([[p]]), 100.0)  # noqa: E731
        near = (at(q, 3) * at(k, 1)).sum()
        torch.testing.assert_close((at(q, 1003) * at(k, 1001)).sum(), near, atol=1e-10, rtol=0)
        assert abs((at(q, 4) * at(k, 1)).sum() - near) > 1e-3

    def test_keeps_norms_and_position_zero(self):
        x = randn(2, 3, 5, 8)
        at = torch.arange(5).expand(2, -1)
        turned = rotate(x, at, 10000.0)
        torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
        torch.testing.assert_close(turned[:, :, 0], x[:, :, 0])

    def test_pairs_turn_by_their_own_rates(self):
        """Pair j, channels j and j + D/2, turns by position * base^(-2j/D): (1, 0) becomes (cos, sin)."""
        x = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
        x[..., 1] = 1
        turned = rotate(x, torch.tensor([[3]]), 100.0).flatten()
        angle = torch.tensor(3 * 100.0 ** (-2 / 4), dtype=torch.float64)
        torch.testing.assert_close(turned, torch.stack([angle * 0, angle.cos(), angle * 0, angle.sin()]))


class TestSinusoid:
    @pytest.mark.parametrize("dim", [6, 7])
    def test_values(self, dim):
        at = torch.tensor([[0, 5]])
        table = sinusoid(at, dim, torch.float64)
        assert table.shape == (1, 2, dim)
        assert table[0, 0, 0::2].eq(0).all()
        assert table[0, 1, 3].item() == pytest.approx(torch.tensor(5 * 10000 ** (-2 / dim)).cos().item())

    def test_norm_is_half_the_width(self):
        table = sinusoid(torch.arange(50)[None], 8, torch.float64)
        torch.testing.assert_close(table.square().sum(-1), torch.full((1, 50), 4.0, dtype=torch.float64))


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
        "silu": lambda: hidden * hidden.sigmoid(),
        "squared_relu": lambda: hidden.clamp(min=0) ** 2,
        "geglu": lambda: first * torch.special.ndtr(first) * second,
        "swiglu": lambda: first * first.sigmoid() * second,
    }[activation]()
    torch.testing.assert_close(layer(x), F.linear(expected, layer.contract.weight, layer.contract.bias))


@pytest.mark.parametrize(("kind", "centred"), [("layer", True), ("rms", False)])
def test_norms(kind, centred):
    x = randn(3, 64)
    y = norm(kind, 64).double()(x)
    expected = (x - x.mean(-1, keepdim=True)) if centred else x
    expected = expected / expected.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
