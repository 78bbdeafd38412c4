"""Training a decoder by transformers' Trainer and peft: losses, smoothing, checkpointing, loading, adapters."""

import pytest
import torch

import longspan

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import AutoTokenizer, Trainer, TrainingArguments
from transformers.utils import logging

from hub_process import IGNORED, VOCAB, batch, targets
from longspan.attention import REGISTRY
from longspan.compat.transformers import LongspanConfig, LongspanForCausalLM, byte_tokenizer

logging.set_verbosity_error()
logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore")


def model(spec="gated_deltanet; softmax", **options):
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 2, "heads": 2, "feedforward": 32, "vocab": VOCAB, "positions": "learned"}
    return LongspanForCausalLM(LongspanConfig(attention=spec, **{**sizes, **options}))


def rows(step=0):
    whole = batch(step)
    return [{name: t[i] for name, t in whole.items()} for i in range(len(whole["labels"]))]


def trained(lm, folder, data=None, **options):
    """A Trainer after its training."""
    usual = {"lr_scheduler_type": "constant", "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
    usual |= {
        "max_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    trainer = Trainer(lm, TrainingArguments(folder, **usual | options), train_dataset=rows() if data is None else data)
    trainer.train()
    return trainer


def logged(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def moved(lm):
    return {name: p.detach().clone() for name, p in lm.named_parameters()}


def close(one, other, tolerance=1e-12):
    return max(float((one[name] - other[name]).abs().max()) for name in other) < tolerance


@pytest.mark.parametrize("smoothing", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
def test_accumulation_equals_one_batch(smoothing, tmp_path):
    """With labels of unequal number in the micro-batches, and padding on either side."""
    counts = {targets(batch(0)["labels"][i : i + 2]) for i in range(0, 8, 2)}
    assert len(counts) > 1
    found = []
    for size, accumulate in ((8, 1), (4, 2), (2, 4)):
        lm = model().double()
        trainer = trained(
            lm,
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulate,
            label_smoothing_factor=smoothing,
        )
        found.append((moved(lm), logged(trainer)))
    # The loss is float32.
    for weights, losses in found[1:]:
        assert losses == pytest.approx(found[0][1], abs=2e-4)
        assert close(weights, found[0][0], 1e-6)
    assert not close(found[0][0], moved(model().double()), 1e-3)


def smoothed(lm, epsilon):
    whole = batch(0)
    logits = lm(whole["input_ids"], attention_mask=whole["attention_mask"]).logits[:, :-1]
    labels, logs = whole["labels"][:, 1:], logits.log_softmax(-1)
    there = labels != IGNORED
    picked = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0][there]
    return -((1 - epsilon) * picked + epsilon * logs.mean(-1)[there]).mean()


def subclass(lm):
    """As fully_shard makes one of the model's class."""
    lm.__class__ = type("FSDPLongspanForCausalLM", (LongspanForCausalLM,), {})
    return lm


@pytest.mark.parametrize("wrap", [lambda lm: lm, subclass], ids=["own class", "a subclass"])
def test_label_smoothing_predicts_the_next_token(wrap, tmp_path):
    lm, ours = wrap(model()), model()
    trained(lm, tmp_path, per_device_train_batch_size=8, label_smoothing_factor=0.2)
    loss = smoothed(ours.train(), 0.2)
    loss.backward()
    with torch.no_grad():
        for p in ours.parameters():
            p -= 0.5 * p.grad
    assert close(moved(lm), moved(ours), 1e-6)


def test_a_loss_of_shifted_labels_has_no_start_token():
    lm, ids = model(), batch(0)["input_ids"]
    start = torch.full_like(ids[:, :1], VOCAB)
    labels = torch.cat([start, ids], 1)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=VOCAB)[:, 1:]
    given = lm(labels, labels=labels, shift_labels=shifted).loss
    assert torch.equal(given, lm(labels, labels=labels).loss)


@pytest.mark.parametrize("cached", [None, False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_with_checkpointing_and_cache(cached, checkpointing):
    lm, other = model().double().train(), model().double().train()
    if checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert lm.is_gradient_checkpointing
    outputs = lm(**batch(0), use_cache=cached)
    assert (outputs.past_key_values is not None) == bool(cached)
    outputs.loss.backward()
    other(**batch(0)).loss.backward()
    grads = {name: p.grad for name, p in lm.named_parameters()}
    assert close(grads, {name: p.grad for name, p in other.named_parameters()}, 1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing_kwargs": {"context_fn": None}},
        {"every_n_layers": 2},
        {"offload": True},
    ],
    ids=str,
)
def test_other_options_of_checkpointing_are_refused(options):
    name = next(iter(options.get("gradient_checkpointing_kwargs", options)))
    with pytest.raises(ValueError, match=f"{name}=.* is not supported"):
        model().gradient_checkpointing_enable(**options)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_loss(side):
    lm, ids = model().double(), batch(0)["input_ids"][:, :6]
    wanted = lm(ids, labels=ids)
    pads, mask = torch.zeros(8, 3, dtype=torch.long), torch.ones_like(ids)
    padded = [(t, torch.full_like(pads, value)) for t, value in ((ids, 7), (mask, 0), (ids, IGNORED))]
    rows, mask, labels = (torch.cat([t, pad] if side == "right" else [pad, t], 1) for t, pad in padded)
    found = lm(rows, attention_mask=mask, labels=labels)
    assert torch.allclose(found.loss, wanted.loss, atol=1e-6)
    logits = found.logits[:, :6] if side == "right" else found.logits[:, 3:]
    assert torch.allclose(logits, wanted.logits, atol=1e-12)


@pytest.mark.parametrize("placed", [None, "auto", {"": "cpu"}], ids=["meta", "auto", "cpu"])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
def test_weights_and_tables_are_right_after_loading_without_memory(positions, placed, tmp_path):
    lm = model("softmax; retention", positions=positions).eval()
    lm.save_pretrained(tmp_path)
    again = LongspanForCausalLM.from_pretrained(tmp_path, device_map=placed)
    assert not again.training
    assert not any(t.is_meta for t in [*again.parameters(), *again.buffers()])
    assert torch.equal(again(batch(0)["input_ids"]).logits, lm(batch(0)["input_ids"]).logits)


def test_offloaded_weights():
    """As device_map makes them where a device is too small: on the device only in a module's forward."""
    from accelerate import cpu_offload

    lm, ids = model("softmax; linear", tied=True).eval(), batch(0)["input_ids"]
    wanted = lm(ids).logits
    cpu_offload(lm, "cpu")
    assert all(p.is_meta for p in lm.parameters())
    assert torch.equal(lm(ids, use_cache=False).logits, wanted)
    with pytest.raises(ValueError, match="use_cache=False"):
        lm(ids)


MECHANISMS = [name for name, cls in sorted(REGISTRY.items()) if "causal" in cls.directions]


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_is_right_after_loading_without_memory(name, tmp_path):
    lm = model(REGISTRY[name].examples[0], positions="none").eval()
    lm.save_pretrained(tmp_path)
    again = LongspanForCausalLM.from_pretrained(tmp_path)
    logits = []
    for one in (lm, again):
        torch.manual_seed(0)
        logits.append(one(batch(0)["input_ids"], use_cache=False).logits)
    assert torch.equal(*logits)


def test_adapters_train_alone_and_merge(tmp_path):
    peft = pytest.importorskip("peft")
    lm, ids = model(), batch(0)["input_ids"]
    before = {name: p.clone() for name, p in lm.decoder.named_parameters()}
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["query", "value"], init_lora_weights=False)
    wrapped = peft.get_peft_model(lm, config)
    first = wrapped(ids, labels=ids)
    first.loss.backward()
    grown = {name for name, p in wrapped.named_parameters() if p.grad is not None}
    assert len(grown) == 8
    assert all("lora_" in name for name in grown)
    wrapped.eval()
    found = wrapped.generate(input_ids=ids[:, :5], max_new_tokens=12, do_sample=False)
    wrapped.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(model().eval(), tmp_path)
    assert torch.allclose(again(ids).logits, wrapped(ids).logits, atol=1e-6)
    with pytest.raises(ValueError, match="'stack.blocks.0.attention.query.base_layer.weight'.*merge"):
        lm.to_longspan(tmp_path / "unmerged")
    merged = wrapped.merge_and_unload()
    merged.to_longspan(tmp_path / "merged")
    ours = longspan.load(tmp_path / "merged")
    assert not torch.equal(ours.stack.blocks[0].attention.query.weight, before["stack.blocks.0.attention.query.weight"])
    drawn = longspan.generate(ours, ids[:, :5], max_new_tokens=12, temperature=0)
    assert torch.equal(found[:, 5:], drawn)


def test_a_model_of_bytes_has_its_tokenizer(tmp_path):
    text = "Ünïcode, \n\ttabs  and\x00 0 \x7f 河"
    ours = byte_tokenizer()
    assert ours(text).input_ids == list(text.encode())
    assert ours.decode(ours(text).input_ids) == text
    assert [ours.bos_token_id, ours.eos_token_id, ours.pad_token_id] == [256] * 3
    assert ours([text, "a"], padding=True).input_ids[1][1:] == [256] * (len(text.encode()) - 1)
    ours.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text + "<start>").input_ids == [*text.encode(), 256]
    # Every byte is a token, and no two are the same.
    assert sorted(ours.convert_tokens_to_ids(ours.get_vocab())) == list(range(257))
