"""Several tokens in one call of the decode engine: the bits of one call for each, whatever is undone."""

import pytest
import torch

import longspan
from longspan import Decoder, DecoderConfig, states
from longspan.generation.native_decoder import Engine
from longspan.states.kv_cache import KeyValues

SPECS = [
    "linear",
    "linear(rotary=100.0)",
    "softmax",
    "softmax(rotary=100.0, kv_heads=1)",
    "retention",
    "gla",
    "ssd",
    "deltanet",
    "gated_deltanet",
    "kda",
    "gated_deltanet; softmax",
]
TOKENS = 12
# Tokens of each call, and how many of them are undone: none, some, all, and more than the call before has read.
CALLS = ((4, 0), (4, 2), (1, 0), (3, 3), (5, 1))


def made(spec, dtype=torch.float32, **options):
    torch.manual_seed(0)
    options = {"depth": 2} | options
    config = DecoderConfig(dim=64, heads=2, feedforward=96, vocab=50, attention=spec, length=40, **options)
    model = Decoder(config).eval().to(dtype)
    if reason := Engine.why_not(model):
        pytest.skip(reason)
    return model, Engine(model)


def one_by_one(engine, tokens, state):
    """The outputs (B,N,size) of single steps, and the state before each token and after the last."""
    outputs, history = [], [states.clone(state)]
    for token in tokens.split(1, 1):
        y, state = engine(token, state)
        outputs.append(y)
        history.append(states.clone(state))
    return torch.cat(outputs, 1), history


def used(state):
    """The tensors of a state, without slots that hold no token."""
    tensors = [state.position]
    for layer in state.layers:
        end = int(layer.length.max()) if isinstance(layer, KeyValues) else None
        tensors += [t[:, :, :end] if end is not None and t.dim() == 4 else t for t in layer]
    return tensors


# Every pair of a mixer, positions, a type and a batch.
PAIRS = [
    (spec, positions, (torch.float32, torch.bfloat16)[(i + j) % 2], (1, 3)[(i // 2 + j) % 2])
    for i, spec in enumerate(SPECS)
    for j, positions in enumerate(("sinusoidal", "learned", "none"))
]


@pytest.mark.parametrize(("spec", "positions", "dtype", "batch"), PAIRS)
def test_bits_are_those_of_single_steps(spec, positions, dtype, batch):
    model, engine = made(spec, dtype, positions=positions)
    tokens = torch.randint(0, 50, (batch, TOKENS))
    # A cache with fewer slots than tokens grows.
    start = model.init_state(batch, 4)
    expected, history = one_by_one(engine, tokens, states.clone(start))
    state, at = start, 0
    for count, undone in CALLS:
        y, state = engine.verify(tokens[:, at : at + count], state)
        assert torch.equal(y, expected[:, at : at + count])
        assert states.rewindable(state) == count
        state, at = states.rewind(state, tokens=undone), at + count - undone
    end = states.settle(state)
    assert all(torch.equal(a, b) for a, b in zip(used(end), used(history[at]), strict=True))
    y, _ = engine(tokens[:, at : at + 1], end)
    assert torch.equal(y, expected[:, at : at + 1])


@pytest.mark.parametrize("spec", ["gated_deltanet; softmax", "linear(rotary=100.0)", "ssd"])
def test_rows_undo_different_numbers_of_tokens(spec):
    model, engine = made(spec)
    tokens, more, counts = torch.randint(0, 50, (3, 4)), torch.randint(0, 50, (3, 2)), torch.tensor([0, 4, 1])
    _, state = engine.verify(tokens, model.init_state(3, 8))
    y, _ = engine.verify(more, states.rewind(state, tokens=counts))
    for row, count in enumerate(counts.tolist()):
        kept = torch.cat([tokens[row : row + 1, : 4 - count], more[row : row + 1]], 1)
        expected, _ = one_by_one(engine, kept, model.init_state(1, 8))
        assert torch.equal(y[row : row + 1], expected[:, -2:])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads):
    model, engine = made("kda; linear; softmax; retention", depth=4)
    tokens, before = torch.randint(0, 50, (2, 5)), torch.get_num_threads()
    expected, _ = one_by_one(engine, tokens, model.init_state(2, 8))
    try:
        torch.set_num_threads(threads)
        y, _ = engine.verify(tokens, model.init_state(2, 8))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(y, expected)


def test_bad_calls_are_refused_and_change_nothing():
    model, engine = made("softmax; gated_deltanet", positions="learned")
    state = engine.verify(torch.zeros(1, 3, dtype=torch.long), model.init_state(1, 8))[1]
    with pytest.raises(ValueError, match=r"tokens must be int64 \(1, K\) on the CPU, not torch.int64 \(2, 1\)"):
        engine.verify(torch.zeros(2, 1, dtype=torch.long), state)
    with pytest.raises(ValueError, match="50"):
        engine.verify(torch.tensor([[1, 99]]), state)
    with pytest.raises(ValueError, match="40"):
        engine.verify(torch.zeros(1, 38, dtype=torch.long), state)
    with pytest.raises(ValueError, match="another engine"):
        Engine(model).verify(torch.zeros(1, 1, dtype=torch.long), state)
    with pytest.raises(ValueError, match="0 to 3"):
        states.rewind(state, tokens=4)
    full = longspan.states.fix_capacity(model.init_state(1), 4)
    with pytest.raises(ValueError, match="all 4 slots"):
        engine.verify(torch.zeros(1, 5, dtype=torch.long), full)
    tokens = torch.tensor([[0, 0, 0, 7, 8]])
    expected, _ = one_by_one(engine, tokens, model.init_state(1, 8))
    assert torch.equal(engine.verify(tokens[:, 3:], state)[0], expected[:, 3:])
