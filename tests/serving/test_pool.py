"""The pool: every stream gets its own answer, whoever else runs, and leaves nothing behind."""

import itertools

import numpy as np
import pools
import pytest
import torch

import longspan
from longspan import states
from longspan.serving import Pool, Sampling
from longspan.serving.sampler import sample, uniforms

VOCAB = 13
GREEDY = Sampling(temperature=0.0)


def decoder(attention="gated_deltanet", **more):
    torch.manual_seed(0)
    config = {"vocab": VOCAB, "length": 64, "dim": 16, "heads": 2, "depth": 2, "attention": attention} | more
    return longspan.Decoder(longspan.DecoderConfig(**config)).double().eval()


def prompts(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = [int(torch.randint(0, 12, (), generator=generator)) for _ in range(count)]
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def alone(model, prompt, n=9):
    return pools.alone(model, prompt, n)


def pool(model, **options):
    return pools.spoiled(Pool(model, **({"slots": 4, "capacity": 40, "prefill": 5} | options)))


@pytest.mark.parametrize("rows", [1, 2])
def test_readings_together_copy_a_limited_number_of_states(rows, monkeypatch):
    model, given, read = decoder(), prompts(10), []
    monkeypatch.setattr("longspan.serving.reader.COPIED", rows * states.nbytes(model.init_state(1)))
    crowd = pool(model, slots=5, prefill=40)
    reader = crowd._reader
    read_in_one_call = reader._read_in_one_call
    monkeypatch.setattr(
        reader, "_read_in_one_call", lambda prompts: (read.append(len(prompts)), read_in_one_call(prompts))
    )
    streams = [crowd.submit(prompt, max_new_tokens=9, sampling=GREEDY)[0] for prompt in given]
    crowd.run()
    assert max(read) == rows
    assert [stream.tokens for stream in streams] == [alone(model, prompt) for prompt in given]


@pytest.mark.parametrize("prefill", [1, 7, 16])
def test_a_step_reads_a_bounded_number_of_tokens_of_all_prompts(prefill):
    model, calls = decoder(positions="none"), []
    crowd = pool(model, slots=9, queue=9, prefill=prefill)
    crowd.model = Counted(model, calls)
    (live,) = crowd.submit([1], max_new_tokens=400)
    while not live.tokens:
        crowd.step()
    given = [[(i * k + 1) % VOCAB for k in range(n)] for i, n in enumerate((60, 50, 70, 3, 15, 40, 1, 16))]
    streams = [crowd.submit(prompt, max_new_tokens=3, sampling=GREEDY)[0] for prompt in given]
    while not all(stream.finished for stream in streams):
        drawn = len(live.tokens)
        calls.clear()
        crowd.step()
        assert len(live.tokens) == drawn + 1
        # The last call is the decode step.
        assert sum(rows * width for rows, width in calls[:-1]) <= prefill
    assert [stream.tokens for stream in streams] == [alone(model, prompt, 3) for prompt in given]


def test_prompts_take_turns():
    """A short prompt waits for a piece of each prompt before it, and long ones end in the order of their lengths."""
    crowd = pool(decoder(), slots=9, queue=9, prefill=4)
    lengths = (39, 59, 19)
    long = [crowd.submit([1] * n, max_new_tokens=1)[0] for n in lengths]
    crowd.step()
    (short,) = crowd.submit([2], max_new_tokens=1)
    ends = {}
    for step in itertools.count(2):
        for stream in (short, *long):
            if stream.finished and stream not in ends:
                ends[stream] = step
        if crowd.idle:
            break
        crowd.step()
    assert ends[short] <= 2 + len(long) + 1
    assert ends[long[2]] < ends[long[0]] < ends[long[1]]
    # 40 + 60 + 20 tokens with the start tokens, four at a time, and the short one's.
    assert ends[long[1]] <= 2 + 120 // 4 + 1


@pytest.mark.parametrize(
    ("at", "place", "together"), [(1, 0, False), (1, 2, True), (3, 1, False), (3, 0, True), ("end", 1, True)]
)
def test_a_listener_that_raises_ends_its_stream_alone(place, at, together):
    """Whether it is at the first token, a later one or the end, and whether the streams share a prompt."""
    model = decoder()
    ways = [Sampling(seed=i) for i in range(3)]

    def streams(listeners):
        crowd = pool(model)
        if together:
            found = crowd.submit([1, 2], max_new_tokens=6, sampling=ways, listener=listeners[place])
        else:
            found = [
                crowd.submit([1, 2], max_new_tokens=6, sampling=way, listener=listener)[0]
                for way, listener in zip(ways, listeners, strict=True)
            ]
        crowd.run()
        return found

    heard = []

    def bad(stream, token):
        if stream.sampling.seed == place:
            heard.append(token)
            if token is None if at == "end" else len(stream.tokens) == at:
                raise RuntimeError("a bug of a callback")

    good = streams([None] * 3)
    found = streams([bad if i == place else None for i in range(3)])
    for i, (one, other) in enumerate(zip(found, good, strict=True)):
        if i == place:
            count = 6 if at == "end" else at
            assert (one.finished, one.tokens) == ("error", other.tokens[:count])
            assert "RuntimeError: a bug of a callback" in one.error
            assert heard == [*one.tokens, None]
        else:
            assert (one.finished, one.tokens) == ("length", other.tokens)
            # Products of two rows and of three round differently on some processors.
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-12)


