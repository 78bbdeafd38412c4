"""``longspan.MultiheadAttention`` against torch: outputs, weights, gradients, state dicts and errors."""

import copy
import itertools
import pickle
import re

import pytest
import torch
from torch import nn

import longspan
from longspan import MultiheadAttention
from longspan.testing.pairs import all_pairs

E, H, B, N = 12, 3, 2, 7
FUTURE = torch.ones(N, N, dtype=torch.bool).triu(1)
PADDING = torch.zeros(B, N, dtype=torch.bool).index_put(
    (torch.tensor([1, 1]), torch.tensor([5, 6])), torch.tensor(True)
)
INFINITE = torch.zeros(N, N).masked_fill(FUTURE, -torch.inf)
SPECS = (
    "linear",
    "performer",
    "deltanet",
    "gla(expand_k=1.0)",
    "local(window=3)",
    "alibi",
    "softmax(rotary=100.0)",
    "rfa",
)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def seeded(make, *arguments, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(*arguments, **options)


def both(**options):
    """The modules of torch and longspan with the same seed."""
    ours = seeded(MultiheadAttention, E, H, dtype=torch.float64, attention="softmax", **options)
    return seeded(nn.MultiheadAttention, E, H, dtype=torch.float64, **options), ours


def of_pairs(kind):
    """Masks over pairs in the forms of torch."""
    some = torch.rand(N, N, generator=torch.Generator().manual_seed(5)) < 0.4
    some[:, 0] = False
    per_head = torch.rand(B * H, N, N, generator=torch.Generator().manual_seed(6)) < 0.4
    per_head[..., 0] = False
    return {
        "none": {},
        "causal": {"attn_mask": FUTURE},
        "hint": {"attn_mask": FUTURE, "is_causal": True},
        "floats": {"attn_mask": INFINITE.double(), "is_causal": True},
        "pairs": {"attn_mask": some},
        "heads": {"attn_mask": per_head},
        "nothing": {"attn_mask": torch.zeros(N, N, dtype=torch.bool)},
    }[kind]


KINDS = ("none", "causal", "hint", "floats", "pairs", "heads", "nothing")


@pytest.mark.parametrize("row", all_pairs(kind=KINDS, padded=(True, False), batch_first=(True, False)), ids=str)
def test_softmax_equals_torch(row):
    kind, padded, batch_first = row.values()
    theirs, ours = both(batch_first=batch_first)
    arguments = of_pairs(kind)
    if padded:
        padding = PADDING if kind != "floats" else torch.zeros(B, N).double().masked_fill(PADDING, -torch.inf)
        arguments = {**arguments, "key_padding_mask": padding}
    shape = (B, N, E) if batch_first else (N, B, E)
    for need, average in itertools.product((True, False), (True, False)):
        results = []
        for module in (theirs, ours):
            x = randn(*shape).requires_grad_()
            module.zero_grad()
            y, p = module(x, x, x, need_weights=need, average_attn_weights=average, **arguments)
            loss = y.sin().sum() + (p.square().sum() if need else 0.0)
            loss.backward()
            results.append([y, p, x.grad, *(parameter.grad for parameter in module.parameters())])
        for right, found in zip(*results, strict=True):
            assert (right is None) == (found is None)
            if right is not None:
                torch.testing.assert_close(found, right, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention_with_other_widths_equals_torch(bias):
    theirs, ours = both(kdim=5, vdim=8, bias=bias)
    query, key, value = randn(N, B, E), randn(11, B, 5, seed=1), randn(11, B, 8, seed=2)
    for right, found in zip(theirs(query, key, value), ours(query, key, value), strict=True):
        torch.testing.assert_close(found, right)
    mask = torch.rand(N, 11, generator=torch.Generator().manual_seed(1)) < 0.5
    for right, found in zip(
        theirs(query, key, value, attn_mask=mask), ours(query, key, value, attn_mask=mask), strict=True
    ):
        torch.testing.assert_close(found, right)


def test_softmax_without_a_batch_equals_torch():
    theirs, ours = both()
    x, memory = randn(N, E), randn(5, E, seed=1)
    for right, found in zip(theirs(x, memory, memory), ours(x, memory, memory), strict=True):
        torch.testing.assert_close(found, right)
    hidden = torch.arange(N) > 4
    for right, found in zip(
        theirs(x, x, x, key_padding_mask=hidden), ours(x, x, x, key_padding_mask=hidden), strict=True
    ):
        torch.testing.assert_close(found, right)


def test_queries_and_keys_with_positions_and_values_without():
    """As in detection transformers: query is key, value is another tensor."""
    theirs, ours = both(batch_first=True)
    at, x = randn(B, N, E, seed=1), randn(B, N, E)
    torch.testing.assert_close(ours(at, at, x)[0], theirs(at, at, x)[0])


def test_a_row_that_sees_nothing_is_zero_where_torch_gives_nan():
    theirs, ours = both(batch_first=True)
    x, hidden = randn(1, 3, E), torch.ones(1, 3, dtype=torch.bool)
    assert theirs(x, x, x, key_padding_mask=hidden)[0].isnan().all()
    assert torch.equal(ours(x, x, x, key_padding_mask=hidden)[0], ours.out_proj.bias.expand(1, 3, E))


def test_dropout_drops_weights():
    theirs, ours = both(dropout=0.5)
    x = randn(N, B, E)
    torch.testing.assert_close(ours.eval()(x, x, x)[0], theirs.eval()(x, x, x)[0])
    ours.train()
    assert not torch.equal(ours(x, x, x, is_causal=True)[0], ours(x, x, x, is_causal=True)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x, is_causal=True)[0], ours(x, x, x, is_causal=True)[0])
    with pytest.raises(ValueError, match="dropout=0.5 .* linear has none"):
        MultiheadAttention(E, H, 0.5)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "vdim": 8}], ids=str)
