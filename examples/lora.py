"""Fine-tune a hybrid model of transformers with LoRA on packed text, on a CPU. A second run resumes the first.

    python examples/lora.py
    python examples/lora.py --model Qwen/Qwen3.5-0.8B --text my.txt --out runs/lora --steps 200

Without ``--model`` it builds a tiny Qwen3.5 with random weights, whose tokens are bytes; ``--width`` makes it larger.
Without ``--text`` it reads this file. ``--stock`` trains with transformers' own code, to compare time and memory; its
recurrent layers then leak between the paragraphs of a row. It requires pip install ".[lora]".
"""

import argparse
import resource
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import longspan
import longspan.compat.transformers as on_cpu
from longspan.modules.quantized import QuantizedLinear

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="", help="name on the Hub or folder; default: random weights")
parser.add_argument("--text", default=__file__, help="a file whose paragraphs are the sequences")
parser.add_argument("--out", default="runs/lora", help="folder for checkpoints and the adapter")
parser.add_argument("--steps", type=int, default=20, help="training steps, those of a resumed run included")
parser.add_argument("--rows", type=int, default=8, help="paragraphs packed into one row")
parser.add_argument("--width", type=int, default=64, help="hidden size of that model, a multiple of 64")
parser.add_argument("--vocabulary", type=int, default=256, help="tokens of that model, of which the text has 256")
parser.add_argument("--stock", action="store_true", help="train with transformers' own code")
parser.add_argument("--weights", choices=("int8", "int4"), help="round the frozen weights to 8 or 4 bits")
parser.add_argument("--rank", type=int, default=8, help="rank of the adapter")
args = parser.parse_args()

torch.manual_seed(0)

paragraphs = [text for text in Path(args.text).read_text(encoding="utf-8").split("\n\n") if text.strip()]
if args.model:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    sequences = [{"input_ids": tokenizer(text)["input_ids"]} for text in paragraphs]
else:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    width = args.width
    model = Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=args.vocabulary,
            hidden_size=width,
            intermediate_size=width * 3,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=width // 4,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=width // 4,
            linear_value_head_dim=width // 4,
            eos_token_id=None,
        )
    )
    sequences = [{"input_ids": list(text.encode())} for text in paragraphs]

# Adapters on all projections, those of the recurrent layers included.
config = LoraConfig(r=args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
if args.weights:
    layers = [layer.name for layer in longspan.quantize(model, args.weights) if layer.format]
    config.target_modules = [name for name in layers if not name.endswith(("embed_tokens", "lm_head"))]
    config._register_custom_module({QuantizedLinear: LoraLinear})
if not args.stock:
    on_cpu.accelerate(model, lazy_logits=True)
model = get_peft_model(model, config)
model.print_trainable_parameters()
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.rows,
        learning_rate=1e-3,
        use_cpu=True,
        logging_steps=max(args.steps // 5, 1),
        save_steps=max(args.steps // 10, 1),
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=sequences,
    data_collator=DataCollatorWithFlattening(),
)
last = get_last_checkpoint(args.out) if Path(args.out).is_dir() else None
if last:
    print(f"resuming from {last}")
begin = time.perf_counter()
trainer.train(resume_from_checkpoint=last)
model.save_pretrained(args.out)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
# The trainer's own mean counts the steps before an interruption as steps without a loss.
loss = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
seconds = time.perf_counter() - begin
print(f"step {trainer.state.global_step}: loss {loss}, {seconds:.1f} s, peak {peak:,.0f} MB, adapter in {args.out}")
if not args.stock:
    print(on_cpu.status())
