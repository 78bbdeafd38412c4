"""attn_implementation="longspan": the same outputs and gradients as the original softmax layers, under their masks."""

import math

import pytest
import torch

import longspan
from hybrids import VOCAB, gradients, same_gradients, tokens, version
from longspan import patterns
from longspan.compat import transformers as on_cpu
from longspan.compat.transformers import masks, softmax
from longspan.ops.native.call import available
from longspan.ops.sparse import sums

pytest.importorskip("transformers")

import transformers

from longspan.compat.transformers.cache import NAME

SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
SMALL |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
WINDOW = 7
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
LATENT |= {"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
# With many heads hardly any score is exactly 0, so that none are equal.
LATENT |= {"index_n_heads": 16, "index_head_dim": 8, "index_topk": 5, "n_group": 2, "topk_group": 1}
# name: class, what its configuration has, patterns that its layers must be served under
MODELS = {
    "mistral": ("Mistral", {"sliding_window": WINDOW}, {"causal & band(6)"}),
    "qwen3": ("Qwen3", {}, {"causal"}),
    "gemma3": (
        "Gemma3",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
        {"causal & band(6)", "causal"},
    ),
    "gpt_oss": (
        "GptOss",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], **EXPERTS},
        {"causal & band(6)", "causal"},
    ),
    "llama4": (
        "Llama4",
        {
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            **EXPERTS,
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 48,
        },
        {f"causal & block({WINDOW})", "causal"},
    ),
    "gemma2": (
        "Gemma2",
        {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
        {"causal & band(6)", "causal"},
    ),
}
# Earlier indexers return masks.
if version() >= (5, 24):
    MODELS |= {
        "deepseek_v32": ("DeepseekV32", LATENT, set()),
        "glm_moe_dsa": ("GlmMoeDsa", LATENT | {"indexer_types": ["full", "shared"]}, set()),
    }
INDEXED = tuple(kind for kind, (_, own, _) in MODELS.items() if "index_topk" in own)


def model(kind, **more):
    prefix, own, _ = MODELS[kind]
    make = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = getattr(transformers, f"{prefix}ForCausalLM")(make(**SMALL | own | more))
        for p in made.parameters():
            p.data.normal_(0.0, 0.6 / p.shape[-1] ** 0.5 if p.dim() > 1 else 0.5)
    return made.eval()


@pytest.fixture(autouse=True)
def registered():
    on_cpu.register()
    softmax.calls.clear()
    yield
    softmax.calls.clear()


def both(made, **given):
    """Logits by eager code, and by ours."""
    out = []
    for name in ("eager", "longspan"):
        made.set_attn_implementation(name)
        out.append(made(**given))
    return out


def close(a, b):
    assert float((a - b).abs().max() / b.abs().max()) < 1e-5


@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_gradients_are_those_of_eager_code(kind):
    made, x = model(kind), tokens(2, 29)
    found = {}
    for name in ("eager", "longspan"):
        made.set_attn_implementation(name)
        made.zero_grad()
        out = made(x, labels=x, use_cache=False)
        out.loss.backward()
        found[name] = out.logits.detach(), gradients(made)
    close(found["longspan"][0], found["eager"][0])
    same_gradients(found["longspan"][1], found["eager"][1])


@pytest.mark.parametrize("kind", MODELS)
def test_the_patterns_serve_what_they_describe(kind):
    made = model(kind)
    made.set_attn_implementation("longspan")
    with torch.no_grad():
        made(tokens(2, 29), attention_mask=padded(2, 29), use_cache=False)
    under = {what.partition(", under ")[::2] for what in softmax.calls if ", under " in what}
    assert {pattern for _, pattern in under} == {repr(patterns.parse(text)) for text in MODELS[kind][2]}
    if available():
        assert {by for by, _ in under} <= {"native (attention under a pattern)"}
    assert softmax.calls == on_cpu.status().softmax
    if kind in INDEXED:
        (what,) = softmax.calls
        assert what.endswith(", for tokens that an indexer chose")


def chunked(kind, since):
    """Skip chunks where these transformers' own code gets their masks wrong."""
    if kind == "llama4" and version() < since:
        pytest.skip("the masks of chunks of these transformers are wrong")


