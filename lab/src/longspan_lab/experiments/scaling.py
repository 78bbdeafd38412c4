"""Time and memory of one attention layer by sequence length, forward and backward."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspan import ops
from longspan._utils import spec
from longspan.attention import build, plugins

from .._utils import palette, plots
from .._utils.tables import Table
from ..bench import case, figures, local, worker
from ..bench.worker import timed
from . import paper
from .experiment import DEVICES, Buildable, Experiment, Place, Result, Row, check_device, setting

# Exponents are fitted from here on; below, constant costs still count.
FROM = 4096
SHORT = 64
LEAST = 1e-3  # ms and MB: zero has no logarithm
LONG = 5.0  # seconds
ROOM = 0.8  # part of the free memory that a call may take


def layer(name: str, dim: int, heads: int, seed: int) -> tuple[torch.nn.Module, str]:
    """The attention of a name, and its backend, "" for the default. Raises ValueError for unknown names."""
    named = local.read(name)
    if named.spec in ("sdpa", "kernel"):
        raise ValueError(f"{name} is no layer; {'softmax' if named.spec == 'sdpa' else 'linear'} is")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(named.spec, dim, heads), named.backend


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale."""

    specs: str = setting(
        f"softmax; softmax@reference; linear; {paper.LSH}",
        "attentions, separated by semicolons; @BACKEND selects a backend",
        quick="softmax; linear",
    )
    lengths: tuple[int, ...] = setting(
        tuple(2**power for power in range(9, 17)), "tokens per sequence, N", least=SHORT, quick=(64, 67)
    )
    tokens: int = setting(
        2**13,
        "tokens per batch; its sequences are this number divided by N, at least one",
        least=1,
        quick=128,
        gpu=2**16,
    )
    heads: int = setting(8, "heads of the layer", least=1, quick=2)
    size: int = setting(32, "channels of a head", least=1, quick=4)
    rounds: int = setting(3, "timing samples; the median counts", least=1, quick=2, gpu=7, paper=3)
    limit: float = setting(
        60.0, "limit in seconds per sequence, predicted from the previous length", positive=True, paper=600.0
    )
    device: str = setting("cpu", "device: cpu or cuda", among=DEVICES, gpu="cuda", paper="cpu")
    seed: int = setting(0, "seed of weights and inputs")

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        for name in spec.split(self.specs):
            layer(name, self.heads * self.size, self.heads, self.seed)

    def batch(self, length: int) -> int:
        """Sequences of a batch."""
        return max(self.tokens // length, 1)


def points(settings: Settings) -> list[Row]:
    """One point per attention, in which each length is saved when it is measured. Raises ValueError without a GPU
    that is asked for.
    """
    check_device(settings.device)
    return [{"spec": name} for name in spec.split(settings.specs)]


def call(settings: Settings, name: str, length: int) -> Callable[[], tuple[Tensor | None, ...]]:
    """Forward and backward of a batch of the layer -> gradients of the input and of all weights, None for a weight that
    such a call does not read. Inputs are made now.
    """
    attention, backend = layer(name, settings.heads * settings.size, settings.heads, settings.seed)
    attention = attention.to(settings.device)
    random = torch.Generator().manual_seed(settings.seed)
    shape = (settings.batch(length), length, settings.heads * settings.size)
    x, upstream = (torch.randn(shape, generator=random).to(settings.device) for _ in range(2))
    inputs = [x.requires_grad_(), *attention.parameters()]

    def run() -> tuple[Tensor | None, ...]:
        with ops.backend(backend) if backend else nullcontext():
            found = torch.autograd.grad(attention(x)[0], inputs, upstream, allow_unused=True)
        if settings.device == "cuda":
            torch.cuda.synchronize()
        return found

    return run


def weigh(settings: Settings, name: str, length: int) -> float:
    """MB that one such call takes at its peak beyond its inputs and weights: on the CPU in a process that has made no
    longer one.
    """
    # A short call first, to load lazily loaded code.
    call(replace(settings, tokens=SHORT), name, SHORT)()
    measured = call(settings, name, length)
    if settings.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        measured()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = worker.highest()
    measured()
    return worker.highest() - before


def weighed(settings: Settings, name: str, length: int) -> float:
    """``weigh`` in a separate process with as many threads. Raises ValueError where that fails."""
    if settings.device == "cuda":
        return weigh(settings, name, length)
    code = plugins.again() + f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
    code += f"from longspan_lab.experiments import scaling\nsettings = scaling.{settings!r}\n"
    code += f"print(scaling.weigh(settings, {name!r}, {length}))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"code {done.returncode}, perhaps for want of memory"])[-1]
        raise ValueError(f"the process that measures the memory of {name} at {length} tokens ended: {said}")
    return float(done.stdout.split()[-1])


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """Length by length -> ``cases``: length, batch, ms and MB of one sequence, how the samples were; ``stopped``: the
    first length that was expected to take too long or too much memory, and why, None where there is none.
    """
    name = point["spec"]
    # Its index instead of its name, whose characters a file name may not have.
    file = f"scaling-{spec.split(settings.specs).index(name)}"
    kept = place.load(file) or {"cases": [], "stopped": None}
    done = [one["length"] for one in kept["cases"]]
    lengths = [length for length in sorted(settings.lengths) if length not in done]
    for length in place.track(lengths, len(lengths), name):
        if kept["stopped"] is None:
            seconds, reason = expected(settings, name, kept["cases"], length)
            if reason:
                kept["stopped"] = {"length": length, "reason": reason}
            else:
                kept["cases"].append(one_length(settings, name, length, seconds))
            place.save(file, kept)
    return kept


def one_length(settings: Settings, name: str, length: int, seconds: float) -> Row:
    """Time and memory at one length, for one sequence of the batch, of which one is expected to take ``seconds``."""
    batch = settings.batch(length)
    megabytes = weighed(settings, name, length)
    samplers = {name: partial(timed, call(settings, name, length))}
    # Long calls need no warm-up.
    warm = seconds * batch < LONG
    found, _ = case.take(samplers, settings.rounds, name, lambda items, *_: items, warm=warm)
    row = found[name].row()
    return {
        "length": length,
        "batch": batch,
        "ms": 1e3 * row["seconds"] / batch,
        "mb": megabytes / batch,
        **{key: row[key] for key in ("samples", "calls", "rejected", "disturbed")},
    }


def expected(settings: Settings, name: str, cases: list[Row], length: int) -> tuple[float, str]:
    """Seconds that a sequence should take, by the length before it and the declared cost, 0 without one; and why it is
    left out, "" where it is not.
    """
    if not cases:
        return 0.0, ""
    growth = length / cases[-1]["length"]
    power = figures.declared(local.read(name).cost)
    seconds = cases[-1]["ms"] / 1e3 * growth**power
    # Only a matrix of all pairs grows with the square.
    megabytes = cases[-1]["mb"] * settings.batch(length) * growth ** (power if name.endswith("@reference") else 1)
    if seconds > settings.limit:
        return seconds, f"about {seconds:.0f} s a sequence, more than the limit of {settings.limit:g}"
    if settings.device == "cpu" and megabytes > ROOM * case.available():
        return seconds, f"about {megabytes:,.0f} MB; {case.available():,.0f} are free"
    return seconds, ""


def exponent(cases: list[Row], what: str) -> float | None:
    """The growth exponent of ``ms`` or ``mb`` from FROM on; None for less than two lengths."""
    found = {one["length"]: max(one[what], LEAST) for one in cases if one["length"] >= FROM}
    return figures.exponent(found) if len(found) > 1 else None


def tables(result: Result) -> list[Table]:
    """Time and memory of one sequence by length, and how they grow."""
    lengths, rows = result["settings"]["lengths"], result["rows"]
    found = []
    for what, title in (("ms", "ms of one sequence"), ("mb", "peak MB of one sequence")):
        table = [[title, *(f"N {length}" for length in lengths), f"from N {FROM} on"]]
        for row in rows:
            at = {one["length"]: f"{one[what]:.3g}" for one in row["cases"]}
            power = exponent(row["cases"], what)
            table.append([row["spec"], *(at.get(n, "-") for n in lengths), f"N^{power:.2f}" if power else ""])
        found.append(table)
    stopped = [
        [f"{row['spec']} from N {row['stopped']['length']} on: {row['stopped']['reason']}"]
        for row in rows
        if row["stopped"]
    ]
    return [*found, *([[["left out"], *stopped]] if stopped else [])]


def draw(plt: Any, result: Result) -> Any:
    """Time and memory of one sequence by length, both axes logarithmic; a cross marks the first length left out."""
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 5.6), layout="constrained")
    lengths, settings = result["settings"]["lengths"], result["settings"]
    looks = palette.looks(row["spec"] for row in result["rows"])
    for axis, what, title in zip(axes, ("ms", "mb"), ("time", "peak memory beyond input and weights"), strict=True):
        for row in result["rows"]:
            look = looks[row["spec"]]
            x = [one["length"] for one in row["cases"]]
            y = [max(one[what], LEAST) for one in row["cases"]]
            power = exponent(row["cases"], what)
            label = row["spec"] + (f", N^{power:.2f}" if power else "")
            axis.plot(x, y, label=label, **look._asdict())
            if row["stopped"] and y:
                axis.plot(x[-1:], y[-1:], marker="x", markersize=12, color=look.color)
        axis.set(xscale="log", yscale="log", xlabel="tokens N", ylabel=f"{what.replace('mb', 'MB')} of one sequence")
        axis.set_xticks(lengths, [plots.thousands(length) for length in lengths])
        axis.minorticks_off()
        axis.set_title(f"{title},\nforward and backward")
        axis.grid(alpha=0.3)
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": 1}
        axis.legend(fontsize=9, title=f"fitted from N {FROM} on; cross: left out beyond", title_fontsize=9, **place)
    figure.suptitle(
        f"one layer: {settings['heads']} heads of {settings['size']} channels, causal, float32", fontsize=10
    )
    return figure


EXPERIMENT = Experiment(
    about="time and memory of one attention layer by length, forward and backward",
    scales=Settings.scales("gpu", "paper"),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=draw,
    source="Katharopoulos et al. 2020 (2006.16236), section 4.1.2 and figure 1, of which no figures are published",
    differs=(
        "The publication measured on a GPU of 11 GB, where softmax ended at 4096 tokens; ours is the machine named "
        "with the figures. `softmax` is torch's current fused kernel. It computes as many products but keeps no "
        "matrix of N x N, so its memory grows with N alone. `softmax@reference` writes the matrix out, as programs "
        "did at the time, and shows the published growth of memory. The layer is the attention with its projections, "
        "without a feed-forward network. Reformer, the publication's lsh-1 and lsh-4, is our implementation: its "
        "causal chunks are counted inside a bucket, so that later tokens do not leak. Each figure names the "
        "attentions that it has."
    ),
    minutes=11.3,
)
