"""Check and measure longspan on one CUDA GPU: ``python lab/gpu.py``, or ``make gpu``.

It needs PyTorch and what ``import longspan`` needs, but no installation of longspan and no network. Each part runs in a
separate process with a time limit, the most important one first, and all parts together end within 9 minutes:

* ``machine``: versions, bandwidth of a copy, rate of a bfloat16 matrix product;
* ``kernels``: each Triton kernel against float64, values and gradients, and two runs that must be equal to the bit;
* ``bench``: the operations in Triton and in torch, scaled_dot_product_attention, FlexAttention, and
  flash-linear-attention if it is installed: time and peak memory;
* ``decode``: time of one decode step of a 12-layer model, and of a generated token with and without a CUDA graph;
* ``laws``: the conformance checks of all mechanisms on the device, those of 12 mechanisms first;
* ``training``: a model of bytes trains for some seconds on the sources of Python: bits per byte, tokens per second;
* ``tests``: the tests of ``tests/gpu`` and the tests marked ``cuda``, if pytest is installed;
* ``images``: images per second that models of 784 pixels generate, with sums and with a KV cache.

Every row is written to ``gpu.jsonl`` as soon as it is measured. ``gpu.json`` has all of them after each part, and the
tables are printed last. The folder is ``--out``, or ``$OUT``, or ``benchmarks/results/NAME-OF-THE-CARD``. Exit code: 0;
1 if a kernel, a law or a test failed or a part did not end; 2 if the script cannot run here.
``python -m longspan_lab.tools performance`` puts ``gpu.json`` into the documentation.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {"torch": "everything", "numpy": "import longspan", "safetensors": "import longspan"}
# Seconds; the parts in the order of their worth.
PARTS = {
    "machine": 30,
    "kernels": 90,
    "bench": 140,
    "decode": 60,
    "laws": 70,
    "training": 50,
    "tests": 80,
    "images": 40,
}
TOTAL = 530  # seconds for all parts
FLUSHED = 2**28  # bytes that are written before each measurement, so that no operand is left in the cache of level 2
# These first.
MECHANISMS = (
    "linear",
    "performer",
    "retention",
    "gla",
    "ssd",
    "deltanet",
    "gated_deltanet",
    "kda",
    "softmax",
    "local(window=5)",
    "sparse(pattern='band(5)')",
    "infini(segment=5)",
)
# The laws that find most, first; those that take longest, last.
FIRST = ("oracle", "dtypes", "parallel_is_recurrent", "state", "padding", "packed", "gradients", "causal")
LAST = ("compiles", "exports", "adversarial", "content", "blocks")
QUICK = ("causal", "padding")  # laws on a CPU
WORKERS = 12  # processes of kernels and laws: these wait for the host, not for the GPU
DECODED = ("linear", "gla", "retention", "gated_deltanet", "ssd", "softmax")
EXPERIMENTS = ("jsonargparse", "lightning", "matplotlib", "PIL", "sklearn")  # which their tests need
COVERED = "test_device_laws.py"  # by the part of the laws
Row = dict[str, Any]


def missing() -> list[str]:
    """The packages without which nothing runs, with what needs them."""
    return [f"{name} (for {what})" for name, what in NEEDED.items() if importlib.util.find_spec(name) is None]


# The parts. Each is a generator of rows, run as `python lab/gpu.py --part NAME`.


def machine(device: str, quick: bool) -> Iterator[Row]:
    import torch

    packages = ("torch", "triton", "numpy", "safetensors", "pytest", "transformers")
    versions = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    versions["torch"] = torch.__version__
    yield {"what": "versions", **versions}
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        fields = "name,driver_version,memory.total,clocks.sm,clocks.mem,temperature.gpu,power.draw"
        said = _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])
        yield {
            "what": "card",
            "name": card.name,
            "capability": f"{card.major}.{card.minor}",
            "cuda": torch.version.cuda,
            "memory_gib": round(card.total_memory / 2**30, 1),
            "multiprocessors": card.multi_processor_count,
            "nvidia_smi": said,
        }
    size = 2**20 if quick else 2**31
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds, _ = timed(lambda: target.copy_(source), device, quick)
    yield {"what": "copy", "gb_per_s": round(2 * size / seconds / 1e9, 1)}
    n = 128 if quick else 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds, _ = timed(lambda: a @ b, device, quick)
    yield {"what": "bfloat16 product", "size": n, "tflop_per_s": round(2 * n**3 / seconds / 1e12, 2)}


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (done.stdout or done.stderr).strip()


def timed(call: Callable[[], Any], device: str, quick: bool, budget: float = 0.3) -> tuple[float, int | None]:
    """Run a call repeatedly -> (median seconds, peak bytes of memory beyond what was allocated; None on a CPU).

    ``budget``: seconds of all runs together; there are at least 3.
    """
    import torch

    if device != "cuda":
        call()
        found = []
        for _ in range(2 if quick else 5):
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
        return statistics.median(found), None
    for _ in range(2):  # the first one compiles and sets up handles
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    one = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() - before
    rounds = max(3, min(30, int(budget / max(one, 1e-6))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=device)
    for start, end in events:
        flushed.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3, peak


def kernels(device: str, quick: bool) -> Iterator[Row]:
    """Each Triton kernel: its errors and those of the torch form against float64, and two runs bit by bit."""
    import torch

    dims, dtypes = ((16,), ("bfloat16",)) if quick else ((64, 128), ("bfloat16", "float32", "float16"))
    cases = range(len(list(_kernel_cases(2, 16, torch.float32, "cpu", 1))))
    tasks = [(case, dim, dtype, quick) for dim in dims for dtype in dtypes for case in cases]
    yield from _spread(_kernels, tasks, device)


def _kernels(task: tuple[int, int, str, bool, str]) -> list[Row]:
    import torch

    case, dim, name, quick, device = task
    dtype, found = getattr(torch, name), []
    for n in (19,) if quick else (777, 2304):
        kernel, call, leaves = list(_kernel_cases(n, dim, dtype, device, heads=2 if quick else 4))[case]
        row: Row = {"kernel": kernel, "n": n, "dim": dim, "dtype": name}
        try:
            found.append(row | _kernel(call, leaves, dtype))
        except Exception as error:
            found.append(row | {"status": "failed", "note": _short(error)})
    return found


def _spread(function: Callable[[Any], list[Row]], tasks: list[Any], device: str) -> Iterator[Row]:
    """The rows of tasks, each with the device as its last item: of several at a time on a GPU."""
    tasks = [(*task, device) for task in tasks]
    if device != "cuda":
        for task in tasks:
            yield from function(task)
        return
    # CUDA cannot be used in a forked process, so workers are spawned.
    with multiprocessing.get_context("spawn").Pool(min(WORKERS, os.cpu_count() or 1)) as pool:
        for rows in pool.imap_unordered(function, tasks):
            yield from rows


def _kernel(call: Callable[..., list[Any]], leaves: list[Any], dtype: Any) -> Row:
    """One kernel on one case. An error is the norm of the difference, relative to that of the tensor.

    A tensor may have 1.5 times the error of the torch form on the same operands, and a few roundings to float32. Sums
    that stay in float32 are exact in the torch form; from operands of 16 bits they may have a rounding of these.
    """
    import torch

    import longspan

    def answers(backend: str, dtype: Any) -> list[Any]:
        given = [leaf.to(dtype) if leaf.dtype != torch.float32 or dtype == torch.float64 else leaf for leaf in leaves]
        given = [leaf.detach().requires_grad_() for leaf in given]
        with longspan.backend(backend):
            outputs = call(*given)
        generator = torch.Generator().manual_seed(2)
        upstream = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
        found = torch.autograd.grad(outputs, given, upstream, allow_unused=True)
        return [
            *(t.detach() for t in outputs),
            *(torch.zeros_like(g) if d is None else d for g, d in zip(given, found, strict=True)),
        ]

    exact = answers("torch", torch.float64)

    def errors(found: list[Any]) -> list[float]:
        pairs = zip(found, exact, strict=True)
        return [((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs]

    try:
        first = answers("triton", dtype)
    except ValueError as refused:
        if "backend 'triton' cannot serve" not in str(refused) and "does not serve" not in str(refused):
            raise
        return {"status": "not served", "note": str(refused).rpartition(": ")[2]}
    same = all(torch.equal(a, b) for a, b in zip(first, answers("triton", dtype), strict=True))
    names = [*(f"output {i}" for i in range(len(first) - len(leaves))), *(f"gradient {i}" for i in range(len(leaves)))]
    few = 4 * torch.finfo(torch.float32).eps
    measured = []
    for name, t, own, other in zip(names, first, errors(first), errors(answers("torch", dtype)), strict=True):
        allowed = 1.5 * other + (few if t.dtype == dtype else torch.finfo(dtype).eps / 2)
        # NaN is the worst.
        worth = math.inf if math.isnan(own) else own / allowed
        measured.append((worth, {"worst": name, "error": own, "torch_error": other, "tolerance": allowed}))
    worst = max(measured, key=lambda one: one[0])
    return {"status": "passed" if worst[0] <= 1 and same else "failed", "same_bits": same, **worst[1]}


KernelCase = tuple[str, Callable[..., list[Any]], list[Any]]


def _kernel_cases(n: int, dim: int, dtype: Any, device: str, heads: int) -> Iterator[KernelCase]:
    """(name, call -> outputs and state, the differentiable operands) of every op that has a kernel."""
    import torch
    import torch.nn.functional as F

    import longspan

    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, dtype: Any = dtype) -> Any:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def named(*names: str) -> Callable[..., Callable[..., list[Any]]]:
        """Give operands to a function by name, after q, k and v."""

        def of(function: Callable[..., Any], **fixed: Any) -> Callable[..., list[Any]]:
            return lambda *given: list(
                function(*given[:3], **dict(zip(names, given[3:], strict=True)), return_state=True, **fixed)
            )

        return of

    q, k, v = (draw(2, heads, n, dim) for _ in range(3))
    unit = F.normalize(k.float(), dim=-1).to(dtype)
    decay = F.logsigmoid(draw(2, heads, n, dtype=torch.float32) + 3)
    by_channel = F.logsigmoid(draw(2, heads, n, dim, dtype=torch.float32) + 3)
    beta = draw(2, heads, n).sigmoid()
    state, sums = (0.1 * draw(2, heads, dim, width, dtype=torch.float32) for width in (dim, dim + 1))
    sums[..., -1] = sums[..., -1].abs() + 1  # a normalizer is positive
    mask = torch.rand(2, n, generator=generator).to(device) < 0.8
    segments = (torch.arange(n, device=device) >= n // 3).long().expand(2, -1)
    linear, decayed, delta = longspan.linear_attention, longspan.decay_attention, longspan.delta_rule
    gated, ruled, both = named("log_decay", "state"), named("beta", "state"), named("beta", "log_decay", "state")
    after = named("state")
    yield "linear_attention", after(linear), [q, k, v, sums]
    yield "linear_attention, mask", after(linear, mask=mask), [q, k, v, sums]
    yield "linear_attention, segments", after(linear, segments=segments), [q, k, v, sums]
    yield "linear_attention, bidirectional", lambda *given: [linear(*given, causal=False)], [q, k, v]
    yield "decay_attention, head", gated(decayed), [q, k, v, decay, state]
    yield "decay_attention, head, segments", gated(decayed, segments=segments), [q, k, v, decay, state]
    yield "decay_attention, channel", gated(decayed), [q, k, v, by_channel, state]
    yield "delta_rule", ruled(delta), [q, unit, v, beta, state]
    yield "delta_rule, decay per head", both(delta), [q, unit, v, beta, decay, state]
    yield "delta_rule, per channel", both(delta), [q, unit, v, beta, by_channel, state]
    one = [t[:, :, :1] for t in (q, unit, v)]
    yield "linear_attention, one token", after(linear), [*one, sums]
    yield "decay_attention, head, one token", gated(decayed), [*one, decay[:, :, :1], state]
    yield "delta_rule, one token", ruled(delta), [*one, beta[:, :, :1], state]
    x, weight, bias = draw(2, n, heads * dim), draw(heads * dim, 4), draw(heads * dim)
    yield (
        "causal_convolution",
        lambda x, weight, bias: list(longspan.causal_convolution(x, weight, bias, activation="silu")),
        [x, weight, bias],
    )


def laws(device: str, quick: bool) -> Iterator[Row]:
    """The conformance checks, a row for each law and mechanism."""
    yield from _spread(_laws, _tasks(quick), device)


def _tasks(quick: bool) -> list[tuple[str, tuple[str, ...]]]:
    """Specs with some of their laws, the most important ones first."""
    import longspan
    from longspan import testing

    if quick:
        return [(spec, QUICK) for spec in MECHANISMS[:2]]
    known = {spec.partition("(")[0] for spec in MECHANISMS}
    others = [longspan.mechanism_examples(name)[0] for name in longspan.list_mechanisms() if name not in known]
    middle = tuple(law for law in testing.laws() if law not in (*FIRST, *LAST))
    return [
        *((spec, FIRST) for spec in MECHANISMS),
        *((spec, FIRST) for spec in others),
        *((spec, middle) for spec in (*MECHANISMS, *others)),
        *((spec, (law,)) for law in LAST for spec in (*MECHANISMS, *others)),
    ]


def _laws(task: tuple[str, tuple[str, ...], str]) -> list[Row]:
    import torch

    from longspan import testing

    spec, names, device = task
    torch.set_num_threads(1)
    found = []
    for law in names:
        begin = time.perf_counter()
        try:
            result = testing.check(law, spec, device=device)
        except Exception as error:  # an earlier kernel broke CUDA in this process
            found.append({"mechanism": spec, "law": law, "status": "failed", "note": _short(error)})
            break
        if result.status == "does not apply":
            continue
        row: Row = {"mechanism": spec, "law": law, "status": result.status}
        row |= {"error": result.error, "tolerance": result.tolerance, "seconds": round(time.perf_counter() - begin, 2)}
        found.append(row | ({} if result.status == "passed" else {"note": result.note[:300]}))
    return found


def tests(device: str, quick: bool) -> Iterator[Row]:
    if importlib.util.find_spec("pytest") is None:
        yield {"status": "skipped", "note": "pytest is not installed"}
        return
    # The tests of the kernels first.
    for path in sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: (path.parent.name != "gpu", path)):
        of_kernels = path.parent.name == "gpu"
        if path.name == COVERED or not (of_kernels or "pytest.mark.cuda" in path.read_text(encoding="utf-8")):
            continue
        name = path.relative_to(ROOT).as_posix()
        absent = [one for one in EXPERIMENTS if importlib.util.find_spec(one) is None]
        if path.parent.name == "experiments" and absent:
            yield {"test": name, "status": "skipped", "note": f"not installed: {', '.join(absent)}"}
            continue
        yield from _tested(name, of_kernels)
        if quick:
            return


def _tested(name: str, every: bool) -> Iterator[Row]:
    """A row for each test of a file, or for each one that is marked cuda, as soon as it has ended."""
    # Warnings of another version of torch, or of the compiler, are no failures.
    options = [
        "-m",
        "not slow" if every else "cuda",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "-v",
        "--tb=short",
        "-W",
        "default",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, name],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    failed, last = False, ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
        if found := re.match(r"(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", line):
            status = found[2].lower().replace("error", "failed")
            failed = failed or status == "failed"
            yield {"test": found[1], "status": status}
    if process.wait() not in (0, 5) and not failed:  # 5: no test was collected
        yield {"test": name, "status": "failed", "note": last}


def bench(device: str, quick: bool) -> Iterator[Row]:
    import torch

    # The ends of the range first. What is compiled for each size comes last, for it takes longest.
    sizes = [(64, 16)] if quick else [(4096, 64), (16384, 128), (16384, 64), (4096, 128)]
    batch, heads = (1, 2) if quick else (8, 16)
    for compiled in (False, True):
        for n, dim in sizes:
            operands = _operands(batch, heads, n, dim, device)
            candidates = _compiled(*operands, device) if compiled else _candidates(*operands)
            for name, call, leaves in candidates:
                for mode in ("forward", "training"):
                    row: Row = {"candidate": name, "mode": mode, "batch": batch, "heads": heads, "n": n, "dim": dim}
                    try:
                        seconds, peak = timed(_moded(call, leaves, mode), device, quick)
                        gib = None if peak is None else round(peak / 2**30, 3)
                        yield row | {"ms": round(seconds * 1e3, 3), "peak_gib": gib}
                    except Exception as error:  # not served, out of memory, or a kernel that does not compile
                        yield row | {"error": _short(error)}
                    if device == "cuda":
                        torch.cuda.empty_cache()


def _operands(batch: int, heads: int, n: int, dim: int, device: str) -> tuple[Any, ...]:
    """q, k of length 1, v, a log decay per channel, beta and the upstream gradient: bfloat16, drawn at random."""
    import torch
    import torch.nn.functional as F

    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    q, k, v, g, upstream = (draw(batch, heads, n, dim) for _ in range(5))
    log_decay = F.logsigmoid(g.float() + 3).to(torch.bfloat16)
    return q, F.normalize(k, dim=-1), v, log_decay, draw(batch, heads, n).sigmoid(), upstream


Candidate = tuple[str, Callable[..., Any], list[Any]]


def _candidates(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, upstream: Any) -> Iterator[Candidate]:
    """(name, call -> output and its upstream gradient, the differentiable arguments)."""
    import torch
    import torch.nn.functional as F

    import longspan

    def candidate(name: str, call: Callable[..., Any], *leaves: Any) -> Candidate:
        return name, lambda *given: (call(*given), upstream), list(leaves)

    def on(backend: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def forced(*given: Any) -> Any:
            with longspan.backend(backend):
                return call(*given)

        return forced

    def sdpa(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def decay(q: Any, k: Any, v: Any, g: Any) -> Any:
        return longspan.decay_attention(q, k, v, log_decay=g)

    def delta(q: Any, k: Any, v: Any, b: Any, g: Any = None) -> Any:
        return longspan.delta_rule(q, k, v, beta=b, log_decay=g)

    per_head = log_decay[..., 0].contiguous()
    x = q.transpose(1, 2).flatten(2).contiguous()  # (B,N,H D)
    weight = torch.randn(x.shape[2], 4, device=x.device, dtype=x.dtype)

    def convolution(x: Any, weight: Any) -> Any:
        return longspan.causal_convolution(x, weight, activation="silu")[0]

    def fused(backend: str) -> Iterator[Candidate]:
        yield candidate(f"linear_attention, {backend}", on(backend, longspan.linear_attention), q, k, v)
        yield candidate(f"decay_attention, head, {backend}", on(backend, decay), q, k, v, per_head)
        yield candidate(f"delta_rule, {backend}", on(backend, delta), q, k, v, beta)
        yield candidate(f"delta_rule, decay per head, {backend}", on(backend, delta), q, k, v, beta, per_head)
        called = on(backend, convolution)
        yield f"causal_convolution, {backend}", lambda x, weight: (called(x, weight), x.detach()), [x, weight]

    yield candidate("sdpa causal", sdpa, q, k, v)
    yield from fused("triton")
    # The dispatch chooses the backend of these: flash-linear-attention if it is installed.
    yield candidate("decay_attention, channel, auto", decay, q, k, v, log_decay)
    yield candidate("delta_rule, per channel, auto", delta, q, k, v, beta, log_decay)
    if q.is_cuda and importlib.util.find_spec("fla"):
        yield from _fla(q, k, v, log_decay, beta, upstream)
    yield from fused("torch")


def _fla(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, upstream: Any) -> Iterator[Candidate]:
    """The chunked functions of flash-linear-attention, on its layout (B,N,H,D)."""
    operands = [t.transpose(1, 2).contiguous() for t in (q, k, v, log_decay, beta, upstream)]
    q, k, v, log_decay, beta, upstream = operands
    per_head = log_decay[..., 0].contiguous()
    given = {"q": q, "k": k, "v": v}
    wanted = {
        "linear_attn.chunk_linear_attn": ({"normalize": True, "scale": 1.0}, given),
        "simple_gla.chunk_simple_gla": ({}, given | {"g": per_head}),
        "gla.chunk_gla": ({}, given | {"g": log_decay}),
        "delta_rule.chunk_delta_rule": ({}, given | {"beta": beta}),
        "gated_delta_rule.chunk_gated_delta_rule": ({}, given | {"g": per_head, "beta": beta}),
        "kda.chunk_kda": ({}, given | {"g": log_decay, "beta": beta}),
    }
    for path, (fixed, leaves) in wanted.items():
        module, _, name = path.partition(".")

        def call(
            *values: Any, module: str = module, name: str = name, fixed: Any = fixed, names: Any = tuple(leaves)
        ) -> Any:
            function = getattr(importlib.import_module(f"fla.ops.{module}"), name)
            return function(**dict(zip(names, values, strict=True)), **fixed)[0], upstream

        yield f"fla {name}", call, list(leaves.values())


def _compiled(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, upstream: Any, device: str) -> Iterator[Candidate]:
    """FlexAttention, which runs on a GPU alone, and ``sparse_attention``, which calls it there."""
    import longspan

    def candidate(name: str, call: Callable[..., Any]) -> Candidate:
        return name, lambda *given: (call(*given), upstream), [q, k, v]

    n = q.shape[2]
    band = min(255, n // 4)

    def windowed(q: Any, k: Any, v: Any) -> Any:
        return longspan.sparse_attention(q, k, v, f"causal & band({band})")

    yield candidate(f"sparse window {band + 1}", windowed)
    if device == "cuda":
        yield candidate("flex causal", _flex(n, None, device))
        yield candidate(f"flex window {band + 1}", _flex(n, band, device))


def _flex(n: int, window: int | None, device: str) -> Callable[..., Any]:
    """FlexAttention, compiled at the first call."""
    kept: list[Any] = []

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) if window is None else (j <= i) & (i - j <= window)

    def call(q: Any, k: Any, v: Any) -> Any:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if not kept:
            # Beyond 8 shapes it would run an eager form that needs all pairs in memory.
            for name in ("recompile_limit", "cache_size_limit"):
                if hasattr(torch._dynamo.config, name):
                    setattr(torch._dynamo.config, name, 64)
            mask = create_block_mask(visible, None, None, n, n, device=device)
            kept.extend([mask, torch.compile(flex_attention, dynamic=False)])
        return kept[1](q, k, v, block_mask=kept[0])

    return call


def _moded(call: Callable[..., Any], leaves: list[Any], mode: str) -> Callable[[], Any]:
    import torch

    if mode == "forward":

        def forward() -> None:
            with torch.no_grad():
                call(*leaves)

        return forward
    given = [leaf.detach().clone().requires_grad_() for leaf in leaves]

    def training() -> None:
        out, upstream = call(*given)
        torch.autograd.grad(out, given, upstream)

    return training


def decode(device: str, quick: bool) -> Iterator[Row]:
    import torch

    import longspan

    size = (
        {"dim": 32, "heads": 2, "depth": 2, "feedforward": 64}
        if quick
        else {"dim": 1024, "heads": 16, "depth": 12, "feedforward": 4096}
    )
    context, steps = (16, 3) if quick else (2048, 20)
    for spec in DECODED[:1] if quick else DECODED:
        config = longspan.DecoderConfig(**size, attention=spec, positions="none", vocab=256, length=context + 4 * steps)
        model = longspan.Decoder(config).to(device=device, dtype=torch.bfloat16).eval()
        for batch in (1, 64):
            row: Row = {"mechanism": spec, "batch": batch, "context": context, **size}
            try:
                yield row | _steps(model, batch, context, steps, device)
            except Exception as error:
                yield row | {"error": _short(error)}
            prompt = torch.randint(0, 256, (batch, context), device=device)
            for graph in (False, True):
                how = "graph" if graph else "eager"
                yield row | {"how": how} | _token(model, prompt, steps, device, graph)
            if device == "cuda":
                torch.cuda.empty_cache()


def _token(model: Any, prompt: Any, tokens: int, device: str, graph: bool) -> Row:
    """Seconds of a token that ``generate`` draws after the first ones, with or without a CUDA graph."""
    import torch

    import longspan

    begun, warm = 0.0, 3  # tokens before the measurement; a graph is captured at the first
    options: dict[str, Any] = {"stream": True, "seed": 0}
    if "cuda_graph" in inspect.signature(longspan.generate).parameters:
        options["cuda_graph"] = graph
    elif graph:
        return {"note": "generate has no cuda_graph"}
    try:
        for number, _ in enumerate(longspan.generate(model, prompt, max_new_tokens=tokens + warm, **options), 1):
            if number in (warm, tokens + warm):
                if device == "cuda":
                    torch.cuda.synchronize()
                if number == warm:
                    begun = time.perf_counter()
        seconds = (time.perf_counter() - begun) / tokens
    except Exception as error:
        return {"note": _short(error)}
    return {"token_ms": round(seconds * 1e3, 3), "tokens_per_s": round(len(prompt) / seconds, 1)}


def training(device: str, quick: bool) -> Iterator[Row]:
    """Train a model of bytes on the sources of Python's standard library, with bfloat16 autocast."""
    import longspan
    from longspan.data import text

    length = 64 if quick else 1024
    data = text.load("stdlib", length)
    size = {"dim": 32, "heads": 2, "depth": 1} if quick else {"dim": 512, "heads": 8, "depth": 6}
    for spec in ("linear",) if quick else ("linear", "softmax", "gated_deltanet"):
        row: Row = {"mechanism": spec, "length": length, **size}
        config = longspan.DecoderConfig(
            **size, feedforward=4 * size["dim"], attention=spec, vocab=256, length=length, positions="none"
        )
        try:
            for measured in _trained(config, data, device, 0.5 if quick else 13.0, 2 if quick else 32):
                yield row | measured
        except Exception as error:
            yield row | {"error": _short(error)}


