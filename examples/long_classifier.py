"""Classify long sequences with a bidirectional encoder.

    python examples/long_classifier.py
    python examples/long_classifier.py --length 8192 --attention softmax --steps 5

Four random processes write sequences of eight symbols. They use every symbol equally often and differ in which symbol
tends to follow which. The encoder reads a whole sequence in both directions and predicts its process. Sequences differ
in length: ``mask`` is True on real tokens, and the outputs are averaged over them. To compare costs, run it with
``--attention softmax``, whose time grows with the square of the length.
"""

import argparse
import time

import torch
import torch.nn.functional as F

import longspan

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--attention", default="bidirectional(gated_deltanet)", help="any bidirectional spec; default: %(default)s"
)
parser.add_argument("--length", type=int, default=1024, help="tokens of the longest sequence; default: %(default)s")
parser.add_argument("--steps", type=int, default=40, help="training steps; default: %(default)s")
parser.add_argument("--batch", type=int, default=8, help="sequences per step; default: %(default)s")
parser.add_argument("--dim", type=int, default=32, help="model width, a multiple of 2; default: %(default)s")
args = parser.parse_args()

SYMBOLS, PROCESSES = 8, 4
REGULAR = 0.7  # the part of the symbols that follow the process; the others are noise
generator = torch.Generator().manual_seed(0)
FOLLOWERS = torch.stack([torch.randperm(SYMBOLS, generator=generator) for _ in range(PROCESSES)])


def draw(batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens (B, N), mask (B, N) and labels (B,)."""
    labels = torch.randint(PROCESSES, (batch,), generator=generator)
    tokens = torch.randint(SYMBOLS, (batch, args.length), generator=generator)
    regular = torch.rand(batch, args.length, generator=generator) < REGULAR
    for n in range(1, args.length):
        follower = FOLLOWERS[labels, tokens[:, n - 1]]
        tokens[:, n] = torch.where(regular[:, n], follower, tokens[:, n])
    lengths = torch.randint(args.length // 2, args.length + 1, (batch,), generator=generator)
    return tokens, torch.arange(args.length) < lengths[:, None], labels


torch.manual_seed(0)
config = longspan.EncoderConfig(
    dim=args.dim,
    depth=1,
    heads=2,
    feedforward=2 * args.dim,
    attention=args.attention,
    vocab=SYMBOLS,
    outputs=PROCESSES,
    pool="mean",
    positions="none",
)
model = longspan.Encoder(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
every, spent, losses = max(args.steps // 8, 1), 0.0, []
for step in range(1, args.steps + 1):
    tokens, mask, labels = draw(args.batch)
    begin = time.perf_counter()
    loss = F.cross_entropy(model(tokens, mask=mask), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    spent += time.perf_counter() - begin
    losses.append(loss.item())
    if step % every == 0:
        print(f"step {step:3d}: loss {sum(losses[-every:]) / every:.3f}, {1000 * spent / step:.0f} ms per step")

model.eval()
tokens, mask, labels = draw(32)
with torch.no_grad():
    right = int((model(tokens, mask=mask).argmax(-1) == labels).sum())
print(f"{args.attention}: {right} of {len(labels)} new sequences right")