@pytest.mark.parametrize("end", ["fail", "cancel"])
def test_a_listener_that_raises_does_not_keep_others_from_their_end(end):
    crowd, heard = pool(decoder(), slots=2), []

    def bad(stream, token):
        raise RuntimeError("a bug of a callback")

    streams = []
    for i in range(4):
        listener = bad if i % 2 == 0 else lambda stream, token: heard.append(token)
        streams += crowd.submit([i], max_new_tokens=5, listener=listener)
    if end == "fail":
        crowd.fail("the end")
    else:
        for stream in streams:
            crowd.cancel(stream)
        crowd.step()
    assert all(stream.finished for stream in streams)
    assert [stream.finished for stream in streams[1::2]] == ["error" if end == "fail" else "cancelled"] * 2
    assert heard == [None, None]
    assert crowd.idle


@pytest.mark.parametrize(("options", "places"), [({"positions": "learned"}, 64), ({"attention": "softmax"}, 40)])
def test_a_stream_fills_the_last_place(options, places):
    model = decoder(**options)
    given = prompts(1)[0]
    n = places - len(given)
    crowd = pool(model)
    (stream,) = crowd.submit(given, max_new_tokens=n, sampling=GREEDY)
    crowd.run()
    assert stream.tokens == alone(model, given, n)
    with pytest.raises(ValueError, match=f"need {places + 1} places"):
        crowd.submit(given, max_new_tokens=n + 1)


def test_several_streams_of_one_prompt_read_it_once():
    model, calls = decoder(), []
    crowd = pool(model)
    crowd.model = Counted(model, calls)
    streams = crowd.submit([1, 2, 3], max_new_tokens=4, sampling=[GREEDY, GREEDY, Sampling(seed=3)])
    crowd.run()
    assert calls[0] == (1, 4)
    assert streams[0].tokens == streams[1].tokens == alone(model, [1, 2, 3], 4)


def test_the_most_likely_tokens_are_those_of_the_stream():
    model, given = decoder(), [[1, 2, 3], [4], [], [5, 6]]
    crowd = pool(model)
    streams = [
        crowd.submit(prompt, max_new_tokens=4, sampling=GREEDY, top=top)[0]
        for prompt, top in zip(given, (3, 0, VOCAB, 1), strict=True)
    ]
    crowd.run()
    for prompt, stream in zip(given, streams, strict=True):
        text = [*prompt, *stream.tokens]
        outputs, _ = model(torch.tensor([[model.start, *text[:-1]]]), model.init_state(1))
        expected = model.likelihood.log_probs(outputs[0, len(prompt) :])
        assert stream.log_probs == pytest.approx(expected.amax(-1).tolist())
        assert len(stream.top_log_probs) == (4 if stream.top else 0)
        for row, found in zip(expected, stream.top_log_probs, strict=False):
            best = row.topk(stream.top)
            assert list(found) == best.indices.tolist()
            assert list(found.values()) == pytest.approx(best.values.tolist())