def padded(batch, n, left=True):
    hidden = torch.ones(batch, n, dtype=torch.long)
    hidden[0, slice(0, 5) if left else slice(n - 5, n)] = 0
    return hidden


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("left", [True, False])
def test_padding_at_either_end(kind, left):
    made, x, hidden = model(kind), tokens(2, 29), padded(2, 29, left)
    with torch.no_grad():
        theirs, ours = both(made, input_ids=x, attention_mask=hidden, use_cache=False)
    close(ours.logits[hidden.bool()], theirs.logits[hidden.bool()])


@pytest.mark.parametrize("kind", MODELS)
def test_texts_are_those_of_eager_code(kind):
    made, x, hidden = model(kind), tokens(2, 29), padded(2, 29)
    texts = []
    for name in ("eager", "longspan"):
        made.set_attn_implementation(name)
        texts.append(made.generate(x, attention_mask=hidden, max_new_tokens=9, do_sample=False, pad_token_id=0))
    assert torch.equal(*texts)


@pytest.mark.parametrize("kind", INDEXED)
@pytest.mark.parametrize("name", ["eager", "longspan"])
def test_an_indexer_chooses_what_the_original_does(kind, name):
    made, x, hidden = model(kind), tokens(2, 29), padded(2, 29)
    made.set_attn_implementation(name)
    chosen = f"{MODELS[kind][0]}Indexer.forward"

    def outputs():
        with torch.no_grad():
            first = made(x[:, :20], use_cache=True)
            rest = made(x[:, 20:], use_cache=True, **{NAME: first[NAME]})
            beside = made(x, attention_mask=hidden, use_cache=False).logits[hidden.bool()]
            return made(x, use_cache=False).logits, first.logits, rest.logits, beside

    theirs = outputs()
    try:
        on_cpu.accelerate(made)
        ours, calls = outputs(), on_cpu.status().functions[kind][chosen]
    finally:
        on_cpu.restore()
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
    layers = 2 if kind == "deepseek_v32" else 1
    by_original = {what: count for what, count in calls.items() if what.startswith("the original")}
    assert by_original == {"the original, since its mask hides earlier tokens": layers}
    assert sum(calls.values()) == 4 * layers


@pytest.mark.parametrize("kind", ["mistral", "qwen3", "gemma3", "llama4", "gemma2"])
def test_packed_rows_are_served_by_their_borders(kind):
    """GPT-OSS is left out: its model makes masks without position_ids, so that its sequences see one another."""
    chunked(kind, since=(5, 23))
    made, lengths = model(kind), (13, 4, 12)
    x = tokens(1, 29)
    at = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        made.set_attn_implementation("eager")
        alone = torch.cat([made(part, use_cache=False).logits for part in x.split(lengths, 1)], 1)
        made.set_attn_implementation("longspan")
        ours = made(x, position_ids=at, use_cache=False)
    close(ours.logits, alone)
    assert any(", under " in what for what in softmax.calls)
    assert not any("sdpa" in what for what in softmax.calls)


@pytest.mark.parametrize("kind", ["mistral", "gemma3", "gpt_oss", "qwen3", "gemma2"])
def test_a_prompt_in_pieces(kind):
    made, x = model(kind), tokens(1, 29)
    found = []
    for name in ("eager", "longspan"):
        made.set_attn_implementation(name)
        cache, out = None, []
        with torch.no_grad():
            for part in x.split([10, 12, 5, 2], 1):
                one = made(part, use_cache=True, **{NAME: cache})
                cache = one[NAME]
                out.append(one.logits)
        found.append(torch.cat(out, 1))
    close(found[1], found[0])
    by_sdpa = {what for what in softmax.calls if "sdpa" in what}
    assert by_sdpa <= ({"sdpa, for plain causal attention"} if available() else by_sdpa)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("length", "left"), [(12, True), (39, False)], ids=["left padding", "whole rows"])
