"""State adapters for models of transformers and of flash-linear-attention: gradients, packed rows, files and pools."""

import copy
import csv
import io
import os

import pytest
import torch
from torch.utils import _pytree as pytree

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from adapted_models import FLA, fla, hybrid
from pools import spoiled
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import hybrids
from longspan import adapt
from longspan.compat.servable import TransformersModel
from longspan.serving import Pool, Sampling

pytestmark = pytest.mark.usefixtures("restored")

# The sums of LightNet are relative to a total that does not exist before the first token.
NAMES = [name for name in (*hybrids.KINDS, *FLA) if name != "lightnet"]
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]])
NEXT = TOKENS.roll(-1, 1)
GREEDY = Sampling(temperature=0.0)


def made(name, **more):
    return fla(name) if name in FLA else hybrid(name, **more)


def tuned(model, seed=0):
    """An adapter with random values. Those of sums of positive features are positive."""
    found, generator = adapt.initial_states(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for values in found.parameters():
            values.copy_(torch.rand(values.shape, generator=generator) * 2)
    return found


def by_token(adapter, model, tokens, targets):
    """The log-probabilities of targets in float64, by a loop of a model over the tokens."""
    start = pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, adapter.model.init_state(len(tokens)))
    state, found = adapter._filled(start), []
    ours = isinstance(adapter.model, TransformersModel)
    mapping = copy.copy(adapter.model._mapping) if ours else None
    if mapping is not None:
        mapping.model = model
        cache = mapping.cache(state.layers, state.position)
    for i in range(tokens.shape[1]):
        one = tokens[:, i : i + 1]
        if mapping is None:
            outputs, state = adapter.model(one, state)
        else:
            places = {"position_ids": torch.full_like(one, i)} if "position_ids" in adapter.model._named else {}
            outputs = model(one, use_cache=True, **{adapter.model._cache: cache}, **places).logits
        found.append(outputs.log_softmax(-1).gather(-1, targets[:, i : i + 1, None])[..., 0])
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", [name for name in NAMES if name in FLA])
def test_gradients_are_those_of_a_loop_over_tokens(name):
    model = fla(name).double().requires_grad_(False)
    adapter = tuned(model)
    values = list(adapter.parameters())
    found, expected = adapter(TOKENS, targets=NEXT), by_token(adapter, model, TOKENS, NEXT)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    wanted = torch.autograd.grad(expected.sum(), values)
    for (field, _), ours, grad in zip(
        adapter.named_parameters(), torch.autograd.grad(found.sum(), values), wanted, strict=True
    ):
        torch.testing.assert_close(ours, grad, rtol=1e-8, atol=1e-9)
        assert grad.any(), f"no output depends on {field}"


# Transformers' own layers keep their states in the module, and find none in a cache.
UNTOLD = ("recurrent_gemma",)


@pytest.mark.parametrize("name", [name for name in hybrids.KINDS if name not in UNTOLD])
def test_gradients_are_differences_of_transformers_own_code(name):
    """Which reads the tokens one by one, in float64, from a cache with the learned states."""
    made = hybrid(name).requires_grad_(False)
    adapter, exact = tuned(made), hybrids.judge(name, made)

    def reference():
        # RWKV-4 mixes rows where it reads one token of several.
        return torch.cat([by_token(adapter, exact, TOKENS[i : i + 1], NEXT[i : i + 1]) for i in range(len(TOKENS))])

    fields, values = zip(*adapter.named_parameters(), strict=True)
    found = adapter(TOKENS, targets=NEXT)
    grads = torch.autograd.grad(found.sum(), values)
    adapter.double()
    with torch.no_grad():
        expected = reference()
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)
        for number, (field, grad) in enumerate(zip(fields, grads, strict=True)):
            own = adapter.get_parameter(field)
            generator = torch.Generator().manual_seed(number)
            step = 1e-5 * torch.randn(own.shape, generator=generator, dtype=torch.float64)
            before, ends = own.clone(), []
            for sign in (1, -1):
                own.copy_(before + sign * step)
                ends.append(float(reference().sum()))
            own.copy_(before)
            wanted = (ends[0] - ends[1]) / 2
            size = float(grad.double().norm() * step.norm())
            assert wanted, f"no output depends on {field}"
            assert abs(float((grad.double() * step).sum()) - wanted) < 1e-3 * size, field


@pytest.mark.parametrize("name", NAMES)
def test_each_sequence_starts_from_the_learned_states(name):
    model = made(name).requires_grad_(False)
    near = {"rtol": 1e-4, "atol": 1e-4}
    untrained = adapt.initial_states(model)
    torch.testing.assert_close(untrained(TOKENS), model(TOKENS).logits, **near)
    adapter, parts = tuned(model), (TOKENS[:1, :2], TOKENS[:1, 2:], TOKENS[1:])
    expected = [adapter(part, targets=40 - part)[0] for part in parts]
    assert not torch.allclose(expected[2], untrained(parts[2], targets=40 - parts[2])[0], atol=1e-2)
    segments = torch.tensor([[0, 0, 1, 1, 1, 1], [5] * 6])
    packed = adapter(TOKENS, targets=40 - TOKENS, segments=segments)
    torch.testing.assert_close(packed.flatten(), torch.cat(expected), **near)
    # Padding on the left, between tokens, and on the right.
    rows = torch.tensor([[0, 0, 0, 0, 3, 1, 0, 0], [0, 2, 0, 7, 1, 8, 2, 8]])
    mask = torch.tensor([[False] * 4 + [True] * 2 + [False] * 2, [False, True, False] + [True] * 5])
    padded = adapter(rows, targets=40 - rows, mask=mask)[mask]
    torch.testing.assert_close(padded, torch.cat([expected[0], expected[2]]), **near)


