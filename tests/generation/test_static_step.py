"""The decode step on fixed memory equals the plain one; what a CUDA graph adds is the capture alone."""

import pytest
import torch

import longspan
from longspan.generation import sampling, static_step
from longspan.models.config import DecoderConfig, Seq2SeqConfig
from longspan.models.decoder import Decoder
from longspan.models.seq2seq import Seq2Seq
from longspan.states import fix_capacity

SPECS = [
    "linear",
    "softmax",
    "linear(rotary=100.0)",
    "performer",
    "rfa",
    "rfa(gate=True)",
    "retention",
    "gla",
    "ssd(channels=5)",
    "deltanet",
    "gated_deltanet",
    "kda",
    "softmax(kv_heads=1, rotary=100.0)",
    "local(window=5)",
    "infini(segment=5)",
    "average",
    "fast_weights",
    "alibi",
    "luna(slots=5)",
    "transformer_xl(memory=5)",
    "gla; softmax; local(window=3)",
]
PROMPT = torch.randint(0, 7, (3, 6), generator=torch.Generator().manual_seed(0))


def decoder(attention="linear", **fields):
    torch.manual_seed(0)
    small = {"dim": 12, "depth": 3, "heads": 2, "feedforward": 12, "vocab": 7, "length": 60}
    model = Decoder(DecoderConfig(**small | fields, attention=attention)).double().eval()
    # Larger weights than the initial ones, so that the tokens depend on the state.
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6 if p.dim() > 1 else 1)
    return model


def replayed(run, restore, device):
    """In place of a capture: the same calls, and replays that compute."""
    for _ in range(static_step.WARM_UP):
        run()
        restore()
    run()
    restore()
    return run


@pytest.fixture
def graphs(monkeypatch):
    """Let ``cuda_graph=True`` work on the CPU; returns the list of captures."""
    captures = []

    def capture(run, restore, device):
        captures.append(device)
        return replayed(run, restore, device)

    monkeypatch.setattr(static_step, "capture_cuda_graph", capture)
    monkeypatch.setattr(static_step, "why_not", static_step.why_not_capturable)
    return captures


def eager(model, prompt, **options):
    with longspan.backend("torch"):
        return longspan.generate(model, prompt, cuda_graph=False, **options)


def static(model, prompt, **options):
    with longspan.backend("torch"):
        return longspan.generate(model, prompt, cuda_graph=True, **options)


@pytest.mark.parametrize("spec", SPECS)
def test_replayed_tokens_equal_eager_ones(spec, graphs):
    model = decoder(spec)
    for rows in (1, 3):
        for options in ({"temperature": 0}, {"seed": 1}, {"seed": 2, "stop": 3, "top_k": 4}):
            prompt, options = PROMPT[:rows], options | {"max_new_tokens": 21}
            assert torch.equal(static(model, prompt, **options), eager(model, prompt, **options))
    assert len(graphs) == 6


LEFT = torch.tensor([[True] * 6, [False] * 6, [False] * 2 + [True] * 4])


@pytest.mark.parametrize(
    ("spec", "fields", "mask"),
    [
        ("softmax; linear; local(window=3)", {"positions": "learned"}, LEFT),
        ("softmax; linear; local(window=3)", {"positions": "learned"}, LEFT.flip(1)),
        *(("softmax", {"stack": stack}, None) for stack in ("universal(steps=2)", "act(steps=3)", "reversible")),
    ],
)
def test_stacks_and_ragged_prompts(spec, fields, mask, graphs):
    model, options = decoder(spec, **fields), {"mask": mask, "max_new_tokens": 12, "seed": 0}
    assert torch.equal(static(model, PROMPT, **options), eager(model, PROMPT, **options))


@pytest.mark.parametrize("cross", ["softmax", "linear"])
def test_seq2seq(cross, graphs):
    torch.manual_seed(0)
    sizes = {"dim": 12, "depth": 2, "heads": 2, "feedforward": 12, "vocab": 7, "attention": "softmax; gla"}
    model = Seq2Seq(Seq2SeqConfig(**sizes, cross_attention=cross)).double().eval()
    options = {"source": PROMPT, "max_new_tokens": 12, "seed": 0, "stop": 2}
    assert torch.equal(static(model, None, **options), eager(model, None, **options))


