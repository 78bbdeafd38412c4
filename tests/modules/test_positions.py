"""Positions by name: their identities, which attentions are exact for them, and models with each of them."""

import math

import pytest
import torch
from torch import nn

import longspan
from longspan import Decoder, DecoderConfig, Encoder, EncoderConfig, Seq2Seq, Seq2SeqConfig
from longspan.modules import positions
from longspan.modules.rotary import rotate
from longspan.modules.sinusoidal import sinusoid
from support.mechanisms import in_parts
from support.tensors import data

SMALL = {"dim": 16, "depth": 2, "heads": 2, "feedforward": 12, "vocab": 7, "length": 20}
TOKENS = torch.randint(0, 7, (2, 13), generator=torch.Generator().manual_seed(0))
EVERY = (
    "none",
    "sinusoidal",
    "sinusoidal(layout='halves')",
    "sinusoidal(layout='tensor2tensor', base=500.0)",
    "learned",
    "rotary",
    "rotary(layout='interleaved', base=30.0)",
    "relative",
    "relative(clamp=4)",
    "alibi",
)


class TestSinusoids:
    AT = torch.arange(40)[None]

    def test_interleaved_by_hand(self):
        (row,) = sinusoid(torch.tensor([[3]]), 4, torch.float64)[0]
        expected = [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]
        assert row.tolist() == pytest.approx(expected, abs=1e-12)

    def test_halves_are_the_same_in_another_order(self):
        for dim in (1, 6, 7):
            order = [*range(0, dim, 2), *range(1, dim, 2)]
            one, two = (sinusoid(self.AT, dim, torch.float64, layout=name) for name in ("interleaved", "halves"))
            assert torch.equal(one[..., order], two)

    def test_tensor2tensor_by_hand(self):
        """Wave lengths run from 2 pi to 2 pi base inclusive; an odd channel more is 0."""
        for dim in (6, 7):
            row = sinusoid(torch.tensor([[5]]), dim, torch.float64, layout="tensor2tensor")[0, 0]
            waves = [math.sin(5), math.sin(0.05), math.sin(5e-4), math.cos(5), math.cos(0.05), math.cos(5e-4)]
            assert row.tolist() == pytest.approx([*waves, *[0.0] * (dim - 6)], abs=1e-12)
        assert sinusoid(torch.tensor([[5]]), 2, torch.float64, layout="tensor2tensor").flatten().tolist() == (
            pytest.approx([math.sin(5), math.cos(5)])
        )

    @pytest.mark.parametrize("layout", ["interleaved", "halves", "tensor2tensor"])
    def test_norms_products_and_turns(self, layout):
        table = sinusoid(self.AT, 8, torch.float64, layout=layout, base=100.0)[0]
        torch.testing.assert_close(table.square().sum(-1), torch.full((40,), 4.0, dtype=torch.float64))
        products = table @ table.mT
        for k in (1, 7):
            # A product depends on the difference alone.
            torch.testing.assert_close(products.diagonal(k), products[0, k].expand(40 - k))
            # k further on is a rotation of each pair, the same everywhere.
            sines, cosines = (table[:, ::2], table[:, 1::2]) if layout == "interleaved" else table.split(4, -1)
            s, c = sines[k], cosines[k]
            torch.testing.assert_close(sines[k:], sines[: 40 - k] * c + cosines[: 40 - k] * s)


