"""One of several processes that train a model of transformers: ``accelerate launch ... THIS_FILE JOB FOLDER``.

JOB names a function below. The first process writes FOLDER/results.json, what the function returns.
"""

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from longspan.compat.transformers import LongspanConfig, LongspanForCausalLM

IGNORED = -100
ROWS, LENGTH, STEPS, VOCAB = 8, 9, 3, 11
CLIP = 0.05


def model(**options):
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 2, "heads": 2, "feedforward": 32, "vocab": VOCAB, "positions": "learned", "length": 32}
    return LongspanForCausalLM(LongspanConfig(**{"attention": "gated_deltanet; softmax", **sizes, **options})).double()


def batch(step):
    """Rows of several lengths, half of them padded on the left, with labels in unequal number."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(ROWS):
        padding = row % 5
        if row % 2:
            mask[row, :padding] = 0
        else:
            mask[row, LENGTH - padding :] = 0
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[1, :6] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def targets(labels):
    return int((labels[:, 1:] != IGNORED).sum())


def alone(lm, steps=range(STEPS)):
    """Losses and weights of one process."""
    optimizer, losses = torch.optim.AdamW(lm.parameters(), lr=1e-2), []
    lm.train()
    for step in steps:
        loss = lm(**batch(step), num_items_in_batch=targets(batch(step)["labels"])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: weight.detach() for name, weight in lm.named_parameters()}


def together(accelerator, lm, optimizer, steps=range(STEPS)):
    """Losses of all processes, each with its rows in two micro-batches."""
    losses = []
    lm.train()
    for step in steps:
        whole = batch(step)
        count = targets(whole["labels"])
        own = {name: rows[accelerator.process_index :: accelerator.num_processes] for name, rows in whole.items()}
        total = torch.zeros(())
        for part in range(2):
            few = {name: rows[part::2] for name, rows in own.items()}
            with contextlib.nullcontext() if part else accelerator.no_sync(lm):
                # The gradients are the mean of those of the processes.
                loss = lm(**few, num_items_in_batch=count).loss * accelerator.num_processes
                accelerator.backward(loss)
            total = total + loss.detach()
        accelerator.clip_grad_norm_(lm.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(total, "mean").item())
    return losses


def whole(weight):
    weight = weight.detach()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def error(found, wanted):
    """The largest difference of any weight."""
    assert sorted(found) == sorted(wanted)
    return max(float((whole(found[name]) - wanted[name]).abs().max()) for name in wanted)


def named(accelerator, lm):
    return dict(accelerator.unwrap_model(lm).named_parameters())


def replicated(folder):
    """Data parallel: losses, weights, a checkpoint, the saved model."""
    return _run(Accelerator(cpu=True), folder)


def _accelerated():
    """Make accelerate take these processes for ones with GPUs: on CPUs it ignores FSDP."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def sharded(folder, **options):
    """FSDP2: losses, weights, a checkpoint, the saved model."""
    _accelerated()
    accelerator = Accelerator()
    assert accelerator.is_fsdp2
    return _run(accelerator, folder, **options)


def tied(folder):
    return sharded(folder, tied=True)


def buffers(folder):
    return sharded(folder, attention="performer; softmax")


