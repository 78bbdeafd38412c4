"""Read a prompt once, continue it in several ways from the same state, and keep the state in a file.

    python examples/fork_states.py
    python examples/fork_states.py --prompt "The war was over, and" --forks 8 --tokens 120

A state is a value: a call returns a new one and leaves the old one as it was. The model is the small language model
that comes with longspan; ``--model`` takes a folder of `longspan train` or `longspan.save` instead.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

import longspan
from longspan.models import pretrained

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="text", help="'text', or the folder of a trained decoder; default: %(default)s")
parser.add_argument("--prompt", default="The prince looked at her and said: ", help="what all continuations share")
parser.add_argument("--forks", type=int, default=4, help="number of continuations; default: %(default)s")
parser.add_argument("--tokens", type=int, default=60, help="bytes of each continuation; default: %(default)s")
parser.add_argument("--temperature", type=float, default=0.7, help="of the sampling; default: %(default)s")
args = parser.parse_args()

model = pretrained.load(args.model) if args.model in pretrained.names("decoder") else longspan.load(args.model)


@torch.no_grad()
def read(text: str, state):
    """Read ``text`` after ``state``; return the outputs for the next byte, (1, 256), and the new state."""
    outputs, state = model(torch.tensor([list(text.encode())]), state)
    return outputs[:, -1], state


@torch.no_grad()
def write(outputs, state, tokens: int, seed: int) -> list[str]:
    """Sample one continuation of every row of ``state``."""
    generator, columns = torch.Generator().manual_seed(seed), []
    for _ in range(tokens):
        token = model.likelihood.sample(outputs, temperature=args.temperature, generator=generator)
        columns.append(token)
        outputs, state = model(token[:, None], state)
        outputs = outputs[:, 0]
    return [bytes(row).decode(errors="replace") for row in torch.stack(columns, 1).tolist()]


def show(texts: list[str]) -> None:
    for text in texts:
        print("  ...", " ".join(text.split()))


# 1. Read the prompt once, after the start token.
with torch.no_grad():
    _, begin = model(torch.tensor([[model.start]]), model.init_state(1, len(args.prompt.encode()) + args.tokens + 64))
start = time.perf_counter()
outputs, state = read(args.prompt, begin)
print(f"read {len(args.prompt.encode())} bytes in {1000 * (time.perf_counter() - start):.1f} ms")
print(f"the state takes {longspan.states.nbytes(state):,} bytes\n")

# 2. Fork: the same row several times. All rows continue in one batch.
rows = [0] * args.forks
print(args.prompt)
show(write(outputs[rows], longspan.states.select(state, rows), args.tokens, seed=0))

# 3. Go back: the state has not changed, so other words can follow the same prompt.
for words in ("Yes", "No"):
    more, after = read(words, state)
    print(f"\n{args.prompt}{words}")
    show(write(more, after, args.tokens, seed=1))

# 4. Save the state, and continue from the file. Only the shape of a state is needed to load it.
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "prompt.safetensors"
    longspan.states.save(state, path)
    loaded = longspan.states.load(path, like=model.init_state(1))
    size = path.stat().st_size
expected = write(outputs, state, args.tokens, seed=2)
assert write(outputs, loaded, args.tokens, seed=2) == expected
print(f"\nthe saved state ({size:,} bytes) gives the same continuation:")
show(expected)