class TestRotary:
    def test_by_hand(self):
        """Position 1, base 4: the first pair turns by 1, the second by 1/2."""
        x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)[None, None, None]
        sin, cos, half = math.sin(1), math.cos(1), (math.sin(0.5), math.cos(0.5))
        (found,) = rotate(x, torch.tensor([[1]]), 4.0, "interleaved")[0, 0]
        expected = [cos - 2 * sin, sin + 2 * cos, 3 * half[1] - 4 * half[0], 3 * half[0] + 4 * half[1]]
        assert found.tolist() == pytest.approx(expected)
        (found,) = rotate(x, torch.tensor([[1]]), 4.0, "halves")[0, 0]
        expected = [cos - 3 * sin, 2 * half[1] - 4 * half[0], sin + 3 * cos, 2 * half[0] + 4 * half[1]]
        assert found.tolist() == pytest.approx(expected)

    @pytest.mark.parametrize("spec", ["softmax", "local(window=5)", "sparse(pattern='band(3)')", "retention"])
    def test_layouts_are_permutations_of_the_weights(self, spec):
        torch.manual_seed(0)
        one = longspan.build(spec, 16, 2, positions="rotary(layout='halves', base=30.0)").double()
        two = longspan.build(spec, 16, 2, positions="rotary(layout='interleaved', base=30.0)").double()
        # Channel c of an interleaved head was channel order[c] of halves.
        order = [c // 2 + 4 * (c % 2) for c in range(8)]
        order = [*order, *(8 + c for c in order)]
        weights = one.state_dict()
        for name in weights:
            if name.split(".")[0] in ("query", "key"):
                weights[name] = weights[name][order]
        two.load_state_dict(weights)
        x = data(2, 13, 16)
        torch.testing.assert_close(two(x)[0], one(x)[0], rtol=1e-12, atol=1e-12)
        two.load_state_dict(one.state_dict())
        assert not torch.allclose(two(x)[0], one(x)[0])


class TestBuilding:
    def test_what_a_mechanism_is_with_them(self):
        def built(spec, name):
            return longspan.build(spec, 16, 2, positions=name).spec

        assert built("softmax", "alibi") == built("alibi", "alibi") == "alibi"
        assert built("softmax", "relative(clamp=4)") == "relative(clamp=4)"
        assert built("relative(clamp=2)", "relative(clamp=4)") == "relative(clamp=2)"
        assert built("transformer_xl(memory=9)", "relative(clamp=4)") == "transformer_xl(memory=9, clamp=4)"
        assert built("compressive(memory=9)", "relative") == "compressive(memory=9)"
        assert built("linear", "rotary(base=7.0)") == "linear(rotary=7.0)"
        assert built("linear", "rotary(layout='interleaved', base=7)") == (
            "linear(rotary=7.0, rotary_layout='interleaved')"
        )
        # A base in the spec keeps the layout of the spec; with rotary=0.0 there are no rotary positions.
        assert built("linear(rotary=3.0)", "rotary(layout='interleaved')") == "linear(rotary=3.0)"
        assert built("retention(rotary=0.0)", "rotary") == "retention(rotary=0.0)"
        assert built("gla", "learned") == built("gla", "sinusoidal(layout='halves')") == built("gla", "none") == "gla"

    @pytest.mark.parametrize(
        ("spec", "name", "message"),
        [
            (
                "kernel",
                "rotary",
                "kernel has no rotary positions: .*: dsa, hedgehog, linear, local, moba, nsa, retention, softmax, ",
            ),
            (
                "linear",
                "alibi",
                "linear has no alibi positions: .*: alibi, softmax",
            ),
            (
                "linear",
                "relative",
                "linear has no relative positions: .*: compressive, relative, softmax, transformer_xl",
            ),
            ("local(window=5)", "relative", "local has no relative positions"),
            ("softmax(kv_heads=1)", "alibi", "softmax with alibi positions is alibi, .*'kv_heads'"),
            ("compressive", "relative(clamp=3)", "compressive with relative positions is compressive, .*'clamp'"),
            ("softmax", "rotary(layout='pairs')", "layout='pairs' must be 'halves' or 'interleaved'"),
            ("softmax", "rotary(base=0.0)", "rotary: base=0.0 must be positive"),
            ("softmax(rotary=9.0, rotary_layout='pairs')", "none", "unknown rotary_layout 'pairs'"),
            ("softmax(rotary_layout='interleaved')", "none", "rotary_layout='interleaved' .*rotary=0.0"),
        ],
    )
    def test_what_is_not_exact_is_refused(self, spec, name, message):
        with pytest.raises(ValueError, match=message):
            longspan.build(spec, 16, 2, positions=name)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("relativ", r"unknown positions 'relativ' \(did you mean 'relative'\?\)"),
            ("rotary(bas=3.0)", "rotary has no option 'bas' .did you mean 'base'.*; it has layout, base"),
            ("sinusoidal(layout='turned')", "layout='turned' must be 'interleaved' or 'halves' or 'tensor2tensor'"),
            ("sinusoidal(base=-1.0)", "sinusoidal: base=-1.0"),
            ("relative(clamp=-1)", "clamp=-1 must be positive, or 0"),
            ("'learned'", "known: alibi, learned"),
            ("learned(length=3)", "learned has no option 'length'"),
        ],
    )
    def test_wrong_specs(self, text, message):
        for kind in (DecoderConfig, EncoderConfig, Seq2SeqConfig):
            with pytest.raises(ValueError, match=message):
                kind(positions=text)

    def test_every_kind_is_tried(self):
        assert {positions.parse(name).kind for name in EVERY} == set(positions.POSITION_TYPES)

    def test_a_stack_with_an_attention_that_has_none(self):
        with pytest.raises(ValueError, match="gla has no alibi positions"):
            Decoder(DecoderConfig(attention="softmax; gla", positions="alibi"))
        with pytest.raises(ValueError, match="linear has no relative positions"):
            Seq2Seq(Seq2SeqConfig(attention="softmax", encoder_attention="linear", positions="relative"))