def _trained(config: Any, data: Any, device: str, seconds: float, batch: int) -> Iterator[Row]:
    """Train for some seconds -> bits per byte of validation at the start, and at the end with tokens per second."""
    import torch
    import torch.nn.functional as F

    import longspan

    torch.manual_seed(0)
    model = longspan.Decoder(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1, fused=device == "cuda")
    content = data.splits["train"].to(device)
    held = data.splits["validation"][: 16 * config.length].view(16, -1).long().to(device)
    generator, offsets = torch.Generator(device).manual_seed(0), torch.arange(config.length, device=device)

    def bits(tokens: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens[:, :-1])[0]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) / math.log(2)

    def validation() -> float:
        model.eval()
        with torch.no_grad():
            found = torch.stack([bits(part) for part in held.split(4)]).mean().item()
        model.train()
        return round(found, 4)

    yield {"step": 0, "bits": validation()}
    warm, steps, begin = 3, 0, 0.0  # steps before the measurement, in which kernels are compiled
    while True:
        if steps == warm:
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
        starts = torch.randint(len(content) - config.length, (batch, 1), generator=generator, device=device)
        loss = bits(content[starts + offsets].long())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % 10 == 0 or device != "cuda":
            if not math.isfinite(loss.item()):  # waits for the device
                raise ArithmeticError(f"the loss is {loss.item()} after {steps} steps")
            if steps > warm and time.perf_counter() - begin > seconds:
                break
    spent = time.perf_counter() - begin
    rate = (steps - warm) * batch * config.length / spent
    yield {"step": steps, "bits": validation(), "tokens_per_s": round(rate), "seconds": round(spent, 2)}


