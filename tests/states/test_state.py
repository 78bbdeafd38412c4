"""States as values: clone, select, detach, save and load for any mechanism or stack."""

import os

import pytest
import torch
from torch.utils import _pytree as pytree

import longspan
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder

SPECS = ["linear", "linear(rotary=10.0)", "softmax", "kernel"]


def started(spec):
    torch.manual_seed(0)
    module = longspan.build(spec, 8, 2)
    x = torch.randn(3, 5, 8)
    return module, module(x, module.init_state(3))[1]


@pytest.mark.parametrize("spec", SPECS)
def test_copies_share_no_memory(spec):
    _, state = started(spec)
    for copy in (longspan.states.clone(state), longspan.states.select(state, [0, 1, 2])):
        for a, b in zip(pytree.tree_leaves(copy), pytree.tree_leaves(state), strict=True):
            assert torch.equal(a, b)
            assert a.data_ptr() != b.data_ptr()


def test_detach_cuts_the_graph():
    _, state = started("linear")
    assert state.sums.requires_grad
    assert not longspan.states.detach(state).sums.requires_grad


def test_select_repeats_and_reorders():
    _, state = started("linear")
    picked = longspan.states.select(state, torch.tensor([2, 0, 2, 1]))
    assert torch.equal(picked.sums, state.sums[[2, 0, 2, 1]])
    with pytest.raises(IndexError):
        longspan.states.select(state, [3])


def test_nbytes_counts_every_tensor():
    module = longspan.build("softmax", 8, 2)
    # keys and values of 2 heads x 7 slots x 4 channels x 4 bytes, and one int64 length
    assert longspan.states.nbytes(module.init_state(1, 7)) == 2 * 2 * 7 * 4 * 4 + 8
    assert longspan.states.nbytes(longspan.build("linear", 8, 2).init_state(1)) == 2 * 4 * 5 * 4


@pytest.mark.parametrize("spec", SPECS)
def test_round_trip(spec, tmp_path):
    module, state = started(spec)
    longspan.states.save(state, tmp_path / "s.safetensors")
    loaded = longspan.states.load(tmp_path / "s.safetensors", module.init_state(3))
    assert type(loaded) is type(state)
    for a, b in zip(pytree.tree_leaves(loaded), pytree.tree_leaves(state), strict=True):
        assert torch.equal(a, b)
    assert os.listdir(tmp_path) == ["s.safetensors"]


def test_a_decoder_state_round_trips(tmp_path):
    model = Decoder(
        DecoderConfig(dim=8, depth=2, heads=2, attention="linear; softmax", feedforward=8, vocab=5, length=9)
    )
    with torch.no_grad():
        _, state = model(torch.zeros(2, 4, dtype=torch.long), model.init_state(2))
        longspan.states.save(state, tmp_path / "s")
        loaded = longspan.states.load(tmp_path / "s", model.init_state(2))
        tokens = torch.ones(2, 3, dtype=torch.long)
        torch.testing.assert_close(model(tokens, loaded)[0], model(tokens, state)[0], atol=0, rtol=0)


class TestErrors:
    def test_of_another_mechanism(self, tmp_path):
        _, state = started("linear")
        longspan.states.save(state, tmp_path / "s")
        with pytest.raises(ValueError, match="does not hold the state of this mechanism or stack"):
            longspan.states.load(tmp_path / "s", started("softmax")[1])

    def test_missing(self, tmp_path):
        with pytest.raises(ValueError, match="no state file"):
            longspan.states.load(tmp_path / "none", started("linear")[1])

    def test_damaged(self, tmp_path):
        (tmp_path / "s").write_bytes(b"no state")
        with pytest.raises(ValueError, match="is not a readable state file"):
            longspan.states.load(tmp_path / "s", started("linear")[1])

    def test_unwritable(self, tmp_path):
        with pytest.raises(ValueError, match="cannot write a state to"):
            longspan.states.save(started("linear")[1], tmp_path / "none" / "s")


def test_a_state_made_with_other_options_is_refused_in_words():
    plain, gated = (longspan.build(spec, 8, 2) for spec in ("rfa", "rfa(gate=True)"))
    x = torch.randn(1, 1, 8)
    for own, other in ((plain, gated), (gated, plain)):
        with pytest.raises(ValueError, match=r"rfa cannot continue|state has a tensor of shape"):
            own(x, other.init_state(1))


@pytest.mark.parametrize("spec", ["linear", "softmax", "local(window=3)", "gla"])
def test_a_state_of_another_size_is_refused(spec):
    small, large = longspan.build(spec, 8, 2), longspan.build(spec, 16, 2)
    with pytest.raises(ValueError, match=r"state has a tensor of shape .* with dim=8, heads=2 needs"):
        small(torch.randn(3, 1, 8), large.init_state(3))
