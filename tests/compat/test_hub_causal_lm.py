"""A decoder in transformers: the decoder's own numbers, and generation as longspan's own, whatever the padding."""

import copy
from typing import Any

import pytest
import torch

import longspan
from longspan import Decoder, DecoderConfig
from longspan.models import checkpoint
from longspan.modules.quantized import Quantized

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, TextStreamer
from transformers.utils import logging

import fla_laws
import hybrids
from longspan.compat.fla import models as fla
from longspan.compat.transformers import LongspanCache, LongspanConfig, LongspanForCausalLM
from longspan.compat.transformers.cache import NAME
from longspan.compat.transformers.tokens import read
from longspan.generation.native_decoder import Engine

logging.set_verbosity_error()
logging.disable_progress_bar()

SPECS = ("gated_deltanet; softmax", "linear", "retention; local(window=5)")
START = 11


def model(spec: str = SPECS[0], **options) -> LongspanForCausalLM:
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 2, "heads": 2, "feedforward": 32, "vocab": START, "positions": "none"}
    return LongspanForCausalLM(LongspanConfig(attention=spec, **{**sizes, **options})).eval()


def ids(batch: int, n: int) -> torch.Tensor:
    return torch.randint(START, (batch, n), generator=torch.Generator().manual_seed(1))


