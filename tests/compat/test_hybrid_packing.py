"""Rows of several sequences through hybrid models: the same as separate rows, and not one token of leakage."""

import pytest
import torch

from hybrids import KINDS, far, file, gradients, model, packs, same_gradients, tokens
from longspan.compat import transformers as on_cpu
from longspan.compat.transformers import packing
from longspan.compat.transformers.models import MODELS

LENGTHS = (23, 1, 70, 17)  # borders inside chunks and convolutions, a single token, more than a chunk
FLAGS = {
    "positions": {},
    "numbers": {"return_seq_idx": True},
    "starts": {"return_flash_attn_kwargs": True},
    "starts alone": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "numbers alone": {"return_seq_idx": True, "return_position_ids": False},
}


@pytest.fixture(autouse=True)
def swapped():
    pytest.importorskip("transformers")
    on_cpu.accelerate()
    yield
    on_cpu.restore()


def sequences():
    return [tokens(n, seed=n) for n in LENGTHS]


def batch(**flags):
    """What transformers' own collator makes of the sequences."""
    from transformers import DataCollatorWithFlattening

    made = DataCollatorWithFlattening(return_tensors="pt", **flags)([{"input_ids": x.tolist()} for x in sequences()])
    return dict(made)


def require_packing(kind):
    if not packs(kind):
        pytest.skip("this version of transformers does not pass sequence boundaries to the layers of this type")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", FLAGS)
def test_a_packed_row_is_its_sequences_alone(kind, flags):
    made, given = model(kind).train(), batch(**FLAGS[flags])
    if not packs(kind):
        with pytest.raises(ValueError, match="packed"):
            made(**given)
        return
    made.zero_grad()
    found = made(**given)
    found.loss.backward()
    ours = gradients(made)
    made.zero_grad()
    alone = []
    # The mean over all predicted tokens is that of the sums; a single token predicts nothing.
    count = sum(n - 1 for n in LENGTHS)
    for x in sequences():
        out = made(input_ids=x[None], use_cache=False).logits[0]
        alone.append(out.detach())
        (torch.nn.functional.cross_entropy(out[:-1], x[1:], reduction="sum") / count).backward()
    alone = torch.cat(alone)
    assert far(found.logits[0], alone) < 1e-4
    same_gradients(ours, gradients(made), 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_reaches_another_sequence(kind):
    """Exactly nothing: gradients of the outputs of each sequence are zero at the tokens of all others."""
    require_packing(kind)
    made, given = model(kind), batch()
    embedded = made.get_input_embeddings()(given["input_ids"]).detach().requires_grad_()
    out = made(inputs_embeds=embedded, position_ids=given["position_ids"], use_cache=False).logits[0]
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    for begin, end in zip([0, *ends], ends, strict=False):
        (grad,) = torch.autograd.grad(out[begin:end].square().sum(), embedded, retain_graph=True)
        reached = grad[0].abs().sum(-1) > 0
        assert reached[begin:end].all()
        assert not reached[:begin].any()
        assert not reached[end:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_layers_do_not_leak_when_they_are_computed_again(kind):
    require_packing(kind)
    made, given = model(kind).train(), batch()
    found = {}
    for again in (False, True):
        if again:
            # Its name since 5.2x, and before.
            getattr(made, "activation_checkpointing_enable", made.gradient_checkpointing_enable)()
        made.zero_grad()
        made(**given).loss.backward()
        found[again] = gradients(made)
    for name, wanted in found[False].items():
        torch.testing.assert_close(found[True][name], wanted, rtol=1e-4, atol=1e-6)


def test_borders_by_each_of_their_names():
    wanted = torch.tensor([[0, 0, 0, 1, 2, 2]])
    numbers = torch.tensor([[7, 7, 7, 3, 7, 7]])  # equal numbers that are not side by side are two sequences
    assert torch.equal(packing.borders({"seq_idx": numbers}, 1, 6), wanted)
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        assert torch.equal(packing.borders({name: torch.tensor([0, 3, 4, 6])}, 1, 6), wanted)
    assert packing.borders({"seq_idx": None, "use_cache": False}, 1, 6) is None
    assert torch.equal(packing.positions_of(wanted), torch.tensor([[0, 1, 2, 0, 0, 1]]))
    assert torch.equal(packing.of_positions(torch.tensor([[0, 1, 2, 0, 0, 1]])), wanted)


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seq_lens_q"])
@pytest.mark.parametrize(
    ("starts", "wanted"),
    [
        ([0, 3, 3, 6], [0, 0, 0, 1, 1, 1]),
        ([0, 3, 3, 3, 4, 4, 6], [0, 0, 0, 1, 2, 2]),
        ([0, 0, 0, 3, 6], [0, 0, 0, 1, 1, 1]),
        ([0, 3, 6, 6, 6], [0, 0, 0, 1, 1, 1]),
        ([0, 0, 6, 6], [0] * 6),
        ([0, 1, 1], [0]),
        ([0, 0, 1], [0]),
        ([0, 0], []),
        ([0, 0, 0], []),
        ([0], []),
    ],
)
def test_empty_sequences_have_no_token(name, starts, wanted):
    found = packing.borders({name: torch.tensor(starts, dtype=torch.int32)}, 1, len(wanted))
    assert found.dtype == torch.int64
    assert found.tolist() == [wanted]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, r"cu_seqlens=\[\]"),
        ({"seq_idx": torch.zeros(1, 5)}, r"seq_idx .*\(1, 6\).*\(1, 5\)"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens=\[0, 3\] .*6"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 6])}, r"cu_seqlens=\[0, 4, 3, 6\]"),
    ],
)
def test_borders_that_do_not_fit_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        packing.borders(given, 1, 6)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"use_cache": True}, "use_cache=False"),
        ({"attention_mask": "padded"}, "padding.*attention_mask"),
        ({"seq_idx": "other"}, "position_ids and seq_idx"),
        ({"position_ids": "straight", "seq_idx": "own"}, "position_ids do not.*seq_idx"),
    ],
)
def test_what_contradicts_packed_rows_is_refused(more, said):
    require_packing("qwen3_next")
    made, given = model("qwen3_next"), batch()
    ids = packing.of_positions(given["position_ids"])
    special = {
        "padded": (torch.arange(ids.shape[1]) > 2).long()[None],
        "other": ids.roll(1),
        "own": ids,
        "straight": torch.arange(ids.shape[1])[None],
    }
    given |= {name: special.get(value, value) if isinstance(value, str) else value for name, value in more.items()}
    with pytest.raises(ValueError, match=said):
        made(**given)


