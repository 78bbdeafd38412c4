"""Whole models of transformers with recurrent layers, by its own code and on longspan's kernels, in turn."""

import contextlib
import ctypes
import importlib
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from longspan._utils.machine import machine
from longspan._utils.optional_deps import need
from longspan._utils.spec import known
from longspan.compat import transformers as on_cpu
from longspan.ops.buffers import reuse_pages

from .._utils.tables import Table, duration
from . import case, hybrid_weights, worker
from .candidates import Refused, Sampler
from .case import Watch
from .options import length, option, rounds

COMMON = {
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# name: model type, class, how it differs from what is published, its configuration
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "qwen3.5": (
        "qwen3_5",
        "Qwen3_5",
        "Qwen3.5-0.8B with 8 of its 24 layers",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "kimi": (
        "kimi_linear",
        "KimiLinear",
        "Kimi-Linear cut to a width of 1024, 8 heads of 128, 4 layers and no experts",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "linear_num_heads": 8,
            "linear_head_dim": 128,
            "kv_lora_rank": 512,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "mlp_layer_types": ["dense"] * 4,
        },
    ),
    "mamba2": (
        "mamba2",
        "Mamba2",
        "mamba2-370m with 6 of its 48 layers",
        {
            "hidden_size": 1024,
            "num_heads": 32,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "num_hidden_layers": 6,
        },
    ),
    "granite": (
        "granitemoehybrid",
        "GraniteMoeHybrid",
        "Granite-4.0-H-350M with 8 of its 32 layers, one of softmax attention",
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "shared_intermediate_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 48,
            "mamba_d_head": 32,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "layer_types": ["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 2,
        },
    ),
    "granite_experts": (
        "granitemoehybrid",
        "GraniteMoeHybrid",
        "Granite-4.0-H-Tiny with 3 of its 40 layers, one of softmax attention, and 16 of its 64 experts",
        {
            "hidden_size": 1536,
            "intermediate_size": 512,
            "shared_intermediate_size": 1024,
            "num_hidden_layers": 3,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 16,
            "num_experts_per_tok": 6,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "qwen3next": (
        "qwen3_next",
        "Qwen3Next",
        "Qwen3-Next cut to a width of 1024, 4 layers and 16 of its 512 experts",
        {
            "hidden_size": 1024,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 16,
            "num_experts_per_tok": 4,
        },
    ),
    "mamba": (
        "mamba",
        "Mamba",
        "mamba-370m with 3 of its 48 layers, trained on 256 tokens, since its own code is quadratic",
        {"hidden_size": 1024, "state_size": 16, "num_hidden_layers": 3},
    ),
    "mamba_layer": (
        "mamba",
        "Mamba",
        "one layer of mamba-370m with a vocabulary of 64, trained on 256 tokens",
        {"hidden_size": 1024, "state_size": 16, "num_hidden_layers": 1, "vocab_size": 64},
    ),
    "recurrentgemma": (
        "recurrent_gemma",
        "RecurrentGemma",
        "RecurrentGemma-2B cut to a width of 1024, 3 layers, one of softmax attention, trained on 512 tokens",
        {
            "hidden_size": 1024,
            "lru_width": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
    ),
    "rwkv4": (
        "rwkv",
        "Rwkv",
        "RWKV-4-430M with 3 of its 24 layers, trained on 512 tokens",
        {"hidden_size": 1024, "attention_hidden_size": 1024, "num_hidden_layers": 3},
    ),
    "xlstm": (
        "xlstm",
        "xLSTM",
        "xLSTM-7B cut to a width of 1024, 4 heads of 128 and 256, 3 layers",
        {"hidden_size": 1024, "num_heads": 4, "num_hidden_layers": 3, "tie_word_embeddings": False},
    ),
}
# Tokens of a training step, where the time of transformers' code grows faster than the length.
TRAINED = {"mamba": 256, "mamba_layer": 256, "recurrentgemma": 512, "rwkv4": 512}
TRAINING = "training step"
MODES = ("prefill", TRAINING, "decoding")
WAYS = ("transformers", "longspan")
DTYPES = ("float32", "bfloat16")
ALLOWED, WORSE = 1e-4, 1.2  # float32: relative to its own code; bfloat16: times the error of that
COMPARED = 300  # tokens
PROMPT = 128  # tokens before those that are decoded
DECODED = 16  # tokens in a sample


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    models: tuple[str, ...] = option(
        tuple(MODELS), f"which of {', '.join(MODELS)} to measure, by default all", "positional", metavar="MODEL"
    )
    length: int = length(2048, "tokens per prompt and training step")
    dtypes: tuple[str, ...] = option(DTYPES, "dtypes, separated by commas", "words", metavar="DTYPES")
    rounds: int = rounds(3, "samples per implementation")
    weights: tuple[str, ...] = option(
        (),
        f"measure decoding with weights of few bits instead, of {', '.join(hybrid_weights.FILES)}",
        "words",
        metavar="WEIGHTS",
    )
    small: bool = option(False, "use models a few channels wide, as a smoke test of seconds")


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "shared_intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "kv_lora_rank": 16,
    "num_heads": 4,
    "state_size": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "attention_hidden_size": 64,
    "lru_width": 64,
    "vocab_size": 97,
}
SMALL_OWN = {"mamba2": {"head_dim": 32}, "xlstm": {"hidden_size": 128, "num_heads": 2}}


def model(name: str, dtype: str, small: bool) -> Any:
    """A model with random weights that are the same in every process."""
    need("the benchmark of transformers", "transformers")
    # Silence the warning that faster code for GPUs is missing.
    importlib.import_module("transformers.utils.logging").set_verbosity_error()
    kind, prefix, _, own = MODELS[known(name, MODELS, "model")]
    config = importlib.import_module(f"transformers.models.{kind}.configuration_{kind}")
    make = getattr(config, f"{prefix}TextConfig", None) or getattr(config, f"{prefix}Config")
    given = COMMON | own
    if small:
        given |= {k: v for k, v in SMALL.items() if k in given} | SMALL_OWN.get(name, {})
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        file = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        return getattr(file, f"{prefix}ForCausalLM")(make(**given)).to(getattr(torch, dtype)).eval()


def tokens(made: Any, length: int) -> torch.Tensor:
    """(1,N) of them, drawn once."""
    return torch.randint(1, made.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))


def use(way: str) -> None:
    """Have transformers run by its own code or by our kernels."""
    on_cpu.restore()
    if way == WAYS[1]:
        on_cpu.accelerate()


def prefill(made: Any, length: int) -> Callable[[], object]:
    """A prompt, with the cache that it leaves, and the outputs of its last token."""
    x = tokens(made, length)

    @torch.no_grad()
    def run() -> object:
        return made(x, use_cache=True, **latest(made))

    return run


def training(made: Any, length: int) -> Callable[[], object]:
    """The loss of a sequence and all gradients, which are thrown away."""
    x = tokens(made, length)

    def run() -> object:
        made.train()
        made(x, labels=x, use_cache=False).loss.backward()
        made.zero_grad(set_to_none=True)
        return made.eval()

    return run


def prompted(made: Any, x: torch.Tensor) -> tuple[str, Any]:
    """The cache after a prompt, and the name by which the model takes it."""
    if made.config.model_type == "recurrent_gemma":
        # The cache that it makes by itself is not returned.
        cache = importlib.import_module("transformers").DynamicCache(config=made.config)
        made(x, use_cache=True, cache=cache)
        return "cache", cache
    found = made(x, use_cache=True, **latest(made))
    # The first where they have it, in transformers from 5.24 on, answers to the others too.
    name = next(name for name in ("cache", "past_key_values", "cache_params", "state") if name in found)
    return name, found[name]


def latest(made: Any) -> dict[str, int]:
    """The argument for the outputs of the last token only, where the model has it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(made.forward).parameters else {}


def decoding(way: str, made: Any) -> Sampler:
    """The seconds of one token, after a prompt, of ``DECODED`` in a row."""
    x = tokens(made, PROMPT)

    @torch.no_grad()
    def sample(repeat: int) -> float:
        use(way)
        token, (name, cache) = x[:, :1], prompted(made, x)
        begin = time.perf_counter()
        for _ in range(repeat * DECODED):
            made(token, use_cache=True, **{name: cache})
        return (time.perf_counter() - begin) / (repeat * DECODED)

    return sample


def sampler(way: str, run: Callable[[], object]) -> Sampler:
    """Times a call by one of the two ways, which is taken outside of the time."""

    def sample(repeat: int) -> float:
        use(way)
        return worker.timed(run, repeat)

    return sample


def check(name: str, dtype: str, options: Options) -> float:
    """How far the outputs are from those of the original code in float32: the relative error, all numbers together.

    Raises Refused where that is too far.
    """

    @torch.no_grad()
    def outputs(way: str, dtype: str) -> torch.Tensor:
        use(way)
        made = model(name, dtype, options.small)
        return made(tokens(made, min(COMPARED, options.length)), use_cache=False).logits.float()

    exact = outputs(WAYS[0], "float32")
    ours = float((outputs(WAYS[1], dtype) - exact).norm() / exact.norm())
    allowed = ALLOWED
    if dtype != "float32":
        allowed = WORSE * float((outputs(WAYS[0], dtype) - exact).norm() / exact.norm())
    if not ours <= allowed:
        raise Refused(f"its outputs are off by {ours:.2g}, more than {allowed:.2g}")
    return ours


def weigh(name: str, dtype: str, way: str, length: int, small: bool, threads: int) -> float:
    """Peak resident memory of a training step in MB, without the model; run it in a separate process."""
    torch.set_num_threads(threads)
    made = model(name, dtype, small)
    use(way)
    training(made, 64)()
    run = training(made, length)
    # What that call has freed would otherwise be used again, uncounted.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")
    before = worker.status("VmRSS")
    run()
    return worker.status("VmHWM") - before


def trained(name: str, options: Options) -> int:
    """Tokens of a training step."""
    return min(options.length, TRAINED.get(name, options.length))


def memory(name: str, dtype: str, way: str, length: int, options: Options) -> float:
    """Run ``weigh`` in a separate process. Raises Refused if it fails."""
    asked = json.dumps([name, dtype, way, length, options.small, torch.get_num_threads()])
    code = f"import json; from longspan_lab.bench import hybrids; print(hybrids.weigh(*json.loads({asked!r})))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise Refused(said[-1] if said else f"its process ended with code {done.returncode}")
    return float(done.stdout.split()[-1])


def profile(name: str, made: Any, options: Options) -> dict[str, float]:
    """What a training step on our kernels spends its time on: parts of the whole, the largest first."""
    use(WAYS[1])
    run = training(made, trained(name, options))
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    events = found.key_averages()
    whole = sum(event.self_cpu_time_total for event in events)
    largest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:8]
    return {event.key: event.self_cpu_time_total / whole for event in largest}


def run(options: Options, watch: Watch) -> Generator[dict[str, Any], None, None]:
    """Measure; yield the growing result for ``report.collect``. Raises ValueError for a model that is not known."""
    for name in options.models:
        known(name, MODELS, "model")
    for dtype in options.dtypes:
        known(dtype, dict.fromkeys(DTYPES), "dtype")
    for kind in options.weights:
        known(kind, hybrid_weights.FILES, "kind of weights")
    reuse_pages()  # as train and generate do
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    profiles: dict[str, dict[str, float]] = {}
    for name in options.models:
        for dtype in options.dtypes if not options.weights else ():
            try:
                error = check(name, dtype, options)
                made = model(name, dtype, options.small)
                for mode in MODES:
                    rows += _compared(name, dtype, mode, made, error, options, watch)
                    yield _result(options, rows, refused, profiles)
                profiles[f"{name}, {dtype}"] = profile(name, made, options)
            except Refused as error:
                refused[f"{name}, {dtype}"] = str(error)
            finally:
                on_cpu.restore()
            yield _result(options, rows, refused, profiles)
        if options.weights:
            try:
                made = model(name, "float32", options.small)
                rows += hybrid_weights.rows(name, made, options.weights, options.rounds, watch)
            except Refused as error:
                refused[name] = str(error)
            finally:
                on_cpu.restore()
            yield _result(options, rows, refused, profiles)


def _compared(
    name: str, dtype: str, mode: str, made: Any, error: float, options: Options, watch: Watch
) -> list[dict[str, Any]]:
    """Rows of one model in one mode, by both ways in turn."""
    samplers: dict[str, Sampler] = {}
    length = trained(name, options) if mode == TRAINING else options.length
    for way in WAYS:
        make = {"prefill": prefill, TRAINING: training}.get(mode)
        samplers[way] = decoding(way, made) if make is None else sampler(way, make(made, length))
    found, failed = case.take(samplers, options.rounds, f"{name} {dtype} {mode}", watch, warm=options.small)
    if failed:
        raise Refused("; ".join(failed.values()))
    rows = []
    for way in WAYS:
        row = {"model": name, "dtype": dtype, "mode": mode, "candidate": way, "error": error, **found[way].row()}
        row["times_transformers"] = found[WAYS[0]].seconds / found[way].seconds
        row["tokens_per_second"] = (1 if mode == "decoding" else length) / found[way].seconds
        if mode == TRAINING and sys.platform == "linux":
            row["mb"] = memory(name, dtype, way, length, options)
        rows.append(row)
    if mode == TRAINING and length < options.length:
        rows.append(_whole(name, dtype, made, error, options, watch))
    return rows


def _whole(name: str, dtype: str, made: Any, error: float, options: Options, watch: Watch) -> dict[str, Any]:
    """The row of a training step at the whole length, on longspan's kernels only."""
    way, length = WAYS[1], options.length
    mode = f"{TRAINING} of {length} tokens"
    samplers = {way: sampler(way, training(made, length))}
    found, failed = case.take(samplers, options.rounds, f"{name} {dtype} {mode}", watch, warm=options.small)
    if failed:
        raise Refused("; ".join(failed.values()))
    row = {"model": name, "dtype": dtype, "mode": mode, "candidate": way, "error": error, **found[way].row()}
    row["tokens_per_second"] = length / found[way].seconds
    if sys.platform == "linux":
        row["mb"] = memory(name, dtype, way, length, options)
    return row


def _result(options: Options, rows: list, refused: dict[str, str], profiles: dict) -> dict[str, Any]:
    described = "; ".join(f"{name}: {MODELS[name][2]}" for name in options.models)
    drawn, read = hybrid_weights.DECODED, hybrid_weights.PROMPT
    of_weights = (
        f"{described}; random weights, a vocabulary of {COMMON['vocab_size']}; a token of 1 sequence "
        f"after {read} others, and of 64 after {hybrid_weights.FEW}, the most likely one, {drawn} or "
        f"{hybrid_weights.FEW} in a row; int8 and int4 are GGUF files in Q8_0 and Q4_0, "
        f"which longspan reads with activations of int16 or int8; medians of {options.rounds} rounds in which all take "
        f"turns, a quarter of them for 64 sequences, on {torch.get_num_threads()} threads; memory: resident at the "
        "peak, beyond what a process has that has loaded the file before"
        + ("; models a few channels wide" * options.small)
    )
    return {
        "benchmark": "transformers",
        "how": of_weights
        if options.weights
        else (
            f"{described}; random weights, a vocabulary of {COMMON['vocab_size']}, one sequence of {options.length} "
            f"tokens unless stated otherwise; prefill: outputs of the last token and the cache; training step: loss "
            f"and all gradients, its memory: resident at its peak beyond the model, in a separate process; decoding: a "
            f"token after {PROMPT} "
            f"others; medians of {options.rounds} rounds in which both take turns; each first agreed with the original "
            f"code on {min(COMPARED, options.length)} tokens" + ("; models a few channels wide" * options.small)
        ),
        "machine": machine() | {"transformers": importlib.import_module("transformers").__version__},
        "options": asdict(options),
        "rows": rows,
        "profiles": profiles,
        "refused": [{"candidate": name, "reason": reason, "ours": True} for name, reason in refused.items()],
    }


def text(result: dict[str, Any]) -> list[Table]:
    """The tables: times by model and mode, and the parts of a training step."""
    if result["options"].get("weights"):
        return [hybrid_weights.table(result["rows"])]
    table = [["model", "dtype", "mode", *WAYS, "speed-up", "tokens/s", "peak MB", "ratio"]]
    at = {(r["model"], r["dtype"], r["mode"], r["candidate"]): r for r in result["rows"]}
    for name, dtype, mode in dict.fromkeys(key[:3] for key in at):
        both = [at.get((name, dtype, mode, way), {}) for way in WAYS]
        theirs, ours = both
        seconds, rates, sizes = (
            [form(one[key]) if key in one else "-" for one in both]
            for key, form in (("seconds", duration), ("tokens_per_second", "{:,.4g}".format), ("mb", "{:,.0f}".format))
        )
        table.append(
            [
                name,
                dtype,
                mode,
                *seconds,
                f"{ours['times_transformers']:.2f}x" if theirs else "-",
                " / ".join(rates),
                " / ".join(sizes) if "mb" in ours else "",
                f"{ours['mb'] / theirs['mb']:.2f}" if theirs.get("mb", 0) > 0 else "",
            ]
        )
    shares = [["a training step on longspan", "parts of its time"]]
    for name, parts in result["profiles"].items():
        shares.append([name, ", ".join(f"{key} {100 * part:.0f} %" for key, part in parts.items())])
    return [table, shares] if len(shares) > 1 else [table]
