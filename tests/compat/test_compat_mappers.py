"""Weights from other libraries and to longspan's own models; events."""

import os
import pickle

import pytest
import torch
from torch import nn

import longspan
from longspan.compat.fast_transformers import weight_mapper as w
from longspan.compat.fast_transformers.builders import (
    RecurrentEncoderBuilder,
    TransformerDecoderBuilder,
    TransformerEncoderBuilder,
)
from longspan.compat.fast_transformers.events import (
    AttentionEvent,
    Event,
    EventDispatcher,
    IntermediateOutput,
    QKVEvent,
    filters,
)
from longspan.compat.fast_transformers.feature_maps import Favor
from longspan.compat.fast_transformers.masking import LengthMask, TriangularCausalMask
from longspan.compat.native import to_native

N, L = 3, 13
SIZES = {"n_layers": 2, "n_heads": 3, "query_dimensions": 4, "value_dimensions": 4, "feed_forward_dimensions": 7}


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


def encoder(cls=TransformerEncoderBuilder, **options):
    return cls.from_kwargs(**{**SIZES, **options}).get().eval()


def scattered(model: nn.Module, random):
    """Norms and biases count only where they are not what they start as."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random) * 0.1)
    return model


def close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


# Weight mappers


@torch.no_grad()
def test_a_torch_encoder_gives_the_same_outputs(random, tmp_path):
    layer = nn.TransformerEncoderLayer(12, 3, 7, activation="gelu", batch_first=True)
    norm = nn.LayerNorm(12)
    theirs = scattered(nn.TransformerEncoder(layer, 2, norm=norm, enable_nested_tensor=False), random).eval()
    x, lengths = torch.randn(N, L, 12, generator=random), LengthMask(torch.tensor([13, 2, 7]))
    ours = encoder(activation="gelu")
    ours.load_state_dict(w.PytorchMapper().map(theirs.state_dict()))
    close(ours(x), theirs(x))
    real = lengths.bool_matrix
    close(ours(x, length_mask=lengths)[real], theirs(x, src_key_padding_mask=~real)[real])
    torch.save({"model": theirs.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pt")
    found = w.PytorchMapper.load_file(tmp_path / "checkpoint.pt", model_root="model", weights_only=True)
    assert found["epoch"] == 3
    ours.load_state_dict(found["model"])
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    assert w.PytorchMapper.load_file(tmp_path / "weights.pt").keys() == found["model"].keys()


@torch.no_grad()
def test_a_bert_encoder_gives_the_same_outputs(random):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 7}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=11, layer_norm_eps=1e-5, **sizes))
    theirs, x = scattered(bert, random).eval().encoder, torch.randn(N, L, 12, generator=random)
    ours = encoder(activation="gelu", final_normalization=False)
    for _ in range(2):
        ours.load_state_dict(w.HugginfaceBertEncoderMapper().map(theirs.state_dict()))
    close(ours(x), theirs(x).last_hidden_state)


@torch.no_grad()
def test_a_longformer_encoder_gives_the_same_outputs(random):
    """Its window of 4 is two tokens to each side and the token itself: a local_context of 5."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 7}
    config = transformers.LongformerConfig(vocab_size=11, attention_window=[4, 4], layer_norm_eps=1e-5, **sizes)
    theirs = scattered(transformers.LongformerModel(config), random).eval().encoder
    x = torch.randn(N, 16, 12, generator=random)
    ours = encoder(activation="gelu", final_normalization=False, attention_type="local", local_context=5)
    # In either order: a mapper leaves nothing behind in the other.
    w.HugginfaceBertEncoderMapper()
    ours.load_state_dict(w.LongformerMapper().map(theirs.state_dict()))
    close(ours(x), theirs(x, attention_mask=torch.zeros(N, 16)).last_hidden_state)


def test_rules_rename_split_and_drop():
    one, two = torch.zeros(1), torch.ones(1)
    state = {"a.x": one, "b.x": two}
    assert w.SimpleMapper().map(state) == state
    assert w.SimpleMapper([w.RegexRule("^a", "c")]).map(state) == {"c.x": one, "b.x": two}
    assert w.SimpleMapper([w.RegexRule("^a", "c")], add_identity=False).map(state) == {"c.x": one}
    assert w.SimpleMapper([w.NotRule(w.RegexRule("^a", ""))], add_identity=False).map(state) == {"b.x": two}
    both = w.OrRule(w.RegexRule("^a", "b"), w.RegexRule("^b", "c"))
    assert w.SimpleMapper([both], add_identity=False).map({**state, "d": one}) == {"c.x": two}
    assert both.apply("a.x", one) == [("c.x", one)]
    rules = [w.RegexRule("^a", "c")]
    w.SimpleMapper(rules)
    assert len(rules) == 1
    with pytest.raises(NotImplementedError, match=r"MappingRule.*matches"):
        w.MappingRule().matches("a")
    with pytest.raises(NotImplementedError, match=r"MappingRule.*apply"):
        w.MappingRule().apply("a", one)


