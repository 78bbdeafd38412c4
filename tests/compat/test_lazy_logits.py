"""Losses of transformers' models without all their logits: every type's loss, gradients and logits are the same."""

import copy

import pytest
import torch
from torch import nn

import longspan
from hybrids import KINDS, accelerated, far, gradients, model, same_gradients, tokens
from longspan.compat.transformers import accelerate
from longspan.compat.transformers.lazy_logits import LazyLogits
from longspan.modules.quantized import Quantized, QuantizedLinear
from longspan.ops import cross_entropy

pytestmark = pytest.mark.usefixtures("restored")


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", 500)


def labels(ids):
    """Completions alone."""
    found = ids.clone()
    found[:, :4] = -100
    return found


def trained(made, ids, **more):
    out = made(input_ids=ids, labels=labels(ids), **more)
    out.loss.backward()
    return out, gradients(made)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_all_logits(kind):
    whole, lazy, ids = accelerated(kind), accelerated(kind), tokens(2, 13)
    accelerate(lazy, lazy_logits=True)
    (expected, wanted), (found, grads) = trained(whole.train(), ids), trained(lazy.train(), ids)
    assert isinstance(found.logits, LazyLogits)
    assert "tensor" not in found.logits.__dict__  # no one has computed them
    assert far(found.loss, expected.loss) < 1e-5
    same_gradients(grads, wanted)
    assert far(found.logits[:, -1], expected.logits[:, -1]) < 1e-5


def test_the_number_of_items_divides_the_sum():
    whole, lazy, ids = model("mamba2"), model("mamba2"), tokens(2, 13)
    accelerate(lazy, lazy_logits=True)
    for count in (7, torch.tensor(7)):
        (expected, _), (found, _) = (trained(made.train(), ids, num_items_in_batch=count) for made in (whole, lazy))
        assert far(found.loss, expected.loss) < 1e-6


def test_logits_that_are_read_have_gradients():
    whole, lazy, ids = model("granitemoehybrid"), model("granitemoehybrid"), tokens(1, 9)
    accelerate(lazy, lazy_logits=True)
    found = []
    for made in (whole.train(), lazy.train()):
        logits = made(input_ids=ids).logits
        assert logits.shape == (1, 9, whole.config.vocab_size)
        nn.functional.mse_loss(logits, torch.ones(logits.shape)).backward()
        found.append(gradients(made))
    same_gradients(*reversed(found))


def test_evaluation_and_copies_are_as_before():
    made, ids = accelerated("mamba2"), tokens(1, 9)
    expected = made(input_ids=ids).logits
    accelerate(made, lazy_logits=True)
    assert torch.equal(made(input_ids=ids).logits, expected)
    other = copy.deepcopy(made).train()
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert not other(input_ids=ids).logits.tensor.any()
    accelerate(made, lazy_logits=True)  # a second time changes nothing
    assert isinstance(made.train()(input_ids=ids).logits, LazyLogits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_an_adapter_of_peft_trains():
    peft = pytest.importorskip("peft")
    whole, lazy, ids = model("mamba2"), model("mamba2"), tokens(2, 13)
    found = []
    for made in (whole, lazy):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(made, peft.LoraConfig(target_modules=["in_proj"], init_lora_weights=False))
        if made is lazy:
            accelerate(adapted, lazy_logits=True)
        found.append(trained(adapted.train(), ids))
    assert far(found[1][0].loss, found[0][0].loss) < 1e-6
    same_gradients(found[1][1], found[0][1])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:Unsupported layer type")
def test_adapters_train_on_weights_in_blocks():
    """Loss and gradients are those of a model with the dequantized weights."""
    peft = pytest.importorskip("peft")
    ids, found = tokens(2, 13), []
    for blocks in (False, True):
        made = model("mamba2")
        longspan.quantize(made, "int8", activations="float32")
        if not blocks:
            numbers = {name: m.dequantize() for name, m in made.named_modules() if isinstance(m, Quantized)}
            made = model("mamba2")
            with torch.no_grad():
                for name, number in numbers.items():
                    made.get_submodule(name).weight.copy_(number)
        config = peft.LoraConfig(target_modules=["in_proj"], init_lora_weights=False)
        config._register_custom_module({QuantizedLinear: peft.tuners.lora.Linear})
        torch.manual_seed(0)
        adapted = peft.get_peft_model(made, config)
        accelerate(adapted, lazy_logits=True)
        found.append(trained(adapted.train(), ids))
    assert len(found[1][1]) == 4
    assert far(found[1][0].loss, found[0][0].loss) < 1e-5
    same_gradients(found[1][1], found[0][1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: None, "lazy_logits=True needs a model"),
        (
            lambda: model("mamba2").backbone,
            "the logits of Mamba2Model cannot be lazy: its output layer must be an nn.Linear",
        ),
    ],
)
def test_what_cannot_be_lazy_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        accelerate(make(), lazy_logits=True)
