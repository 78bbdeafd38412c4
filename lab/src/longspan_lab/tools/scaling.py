"""Compute what training over many GPUs sends, stores and waits for: the tables of docs/explanation/scaling.md.

    python -m longspan_lab.tools scaling

Every number is a count of bytes or of steps, not a measurement. A test compares the functions with the bytes that the
collectives of small models move.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from . import DOCS

GPUS = (1, 2, 4, 8, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder whose layers are all of one mechanism."""

    dim: int = 1024
    depth: int = 24
    heads: int = 8
    keys: int = 128  # channels of a key, per head
    values: int = 128  # channels of a value, per head
    feedforward: int = 2304
    vocab: int = 50304

    @property
    def weights(self) -> int:
        """The number of weights: q, k, v, output and gate projections, a gated feed-forward network, embeddings."""
        width = self.heads * self.keys
        own = self.dim * (2 * width + 3 * self.heads * self.values) + 3 * self.dim * self.feedforward
        return self.depth * own + self.vocab * self.dim


def gathered(size: int, ranks: int) -> int:
    """Return the bytes that each rank sends in an all-gather of ``size`` bytes per rank, or a reduce-scatter to it."""
    return (ranks - 1) * size


def reduced(size: int, ranks: int) -> int:
    """Return the bytes that each rank sends in an all-reduce of ``size`` bytes, as a ring."""
    return 2 * (ranks - 1) * size // ranks


def data_parallel(weights: int, ranks: int, bytes_per: int = 4) -> int:
    """Return the bytes that each rank sends per step under DDP: one all-reduce of the gradients."""
    return reduced(weights * bytes_per, ranks)