@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid", "gated_deltanet", "rwkv-hybrid"])
def test_streams_with_different_adapters_are_those_of_each_alone(name, tmp_path):
    model = made(name).requires_grad_(False)
    adapters = []
    for seed in range(3):
        tuned(model, seed).save(tmp_path / f"{seed}.safetensors")
        adapters.append(adapt.load(tmp_path / f"{seed}.safetensors", model))
    adapters.append(adapt.initial_states(model))
    frozen = [*(one.frozen() for one in adapters[:3]), None]
    pool = spoiled(Pool(model, slots=4, capacity=32, prefix_bytes=1 << 22, prefill=4))
    prompts, streams = ([3, 1, 4, 1, 5], [3, 1, 4, 1, 5, 9, 2], [2]), []
    for which in (0, 1, 3, 2, 0, 1, 2, 3):
        for prompt in prompts:
            (stream,) = pool.submit(prompt, max_new_tokens=5, sampling=GREEDY, adapter=frozen[which])
            streams.append((which, prompt, stream))
            pool.step()
    pool.run()
    assert any(stream.cached for _, _, stream in streams)
    assert len({round(stream.log_probs[0], 3) for _, prompt, stream in streams if prompt is prompts[2]}) == 4
    for which, prompt, stream in streams:
        with torch.no_grad():
            outputs = adapters[which](torch.tensor([[*prompt, *stream.tokens]]))[0, len(prompt) - 1 : -1]
        drawn = outputs.gather(-1, torch.tensor(stream.tokens)[:, None])[:, 0]
        # The most likely tokens, up to ties of rounding.
        torch.testing.assert_close(drawn, outputs.amax(-1), rtol=1e-4, atol=1e-4)


def test_files_fit_the_model_in_another_precision_and_refuse_other_models(tmp_path):
    path, model = tmp_path / "a.safetensors", hybrid("qwen3_5")
    adapter = tuned(model)
    adapter.save(path)
    half = adapt.load(path, hybrids.halved(hybrid("qwen3_5"), torch.bfloat16))
    assert all(torch.equal(one, two) for one, two in zip(half.parameters(), adapter.parameters(), strict=True))
    assert half.frozen().state.layers[0][0].conv[0].dtype == torch.bfloat16
    for other, message in (
        (
            hybrid("mamba2"),
            "is an adapter of another model, which has .*model_type='qwen3_5_text' in place of 'mamba2'",
        ),
        (hybrid("qwen3_5", linear_key_head_dim=4), "which has linear_key_head_dim=8 in place of 4"),
        (fla("gla"), "is an adapter of another model"),
    ):
        with pytest.raises(ValueError, match=message):
            adapt.load(path, other)


def test_models_without_states_to_train_are_refused_by_name():
    with pytest.raises(ValueError, match=r"accelerate\(model\) first"):
        adapt.initial_states(hybrids.model("mamba2"))
    with pytest.raises(ValueError, match="the state of lightnet has no sums to train"):
        adapt.initial_states(fla("lightnet"))
    with pytest.raises(ValueError, match="mask must be"):
        adapt.initial_states(hybrid("mamba2"))(TOKENS, mask=torch.ones(2, 5, dtype=torch.bool))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3_5", "gated_deltanet"])
def test_the_commands_train_and_use_them(name, tmp_path, capsys, monkeypatch):
    servers = pytest.importorskip("servers")
    pytest.importorskip("lightning")
    from longspan.cli import main
    from longspan.cli.serve import loaded

    text = "the river was wide and the old man looked at it " * 20
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    model = fla(name) if name in FLA else hybrid(name)
    size = model.config.vocab_size
    words = {chr(97 + i): i for i in range(size - 1)}
    tokenizer = Tokenizer(models.WordLevel({**words, " ": size - 1}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    folder, out = str(tmp_path / "model"), tmp_path / "run"
    command = ["finetune", folder, "--data", str(tmp_path / "text.txt"), "--method", "state", "--length", "40"]
    assert main([*command, "--steps", "6", "--learning-rate", "0.3", "--evaluate-every", "1", "--out", str(out)]) == 0
    assert "training the initial states of" in capsys.readouterr().err
    with open(out / "metrics.csv", newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    assert losses[-1] < losses[0]
    adapter = str(out / "adapter.safetensors")
    options = ["--prompt", "the old", "--tokens", "6", "--temperature", "0"]
    assert main(["generate", folder, *options, "--adapter", adapter]) == 0
    generated = capsys.readouterr().out.removeprefix("the old").rstrip("\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("the old\n"))
    assert main(["chat", folder, "--tokens", "6", "--temperature", "0", "--adapter", adapter]) == 0
    assert capsys.readouterr().out == generated + "\n"
    served, codec, *_ = loaded(folder, "")
    (tmp_path / "adapters").mkdir()
    os.rename(adapter, tmp_path / "adapters/river.safetensors")
    with servers.Running(served, codec=codec, adapters=tmp_path / "adapters", pool={"capacity": 64}) as running:
        body = {"prompt": "the old", "adapter": "river", "max_tokens": 6, "temperature": 0}
        assert running.client.post("/completions", json=body).json()["choices"][0]["text"] == generated
    assert main(["generate", "text", *options, "--adapter", str(tmp_path / "adapters/river.safetensors")]) == 2
    assert "is an adapter of another model" in capsys.readouterr().err
