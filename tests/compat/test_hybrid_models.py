"""Every recurrent model type of transformers on our kernels: outputs, gradients and texts equal those of its code."""

import copy
import random
import re

import pytest
import torch

import longspan
from hybrids import (
    CONVOLUTIONS,
    KINDS,
    SCANS,
    accelerated,
    cache_of,
    continues,
    far,
    gradients,
    halved,
    judge,
    length,
    model,
    read_in_parts,
    same_gradients,
    served,
    tokens,
    version,
    writes,
)
from longspan.compat import transformers as on_cpu
from longspan.compat.transformers import undoing
from longspan.compat.transformers.models import MODELS
from longspan.models import quantization
from longspan.ops.gated import native

# Types whose original caches lose the padding after the first token (MiniMax), mix the rows of a batch (RWKV), or lose
# the states of beams.
FAULTY = ("minimax", "rwkv", "xlstm", "recurrent_gemma")
# The names of layers with a matrix of fast weights.
MIXER = re.compile("(DeltaNet|DeltaAttention|LightningAttention|MambaLayer|Mixer)$")
STEPS = ("recurrent", "selective_state_update", "Lightning")  # in the names of what runs token by token

pytestmark = pytest.mark.usefixtures("restored")


def calls(kind):
    """What served the recurrent layers of a type, by function."""
    return on_cpu.status().functions[kind]