# To longspan's own models


@pytest.mark.parametrize(
    ("options", "causal"),
    [
        ({"attention_type": "linear", "eps": 0.01}, False),
        ({"attention_type": "causal-linear", "final_normalization": False}, True),
        ({"attention_type": "full", "activation": "gelu"}, False),
        ({"attention_type": "full"}, True),
    ],
)
@torch.no_grad()
def test_a_native_stack_gives_the_same_outputs(options, causal, random):
    ours = scattered(encoder(**options), random)
    stack = to_native(ours, causal=causal)
    assert isinstance(stack, longspan.Stack)
    assert not stack.training
    x, lengths = torch.randn(N, L, 12, generator=random), LengthMask(torch.tensor([13, 2, 7]))
    attn, real = TriangularCausalMask(L) if causal else None, lengths.bool_matrix
    close(stack(x)[0], ours(x, attn))
    close(stack(x, mask=real)[0][real], ours(x, attn, lengths)[real])
    ours.layers[0].linear1.weight.zero_()
    assert not (stack.blocks[0].feedforward.expand.weight == 0).any()


@pytest.mark.parametrize("kind", ["linear", "full"])
@torch.no_grad()
def test_a_native_stack_continues_as_the_recurrent_encoder_does(kind, random):
    ours = scattered(encoder(RecurrentEncoderBuilder, attention_type=kind), random)
    stack = to_native(ours, causal=True)
    x, theirs, state = torch.randn(N, L, 12, generator=random), None, None
    prompt, native = stack(x[:, :-1], stack.init_state(N))
    for t in range(L):
        theirs, state = ours(x[:, t], state)
    close(stack(x[:, -1:], native)[0][:, 0], theirs)
    assert prompt.shape == (N, L - 1, 12)


def test_a_stack_of_different_layers_keeps_their_order():
    ours = encoder(attention_type="full", attention_dropout=0.2).double().train()
    ours.layers[1] = encoder(attention_type="linear", eps=0.5).layers[1].double()
    stack = to_native(ours, causal=False)
    assert [attention.spec for attention in stack.attentions()] == ["softmax(dropout=0.2)", "linear(eps=0.5)"]
    assert stack.training
    assert stack.norm.weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("builder", "kind", "causal"),
    [
        (TransformerEncoderBuilder, "linear", False),
        (TransformerEncoderBuilder, "causal-linear", True),
        (RecurrentEncoderBuilder, "linear", True),
    ],
)
def test_eps_and_dropout_go_along(builder, kind, causal):
    stack = to_native(encoder(builder, attention_type=kind, eps=0.25, dropout=0.375), causal=causal)
    assert [attention.spec for attention in stack.attentions()] == 2 * ["linear(eps=0.25)"]
    assert [block.dropout.p for block in stack.blocks] == 2 * [0.375]


@pytest.mark.parametrize(
    ("options", "causal", "message"),
    [
        ({"attention_type": "linear"}, True, "LinearAttention.*causal=True"),
        ({"attention_type": "causal-linear"}, False, "CausalLinearAttention.*causal=False"),
        ({"attention_type": "linear", "feature_map": Favor.factory()}, False, r"elu\(x\) \+ 1"),
        ({"softmax_temp": 0.5}, False, "softmax_temp=0.5"),
        ({"query_dimensions": 5}, False, r"\[12, 15\].*dim=12"),
        ({"attention_type": "local", "local_context": 3}, False, "LocalAttention"),
    ],
)
def test_what_a_stack_cannot_be_is_refused(options, causal, message):
    with pytest.raises(ValueError, match=message):
        to_native(encoder(**options), causal=causal)


