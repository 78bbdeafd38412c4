"""Measure what the published causal forms leak, and write the table into docs/results/lab.md.

    python -m longspan_lab.tools leaks

A leak is the share of outputs before t that change when the tokens from t on are drawn anew, over cuts t of random
sequences. An output is the row of one token. It counts as changed if any of its heads changes, so more heads leak more.
``tests/attention/test_leaks.py`` compares the docstrings with the same figures.
"""

import torch

import longspan

from . import DOCS

HEADS = (1, 4, 8)
TOKENS, WIDTH, ROWS, STEP = 64, 32, 32, 3
SPECS = (
    "reformer(chunk=8, rounds=1, buckets=16, published=True)",
    "reformer(chunk=8, rounds=1, buckets=4, published=True)",
    "reformer(chunk=8, rounds=1, buckets=16, published=True, cross=True)",
    "routing(clusters=8, window=8, published=True)",
    "informer(factor=5, published=True)",
)


@torch.no_grad()
def leak(spec: str, heads: int) -> float:
    """Return the share of outputs before t that change when the tokens from t on are drawn anew, over all cuts t."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attention = longspan.build(spec, WIDTH, heads).double().eval()
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randn(2, ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    y, moved, total = attention(x)[0], 0, 0
    for t in range(1, TOKENS, STEP):
        changed = (attention(torch.cat([x[:, :t], other[:, t:]], 1))[0] - y)[:, :t].abs().amax(-1) > 1e-9
        moved, total = moved + int(changed.sum()), total + changed.numel()
    return moved / total


def shares(spec: str) -> list[str]:
    """Return the leak for each number of heads in per cent, rounded to integers from 1 % on, else to one digit."""
    found = [100 * leak(spec, heads) for heads in HEADS]
    return [f"{share:.0f}" if share >= 1 else f"{share:.1f}" for share in found]


def table() -> str:
    """Return Markdown with a row per spec and a column per number of heads."""
    titles = ("published form", *(f"{heads} head{'s' * (heads > 1)}" for heads in HEADS))
    rows = [(f"`{spec}`", *(f"{share} %" for share in shares(spec))) for spec in SPECS]
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


PAGES = {DOCS / "results" / "lab.md": {"leaks": table}}