def off(a, b):
    """The root of the mean squared difference over that of b."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


@pytest.fixture
def compiled():
    if native.build.loaded("gated/forward") is None:
        pytest.skip("no native kernels here")


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_original_code(kind):
    served(kind)
    made, x = model(kind), tokens(2, length(kind))
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
    made, x, pad = model(kind), tokens(3, 11), (0, 4, 7)
    hidden = torch.ones_like(x)
    for row, size in enumerate(pad):
        hidden[row, :size] = 0

    def texts(x, **more):
        more = {"max_new_tokens": 13, "do_sample": False, "pad_token_id": 0} | more
        return [made.generate(x, num_beams=beams, **more)[:, x.shape[1] :] for beams in (1, 3)]

    cached = {"use_cache": kind not in FAULTY}
    theirs = texts(x, **cached)
    # Some of the original code ignores the mask, so the padding is cut off.
    alone = [texts(x[row : row + 1, size:], **cached) for row, size in enumerate(pad)]
    on_cpu.accelerate(made)
    for ours, wanted in zip(texts(x), theirs, strict=True):
        assert torch.equal(ours, wanted)
    for ours, *rows in zip(texts(x, attention_mask=hidden), *alone, strict=True):
        assert torch.equal(ours, torch.cat(rows))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*CONVOLUTIONS, *SCANS)])
def test_native_kernels_serve_forward_backward_and_steps(kind, monkeypatch, compiled):
    served(kind)
    writes(kind)
    # The decode engine computes whole tokens, in one call: tests/compat/test_hybrid_engine.py.
    monkeypatch.setattr("longspan.compat.transformers.replace.SERVED", {})
    counted = {"forward": 0, "backward": 0}

    def counting(name, run):
        def one(*args):
            counted[name] += 1
            return run(*args)

        return one

    for name in counted:
        library, kernel = native.build.loaded(f"gated/{name}"), f"longspan_gated_{name}"
        monkeypatch.setattr(library, kernel, counting(name, getattr(library, kernel)))
    on_cpu.accelerate()
    made, x = model(kind), tokens(2, 11)
    layers = sum(MIXER.search(type(m).__name__) is not None for m in made.modules())
    made(x, labels=x, use_cache=False).loss.backward()
    assert counted == {"forward": layers, "backward": layers}
    made.generate(x, max_new_tokens=5, do_sample=False, pad_token_id=0)
    found = calls(kind)
    assert all(what.startswith("native (") for by in found.values() for what in by)
    steps = sum(n for name, by in found.items() if any(word in name for word in STEPS) for n in by.values())
    assert steps >= 4 * layers
    assert counted["forward"] == 2 * layers  # steps have a separate kernel


def continued(made, x, cuts, last=False):
    """Logits of a text (B,N) read in parts, with a cache and no position_ids; the ``last`` part without gradients."""
    found, grad = read_in_parts(made, ({"input_ids": part} for part in x.split(cuts, 1))), torch.is_grad_enabled()
    out = []
    for at in range(len(cuts)):
        with torch.set_grad_enabled(grad and not (last and at == len(cuts) - 1)):
            out.append(next(found).logits)
    return torch.cat(out, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[2, 1, 20], [9, 2, 1, 2, 9]], ids=str)
def test_a_text_in_parts_is_the_whole_text(kind, cuts):
    continues(kind, cuts)
    made, x = accelerated(kind), tokens(2, 23)
    with torch.no_grad():
        assert far(continued(made, x, cuts), made(x, use_cache=False).logits) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[9, 1, 13], [20, 1, 1, 1]], ids=str)
def test_gradients_go_through_a_cache(kind, cuts):
    """Those of the whole text, also where the cache is moved on without gradients before the backward pass."""
    continues(kind, cuts)
    made, x = accelerated(kind), tokens(2, 23)
    weight, found = torch.randn(2, 23, 1), []
    for last in (False, True):
        n = 23 - cuts[-1] * last
        for logits in (made(x, use_cache=False).logits, continued(made, x, cuts, last)):
            made.zero_grad()
            (logits[:, :n].square() * weight[:, :n]).sum().backward()
            found.append(gradients(made))
    for wanted, ours in (found[:2], found[2:]):
        same_gradients(ours, wanted)


UNDOING = [kind for kind in KINDS if not MODELS[kind].no_drafts]


def undoes():
    if version() < (5, 24):
        pytest.skip("caches of these transformers cannot undo tokens of recurrent layers")


@pytest.mark.parametrize("kind", UNDOING)
@torch.no_grad()
def test_a_cropped_cache_is_that_of_the_tokens_that_remain(kind, monkeypatch):
    """Part of a call, all of it, more than one, nothing; also where a long prompt is remembered in part."""
    undoes()
    from transformers import DynamicCache

    monkeypatch.setattr(undoing, "KEPT", 6)
    made, text = accelerated(kind), torch.zeros(1, 0, dtype=torch.long)
    cache = DynamicCache(config=made.config)
    cache.activate_past_recording()
    for step, (read, undone) in enumerate([(11, 4), (5, 5), (1, 0), (2, 1), (1, None), (1, None), (3, 4), (6, 2)]):
        part = tokens(1, read, seed=step)
        logits, text = made(part, use_cache=True, cache=cache).logits, torch.cat([text, part], 1)
        assert far(logits, made(text, use_cache=False).logits[:, -read:]) < 1e-5
        if undone is not None:
            assert cache.is_croppable
            cache.crop(-undone)
            text = text[:, : text.shape[1] - undone]
    if kind not in CONVOLUTIONS:
        with pytest.raises(RuntimeError, match="cannot crop 1 tokens: .* remember the last 0"):
            cache.crop(-1)


@pytest.mark.parametrize("kind", UNDOING)
@torch.no_grad()
def test_any_script_of_reads_crops_and_copies_ends_where_its_tokens_end(kind):
    undoes()
    from transformers import DynamicCache

    chance, made = random.Random(kind), accelerated(kind)
    cache, text, since, copies = DynamicCache(config=made.config), torch.zeros(1, 0, dtype=torch.long), 0, []
    cache.activate_past_recording()
    part = tokens(1, 5)
    acts = chance.choices(("read", "draw", "crop", "copy", "back"), k=12)
    for step, act in enumerate(["read", *acts]):
        if act == "crop":
            undone = chance.randint(0, since)
            cache.crop(-undone)
            text, since = text[:, : text.shape[1] - undone], 0
        elif act == "copy":
            copies.append((copy.deepcopy(cache), text, since))
        elif act == "back" and copies:
            cache, text, since = copies.pop()
        elif act != "back":
            logits = made(part, use_cache=True, cache=cache).logits
            text, since = torch.cat([text, part], 1), since + part.shape[1]
            part = logits[:, -1:].argmax(-1) if act == "draw" else tokens(1, chance.randint(1, 5), seed=step)
    last = made(part, use_cache=True, cache=cache).logits
    text = torch.cat([text, part], 1)
    assert far(last, made(text, use_cache=False).logits[:, -part.shape[1] :]) < 1e-5


DRAFTS = {
    "prompt lookup": lambda kind: {"prompt_lookup_num_tokens": 4},
    "another model": lambda kind: {"assistant_model": model(kind, seed=1)},
    "itself": lambda kind: {"assistant_model": model(kind)},
}


@pytest.mark.parametrize(
    "kind", ["qwen3_5", "mamba2", "kimi_linear", "jamba", "falcon_h1", "lfm3", "rwkv", "zamba", "minimax"]
)
@pytest.mark.parametrize("draft", DRAFTS)
def test_texts_with_drafts_are_those_without(kind, draft):
    undoes()
    made, x = accelerated(kind), tokens(1, 7).repeat(1, 3)
    more = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
    given = DRAFTS[draft](kind)
    if MODELS[kind].no_drafts:
        assert on_cpu.status().untouched[f"{kind}.drafts"] == MODELS[kind].no_drafts
        named = f"not supported with stateful models, such as {type(made).__name__}|decoding requires a cache"
        with pytest.raises((ValueError, RuntimeError), match=named):
            made.generate(x, **more, **given)
        return
    assert torch.equal(made.generate(x, **more, **given), made.generate(x, **more))


def test_heads_that_predict_several_tokens_draft_for_a_recurrent_model(monkeypatch):
    """With random heads: transformers reads them from a checkpoint."""
    undoes()
    from transformers.modeling_layers import MtpModel

    layers = {"layer_types": ["linear_attention"] * 2 + ["full_attention"], "mtp_layer_types": ["full_attention"]}
    made, x = model("bailing_hybrid", num_mtp_layers=1, mtp_mlp_layer_types=["dense"], **layers), tokens(1, 9)
    heads, more = MtpModel(made, 1).eval(), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    drafted = []
    heads.register_forward_hook(lambda *_: drafted.append(1))
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *_, **__: heads)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        made.generate(x, **more, use_mtp=True)
    on_cpu.accelerate(made)
    assert torch.equal(made.generate(x, **more, use_mtp=True), made.generate(x, **more))
    assert drafted


def test_positions_that_are_given_stay():
    made, x = accelerated("bamba"), tokens(1, 12)
    with torch.no_grad():
        cache = cache_of(made(x[:, :7], use_cache=True))
        far_on = made(x[:, 7:], position_ids=torch.arange(90, 95)[None], use_cache=True, **cache).logits
        right = made(x, use_cache=False).logits[:, 7:]
    assert far(far_on, right) > 1e-3


def trained(made, x):
    """The loss of a model that is trained, and its gradients by name."""
    made.zero_grad()
    loss = made(input_ids=x, labels=x, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(made)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_as_near_to_float64_as_those_of_the_original_code(kind):
    made, errors = model(kind), {}
    right = judge(kind, made)
    # In one draw of tokens, what rounding leaves of few numbers that cancel is luck: here twice, elsewhere six times.
    for seed in range(4):
        x = tokens(2, length(kind), seed=seed)
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
        # Far below the precision of a float32 sum, neither is better.
        assert ours <= 1.5 * max(theirs, 5e-6), (name, ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_to_float64_as_the_original_code(kind, dtype):
    made, x = halved(model(kind), dtype), tokens(4, length(kind, half=True))
    exact = judge(kind, made)
    with torch.no_grad():
        wanted = exact(x, use_cache=False).logits
        theirs = made(x, use_cache=False).logits
        on_cpu.accelerate(made)
        ours = made(x, use_cache=False).logits
    # The median over tokens: the few for which rounding chooses another expert are off by much, by either way.
    errors = [float((found.double() - wanted).norm(dim=-1).median()) for found in (ours, theirs)]
    assert errors[0] < 1.15 * errors[1]


@pytest.mark.parametrize("kind", ["qwen3_5", "mamba2"])
def test_quantized_models_keep_their_text_on_our_kernels(kind, monkeypatch):
    """Mamba-2 reads the dtype of its head's weight in every call."""
    served(kind)
    monkeypatch.setattr(quantization, "SMALL", 16)  # since these models are small
    made, x = model(kind), tokens(2, 9)
    with torch.no_grad():
        exact = made(x).logits
        report = longspan.quantize(made, "int8")
        rounded = made(x).logits
        on_cpu.accelerate(made)
        found = made(x).logits
    assert {layer.name for layer in report if layer.format} > {"lm_head"}
    assert off(rounded, exact) < 0.03
    assert far(found, rounded) < 1e-4


def _with_layers_of(library, model):
    """Replace linear layers by those of another library, with weights of 8 or 4 bits."""
    if library == "torch":
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    if library == "torchao":
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        return model
    layers = pytest.importorskip("bitsandbytes.nn")
    for parent in list(model.modules()):
        for name, old in list(parent.named_children()):
            if type(old) is torch.nn.Linear:
                new = layers.Linear4bit(old.in_features, old.out_features, bias=old.bias is not None)
                new.weight = layers.Params4bit(old.weight.data, requires_grad=False)
                new.bias = old.bias
                setattr(parent, name, new.to("cpu"))
    return model


@pytest.mark.filterwarnings("ignore:torch:DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("library", ["torch", "torchao", "bitsandbytes"])
def test_models_quantized_by_others_keep_their_outputs(library):
    served("granitemoehybrid")
    made, x = _with_layers_of(library, model("granitemoehybrid").float()), tokens(2, 9)
    with torch.no_grad():
        expected = made(x).logits
        on_cpu.accelerate(made)
        assert far(made(x).logits, expected) < 1e-5
        longer = made.generate(x, max_new_tokens=3, do_sample=False)
    assert longer.shape == (2, 12)