def test_what_is_no_encoder_is_refused():
    decoder = TransformerDecoderBuilder.from_kwargs(**SIZES).get()
    with pytest.raises(ValueError, match="TransformerDecoder"):
        to_native(decoder, causal=True)
    with pytest.raises(ValueError, match="RecurrentFullAttention.*causal=False"):
        to_native(encoder(RecurrentEncoderBuilder), causal=False)
    other = encoder()
    other.layers[1] = nn.Identity()
    with pytest.raises(ValueError, match="Identity"):
        to_native(other, causal=False)
    for layer in (other := encoder()).layers:
        layer.activation = torch.tanh
    with pytest.raises(ValueError, match="'tanh'.*relu.*gelu"):
        to_native(other, causal=False)


# Events


def listening(*pairs):
    """A dispatcher, and what its handlers heard."""
    dispatcher, heard = EventDispatcher(), []
    for i, condition in enumerate(pairs):
        dispatcher.listen(condition, lambda event, i=i: heard.append((i, event)))
    return dispatcher, heard


@torch.no_grad()
def test_layers_tell_queries_matrices_and_outputs(random):
    dispatcher, heard = listening(QKVEvent, AttentionEvent, IntermediateOutput)
    model = encoder(event_dispatcher=dispatcher)
    silent = encoder()
    silent.load_state_dict(model.state_dict())
    x, lengths = torch.randn(N, L, 12, generator=random), LengthMask(torch.tensor([13, 0, 7]))
    y = model(x, TriangularCausalMask(L), lengths)
    close(y, silent(x, TriangularCausalMask(L), lengths))
    assert [i for i, _ in heard] == [0, 1, 2] * 2
    (_, projected), (_, matrix), (_, output), *_ = heard
    assert projected.source is model.layers[0].attention
    assert [tuple(t.shape) for t in (projected.queries, projected.keys, projected.values)] == [(N, L, 3, 4)] * 3
    assert matrix.source is model.layers[0].attention.inner_attention
    weights = matrix.attention_matrix
    seen = torch.ones(L, L, dtype=torch.bool).tril() & lengths.bool_matrix[:, None, None, :]
    assert torch.equal(weights > 0, seen.expand_as(weights))
    close(weights.sum(-1), seen.any(-1).expand(N, 3, L).float())
    assert output.source is model
    assert output.x.shape == (N, L, 12)
    assert not torch.equal(output.x, y)


def test_filters_combine():
    model = nn.ModuleDict({"first": nn.Linear(1, 1), "second": nn.Linear(1, 1)})
    first, second = QKVEvent(model["first"], *[torch.zeros(1)] * 3), Event(model["second"])
    outside = Event(nn.Identity())
    named = filters.layer_name_contains(model, "first")
    cases = {
        named: [True, False, False],
        ~named: [False, True, True],
        QKVEvent & named: [True, False, False],
        named & QKVEvent: [True, False, False],
        AttentionEvent | named: [True, False, False],
        named | filters.from_layer(model["second"]): [True, True, False],
        named | (lambda event: event is outside): [True, False, True],
        (lambda event: event is outside) | named: [True, False, True],
        (lambda event: True) & ~named: [False, True, True],
        filters.event_class(QKVEvent): [True, False, False],
    }
    for condition, expected in cases.items():
        assert [bool(condition(event)) for event in (first, second, outside)] == expected
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = named & 3
    with pytest.raises(ValueError, match="Event class.*not 3"):
        EventDispatcher().listen(3, print)
    with pytest.raises(NotImplementedError, match="EventFilter.*__call__"):
        filters.EventFilter()(first)


def test_handlers_come_and_go():
    dispatcher, heard = EventDispatcher(), []

    def handler(event):
        heard.append(event)
        dispatcher.remove(handler)

    event = Event(nn.Identity())
    assert not dispatcher.listening
    dispatcher.listen(QKVEvent, handler)
    dispatcher.dispatch(event)
    dispatcher.listen(Event, handler)  # a handler has one filter, the latest
    dispatcher.dispatch(event)
    dispatcher.dispatch(event)
    assert heard == [event]
    dispatcher.remove(handler)
    dispatcher.listen(Event, handler)
    dispatcher.clear()
    dispatcher.dispatch(event)
    assert heard == [event]


def test_a_file_runs_no_code_unless_that_is_asked_for(tmp_path, monkeypatch):
    torch.save({"model": Planted(tmp_path / "owned")}, tmp_path / "a.pt")
    # This turns torch's default round, without other settings.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(pickle.UnpicklingError):
        w.SimpleMapper.load_file(tmp_path / "a.pt")
    assert not (tmp_path / "owned").exists()
    w.SimpleMapper.load_file(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "owned").exists()


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)