@pytest.mark.parametrize("name", EVERY)
class TestModels:
    def test_any_cut_gives_one_answer(self, name):
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(**SMALL, attention="softmax", positions=name)).double().eval()
        whole, _ = model(TOKENS)
        for cuts in ([1] * 13, [5, 8], [12, 1]):
            y, state = in_parts(model, TOKENS, cuts)
            torch.testing.assert_close(y, whole, atol=1e-10, rtol=0)
            assert state.position.tolist() == [13, 13]

    def test_an_encoder_depends_on_the_order(self, name):
        torch.manual_seed(0)
        model = Encoder(EncoderConfig(**SMALL, attention="softmax", positions=name)).double().eval()
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
        turned = model(TOKENS.flip(1)).flip(1)
        assert torch.allclose(turned, model(TOKENS), atol=1e-9) == (name in ("none", "alibi"))
        # Distances without a sign ignore which token comes first, but not which tokens are adjacent.
        order = torch.tensor([1, 0, *range(2, 13)])
        mixed = model(TOKENS[:, order])[:, order]
        assert torch.allclose(mixed, model(TOKENS), atol=1e-9) == (name == "none")

    def test_a_pair_of_encoder_and_decoder(self, name):
        torch.manual_seed(0)
        config = Seq2SeqConfig(**SMALL, attention="softmax", encoder_attention="softmax", positions=name)
        model = Seq2Seq(config).double().eval()
        whole = model(TOKENS, TOKENS[:, :6])
        state, outputs = model.init_state(TOKENS), []
        for part in TOKENS[:, :6].split(1, 1):
            y, state = model.step(part, state)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-10, rtol=0)

    def test_saved_and_loaded(self, name, tmp_path):
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(**SMALL, attention="softmax", positions=name)).eval()
        longspan.save(model, tmp_path / "m")
        again = longspan.load(tmp_path / "m")
        assert again.config.positions == name
        assert torch.equal(again(TOKENS)[0], model(TOKENS)[0])


def test_the_engine_does_not_serve_interleaved_pairs():
    model = Decoder(DecoderConfig(**SMALL, attention="linear", positions="rotary(layout='interleaved')")).eval()
    assert (
        "stack.blocks.0.attention rotates interleaved pairs of channels"
        in longspan.generation.native_decoder.Engine.why_not(model)
    )
