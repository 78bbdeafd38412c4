"""Random orders of submit, step, cancel, fork and drain: the pool keeps its books, and every stream its own answer."""

import functools

import pytest
import torch
from pools import spoiled
from torch.utils import _pytree as pytree

import longspan
from longspan.ops.operands import overlap
from longspan.serving import Full, Pool, Sampling
from longspan.serving.sampler import sample

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test  # noqa: E402

VOCAB, SLOTS, QUEUE, CAPACITY = 5, 3, 4, 80
LAST = 12  # tokens of a history that is continued
ATTENTIONS = ("gated_deltanet", "softmax", "mamba", "gla; local(window=3)")

TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=7)
WAYS = st.lists(
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.5, 1.0]),
        top_k=st.sampled_from([0, 3]),
        top_p=st.sampled_from([1.0, 0.9]),
        seed=st.integers(-(2**63), 2**63 - 1),
    ),
    min_size=1,
    max_size=SLOTS,
)
STOPS = st.lists(st.integers(0, VOCAB - 1), max_size=1)


@functools.cache
def decoder(attention):
    """A tiny model in float64, so that rounding moves no token."""
    torch.manual_seed(0)
    config = {"vocab": VOCAB, "positions": "none", "dim": 8, "heads": 2, "depth": 2, "attention": attention}
    return longspan.Decoder(longspan.DecoderConfig(**config)).double().eval()


@functools.lru_cache(10_000)
@torch.no_grad()
def alone(attention, history, most, way, stop):
    """The tokens of a stream, read and drawn one by one -> tokens, the state at the end."""
    model, drawn = decoder(attention), []
    state = model.init_state(1, CAPACITY)
    for token in history:
        outputs, state = model(torch.tensor([[token]]), state)
    while True:
        scores = model.likelihood.log_probs(outputs[:, -1])
        drawn.append(int(sample(scores, [way], torch.tensor([len(drawn)]))))
        if len(drawn) == most or drawn[-1] in stop:
            return drawn, state
        outputs, state = model(torch.tensor([[drawn[-1]]]), state)


