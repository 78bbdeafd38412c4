"""Run a hybrid model of Hugging Face transformers with its own code and with longspan's CPU kernels, and compare both.

    python examples/hf_hybrid.py
    python examples/hf_hybrid.py --kind qwen3_5 --length 2048 --width 512

The model is small and has random weights, so nothing is downloaded. For a real model, call
``longspan.compat.transformers.accelerate()`` before or after ``from_pretrained``. It requires
pip install ".[transformers]".
"""

import argparse
import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, logging

import longspan.compat.transformers as on_cpu

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--kind", choices=("kimi_linear", "qwen3_5", "mamba2"), default="kimi_linear", help="model type")
parser.add_argument("--length", type=int, default=1024, help="tokens of the sequence; default: %(default)s")
parser.add_argument("--width", type=int, default=256, help="hidden size, a multiple of 64; default: %(default)s")
parser.add_argument("--rounds", type=int, default=3, help="timed repetitions; default: %(default)s")
args = parser.parse_args()

logging.set_verbosity_error()  # transformers warns that it runs its reference code
heads = args.width // 64
OWN = {
    "kimi_linear": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense"] * 4,
        "linear_num_heads": heads,
        "linear_head_dim": 64,
        "num_key_value_heads": heads,
        "kv_lora_rank": 64,
    },
    "qwen3_5": {
        "head_dim": 64,
        "num_key_value_heads": heads,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "mamba2": {"num_heads": 2 * heads, "head_dim": 64, "state_size": 64, "n_groups": 1},
}


def build():
    """Build the model with random weights."""
    name = {"qwen3_5": "qwen3_5_text"}.get(args.kind, args.kind)
    config = AutoConfig.for_model(
        name,
        vocab_size=1000,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=4,
        num_attention_heads=heads,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **OWN[args.kind],
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def measure(model, tokens):
    """Return logits, seconds of a prompt, and seconds of a training step (medians)."""
    prompt, train = [], []
    for _ in range(args.rounds + 1):  # the first round warms up
        begin = time.perf_counter()
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        prompt.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        train.append(time.perf_counter() - begin)
        model.zero_grad()
    return logits, statistics.median(prompt[1:]), statistics.median(train[1:])


model = build()
tokens = torch.randint(1, 1000, (1, args.length))
stock = measure(model, tokens)
on_cpu.accelerate(model)
fast = measure(model, tokens)

difference = ((fast[0] - stock[0]).abs().max() / stock[0].abs().max()).item()
assert difference < 1e-4, difference
print(f"{args.kind}, {sum(p.numel() for p in model.parameters()):,} random weights, {args.length} tokens, float32")
print(f"largest difference of the logits: {difference:.1e} of the largest logit")
print(f"{'':14}{'transformers':>14}{'longspan':>12}{'speed-up':>12}")
for name, i in (("prompt", 1), ("training step", 2)):
    print(f"{name:14}{stock[i] * 1000:11.0f} ms{fast[i] * 1000:9.0f} ms{stock[i] / fast[i]:11.1f}x")
print(on_cpu.status())