def images(device: str, quick: bool) -> Iterator[Row]:
    """Images per second of models of the same size, with weights drawn at random."""
    import torch

    import longspan

    pixels = 12 if quick else 784
    size = {"dim": 32, "heads": 2, "depth": 1} if quick else {"dim": 256, "heads": 8, "depth": 8}
    # The sums of `linear` against the KV cache of `softmax`.
    for batch in (1, 4) if quick else (1, 256):
        for spec in ("linear", "softmax"):
            config = longspan.DecoderConfig(
                **size, feedforward=4 * size["dim"], attention=spec, vocab=256, length=pixels, positions="learned"
            )
            torch.manual_seed(0)
            model = (
                longspan.Decoder(config).to(device=device, dtype=torch.bfloat16 if device == "cuda" else None).eval()
            )
            for graph in (False, True):
                row: Row = {"mechanism": spec, "batch": batch, "pixels": pixels, "how": "graph" if graph else "eager"}
                yield row | _images(model, batch, pixels, device, graph)


def _images(model: Any, batch: int, pixels: int, device: str, graph: bool) -> Row:
    import torch

    import longspan

    options: dict[str, Any] = {"batch": batch, "seed": 0}
    if "cuda_graph" in inspect.signature(longspan.generate).parameters:
        options["cuda_graph"] = graph
    elif graph:
        return {"note": "generate has no cuda_graph"}
    found = []
    try:
        for tokens in (3 * pixels // 4, pixels):  # the first call sets up handles
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            longspan.generate(model, max_new_tokens=tokens, **options).sum().item()
            found.append(time.perf_counter() - begin)
    except Exception as error:
        return {"note": _short(error)}
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 3) if device == "cuda" else None
    return {"seconds": round(found[1], 3), "images_per_s": round(batch / found[1], 2), "peak_gib": peak}