def test_all_tokens_until_the_last_row_stops(graphs):
    """The stop condition is read every 16 tokens, and the tokens after it are cut."""
    model = decoder("linear")
    lengths = set()
    for seed in range(12):
        options = {"max_new_tokens": 40, "seed": seed, "stop": 3}
        found = static(model, PROMPT, **options)
        assert torch.equal(found, eager(model, PROMPT, **options))
        lengths.add(found.shape[1])
    assert len(lengths) > 3
    assert any(length % sampling.STOP_EVERY for length in lengths)


def test_streams_stop_at_once(graphs):
    model, options = decoder("softmax"), {"max_new_tokens": 40, "seed": 0, "stop": 3}
    stream = list(static(model, PROMPT, **options, stream=True))
    assert torch.equal(torch.stack(stream, 1), eager(model, PROMPT, **options))


def test_few_tokens(graphs):
    model = decoder("softmax")
    for count in (0, 1, 2):
        found = static(model, PROMPT, max_new_tokens=count, seed=0, stop=3)
        assert torch.equal(found, eager(model, PROMPT, max_new_tokens=count, seed=0, stop=3))
    assert len(graphs) == 1


def test_tensors_keep_their_addresses():
    model = decoder("softmax; ssd(channels=5); local(window=3)")
    step = static_step.StaticStep(lambda token, state: model(token, state, donate=True), replayed)
    state = fix_capacity(model.init_state(3, 9), 9)
    seen = set()
    for i in range(5):
        _, state = step(PROMPT[:, i : i + 1], state)
        seen.add(tuple(t.data_ptr() for t in torch.utils._pytree.tree_leaves(state)))
    assert len(seen) == 1
    assert state.position.tolist() == [5, 5, 5]


def test_the_given_state_and_the_weights_stay():
    """Also a state that is a view of a weight, as learned initial memories are."""
    model = decoder("deltanet")
    state = model.init_state(1)
    weight = torch.nn.Parameter(torch.zeros(12, 6))
    first = state.layers[0]._replace(sums=weight.data.view(1, 2, 6, 6))
    state = state._replace(layers=(first, *state.layers[1:]))
    step = static_step.StaticStep(lambda token, state: model(token, state, donate=True), replayed)
    step(PROMPT[:1, :1], state)
    assert weight.abs().max() == 0


def test_another_state_and_a_growing_one_are_refused():
    model, other = decoder("linear"), decoder("softmax")
    step, grown = (
        static_step.StaticStep(lambda token, state, of=of: of(token, state, donate=True), replayed)
        for of in (model, other)
    )
    step(PROMPT[:, :1], model.init_state(3))
    with pytest.raises(ValueError, match="static step"):
        step(PROMPT[:, :1], model.init_state(3))
    with pytest.raises(ValueError, match="changes its shapes"):
        grown(PROMPT[:, :1], other.init_state(3))


def test_exchanged_tensors_are_written_back():
    a, b = torch.zeros(3), torch.ones(3)
    static_step.write_back((a, b), (b, a))
    assert a.tolist() == [1, 1, 1]
    assert b.tolist() == [0, 0, 0]


def test_reasons_are_given(graphs, monkeypatch):
    for spec in ("informer(factor=1)", "synthesizer", "axial(width=7, kind='shifted')", "sinkhorn(block=5)"):
        with pytest.raises(ValueError, match=r"cuda_graph=True.*(waits|grows)"):
            static(decoder(spec), PROMPT, max_new_tokens=9)
    hooked = decoder("linear")
    hooked.stack.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"stack.blocks.1 has hooks"):
        static(hooked, PROMPT, max_new_tokens=9)
    with pytest.raises(ValueError, match=r"dropout is active"):
        static(decoder("linear", dropout=0.5).train(), PROMPT, max_new_tokens=9)
    with pytest.raises(ValueError, match=r"reference is forced"), longspan.backend("reference"):
        longspan.generate(decoder("linear"), PROMPT, max_new_tokens=9, cuda_graph=True)
    with pytest.raises(ValueError, match=r"autocast"), torch.autocast("cpu", torch.bfloat16):
        longspan.generate(decoder("linear"), PROMPT, max_new_tokens=9, cuda_graph=True)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"on cpu.*CUDA device"):
        static(decoder("linear"), PROMPT, max_new_tokens=9)
