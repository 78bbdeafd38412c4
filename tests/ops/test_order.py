"""Laws of the sampling order: a pure function, each epoch a permutation, ranks that share one global batch."""

import pytest
import torch

from longspan.data.order import batch_indices, keyed_permutation


def stream(count, seed, batch, world, batches):
    """The examples of the first ``batches`` global micro-batches, ranks interleaved."""
    parts = [[batch_indices(count, seed, i, batch, rank, world) for rank in range(world)] for i in range(batches)]
    return torch.cat([torch.stack(ranks, 1).flatten() for ranks in parts])


@pytest.mark.parametrize(("count", "batch", "world"), [(13, 5, 1), (13, 5, 3), (5, 13, 2), (1, 3, 1), (101, 7, 2)])
def test_every_epoch_is_a_permutation(count, batch, world):
    epochs = 11
    found = stream(count, 3, batch, world, -(-epochs * count // (batch * world)))[: epochs * count]
    assert found.dtype == torch.int64
    assert torch.equal(found.reshape(epochs, count).sort().values, torch.arange(count).expand(epochs, count))


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_ranks_together_are_one_process_with_a_larger_batch(world):
    for index in range(7):
        whole = batch_indices(31, 2, index, 7 * world)
        for rank in range(world):
            assert torch.equal(batch_indices(31, 2, index, 7, rank, world), whole[rank::world])


def test_nothing_but_the_arguments_matters():
    before = torch.get_rng_state()
    forward = [batch_indices(97, 1, i, 11) for i in range(29)]
    torch.manual_seed(5)
    batch_indices(89, 4, 3, 2)
    for i in reversed(range(29)):
        assert torch.equal(batch_indices(97, 1, i, 11), forward[i])
    torch.set_rng_state(before)
    batch_indices(89, 4, 5, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_caller_may_overwrite_what_it_gets():
    first = batch_indices(17, 0, 0, 17)
    kept = first.clone()
    first.zero_()
    assert torch.equal(batch_indices(17, 0, 0, 17), kept)


def test_seeds_and_epochs_differ():
    orders = [batch_indices(97, seed, epoch, 97).tolist() for seed in range(5) for epoch in range(5)]
    assert len({tuple(order) for order in orders}) == 25


def test_the_order_stays_the_same_between_versions():
    # Written down from the first release: a change would make runs that resume read other examples.
    assert batch_indices(13, 7, 0, 13).tolist() == [3, 9, 6, 5, 1, 8, 7, 12, 11, 4, 10, 2, 0]
    assert batch_indices(10**6 + 3, 0, 12345, 5, 1, 2).tolist() == [92411, 66536, 696587, 634604, 793868]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 0, 5), "count=0: must be >= 1"),
        ((13, 0, 0, 0), "batch=0: must be >= 1"),
        ((13, 0, 0, 5, 0, 0), "world=0: must be >= 1"),
        ((13, 0, -1, 5), "index=-1"),
        ((13, 0, 0, 5, 2, 2), r"rank=2: must lie in 0 ... 1 \(world=2\)"),
        ((13, 0, 0, 5, -1, 2), "rank=-1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        batch_indices(*arguments)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 65, 1000])
def test_a_keyed_order_reads_every_example_once_per_epoch(count):
    places = torch.arange(count)
    orders = [keyed_permutation(count, seed, epoch, places) for seed in (0, 1) for epoch in (0, 1)]
    assert all(order.sort().values.equal(places) for order in orders)
    if count > 60:
        assert len({tuple(order.tolist()) for order in orders}) == 4
        # A place says little about its value: the mean distance is that of random numbers, a third of the count.
        assert all(0.2 < (order - places).abs().double().mean() / count < 0.5 for order in orders)


def test_a_keyed_order_shares_examples_between_ranks():
    for index in range(9):
        whole = batch_indices(31, 2, index, 14, keyed=True)
        for rank in (0, 1):
            assert torch.equal(batch_indices(31, 2, index, 7, rank, 2, keyed=True), whole[rank::2])


def test_a_keyed_order_takes_no_memory_and_never_changes():
    assert batch_indices(10**15, 0, 10**9, 3, keyed=True).tolist() == [753675500087508, 815243879251068, 31231713063417]