def _steps(model: Any, batch: int, context: int, steps: int, device: str) -> Row:
    """Seconds of a prompt and of one step after it, with the host's own time, and the bytes of the state."""
    import torch

    import longspan

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    tokens = torch.randint(0, 256, (batch, context), device=device)
    with torch.no_grad():
        found = []
        for _ in range(2):  # the first prompt sets up handles
            state = model.init_state(batch, context + 3 * steps)
            wait()
            begin = time.perf_counter()
            _, state = model(tokens, state, donate=True)
            wait()
            found.append(time.perf_counter() - begin)
        size, seconds = longspan.states.nbytes(state), []
        for _ in range(3):
            wait()
            begin = time.perf_counter()
            for _ in range(steps):
                _, state = model(tokens[:, :1], state, donate=True)
            wait()
            seconds.append((time.perf_counter() - begin) / steps)
    step = statistics.median(seconds)
    return {
        "prefill_ms": round(found[1] * 1e3, 2),
        "step_ms": round(step * 1e3, 3),
        "tokens_per_s": round(batch / step, 1),
        "state_mb": round(size / 1e6, 2),
    }


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


RUN = {
    "machine": machine,
    "kernels": kernels,
    "bench": bench,
    "decode": decode,
    "laws": laws,
    "training": training,
    "tests": tests,
    "images": images,
}


