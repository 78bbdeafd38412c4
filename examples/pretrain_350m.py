"""Pretrain a language model on all GPUs: data parallel or fully sharded, with rows spread over several GPUs if wanted.

    torchrun --nproc-per-node 8 examples/pretrain_350m.py --tokens 'shards/*.npy'
    torchrun --nproc-per-node 8 examples/pretrain_350m.py --strategy fsdp --sequence 4 --length 65536
    torchrun --nproc-per-node 2 examples/pretrain_350m.py --small --sequence 2

Token shards are files of ``numpy.save``: one dimension of token numbers, read by memory map. Without ``--tokens`` the
model learns synthetic rows, of numbers that grow by a fixed step. ``--small`` is a model of seconds on a CPU.
``--sequence N`` spreads each row over N processes; the others read other rows.
"""

import argparse
import contextlib
import glob
import math
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import longspan
from longspan.distributed import mean_over_ranks, sequence_parallel, shard_inputs

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", help="files of token numbers, such as 'shards/*.npy'; default: synthetic rows")
parser.add_argument("--vocab", type=int, default=50304, help="size of the vocabulary; default: %(default)s")
parser.add_argument("--attention", default="gated_deltanet", help="any causal spec; default: %(default)s")
parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp", help="default: %(default)s")
parser.add_argument("--sequence", type=int, default=1, help="processes that share each row; default: %(default)s")
parser.add_argument("--length", type=int, default=4096, help="tokens in a row; default: %(default)s")
parser.add_argument("--batch", type=int, default=8, help="rows of each group of processes; default: %(default)s")
parser.add_argument("--steps", type=int, default=20000, help="training steps; default: %(default)s")
parser.add_argument("--rate", type=float, default=6e-4, help="highest learning rate; default: %(default)s")
parser.add_argument("--small", action="store_true", help="a tiny model, short rows and few steps")
parser.add_argument("--out", help="folder for the trained model; default: it is not saved")
args = parser.parse_args()
if args.small:
    args.vocab, args.length, args.batch = 64, min(args.length, 64), 2
    args.steps, args.rate = min(args.steps, 20), 3e-3

cuda = torch.cuda.is_available()
local = int(os.environ.get("LOCAL_RANK", "0"))
device = torch.device("cuda", local) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
# Without torchrun it is one process.
alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("nccl" if cuda else "gloo", **alone)
rank, world = dist.get_rank(), dist.get_world_size()
if world % args.sequence:
    raise SystemExit(f"--sequence {args.sequence} must divide the number of processes, {world}")
mesh = init_device_mesh(device.type, (world // args.sequence, args.sequence), mesh_dim_names=("data", "sequence"))
reader, readers = mesh.get_local_rank("data"), world // args.sequence

files: list[Any] = [np.load(name, mmap_mode="r") for name in sorted(glob.glob(args.tokens))] if args.tokens else []
windows = [(file, start) for file in files for start in range(0, len(file) - args.length + 1, args.length)]
if args.tokens and not windows:
    raise SystemExit(f"{args.tokens} has no file of at least {args.length} tokens")


def rows(step: int) -> Tensor:
    """Return the rows (B,N) of a step: the same on the processes that share them, others on the other processes."""
    numbers = [(step * readers + reader) * args.batch + i for i in range(args.batch)]
    if windows:
        count = len(windows)
        # A step that has no divisor in common with the number of windows visits all of them.
        stride = next(s for s in range(int(count * 0.618) + 1, 2 * count + 2) if math.gcd(s, count) == 1)
        chosen = [windows[number * stride % count] for number in numbers]
        found = np.stack([file[start : start + args.length] for file, start in chosen])
        return torch.from_numpy(found.astype(np.int64)).to(device)
    at = torch.arange(args.length, device=device)
    return torch.stack([(at * (number % 5 + 1) + number) % args.vocab for number in numbers])


sizes = {"dim": 32, "depth": 2, "heads": 2, "feedforward": 64} if args.small else {}
sizes = sizes or {"dim": 1024, "depth": 24, "heads": 8, "feedforward": 2304}
torch.manual_seed(0)
config = longspan.DecoderConfig(
    **sizes, vocab=args.vocab, attention=args.attention, positions="none", checkpointing=not args.small
)
model = longspan.Decoder(config).to(device)
count = sum(p.numel() for p in model.parameters())
call: Callable[..., Any]
if args.strategy == "fsdp":
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if cuda else None
    options = {"mesh": init_device_mesh(device.type, (world,))} | ({"mp_policy": policy} if policy else {})
    for block in model.stack.blocks:
        fully_shard(block, **options)
    call = fully_shard(model, **options)
else:
    call = DistributedDataParallel(model, device_ids=[local] if cuda else None)

decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.95))
warmup = max(args.steps // 50, 1)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer,
    lambda step: (
        (step + 1) / warmup if step < warmup else 0.1 + 0.45 * (1 + math.cos(math.pi * min(step / args.steps, 1.0)))
    ),
)
# FSDP2 casts by its own policy.
autocast = cuda and args.strategy == "ddp"
split = sequence_parallel(model, mesh["sequence"]) if args.sequence > 1 else contextlib.nullcontext()

if rank == 0:
    print(f"{count / 1e6:.1f}M weights, {readers} x {args.sequence} processes, {args.strategy}", flush=True)
begin = time.perf_counter()
with split:
    for step in range(args.steps):
        tokens = rows(step)
        if args.sequence > 1:
            inputs, targets = shard_inputs(model, tokens, mesh["sequence"])
        else:
            inputs, targets = model.shift(tokens), tokens
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            outputs, _ = call(inputs)
        loss = mean_over_ranks(-model.likelihood.log_prob(outputs.float(), targets))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if rank == 0 and (step + 1) % max(args.steps // 100, 5) == 0:
            done = (step + 1) * readers * args.batch * args.length / (time.perf_counter() - begin)
            print(f"step {step + 1:6d}: loss {loss.item():.4f}, {done:,.0f} tokens per second", flush=True)

if args.out:
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        whole = longspan.Decoder(config)
        whole.load_state_dict(weights)
        longspan.save(whole, args.out)
        print(f"saved in {args.out}", flush=True)
dist.destroy_process_group()
