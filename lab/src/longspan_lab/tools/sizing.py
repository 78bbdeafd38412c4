"""Write the table of states and KV caches into docs/how-to/serve.md.

    python -m longspan_lab.tools sizing

Sizes are those of ``init_state`` of models on the meta device, in float32, beside a softmax decoder of equal width and
depth.
"""

from typing import Any

import torch

import longspan
from longspan import states
from longspan.models import pretrained

from . import DOCS

LARGE = {"vocab": 32000, "dim": 1024, "heads": 8, "depth": 24}
MODELS: dict[str, dict[str, Any]] = {
    "`text`": {},
    "8 layers of `linear`, width 256": {"vocab": 256, "dim": 256, "heads": 8, "depth": 8, "attention": "linear"},
    "24 layers of `gla`, width 1024": LARGE | {"attention": "gla"},
    "24 layers of `mamba`, width 1024": LARGE | {"attention": "mamba"},
    "24 layers of `gated_deltanet`, width 1024": LARGE | {"attention": "gated_deltanet"},
}
LENGTHS = (1024, 4096, 32768)
MEMORY = 16 * 2**30


def state_bytes(config: longspan.DecoderConfig, length: int) -> int:
    """Return the bytes of the state of one stream that has room for ``length`` tokens."""
    with torch.device("meta"):
        return states.nbytes(longspan.Decoder(config).init_state(1, length))


def row(name: str, options: dict[str, Any]) -> list[str]:
    """Return one model: the state, the KV cache by length, where they are equal, and the streams in 16 GiB."""
    config = longspan.DecoderConfig(**options) if options else pretrained.load("text").config
    softmax = longspan.DecoderConfig(**{**config.to_dict(), "attention": "softmax"})
    state, caches = state_bytes(config, 1), [state_bytes(softmax, length) for length in LENGTHS]
    token = (caches[-1] - caches[0]) / (LENGTHS[-1] - LENGTHS[0])
    streams = [f"{MEMORY // size:,}" for size in (state, caches[1])]
    return [name, megabytes(state), *map(megabytes, caches), f"{-(-state // token):,.0f} tokens", " / ".join(streams)]


def megabytes(size: int) -> str:
    """Return a size in MB, or in kB below one.

    >>> megabytes(175_112), megabytes(25_165_864)
    ('175 kB', '25.2 MB')
    """
    return f"{size / 1e3:,.0f} kB" if size < 1e6 else f"{size / 1e6:,.1f} MB"


def table() -> str:
    """Return the table."""
    lengths = [f"KV cache at {length:,}" for length in LENGTHS]
    head = ["model", "state", *lengths, "equal at", "streams in 16 GiB, recurrent / softmax at 4,096"]
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *(row(*one) for one in MODELS.items())]
    return "\n".join(f"| {' | '.join(one)} |" for one in rows)


PAGES = {DOCS / "how-to" / "serve.md": {"sizing": table}}
