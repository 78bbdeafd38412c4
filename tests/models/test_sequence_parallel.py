"""Rows of tokens over several processes: outputs, states and gradients are those of one process with whole rows."""

import functools

import pytest
import torch

import longspan
import ranks
import shard_cases
from longspan.attention.base import REGISTRY
from longspan.distributed import parallel
from longspan_lab.tools import scaling

LIMIT = 1e-10
DOCUMENTS = torch.tensor([[0] * 8 + [1] * 5 + [2] * 8, [0] * 3 + [1] * 7 + [3] * 10 + [5]])
REAL = torch.ones(2, 21, dtype=torch.bool)
REAL[0, 6:9] = REAL[0, 13:16] = REAL[1, :8] = False

# Specs of each exchange: sums, decays, the delta rule, convolutions, the last tokens, all tokens.
EXCHANGED = (
    "gated_deltanet",
    "performer",
    "linear",
    "linear(rotary=100.0)",
    "linear(feature_map='exp')",
    "rfa(features=31)",
    "rfa(features=31, gate=True)",
    "performer(map='trigonometric', features=11)",
    "performer(map='relu', features=7)",
    "fourier(features=103, bandwidth=2.0, eps=0.001)",
    "average",
    "fast_weights",
    "fast_weights(rule='sum', nu=1)",
    "retention",
    "ssd(channels=5)",
    "ssd(channels=3, key_heads=2, expand_v=1.5, convolution=0)",
    "gla(rank=3, expand_v=1.5)",
    "deltanet",
    "kda",
    "local(window=5)",
    "local(window=3, kv_heads=1, rotary=100.0)",
    "softmax",
    "softmax(kv_heads=1, rotary=100.0)",
)
# Everything else with a causal form, by the wavefront.
HANDED = tuple(
    spec
    for name in longspan.list_mechanisms()
    for spec in REGISTRY[name].examples
    if not REGISTRY[name].parallel_by
    and "causal" in REGISTRY[name].directions
    and not parallel._why_not(longspan.build(spec, dim=16, heads=2))
)


@pytest.fixture(scope="module")
def run():
    with ranks.pool(3) as run:
        yield run


@pytest.fixture(scope="module")
def run_four():
    with ranks.pool(4) as run:
        yield run


def check(gaps):
    assert max(gaps[0]) < LIMIT, dict(zip(("outputs", "state", "inputs", "weights"), gaps[0], strict=True))