class Counted(pools.Wrapped):
    """A model that records the shapes of its calls."""

    def __init__(self, model, calls):
        super().__init__(model)
        self._calls = calls

    def __call__(self, tokens, *args, **options):
        self._calls.append(tuple(tokens.shape))
        return super().__call__(tokens, *args, **options)


def test_known_beginnings_are_not_read_again():
    model, calls = decoder(), []
    crowd = pool(model, prefix_bytes=10**6)
    crowd.model = Counted(model, calls)
    prompt = prompts(1, seed=5)[0] + [1, 2, 3, 4, 5, 6, 7]
    expected = alone(model, prompt)
    for wanted in (0, len(prompt) + 1, len(prompt) + 1):
        calls.clear()
        (stream,) = crowd.submit(prompt, max_new_tokens=9, sampling=GREEDY)
        crowd.run()
        assert stream.tokens == expected
        assert stream.cached == wanted
    assert all(shape == (1, 1) for shape in calls)
    longer = [*prompt, 3, 4]
    (stream,) = crowd.submit(longer, max_new_tokens=9, sampling=GREEDY)
    crowd.run()
    assert stream.tokens == alone(model, longer)
    assert stream.cached == len(prompt) + 1
    assert crowd.prefixes.hits == 3


def test_outputs_that_are_not_numbers_end_the_stream():
    model = decoder()
    with torch.no_grad():
        model.embedding.tokens.weight[5] = float("nan")
    crowd = pool(model)
    (bad,) = crowd.submit([5], max_new_tokens=3, sampling=GREEDY)
    (good,) = crowd.submit([1], max_new_tokens=3, sampling=GREEDY)
    crowd.run()
    assert bad.finished == "error"
    assert good.finished in ("length", "error")
    assert crowd.idle


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [13]}, "token 13"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"sampling": [GREEDY] * 5}, "5 streams"),
        ({"stop": [-1]}, "token -1"),
        ({"top": 14}, "top=14"),
        # Of another type.
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"max_new_tokens": "3"}, "max_new_tokens='3'"),
        ({"prompt": [1.7]}, "token of prompt=1.7 must be a whole number"),
        ({"prompt": [1, True]}, "token of prompt=True"),
        ({"prompt": [torch.tensor(True)]}, "token of prompt=tensor"),
        ({"prompt": ["1"]}, "token of prompt='1'"),
        ({"prompt": [[1, 2]]}, r"token of prompt=\[1, 2\]"),
        ({"prompt": "text"}, "prompt must be a list of tokens, not 'text'"),
        ({"prompt": torch.tensor([1.5])}, "prompt must be whole numbers, not torch.float32"),
        ({"prompt": torch.tensor([True])}, "prompt must be whole numbers, not torch.bool"),
        ({"prompt": torch.tensor([[1, 2], [3, 4]])}, r"prompt must be \(N,\) or \(1, N\), not \(2, 2\)"),
        ({"prompt": [2**70]}, "token 1180591620717411303424"),
        ({"stop": 1}, "stop must be a list of tokens, not 1"),
        ({"stop": [0.5]}, "token of stop=0.5"),
        ({"keep_state": 1}, "keep_state=1 must be True or False"),
        ({"listener": 3}, "listener=3 must be a function"),
        ({"sampling": 0.5}, "sampling=0.5 must be a Sampling"),
        ({"sampling": [GREEDY, None]}, "sampling=.* must be a Sampling"),
        ({"sampling": []}, "0 streams"),
        ({"state": 5}, "state does not fit this model: it is not a DecoderState"),
        ({"state": decoder("linear").init_state(1)}, "state does not fit this model: it is not a DecoderState"),
        ({"state": decoder(dim=32).init_state(1)}, r"state does not fit this model: state.layers.0"),
        ({"state": decoder().float().init_state(1)}, "state does not fit this model: state.layers.0.*float32"),
        ({"state": decoder().init_state(2)}, "state has 2 rows; pass one"),
        ({"state": decoder().init_state(1)._replace(position=torch.tensor([-1]))}, "counters must not be negative"),
        ({"state": decoder().init_state(1)._replace(position=torch.tensor([1.0]))}, "state.position is torch.float32"),
        ({"state": decoder().init_state(1)._replace(position=3)}, "it is not a DecoderState"),
        ({"state": decoder().init_state(1), "prompt": []}, "at least one token"),
        ({"history": [1]}, "history has 1 tokens, but no state was given"),
        ({"history": [13]}, "token 13"),
        ({"history": [1], "state": decoder().init_state(1)}, "history has 1 tokens, but the state has read -1"),
    ],
)
def test_requests_out_of_range_are_refused(options, message):
    crowd = pool(decoder())
    given = {"prompt": [1], "max_new_tokens": 2} | options
    with pytest.raises(ValueError, match=message):
        crowd.submit(given.pop("prompt"), **given)
    assert crowd.idle