def test_state_dicts_load_both_ways(options):
    theirs, ours = nn.MultiheadAttention(E, H, **options), MultiheadAttention(E, H, attention="linear", **options)
    assert {n: p.shape for n, p in ours.state_dict().items()} == {n: p.shape for n, p in theirs.state_dict().items()}
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    ours.load_state_dict(theirs.state_dict())
    other = nn.MultiheadAttention(E, H, **options)
    other.load_state_dict(ours.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), theirs.parameters(), strict=True))


def test_initial_values_equal_torch():
    theirs, ours = both()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    ours._reset_parameters()
    assert not ours._qkv_same_embed_dim


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_a_mechanism_equals_the_same_mechanism_alone(spec, causal):
    module = seeded(MultiheadAttention, E, H, batch_first=True, attention=spec).double()
    try:
        alone = longspan.build(spec, E, H, causal=causal).double()
    except ValueError:
        with pytest.raises(ValueError, match="has no bidirectional form; call with is_causal=True"):
            module(x := randn(B, N, E), x, x, need_weights=False)
        return
    extra = {n.removeprefix("attention."): t for n, t in module.state_dict().items() if n.startswith("attention.")}
    weights = dict(zip(("query", "key", "value"), module.in_proj_weight.chunk(3), strict=True))
    weights["out"] = module.out_proj.weight
    extra |= {f"{name}.weight": weight for name, weight in weights.items()}
    # Initial biases are zeros, as in torch.
    extra |= {
        name: torch.zeros_like(t)
        for name, t in alone.state_dict().items()
        if re.match(r"(query|key|value|out)\.bias", name)
    }
    alone.load_state_dict(extra)
    x = randn(B, N, E)
    y, p = module(x, x, x, key_padding_mask=PADDING, need_weights=False, is_causal=causal)
    torch.testing.assert_close(y, alone(x, mask=~PADDING)[0])
    assert p is None
    if "record" in alone.supported_args:
        record = {}
        alone(x, record=record)
        found = module(x, x, x, is_causal=causal, average_attn_weights=False)[1]
        torch.testing.assert_close(found, record["matrix"])
    else:
        with pytest.raises(ValueError, match="has no attention matrix to return; call with need_weights=False"):
            module(x, x, x, is_causal=causal)