# The driver.


def part(name: str, device: str, quick: bool, file: Path) -> int:
    """Run one part in this process; print each row and append it to the file."""
    with file.open("a", encoding="utf-8") as out:
        for row in RUN[name](device, quick):
            line = json.dumps({"part": name, **row})
            out.write(line + "\n")
            out.flush()
            print(line, flush=True)
    return 0


def drive(names: list[str], device: str, quick: bool, out: Path, limits: dict[str, int] | None = None) -> int:
    """Run the parts one after the other, each in a process under its limit, and print the tables."""
    limits = PARTS | (limits or {})
    out.mkdir(parents=True, exist_ok=True)
    file, begin = out / "gpu.jsonl", time.monotonic()
    file.write_text("", encoding="utf-8")
    ends: dict[str, str] = {}
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"  # the kernels then run on the CPU
    for name in names:
        limit = min(limits[name], TOTAL - (time.monotonic() - begin))
        if limit < 5:
            ends[name] = "not started: no time left"
            continue
        print(f"== {name}, at most {limit:.0f} s", flush=True)
        command = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--device", device]
        command += ["--out", str(out), *(["--quick"] if quick else [])]
        started = time.monotonic()
        ends[name] = _ended(command, environment, limit)
        print(f"== {name}: {ends[name]} after {time.monotonic() - started:.0f} s", flush=True)
        (out / "gpu.json").write_text(json.dumps(result(file, device, quick, ends), indent=1) + "\n", encoding="utf-8")
    found = result(file, device, quick, ends)
    print(tables(found), flush=True)
    print(f"Results: {out / 'gpu.json'}", flush=True)
    bad = [row for row in found["rows"] if row.get("status") == "failed"]
    return 1 if bad or any(end != "done" for end in ends.values()) else 0


