"""The blocks of sets: two explicit attentions, invariance to order, and masked elements."""

import math

import pytest
import torch

import longspan
from support.tensors import close, data, same

N = 11
MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False] + [True] * 10])


def make(kind, *args, **options):
    torch.manual_seed(0)
    return kind(6, 2, *args, **options).double()


def mab(block, x, y, mask=None):
    """The definition, head by head, row by row: x (B,N,dim), y (B,M,dim)."""
    rows = []
    for b in range(len(x)):
        real = y[b] if mask is None else y[b][mask[b]]
        heads = []
        for head in (slice(0, 3), slice(3, 6)):
            q, k, v = block.query(x[b])[:, head], block.key(real)[:, head], block.value(real)[:, head]
            heads.append((q @ k.mT * 3**-0.5).softmax(-1) @ v)
        h = block.norm1(x[b] + block.out(torch.cat(heads, -1)))
        rows.append(block.norm2(h + block.row(h).relu()))
    return torch.stack(rows)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("mask", [None, MASK])
class TestDefinition:
    def test_mab(self, norm, mask):
        block, x, y = make(longspan.MAB, norm=norm), data(2, 4, 6), data(2, N, 6, seed=1)
        close(block(x, y, mask), mab(block, x, y, mask))

    def test_sab(self, norm, mask):
        block, x = make(longspan.SAB, norm=norm), data(2, N, 6)
        real = slice(None) if mask is None else mask
        close(block(x, mask)[real], mab(block.block, x, x, mask)[real])

    def test_isab_is_two_attentions(self, norm, mask):
        block, x = make(longspan.ISAB, points=4, norm=norm), data(2, N, 6).requires_grad_()
        real = torch.ones_like(MASK) if mask is None else mask
        found = block(x, mask)
        expected = mab(block.unpack, x, mab(block.pack, block.inducing.expand(2, -1, -1), x, mask))
        same(found[real], expected[real], (x, *block.parameters()))

    def test_pma(self, norm, mask):
        block, x = make(longspan.PMA, seeds=3, norm=norm), data(2, N, 6)
        close(block(x, mask), mab(block.block, block.seeds.expand(2, -1, -1), block.row(x).relu(), mask))

    def test_the_attention_is_the_block(self, norm, mask):
        module = longspan.build(f"set_transformer(points=4, norm={norm})", 6, 2, causal=False).double()
        x = data(2, N, 6)
        close(module(x, mask=mask)[0], module.block(x, mask))


def test_a_case_by_hand():
    """One channel, weights 1, the seed 0.5, elements -3 and 4: relu leaves 0 and 4, with weights softmax(0, 2)."""
    block = longspan.PMA(1, 1, norm=False).double()
    for name, weight in block.named_parameters():
        torch.nn.init.constant_(weight, 0.0 if name.endswith("bias") else 1.0)
    torch.nn.init.constant_(block.seeds, 0.5)
    h = 0.5 + 4 / (1 + math.exp(-2))
    assert block(torch.tensor([[[-3.0], [4.0]]]).double()).item() == pytest.approx(2 * h)


@pytest.mark.parametrize("kind", ["SAB", "ISAB", "PMA"])
def test_masked_elements_are_ignored(kind):
    block, x = make(getattr(longspan, kind)), data(2, N, 6)
    spoilt = x.masked_fill(~MASK[..., None], torch.nan).requires_grad_()
    y = block(spoilt, MASK)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert spoilt.grad.isfinite().all()
    for b in range(2):
        alone = block(x[b : b + 1, MASK[b]])[0]
        close(y[b] if kind == "PMA" else y[b, MASK[b]], alone)
        assert kind == "PMA" or not y[b, ~MASK[b]].any()


def test_a_set_of_nothing_is_read_as_zeros():
    block, x = make(longspan.MAB, norm=False), data(2, 4, 6)
    h = x + block.out.bias
    close(block(x, x, torch.zeros(2, 4, dtype=torch.bool)), h + block.row(h).relu())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: longspan.MAB(6, 4), "dim=6 is not a multiple of heads=4"),
        (lambda: longspan.ISAB(6, 2, points=0), "points=0 must be at least 1"),
        (lambda: longspan.PMA(6, 2, seeds=0), "seeds=0 must be at least 1"),
        (
            lambda: longspan.SAB(6, 2)(torch.zeros(2, 3, 5)),
            r"x must be floating-point \(B, N, 6\), not torch.float32 \(2, 3, 5\)",
        ),
        (
            lambda: longspan.MAB(6, 2)(torch.zeros(2, 3, 6), torch.zeros(2, 3).long()),
            r"y must be floating-point \(B, N, 6\), not torch.int64 \(2, 3\)",
        ),
        (
            lambda: longspan.PMA(6, 2)(torch.zeros(2, 3, 6), torch.ones(2, 3)),
            r"mask must be bool \(2, 3\), True on real elements, not torch.float32 \(2, 3\)",
        ),
        (lambda: longspan.build("set_transformer(points=0)", 6, 2, causal=False), "points=0 must be at least 1"),
        (lambda: longspan.build("set_transformer", 6, 2), "set_transformer has no causal form; it has: bidirectional"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
