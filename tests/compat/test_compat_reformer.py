"""Reformer as fast-transformers has it: against loops over its chunks, with the planes that the generator gives."""

import pytest
import torch

from longspan.compat.fast_transformers.attention import ReformerAttention
from longspan.compat.fast_transformers.builders import AttentionBuilder, TransformerEncoderBuilder
from longspan.compat.fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask
from support.tensors import data

L, BITS, ROUNDS = 22, 3, 3


def by_loops(module, q, v, allowed, lengths):
    """The mean over rounds of softmax over a chunk and the one before: q, v (N,L,H,.)."""
    torch.manual_seed(5)
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    temp = module.softmax_temp or q.shape[-1] ** -0.5
    for _ in range(module.rounds):
        planes = torch.randn(module.bits, q.shape[-1], dtype=q.dtype)
        for b in range(len(q)):
            for h in range(q.shape[2]):
                k = q[b, :, h] / q[b, :, h].norm(dim=-1, keepdim=True)
                hashes = torch.cat([k @ planes.T, -k @ planes.T], -1).argmax(-1).tolist()
                order = sorted(range(int(lengths[b])), key=lambda t, hashes=hashes: (hashes[t], t))
                for at, i in enumerate(order):
                    start = at // module.chunk_size * module.chunk_size
                    seen = [j for j in order[max(0, start - module.chunk_size) : start + module.chunk_size]]
                    seen = [j for j in seen if allowed[i, j]]
                    if module.masked and len(seen) > 1:
                        seen = [j for j in seen if j != i]
                    p = (temp * k[seen] @ q[b, i, h]).softmax(-1)
                    out[b, i, h] += p @ v[b, seen, h] / module.rounds
    return out


@pytest.mark.parametrize("chunk", [4, 5, 100])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temp", [None, 0.7])
@pytest.mark.parametrize("mask", [FullMask(L), TriangularCausalMask(L)], ids=["all", "causal"])
def test_it_is_the_mean_over_rounds_of_attention_in_chunks(chunk, masked, temp, mask):
    module = ReformerAttention(chunk, BITS, ROUNDS, masked, temp, attention_dropout=0.0)
    q, v = data(2, L, 2, 5).requires_grad_(), data(2, L, 2, 3, seed=1).requires_grad_()
    lengths = torch.tensor([L, 13])
    torch.manual_seed(5)
    found = module(q, data(2, L, 2, 5, seed=2), v, mask, LengthMask(lengths, L), LengthMask(lengths, L))
    expected = by_loops(module, q, v, mask.bool_matrix, lengths)
    real = LengthMask(lengths, L).bool_matrix
    torch.testing.assert_close(found[real], expected[real], rtol=1e-10, atol=1e-10)
    upstream = data(2, L, 2, 3, seed=3)
    grads = [torch.autograd.grad((y * upstream)[real].sum(), (q, v)) for y in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_padding_moves_nothing():
    """However much there is, and whatever it holds."""
    module, q, v = ReformerAttention(4, BITS, ROUNDS, attention_dropout=0.0), data(1, 13, 2, 5), data(1, 13, 2, 3)
    outputs = []
    for more in (0, 1, 9):
        padded = [torch.cat([x, 50 + data(1, more, 2, x.shape[-1], seed=4)], 1) for x in (q, v)]
        torch.manual_seed(5)
        lengths = LengthMask(torch.tensor([13]), 13 + more)
        outputs.append(module(padded[0], padded[0], padded[1], FullMask(13 + more), lengths, lengths)[:, :13])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs[2], outputs[0], rtol=1e-12, atol=1e-12)


def test_a_causal_mask_leaks_by_the_chunks():
    """As in the original, and as documented."""
    module, lengths = ReformerAttention(8, 8, 1, attention_dropout=0.0), LengthMask(torch.full((8,), 64))
    q, v, other = data(8, 64, 1, 16), data(8, 64, 1, 16, seed=1), data(8, 64, 1, 16, seed=2)
    outputs = []
    for x in (q, torch.cat([q[:, :32], other[:, 32:]], 1)):
        torch.manual_seed(5)
        outputs.append(module(x, x, v, TriangularCausalMask(64), lengths, lengths)[:, :32])
    assert 0.2 < (outputs[0] - outputs[1]).abs().amax((-2, -1)).gt(1e-9).double().mean() < 0.9


def test_builders_know_it():
    options = {"chunk_size": 4, "bits": 4, "rounds": 2, "masked": True, "softmax_temp": 0.5}
    builder = AttentionBuilder.from_kwargs(**options, attention_dropout=0.0)
    module = builder.get("reformer")
    assert isinstance(module, ReformerAttention)
    assert {name: getattr(module, name) for name in options} == options
    assert AttentionBuilder().get("reformer").bits == 63
    assert ReformerAttention().bits == 8
    assert not module.state_dict()
    sizes = {"n_layers": 2, "n_heads": 2, "query_dimensions": 5, "value_dimensions": 3, "feed_forward_dimensions": 7}
    model = TransformerEncoderBuilder.from_kwargs(attention_type="reformer", attention_dropout=0.0, **sizes, **options)
    assert model.get().eval()(torch.randn(3, 11, 6)).shape == (3, 11, 6)


def test_no_tokens():
    module, none = ReformerAttention(), torch.zeros(2, 0, 2, 3)
    assert module(none, none, none, FullMask(0), FullMask(2, 0), FullMask(2, 0)).shape == (2, 0, 2, 3)


def test_what_cannot_be_is_refused():
    for options in ({"chunk_size": 0}, {"bits": 0}, {"rounds": 0}):
        with pytest.raises(ValueError, match="=0.*1"):
            ReformerAttention(**options)
    q, k = data(1, 4, 2, 3), data(1, 5, 2, 3)
    with pytest.raises(ValueError, match="4 queries and 5 keys"):
        ReformerAttention()(q, k, k, FullMask(4, 5), FullMask(1, 4), FullMask(1, 5))
