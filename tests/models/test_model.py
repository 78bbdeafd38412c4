"""Stacks, decoders and encoders: shapes, options, positions, errors."""

import pytest
import torch
from torch import nn

from longspan import testing
from longspan.models import decoder as module
from longspan.models.config import ACTIVATIONS, DecoderConfig, EncoderConfig, StackConfig
from longspan.models.decoder import Decoder
from longspan.models.encoder import Encoder
from longspan.models.stacks import Stack
from longspan.testing.pairs import all_pairs

POSITIONS = ("none", "sinusoidal", "learned", "rotary")
NORMS = ("layer", "rms", "rms(eps=0.01)")
SMALL = {"dim": 8, "depth": 2, "heads": 2, "feedforward": 12}
TOKENS = torch.randint(0, 7, (2, 13), generator=torch.Generator().manual_seed(0))


def decoder(**fields):
    torch.manual_seed(0)
    return Decoder(DecoderConfig(**SMALL | {"vocab": 7, "length": 20} | fields)).double().eval()


@pytest.mark.parametrize("fields", all_pairs(prenorm=(True, False), norm=NORMS, activation=tuple(ACTIVATIONS)), ids=str)
def test_every_kind_of_block_learns(fields):
    model = decoder(**fields, dropout=0.1).train()
    outputs, _ = model(model.shift(TOKENS))
    (-model.likelihood.log_prob(outputs, TOKENS).mean()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_post_norm_normalizes_after_the_sum():
    config = StackConfig(**SMALL, prenorm=False)
    torch.manual_seed(0)
    stack = Stack(config)
    y, _ = stack(torch.randn(2, 13, 8))
    torch.testing.assert_close(y.mean(-1), torch.zeros(2, 13), atol=1e-5, rtol=0)
    assert isinstance(stack.norm, nn.Identity)


def test_specs_are_tiled_over_the_depth():
    stack = Stack(StackConfig(**SMALL | {"depth": 5}, attention="linear; linear(eps=0.5); softmax"))
    assert [a.spec for a in stack.attentions()] == ["linear", "linear(eps=0.5)", "softmax", "linear", "linear(eps=0.5)"]


def test_tied_embeddings_are_one_matrix():
    model = decoder(tied=True)
    assert not any(name.startswith("head") for name in model.state_dict())
    assert model.head.weight is model.embedding.tokens.weight
    torch.testing.assert_close(model(TOKENS)[0].shape, torch.Size([2, 13, 7]))
    hidden = model.stack(model.embedding(TOKENS)[0])[0]
    torch.testing.assert_close(model(TOKENS)[0], hidden @ model.embedding.tokens.weight[:7].T)


@pytest.mark.parametrize("fields", [{}, {"tied": True}, {"likelihood": "logistics(mixtures=2)"}])
@pytest.mark.parametrize("large", [0, module.LARGE])
def test_targets_give_their_log_probabilities(fields, large, monkeypatch):
    model, inputs = decoder(**fields), TOKENS.roll(1, 1)
    monkeypatch.setattr(module, "LARGE", large)
    expected = model.likelihood.log_prob(model(inputs)[0], TOKENS)
    found, state = model(inputs, targets=TOKENS)
    assert state is None
    torch.testing.assert_close(found, expected.to(found.dtype), atol=1e-12, rtol=0)
    weights = list(model.parameters())
    for a, b in zip(*(torch.autograd.grad(t.sum(), weights) for t in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)
    with pytest.raises(ValueError, match=r"targets must be in 0 \.\.\. 6, not 0 \.\.\. 7"):
        model(inputs, targets=(TOKENS == 3) * 7)


def test_the_start_token_stands_in_front():
    model = decoder()
    assert model.shift(torch.tensor([[3, 4, 5]])).tolist() == [[7, 3, 4]]
    assert model.shift(TOKENS[:, :0]).shape == (2, 0)


def test_packed_rows_equal_separate_ones():
    for positions in POSITIONS:
        model = decoder(positions=positions, attention="linear; softmax")
        segments = torch.tensor([[0] * 5 + [1] * 8, [0] * 13])
        y, _ = model(TOKENS, segments=segments)
        torch.testing.assert_close(y[:1, 5:], model(TOKENS[:1, 5:])[0], atol=1e-10, rtol=0)


def test_weights_into_the_residual_begin_smaller_by_the_root_of_their_number():
    for name, weight in Decoder(DecoderConfig(dim=96, depth=8, heads=2, feedforward=96, vocab=300)).named_parameters():
        if name.endswith("bias") or "norm" in name:
            assert (weight == float(name.endswith("weight"))).all()
            continue
        residual = name.endswith(("attention.out.weight", "feedforward.contract.weight"))
        assert weight.std().item() == pytest.approx(0.02 / (4 if residual else 1), rel=0.05)


def test_dropout_is_seeded_and_for_training_only():
    model = decoder(dropout=0.5)
    assert torch.equal(model(TOKENS)[0], model(TOKENS)[0])
    model.train()
    torch.manual_seed(1)
    first = model(TOKENS)[0]
    assert not torch.equal(model(TOKENS)[0], first)
    torch.manual_seed(1)
    assert torch.equal(model(TOKENS)[0], first)


class TestEncoder:
    def test_sees_both_ways_and_is_equivariant_without_positions(self):
        torch.manual_seed(0)
        model = Encoder(EncoderConfig(**SMALL, positions="none")).double().eval()
        x, order = torch.randn(2, 13, 8, dtype=torch.float64), torch.randperm(13)
        torch.testing.assert_close(model(x[:, order]), model(x)[:, order], atol=1e-10, rtol=0)

    @pytest.mark.parametrize("positions", POSITIONS)
    def test_pools_real_tokens_only(self, positions):
        torch.manual_seed(0)
        config = EncoderConfig(**SMALL, vocab=7, outputs=3, pool="mean", positions=positions, length=20)
        model = Encoder(config).double().eval()
        mask = torch.arange(13).expand(2, -1) < torch.tensor([[13], [6]])
        y = model(TOKENS, mask=mask)
        assert y.shape == (2, 3)
        torch.testing.assert_close(y[1:], model(TOKENS[1:, :6]), atol=1e-10, rtol=0)


LONG, VECTORS = torch.zeros(1, 21, dtype=torch.long), torch.zeros(2, 3, 8).double()


def after(model, count):
    """The state after the first ``count`` tokens."""
    with torch.no_grad():
        return model(LONG[:, :count], model.init_state(1))[1]


# A call of a decoder, or of an encoder of vectors or of tokens, and the message.
REFUSED = [
    (lambda d, *_: d(torch.zeros(2, 3)), r"tokens must be int64 \(B, N\), not torch.float32 \(2, 3\)"),
    (lambda d, *_: d(LONG[0, :3]), r"tokens must be int64 \(B, N\), not torch.int64 \(3,\)"),
    (lambda d, *_: d([[1]]), "tokens must be int64 .* not list"),
    (lambda d, *_: d(torch.tensor([[-1, 3]])), "tokens .* -1 to 3; .* 0 to 7"),
    (lambda d, *_: d(LONG), "position 20 is beyond the table of 20 learned positions"),
    (lambda d, *_: d(LONG[:, :1], after(d, 20)), "position 20 is beyond the table of 20 learned positions"),
    (lambda d, *_: d(TOKENS, (1, 2)), "DecoderState, not tuple"),
    (
        lambda d, *_: d.stack(VECTORS, d.init_state(2).layers[:1]),
        "the state of this stack .* a tuple of 2 states, not 1",
    ),
    (lambda d, *_: d(TOKENS, mask=torch.ones(2, 12) > 0), r"mask must be bool \(2, 13\)"),
    (lambda d, *_: d.stack(VECTORS, mask=torch.ones(2, 2) > 0), r"mask must be bool \(2, 3\)"),
    (lambda *_: decoder(attention="kernel", positions="rotary"), "kernel has no rotary positions"),
    (
        lambda _, e, p: e(VECTORS[..., :7].float()),
        r"x must be floating-point \(B, N, 8\), not torch.float32 \(2, 3, 7\)",
    ),
    (lambda _, e, p: p(TOKENS, segments=torch.zeros_like(TOKENS)), "pool=.* segments="),
    (lambda _, e, p: p(torch.tensor([[0, 7]])), "tokens .* 0 to 7; .* 0 to 6"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_wrong_calls_are_refused(call, message):
    vectors, pooled = Encoder(EncoderConfig(**SMALL)), Encoder(EncoderConfig(**SMALL, vocab=7, pool="mean"))
    with pytest.raises(ValueError, match=message):
        call(decoder(), vectors, pooled)


@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("pool", ["none", "mean"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_what_a_masked_vector_holds_moves_nothing(prenorm, pool, positions):
    torch.manual_seed(0)
    config = EncoderConfig(**SMALL, positions=positions, length=20, pool=pool, prenorm=prenorm, outputs=3)
    model = Encoder(config).double()
    vectors = torch.randn(2, 13, 8, dtype=torch.float64)
    mask = torch.arange(13) < torch.tensor([[13], [9]])

    def outcome(vectors):
        vectors = vectors.clone().requires_grad_()
        y = model(vectors, mask=mask)
        return [y, *torch.autograd.grad(y.square().sum(), [vectors, *model.parameters()])]

    for value in (float("nan"), float("inf"), 1e300):
        spoilt = outcome(vectors.masked_fill(~mask[..., None], value))
        torch.testing.assert_close(spoilt, outcome(vectors), atol=0, rtol=0)
        assert not spoilt[1][~mask].any()


@pytest.mark.parametrize("kind", ["realformer", "etc(globals=3, radius=5, clip=2)"])
def test_what_a_masked_token_holds_is_not_handed_on(kind):
    row = testing.check("content", f"{kind}; {kind}")
    assert row.status == "passed", row.note