class Machine(RuleBasedStateMachine):
    attention = ""

    def __init__(self):
        super().__init__()
        options = {"slots": SLOTS, "queue": QUEUE, "capacity": CAPACITY, "prefill": 2, "prefix_bytes": 1_000_000}
        self.pool = Pool(decoder(self.attention), **options)
        self.streams, self.histories, self.heard, self.cancelled, self.kept = [], {}, {}, set(), []
        self.spoil()

    def spoil(self):
        spoiled(self.pool)

    def submit(self, history, prompt, most, ways, stop, state=None):
        room = QUEUE + max(0, SLOTS - self.pool.live) - self.pool.waiting
        heard = {}
        try:
            found = self.pool.submit(
                prompt,
                max_new_tokens=most,
                sampling=ways,
                stop=stop,
                state=state,
                keep_state=True,
                listener=lambda stream, token: heard.setdefault(id(stream), []).append(token),
            )
        except Full:
            assert len(ways) > room
            return
        assert len(ways) <= room
        for stream in found:
            self.streams.append(stream)
            self.histories[stream] = (*history, *prompt)
            self.heard[stream] = heard

    @rule(prompt=TOKENS, most=st.integers(1, 6), ways=WAYS, stop=STOPS)
    def begin(self, prompt, most, ways, stop):
        self.submit((VOCAB,), prompt, most, ways, stop)

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 99), prompt=TOKENS.filter(bool), most=st.integers(1, 6), ways=WAYS, stop=STOPS)
    def fork(self, which, prompt, most, ways, stop):
        """Continue a kept state, whose last token is not read; any tokens may follow."""
        stream = self.kept[which % len(self.kept)]
        read = (*self.histories[stream], *stream.tokens[:-1])
        if len(read) <= LAST:
            self.submit(read, prompt, most, ways, stop, stream.state)

    @rule(n=st.integers(1, 3))
    def step(self, n):
        for _ in range(n):
            self.pool.step()
            self.spoil()
            assert all(stream.finished for stream in self.cancelled)
        self.check_finished()

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 99))
    def cancel(self, which):
        stream = self.streams[which % len(self.streams)]
        self.pool.cancel(stream)
        self.cancelled.add(stream)

    @rule()
    def drain(self):
        self.pool.run()
        self.spoil()
        assert self.pool.idle
        assert not any(
            (self.pool.rows, self.pool._rows.next_tokens, self.pool._reader.waiting, self.pool._reader.reading)
        )
        self.check_finished()
        assert all(stream.finished for stream in self.streams)

    def check_finished(self):
        """Ended streams have the answer that they would have alone; those that were cancelled have its beginning."""
        for stream in [one for one in self.streams if one.finished]:
            self.streams.remove(stream)
            expected, state = alone(
                self.attention, self.histories[stream], stream.max_new_tokens, stream.sampling, stream.stop
            )
            assert self.heard[stream][id(stream)] == [*stream.tokens, None]
            assert len(stream.log_probs) == len(stream.tokens)
            if stream.finished == "cancelled":
                assert stream in self.cancelled
                assert stream.tokens == expected[: len(stream.tokens)]
                assert stream.state is None
                continue
            assert stream.finished == ("stop" if stream.tokens[-1] in stream.stop else "length")
            assert stream.tokens == expected
            same(stream.state, state)
            self.kept = [*self.kept[-3:], stream]

    @invariant()
    def books(self):
        live, pool = list(self.pool.rows), self.pool
        assert pool.live == len(live) == len(set(live)) == len(pool._rows.next_tokens)
        assert pool.live + sum(len(job.streams) for job in pool._reader.reading) <= SLOTS
        jobs = [stream for job in (*pool._reader.waiting, *pool._reader.reading) for stream in job.streams]
        # No stream is lost, and none is in two places.
        unfinished = [stream for stream in self.streams if stream.finished is None]
        assert len(live) + len(jobs) == len(unfinished)
        assert {*live, *jobs} == set(unfinished)
        assert pool.waiting == len(jobs) == sum(not stream.tokens for stream in unfinished)
        # A row's state has read all of its tokens but the last.
        for stream, place, token in zip(live, pool.state.position.tolist(), pool._rows.next_tokens, strict=False):
            assert place == len(self.histories[stream]) + len(stream.tokens) - 1
            assert token == stream.tokens[-1]
        for t in pytree.tree_leaves(pool.state):
            assert not t.is_floating_point() or t[: pool.live].isfinite().all() or "softmax" in self.attention

    @invariant()
    def memory(self):
        pool = self.pool
        kept, nodes = list(pool.prefixes._kept), set()
        for node in kept:
            nodes.update(node.branch())
            assert node.checkpoint.nbytes
            assert node.depth == sum(len(part.tokens) for part in node.branch())
        owners = [pool.state, *(job.state for job in pool._reader.reading if job.state is not None)]
        owners += [stream.state for stream in self.kept]
        owners += [job.state for job in pool._reader.waiting if job.state is not None]
        leaves = [t for owner in owners for t in pytree.tree_leaves(owner)]
        leaves += [t for node in nodes for span in node.spans for t in span]
        leaves += [
            t for node in kept for t in (*node.checkpoint.leaves, node.checkpoint.outputs) if not isinstance(t, int)
        ]
        assert not overlap(*leaves)
        size = sum(node.nbytes for node in nodes) + sum(node.checkpoint.nbytes for node in kept)
        assert pool.prefixes.nbytes == size <= pool.prefixes.limit

    def teardown(self):
        self.drain()


def same(found, expected):
    """Whether two states of one row continue alike: after the same token, outputs and states are equal."""
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        if a.shape == b.shape:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert found.position.tolist() == expected.position.tolist()


def run(attention, examples, steps, phases):
    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=steps,
        database=None,
        deadline=None,
        derandomize=True,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(type("Machine", (Machine,), {"attention": attention}), settings=settings)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_any_order_of_calls_keeps_the_books(attention):
    run(attention, examples=8, steps=20, phases=[hypothesis.Phase.generate])  # no time for small examples


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_many_orders_of_calls_keep_the_books(attention):
    run(attention, examples=30, steps=50, phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink])
