"""The tree of known beginnings: what is resumed has the bits of a cold read, and what is forgotten costs little."""

import itertools
import random
from typing import NamedTuple

import pools
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import longspan
from longspan import states
from longspan.serving import Pool, PrefixCache, Sampling
from longspan.states.kv_cache import FixedKeyValues

VOCAB, CAPACITY, PREFILL = 37, 200, 8
GREEDY = Sampling(temperature=0.0)
START = VOCAB


def model(attention="gated_deltanet"):
    torch.manual_seed(0)
    config = {"vocab": VOCAB, "positions": "none", "dim": 32, "heads": 2, "depth": 2, "attention": attention}
    return longspan.Decoder(longspan.DecoderConfig(**config)).eval()


def text(count, seed=0):
    dice = random.Random(seed)
    return [dice.randrange(VOCAB) for _ in range(count)]


def pool(own, **options):
    given = {"slots": 3, "capacity": CAPACITY, "prefill": PREFILL, "prefix_bytes": 1 << 24, "checkpoint_every": PREFILL}
    return pools.spoiled(Pool(own, **given | options))


def read(crowd, prompt, n=1, **options):
    """Answer a prompt -> its stream, and the tokens of prompts that were read for it."""
    before = crowd.tokens_read
    (stream,) = crowd.submit(prompt, max_new_tokens=n, sampling=GREEDY, **options)
    crowd.run()
    assert stream.error == ""
    return stream, crowd.tokens_read - before


@torch.no_grad()
def cold(own, tokens, cuts):
    """The state and the outputs after tokens, read in pieces that end at these places."""
    state = states.fix_capacity(own.init_state(1, CAPACITY), CAPACITY)
    for start, end in itertools.pairwise([0, *cuts, len(tokens)]):
        outputs, state = own(torch.tensor([tokens[start:end]]), state, donate=True)
    return state, outputs[:, -1]


def same(found, expected):
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("attention", ["gated_deltanet", "gla; softmax", "mamba", "softmax; local(window=3)"])
def test_an_edit_reads_from_the_nearest_state_with_the_bits_of_a_cold_read(attention):
    own, long = model(attention), text(60)
    crowd, plain = pool(own), pool(own, prefix_bytes=0)
    assert read(crowd, long, 2)[1] == 61
    for place in (50, 30, 3):
        edited = [*long[:place], (long[place] + 1) % VOCAB, *long[place + 1 :]]
        stream, count = read(crowd, edited, 3)
        # The start token takes a place; pieces are those of a cold read.
        assert count == 61 - (place + 1) // PREFILL * PREFILL
        other, _ = read(plain, edited, 3)
        assert (stream.tokens, stream.log_probs) == (other.tokens, other.log_probs)
        length, state, outputs = crowd.prefixes.find([START, *edited])
        assert length == 61
        assert same((state, outputs), cold(own, [START, *edited], range(PREFILL, 61, PREFILL)))


# With several threads, the keys of pieces of other lengths may differ in a bit; such a state is not kept.
@pytest.mark.usefixtures("one_thread")
def test_the_second_text_pays_for_a_state_where_two_part():
    own, shared = model("gated_deltanet; softmax"), text(29)
    crowd = pool(own, checkpoint_every=32)
    texts = [shared + text(20, seed=i) for i in range(1, 4)]
    assert [read(crowd, one)[1] for one in texts] == [50, 50, 20]
    # The state where they part was made by a piece that ends there, and what follows begins there.
    cuts = {1: [8, 16, 24, 30, 38, 46], 2: [8, 16, 24, 30, 38, 46]}
    for i, places in cuts.items():
        _, *found = crowd.prefixes.find([START, *texts[i]])
        assert same(found, cold(own, [START, *texts[i]], places))


@pytest.mark.parametrize(("attention", "cut"), [("gated_deltanet", 0), ("gla; softmax", 3)])
def test_a_chat_reads_what_is_new_and_at_most_a_distance_of_states(attention, cut):
    own, whole = model(attention), text(20)
    crowd = pool(own, capacity=1000)
    new = 21
    for turn in range(20):
        stream, count = read(crowd, whole, 11)
        # Without a cut, the last token of the answer is new too, as its state has not read it.
        assert count <= new + (PREFILL if cut else 1), turn
        assert stream.cached == len(whole) + 1 - count
        more = text(2 + turn % 3, seed=turn)
        whole, new = [*whole, *stream.tokens[: 11 - cut], *more], len(more)