def started(tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([tokens.new_full((len(tokens), 1), START), tokens], 1)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("positions", ["learned", "none"])
def test_logits_are_the_decoders(spec, positions):
    lm, tokens = model(spec, positions=positions), ids(3, 13)
    outputs, _ = lm.decoder(started(tokens))
    for cached in (False, True):
        assert torch.equal(lm(tokens, use_cache=False).logits, outputs[:, 1:])
        # A start token of the caller's own takes the place of ours.
        assert torch.allclose(lm(started(tokens), use_cache=cached).logits, outputs, atol=1e-6)


def test_logits_of_another_likelihood_are_its_logarithms():
    lm, tokens = model(likelihood="logistics(mixtures=2)"), ids(2, 5)
    outputs, _ = lm.decoder(started(tokens))
    assert torch.equal(lm(tokens, use_cache=False).logits, lm.decoder.likelihood.log_probs(outputs)[:, 1:])


@pytest.mark.parametrize("spec", SPECS)
def test_greedy_is_our_greedy(spec):
    lm, tokens = model(spec), ids(3, 7)
    drawn = longspan.generate(lm.decoder, tokens, max_new_tokens=23, temperature=0)
    for cached in (True, False):
        found = lm.generate(tokens, max_new_tokens=23, do_sample=False, use_cache=cached)
        assert torch.equal(found, torch.cat([tokens, drawn], 1))


@pytest.mark.parametrize("spec", SPECS)
def test_beams_are_our_beams(spec):
    lm, tokens = model(spec), ids(2, 7)
    options: Any = {"max_new_tokens": 11, "num_beams": 3, "num_return_sequences": 3, "do_sample": False}
    found = lm.generate(tokens, **options, length_penalty=0.0, early_stopping="never")
    ours = longspan.beam_search(lm.decoder, tokens, max_new_tokens=11, beams=3, best=3)
    assert torch.equal(found[:, 7:], ours.tokens.flatten(0, 1))
    # A cache that stays as it was would follow the first beams for ever.
    assert len({tuple(row) for row in ours.tokens[0].tolist()}) == 3


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("positions", ["learned", "none"])
def test_left_padding_changes_nothing(spec, positions):
    lm, tokens = model(spec, positions=positions), ids(1, 7)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), tokens], 1)
    rows = torch.cat([padded, ids(2, 11)[1:]])
    mask = torch.ones_like(rows)
    mask[0, :4] = 0
    alone = lm(tokens).logits
    assert torch.allclose(lm(rows, attention_mask=mask).logits[:1, 4:], alone, atol=1e-6)
    found = lm.generate(rows, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(found[:1, 4:], lm.generate(tokens, max_new_tokens=12, do_sample=False))
    beams = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    found = lm.generate(rows, attention_mask=mask, **beams)
    assert torch.equal(found[:1, 4:], lm.generate(tokens, **beams))


def test_rows_with_and_without_the_start_token_in_one_batch():
    lm, tokens = model(), ids(2, 6)
    mixed = torch.cat([started(tokens[:1, :5]), tokens[1:]])
    found = lm(mixed).logits
    assert torch.allclose(found[:1, 1:], lm(tokens[:1, :5]).logits, atol=1e-6)
    assert torch.allclose(found[1:], lm(tokens[1:]).logits, atol=1e-6)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("spec", SPECS[:2])
@pytest.mark.parametrize("begin", [0, 2])
def test_packed_rows_are_separate_runs(spec, explicit, begin):
    lm, lengths = model(spec, positions="learned"), (4, 1, 6)
    parts = [ids(1, n) if not explicit else started(ids(1, n))[:, :n] for n in lengths]
    at = torch.cat([torch.arange(n) + begin for n in lengths])[None]
    packed = lm(torch.cat(parts, 1), position_ids=at, use_cache=False).logits
    alone = torch.cat([lm(part, use_cache=False).logits for part in parts], 1)
    assert torch.allclose(packed, alone, atol=1e-6)
    # And what goes on from a cache belongs to the last one.
    cache = lm(torch.cat(parts, 1), position_ids=at).past_key_values
    more = lm(ids(1, 3), past_key_values=cache).logits
    assert torch.allclose(more, lm(torch.cat([parts[-1], ids(1, 3)], 1)).logits[:, -3:], atol=1e-6)


def test_packed_rows_of_a_batch_differ_in_their_number_of_sequences():
    lm, tokens = model(), ids(2, 6)
    at = torch.tensor([[0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5]])
    found = lm(tokens, position_ids=at, use_cache=False).logits
    pairs = lm(tokens[0].view(3, 2), use_cache=False).logits
    assert torch.allclose(found[0], pairs.flatten(0, 1), atol=1e-6)
    assert torch.allclose(found[1:], lm(tokens[1:], use_cache=False).logits, atol=1e-6)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_position_ids_are_borders_alone(positions):
    lm, tokens = model(positions=positions), ids(2, 6)
    wanted = lm(tokens, use_cache=False).logits
    assert torch.equal(lm(tokens, position_ids=torch.arange(7, 13)[None], use_cache=False).logits, wanted)


def test_positions_go_on_with_a_cache_or_begin_again():
    """As they are numbered from 2 on; the smallest number of a part begins a sequence only where they go back to it."""
    mine, begun = {"mask": None, "begun": torch.tensor([True])}, torch.tensor([[3, 4, 5, 6, 7]])
    on = read(begun, 9, positions=torch.tensor([[6, 7, 8, 9, 10]]), **mine)
    assert (on.tokens.tolist(), on.segments) == (begun.tolist(), None)
    again = read(begun, 9, positions=torch.tensor([[6, 7, 2, 3, 2]]), **mine)
    assert again.tokens.tolist() == [[3, 4, 9, 5, 6, 9, 7]]
    with pytest.raises(ValueError, match="from 7 to 3 in row 0; .* 2"):
        read(begun, 9, positions=torch.tensor([[6, 7, 3, 2, 3]]), **mine)


def test_reading_by_hand():
    mask = torch.tensor([[False, True, True, True]])
    found = read(torch.tensor([[0, 3, 4, 5]]), 9, mask=mask, positions=torch.tensor([[0, 0, 1, 0]]), begun=None)
    assert found.tokens.tolist() == [[0, 9, 3, 4, 9, 5]]
    assert found.mask is not None
    assert found.mask.tolist() == [[False, True, True, True, True, True]]
    assert found.segments is not None
    assert found.segments.tolist() == [[0, 1, 1, 1, 2, 2]]
    assert isinstance(found.places, torch.Tensor)
    assert found.places.tolist() == [[0, 2, 3, 5]]


def test_a_cache_goes_on_in_any_cut_and_copies_stand_alone():
    lm, tokens = model(), ids(2, 12)
    whole = lm(tokens, use_cache=False).logits
    with torch.no_grad():
        first = lm(tokens[:, :5])
        cache = first.past_key_values
        copied = copy.deepcopy(cache)
        rest = [lm(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(5, 12)]
        again = lm(tokens[:, 5:], past_key_values=copied).logits
    assert torch.allclose(torch.cat([first.logits, *rest], 1), whole, atol=1e-5)
    assert torch.allclose(again, whole[:, 5:], atol=1e-5)
    assert cache.get_seq_length() == 12
    with pytest.raises(ValueError, match="copy.deepcopy"):
        cache.crop(1)
    cache.batch_repeat_interleave(2)
    assert len(cache.state.position) == 4
    cache.reset()
    assert cache.get_seq_length() == 0


DRAFTS = {
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "itself": {"assistant_model": model()},
    "another": {"assistant_model": model("linear")},
}


@pytest.mark.skipif(NAME != "cache", reason="before transformers 5.24, generate undoes drafts in another way")
@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_leave_the_logits_of_the_decode_engine(draft):
    """To the bit, and the text of a generation without drafts."""
    lm, tokens = model(), ids(1, 7).repeat(1, 3)
    options: Any = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    found = lm.generate(tokens, **options, **DRAFTS[draft])
    assert torch.equal(found.sequences, lm.generate(tokens, **options).sequences)
    engine, text = Engine(lm.decoder), found.sequences
    with torch.no_grad():
        _, state = lm.decoder(started(tokens[:, :-1]), lm.decoder.init_state(1))
    for token, logits in zip(text[:, 20:-1].split(1, 1), found.logits, strict=True):
        outputs, state = engine(token, state)
        assert torch.equal(outputs[:, 0], logits)


@pytest.mark.skipif(NAME != "cache", reason="before transformers 5.24, generate undoes drafts in another way")
@torch.no_grad()
def test_a_cropped_cache_is_that_of_the_tokens_that_remain():
    """Part of a call, all of it, several calls, part of several, all of the text."""
    lm, cache, text = model(), LongspanCache(), torch.zeros(1, 0, dtype=torch.long)
    cache.activate_past_recording()
    calls = (9, 1), (5, 5), (1, 0), (3, None), (1, 4), (2, None), (3, 4), (7, 2), (2, 17), (1, 1), (4, 0)
    for new, undone in calls:
        part = ids(1, 20)[:, :new]
        logits, text = lm(part, cache=cache).logits, torch.cat([text, part], 1)
        assert torch.allclose(logits, lm(text, use_cache=False).logits[:, -new:], atol=1e-5)
        if undone is not None:
            assert cache.is_croppable
            cache.crop(-undone)
            text = text[:, : text.shape[1] - undone]
        assert cache.get_seq_length() == text.shape[1]
    with pytest.raises(ValueError, match=r"crop\(-2\) cannot undo tokens; it takes 0 to -0"):
        cache.crop(-2)


@pytest.mark.skipif(NAME != "cache", reason="before transformers 5.24, generate undoes drafts in another way")
def test_drafts_for_a_model_without_the_decode_engine_are_refused():
    with pytest.raises(ValueError, match="only the decode engine can read drafts, .* is a Local"):
        model("local(window=5)").generate(ids(1, 9), max_new_tokens=2, prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_goes_on_from_what_a_cache_has_read(beams):
    lm, tokens = model(), ids(2, 9)
    cache = LongspanCache()
    for part in (tokens[:, :3], tokens[:, 3:7]):
        lm(part, cache=cache)
    if beams > 1:
        cache.batch_repeat_interleave(beams)
    options: Any = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    assert torch.equal(lm.generate(tokens, **{NAME: cache}, **options), lm.generate(tokens, **options))
    # Nothing was read twice; the last token drawn is not read.
    assert cache.get_seq_length() == 9 + 8 - 1


def test_chunked_prefill_of_a_padded_row_puts_the_start_token_where_the_row_begins():
    lm, tokens = model(), ids(1, 7)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    cache = LongspanCache()
    lm(tokens[:, :2], attention_mask=mask[:, :2], past_key_values=cache)
    found = lm(tokens[:, 2:], attention_mask=mask, past_key_values=cache).logits
    assert torch.allclose(found[:, 1:], lm(tokens[:, 3:]).logits, atol=1e-6)


def test_saved_and_loaded_by_the_auto_classes(tmp_path):
    lm = model("gated_deltanet(key_heads=1); softmax", tied=True)
    lm.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is LongspanForCausalLM
    assert AutoConfig.from_pretrained(tmp_path).native() == lm.decoder.config
    assert list(again.state_dict()) == list(lm.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), lm.state_dict().values(), strict=True))
    assert torch.equal(again(ids(2, 5)).logits, lm(ids(2, 5)).logits)
    assert again.generation_config.bos_token_id == START


@pytest.mark.parametrize(("tied", "said"), [(True, "2 missing: decoder.head"), (False, "2 unexpected: decoder.head")])
def test_weights_that_do_not_fit_are_refused(tied, said, tmp_path):
    model(tied=tied).save_pretrained(tmp_path)
    model(tied=not tied).config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=said):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, t: (t * 100).long(), "torch.int64 instead of torch.float32"),
        (lambda name, t: t > 0, "torch.bool instead of torch.float32"),
        (lambda name, t: t.to(torch.complex64), "cannot load .*model.safetensors: .* C64"),
        (lambda name, t: t.masked_fill(t == t.max(), torch.nan), "NaN.* [0-9]+ of"),
    ],
    ids=["whole numbers", "bools", "complex numbers", "NaN"],
)
@pytest.mark.parametrize("count", [1, 1000], ids=["one weight", "all weights"])
def test_weights_of_another_kind_are_refused(change, message, count, tmp_path):
    model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {name: change(name, t) for name, t in [*weights.items()][:count]}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_another_precision_is_loaded(tmp_path):
    lm = model()
    lm.save_pretrained(tmp_path)
    weights = {name: t.bfloat16() for name, t in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in again.state_dict().items():
        assert torch.equal(weight.bfloat16(), lm.state_dict()[name].bfloat16()), name


def test_a_damaged_file_is_refused(tmp_path):
    model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ValueError, match="cannot load .*model.safetensors: "):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_from_a_checkpoint_and_back(tmp_path):
    lm = model()
    run = {"data": "text:stdlib", "length": 7}
    longspan.save(lm.decoder, tmp_path / "ours", extra={"run": run})
    LongspanForCausalLM.from_longspan(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").to_longspan(tmp_path / "back")
    back = longspan.load(tmp_path / "back")
    assert back.config == lm.decoder.config
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), lm.decoder.parameters(), strict=True))
    assert checkpoint.read_config(tmp_path / "back")["run"] == run
    assert LongspanForCausalLM.from_longspan(lm.decoder).decoder is lm.decoder
    encoder = longspan.Encoder(longspan.EncoderConfig(dim=8, heads=2, depth=1, feedforward=8, vocab=5))
    longspan.save(encoder, tmp_path / "encoder")
    with pytest.raises(ValueError, match="an encoder"):
        LongspanForCausalLM.from_longspan(tmp_path / "encoder")


