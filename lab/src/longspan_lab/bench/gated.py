"""Decay and the delta rule: kernels, chunks, a plain loop over the tokens, and the code of transformers, by rule."""

import importlib
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan._utils.machine import machine
from longspan._utils.spec import known
from longspan.ops import gated
from longspan.ops.backends import backend
from longspan.ops.buffers import reuse_pages
from longspan.ops.native.call import available

from .._utils.tables import Table, duration
from . import case, limits, oracle
from .candidates import Refused, Sampler
from .case import Watch
from .options import length, option, rounds

RULES = {
    "decay": ("head", False),
    "channel decay": ("channel", False),
    "delta": ("", True),
    "gated delta": ("head", True),
    "channel delta": ("channel", True),
}
MODES = ("forward", "forward+backward", "step")
WAYS = ("native", "torch", "loop", "transformers")
BOUND = "state in place"
ALLOWED, COMPARED = oracle.ALLOWED["float32"], oracle.COMPARED  # tokens compared with the definition


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    rules: tuple[str, ...] = option(
        tuple(RULES),
        "what to measure, by default all: decay, 'channel decay', delta, 'gated delta', 'channel delta'",
        "positional",
        metavar="RULE",
    )
    length: int = length(4096)
    batch: int = option(1, "batch size")
    heads: int = option(8, "value heads")
    key_heads: int = option(0, "heads of queries and keys; 0: the number of value heads", "count")
    size: int = option(64, "channels per head")
    batches: tuple[int, ...] = option((1, 64, 1024), "batch sizes of the decode step; 0: do not measure it", "optional")
    rounds: int = rounds(7, "samples per candidate; three times as many for the decode step")


def operands(rule: str, batch: int, length: int, options: Options) -> dict[str, Tensor | None]:
    """q, k of norm 1, v as projections give them, (B,N,heads*D) taken apart; decays of about 0.9 and step sizes."""
    decay, delta = RULES[known(rule, RULES, "rule")]
    heads, size = options.heads, options.size

    def random(heads: int, *channels: int) -> Tensor:
        return torch.randn(batch, length, heads, *channels).transpose(1, 2)

    shape = {"": None, "head": (heads,), "channel": (heads, size)}[decay]
    return {
        "q": F.normalize(random(options.key_heads, size), dim=-1),
        "k": F.normalize(random(options.key_heads, size), dim=-1),
        "v": random(heads, size),
        "log_decay": None if shape is None else -0.1 * random(*shape).abs(),
        "beta": random(heads).sigmoid() if delta else None,
    }


def ours(name: str, given: dict[str, Tensor | None]) -> Tensor:
    """The public op on a backend."""
    with backend(name):
        return gated.recur(**given)[0]  # pyright: ignore[reportArgumentType] (a mixed dict)


@torch.no_grad()
def loop(given: dict[str, Tensor | None]) -> Tensor:
    """One token after the other, with as few operations on the state as torch has; forward only."""
    q, k, v, log_decay, beta = given.values()
    assert q is not None
    assert k is not None
    assert v is not None
    shared = v.shape[1] // k.shape[1]
    q, k = (t.repeat_interleave(shared, 1) if shared > 1 else t for t in (q * q.shape[-1] ** -0.5, k))
    alpha = None if log_decay is None else log_decay.exp()
    alpha = alpha[..., None] if alpha is not None and alpha.dim() == 3 else alpha
    state, out = v.new_zeros(*v.shape[:2], q.shape[-1], v.shape[-1]), torch.empty_like(v)
    for t in range(q.shape[2]):
        query, key, new = q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1]
        if alpha is not None:
            state.mul_(alpha[:, :, t, :, None])
        if beta is not None:
            new = (new - key @ state) * beta[:, :, t, None, None]
        state.addcmul_(key.mT, new)
        out[:, :, t : t + 1] = query @ state
    return out