def test_a_mask_that_hides_nothing_does_not_hide_the_borders():
    require_packing("bamba")
    made, given = model("bamba"), batch()
    with torch.no_grad():
        wanted = made(**given).logits
        found = made(**given, attention_mask=torch.ones_like(given["input_ids"])).logits
    assert torch.equal(found, wanted)


def test_layers_without_boundaries_refuse_to_run():
    """As in transformers before 5.15, whose recurrent layers never hear of borders."""
    require_packing("qwen3_next")
    made, given = model("qwen3_next"), batch()
    layer = made.model.layers[0].linear_attn
    forward = layer.forward
    layer.forward = lambda **kwargs: forward(**{k: v for k, v in kwargs.items() if k != "seq_idx"})
    with pytest.raises(ValueError, match="packed.*5.15"):
        made(**given)
    assert made(given["input_ids"], use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("flags", FLAGS)
def test_convolutions_that_look_across_refuse_packed_rows(flags, monkeypatch):
    """As in transformers before 5.15, which has no function for them where causal-conv1d is not installed."""
    on_cpu.restore()
    monkeypatch.setattr(file("qwen3_next"), "causal_conv1d_fn", None)
    on_cpu.accelerate()
    made, given = model("qwen3_next"), batch(**FLAGS[flags])
    with pytest.raises(ValueError, match="packed rows: .*short convolutions"):
        made(**given)


@pytest.mark.parametrize("kind", [kind for kind, model in MODELS.items() if model.leaks])
def test_models_whose_other_layers_leak_refuse_packed_rows(kind):
    file(kind)
    entry = packing.pass_rows(lambda self, input_ids=None, position_ids=None, **kwargs: "ran", MODELS[kind].leaks)
    given = batch()
    with pytest.raises(ValueError, match="packed rows: .*indexer"):
        entry(None, **given)
    assert entry(None, input_ids=given["input_ids"]) == "ran"