def test_a_model_inside_longspan_by_its_name():
    lm = LongspanForCausalLM.from_longspan("mnist")
    assert lm.config.run["data"].startswith("mnist")
    assert lm.generate(max_new_tokens=3, do_sample=True).shape == (1, 4)


def test_the_loss_is_that_of_the_decoder():
    lm, tokens = model(), ids(3, 9)
    ours = -lm.decoder.likelihood.log_prob(lm.decoder(started(tokens))[0][:, :9], tokens)
    # Beginning with the start token, every token counts; without it, the first one does not, as everywhere there.
    assert torch.allclose(lm(started(tokens), labels=started(tokens)).loss, ours.mean(), atol=1e-6)
    assert torch.allclose(lm(tokens, labels=tokens).loss, ours[:, 1:].mean(), atol=1e-6)
    labels = tokens.masked_fill(torch.arange(9) < 4, -100)
    assert torch.allclose(lm(tokens, labels=labels).loss, ours[:, 4:].mean(), atol=1e-6)
    loss = lm(tokens, labels=tokens, num_items_in_batch=5).loss
    assert torch.allclose(loss, ours[:, 1:].sum() / 5, atol=1e-5)


def test_the_loss_of_packed_rows_has_no_start_token():
    lm, rows = model(), started(ids(2, 4))
    at = torch.arange(5).repeat(2)[None]
    packed = lm(rows.flatten()[None], position_ids=at, labels=rows.flatten()[None]).loss
    assert torch.allclose(packed, lm(rows, labels=rows).loss, atol=1e-6)