@pytest.mark.parametrize("spec", EXCHANGED)
@pytest.mark.parametrize(
    ("lengths", "given"),
    [
        *(([7, 9, 5], given) for given in ({}, {"stated": "continued"})),
        *((lengths, {}) for lengths in ([12, 9], [1, 1, 1])),
        ([8, 5, 8], {"segments": DOCUMENTS}),
        ([8, 6, 7], {"mask": REAL}),
        ([3, 3, 15], {"mask": REAL, "segments": DOCUMENTS, "stated": True}),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_ranks_equal_one(run, spec, lengths, given):
    check(run(len(lengths), shard_cases.attention_gaps, spec, lengths, **given))


@pytest.mark.parametrize("spec", HANDED)
def test_states_are_handed_on(run, spec):
    check(run(3, shard_cases.attention_gaps, spec, [8, 6, 7], mask=REAL, segments=DOCUMENTS, stated=True))


# One spec of each exchange, and of each kind of state that is handed on.
PADDED = ("gated_deltanet", "performer", "linear(rotary=100.0)", "rfa(features=31, gate=True)", "average")
PADDED += ("ssd(channels=5)", "gla(rank=3, expand_v=1.5)", "local(window=5)", "softmax(kv_heads=1, rotary=100.0)")
WAVES = ("bp(k=1, levels=2)", "infini(segment=5)", "mlstm", "rwkv7")


def padding(lengths):
    """Masks (2,N) that leave shards, rows or everything without real tokens."""
    shard = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    yield from (shard.expand(2, -1) != rank for rank in range(len(lengths)))
    if len(lengths) > 2:
        yield torch.stack([shard == 0, shard == 1])
        yield torch.stack([shard == 2, shard < 0])
        yield torch.zeros(2, sum(lengths), dtype=torch.bool)


@pytest.mark.parametrize("spec", PADDED + WAVES)
def test_any_shard_may_be_padding(run, spec):
    for lengths in ([4, 5], [3, 5, 4])[spec in WAVES :]:
        for mask in padding(lengths):
            check(run(len(lengths), shard_cases.attention_gaps, spec, lengths, mask=mask))


DECODERS = {
    "hybrid": {"attention": "gated_deltanet; local(window=5)", "positions": "sinusoidal"},
    "wavefront": {"attention": "infini(segment=5); linear", "positions": "sinusoidal"},
    "rotary": {"attention": "linear; local(window=5)", "positions": "rotary"},
    "learned": {"attention": "retention", "positions": "learned", "tied": True},
    "relative": {"attention": "relative", "positions": "relative"},
    "alibi": {"attention": "alibi", "positions": "alibi"},
    "universal": {"attention": "linear", "stack": "universal(steps=2)"},
    "checkpointing": {"attention": "kda; mamba(state_dim=4)", "checkpointing": True},
}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    ("lengths", "given"), [([9, 7], {}), ([8, 6, 7], {"mask": REAL, "segments": DOCUMENTS})], ids=["plain", "packed"]
)
def test_decoders(run, name, lengths, given):
    assert max(run(len(lengths), shard_cases.decoder_gaps, lengths, **given, **DECODERS[name])) < LIMIT


@pytest.mark.parametrize("attention", ["infini(segment=5); linear", "local(window=5); mlstm; softmax"])
def test_layers_may_be_frozen(run, attention):
    """No rank waits for gradients that another does not compute."""
    mask = torch.arange(16).expand(2, -1) < 9
    for frozen in ("embedding", "embedding stack.blocks.0"):
        options = {"attention": attention, "depth": 3, "frozen": frozen.split(), "mask": mask}
        assert max(run(2, shard_cases.decoder_gaps, [9, 7], **options)) < LIMIT


def test_the_backward_pass_may_come_later(run):
    options = {"attention": "gated_deltanet; softmax", "checkpointing": True, "late": True, "twice": True}
    assert max(run(2, shard_cases.decoder_gaps, [9, 7], mask=REAL[:, :16], **options)) < LIMIT


@pytest.mark.parametrize(("kind", "spec"), [("ddp", "gated_deltanet; softmax"), ("fsdp", "bp(k=1, levels=2); linear")])
def test_a_mesh_of_data_and_sequence(run_four, kind, spec):
    assert max(run_four(4, shard_cases.mesh_gaps, kind, 2, 2, attention=spec)) < LIMIT


# Delta rule and convolutions, decays, sums, sums with a peak.
@pytest.mark.parametrize("how", ["weights", "autocast"])
@pytest.mark.parametrize("spec", ["gated_deltanet", "kda", "gla", "ssd", "retention", "linear", "performer"])
def test_bfloat16_exchanges_states_in_32_bits(run, spec, how):
    shards, whole, sent = run(3, shard_cases.half_errors, spec, how, 41)[0]
    assert sent == ["torch.float32"]
    # Sums are rounded in another order.
    for error, other in zip(shards, whole, strict=True):
        assert error <= 1.2 * other


def test_a_prefill_is_continued(run):
    assert max(run(3, shard_cases.sampled, [4, 6, 3])) < LIMIT


SIZE = 8  # of heads


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        ("linear", SIZE * (SIZE + 1)),
        ("gla", SIZE // 2 * (SIZE + 1)),
        ("performer(features=7)", 7 * (SIZE + 1) + 1),
        ("deltanet(convolution=0)", SIZE * 2 * SIZE),
    ],
)
def test_traffic_does_not_depend_on_the_length(run, spec, numbers):
    batch, heads, size = 2, 2, 3
    bytes_of = {}
    for n in (16, 64):
        one, three = (run(size, shard_cases.traffic, n, depth, spec) for depth in (1, 3))
        for (calls, few), (more, many), name in zip(
            one[0], three[0], ("_allgather_base", "_reduce_scatter_base"), strict=True
        ):
            name = next(found for found in more if found.strip("_") == name.strip("_"))
            assert more[name] - calls.get(name, 0) == 2
            assert set(more) == set(calls)
            bytes_of[n, name] = (many[name] - few.get(name, 0)) // 2
            assert bytes_of[n, name] == 4 * batch * heads * size * numbers
    assert {v for (n, _), v in bytes_of.items() if n == 16} == {v for (n, _), v in bytes_of.items() if n == 64}


