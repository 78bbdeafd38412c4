"""Time and memory of a LoRA step: `longspan finetune` and a loop over transformers and peft, in turns.

    python examples/finetune_cost.py
    python examples/finetune_cost.py --model ./Qwen3.5-0.8B --rounds 3
    python examples/finetune_cost.py --width 512 --vocabulary 248320 --weights int8 --precision bf16 \\
        --plain-dtype bfloat16

Without ``--model`` it builds a Qwen3.5 with random weights. The sequences are beginnings of modules of Python's
standard library, as bytes. longspan packs them into rows. The plain loop pads them, because recurrent layers of
transformers leak between the sequences of a row. Each turn runs in a separate process, with the same weights and
sequences. Memory is read on Linux. It requires pip install ".[train,lora]".
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import longspan.compat.transformers as on_cpu
from longspan import finetune
from longspan.data import text
from longspan.serving.text import Bytes

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="", help="a folder of transformers; default: random weights")
parser.add_argument("--width", type=int, default=128, help="hidden size of that model, a multiple of 64")
parser.add_argument("--layers", type=int, default=4, help="layers of that model")
parser.add_argument("--vocabulary", type=int, default=8192, help="tokens of that model, of which the text has 256")
parser.add_argument("--sequences", type=int, default=8, help="sequences of a step")
parser.add_argument("--bytes", type=int, default=512, help="most bytes of a sequence")
parser.add_argument("--steps", type=int, default=3, help="steps of a turn; the first one is not timed")
parser.add_argument("--rounds", type=int, default=2, help="turns of each")
parser.add_argument(
    "--targets",
    default="q_proj,k_proj,v_proj,o_proj,in_proj_qkv,in_proj_z,out_proj,gate_proj,up_proj,down_proj",
    help="ends of the names of the layers that are changed",
)
parser.add_argument("--checkpointing", action="store_true", help="both store the inputs of blocks alone")
parser.add_argument(
    "--weights", default="", help="int8 | int4, to which longspan rounds the frozen weights; default: none"
)
parser.add_argument(
    "--precision", choices=("32", "bf16"), default="32", help="that of longspan, as in `longspan finetune`"
)
parser.add_argument("--plain-dtype", default="float32", help="dtype of the plain loop's model: float32 | bfloat16")
parser.add_argument("--turn", choices=("longspan", "plain"), help=argparse.SUPPRESS)
args = parser.parse_args()


def build():
    """The model, with the same weights in every process."""
    if args.model:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    width, heads = args.width, {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    config = Qwen3_5TextConfig(
        vocab_size=args.vocabulary,
        hidden_size=width,
        intermediate_size=width * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        linear_key_head_dim=width // 4,
        linear_value_head_dim=width // 4,
        eos_token_id=None,
        **heads,
    )
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(config)


def rows(vocab):
    """The sequences as packed rows, all of which are a step."""
    # Lengths from an eighth of the most on.
    words = [content.decode("utf-8", "ignore") for content in text.documents_of("stdlib")]
    words = [one for one in words if len(one.encode()) > args.bytes][: args.sequences]
    sizes = [args.bytes * (1 + i * 7 // max(len(words) - 1, 1)) // 8 for i in range(len(words))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.jsonl")
        lines = [
            json.dumps({"text": one.encode()[:size].decode("utf-8", "ignore")})
            for one, size in zip(words, sizes, strict=True)
        ]
        path.write_text("\n".join(lines), encoding="utf-8")
        options = {"vocab": vocab, "start": None, "length": args.bytes, "held": 0.0, "every": True, "packed": True}
        return finetune.load(str(path), Bytes(), **options)


def longspan_step(model):
    """A step of ``longspan finetune`` -> what computes its loss, and the weights that are trained."""
    on_cpu.accelerate(model)
    torch.manual_seed(1)
    how = finetune.FinetuneConfig(targets=args.targets, checkpointing=args.checkpointing, weights=args.weights)
    tuned = finetune.Tuned(model, how, wide=args.precision == "32")
    data = rows(model.config.vocab_size)
    batch = data.take("train", torch.arange(data.count("train")))

    def loss():
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            return tuned.nats(batch) / (batch.targets >= 0).sum()

    return loss, [*tuned.parameters()]


def plain_step(model):
    """The same in the plain way: the same changes, and a padded row for each sequence."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    changes = LoraConfig(r=8, lora_alpha=16, target_modules=args.targets.split(","), task_type="CAUSAL_LM")
    changed = get_peft_model(model, changes)
    if args.checkpointing:
        changed.gradient_checkpointing_enable({"use_reentrant": False})
    data = rows(model.config.vocab_size)
    batch = data.take("train", torch.arange(data.count("train")))
    parts = [
        (inputs[segments == number], labels[segments == number])
        for inputs, labels, segments in zip(batch.inputs, batch.targets, batch.segments, strict=True)
        for number in segments.unique()
    ]
    parts = [part for part in parts if bool((part[1] >= 0).any())]
    ids = torch.nn.utils.rnn.pad_sequence([inputs for inputs, _ in parts], batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence([labels for _, labels in parts], batch_first=True, padding_value=-100)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(inputs) for inputs, _ in parts], batch_first=True)

    def loss():
        logits = changed(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return loss, [p for p in changed.parameters() if p.requires_grad]


def resident(field):
    """Resident memory of this process in MB, now (VmRSS) or at the peak (VmHWM)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def turn(name):
    """Train for some steps in this process, and print the figures as JSON."""
    model = build().train()
    if name == "plain":
        model = model.to(getattr(torch, args.plain_dtype))
    before = resident("VmRSS")
    loss, trained = (longspan_step if name == "longspan" else plain_step)(model)
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    losses, times = [], []
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    for _ in range(args.steps):
        begin = time.perf_counter()
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
        losses.append(float(value))
    peak = resident("VmHWM")
    print(json.dumps({"losses": losses, "seconds": median(times[1:] or times), "peak": peak, "more": peak - before}))


if args.turn:
    turn(args.turn)
    sys.exit()
data = rows(args.vocabulary)
tokens = int(data.splits["train"].counted.sum())
found = {"longspan": [], "plain": []}
for _ in range(args.rounds):
    for name, results in found.items():
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--turn", name], check=True, capture_output=True, text=True
        )
        results.append(json.loads(done.stdout.splitlines()[-1]))
print(f"{args.sequences} sequences, {tokens:,} tokens with a loss per step, {data.count('train')} packed rows")
for name, results in found.items():
    seconds, peak, more = (median(one[key] for one in results) for key in ("seconds", "peak", "more"))
    losses = " ".join(f"{loss:.5f}" for loss in results[0]["losses"])
    print(
        f"{name}: {tokens / seconds:,.0f} tokens/s, peak {peak:,.0f} MB, {more:+,.0f} MB to the model; losses {losses}"
    )
pairs = [*zip(found["plain"], found["longspan"], strict=True)]
speed, memory = (median(a[key] / b[key] for a, b in pairs) for key in ("seconds", "peak"))
print(f"longspan has {speed:.2f} times the tokens/s and {1 / memory:.2f} times the peak memory")
