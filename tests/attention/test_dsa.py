"""DeepSeek sparse attention against softmax under the choice of its indexer, and the indexer's loss."""

import pytest
import torch

from support.sparse import build, data
from support.tensors import close, same

N, KEYS = 29, 5
SPEC = f"dsa(keys={KEYS}, index_heads=2, index_dim=4)"


def scores(module, x):
    """(B,N,N) of the indexer, -inf for later tokens."""
    asks = module.index_query(x).unflatten(-1, (2, 4))
    offers = module.index_norm(module.index_key(x))
    each = torch.einsum("bijd,bsd->bijs", asks, offers).relu() * module.index_weight(x)[..., None]
    return (each.sum(2) / 8**0.5).masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -torch.inf)


def dense(module, x, seen):
    q, k, v = (part(x).unflatten(-1, (2, 3)).transpose(1, 2) for part in (module.query, module.key, module.value))
    p = (q @ k.mT * 3**-0.5).masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return module.out((p @ v).transpose(1, 2).flatten(-2)), p


def chosen(fits):
    order = fits.argsort(dim=-1, descending=True, stable=True)[..., :KEYS]
    return torch.zeros_like(fits, dtype=torch.bool).scatter(-1, order, True) & (fits > -torch.inf)


def test_it_is_softmax_over_the_best_tokens():
    module, x = build(SPEC), data(N).requires_grad_()
    seen = chosen(scores(module, x).detach())
    weights = [p for name, p in module.named_parameters() if not name.startswith("index")]
    same(module(x)[0], dense(module, x, seen)[0], (x, *weights))


@pytest.mark.parametrize("given", ["mask", "segments", "state"])
def test_the_indexer_learns_the_weights_of_the_heads(given):
    """The mean divergence over real tokens; only the indexer has gradients from it."""
    module, x = build(SPEC), data(N).requires_grad_()
    arguments: dict = {}
    state, real = None, torch.ones(2, N, dtype=torch.bool)
    if given == "mask":
        real = torch.rand(2, N, generator=torch.Generator().manual_seed(3)) < 0.7
        arguments = {"mask": real}
    if given == "segments":
        arguments = {"segments": (torch.arange(N) >= 11).long().expand(2, -1)}
    if given == "state":
        state = module.init_state(2)
    record: dict = {"penalty": None}
    module(x, state, record=record, **arguments)
    total, count = x.new_zeros(()), 0
    for row in range(2):
        pieces = (
            [x[row : row + 1, :11], x[row : row + 1, 11:]] if given == "segments" else [x[row : row + 1, real[row]]]
        )
        for piece in pieces:
            n = piece.shape[1]
            padded = torch.cat([piece, piece.new_zeros(1, N - n, 6)], 1)
            fits = scores(module, padded.detach())[:, :n]
            seen = chosen(fits)
            wanted = dense(module, padded, chosen(scores(module, padded)))[1][:, :, :n].mean(1).detach()
            log = fits.masked_fill(~seen, -torch.inf).log_softmax(-1).masked_fill(~seen, 0.0)
            total = total + (torch.special.xlogy(wanted, wanted) - wanted * log).sum()
            count += n
    names, weights = zip(*module.named_parameters(), strict=True)
    close(record["penalty"], total / count)
    found = torch.autograd.grad(record["penalty"], [x, *weights], allow_unused=True)
    expected = torch.autograd.grad(total / count, [x, *weights], allow_unused=True)
    for name, a, b in zip(("x", *names), found, expected, strict=True):
        assert (a is None or not a.any()) == (not name.startswith("index")), name
        if name.startswith("index"):
            close(a, b)
