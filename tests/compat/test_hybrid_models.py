"""Every recurrent model type of transformers on our kernels: the same answers, gradients and texts as by its code."""

import pytest
import torch

from hybrids import KINDS, judge, model, served, tokens, writes
from longspan.compat import transformers as on_cpu
from longspan.ops.gated import native

STEPS = ("recurrent", "selective_state_update", "Lightning")  # in the names of what runs token by token


@pytest.fixture(autouse=True)
def restored():
    """Nothing stays replaced after a test."""
    yield
    on_cpu.restore()


def calls(kind):
    """What served the recurrent layers of a type, by function."""
    return on_cpu.status().functions[kind]


def far(a, b):
    """The largest difference over the largest number of b."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))


def off(a, b):
    """The root of the mean squared difference over that of b."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


@pytest.fixture
def compiled():
    if native.build.loaded() is None:
        pytest.skip("no native kernels here")


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_original_code(kind):
    served(kind)
    made, x = model(kind), tokens(2, 139)
    with torch.no_grad():
        theirs = made(x, use_cache=False).logits
        on_cpu.accelerate(made)
        ours = made(x, use_cache=False).logits
    assert far(ours, theirs) < 1e-4
    assert sum(map(len, calls(kind).values())) >= 1
    assert not any("the original" in what for found in calls(kind).values() for what in found)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_the_original_code(kind):
    writes(kind)
    made, x = model(kind), tokens(3, 11)
    hidden = torch.ones_like(x)
    hidden[1, :4] = hidden[2, :7] = 0
    asked = [
        {"inputs": x}, {"inputs": x, "attention_mask": hidden}, {"inputs": x, "num_beams": 3},
        {"inputs": x, "attention_mask": hidden, "num_beams": 3},
    ]  # fmt: skip

    def texts():
        return [made.generate(**one, max_new_tokens=13, do_sample=False, pad_token_id=0) for one in asked]

    theirs = texts()
    on_cpu.accelerate(made)
    ours = texts()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_native_kernels_serve_forward_backward_and_steps(kind, monkeypatch, compiled):
    served(kind)
    writes(kind)
    counted = {"forward": 0, "backward": 0}

    def counting(name, run):
        def one(*args):
            counted[name] += 1
            return run(*args)

        return one

    for name in counted:
        monkeypatch.setattr(native, f"_{name}", counting(name, getattr(native, f"_{name}")))
    on_cpu.accelerate()
    made, x = model(kind), tokens(2, 11)
    layers = sum(type(m).__name__ in _MIXERS for m in made.modules())
    made(x, labels=x, use_cache=False).loss.backward()
    assert counted == {"forward": layers, "backward": layers}
    made.generate(x, max_new_tokens=5, do_sample=False, pad_token_id=0)
    found = calls(kind)
    assert all(what.startswith("native (") for by in found.values() for what in by)
    steps = sum(n for name, by in found.items() if any(word in name for word in STEPS) for n in by.values())
    assert steps >= 4 * layers
    assert counted["forward"] == 2 * layers  # steps have a kernel of their own


_MIXERS = {
    "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "OlmoHybridGatedDeltaNet",
    "KimiLinearDeltaAttention", "BailingHybridDeltaAttention", "Mamba2Mixer", "BambaMixer", "FalconH1Mixer",
    "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "Zamba2MambaMixer", "MiniMaxLightningAttention",
}  # fmt: skip


def trained(made, x):
    """The loss of a model that is trained, and its gradients by name."""
    made.zero_grad()
    loss = made(input_ids=x, labels=x, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in made.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_as_near_to_float64_as_those_of_the_original_code(kind):
    made, errors = model(kind), {}
    right = judge(kind, made)
    # In one draw of tokens, what rounding leaves of few numbers that cancel is luck: here twice, elsewhere six times.
    for seed in range(4):
        x = tokens(2, 139, seed=seed)
        exact, theirs = trained(right, x), trained(made, x)
        on_cpu.accelerate(made)
        ours = trained(made, x)
        on_cpu.restore()
        assert far(ours[0], exact[0]) < 1e-5
        assert set(ours[1]) == set(theirs[1]) == set(exact[1])
        for name, wanted in exact[1].items():
            errors.setdefault(name, []).append([off(ours[1][name], wanted), off(theirs[1][name], wanted)])
    for name, each in errors.items():
        ours, theirs = (torch.tensor(each).square().mean(0) ** 0.5).tolist()
        # Far below what float32 can say of a sum, neither is better.
        assert ours <= 1.5 * max(theirs, 5e-6), (name, ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_to_float64_as_the_original_code(kind, dtype):
    made, x = model(kind).to(dtype), tokens(4, 139)
    exact = judge(kind, made)
    with torch.no_grad():
        wanted = exact(x, use_cache=False).logits
        theirs = made(x, use_cache=False).logits
        on_cpu.accelerate(made)
        ours = made(x, use_cache=False).logits
    # The median over tokens: the few for which rounding chooses another expert are off by much, by either way.
    errors = [float((found.double() - wanted).norm(dim=-1).median()) for found in (ours, theirs)]
    assert errors[0] < 1.15 * errors[1]