@pytest.mark.parametrize("attention", ["gated_deltanet", "gla; softmax"])
def test_what_a_stream_has_drawn_is_resumed_as_if_it_went_on(attention):
    own, prompt = model(attention), text(11)
    crowd = pool(own)
    whole = read(crowd, prompt, 24)[0]
    for length in (8, 20):
        stream, count = read(crowd, [*prompt, *whole.tokens[:length]], 24 - length)
        assert count < PREFILL
        found = crowd.prefixes.find([START, *prompt, *whole.tokens[: length // 8 * 8]])
        assert found[0] == 12 + length // 8 * 8
        alone = pool(own, prefix_bytes=0)
        kept = read(alone, prompt, 1 + length // 8 * 8, keep_state=True)[0]
        assert same(found[1], kept.state)
        assert stream.tokens == whole.tokens[length:]


def test_a_state_with_its_history_keeps_states_too():
    own, prompt = model("gla; softmax"), text(20)
    crowd = pool(own)
    stream, _ = read(crowd, prompt, 5, keep_state=True)
    crowd.prefixes.clear()
    history = [*prompt, *stream.tokens[:-1]]
    more = [stream.tokens[-1], *text(30, seed=1)]
    assert read(crowd, more, 5, state=stream.state, history=history)[1] == 31
    assert read(crowd, [*history, *more, 1], 5)[1] == 1
    assert read(crowd, [*history, *more[:20]], 5)[1] == 20 - 16


@pytest.mark.parametrize("room", [8, 16])
def test_the_states_of_a_long_text_thin_out_evenly(room):
    own, long, every = model(), text(512), PREFILL
    one = states.nbytes(own.init_state(1)) + 4 * VOCAB
    crowd = pool(own, prefix_bytes=room * one + 8 * 513, prefill=every)
    read(crowd, long)
    places = sorted(node.depth for node in crowd.prefixes._kept)
    assert room // 2 <= len(places) <= room
    gaps = [b - a for a, b in itertools.pairwise([0, *places])]
    assert max(gaps) <= 4 * 512 / room
    assert places[-1] == 513


def test_states_that_are_visited_stay():
    own, hot = model(), text(40)
    one = states.nbytes(own.init_state(1)) + 4 * VOCAB
    crowd = pool(own, prefix_bytes=12 * (one + 500))
    for i in range(24):
        read(crowd, text(40, seed=100 + i))
        if i % 3 == 0:
            assert read(crowd, [*hot, i % VOCAB])[1] <= (42 if i == 0 else 18)
    assert crowd.prefixes.nbytes <= crowd.prefixes.limit


def test_entries_of_kv_caches_are_kept_once_and_without_free_slots():
    own, sizes = model("gated_deltanet; softmax"), []
    for every, capacity in ((PREFILL, 100), (PREFILL, 1000), (1000, 1000)):
        crowd = pool(own, capacity=capacity, checkpoint_every=every)
        read(crowd, text(63))
        sizes.append((crowd.prefixes.nbytes, len(crowd.prefixes)))
    assert sizes[0] == sizes[1]
    entries = 64 * (2 * 32 * 4 + 8)
    recurrent = sizes[2][0] - entries
    assert sizes[0] == (8 * recurrent + entries, 8)


class Digits(NamedTuple):
    """A state that shows what it has read."""

    cache: FixedKeyValues
    total: Tensor


def digits(tokens, room, shade=0.0):
    sums = shade + torch.tensor(
        list(itertools.accumulate(tokens, lambda a, b: (3 * a + b) % 1009)), dtype=torch.float64
    )
    keys = torch.nn.functional.pad(sums, (0, room - len(tokens))).view(1, 1, room, 1)
    return Digits(FixedKeyValues(keys, -keys, torch.tensor([len(tokens)])), sums[-1:].clone())


@pytest.mark.parametrize("limit", [1 << 30, 3000])
def test_any_texts_find_their_longest_beginning_with_its_own_entries(limit):
    """Texts of two letters, so that nodes split; with little memory, so that states go and entries stay."""
    dice, cache, kept, room = random.Random(0), PrefixCache(limit), {}, 30
    for _ in range(400):
        tokens = tuple(dice.choices((1, 2), (5, 1), k=dice.randrange(1, room)))
        if dice.random() < 0.5:
            # Sometimes with other rounding, as of tokens that were read in other pieces.
            state = digits(tokens, room, shade=dice.choice((0, 0, 1e-6)))
            count = len(cache)
            cache.keep(tokens, state, torch.full((1, 1), len(tokens)), likely=dice.random() < 0.5)
            if limit < 1 << 30 or len(cache) > count:
                kept.setdefault(tokens, []).append(state)
        else:
            known = [k for k in kept if k == tokens[: len(k)]]
            found = cache.find(tokens)
            if limit == 1 << 30:
                assert (found or (0,))[0] == max(map(len, known), default=0)
            if found is not None:
                assert tokens[: found[0]] in known
                assert any(same(found[1], state) for state in kept[tokens[: found[0]]])
                assert int(found[2]) == found[0]
        nodes = {node for last in cache._kept for node in last.branch()}
        size = sum(node.nbytes for node in nodes) + sum(node.checkpoint.nbytes for node in cache._kept)
        assert cache.nbytes == size <= limit
    assert (len(cache) < len(kept)) == (limit == 3000)
