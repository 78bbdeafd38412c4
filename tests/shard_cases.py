"""What every rank of the tests of sequence parallelism runs: whole rows in one process, and their shards."""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor

import longspan
from longspan.distributed import sequence_parallel

BATCH, HEADS, DIM = 2, 2, 16


def gap(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, as a fraction of the largest number, if that is above 1."""
    a, b = a.detach(), b.detach()
    if not b.numel():
        return 0.0
    return float((a - b).abs().max() / b.abs().max().clamp(min=1.0))


def cut(t, lengths, rank):
    return None if t is None else t.split(lengths, 1)[rank]


def attention_gaps(group, spec, lengths, segments=None, mask=None, stated=False, model=None):
    """Return the largest gaps of outputs, last state, gradients of inputs and of weights, of one attention."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    attention = (model or build)(spec)
    generator = torch.Generator().manual_seed(1)
    n = sum(lengths)
    x = torch.randn(BATCH, n, DIM, generator=generator, dtype=torch.float64)
    seed = torch.randn(BATCH, n, DIM, generator=generator, dtype=torch.float64)
    before = attention.init_state(BATCH) if stated else None
    if stated == "continued":
        with torch.no_grad():
            before = attention(torch.randn(BATCH, 3, DIM, generator=generator, dtype=torch.float64), before)[1]
    given = {name: t for name, t in (("segments", segments), ("mask", mask)) if t is not None}
    whole = x.clone().requires_grad_()
    y, after = attention(whole, before, **given)
    (y * seed).sum().backward()
    wanted = [p.grad for p in attention.parameters()]
    attention.zero_grad()
    own = cut(x, lengths, rank).clone().requires_grad_()
    with sequence_parallel(attention, group):
        z, last = attention(own, before, **{name: cut(t, lengths, rank) for name, t in given.items()})
        (z * cut(seed, lengths, rank)).sum().backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in attention.parameters()]
    for grad in found:
        dist.all_reduce(grad, group=group)
    state = 0.0
    if stated and rank == size - 1:
        # States of equal content may differ in slots that are not in use.
        more = torch.randn(BATCH, 4, DIM, generator=generator, dtype=torch.float64)
        state = gap(attention(more, last)[0], attention(more, after)[0])
    weights = max(gap(a, torch.zeros_like(a) if b is None else b) for a, b in zip(found, wanted, strict=True))
    found = [gap(z, cut(y, lengths, rank)), state, gap(own.grad, cut(whole.grad, lengths, rank)), weights]
    worst = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    return worst.tolist()


def build(spec):
    return longspan.build(spec, dim=DIM, heads=HEADS).double()


def survey(group, specs, lengths, **options):
    """Return for each spec its gaps, or the error."""
    found = {}
    for spec in specs:
        try:
            found[spec] = attention_gaps(group, spec, lengths, **options)
        except Exception as error:
            import traceback
            found[spec] = f"{type(error).__name__}: {error}" + ("" if isinstance(error, ValueError) else traceback.format_exc()[-900:])
    return found