def fully_sharded(weights: int, ranks: int, bytes_per: int = 2, gradient: int = 4) -> int:
    """Return the bytes that each rank sends per step under FSDP2: weights gathered twice, gradients scattered once."""
    return gathered(weights // ranks, ranks) * (2 * bytes_per + gradient)


def state_bytes(kind: str, heads: int, keys: int, values: int) -> int:
    """Return the bytes, float32, of [B | A] of one row and layer, which a rank puts into the all-gather.

    ``kind``: ``sum`` (linear attention with its normalizer), ``decay`` (B and a diagonal) or ``delta`` (B and D x D).
    """
    columns = {"sum": values + 1, "decay": values + 1, "delta": values + keys}[kind]
    return 4 * heads * keys * columns


def state_exchange(kind: str, model: Model, ranks: int, batch: int = 1) -> int:
    """Return the bytes that each rank sends per layer and step: all-gather forward, reduce-scatter backward."""
    return 2 * gathered(batch * state_bytes(kind, model.heads, model.keys, model.values), ranks)


def halo(rows: int, channels: int, ranks: int, batch: int = 1, bytes_per: int = 4) -> int:
    """Return the bytes that each rank sends per layer and step for the last ``rows`` tokens: to one neighbor, twice."""
    return 0 if ranks == 1 else 2 * batch * rows * channels * bytes_per


def ring_attention(tokens: int, model: Model, ranks: int, batch: int = 1, bytes_per: int = 2) -> int:
    """Return the bytes that each rank sends per layer and step in ring attention over shards of ``tokens``.

    Keys and values pass all other ranks forward, and again backward together with their gradients.
    """
    size = batch * tokens * model.heads * (model.keys + model.values) * bytes_per
    return (1 + 2) * (ranks - 1) * size


def ulysses(tokens: int, model: Model, ranks: int, batch: int = 1, bytes_per: int = 2) -> int:
    """Return the bytes that each rank sends per layer and step in Ulysses: q, k, v and the output, all-to-all, twice.

    It needs a number of heads that the number of ranks divides.
    """
    size = batch * tokens * model.heads * (2 * model.keys + 2 * model.values) * bytes_per
    return 2 * size * (ranks - 1) // ranks


def crossover(kind: str, model: Model, ranks: int, other: str) -> int:
    """Return from how many tokens per rank on the exchange of states sends fewer bytes than ``ring`` or ``ulysses``."""
    cost = {"ring": ring_attention, "ulysses": ulysses}[other]
    return -(-state_exchange(kind, model, ranks) // cost(1, model, ranks)) if ranks > 1 else 0


def wavefront(layers: int, ranks: int) -> float:
    """Return the part of the time in which a rank computes, if states are handed on: L / (L + R - 1)."""
    return layers / (layers + ranks - 1)


def memory(model: Model, tokens: int, batch: int, *, data: int = 1, sequence: int = 1, sharded: bool) -> dict[str, int]:
    """Return the bytes on each GPU for ``batch`` rows of ``tokens`` on each of ``data`` x ``sequence`` GPUs.

    Weights, gradients and two moments of Adam in float32; under autocast also weights in bfloat16. FSDP2 divides all
    but one gathered layer by the number of GPUs. Activations: the input of each block in bfloat16, as with activation
    checkpointing, and one block in full.
    """
    ranks = data * sequence if sharded else 1
    layer = (model.weights - model.vocab * model.dim) // model.depth
    shard, own = model.weights // ranks, tokens // sequence
    found = {
        "weights": 4 * shard,
        "gradients": 4 * shard,
        "optimizer": 8 * shard,
        "gathered": 2 * (max(layer, model.vocab * model.dim) if sharded else model.weights),
        "block inputs": 2 * model.depth * batch * own * model.dim,
        "one block": 2 * batch * own * (2 * model.feedforward + 8 * model.dim),
        "logits": 4 * batch * own * model.vocab,
    }
    return found | {"total": sum(found.values())}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def amount(size: float) -> str:
    """Return a number of bytes in MB or GB, with three digits."""
    if size == 0:
        return "0"
    unit, scale = ("GB", 1e9) if size >= 1e9 else ("MB", 1e6)
    return f"{size / scale:.3g} {unit}"


def sent() -> str:
    """What each GPU sends in a training step, by the number of GPUs."""
    model, tokens = Model(), 4096
    head = ["GPUs", "DDP", "FSDP2", "sums", "delta rule", "window of 1,024", "ring attention", "Ulysses"]
    return table(
        head,
        [
            [
                str(ranks),
                amount(data_parallel(model.weights, ranks)),
                amount(fully_sharded(model.weights, ranks)),
                amount(model.depth * state_exchange("sum", model, ranks)),
                amount(model.depth * state_exchange("delta", model, ranks)),
                amount(model.depth * halo(1023, model.heads * (model.keys + model.values), ranks, bytes_per=2)),
                amount(model.depth * ring_attention(tokens, model, ranks)),
                amount(model.depth * ulysses(tokens, model, ranks)) if model.heads % ranks == 0 else "-",
            ]
            for ranks in GPUS
        ],
    )


def crossovers() -> str:
    """The lengths from which on states are smaller than what attention sends."""
    model = Model()
    return table(
        ["GPUs", "sums, ring", "sums, Ulysses", "delta, ring", "delta, Ulysses"],
        [
            [
                str(ranks),
                *(
                    f"{crossover(kind, model, ranks, other):,}" if other == "ring" or model.heads % ranks == 0 else "-"
                    for kind in ("sum", "delta")
                    for other in ("ring", "ulysses")
                ),
            ]
            for ranks in GPUS[1:]
        ],
    )


def busy() -> str:
    """The share of time in which a GPU of a wavefront computes."""
    rows = [
        [str(layers), *(f"{100 * wavefront(layers, ranks):.0f} %" for ranks in GPUS[:7])] for layers in (12, 24, 48)
    ]
    return table(["layers", *(f"{ranks} GPUs" for ranks in GPUS[:7])], rows)


def stored() -> str:
    """What a GPU stores, by the way of training."""
    model, row = Model(), 65536
    ways = {
        "DDP, 8 GPUs": memory(model, row, 1, data=8, sharded=False),
        "FSDP2, 8 GPUs": memory(model, row, 1, data=8, sharded=True),
        "DDP, sequence over 8": memory(model, row, 1, sequence=8, sharded=False),
        "FSDP2, sequence over 8": memory(model, row, 1, sequence=8, sharded=True),
    }
    parts = list(next(iter(ways.values())))
    return table(["", *parts], [[name, *(amount(way[part]) for part in parts)] for name, way in ways.items()])


PAGES = {
    DOCS / "explanation" / "scaling.md": {"sent": sent, "crossover": crossovers, "wavefront": busy, "memory": stored}
}
