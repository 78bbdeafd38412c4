"""Training a decoder by transformers' Trainer and peft: the decoder's own gradients, and adapters that merge."""

import pytest
import torch

import longspan

pytest.importorskip("transformers")

from transformers import AutoTokenizer
from transformers.utils import logging

from longspan.compat.transformers import LongspanConfig, LongspanForCausalLM, byte_tokenizer

logging.set_verbosity_error()
logging.disable_progress_bar()


def model(**options) -> LongspanForCausalLM:
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 2, "heads": 2, "feedforward": 32, "vocab": 11, "positions": "none"}
    return LongspanForCausalLM(LongspanConfig(attention="gated_deltanet; softmax", **{**sizes, **options}))


def tokens() -> torch.Tensor:
    return torch.randint(11, (8, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_takes_our_step(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    lm, ours = model(), model()
    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    options = {"lr_scheduler_type": "constant", "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
    arguments = TrainingArguments(
        tmp_path / "out",
        max_steps=1,
        per_device_train_batch_size=8,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=True,
        **options,
    )
    trainer = Trainer(lm, arguments, train_dataset=rows)
    trainer.train()
    assert lm.is_gradient_checkpointing
    inputs = ours.decoder.shift(tokens())
    nats = -ours.decoder.likelihood.log_prob(ours.decoder(inputs)[0], tokens())
    nats[:, 1:].mean().backward()
    with torch.no_grad():
        for p in ours.parameters():
            p -= 0.5 * p.grad
    for one, other in zip(lm.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    trainer.save_model(tmp_path / "saved")
    again = LongspanForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.decoder.head.weight, lm.decoder.head.weight)
    assert set(trainer.evaluate(rows)) >= {"eval_loss"}


@pytest.mark.filterwarnings("ignore")
def test_adapters_train_alone_and_merge(tmp_path):
    peft = pytest.importorskip("peft")
    lm = model()
    before = {name: p.clone() for name, p in lm.decoder.named_parameters()}
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["query", "value"], init_lora_weights=False)
    wrapped = peft.get_peft_model(lm, config)
    first = wrapped(tokens(), labels=tokens())
    first.loss.backward()
    grown = {name for name, p in wrapped.named_parameters() if p.grad is not None}
    assert len(grown) == 8
    assert all("lora_" in name for name in grown)
    wrapped.eval()
    found = wrapped.generate(input_ids=tokens()[:, :5], max_new_tokens=12, do_sample=False)
    wrapped.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(model().eval(), tmp_path)
    assert torch.allclose(again(tokens()).logits, wrapped(tokens()).logits, atol=1e-6)
    with pytest.raises(ValueError, match="'stack.blocks.0.attention.query.base_layer.weight'.*merge"):
        lm.to_longspan(tmp_path / "unmerged")
    merged = wrapped.merge_and_unload()
    merged.to_longspan(tmp_path / "merged")
    ours = longspan.load(tmp_path / "merged")
    assert not torch.equal(ours.stack.blocks[0].attention.query.weight, before["stack.blocks.0.attention.query.weight"])
    drawn = longspan.generate(ours, tokens()[:, :5], max_new_tokens=12, temperature=0)
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
