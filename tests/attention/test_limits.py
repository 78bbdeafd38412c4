"""At the ends of their options mechanisms are simpler ones with the same weights, and random numbers are seeded."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import longspan
from longspan.attention.base import REGISTRY
from support.tensors import data, same

N, DIM, HEADS = 29, 6, 2
MASK = torch.tensor([[True] * 29, [False] * 4 + [True] * 9 + [False] * 11 + [True] * 5])
SEGMENTS = torch.tensor([[0] * 13 + [1] * 16, [0] * 3 + [1] * 20 + [2] * 6])
LAYOUTS: dict[str, dict[str, torch.Tensor]] = {
    "plain": {},
    "padded": {"mask": MASK},
    "packed": {"segments": SEGMENTS},
    "across": {"context": data(2, 11, DIM, seed=3), "context_mask": MASK[:, -11:]},
}


class Limit(NamedTuple):
    """A spec with which a mechanism equals another spec, maybe with some of its weights set."""

    spec: str
    other: str
    set: Callable[[Any], Any] = lambda module: None
    place: Mapping[str, Any] = {}
    layouts: tuple[str, ...] = tuple(LAYOUTS)


def identical_slots(module):
    for name in ("key_slots", "value_slots"):
        if hasattr(module, name):
            getattr(module, name).data.copy_(torch.eye(N))


def identical_kernels(module):
    nn.init.eye_(module.compress_key.weight)
    nn.init.eye_(module.compress_value.weight)


def mix(scores, weights):
    """Heads mixed by two matrices."""

    def change(module):
        module.mix_scores.data.copy_(scores)
        module.mix_weights.data.copy_(weights)

    return change


def flat_bells(module):
    """With the same offset for all keys."""
    nn.init.zeros_(module.w)
    nn.init.constant_(module.b, -0.7)


SWAP = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
LIMITS = (
    # As many keys, clusters, nodes or active queries as tokens.
    Limit("informer(factor=29)", "softmax"),
    Limit("informer(factor=29, published=True)", "softmax", place={"causal": True}),
    Limit("exact_topk(keys=29)", "softmax"),
    Limit("exact_topk(keys=30)", "softmax"),
    Limit("dsa(keys=29)", "softmax", place={"causal": True}),
    Limit("moba(block=5, top=6)", "softmax", place={"causal": True}),
    Limit("moba(block=29, top=1, kv_heads=1)", "softmax(kv_heads=1)"),
    Limit("moba(block=4, top=1)", "sparse(pattern='block(4)')"),
    Limit("bp(k=29)", "softmax", lambda module: nn.init.zeros_(module.edges)),
    Limit("clustered(clusters=29)", "softmax"),
    Limit("clustered(clusters=100)", "softmax"),
    Limit("improved_clustered(clusters=29)", "softmax"),
    Limit("improved_clustered(clusters=1, topk=29)", "softmax"),
    Limit("improved_clustered(clusters=4, topk=64)", "softmax"),
    Limit("improved_clustered(clusters=11, topk=29)", "softmax"),
    # The weight of one key is that of its cluster.
    Limit("improved_clustered(clusters=4, topk=1)", "clustered(clusters=4)"),
    # Spans, blocks and lines that hold everything, one token, or a band.
    Limit("adaptive_span(span=29, ramp=3, initial=29.0)", "softmax"),
    *(Limit(f"adaptive_span(span=4, ramp=1, initial={z}.0)", f"sparse(pattern='band({z})')") for z in (0, 1, 4)),
    Limit("axial(width=1)", "softmax", place={"causal": True}),
    Limit("axial(width=41)", "softmax", place={"causal": True, "layer": 1}),
    Limit("axial(width=1, kind='cross')", "softmax", place={"causal": True}),
    Limit("axial(width=29, kind='shifted')", "softmax", place={"causal": True}),
    Limit("bigbird(block=5, window=17, globals=8, random=8)", "softmax", place={"causal": True}),
    Limit("bigbird(block=5, window=1, globals=0, random=8)", "softmax", place={"causal": True}),
    Limit("image(block=29, memory=0)", "softmax"),
    Limit("image(kind='2d', block=(6, 12), memory=(0, 0), width=12)", "softmax"),
    Limit("image(block=1, memory=4)", "sparse(pattern='band(4)')"),
    Limit("sparse_transformer(block=41, integration='interleaved')", "softmax", place={"causal": True}),
    Limit("sparse_transformer(block=41, integration='merged')", "softmax", place={"causal": True, "heads": 1}),
    Limit("sparse_transformer(block=41, integration='per_head')", "softmax", place={"causal": True, "heads": 1}),
    Limit("sparse_transformer(block=1, integration='merged')", "softmax", place={"causal": True}),
    # Slots of one token.
    Limit("memory_compressed(stride=1)", "softmax", identical_kernels),
    Limit("memory_compressed(stride=1, pool='mean')", "softmax"),
    *(
        Limit(
            f"compressive(memory={memory}, compressed={more}, rate=1, pool='{pool}', stop_gradient=False)",
            f"transformer_xl(memory={memory + more}, stop_gradient=False)",
        )
        for memory, more, pool in ((4, 3, "mean"), (1, 5, "max"), (3, 40, "mean"))
    ),
    # A shorter sequence leaves slots of nothing, whose scores are 0: it sees no softmax then.
    *(
        Limit(f"linformer(length=29, slots=29, share='{share}')", "softmax", identical_slots, layouts=("plain",))
        for share in ("none", "headwise", "key-value")
    ),
    # Scores without what distance adds, and with it for any number of tokens.
    Limit("gaussian(kind='fixed')", "softmax", flat_bells),
    Limit("relative", "transformer_xl(memory=29)"),
    Limit("relative(clamp=4)", "transformer_xl(memory=29, clamp=4)"),
    # Mixtures of heads that undo each other.
    Limit("talking_heads", "softmax", mix(torch.eye(2), torch.eye(2))),
    Limit("talking_heads", "softmax", mix(SWAP, SWAP)),
)


def directions(limit):
    both = [set(REGISTRY[spec.split("(")[0]].directions) for spec in (limit.spec, limit.other)]
    if "causal" in limit.place or both[0] & both[1] == {"causal"}:
        return [True]
    return [causal for causal, name in ((True, "causal"), (False, "bidirectional")) if name in both[0] & both[1]]


@pytest.mark.parametrize(
    ("limit", "causal"),
    [
        pytest.param(limit, causal, id=f"{limit.spec} is {limit.other}{'' if causal else ', bidirectional'}")
        for limit in LIMITS
        for causal in directions(limit)
    ],
)
def test_a_mechanism_at_the_end_of_its_options_is_another(limit, causal):
    place = {"heads": HEADS} | limit.place | {"causal": causal}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, other = (longspan.build(spec, DIM, **place).double() for spec in (limit.spec, limit.other))
    for name in ("u", "v"):
        if hasattr(module, name):
            nn.init.normal_(getattr(module, name))
    limit.set(module)
    names = other.state_dict().keys()
    other.load_state_dict({name: t for name, t in module.state_dict().items() if name in names})
    for layout in limit.layouts:
        given, x = LAYOUTS[layout], data(2, N, DIM).requires_grad_()
        if not set(given) <= module.supported_args & other.supported_args:
            continue
        real = given.get("mask", torch.ones_like(MASK))
        same(module(x, **given)[0][real], other(x, **given)[0][real], [x])


# The buffers of a mechanism that are drawn.
DRAWN = {
    "clustered": "planes",
    "fourier": "projection",
    "performer": "projection",
    "reformer": "rotations",
    "rfa": "projection",
}


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_depend_on_the_seed_and_the_layer_alone_and_are_saved(name):
    def drawn(spec, **place):
        module = longspan.build(spec, 32, HEADS, causal=name != "clustered", **place)
        return module, module.get_buffer(DRAWN[name])

    module, numbers = drawn(name, layer=1, depth=3)
    torch.manual_seed(9)
    assert drawn(name, layer=1, depth=3)[1].equal(numbers)
    others = [drawn(name, layer=2, depth=3)]
    others += [drawn(f"{name}(seed=1)", layer=1, depth=3)] if name != "clustered" else []
    for other, theirs in others:
        assert not theirs.equal(numbers)
        other.load_state_dict(module.state_dict())
        assert other.get_buffer(DRAWN[name]).equal(numbers)
    if len(numbers) == HEADS:
        assert not numbers[0].equal(numbers[1])