def test_logits_of_some_tokens():
    lm, tokens = model(), ids(2, 6)
    whole = lm(tokens).logits
    assert torch.equal(lm(tokens, logits_to_keep=2).logits, whole[:, -2:])
    assert torch.equal(lm(tokens, logits_to_keep=torch.tensor([1, 4])).logits, whole[:, [1, 4]])
    assert isinstance(lm(tokens, return_dict=False), tuple)


def test_streaming(capsys):
    lm, tokens = model(), ids(1, 5)

    class Digits:
        def decode(self, tokens, **options):
            return "".join(chr(ord("a") + int(t)) for t in tokens)

    found = lm.generate(tokens, max_new_tokens=6, do_sample=False, streamer=TextStreamer(Digits()))
    assert capsys.readouterr().out.removesuffix("\n") == Digits().decode(found[0])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"input_ids": None}, "input_ids.*inputs_embeds"),
        ({"inputs_embeds": torch.zeros(1, 3, 16)}, "input_ids.*inputs_embeds"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"past_key_values": ()}, "past_key_values .*LongspanCache.*tuple"),
        ({"cache": ()}, "cache .*LongspanCache.*tuple"),
        ({"cache": LongspanCache(), "past_key_values": LongspanCache()}, "cache and past_key_values"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, r"attention_mask .*\(1, 3\).*\(1, 1, 3, 3\)"),
        ({"position_ids": torch.tensor([[0, 2, 3]])}, "position_ids .*from 0 to 2 in row 0"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, "'cu_seq_lens_q'.*position_ids"),
        ({"token_type_ids": torch.zeros(1, 3)}, "'token_type_ids'"),
    ],
)
def test_what_there_is_not_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        model()(**{"input_ids": ids(1, 3), **arguments})