@pytest.mark.parametrize("spec", ["linear", "performer", "kernel", "talking_heads"])
@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 7}, {"kdim": 6, "vdim": 6}], ids=str)
def test_keys_and_values_of_other_tensors(spec, widths):
    """The mechanism alone, with a context of concatenated keys and values and padded projections."""
    module = seeded(MultiheadAttention, E, H, batch_first=True, attention=spec, **widths).double()
    kdim, vdim = widths.get("kdim", E), widths.get("vdim", E)
    query, key, value = randn(B, N, E), randn(B, 5, kdim, seed=1), randn(B, 5, vdim, seed=2)
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    y, _ = module(query, key, value, key_padding_mask=hidden)
    alone = longspan.build(spec, E, H, causal=False).double()
    alone.context_dim = kdim + vdim
    state = {n.removeprefix("attention."): t for n, t in module.state_dict().items() if n.startswith("attention.")}
    zero = torch.zeros(E, dtype=torch.float64)
    wq, wk, wv = (module._weight(name) for name in ("query", "key", "value"))
    state |= {"query.weight": wq, "out.weight": module.out_proj.weight}
    state |= {f"{name}.bias": zero for name in ("query", "key", "value", "out")}
    alone.key, alone.value = (nn.Linear(kdim + vdim, E, dtype=torch.float64) for _ in range(2))
    state["key.weight"] = torch.cat([wk, wk.new_zeros(E, vdim)], 1)
    state["value.weight"] = torch.cat([wv.new_zeros(E, kdim), wv], 1)
    alone.load_state_dict(state)
    right, _ = alone(query, context=torch.cat([key, value], -1), context_mask=~hidden)
    torch.testing.assert_close(y, right)


@pytest.mark.parametrize("spec", ["linear", "softmax"])
@pytest.mark.parametrize("grad", [True, False])
def test_inside_torchs_encoder_layer(spec, grad):
    """In evaluation the fast path of torch would compute softmax with an even number of heads."""
    layer = seeded(nn.TransformerEncoderLayer, E, 2, 16, 0.0, batch_first=True).eval()
    right = copy.deepcopy(layer)
    layer.self_attn = MultiheadAttention(E, 2, batch_first=True, attention=spec)
    layer.self_attn.load_state_dict(right.self_attn.state_dict())
    x = randn(B, N, E, dtype=torch.float32)
    with torch.set_grad_enabled(grad):
        for masks in ({}, {"src_key_padding_mask": PADDING}, {"src_mask": INFINITE, "is_causal": True}):
            found, expected = layer(x, **masks), right(x, **masks)
            if "src_key_padding_mask" in masks:
                # Only the fast path of torch gives zeros for padding.
                found, expected = found[~PADDING], expected[~PADDING]
            assert torch.allclose(found, expected, atol=1e-5) == (spec == "softmax")