def _run(accelerator, folder, **options):
    assert accelerator.num_processes == 2
    plain, lm = model(**options), model(**options)
    losses, weights = alone(plain)
    lm, optimizer = accelerator.prepare(lm, torch.optim.AdamW(lm.parameters(), lr=1e-2))
    found = together(accelerator, lm, optimizer)
    result = {"losses": max(abs(a - b) for a, b in zip(found, losses, strict=True))}
    result["weights"] = error(named(accelerator, lm), weights)
    result["shards"] = sum(isinstance(p, DTensor) for p in lm.parameters()) / len(list(lm.parameters()))
    units = [name for name, m in lm.named_modules() if type(m).__name__.startswith("FSDP")]
    result["units"] = units

    accelerator.save_state(folder / "state")
    after = together(accelerator, lm, optimizer, range(STEPS, STEPS + 2))
    later = {name: whole(p).clone() for name, p in named(accelerator, lm).items()}
    accelerator.load_state(folder / "state")
    result["loaded"] = error(named(accelerator, lm), weights)
    again = together(accelerator, lm, optimizer, range(STEPS, STEPS + 2))
    result["resumed"] = max(abs(a - b) for a, b in zip(after, again, strict=True))
    result["resumed weights"] = error(named(accelerator, lm), later)

    inner = accelerator.unwrap_model(lm)
    state = accelerator.get_state_dict(lm)
    inner.save_pretrained(
        folder / "saved", is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
    )
    accelerator.wait_for_everyone()
    read = LongspanForCausalLM.from_pretrained(folder / "saved").eval()
    result["saved"] = error(dict(read.named_parameters()), later)
    result["type"] = str(next(read.parameters()).dtype)
    inner.eval()
    prompts = batch(0)["input_ids"][:2, :4]
    drawn = inner.generate(prompts, max_new_tokens=6, do_sample=False)
    result["generated"] = int((drawn != read.generate(prompts, max_new_tokens=6, do_sample=False)).sum())
    return result


def rows(steps):
    wholes = [batch(step) for step in range(steps)]
    return [{name: t[i] for name, t in whole.items()} for whole in wholes for i in range(ROWS)]


def trainer(folder):
    """Trainer with data parallelism: two processes of 2 x 2 rows a step, and one of 8 rows; then a resumption."""
    return _trainers(folder)


def sharded_trainer_plain(folder):
    return _trainers(folder, sharded=True)


def sharded_trainer_smoothed(folder):
    return _trainers(folder, sharded=True, label_smoothing_factor=0.1)


def _trainers(folder, sharded=False, **options):
    from transformers import Trainer, TrainingArguments, set_seed

    def made(lm):
        set_seed(0)
        arguments = TrainingArguments(
            folder / "out",
            max_steps=4,
            learning_rate=1e-2,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_steps=1,
            train_sampling_strategy="sequential",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            **{"save_strategy": "steps", "save_steps": 2, **options},
        )
        assert arguments.device.type == "cpu"
        if sharded:
            _accelerated()
        return Trainer(lm, arguments, train_dataset=rows(4))

    def logged(trainer):
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain = model().train()
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    wanted = _by_hand(plain, options.get("label_smoothing_factor", 0.0))
    lm = model()
    first = made(lm)
    first.train()
    inner = first.accelerator.unwrap_model(first.model_wrapped)
    weights = {name: whole(p).clone() for name, p in inner.named_parameters()}
    result = {
        "processes": first.accelerator.num_processes,
        "shards": sum(isinstance(p, DTensor) for p in inner.parameters()) / len(weights),
        "losses": max(abs(a - b) for a, b in zip(logged(first), wanted, strict=True)),
        "weights": error(weights, {name: p.detach() for name, p in plain.named_parameters()}),
        "moved": error(weights, before),
    }
    first.save_model(folder / "saved")
    first.accelerator.wait_for_everyone()
    result["saved"] = error(dict(LongspanForCausalLM.from_pretrained(folder / "saved").named_parameters()), weights)
    if "label_smoothing_factor" not in options:
        again = made(model())
        again.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
        result["resumed"] = error(dict(again.accelerator.unwrap_model(again.model_wrapped).named_parameters()), weights)
    return result


def _by_hand(lm, epsilon):
    """Losses of one process whose steps have all rows."""
    optimizer, losses = torch.optim.AdamW(lm.parameters(), lr=1e-2, weight_decay=0.0), []
    for step in range(4):
        given = batch(step)
        logs = lm(given["input_ids"], attention_mask=given["attention_mask"]).logits[:, :-1].log_softmax(-1)
        labels = given["labels"][:, 1:]
        # Trainer counts the first tokens of rows that are padded on the left, of which the model has no loss.
        count = (labels != IGNORED).sum()
        if not epsilon:
            labels = labels.masked_fill(given["attention_mask"][:, :-1] == 0, IGNORED)
        there = labels != IGNORED
        picked = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0][there]
        loss = -((1 - epsilon) * picked.sum() + epsilon * logs.mean(-1)[there].sum()) / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    job, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    result = globals()[job](folder)
    if os.environ.get("RANK", "0") == "0":
        (folder / "results.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
