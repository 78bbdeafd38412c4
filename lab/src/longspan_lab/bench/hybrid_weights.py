"""Tokens per second of whole models with weights of few bits, next to llama.cpp on the same GGUF file, in turn."""

import contextlib
import ctypes
import gc
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from longspan.compat import gguf
from longspan.compat import transformers as on_cpu
from longspan.compat.transformers.decoding import ENGINE

from . import case, rewind_peers, worker
from .candidates import Refused, Sampler
from .case import Watch

FILES = {"int8": "q8_0", "int4": "q4_0"}
FLOAT, PEER, OURS = "float32", "llama.cpp", "longspan"
PROMPT, DECODED = 16, 16  # tokens before those that are drawn, and those of a sample, for one sequence
FEW = 2  # both for many sequences
SETTLE = 0.01  # seconds after which the idle threads of other libraries sleep


def rows(name: str, made: Any, weights: tuple[str, ...], rounds: int, watch: Watch) -> list[dict[str, Any]]:
    """Return the rows of one model: a token by each candidate, for one sequence and for 64.

    Args:
        name: Of the model.
        made: The model in float32.
        weights: Keys of ``FILES``.
        rounds: Samples per candidate.
        watch: Shows the progress.

    Raises:
        Refused: A candidate failed, or the engine did not serve a model.
    """
    found: list[dict[str, Any]] = []
    on_cpu.accelerate(made)
    peer = made.config.vocab_size >= rewind_peers.VOCAB and bool(importlib.util.find_spec("xllamacpp"))
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for kind in weights:
            files[kind] = Path(folder) / f"{kind}.gguf"
            gguf.save(made, files[kind], weights=FILES[kind], tokenizer=rewind_peers.tokenizer() if peer else "")
        models = {(FLOAT, f"{OURS} float32"): made}
        for kind in weights:
            for activations in ("int16", "int8"):
                models[kind, f"{OURS} {activations}"] = gguf.load(files[kind], activations=activations)
        for batch in (1, 64):
            samplers: dict[tuple[str, str], Sampler] = {key: _ours(model, batch) for key, model in models.items()}
            if batch == 1 and peer:
                samplers |= {(kind, PEER): _llama(files[kind]) for kind in weights}
            names = {f"{kind} {candidate}": (kind, candidate) for kind, candidate in samplers}
            figures, failed = case.take(
                {n: samplers[key] for n, key in names.items()},
                rounds if batch == 1 else -(-rounds // 4),
                f"{name}, batch {batch}",
                watch,
                warm=False,
            )
            if failed:
                raise Refused("; ".join(failed.values()))
            for label, figure in figures.items():
                kind, candidate = names[label]
                row = {"model": name, "weights": kind, "candidate": candidate, "batch": batch, **figure.row()}
                found.append(row | {"tokens_per_second": batch / figure.seconds})
        for kind, file in files.items():
            whole, decoding, states = memory(file)
            found += [
                {
                    "model": name,
                    "weights": kind,
                    "candidate": what,
                    "MB": mb,
                    "times_file": mb * 2**20 / file.stat().st_size,
                    "states_MB": states,
                }
                for what, mb in (("loading and decoding", whole), ("decoding", decoding))
            ]
    calls = [c for functions in on_cpu.status().functions.values() for n, c in functions.items() if "ForCausalLM" in n]
    if not calls or any(set(c) - {ENGINE} for c in calls if c):
        raise Refused(f"some tokens were not those of the engine: {calls}")
    return found


def _ours(model: Any, batch: int) -> Sampler:
    prompt, drawn = (PROMPT, DECODED) if batch == 1 else (FEW, FEW)
    x = torch.randint(1, model.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def sample(repeat: int) -> float:
        found = model(x, use_cache=True, logits_to_keep=1)
        cache = found.cache
        time.sleep(SETTLE)
        begin = time.perf_counter()
        for _ in range(repeat * drawn):
            found = model(found.logits[:, -1:].argmax(-1), use_cache=True, cache=cache)
        return (time.perf_counter() - begin) / (repeat * drawn)

    return sample


def _llama(path: Path) -> Sampler:
    """llama.cpp's own seconds of a token."""
    server = rewind_peers.llama(path, 512)

    def sample(repeat: int) -> float:
        time.sleep(SETTLE)
        request = {
            "prompt": [*range(1, PROMPT + 1)],
            "n_predict": repeat * DECODED,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = server.handle_completions(request | {"cache_prompt": False})
        times = (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
        return times["predicted_ms"] / times["predicted_n"] / 1000

    return sample


def memory(path: Path) -> tuple[float, float, float]:
    """Return MB at the peak of loading and decoding, of decoding alone, and of the states that it has then.

    The first two are what a process has beyond its memory before. Decoding includes the prompt.
    """
    code = f"from longspan_lab.bench import hybrid_weights; print(*hybrid_weights.weigh({str(path)!r}))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused((done.stderr.strip().splitlines() or ["its process ended"])[-1])
    whole, decoding, states = map(float, done.stdout.split())
    return whole, decoding, states


def weigh(path: str) -> tuple[float, float, float]:
    """See ``memory``; run it in a separate process."""
    # The first time imports what is needed, and fills the caches of the processor's libraries.
    _ours(gguf.load(path), 1)(1)
    before = _resident()
    model = gguf.load(path)
    loaded = worker.status("VmHWM")
    _resident()
    _ours(model, 1)(1)
    decoding = worker.status("VmHWM")
    with torch.no_grad():
        cache = model(torch.ones(1, PROMPT, dtype=torch.long), use_cache=True, logits_to_keep=1).cache
    states = [t for layer in cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    for layer in cache.layers:
        states += [t for name in ("conv_states", "recurrent_states") for t in getattr(layer, name, {}).values()]
    size = sum(t.nbytes for t in states if t is not None) / 2**20
    return max(loaded, decoding) - before, decoding - before, size


def _resident() -> float:
    """Return the resident MB, and count the peak from here on."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")
    return worker.status("VmRSS")


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The table of these rows."""
    lines = [
        [
            "model",
            "weights",
            "candidate",
            "1 sequence, tokens/s",
            "64 sequences, tokens/s",
            "memory / file",
            "states, MB",
        ]
    ]
    at = {(r["model"], r["weights"], r["candidate"], r.get("batch")): r for r in rows}
    for model, weights, candidate in dict.fromkeys(key[:3] for key in at):
        one, many, size = (at.get((model, weights, candidate, batch)) for batch in (1, 64, None))
        rates = [f"{r['tokens_per_second']:.4g}" if r else "" for r in (one, many)]
        memories = [f"{size['times_file']:.2f}", f"{size['states_MB']:.2g}"] if size else ["", ""]
        lines.append([model, weights, candidate, *rates, *memories])
    return lines