@pytest.mark.parametrize(
    ("spec", "kind", "keys"), [("linear", "sum", 8), ("gla", "decay", 4), ("deltanet(convolution=0)", "delta", 8)]
)
def test_the_page_counts_states(run, spec, kind, keys):
    one, three = (run(3, shard_cases.traffic, 16, depth, spec)[0] for depth in (1, 3))
    added = sum(sum(many.values()) - sum(few.values()) for (_, few), (_, many) in zip(one, three, strict=True)) // 2
    model = scaling.Model(dim=16, depth=1, heads=2, keys=keys, values=8)
    # An all-gather of 3 ranks sends 2 of the 3 parts of its result.
    assert scaling.state_exchange(kind, model, 3, batch=2) == added * 2 // 3


def test_the_page_counts_windows(run):
    one, three = (run(3, shard_cases.traffic, 16, depth, "local(window=5)")[1] for depth in (1, 3))
    added = sum(sum(many.values()) - sum(few.values()) for (_, few), (_, many) in zip(one, three, strict=True)) // 2
    assert scaling.halo(4, 2 * 16, 3, batch=2) == added


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_page_counts_training(run, kind):
    sizes, count = run(2, shard_cases.training_traffic, kind)[0]
    if kind == "ddp":
        assert set(sizes) == {"allreduce"}
        assert scaling.reduced(sizes["allreduce"], 2) == scaling.data_parallel(count, 2)
    else:
        sent = sum(sizes.values()) // 2
        # Parameters of odd sizes are padded.
        assert sent == pytest.approx(scaling.fully_sharded(count, 2, bytes_per=4), rel=0.02)


def _no_call(model):
    raise AssertionError("the context accepted the model")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("realformer", "layer to layer"),
        ("transformer_xl(memory=4)", "stop_gradient=False"),
        ("compressive(memory=4, compressed=2, rate=2)", "stop_gradient=False"),
        ("sac(edges=2)", "samples"),
        ("sinkhorn(block=4)", "noise=0.0"),
        ("routing(clusters=2, window=4)", "statistics"),
    ],
)
def test_mechanisms_without_an_exact_form_are_refused(run, spec, text):
    for found in run(1, shard_cases.refusal, longspan.build, spec, 16, 2, call=_no_call):
        assert spec.partition("(")[0] in found
        assert text in found


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (longspan.build, {"text": "linear", "dim": 16, "heads": 2, "causal": False}, "bidirectional"),
        (shard_cases.decoder, {"stack": "act"}, "act"),
        (shard_cases.decoder, {"stack": "reversible", "attention": "linear"}, "reversible"),
    ],
)
def test_models_without_an_exact_form_are_refused(run, make, options, text):
    assert text in run(1, shard_cases.refusal, functools.partial(make, **options), call=_no_call)[0]


def _called(model, **given):
    model(torch.zeros(1, 3, 16), **given)


def _donated(model, donate):
    with torch.no_grad():
        model(torch.zeros(1, 3, 16), model.init_state(1), donate=donate)


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (_called, "prefix", torch.tensor([1])),
        (_called, "record", {"penalty": None}),
        (_called, "context", torch.zeros(1, 2, 16)),
        (_donated, "donate", True),
    ],
)
def test_arguments_without_an_exact_form_are_refused(run, call, name, value):
    call = functools.partial(call, **{name: value})
    assert f"{name}= has no exact form" in run(1, shard_cases.refusal, longspan.build, "linear", 16, 2, call=call)[0]


def test_shards_must_fit_together(run):
    assert "rank 1: 3 rows" in run(2, shard_cases.unequal, [2, 3], [4, 4])[0]
    assert "rank 0: 2 rows, mask=" in run(2, shard_cases.unequal, [2, 2], [4, 4], [0])[1]
    assert "at least one token" in run(2, shard_cases.unequal, [2, 2], [4, 0])[0]
    assert "between rank 0 and 1" in run(2, shard_cases.decreasing)[1]


def test_no_process_group():
    model = longspan.build("linear", dim=16, heads=2)
    with pytest.raises(ValueError, match="init_process_group"), parallel.sequence_parallel(model):
        pass


def test_a_rank_that_leaves_out_a_backward_pass_is_an_error():
    with ranks.pool(2, timeout=5) as run:
        assert "init_process_group(timeout=" in run(2, shard_cases.left_out)[1]
