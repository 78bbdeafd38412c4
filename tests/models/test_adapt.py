"""State adapters: gradients are those of a loop over tokens, and every sequence starts from the learned states."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import longspan
from longspan import adapt, states
from longspan.attention.base import REGISTRY

longspan.list_mechanisms()
LEARNED = [cls.examples[0] for _, cls in sorted(REGISTRY.items()) if cls.learned_state]


def decoder(attention="gated_deltanet; rwkv7; softmax", *, depth=3, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = {"dim": 8, "heads": 2, "feedforward": 8, "vocab": 7, "positions": "none"} | options
        model = longspan.Decoder(longspan.DecoderConfig(attention=attention, depth=depth, **config))
    return model.double().eval().requires_grad_(False)


def tuned(model, seed=0, scale=1.0):
    """An adapter with random values."""
    found, generator = adapt.initial_states(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for values in found.parameters():
            # Sums of positive features have positive normalizers.
            values.copy_(scale * torch.rand(values.shape, generator=generator, dtype=torch.float64))
    return found


TOKENS = torch.tensor([[3, 1, 4, 1, 5, 2, 6], [2, 0, 1, 6, 2, 0, 1]])


@pytest.mark.parametrize("spec", LEARNED)
def test_gradients_are_those_of_a_loop_over_tokens(spec):
    model = decoder(spec, depth=1)
    adapter = tuned(model)
    total = adapter(TOKENS, targets=TOKENS).sum()
    found = torch.autograd.grad(total, list(adapter.parameters()))
    state, own = (
        model.init_state(2),
        {n: t.detach().clone().requires_grad_() for n, t in adapter.layers[0].named_parameters()},
    )
    rows = {name: t.expand(2, *t.shape) for name, t in own.items()}
    state = state._replace(layers=(state.layers[0]._replace(**rows),))
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(TOKENS.shape[1]):
        outputs, state = model(TOKENS[:, i : i + 1], state)
        expected = expected + model.likelihood.log_prob(outputs, TOKENS[:, i : i + 1]).sum()
    assert own, "nothing is learned"
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)
    for name, ours, grad in zip(own, found, torch.autograd.grad(expected, list(own.values())), strict=True):
        torch.testing.assert_close(ours, grad, rtol=1e-8, atol=1e-9)
        assert grad.any(), f"no output depends on {name}"


@pytest.mark.parametrize("stack", ["plain", "universal(steps=2)"])
def test_an_untrained_adapter_gives_the_bits_of_the_model(stack):
    model = decoder(stack=stack)
    found = adapt.initial_states(model)(TOKENS)
    assert torch.equal(found, model(TOKENS, model.init_state(2))[0])


def test_padding_and_packing_start_each_sequence_from_the_learned_states():
    adapter = tuned(decoder())
    model, parts = adapter.model, [TOKENS[:1, :3], TOKENS[1:, :6], TOKENS[1:, 2:6]]
    expected = [adapter(part, targets=part)[0] for part in parts]
    grads = torch.autograd.grad(sum(one.sum() for one in expected), list(adapter.parameters()))
    # Left padding; then two sequences and one in two packed rows, with a masked token between.
    padded = torch.stack([torch.nn.functional.pad(part[0], (6 - part.shape[1], 0), value=5) for part in parts])
    mask = torch.arange(6) >= 6 - torch.tensor([[3], [6], [4]])
    packed = torch.tensor([[*parts[0][0], 5, *parts[2][0]], [*parts[1][0], 5, 5]])
    real = torch.tensor([[True] * 3 + [False] + [True] * 4, [True] * 6 + [False] * 2])
    segments = torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4], [2] * 8])
    for order, values in (
        ((0, 1, 2), adapter(padded, targets=padded, mask=mask)[mask]),
        ((0, 2, 1), adapter(packed, targets=packed, mask=real, segments=segments)[real]),
    ):
        torch.testing.assert_close(values, torch.cat([expected[i] for i in order]), rtol=1e-9, atol=1e-9)
        for found, grad in zip(torch.autograd.grad(values.sum(), list(adapter.parameters())), grads, strict=True):
            torch.testing.assert_close(found, grad, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(expected[0], model(parts[0], targets=parts[0])[0][0])


def test_a_file_gives_the_same_adapter(tmp_path):
    adapter = tuned(decoder())
    adapter.save(tmp_path / "a.safetensors")
    again = adapt.load(tmp_path / "a.safetensors", decoder(dropout=0.1))
    assert torch.equal(again(TOKENS), adapter(TOKENS))
    assert again.frozen().sha256 == adapter.frozen().sha256 != tuned(decoder(), 1).frozen().sha256


def _other_size(path, adapter):
    found, metadata = load_file(path), states.read_metadata(path)
    (name, *_) = [name for name in found if name.endswith("sums")]
    own = adapter.states(1)
    state = own._replace(layers=(own.layers[0]._replace(sums=found[name][..., :1]), *own.layers[1:]))
    states.save(state, path, metadata)


def _nan(path, adapter):
    with torch.no_grad():
        state = adapter.states(1)
        state.layers[1].sums[0, 0, 0, 0] = float("nan")
        states.save(state, path, states.read_metadata(path))


def _damaged(path, adapter):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        (lambda path, _: path.unlink(), {}, "no state file"),
        (_damaged, {}, "was changed or damaged"),
        (lambda path, _: path.write_bytes(path.read_bytes()[:90]), {}, "is not a readable state file"),
        (lambda path, _: save_file({}, path), {}, "is not a readable state file"),
        (lambda path, adapter: states.save(adapter.states(1), path), {}, "is the file of a state, not of an adapter"),
        (_other_size, {}, "cannot be continued: state.layers.0.sums is torch.float64 (1, 2, 4, 1)"),
        (_nan, {}, "the initial states layers.1.sums are NaN or infinite"),
        (None, {"dim": 16}, "is an adapter of another model, which has dim=8 in place of 16"),
        (None, {"attention": "gla"}, "attention='gated_deltanet; rwkv7; softmax' in place of 'gla'"),
        (None, {"attention": "softmax; local(window=3)"}, "the state of softmax, local(window=3) has no sums to train"),
    ],
)
def test_wrong_files_are_refused(change, model, message, tmp_path):
    path, adapter = tmp_path / "a.safetensors", adapt.initial_states(decoder())
    adapter.save(path)
    if change is not None:
        change(path, adapter)
    with pytest.raises(ValueError, match=re.escape(message)):
        adapt.load(path, decoder(**model))


def test_wrong_values_and_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the model must be a Decoder, .*, not Linear"):
        adapt.initial_states(torch.nn.Linear(2, 2))
    adapter = adapt.initial_states(decoder())
    adapter.layers[0].sums.data.fill_(float("inf"))
    for call in (adapter.frozen, lambda: adapter.save(tmp_path / "a.safetensors")):
        with pytest.raises(ValueError, match=r"layers\.0\.sums are NaN or infinite"):
            call()


def test_generate_starts_from_an_adapter():
    model, prompt = decoder("gla; ssd", depth=2), TOKENS[:, :3]
    for weight in model.parameters():
        weight.mul_(4.0)  # so that the states decide what is most likely
    adapter = tuned(model, scale=30.0)
    drawn = longspan.generate(model, prompt, max_new_tokens=12, temperature=0, state=adapter.states(2))
    whole = torch.cat([prompt, drawn], 1)
    assert torch.equal(adapter(model.shift(whole))[:, 3:].argmax(-1), whole[:, 3:])
    own = longspan.generate(model, prompt, max_new_tokens=12, temperature=0, state=model.init_state(2))
    plain = longspan.generate(model, prompt, max_new_tokens=12, temperature=0)
    assert torch.equal(own, plain)
    assert not torch.equal(drawn, plain)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda model: model.init_state(3), "state must have 2 rows before the start token, not 3 rows"),
        (lambda model: model(TOKENS, model.init_state(2))[1], "not 2 rows after [7, 7] tokens"),
        (lambda model: decoder("gla").init_state(2), "state does not fit this model"),
    ],
)
def test_generate_refuses_other_states(state, message):
    model = decoder()
    with pytest.raises(ValueError, match=re.escape(message)):
        longspan.generate(model, TOKENS, max_new_tokens=1, state=state(model))
