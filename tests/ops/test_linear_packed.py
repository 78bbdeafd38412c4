"""``cu_seqlens`` of linear attention: each packed sequence is as if it had been called by itself."""

from itertools import pairwise

import pytest
import torch

from longspan import linear_attention

CUTS = torch.tensor([0, 0, 5, 6, 29], dtype=torch.int32)


def operands(dtype=torch.float64, states=4):
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return random(1, 2, 29, 4), random(1, 2, 29, 4), random(1, 2, 29, 6), random(states, 2, 4, 7)


def apart(query, key, value, state, **options):
    """One call per sequence."""
    outputs, states = [], []
    for s, (begin, end) in enumerate(pairwise(CUTS.tolist())):
        own = None if state is None else state[s : s + 1]
        parts = (t[:, :, begin:end] for t in (query, key, value))
        o, last = linear_attention(*parts, state=own, return_state=True, **options)
        outputs.append(o)
        states.append(last)
    return torch.cat(outputs, 2), torch.cat(states)


def test_bidirectional_sequences():
    *qkv, _ = operands()
    found = linear_attention(*qkv, causal=False, cu_seqlens=CUTS, return_state=True)
    for a, b in zip(found, apart(*qkv, None, causal=False), strict=True):
        torch.testing.assert_close(a, b)


def test_outputs_are_those_of_segments():
    *qkv, _ = operands()
    segments = torch.tensor([[0] * 5 + [1] + [2] * 23])
    torch.testing.assert_close(linear_attention(*qkv, cu_seqlens=CUTS), linear_attention(*qkv, segments=segments))


def test_no_sequence():
    q = torch.zeros(1, 2, 0, 4)
    o, state = linear_attention(q, q, q, cu_seqlens=torch.tensor([0]), return_state=True)
    assert o.shape == (1, 2, 0, 4)
    assert state.shape == (0, 2, 4, 5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"segments": torch.zeros(1, 29, dtype=torch.int64)}, "segments"),
        ({"cu_seqlens": torch.tensor([0, 28])}, "29"),
        ({"state": torch.zeros(1, 2, 4, 7, dtype=torch.float64)}, r"\(4, 2, 4, 7\)"),
    ],
)
def test_refusals(options, named):
    *qkv, _ = operands()
    with pytest.raises(ValueError, match=named):
        linear_attention(*qkv, **{"cu_seqlens": CUTS, **options})