def _ended(command: list[str], environment: dict[str, str], limit: float) -> str:
    """Run a command in a separate process group, kill it at the limit, and return how it ended."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(limit)
        return "done" if code == 0 else f"ended with exit code {code}"
    except subprocess.TimeoutExpired:
        return f"stopped at its limit of {limit:.0f} s"
    finally:
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass
        process.wait()


def result(file: Path, device: str, quick: bool, ends: dict[str, str]) -> Row:
    """Everything measured so far. A last line that was cut off is left out."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return {"benchmark": "gpu", "card": card(device), "quick": quick, "parts": ends, "rows": rows}


def card(device: str) -> str:
    """The name of the card."""
    import torch

    return torch.cuda.get_device_name(0) if device == "cuda" else "cpu"


def tables(found: Row) -> str:
    """The results as text: failures in full, everything else as one line for each mechanism or candidate."""
    rows = {name: [row for row in found["rows"] if row["part"] == name] for name in PARTS}
    shown = {
        "machine": _machine_lines,
        "kernels": _kernel_lines,
        "bench": _bench_lines,
        "decode": _decode_lines,
        "laws": _law_lines,
        "training": _training_lines,
        "tests": _test_lines,
        "images": _image_lines,
    }
    lines = []
    for name, of in shown.items():
        if rows[name]:
            lines += ["", *of(rows[name])]
    if met := goals(found):
        lines += ["", "goals", *(f"  {text}" for text in met)]
    lines += ["", *(f"{name}: {end}" for name, end in found["parts"].items() if end != "done")]
    return "\n".join(lines)


