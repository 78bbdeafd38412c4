"""Check and measure longspan on one CUDA GPU: ``python benchmarks/gpu.py``, or ``make gpu``.

It needs PyTorch and what ``import longspan`` needs, but no installation of longspan and no network. Each part runs in a
separate process with a time limit, and all parts together end within 9 minutes:

* ``machine``: versions, bandwidth of a copy, rate of a bfloat16 matrix product;
* ``laws``: laws of 12 mechanisms on the device, in float64, and their errors in lower precisions;
* ``tests``: the tests marked ``cuda``, if pytest is installed;
* ``bench``: the operations against scaled_dot_product_attention and FlexAttention: time and peak memory;
* ``decode``: time of one decode step of a 12-layer model.

Every row is written to ``gpu.jsonl`` as soon as it is measured. ``gpu.json`` has all of them after each part, and the
tables are printed last. The folder is ``--out``, or ``$OUT``, or ``benchmarks/results/NAME-OF-THE-CARD``. Exit code: 0;
1 if a law or a test failed or a part did not end; 2 if the script cannot run here.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
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
PARTS = {"machine": 30, "laws": 100, "tests": 90, "bench": 240, "decode": 60}  # seconds
TOTAL = 530  # seconds for all parts
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
DECODED = ("linear", "gla", "retention", "gated_deltanet", "ssd", "softmax")
EXPERIMENTS = ("jsonargparse", "lightning", "matplotlib", "PIL", "sklearn")  # which their tests need
Row = dict[str, Any]


def missing() -> list[str]:
    """The packages without which nothing runs, with what needs them."""
    return [f"{name} (for {what})" for name, what in NEEDED.items() if importlib.util.find_spec(name) is None]


# The parts. Each is a generator of rows, run as `python benchmarks/gpu.py --part NAME`.


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


def timed(call: Callable[[], Any], device: str, quick: bool, budget: float = 1.0) -> tuple[float, int | None]:
    """Run a call repeatedly -> (median seconds, peak bytes of memory beyond what was allocated; None on a CPU)."""
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
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3, peak


def laws(device: str, quick: bool) -> Iterator[Row]:
    for spec in MECHANISMS[:2] if quick else MECHANISMS:
        yield from _laws(spec, device, 29 if quick else 139)


def _laws(spec: str, device: str, tokens: int) -> Iterator[Row]:
    """The laws of one mechanism on the device, a row each. Errors are relative to the largest value (at least 1)."""
    import torch

    import longspan

    dim, heads, batch, exact = 32, 2, 2, 1e-9
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reference = longspan.build(spec, dim, heads).double().eval()
        data = torch.randn(batch, tokens, dim, dtype=torch.float64)
        other = torch.randn(batch, tokens, dim, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = longspan.build(spec, dim, heads).double().eval()
    module = module.to(device)
    x, noise = data.to(device), other.to(device)

    def error(actual: Any, expected: Any) -> float:
        actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
        if actual.shape != expected.shape:
            raise AssertionError(f"shape {tuple(actual.shape)} where {tuple(expected.shape)} is expected")
        if not actual.numel():
            return 0.0
        found = ((actual - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
        return float("inf") if math.isnan(found) else found

    def gradients(module: Any, x: Any, cuts: list[int] | None = None) -> list[Any]:
        leaf = x.detach().clone().requires_grad_()
        y = run(leaf, cuts, module) if cuts else module(leaf)[0]
        names = [p for p in module.parameters() if p.requires_grad]
        return [y, *torch.autograd.grad(y.square().sum(), [leaf, *names])]

    def run(x: Any, cuts: list[int], module: Any = module, donate: bool = False) -> Any:
        state, found, begin = module.init_state(len(x), x.shape[1]), [], 0
        for n in cuts:
            y, state = module(x[:, begin : begin + n], state, donate=donate)
            found.append(y)
            begin += n
        return torch.cat(found, 1)

    def equals_cpu() -> float:
        return max(map(error, gradients(module, x), gradients(reference, data)))

    def causal() -> float:
        last = 3 * tokens // 4
        return error(module(torch.cat([x[:, :last], 3 * noise[:, last:]], 1))[0][:, :last], module(x)[0][:, :last])

    def parallel_is_recurrent() -> float:
        y, third = module(x)[0], tokens // 3
        cuts = ([1] * tokens, [third, 1, tokens - third - 1], [tokens - 1, 1])
        with torch.no_grad():
            return max(error(run(x, cut, donate=donate), y) for cut in cuts for donate in (False, True))

    def padding() -> float:
        mask = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(7)).to(device) < 0.6
        garbage = torch.where(mask[..., None], x, 1e3 * noise)
        y = module(garbage, mask=mask)[0]
        rows = [error(y[i : i + 1, mask[i]], module(x[i : i + 1, mask[i]])[0]) for i in range(batch)]
        return max(*rows, error(y[~mask], 0 * y[~mask]))

    def packed() -> float:
        cut = tokens // 4
        segments = torch.zeros(batch, tokens, dtype=torch.long, device=device)
        segments[0, cut:] = 3
        y = module(x, segments=segments)[0]
        parts = [(y[:1, :cut], x[:1, :cut]), (y[:1, cut:], x[:1, cut:]), (y[1:], x[1:])]
        return max(error(found, module(part)[0]) for found, part in parts)

    def state() -> float:
        cut = tokens // 2
        with torch.no_grad():
            _, kept = module(x[:, :cut], module.init_state(batch))
            copy = longspan.states.clone(kept)
            first, second = (module(x[:, cut:], kept)[0] for _ in range(2))
            given = module(x[:, cut:], longspan.states.clone(kept), donate=True)[0]
        leaves = zip(torch.utils._pytree.tree_leaves(kept), torch.utils._pytree.tree_leaves(copy), strict=True)
        # A state may have infinities, which are equal to themselves.
        if not all(torch.equal(one, two) for one, two in leaves):
            raise AssertionError("a call changed the state that it was given")
        return max(error(second, first), error(given, first))

    def gradients_of_cuts() -> float:
        third = tokens // 3
        cuts = gradients(module, x, [third, third, tokens - 2 * third])
        return max(map(error, cuts, gradients(module, x)))

    def lower(dtype: Any) -> Callable[[], float]:
        def measure() -> float:
            low = longspan.build(spec, dim, heads)
            low.load_state_dict(reference.state_dict())
            y = low.to(device=device, dtype=dtype).eval()(x.to(dtype))[0]
            if y.dtype is not dtype:
                raise AssertionError(f"{y.dtype} where {dtype} is expected")
            return error(y, reference(data)[0])

        return measure

    takes = module.supported_args
    wanted: list[tuple[str, Callable[[], float], float]] = [
        ("equals_cpu", equals_cpu, exact),
        ("causal", causal, exact),
        ("parallel_is_recurrent", parallel_is_recurrent, exact),
        ("state", state, exact),
        ("gradients", gradients_of_cuts, exact),
        ("float32", lower(torch.float32), 1e-3),
        ("bfloat16", lower(torch.bfloat16), 0.1),
    ]
    wanted += [("padding", padding, exact)] if "mask" in takes else []
    wanted += [("packed", packed, exact)] if "segments" in takes else []
    for law, measure, tolerance in wanted:
        row: Row = {"mechanism": spec, "law": law, "tolerance": tolerance}
        try:
            found = measure()
            yield row | {"status": "passed" if found <= tolerance else "failed", "error": found}
        except Exception as error_:
            yield row | {"status": "failed", "note": _short(error_)}


def tests(device: str, quick: bool) -> Iterator[Row]:
    if importlib.util.find_spec("pytest") is None:
        yield {"status": "skipped", "note": "pytest is not installed"}
        return
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "pytest.mark.cuda" not in path.read_text(encoding="utf-8"):
            continue
        name = path.relative_to(ROOT).as_posix()
        absent = [one for one in EXPERIMENTS if importlib.util.find_spec(one) is None]
        if path.parent.name == "reproduce" and absent:
            yield {"test": name, "status": "skipped", "note": f"not installed: {', '.join(absent)}"}
            continue
        yield from _tested(name)
        if quick:
            return


def _tested(name: str) -> Iterator[Row]:
    """A row for each test of a file that is marked cuda, as soon as it has ended."""
    # Warnings of another version of torch, or of the compiler, are no failures.
    options = ["-m", "cuda", "-p", "no:cacheprovider", "-o", "addopts=", "-v", "--tb=short", "-W", "default"]
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

    sizes = [(64, 16)] if quick else [(4096, 64), (4096, 128), (16384, 64), (16384, 128)]
    batch, heads = (1, 2) if quick else (8, 16)
    # What is compiled for each size comes last, for it takes longest.
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
                    except Exception as error:  # out of memory, or a kernel that does not compile
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

    def sdpa(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def decay(q: Any, k: Any, v: Any, g: Any) -> Any:
        return longspan.decay_attention(q, k, v, log_decay=g)

    def delta(q: Any, k: Any, v: Any, b: Any, g: Any = None) -> Any:
        return longspan.delta_rule(q, k, v, beta=b, log_decay=g)

    per_head = log_decay[..., 0].contiguous()
    yield candidate("sdpa causal", sdpa, q, k, v)
    yield candidate("linear_attention", longspan.linear_attention, q, k, v)
    yield candidate("decay_attention, head", decay, q, k, v, per_head)
    yield candidate("decay_attention, channel", decay, q, k, v, log_decay)
    yield candidate("delta_rule", delta, q, k, v, beta)
    yield candidate("delta_rule, decay per head", delta, q, k, v, beta, per_head)
    yield candidate("delta_rule, per channel", delta, q, k, v, beta, log_decay)
    x = q.transpose(1, 2).flatten(2).contiguous()  # (B,N,H D)
    weight = torch.randn(x.shape[2], 4, device=x.device, dtype=x.dtype)

    def convolution(x: Any, weight: Any) -> tuple[Any, Any]:
        return longspan.causal_convolution(x, weight, activation="silu")[0], x.detach()

    yield "causal_convolution", convolution, [x, weight]


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
            if device == "cuda":
                torch.cuda.empty_cache()


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


RUN = {"machine": machine, "laws": laws, "tests": tests, "bench": bench, "decode": decode}


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


def drive(names: list[str], device: str, quick: bool, out: Path) -> int:
    """Run the parts one after the other, each in a process under its limit, and print the tables."""
    out.mkdir(parents=True, exist_ok=True)
    file, begin = out / "gpu.jsonl", time.monotonic()
    file.write_text("", encoding="utf-8")
    ends: dict[str, str] = {}
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    for name in names:
        limit = min(PARTS[name], TOTAL - (time.monotonic() - begin))
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
    return {"device": device, "quick": quick, "parts": ends, "rows": rows}


def tables(found: Row) -> str:
    """The results as text: failures in full, everything else as one line for each mechanism or candidate."""
    rows = {name: [row for row in found["rows"] if row["part"] == name] for name in PARTS}
    lines = ["", "machine"]
    for row in rows["machine"]:
        lines.append("  " + ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("part", "what")))
    lines += ["", "laws: passed of all, errors in float32 and bfloat16"]
    for spec in dict.fromkeys(row["mechanism"] for row in rows["laws"]):
        own = [row for row in rows["laws"] if row["mechanism"] == spec]
        low = [f"{r['error']:.1e}" for r in own if r["law"] in ("float32", "bfloat16") and "error" in r]
        lines.append(f"  {spec:<28} {sum(r['status'] == 'passed' for r in own)}/{len(own)}  {'  '.join(low)}")
    for row in rows["laws"]:
        if row["status"] == "failed":
            said = row.get("note") or f"error {row['error']:.1e}, allowed {row['tolerance']:.0e}"
            lines.append(f"  FAILED {row['mechanism']}, {row['law']}: {said}")
    lines += ["", "tests"]
    count = {
        status: sum(row["status"] == status for row in rows["tests"]) for status in ("passed", "skipped", "failed")
    }
    lines.append("  " + ", ".join(f"{number} {status}" for status, number in count.items()))
    for row in rows["tests"]:
        if row["status"] == "failed" or "note" in row:
            lines.append(f"  {row['status']} {row.get('test', '')} {row.get('note', '')}".rstrip())
    sizes = list(dict.fromkeys((row["n"], row["dim"]) for row in rows["bench"]))
    lines += ["", "bench: ms (peak GiB) at N x D of " + ", ".join(f"{n} x {dim}" for n, dim in sizes)]
    for name, mode in dict.fromkeys((row["candidate"], row["mode"]) for row in rows["bench"]):
        own = {(r["n"], r["dim"]): r for r in rows["bench"] if (r["candidate"], r["mode"]) == (name, mode)}
        lines.append(f"  {name:<28} {mode:<9}" + "".join(f"{_cell(own.get(size)):>18}" for size in sizes))
    lines += ["", "decode: ms of a step at batch 1 and 64, and state in MB"]
    for spec in dict.fromkeys(row["mechanism"] for row in rows["decode"]):
        own = [row for row in rows["decode"] if row["mechanism"] == spec]
        cells = [f"{r['step_ms']:.2f} ({r['state_mb']:.1f})" if "step_ms" in r else r["error"][:40] for r in own]
        lines.append(f"  {spec:<28} {'  '.join(cells)}")
    lines += ["", *(f"{name}: {end}" for name, end in found["parts"].items() if end != "done")]
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if "error" in row:
        return row["error"].split(":")[0][:17]
    return f"{row['ms']:.2f}" + ("" if row["peak_gib"] is None else f" ({row['peak_gib']:.2f})")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, some seconds")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part:
        return part(args.part, args.device, args.quick, args.out / "gpu.jsonl")
    names = args.parts.split(",")
    problem = ""
    if unknown := [name for name in names if name not in PARTS]:
        problem = f"unknown part {unknown[0]!r}; the parts are {', '.join(PARTS)}"
    elif absent := missing():
        problem = f"missing: {', '.join(absent)}; install them with pip"
    elif args.device == "cpu" and not args.quick:
        problem = "--device cpu is only to try the script: add --quick"
    elif args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            problem = f"torch {torch.__version__} finds no CUDA GPU; --device cpu --quick tries the script without one"
    if problem:
        print(f"benchmarks/gpu.py: {problem}", file=sys.stderr)
        return 2
    return drive(names, args.device, args.quick, args.out or _folder(args.device))


def _folder(device: str) -> Path:
    if given := os.environ.get("OUT"):
        return Path(given)
    import torch

    name = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
    return ROOT / "benchmarks" / "results" / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
