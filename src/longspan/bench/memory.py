"""Peak memory by length: ``python -m longspan.bench.memory --spec linear --out memory.json``.

Each length runs in a process of its own, since a process's peak never falls: forward and backward of one attention,
and generation by a decoder; peaks are resident memory beyond that of the inputs, in MB.
"""

import argparse
import contextlib
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch

from ..attention import build, nbytes
from ..checkpoint import write_text
from ..config import Config
from ..generate import generate
from ..model import Decoder
from . import figures
from .guard import machine

LENGTHS = (4096, 8192, 16384, 32768, 65536)
STEPS = (256, 1024, 4096)


def peak() -> float:
    """Largest resident memory of this process so far, in MB."""
    # Not from getrusage on Linux: there a child begins with its parent's peak.
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM:"))
    unit = 1024 if sys.platform == "darwin" else 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 / unit


def train(spec: str, tokens: int, dim: int = 512, heads: int = 8) -> float:
    """MB beyond the input that forward and backward of one attention take at their peak; causal, batch 1, float32."""
    attention = build(spec, dim, heads)
    # A first short call loads whatever is loaded once.
    attention(torch.randn(1, 64, dim, requires_grad=True))[0].sum().backward()
    x = torch.randn(1, tokens, dim, requires_grad=True)
    before = peak()
    attention(x)[0].sum().backward()
    return peak() - before


def decode(spec: str, tokens: int) -> float:
    """MB that generating ``tokens`` tokens takes beyond generating 8 of them; 4 layers of width 128, batch 16."""
    torch.manual_seed(0)
    config = Config(dim=128, depth=4, heads=4, feedforward=256, attention=spec, positions="none")
    model = Decoder(config).eval()
    for _ in generate(model, tokens=8, batch=16, seed=0):
        pass
    before = peak()
    for _ in generate(model, tokens=tokens, batch=16, seed=0):
        pass
    return peak() - before


def state_bytes(spec: str, tokens: int) -> int:
    """Bytes of one sequence's state after ``tokens`` tokens; one attention of width 512 with 8 heads."""
    return nbytes(build(spec, 512, 8).init_state(1, tokens))


def measure(spec: str, what: str, lengths: tuple[int, ...]) -> dict[int, float]:
    """``train`` or ``decode`` at each length, each in a fresh process -> tokens -> MB."""
    found = {}
    for tokens in lengths:
        code = f"from longspan.bench import memory; print(memory.{what}({spec!r}, {tokens}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        found[tokens] = float(done.stdout.split()[-1])
    return found


def exponent(found: dict[int, float]) -> float:
    """The growth exponent of MB by tokens; see ``figures.exponent``."""
    # No growth at all is measured as nothing, whose logarithm is none.
    return figures.exponent({n: max(mb, 1e-3) for n, mb in found.items()})


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m longspan.bench.memory", description=__doc__)
    parser.add_argument("--spec", default="linear", help="the attention (default: linear)")
    parser.add_argument("--out", default="memory.json", help="the file to write (default: memory.json)")
    arguments = parser.parse_args()
    spec = arguments.spec
    forward_backward = measure(spec, "train", LENGTHS)
    generation = measure(spec, "decode", STEPS)
    states = {n: state_bytes(spec, n) for n in STEPS}
    result = {
        "spec": spec,
        "forward_backward_mb": forward_backward,
        "forward_backward_exponent": exponent(forward_backward),
        "generation_mb": generation,
        "state_bytes": states,
        "machine": machine(),
    }
    write_text(Path(arguments.out), json.dumps(result, indent=2) + "\n")
    print(f"{spec}: forward + backward, causal, batch 1, width 512, float32")
    for n, mb in forward_backward.items():
        print(f"  {n:>7,} tokens {mb:10,.0f} MB")
    print(f"  grows as N^{result['forward_backward_exponent']:.2f}")
    print("generation, 4 layers of width 128, batch 16, beyond 8 tokens; state of one layer of width 512, batch 1")
    for n, mb in generation.items():
        print(f"  {n:>7,} tokens {mb:10,.1f} MB {states[n]:14,} bytes")


if __name__ == "__main__":
    main()
