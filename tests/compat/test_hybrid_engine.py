"""Single tokens of models of transformers in the decode engine, against the layers of transformers."""

import copy

import pytest
import torch

import longspan
from hybrids import VOCAB, accelerated, far, tokens, version
from longspan.compat import transformers as on_cpu
from longspan.compat.fla import models as fla_models
from longspan.compat.transformers import branches, decoding
from longspan.ops.native.call import available
from longspan.states.utils import tensors

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("restored")
ENGINE = decoding.ENGINE
# What a type needs so that all of its layers are those of the engine, and most of its maps can be quantized.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
QWEN = {**WIDE, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "num_hidden_layers": 3}
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_experts": 9}
GRANITE = {**WIDE, "mamba_n_heads": 16, "num_local_experts": 0, "shared_intermediate_size": 64}
GRANITE |= {"position_embedding_type": "rope", "embedding_multiplier": 3.0, "logits_scaling": 2.0}
GRANITE |= {"residual_multiplier": 0.5, "attention_multiplier": 0.2}
MORE = {
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN | EXPERTS,
    "qwen3_next": QWEN | EXPERTS | {"mlp_only_layers": [1]},
    "mamba": {"hidden_size": 64, "intermediate_size": 96, "state_size": 19, "time_step_rank": 32},
    "mamba2": {"hidden_size": 64, "num_heads": 16, "head_dim": 8, "use_conv_bias": True},
    "granitemoehybrid": GRANITE,
    "lfm2": {**WIDE, "conv_bias": True},
    "rwkv7": {"hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16, "vocab_size": VOCAB}
    | dict.fromkeys((f"{name}_low_rank_dim" for name in ("decay", "gate", "a", "v")), 8),
}
MORE["granitemoehybrid with experts"] = MORE["granitemoehybrid"] | {"num_local_experts": 5, "intermediate_size": 40}
CASES = [(kind, weights) for kind in MORE for weights in ("float32", "int8", "int4")]
TOLERANCE = {"float32": 2e-6, "int8": 2e-4, "int4": 2e-4}


@pytest.fixture(autouse=True)
def _kernels():
    if version() < decoding.SINCE or not available("decode/step"):
        pytest.skip("there is no engine here")


def made(kind, weights="float32", **more):
    name, given = kind.split()[0], {**MORE[kind], **more}
    found = rwkv(**given) if kind == "rwkv7" else accelerated(name, **given)
    if weights != "float32":
        longspan.quantize(found, weights)
    return found


def rwkv(**options):
    """A model of flash-linear-attention."""
    family = fla_models.supported()["rwkv7"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = family.model(family.config(**options)).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture
def counted(monkeypatch):
    """A list that gets an entry for each call of an engine."""
    found, step = [], decoding.Engine.step
    monkeypatch.setattr(decoding.Engine, "step", lambda *given: found.append(1) or step(*given))
    return found


def calls(kind):
    (found,) = (
        c for name, c in on_cpu.status().functions[kind.split()[0]].items() if name.endswith("ForCausalLM.forward")
    )
    return found


def steps(model, cache, given, **more):
    """The logits (B,N,V) of tokens, one call for each."""
    return torch.cat([model(one, cache=cache, **more).logits for one in given.split(1, 1)], 1)


def began(model, batch=3, length=11):
    """A cache after a prompt."""
    with torch.no_grad():
        return model(tokens(batch, length), use_cache=True).cache


def states(cache):
    if not cache.layers:
        return tensors(cache.state)
    found = []
    for layer in cache.layers:
        found += [t for name in ("conv_states", "recurrent_states") for t in getattr(layer, name, {}).values()]
        found += [layer.keys, layer.values] if getattr(layer, "keys", None) is not None else []
    return [t for t in found if t is not None]


def test_every_type_has_a_case():
    assert {kind.split()[0] for kind in MORE} == {*branches.SERVED}


@pytest.mark.parametrize(("kind", "weights"), CASES)
@torch.no_grad()
def test_tokens_equal_those_of_the_layers(kind, weights, counted):
    model, given = made(kind, weights), tokens(3, 5, seed=1)
    ours, theirs = began(model), began(model)
    with longspan.backend("torch"):
        wanted = steps(model, theirs, given)
    assert not counted
    found = steps(model, ours, given)
    assert len(counted) == 5
    assert far(found, wanted) < TOLERANCE[weights]
    for one, other in zip(states(ours), states(theirs), strict=True):
        assert one.shape == other.shape
        assert far(one, other) < TOLERANCE[weights]
    # The layers continue what the engine has left, and the other way round.
    last = tokens(3, 2, seed=2)
    assert far(model(last, cache=ours).logits, model(last, cache=theirs).logits) < TOLERANCE[weights]
    assert far(steps(model, ours, given), steps(model, theirs, given)) < TOLERANCE[weights]


@pytest.mark.parametrize("kind", MORE)
@pytest.mark.parametrize("weights", ["float32", "int8"])
@torch.no_grad()
def test_a_row_has_the_same_bits_alone(kind, weights):
    model, given = made(kind, weights), tokens(70, 3, seed=1)
    cache = began(model, batch=70)
    alone = copy.deepcopy(cache)
    found = steps(model, cache, given)
    for row in (0, 5, 69):
        one = copy.deepcopy(alone)
        one.reorder_cache(torch.tensor([row]))
        assert torch.equal(steps(model, one, given[row : row + 1]), found[row : row + 1])


@pytest.mark.parametrize("kind", MORE)
def test_generate_writes_what_the_layers_write(kind, counted):
    model, prompt = made(kind), tokens(2, 9)
    mask = torch.ones_like(prompt)
    mask[1, :4] = 0
    for more in ({}, {"num_beams": 3}, {"do_sample": True}):
        torch.manual_seed(0)
        found = model.generate(prompt, attention_mask=mask, max_new_tokens=8, **more)
        with longspan.backend("torch"):
            torch.manual_seed(0)
            wanted = model.generate(prompt, attention_mask=mask, max_new_tokens=8, **more)
        assert torch.equal(found, wanted), more
    assert len(counted) == 21


@torch.no_grad()
def test_copies_snapshots_and_crops_of_a_cache_continue_independently():
    model = made("qwen3_5")
    cache, given = began(model), tokens(3, 3, seed=1)
    steps(model, cache, given)
    fork = copy.deepcopy(cache)
    other = steps(model, fork, tokens(3, 3, seed=2))
    layer = cache.layers[1]
    kept = [t.clone() for t in states(cache)]
    snapshot = layer.keys, layer.values
    found = steps(model, cache, given)
    assert not torch.equal(found, other)
    # Whoever holds the keys of before can put them back, while others hold those of after.
    after = layer.keys
    read = after.clone()
    layer.keys, layer.values = snapshot
    for place, t in zip((one for one in states(cache)), kept, strict=True):
        place.copy_(t)
    steps(model, cache, tokens(3, 3, seed=2))
    assert torch.equal(after, read)
    # A crop of a cache of keys alone, as of an assisted generation.
    layer.keys, layer.values = layer.keys[:, :, :-2], layer.values[:, :, :-2]
    n = layer.keys.shape[2]
    steps(model, cache, given[:, :1])
    assert layer.keys.shape[2] == n + 1


@torch.no_grad()
def test_a_changed_model_is_read_again():
    model = made("qwen3_5")
    given = tokens(3, 1)

    def both():
        ours, theirs = began(model), began(model)
        found = steps(model, ours, given)
        with longspan.backend("torch"):
            return found, steps(model, theirs, given)

    first = both()[0]
    model.model.layers[0].linear_attn.A_log.add_(1.0)
    model.model.layers[1].self_attn.q_norm.weight.mul_(3.0)
    model.model.layers[1].mlp.up_proj.weight.data.mul_(2.0)
    model.model.norm.weight.data = torch.rand(64)
    found, wanted = both()
    assert not torch.allclose(first, wanted)
    assert far(found, wanted) < 2e-6
    model.model.layers[2].mlp.down_proj = torch.nn.Linear(96, 64)
    found, wanted = both()
    assert far(found, wanted) < 2e-6
    assert set(calls("qwen3_5")) == {ENGINE, "the layers of transformers, since another backend is forced"}
    longspan.quantize(model, "int8")
    found, wanted = both()
    assert far(found, wanted) < 2e-4


REFUSED = {
    "hooks": lambda m: m.model.layers[0].register_forward_hook(lambda *_: None),
    "replaced forward": lambda m: setattr(m.lm_head, "forward", m.lm_head.forward),
    "training": lambda m: m.train(),
    "not float32 or bfloat16": lambda m: m.half(),
    "is a GELU": lambda m: setattr(m.model.layers[0].mlp, "act_fn", torch.nn.GELU()),
    "type dynamic": lambda m: setattr(m.model.rotary_emb, "rope_type", "dynamic"),
    "is a Adapter": lambda m: setattr(m.model.layers[0].mlp, "up_proj", Adapter(m.model.layers[0].mlp.up_proj)),
}


class Adapter(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)


@pytest.mark.parametrize("reason", REFUSED)
@torch.no_grad()
def test_what_the_engine_does_not_know_runs_in_the_layers(reason):
    model = made("qwen3_5")
    steps(model, began(model), tokens(3, 1))
    REFUSED[reason](model)
    steps(model, began(model), tokens(3, 2))
    found = calls("qwen3_5")
    assert found.pop(ENGINE) == 1
    ((why, count),) = found.items()
    assert reason in why
    assert count == 2


ARGUMENTS = {
    "hidden states": {"output_hidden_states": True},
    "a tuple": {"return_dict": False},
    "between tokens": {"attention_mask": torch.tensor([[1, 0] + [1] * 10] * 3)},
    "ends with padding": {"attention_mask": torch.tensor([[1] * 11 + [0]] * 3)},
    "an image": {"position_ids": torch.tensor([11, 12, 13])[:, None, None].expand(3, 3, 1)},
}


@pytest.mark.parametrize("reason", ARGUMENTS)
@torch.no_grad()
def test_arguments_that_the_engine_does_not_know_run_in_the_layers(reason):
    model = made("qwen3_5")
    model(tokens(3, 1), cache=began(model), **ARGUMENTS[reason])
    ((why, count),) = calls("qwen3_5").items()
    assert why.startswith("the layers")
    assert count == 1


def test_gradients_and_tokens_out_of_range_are_those_of_the_layers():
    model = made("mamba2")
    cache = began(model)
    with torch.no_grad(), pytest.raises(IndexError):
        model(torch.full((3, 1), 97), cache=cache)
    assert model(tokens(3, 1), cache=cache).logits.requires_grad
    assert ENGINE not in calls("mamba2")


@pytest.mark.parametrize("kind", MORE)
def test_a_pool_writes_what_the_layers_write(kind, monkeypatch):
    from longspan.serving import Pool, Sampling

    model, greedy, rows = made(kind), Sampling(temperature=0.0), []
    own = decoding.Engine.step
    monkeypatch.setattr(decoding.Engine, "step", lambda *given: rows.append(len(given[1].tokens)) or own(*given))
    pool, prompts = Pool(model, slots=3, capacity=24), [tokens(1, n, seed=n) for n in (4, 7, 5)]
    streams = [pool.submit(prompt[0].tolist(), max_new_tokens=6, sampling=greedy)[0] for prompt in prompts]
    pool.run()
    assert max(rows) == 3
    with longspan.backend("torch"):
        for prompt, stream in zip(prompts, streams, strict=True):
            wanted = model.generate(prompt, max_new_tokens=6, do_sample=False)
            assert stream.tokens == wanted[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("kind", sorted({*MORE} - {"rwkv7"}))
@pytest.mark.parametrize("weights", ["float32", "int8"])
@torch.no_grad()
def test_in_bfloat16_it_is_at_least_as_accurate(kind, weights):
    half = made(kind, weights).bfloat16()
    exact, given = copy.deepcopy(half).float(), tokens(3, 6, seed=1)
    start = began(half)
    with longspan.backend("torch"):
        theirs = steps(half, copy.deepcopy(start), given)
    found = steps(half, copy.deepcopy(start), given)
    assert calls(kind)[ENGINE] == 6
    assert found.dtype == theirs.dtype
    for layer in start.layers:
        for name in ("conv_states", "recurrent_states"):
            of = getattr(layer, name, {})
            of.update({i: None if t is None else t.float() for i, t in of.items()})
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys.float(), layer.values.float()
    with longspan.backend("torch"):
        wanted = steps(exact, start, given)
    assert far(found, wanted) < 1.1 * far(theirs, wanted)


@torch.no_grad()
def test_rwkv7_with_other_options_equals_its_layers(counted):
    model, given = made("rwkv7", fuse_norm=False, norm_bias=False, value_dim=128), tokens(3, 5, seed=1)
    ours, theirs = began(model), began(model)
    with longspan.backend("torch"):
        wanted = steps(model, theirs, given)
    assert far(steps(model, ours, given), wanted) < TOLERANCE["float32"]
    assert len(counted) == 5


def test_rwkv7_with_gradients_or_padding_runs_in_its_layers(counted):
    model, given = made("rwkv7"), tokens(3, 1)
    cache = began(model)
    model(given, cache=copy.deepcopy(cache)).logits.sum().backward()
    with torch.no_grad():
        padded = torch.tensor([[1] * 11 + [0]] + [[1] * 12] * 2)
        model(given, cache=copy.deepcopy(cache), attention_mask=padded)
        assert not counted
        model(given, cache=cache, attention_mask=torch.ones_like(padded))
    assert len(counted) == 1


@torch.no_grad()
def test_calls_of_rwkv7_and_of_pools_are_counted():
    from longspan.serving import Pool

    on_cpu.restore()
    model, given = made("rwkv7"), tokens(3, 2)
    cache = began(model)
    steps(model, cache, given)
    assert calls("rwkv7") == {ENGINE: 2}
    with longspan.backend("torch"):
        steps(model, cache, given)
    assert calls("rwkv7") == {ENGINE: 2, "its layers, since another backend is forced": 2}
    pool = Pool(made("lfm2"), slots=1, capacity=24)
    pool.submit([1, 2, 3], max_new_tokens=4)
    pool.run()
    assert calls("lfm2")[ENGINE] == 3