def test_texts_with_a_static_cache(kind, length, left):
    """The prompt is shorter or longer than the window, and always shorter than the cache."""
    chunked(kind, since=(5, 20))
    made, x = model(kind), tokens(2, length)
    hidden = padded(2, length) if left else torch.ones_like(x)

    def written(name, **how):
        made.set_attn_implementation(name)
        how |= {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "output_logits": True}
        return made.generate(x, attention_mask=hidden, return_dict_in_generate=True, **how)

    wanted = written("eager")
    softmax.calls.clear()
    found = written("longspan", cache_implementation="static")
    close(torch.stack(found.logits, 1), torch.stack(wanted.logits, 1))
    assert torch.equal(found.sequences, wanted.sequences)
    # The prompt is served under the patterns of the model, as without a static cache.
    under = {what.partition(", under ")[2] for what in softmax.calls} - {""}
    assert {repr(patterns.parse(text)) for text in MODELS[kind][2]} - under <= {repr(patterns.causal())}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("cuts", [[4, 2, 1, 22], [10, 12, 5, 2]], ids=str)
def test_a_prompt_in_pieces_in_a_static_cache(kind, cuts):
    made, x = model(kind), tokens(2, 29)
    made.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = made(x, use_cache=False).logits
        made.set_attn_implementation("longspan")
        cache = transformers.StaticCache(config=made.config.get_text_config(), max_cache_len=40)
        out = [made(part, use_cache=True, **{NAME: cache}).logits for part in x.split(cuts, 1)]
    close(torch.cat(out, 1), wanted)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_without_a_mask_queries_begin_at_the_first_key(softcap):
    """What transformers means by no mask, in a static cache with room for more: as sdpa reads ``is_causal``."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    sink, layer = torch.randn(2), torch.nn.Module().eval()
    found, _ = softmax.attend(layer, q, k, v, None, s_aux=sink, softcap=softcap)
    wanted, _ = softmax.attend(layer, q, k[:, :, :5], v[:, :, :5], None, s_aux=sink, softcap=softcap)
    close(found, wanted)


def test_queries_that_see_all_of_a_static_cache_have_a_mask():
    def everything(b, h, i, j):
        return (i >= 0) & (j >= 0)

    found = softmax.mask(1, 4, 8, mask_function=everything, allow_is_causal_skip=False)
    assert torch.equal(found, torch.ones(1, 1, 4, 8, dtype=torch.bool))
    assert list(softmax.calls.values()) == [1]
    assert all("sdpa" in name for name in softmax.calls)


def test_a_mask_is_handed_on_by_models():
    """``generate`` makes it for a static cache, and gives it to models that make their own out of others."""
    from transformers.masking_utils import create_causal_mask

    made = model("mistral")
    made.set_attn_implementation("longspan")
    seen = masks.Seen(patterns.causal(), None, None, (5, 5))
    assert seen.shape == (1, 1, 5, 5)
    assert repr(seen) == "Seen(causal(), (1, 1, 5, 5))"
    assert seen.contiguous() is seen
    given = {"inputs_embeds": torch.zeros(1, 5, 8), "attention_mask": seen, NAME: None}
    assert create_causal_mask(made.config, **given) is seen


def test_masks_that_no_pattern_describes_go_to_sdpa_and_are_counted():
    made, x = model("qwen3"), tokens(2, 29)
    hidden = torch.ones(2, 29, dtype=torch.long)
    hidden[:, 9:12] = 0  # between tokens
    with torch.no_grad():
        theirs, ours = both(made, input_ids=x, attention_mask=hidden, use_cache=False)
    close(ours.logits[hidden.bool()], theirs.logits[hidden.bool()])
    assert sum(count for name, count in softmax.calls.items() if "mask by sdpa" in name and "padding" in name) == 1


def test_an_encoder_with_windows():
    if version() < (5, 14):
        pytest.skip("ModernBERT of older transformers supports only its built-in attention")
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "local_attention": 6, "global_attn_every_n_layers": 3}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(**sizes, **ends)
    torch.manual_seed(0)
    made, hidden = transformers.ModernBertModel(config).eval(), padded(2, 29)
    with torch.no_grad():
        theirs, ours = both(made, input_ids=tokens(2, 29), attention_mask=hidden)
    close(ours.last_hidden_state[hidden.bool()], theirs.last_hidden_state[hidden.bool()])
    assert any(", under band" in what for what in softmax.calls)


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("sink", [None, 0.5])
def test_a_row_that_sees_nothing_gives_zeros_in_blocks(sink, cap, kind):
    """By hand: one channel, q = k = 1, scale 1, values 1, 2, 4. Row 0 sees nothing, row 1 key 0, row 2 keys 0 and 2."""
    q, k = (torch.ones(1, 1, 3, 1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    v = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).view(1, 1, 3, 1).requires_grad_()
    allowed = torch.tensor([[False, False, False], [True, False, False], [True, False, True]])[None, None]
    added = torch.zeros(1, 1, 3, 3, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    given = None if sink is None else torch.tensor([sink], dtype=torch.float64, requires_grad=True)
    out = softmax._in_blocks(q, k, v, allowed if kind == "bool" else added, 1.0, cap, given, 0.0)
    e, s = math.exp(cap * math.tanh(1 / cap) if cap else 1.0), math.exp(sink) if sink is not None else 0.0
    wanted = [0.0, e / (e + s), (1 + 4) * e / (2 * e + s)]
    assert out.flatten().tolist() == pytest.approx(wanted, rel=1e-12)
    leaves = [t for t in (q, k, v, given) if t is not None]
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
    assert grads[0][0, 0, 0] == 0
    assert grads[2].flatten().tolist() == pytest.approx([e / (e + s) + e / (2 * e + s), 0.0, e / (2 * e + s)])


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_a_row_that_sees_nothing_gives_zeros_with_a_sink(cap, backend):
    """By hand, under causal - band(1): rows 0 and 1 see nothing, row 2 key 0, row 3 keys 0 and 1; the sink is 1/2."""
    if backend == "native" and not available():
        pytest.skip("no kernels here")
    q, k = (torch.ones(1, 1, 4, 1, requires_grad=True) for _ in range(2))
    v = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 1, 4, 1).requires_grad_()
    sink = torch.tensor([0.5], requires_grad=True)
    with longspan.backend(backend):
        out, lse = sums.attend(q, k, v, patterns.parse("causal - band(1)"), scale=1.0, softcap=cap)
        y = sums.with_sink(out, lse, sink)
        grads = torch.autograd.grad(y.sum(), (q, k, v, sink))
    e, s = math.exp(cap * math.tanh(1 / cap) if cap else 1.0), math.exp(0.5)
    assert lse.flatten().tolist()[:2] == [-math.inf] * 2
    wanted = [0.0, 0.0, e / (e + s), 3 * e / (2 * e + s)]
    assert y.flatten().tolist() == pytest.approx(wanted, rel=1e-5)
    assert all(g.isfinite().all() for g in grads)
    assert grads[0].flatten().tolist()[:2] == [0.0, 0.0]
    assert grads[1].flatten().tolist()[2:] == [0.0, 0.0]
    by_values = [e / (e + s) + e / (2 * e + s), e / (2 * e + s), 0.0, 0.0]
    assert grads[2].flatten().tolist() == pytest.approx(by_values, rel=1e-5)
    by_sink = -e * s / (e + s) ** 2 - 3 * e * s / (2 * e + s) ** 2
    assert grads[3].item() == pytest.approx(by_sink, rel=1e-5)


def test_a_mask_by_its_function():
    def windows(b, h, i, j):
        return (j <= i) & (i - j < 3)

    found = masks.read(windows, 1, 6, 6, (0, 0), None, 3, False)
    assert found.pattern == patterns.parse("causal & band(2)")
    assert torch.equal(found.dense()[0, 0], windows(0, 0, torch.arange(6)[:, None], torch.arange(6)))
    # Two sequences of three tokens, compared in every pair. A prefix that sees itself matches no pattern.
    packed = masks.read(lambda b, h, i, j: (j <= i) & (i // 3 == j // 3), 1, 6, 6, (0, 0), None, None, True)
    assert packed.segments.tolist() == [[0, 0, 0, 1, 1, 1]]
    why = masks.read(lambda b, h, i, j: (j <= i) | (j < 2), 1, 6, 6, (0, 0), None, None, True)
    assert isinstance(why, str)