def test_inside_torchs_encoder_and_decoder():
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    layer.self_attn = MultiheadAttention(E, H, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = randn(B, N, E, dtype=torch.float32)
    with torch.no_grad():
        y = encoder(x, src_key_padding_mask=PADDING)
        changed = x.masked_fill(PADDING[..., None], 9.0)
        torch.testing.assert_close(encoder(changed, src_key_padding_mask=PADDING)[~PADDING], y[~PADDING])
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
        nn.TransformerEncoder(layer, 2)
    decoder = nn.TransformerDecoderLayer(E, H, 16, batch_first=True)
    decoder.self_attn = MultiheadAttention(E, H, batch_first=True)
    decoder.multihead_attn = MultiheadAttention(E, H, batch_first=True)
    decoder.eval()
    y = decoder(x, x[:, :5], tgt_mask=INFINITE, tgt_is_causal=True)
    torch.testing.assert_close(decoder(x[:, :3], x[:, :5], tgt_mask=INFINITE[:3, :3], tgt_is_causal=True), y[:, :3])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
def test_a_nested_tensor_is_refused():
    """The encoder of torch makes one if only the attention of its layers was replaced."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, 2, 16, batch_first=True), 2).eval()
    for layer in encoder.layers:
        layer.self_attn = MultiheadAttention(E, 2, batch_first=True)
    message = "build nn.TransformerEncoder with enable_nested_tensor=False"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        encoder(randn(B, N, E, dtype=torch.float32), src_key_padding_mask=PADDING)


def test_copies_pickles_and_other_types_keep_one_set_of_parameters():
    module = MultiheadAttention(E, H, batch_first=True, attention="performer")
    x = randn(B, N, E, dtype=torch.float32)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        for causal in (True, False):
            right = module(x, x, x, need_weights=False, is_causal=causal)[0]
            assert torch.equal(other(x, x, x, need_weights=False, is_causal=causal)[0], right)
        with torch.no_grad():
            other.in_proj_weight.zero_()
        assert module.in_proj_weight.any()
        assert not other(x, x, x, need_weights=False, is_causal=True)[0].any()
        assert not other(x, x, x, need_weights=False)[0].any()
    module.double()
    z = x.double()
    assert all(module(z, z, z, is_causal=causal)[0].dtype == torch.float64 for causal in (True, False))
    with pytest.raises(ValueError, match=r"x is torch.float32 and the weights are torch.float64"):
        module(x, x, x)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("spec", ["linear", "softmax"])
def test_it_compiles_as_one_graph(spec):
    module = MultiheadAttention(E, H, batch_first=True, attention=spec)
    x = randn(B, N, E, dtype=torch.float32)

    def run(x, padding):
        return module(x, x, x, padding, need_weights=False, attn_mask=INFINITE, is_causal=True)[0]

    padding = torch.zeros(B, N).masked_fill(PADDING, -torch.inf)
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(x, padding), run(x, padding))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_bias_kv": True}, "add_bias_kv=True is not supported"),
        ({"add_zero_attn": True}, "add_zero_attn=True is not supported"),
        ({"num_heads": 5}, "embed_dim=12 is not a multiple of num_heads=5"),
        ({"attention": "linaer"}, "unknown name 'linaer'"),
        ({"attention": "gla"}, "a query projection of 12 x 12, but has one of 12 x 6"),
        ({"attention": "average"}, "a query projection of 12 x 12, but has none"),
        ({"attention": "softmax(kv_heads=1)"}, "a key projection of 12 x 12, but has one of 12 x 4"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MultiheadAttention(**{"embed_dim": E, "num_heads": H, **options})


BIAS = torch.zeros(N, N).index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(0.5))
X = randn(B, N, E, dtype=torch.float32)


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        (
            "linear",
            {"attn_mask": FUTURE.T.contiguous()},
            "linear supports only an attn_mask",
        ),
        (
            "softmax",
            {"attn_mask": FUTURE.T.contiguous(), "is_causal": True},
            "is_causal=True needs an attn_mask",
        ),
        ("softmax", {"attn_mask": BIAS}, "attn_mask must contain only 0 and -inf"),
        ("linear", {"key_padding_mask": BIAS[1:3]}, "key_padding_mask must contain only 0 and -inf"),
        ("linear", {"key_padding_mask": PADDING.long()}, "key_padding_mask must be bool, True where it hides"),
        ("linear", {"key_padding_mask": PADDING.T}, "key_padding_mask must be (2, 7), not (7, 2)"),
        ("linear", {"attn_mask": FUTURE[:3]}, "attn_mask must be (7, 7) or (6, 7, 7), not (3, 7)"),
        (
            "gla(expand_k=1.0)",
            {"is_causal": True},
            "gla has no attention matrix to return; call with need_weights=False",
        ),
        (
            "etc(globals=2, radius=3, clip=2)",
            {"is_causal": True},
            "has no causal form; call without is_causal",
        ),
        (
            "local(window=3)",
            {"key": X.clone(), "need_weights": False},
            "query, key and value must be the same tensor: local has no bidirectional cross attention",
        ),
        (
            "linear",
            {"key": X.clone(), "need_weights": False, "is_causal": True},
            "query, key and value must be the same tensor: linear has no causal cross attention",
        ),
    ],
)
def test_unsupported_calls_are_refused(spec, arguments, message):
    module = MultiheadAttention(E, H, batch_first=True, attention=spec)
    with pytest.raises(ValueError, match=re.escape(message)):
        module(**({"query": X, "key": X, "value": X} | arguments))


@pytest.mark.parametrize(
    "shapes",
    [((B, N, E), (B, 5, E), (B, 4, E)), ((B, N, 5), (B, N, E), (B, N, E)), ((N, E),) * 2 + ((B, N, E),), ((E,),) * 3],
)
def test_wrong_shapes_are_refused(shapes):
    module = MultiheadAttention(E, H, batch_first=True)
    with pytest.raises(ValueError, match=re.escape(f"query (B, L, {E}), key (B, S, {E}), value (B, S, {E})")):
        module(*(torch.zeros(shape) for shape in shapes))


@pytest.mark.whole
@pytest.mark.parametrize("spec", longspan.attention.list_mechanisms())
def test_a_mechanism_fits_or_the_refusal_names_what_works(spec):
    try:
        longspan.MultiheadAttention(12, 2, attention=spec)
        return
    except ValueError as error:
        message = str(error)
    found = re.search(r"attention='([^']*)' fits|(longspan\.build\(.*?\)) returns", message)
    assert found, message
    text, call = found.groups()
    if text:
        longspan.MultiheadAttention(12, 2, attention=text)
    else:
        attention = eval(call, {"longspan": longspan})
        assert attention(torch.randn(1, 12, 12))[0].shape == (1, 12, 12)