def goals(found: Row) -> list[str]:
    """What the design of the kernels aims at, with what was measured."""
    rows, lines = found["rows"], []
    for row in rows:
        case = row.get("candidate"), row.get("mode"), row.get("n"), row.get("dim")
        if case == ("linear_attention, triton", "forward", 16384, 128) and "ms" in row:
            lines.append(f"linear_attention, triton, forward at 16384 x 128 < 3 ms: {row['ms']:.2f} ms")
    steps = [row for row in rows if row["part"] == "decode" and row.get("how") == "graph" and "token_ms" in row]
    for row in steps:
        if row["batch"] == 1 and row["mechanism"] == "linear":
            lines.append(f"token of 12 layers in a CUDA graph, batch 1 < 0.3 ms: {row['token_ms']:.3f} ms")
    measured = [row for row in rows if row["part"] == "kernels" and "error" in row]
    if measured:
        bits = sum(row["same_bits"] for row in measured)
        near = sum(row["error"] <= row["tolerance"] for row in measured)
        lines.append(f"error of a kernel within its tolerance: {near} of {len(measured)} cases")
        lines.append(f"the same bits in two runs: {bits} of {len(measured)} cases")
    return lines


def _machine_lines(rows: list[Row]) -> list[str]:
    hidden = ("part", "what")
    return ["machine", *("  " + ", ".join(f"{k} {v}" for k, v in row.items() if k not in hidden) for row in rows)]


def _kernel_lines(rows: list[Row]) -> list[str]:
    lines = ["kernels: passed cases; error of the worst tensor against float64, and that of the torch form"]
    for name, dtype in dict.fromkeys((row["kernel"], row["dtype"]) for row in rows):
        own = [row for row in rows if (row["kernel"], row["dtype"]) == (name, dtype)]
        done = [row for row in own if "error" in row]
        if done:
            passed = sum(row["status"] == "passed" for row in own)
            worst = max(done, key=lambda row: row["error"] / row["tolerance"])
            cells = f"{passed}/{len(own)}  {worst['error']:.1e}  {worst['torch_error']:.1e}  ({worst['worst']})"
        else:
            cells = f"{own[0]['status']}: {own[0].get('note', '')}"
        lines.append(f"  {name:<34} {dtype:<9} {cells}")
    for row in rows:
        if row["status"] == "failed":
            where = f"{row['kernel']}, {row['n']} x {row['dim']}, {row['dtype']}"
            bits = "" if row.get("same_bits", True) else "; two runs differ"
            error = (
                f"error {row['error']:.1e}, allowed {row['tolerance']:.1e}, {row['worst']}" if "error" in row else ""
            )
            lines.append(f"  FAILED {where}: {row.get('note') or error + bits}")
    return lines


def _bench_lines(rows: list[Row]) -> list[str]:
    sizes = list(dict.fromkeys((row["n"], row["dim"]) for row in rows))
    lines = ["bench: ms (peak GiB) at N x D of " + ", ".join(f"{n} x {dim}" for n, dim in sizes)]
    for name, mode in dict.fromkeys((row["candidate"], row["mode"]) for row in rows):
        own = {(r["n"], r["dim"]): r for r in rows if (r["candidate"], r["mode"]) == (name, mode)}
        lines.append(f"  {name:<36} {mode:<9}" + "".join(f"{_cell(own.get(size)):>18}" for size in sizes))
    notes = dict.fromkeys(f"{row['candidate']}: {row['error']}" for row in rows if "error" in row)
    return [*lines, *(f"  {note}" for note in notes)]