def test_other_caches_and_vocabularies_are_refused():
    with pytest.raises(ValueError, match="cache_implementation='static'.*LongspanCache"):
        model().generate(ids(1, 3), max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="vocab="):
        model().resize_token_embeddings(5)
    with pytest.raises(ValueError, match="dim=16.*heads=3"):
        LongspanConfig(dim=16, heads=3)


def test_the_world_is_imported_when_it_is_asked_for():
    import longspan.compat.transformers as world

    with pytest.raises(AttributeError, match="'Longspan'"):
        world.Longspan  # noqa: B018


QUANTIZED = {
    "longspan": lambda: LongspanForCausalLM.from_longspan(
        Decoder(DecoderConfig(dim=64, depth=1, heads=2, feedforward=96, vocab=97))
    ),
    "fla": lambda: fla_laws.build("gated_deltanet", hidden_size=64, num_heads=2, head_dim=32),
    "mamba2": lambda: hybrids.model("mamba2", hidden_size=64, head_dim=16),
    "shared embedding": lambda: hybrids.model("lfm2", hidden_size=64, tie_word_embeddings=True),
    "shared embedding, a layer left": lambda: hybrids.model("lfm2", hidden_size=64, tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_folders_keep_quantized_weights(name, tmp_path):
    model, tokens = QUANTIZED[name]().eval(), torch.arange(9)[None]
    report = longspan.quantize(model, "int4", skip="lm_head" if "left" in name else ())
    load = {"fla": fla.load}.get(name, AutoModelForCausalLM.from_pretrained)
    with torch.no_grad():
        logits = model(tokens).logits
        for folder in (tmp_path / "a", tmp_path / "b"):  # also of a model that was loaded
            model.save_pretrained(folder)
            model = load(folder).eval()
            assert model(tokens).logits.equal(logits)
    rounded = [layer.name for layer in report if layer.format]
    assert rounded == [name for name, module in model.named_modules() if isinstance(module, Quantized)]