def transformers() -> Callable[[dict[str, Tensor | None]], Tensor] | None:
    """The gated delta rule of transformers on a CPU (Qwen3-Next); None if transformers is not installed."""
    try:
        # Silence the warning that faster code for GPUs is missing.
        importlib.import_module("transformers.utils.logging").set_verbosity_error()
        module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    except ImportError:
        return None

    def run(given: dict[str, Tensor | None]) -> Tensor:
        q, k, v, g, beta = (None if t is None else t.transpose(1, 2) for t in given.values())
        assert q is not None
        assert k is not None
        assert v is not None
        if (shared := v.shape[2] // k.shape[2]) > 1:
            q, k = (t.repeat_interleave(shared, 2) for t in (q, k))
        return module.torch_chunk_gated_delta_rule(q, k, v, g, beta)[0].transpose(1, 2)

    return run


def ways(rule: str) -> dict[str, Callable[[dict[str, Tensor | None]], Tensor]]:
    """The candidates of a rule."""
    found: dict[str, Callable[[dict[str, Tensor | None]], Tensor]] = {
        name: partial(ours, name) for name in ("native", "torch") if name != "native" or available("gated")
    }
    found["loop"] = loop
    if rule == "gated delta" and (peer := transformers()) is not None:
        found["transformers"] = peer
    return found


def outcome(
    function: Callable, given: dict[str, Tensor | None], upstream: Tensor, *, backward: bool
) -> dict[str, Tensor]:
    """The output, and with ``backward`` the gradients of all operands."""
    if not backward:
        with torch.no_grad():
            return {"output": function(given)}
    inputs = {name: None if t is None else t.detach().requires_grad_() for name, t in given.items()}
    output = function(inputs)
    there = {name: t for name, t in inputs.items() if t is not None}
    grads = torch.autograd.grad(output, list(there.values()), upstream)
    return {"output": output.detach(), **{f"gradient of {n}": g for n, g in zip(there, grads, strict=True)}}


def check(function: Callable, rule: str, options: Options, *, backward: bool) -> float:
    """The largest relative error against the loop of the definition in float64. Raises Refused if it is too large."""
    given = operands(rule, 1, min(options.length, COMPARED), options)
    upstream = torch.randn_like(given["v"])  # pyright: ignore[reportArgumentType] (v is always set)
    exact = {name: None if t is None else t.double() for name, t in given.items()}
    expected = outcome(partial(ours, "reference"), exact, upstream.double(), backward=backward)
    found = outcome(function, given, upstream, backward=backward)
    errors = oracle.relative(found, expected)
    oracle.judge(errors, ALLOWED, f"{len(upstream[0, 0])} tokens")
    return max(errors.values())


def run(options: Options, watch: Watch) -> Generator[dict[str, Any], None, None]:
    """Measure; yield the growing result for ``report.collect``.

    Raises ValueError for an unknown rule, or heads that do not fit.
    """
    options = replace(options, key_heads=options.key_heads or options.heads)
    for rule in options.rules:
        known(rule, RULES, "rule")
    if options.heads % options.key_heads:
        raise ValueError(f"--heads={options.heads} is not a multiple of --key-heads={options.key_heads}")
    reuse_pages()  # as train and generate do
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    peak = 0.0
    points = [
        (rule, *point)
        for rule in options.rules
        for point in (*((m, 0) for m in MODES[:2]), *(("step", b) for b in options.batches))
    ]
    for rule, mode, batch in points:
        if mode == "step":
            _step(rule, batch, options, watch, rows, refused)
        else:
            peak = max(peak, _sequence(rule, mode, options, watch, rows, refused))
        yield {
            "benchmark": "gated",
            "how": _how(options),
            "machine": machine() | _versions(),
            "options": asdict(options),
            "gemm_gflops": peak,
            "rows": rows,
            "refused": [{"candidate": n, "reason": r, "ours": "transformers" not in n} for n, r in refused.items()],
        }


def _how(options: Options) -> str:
    return (
        f"causal, B {options.batch}, N {options.length}, H {options.heads} value and {options.key_heads} key heads, "
        f"D {options.size}, float32, medians of {options.rounds} rounds; loop: in-place operations of torch, token by "
        f"token, forward only; transformers: torch_chunk_gated_delta_rule of Qwen3-Next; step: one token through the "
        f"public op, state donated, against state.mul_(1.0); freed memory is kept, as in training; each candidate "
        f"first agreed with a float64 definition"
    )


def _versions() -> dict[str, str]:
    there = transformers() is not None
    return {"transformers": importlib.import_module("transformers").__version__} if there else {}


def _sequence(rule: str, mode: str, options: Options, watch: Watch, rows: list[dict], refused: dict[str, str]) -> float:
    """Rows of one rule in one mode -> the best GFLOP/s of a matrix product in the same rounds."""
    backward = mode == MODES[1]
    given = operands(rule, options.batch, options.length, options)
    upstream = torch.randn_like(given["v"])  # pyright: ignore[reportArgumentType] (v is always set)
    samplers: dict[str, Sampler] = {}
    errors = {}
    for name, function in ways(rule).items():
        if name == "loop" and backward:
            continue
        try:
            errors[name] = check(function, rule, options, backward=backward)
            samplers[name] = case.bound(partial(outcome, function, given, upstream, backward=backward))
        except Refused as error:
            refused[f"{rule}, {name}"] = str(error)
    samplers |= limits.gemms("float32")
    found, failed = case.take(samplers, options.rounds, f"{rule} {mode}", watch)
    refused |= {f"{rule}, {name}": reason for name, reason in failed.items()}
    for name in WAYS:
        if name in found:
            row = {"rule": rule, "mode": mode, "candidate": name, "batch": options.batch, "error": errors[name]}
            times = {f"times_{other}": found[other].seconds / found[name].seconds for other in WAYS if other in found}
            rows.append(row | found[name].row() | times)
    return limits.peak(found)


def _step(rule: str, batch: int, options: Options, watch: Watch, rows: list[dict], refused: dict[str, str]) -> None:
    """Rows of the token step for one batch, against scaling its state in place."""
    given = operands(rule, batch, 1, options)
    samplers: dict[str, Sampler] = {}
    for name in ways(rule).keys() & {"native", "torch"}:
        try:
            check(partial(ours, name), rule, options, backward=False)
        except Refused as error:
            refused[f"{rule}, {name}"] = str(error)
            continue
        state = torch.ones(batch, options.heads, options.size, options.size)
        call = partial(gated.recur, **given, state=state, donate=True)

        def on_torch(call: Callable = call) -> object:
            with backend("torch"):
                return call()

        # The kernels are what is taken anyway: no backend to enter, which a call of some microseconds would feel.
        samplers[name] = case.bound(call if name == "native" else on_torch)
    state = torch.ones(batch, options.heads, options.size, options.size)
    samplers[BOUND] = case.bound(lambda: state.mul_(1.0))
    found, failed = case.take(samplers, 3 * options.rounds, f"{rule} step, batch {batch}", watch)
    refused |= {f"{rule}, {name}": reason for name, reason in failed.items()}
    for name in (*WAYS, BOUND):
        if name in found:
            row = {"rule": rule, "mode": "step", "candidate": name, "batch": batch, **found[name].row()}
            rows.append(row | {"to_bound": found[name].seconds / found[BOUND].seconds})


def text(result: dict[str, Any]) -> list[Table]:
    """The tables of a result."""
    rows = result["rows"]
    at = {(row["rule"], row["mode"], row["candidate"], row["batch"]): row for row in rows}
    rules, batch = result["options"]["rules"], result["options"]["batch"]
    tables: list[Table] = []
    for mode in MODES[:2]:
        names = [name for name in WAYS if any(r["mode"] == mode and r["candidate"] == name for r in rows)]
        table = [[mode, *names, *(f"native / {name}" for name in names if name != "native")]]
        for rule in rules:
            found = {name: at[rule, mode, name, batch] for name in names if (rule, mode, name, batch) in at}
            times = [
                found[n]["seconds"] / found["native"]["seconds"] if {n, "native"} <= found.keys() else None
                for n in names
                if n != "native"
            ]
            table.append(
                [
                    rule,
                    *(duration(found[n]["seconds"]) if n in found else "" for n in names),
                    *(f"{t:.1f}x" if t else "" for t in times),
                ]
            )
        tables.append(table)
    batches = result["options"]["batches"]
    if batches:
        table = [["step", *(f"batch {b}" for b in batches)]]
        for rule in rules:
            for name in ("native", "torch"):
                cells = [at.get((rule, "step", name, b)) for b in batches]
                if any(cells):
                    table.append(
                        [
                            f"{rule}, {name}",
                            *(f"{duration(c['seconds'])} ({c['to_bound']:.2f} of bound)" if c else "" for c in cells),
                        ]
                    )
        tables.append(table)
    return tables
