"""Padded rows through hybrid models with a cache: on either side, each row equals its text alone."""

import pytest
import torch

from hybrids import KINDS, accelerated, far, gradients, read_in_parts, same_gradients, tokens, version
from longspan.compat.transformers import packing
from longspan.compat.transformers.models import MODELS

# The parts in which two rows are read; 1 is a real token.
LEFT = {
    "left": [("00011111", "11111111"), ("111", "111")],
    "left, by tokens": [("00000001", "11111111"), ("1", "1"), ("1", "1")],
}
BETWEEN = {
    "right": [("11111000", "11111111"), ("111", "111")],
    "right, by tokens": [("11000000", "11111111"), ("1", "1"), ("1", "1")],
    "a token of padding": [("11111", "11111"), ("0", "1"), ("1", "0"), ("11", "11")],
    "in each part": [("1110000", "0001111"), ("0111", "1110"), ("11", "11")],
    "a whole part": [("11111", "11111"), ("000", "111"), ("111", "111")],
}

pytestmark = pytest.mark.usefixtures("restored")


def keeps_padding(kind):
    """Whether these transformers keep padding in the states of this type's layers."""
    return version() < MODELS[kind].layer.skips


def parts(plan):
    """Tokens (2,N), masks (2,N) of the parts, and the two texts."""
    texts, at, found = tokens(2, 40), [0, 0], []
    for rows in plan:
        mask = torch.tensor([[int(one) for one in row] for row in rows])
        ids = torch.full_like(mask, 5)
        for b in range(2):
            size = int(mask[b].sum())
            ids[b, mask[b] > 0] = texts[b, at[b] : at[b] + size]
            at[b] += size
        found.append((ids, mask))
    return found, [texts[b : b + 1, : at[b]] for b in range(2)]


def read(made, plan):
    """Logits of the real tokens of each row, read in parts with a cache, and those of its text alone."""
    (found, texts), out = parts(plan), [[], []]
    masks = [mask for _, mask in found]
    given = [{"input_ids": ids, "attention_mask": torch.cat(masks[: at + 1], 1)} for at, (ids, _) in enumerate(found)]
    for got, mask in zip(read_in_parts(made, given), masks, strict=True):
        for b in range(2):
            out[b].append(got.logits[b, mask[b] > 0])
    alone = [made(input_ids=text, use_cache=False).logits[0] for text in texts]
    return [torch.cat(one) for one in out], alone


def check(kind, plan):
    made = accelerated(kind)
    with torch.no_grad():
        for found, alone in zip(*read(made, plan), strict=True):
            assert far(found, alone) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", LEFT)
def test_padding_on_the_left_changes_nothing(kind, where):
    if version() < (5, 7) and len(LEFT[where][1][0]) > 1:
        pytest.skip("transformers before 5.7 read several tokens after a cache as a new sequence")
    if version() < (5, 15) and kind == "granitemoehybrid":
        pytest.skip("its cache does not work before 5.15")
    check(kind, LEFT[where])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", BETWEEN)
def test_padding_between_tokens_changes_nothing_or_is_refused(kind, where):
    if MODELS[kind].reads_padding or keeps_padding(kind):
        made = accelerated(kind)
        with pytest.raises(ValueError, match=f"{kind}.* padding between tokens"):
            read(made, BETWEEN[where])
        return
    check(kind, BETWEEN[where])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not MODELS[kind].reads_padding])
def test_gradients_go_through_a_padded_cache(kind):
    """Also where layers are computed again in the backward pass."""
    if keeps_padding(kind):
        pytest.skip("transformers before 5.15 keeps padding in the states of its layers")
    made = accelerated(kind)
    weights, grads = torch.randn(40, 1), []
    for logits in read(made, BETWEEN["right"]):
        made.zero_grad()
        sum((one.square() * weights[: len(one)]).sum() for one in logits).backward()
        grads.append(gradients(made))
    same_gradients(*grads)


@pytest.mark.parametrize("kind", ["qwen3_5", "mamba", "rwkv", "xlstm", "recurrent_gemma", "lfm2"])
def test_checkpointed_layers_know_the_padding_when_they_are_computed_again(kind):
    made, x = accelerated(kind).train(), tokens(2, 9)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 0], [1] * 9])
    found = []
    for again in (False, True):
        if again:
            getattr(made, "activation_checkpointing_enable", made.gradient_checkpointing_enable)()
        made.zero_grad()
        made(input_ids=x, attention_mask=mask, use_cache=False).logits[mask > 0].square().sum().backward()
        found.append(gradients(made))
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "option"), [("recurrent_gemma", "attention_window_size"), ("lfm3", "sliding_window")])
def test_padding_in_a_sliding_window_is_refused(kind, option):
    """Where it would take the places of real tokens, and only there."""
    made = accelerated(kind, **{option: 6})
    with torch.no_grad(), pytest.raises(ValueError, match=f"{kind}.*window of 6 .*left"):
        read(made, BETWEEN["right"])
    with torch.no_grad():
        for plan in (LEFT["left"], [("1100", "1111"), ("11", "11")]):
            for found, alone in zip(*read(made, plan), strict=True):
                assert far(found, alone) < 1e-5
    distant = torch.ones(1, 20, dtype=torch.bool)
    distant[:, 3] = False  # the last two tokens see none of the places before 13
    packing.refuse_between(made.config, distant, 2, "")


def test_a_mask_that_does_not_fit_is_refused():
    made, x = accelerated("mamba"), tokens(2, 7)
    for shape in ((2, 6), (1, 7)):
        with pytest.raises(ValueError, match=rf"attention_mask must be .*\(2, 7\).*\({shape[0]}, {shape[1]}\)"):
            made(x, attention_mask=torch.ones(shape))


def test_a_layer_with_other_rows_than_its_model_is_refused():
    with packing._reading(packing.Rows(real=torch.tensor([[True, False]]))):
        assert packing.real(1, 2).tolist() == [[True, False]]
        assert packing.real(1, 4, earlier=True).tolist() == [[True, True, True, False]]
        for batch, n, earlier in ((1, 3, False), (2, 2, False), (1, 1, True)):
            with pytest.raises(ValueError, match="padded rows"):
                packing.real(batch, n, earlier=earlier)
