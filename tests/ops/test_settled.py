"""Arguments of a stack are checked once, whatever its depth, and refused in the words of one attention."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.attention import build
from longspan.models.config import StackConfig
from longspan.models.stacks import Stack

N = 7
MASK = torch.tensor([[True] * 5 + [False] * 2, [False] + [True] * 6])
SEGMENTS = torch.tensor([[0, 0, 9, 1, 1, 1, 1], [3] * 7])
PREFIX = torch.tensor([3, 2])


def stack(depth, attention="linear"):
    torch.manual_seed(0)
    return Stack(StackConfig(dim=8, heads=2, feedforward=12, depth=depth, attention=attention)).double()


def data(seed=0):
    return torch.randn(2, N, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Waits(TorchDispatchMode):
    """How often a value is fetched from the device, for which a GPU would be waited for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "arguments",
    [
        {"segments": SEGMENTS.sort(1).values},
        {"segments": SEGMENTS.sort(1).values, "mask": MASK},
        {"prefix": PREFIX},
        {"prefix": PREFIX, "mask": MASK},
    ],
)
def test_values_are_fetched_once_whatever_the_depth(arguments):
    counts = []
    for depth in (1, 2, 5):
        model = stack(depth)
        with Waits() as waits:
            model(data(), **arguments)
        counts.append(waits.count)
    # With segments one for their order, and one for whether the outputs are finite.
    assert counts == [1 + ("segments" in arguments)] * 3


@pytest.mark.parametrize("attention", ["linear", "softmax", "linear; softmax; kernel"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"segments": SEGMENTS, "mask": torch.tensor([[True] * 2 + [False] + [True] * 4, [True] * 7])},
        {"prefix": PREFIX},
        {"prefix": PREFIX, "mask": MASK},
    ],
)
def test_layers_get_what_they_would_have_made_of_it_themselves(attention, arguments):
    model, x = stack(3, attention), data()
    y = x
    for block in model.blocks:
        y = block(y, **arguments)[0]
    y = model.norm(y)
    if "mask" in arguments:
        y = y.masked_fill(~arguments["mask"][..., None], 0.0)
    torch.testing.assert_close(model(x, **arguments)[0], y, rtol=0, atol=0)


WRONG = {
    "decreasing": {"segments": SEGMENTS},
    "decreasing, masked elsewhere": {"segments": SEGMENTS, "mask": MASK},
    "segments of a wrong type": {"segments": SEGMENTS.int()},
    "segments of a wrong shape": {"segments": SEGMENTS[:, 1:]},
    "segments as a list": {"segments": [0] * N},
    "prefix beyond the row": {"prefix": torch.tensor([3, 9])},
    "prefix beyond the real tokens": {"prefix": torch.tensor([6, 2]), "mask": MASK},
    "negative prefix": {"prefix": torch.tensor([-1, 2])},
    "prefix of a wrong shape": {"prefix": torch.tensor([3])},
    "both": {"prefix": PREFIX, "segments": SEGMENTS.sort(1).values},
    "mask of a wrong type": {"mask": MASK.long(), "segments": SEGMENTS},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_refused_in_the_words_of_one_attention(wrong):
    with pytest.raises(ValueError, match="must|cannot be combined") as alone:
        build("linear", 8, 2).double()(data(), **WRONG[wrong])
    with pytest.raises(ValueError, match="must|cannot be combined") as stacked:
        stack(3)(data(), **WRONG[wrong])
    assert str(stacked.value) == str(alone.value)


@pytest.mark.parametrize("attention", ["gla; linear", "linear; gla", "linear; linear; rfa(gate=True)"])
def test_what_one_layer_does_not_support_is_refused(attention):
    with pytest.raises(ValueError, match=r"^(gla|rfa) does not support prefix=; it supports: .*segments$"):
        stack(3, attention)(data(), prefix=PREFIX)
    with pytest.raises(ValueError, match="^a bidirectional linear sees whole sequences already; prefix= is for causal"):
        Stack(StackConfig(dim=8, heads=2, depth=2, attention="linear"), causal=False)(data().float(), prefix=PREFIX)
