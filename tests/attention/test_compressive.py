"""The compressive memory: against loops over all tokens and entries, and what its reconstruction loss teaches."""

import pytest
import torch

import longspan
from support.mechanisms import wave
from support.tensors import data

N, DIM, HEADS = 23, 8, 2


def build(options, dim=DIM, heads=HEADS):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = longspan.build(f"compressive({options})", dim, heads).double()
        torch.nn.init.normal_(module.u)
        torch.nn.init.normal_(module.v)
        return module


def entry(module, x, r):
    """The r-th run of x (N,dim) as one vector."""
    run_ = x[r * module.rate : (r + 1) * module.rate]
    match module.pool:
        case "mean":
            return run_.mean(0)
        case "max":
            return run_.max(0).values
    kernel = module.compress.weight.unflatten(1, (module.rate, -1))
    return sum(kernel[:, t] @ run_[t] for t in range(module.rate)) + module.compress.bias


def oracle(module, x):
    """Query by query: a list of what it sees, the nearest first, so that its index is its distance."""
    n, size, out = len(x), module.dim // module.heads, []
    for i in range(n):
        made = max(0, (i - module.memory) // module.rate)
        seen = [x[j] for j in range(i, made * module.rate - 1, -1)]
        seen += [entry(module, x, r) for r in range(made - 1, max(0, made - module.compressed) - 1, -1)]
        heads = []
        for h in range(module.heads):
            own = slice(h * size, (h + 1) * size)
            q, scores = module.query.weight[own] @ x[i], []
            for distance, token in enumerate(seen):
                r = module.distance.weight[own] @ wave(distance, module.dim)
                scores.append(
                    ((q + module.u[h]) @ (module.key.weight[own] @ token) + (q + module.v[h]) @ r) / size**0.5
                )
            p = torch.stack(scores).softmax(0)
            heads.append(sum(w * (module.value.weight[own] @ token) for w, token in zip(p, seen, strict=True)))
        out.append(module.out.weight @ torch.cat(heads))
    return torch.stack(out)


FORMS = (
    "memory=3, compressed=2, rate=4, pool='mean'",
    "memory=5, compressed=3, rate=2, pool='max'",
    "memory=4, compressed=20, rate=3, pool='convolution'",
    "memory=1, compressed=1, rate=2, pool='convolution'",
    "memory=30, compressed=1, rate=2, pool='mean'",
)


@pytest.mark.parametrize("options", FORMS)
def test_it_is_the_sum_over_tokens_and_entries(options):
    module, x = build(options), data(1, N, DIM)
    y = oracle(module, x[0])
    torch.testing.assert_close(module(x)[0][0], y, rtol=1e-10, atol=1e-10)


def lost(module, x, start):
    """The penalty of a call with tokens ``start`` to the last of x (N,dim), loop by loop."""
    n, m, c, size, errors = len(x), module.memory, module.rate, module.dim // module.heads, []
    for b in range(start, n, m):
        e = min(b + m, n)
        runs = range(max(0, (b - m) // c), max(0, (e - m) // c))
        tokens = [x[j] for r in runs for j in range(r * c, (r + 1) * c)]
        if not runs:
            continue
        entries = [entry(module, x, r) for r in runs]
        for i in range(b, e):
            for h in range(module.heads):
                own = slice(h * size, (h + 1) * size)
                reads = []
                for seen in (tokens, entries):
                    keys, values = (torch.stack(seen) @ part.weight[own].mT for part in (module.key, module.value))
                    p = (keys @ (module.query.weight[own] @ x[i]) / size**0.5).softmax(0)
                    reads.append(p @ values)
                errors.append((reads[0] - reads[1]).square())
    return torch.stack(errors).mean() if errors else torch.zeros(())


@pytest.mark.parametrize("options", FORMS)
def test_the_penalty_is_the_reconstruction_error(options):
    module, x, record = build(options), data(1, N, DIM), {"penalty": None}
    module(x, record=record)
    torch.testing.assert_close(record["penalty"], lost(module, x[0], 0).to(torch.float64), rtol=1e-10, atol=1e-12)
    for cut in (3, 8, 17):
        _, state = module(x[:, :cut], module.init_state(1))
        module(x[:, cut:], state, record=record)
        torch.testing.assert_close(record["penalty"], lost(module, x[0], cut).to(torch.float64), rtol=1e-10, atol=1e-12)


def test_the_penalty_of_rows_is_that_of_their_real_tokens():
    """As many queries as separate calls have, whose mean it is."""
    module, x = build("memory=4, compressed=3, rate=2, pool='convolution'"), data(2, N, DIM)
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[0, [0, 5, 6, 22]] = False
    record, parts = {"penalty": None}, []
    module(x, mask=mask, record=record)

    def weighted(rows):
        total = count = 0
        for row in rows:
            record_ = {"penalty": None}
            module(row[None], record=record_)
            # Queries of the segments in which a run of two tokens leaves the memory: all from the second on.
            queries = max(0, len(row) - 4)
            if len(row) % 4 == 1:
                queries -= 1  # the last token alone completes none
            total, count = total + record_["penalty"] * queries, count + queries
        return total / count

    parts = [x[0, mask[0]], x[1]]
    torch.testing.assert_close(record["penalty"], weighted(parts), rtol=1e-10, atol=1e-12)


def test_the_penalty_teaches_the_compression_alone():
    module, x = build("memory=4, compressed=3, rate=2, pool='convolution'"), data(1, N, DIM).requires_grad_()
    record = {"penalty": None}
    y, _ = module(x, record=record)
    named = dict(module.named_parameters())
    found = torch.autograd.grad(record["penalty"], [x, *named.values()], allow_unused=True, retain_graph=True)
    assert [name for name, g in zip(["x", *named], found, strict=True) if g is not None] == [
        "compress.weight",
        "compress.bias",
    ]
    assert all(found[list(named).index(name) + 1].abs().max() > 1e-4 for name in ("compress.weight", "compress.bias"))
    # And the task does not: a gradient of zero, for which data-parallel training waits.
    task = torch.autograd.grad(y.sum(), module.compress.weight)[0]
    assert not task.any()
    through = build("memory=4, compressed=3, rate=2, pool='convolution', stop_gradient=False")
    assert torch.autograd.grad(through(x)[0].square().sum(), through.compress.weight)[0].abs().max() > 1e-4


def test_a_state_keeps_no_graph():
    module, x = build("memory=4, compressed=3, rate=2, pool='convolution'"), data(1, N, DIM).requires_grad_()
    _, state = module(x, module.init_state(1))
    assert not state.memory.hidden.requires_grad
    assert not state.entries.requires_grad
    given = state._replace(entries=state.entries.clone().requires_grad_())
    assert torch.autograd.grad(module(x, given)[0].sum(), given.entries, allow_unused=True)[0] is None