def _decode_lines(rows: list[Row]) -> list[str]:
    lines = ["decode: ms of a step (state in MB), of a token of generate, and of one in a CUDA graph, by batch"]
    for spec, batch in dict.fromkeys((row["mechanism"], row["batch"]) for row in rows):
        own = {r.get("how", "step"): r for r in rows if (r["mechanism"], r["batch"]) == (spec, batch)}
        step = own.get("step", {})
        cells = [
            f"{step['step_ms']:.2f} ({step['state_mb']:.1f})" if "step_ms" in step else step.get("error", "-")[:40]
        ]
        for how in ("eager", "graph"):
            row = own.get(how, {})
            cells.append(f"{row['token_ms']:.3f}" if "token_ms" in row else row.get("note", "-")[:60])
        lines.append(f"  {spec:<20} {batch:>3}  {'  '.join(cells)}")
    return lines


def _law_lines(rows: list[Row]) -> list[str]:
    lines = ["laws: passed of those that apply and had time, and the largest error of the oracle"]
    for spec in dict.fromkeys(row["mechanism"] for row in rows):
        own = [row for row in rows if row["mechanism"] == spec]
        oracle = [
            f"{row['error']:.1e} of {row['tolerance']:.0e}" for row in own if row["law"] == "oracle" and "error" in row
        ]
        kept = sum(row["status"] in ("passed", "exempt") for row in own)
        lines.append(f"  {spec:<44} {kept}/{len(own)}  {'  '.join(oracle)}".rstrip())
    for row in rows:
        if row["status"] == "failed":
            lines.append(f"  FAILED {row['mechanism']}, {row['law']}: {row['note']}")
    return lines


def _training_lines(rows: list[Row]) -> list[str]:
    lines = ["training: bits per byte of validation at the start and at the end, tokens per second, steps"]
    for spec in dict.fromkeys(row["mechanism"] for row in rows):
        own = [row for row in rows if row["mechanism"] == spec]
        ends = [row for row in own if "tokens_per_s" in row]
        if ends:
            end = ends[-1]
            cells = f"{own[0]['bits']:.3f}  {end['bits']:.3f}  {end['tokens_per_s']:,}  {end['step']}"
        else:
            cells = next((row["error"] for row in own if "error" in row), "did not end")
        lines.append(f"  {spec:<20} {cells}")
    return lines


def _test_lines(rows: list[Row]) -> list[str]:
    count = {status: sum(row["status"] == status for row in rows) for status in ("passed", "skipped", "failed")}
    lines = ["tests", "  " + ", ".join(f"{number} {status}" for status, number in count.items())]
    for row in rows:
        if row["status"] == "failed" or "note" in row:
            lines.append(f"  {row['status']} {row.get('test', '')} {row.get('note', '')}".rstrip())
    return lines


def _image_lines(rows: list[Row]) -> list[str]:
    lines = [f"images of {rows[0]['pixels']} pixels: images per second (peak GiB), eager and in a CUDA graph, by batch"]
    for spec, batch in dict.fromkeys((row["mechanism"], row["batch"]) for row in rows):
        own = {row["how"]: row for row in rows if (row["mechanism"], row["batch"]) == (spec, batch)}
        cells = []
        for how in ("eager", "graph"):
            row = own.get(how, {})
            peak = "" if row.get("peak_gib") is None else f" ({row['peak_gib']:.2f})"
            cells.append(f"{row['images_per_s']:.2f}{peak}" if "images_per_s" in row else row.get("note", "-")[:60])
        lines.append(f"  {spec:<20} {batch:>3}  {'  '.join(cells)}")
    return lines


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if "error" in row:
        return row["error"].split(":")[0][:17]
    return f"{row['ms']:.2f}" + ("" if row["peak_gib"] is None else f" ({row['peak_gib']:.2f})")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python lab/gpu.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, some seconds")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--limits", default="", metavar="PART=SECONDS,...", help="other limits of parts")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part:
        return part(args.part, args.device, args.quick, args.out / "gpu.jsonl")
    names, limits = args.parts.split(","), dict(re.findall(r"(\w+)=(\d+)(?:,|$)", args.limits))
    problem = ""
    if unknown := [name for name in names if name not in PARTS]:
        problem = f"unknown part {unknown[0]!r}; the parts are {', '.join(PARTS)}"
    elif ",".join(f"{name}={seconds}" for name, seconds in limits.items()) != args.limits or not limits.keys() <= {
        *PARTS
    }:
        problem = f"--limits {args.limits} is not of the form laws=300,tests=200; the parts are {', '.join(PARTS)}"
    elif absent := missing():
        problem = f"missing: {', '.join(absent)}; install them with pip"
    elif args.device == "cpu" and not args.quick:
        problem = "--device cpu is only to try the script: add --quick"
    elif args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            problem = f"torch {torch.__version__} finds no CUDA GPU; --device cpu --quick tries the script without one"
    if problem:
        print(f"lab/gpu.py: {problem}", file=sys.stderr)
        return 2
    seconds = {name: int(value) for name, value in limits.items()}
    return drive(names, args.device, args.quick, args.out or _folder(args.device), seconds)


def _folder(device: str) -> Path:
    if given := os.environ.get("OUT"):
        return Path(given)
    return ROOT / "benchmarks" / "results" / re.sub(r"[^a-z0-9]+", "-", card(device).lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
