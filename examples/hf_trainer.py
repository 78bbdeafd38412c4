"""Train a small language model of bytes with Trainer of transformers, on one or several processes.

    python examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py
    accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP examples/hf_trainer.py

Without ``--text`` the model learns a few sentences by heart. Each process reads its own windows. The last command
shards the model over GPUs. A second run with the same ``--out`` resumes from the last checkpoint. It requires
pip install ".[transformers]" and accelerate.
"""

import argparse
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from longspan.compat.transformers import LongspanConfig, LongspanForCausalLM, byte_tokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--text", type=Path, help="a text file; default: a few sentences")
parser.add_argument("--attention", default="gated_deltanet; softmax", help="any causal spec; default: %(default)s")
parser.add_argument("--dim", type=int, default=64, help="model width, a multiple of 4; default: %(default)s")
parser.add_argument("--length", type=int, default=64, help="bytes in a window; default: %(default)s")
parser.add_argument("--batch", type=int, default=8, help="windows per step of all processes; default: %(default)s")
parser.add_argument("--steps", type=int, default=100, help="training steps; default: %(default)s")
parser.add_argument("--out", type=Path, default=Path("runs/hf_trainer"), help="folder; default: %(default)s")
args = parser.parse_args()

TEXT = """A model of this kind reads a text from left to right. It keeps a state of fixed size, and it updates the state
with each new byte. To train it, all bytes of a window are read at once. To generate a text, it reads its own bytes.
Both give the same numbers, so what was learned in parallel is used step by step.
"""

data = args.text.read_bytes() if args.text else TEXT.encode()
if len(data) <= args.length:
    raise SystemExit(f"the text has {len(data)} bytes, but a window needs {args.length + 1}; choose a smaller --length")
starts = range(0, len(data) - args.length, max(1, args.length // 4))
windows = [torch.tensor(list(data[at : at + args.length])) for at in starts]
rows = [{"input_ids": window, "labels": window} for window in windows]

torch.manual_seed(0)
config = LongspanConfig(dim=args.dim, depth=2, heads=4, feedforward=2 * args.dim, vocab=256, attention=args.attention)
model = LongspanForCausalLM(config)
arguments = TrainingArguments(
    str(args.out),
    max_steps=args.steps,
    learning_rate=3e-3,
    logging_steps=max(args.steps // 5, 1),
    save_steps=max(args.steps // 2, 1),
    save_total_limit=2,
    use_cpu=not torch.cuda.is_available(),
    # All blocks are used in each step.
    ddp_find_unused_parameters=False,
    report_to=[],
    disable_tqdm=True,
)
if args.batch % arguments.world_size:
    raise SystemExit(f"--batch {args.batch} must be a multiple of the number of processes, {arguments.world_size}")
arguments.per_device_train_batch_size = args.batch // arguments.world_size
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train(resume_from_checkpoint=get_last_checkpoint(str(args.out)) if args.out.is_dir() else None)
# All processes together, since each may have a part of the weights.
trainer.save_model()
if trainer.is_world_process_zero():
    byte_tokenizer().save_pretrained(args.out)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(
        f"{arguments.world_size} processes, loss {losses[0]:.4f} at first and {losses[-1]:.4f} at last, in {args.out}"
    )
    saved = LongspanForCausalLM.from_pretrained(args.out).eval()
    prompt = torch.tensor([list(data[:10])])
    drawn = saved.generate(prompt, max_new_tokens=40, do_sample=False)[0].tolist()
    print(repr(bytes(drawn).decode(errors="replace")))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