@pytest.mark.parametrize(
    "tokens",
    [
        (3, 1, 4),
        b"\3\1\4",
        range(1, 4),
        [np.int64(3), np.uint8(1), 4],
        np.array([3, 1, 4]),
        torch.tensor([3, 1, 4]),
        torch.tensor([[3, 1, 4]], dtype=torch.int32),
        [torch.tensor(3), 1, 4],
    ],
    ids=str,
)
def test_tokens_of_every_integer_type_are_read(tokens):
    model, crowd = decoder(), pool(decoder())
    options = {"max_new_tokens": np.int64(4), "top": np.int32(2), "stop": torch.tensor([], dtype=torch.long)}
    (stream,) = crowd.submit(tokens, sampling=GREEDY, **options)
    crowd.run()
    whole = [int(token) for token in (tokens[0] if np.ndim(tokens) == 2 else tokens)]
    assert stream.tokens == alone(model, whole, 4)
    assert {type(number) for number in (*stream.prompt, stream.max_new_tokens, stream.top)} == {int}


@pytest.mark.parametrize("attention", ["informer(factor=1)", "linear; sinkhorn(block=5)"])
def test_an_attention_whose_states_cannot_be_joined_is_refused(attention):
    with pytest.raises(ValueError, match="cannot serve (informer|sinkhorn), .*; use longspan.generate"):
        pool(decoder(attention))


def test_a_stream_of_several_is_refused():
    crowd = pool(decoder())
    with pytest.raises(ValueError, match="sampling="):
        next(crowd.stream([1], max_new_tokens=2, sampling=[GREEDY, GREEDY]))
    assert crowd.idle


@pytest.mark.parametrize(
    "name", ["slots", "queue", "capacity", "prefill", "prefix_bytes", "checkpoint_every", "draft_tokens"]
)
@pytest.mark.parametrize("value", [2.5, True, "3", None, -1])
def test_options_of_a_pool_of_other_types_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        Pool(decoder(), **{name: value})


def test_pools_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="capacity="):
        Pool(decoder("softmax"), slots=2)
    with pytest.raises(ValueError, match="training mode"):
        Pool(decoder().train())
    with pytest.raises(ValueError, match="slots=0"):
        Pool(decoder(), slots=0)


class TestSampler:
    def test_numbers_are_uniform_and_independent(self):
        seeds, places = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
        u = uniforms(seeds.flatten(), places.flatten()).view(200, 200)
        assert ((u >= 0) & (u < 1)).all()
        assert len(u.unique()) == u.numel()
        assert abs(u.mean() - 0.5) < 0.005
        for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1])):
            assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.02

    def test_known_values(self):
        """SplitMix64 in plain integers."""

        def mixed(x):
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
            return x ^ (x >> 31)

        for seed, place in ((0, 0), (1, 0), (-5, 3), (2**62, 10**6)):
            expected = mixed((mixed(seed % 2**64) + (place + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11
            assert uniforms(torch.tensor([seed]), torch.tensor([place])).item() == expected * 2.0**-53

    def test_options_keep_what_the_likelihood_keeps(self):
        generator = torch.Generator().manual_seed(0)
        scores = torch.randn(1, VOCAB, generator=generator, dtype=torch.float64)
        for options in ({}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 0.5, "top_k": 6, "top_p": 0.9}):
            rows = [Sampling(seed=i, **options) for i in range(20000)]
            drawn = sample(scores.expand(20000, -1), rows, torch.zeros(20000, dtype=torch.long))
            found = torch.bincount(drawn, minlength=VOCAB) / 20000
            likelihood = decoder().likelihood
            other = likelihood.sample(scores.expand(20000, -1), **options, generator=generator)
            expected = torch.bincount(other, minlength=VOCAB) / 20000
            assert (found - expected).abs().max() < 0.02
            assert ((found > 0) == (expected > 0)).all()

    def test_a_row_draws_the_same_in_any_batch(self):
        scores = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
        rows = [
            Sampling(seed=1),
            Sampling(temperature=0),
            Sampling(temperature=0.5, seed=2),
            Sampling(top_k=3, seed=3),
            Sampling(top_p=0.5, seed=4),
            Sampling(temperature=1.5, top_k=9, top_p=0.8, seed=5),
        ]
        places = torch.arange(6)
        alone = [int(sample(scores[i : i + 1], [rows[i]], places[i : i + 1])) for i in range(6)]
        assert sample(scores, rows, places).tolist() == alone
        for chosen in ([0, 1, 2], [3, 4, 5], [5, 2, 0], [1, 1]):
            assert sample(scores[chosen], [rows[i] for i in chosen], places[chosen]).tolist() == [
                alone[i] for i in chosen
            ]

    @pytest.mark.parametrize("flush", [False, True])
    @pytest.mark.parametrize(
        "options",
        [
            *({"temperature": t} for t in (5e-324, 1e-310, 1e-300, 1e-40)),
            *({"temperature": t, "top_k": 3} for t in (5e-324, 1e-40)),
            *({"temperature": t, "top_p": 0.5} for t in (1e-310, 1e-40)),
            *({"temperature": t, "top_k": 2**63 - 1, "top_p": 1 - 1e-16} for t in (5e-324, 1e-300)),
            *({"top_p": p} for p in (5e-324, 1e-310, 1e-20)),
        ],
        ids=str,
    )
    def test_temperature_or_top_p_towards_zero_is_the_most_likely_token(self, options, flush):
        scores = torch.randn(50, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
        rows = [Sampling(seed=i, **options) for i in range(50)]
        try:
            torch.set_flush_denormal(flush)
            found = sample(scores, rows, torch.arange(50))
        finally:
            torch.set_flush_denormal(False)
        assert found.tolist() == scores.argmax(-1).tolist()

    @pytest.mark.parametrize("options", [{}, {"top_k": 2**63 - 1}, {"top_p": 1 - 1e-16}])
    @pytest.mark.parametrize("temperature", [10**30, 3.4e38])
    def test_temperature_towards_infinity_is_uniform(self, temperature, options):
        scores = torch.cat([torch.tensor([5.0, -torch.inf]), torch.zeros(9)]).expand(20000, -1)
        rows = [Sampling(temperature=temperature, seed=i, **options) for i in range(20000)]
        found = torch.bincount(sample(scores, rows, torch.zeros(20000, dtype=torch.long)), minlength=11) / 20000
        assert found[1] == 0
        assert (found[[0, *range(2, 11)]] - 0.1).abs().max() < 0.01

    def test_seeds_and_positions_at_the_ends_of_their_range(self):
        ends = torch.tensor([-(2**63), -1, 0, 2**53, 2**53 + 1, 2**63 - 1])
        found = uniforms(ends.repeat_interleave(6), ends.repeat(6))
        assert ((found >= 0) & (found < 1)).all()
        assert len(found.unique()) == 36

    def test_of_equal_tokens_the_lower_ones_are_kept(self):
        # Enough of them that an unstable sort changes their order.
        scores = torch.zeros(300, 700)
        places = torch.zeros(300, dtype=torch.long)
        for options, kept in (({"top_k": 3}, 3), ({"top_p": 2.5 / 700}, 3), ({"temperature": 0}, 1)):
            rows = [Sampling(seed=i, **options) for i in range(300)]
            assert sample(scores, rows, places).unique().tolist() == list(range(kept))

    def test_an_impossible_token_is_never_drawn(self, monkeypatch):
        scores = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(2, -1)
        ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
        monkeypatch.setattr("longspan.serving.sampler.uniforms", lambda seeds, positions: ends)
        for options in ({}, {"top_k": 3}, {"temperature": 1e-310}, {"temperature": 1e38}):
            assert sample(scores, [Sampling(**options)] * 2, torch.arange(2)).tolist() == [1, 1]

    @pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"seed": 2**63}])
    def test_options_out_of_range_are_refused(self, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            Sampling(**options)
