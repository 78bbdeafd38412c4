"""Known values of mechanisms: worked out by hand, or those of a simpler one at the ends of the options; and seeds."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import longspan
from longspan.attention.base import REGISTRY
from support.hand import plain, read
from support.mechanisms import Bare, fill
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


def never_forget(module):
    nn.init.zeros_(module.forget.weight)
    nn.init.constant_(module.forget.bias, 80.0)


def never_decay(module):
    nn.init.constant_(module.a_log, -math.inf)


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
    Limit("kernel", "softmax"),
    Limit("gaussian(kind='fixed')", "softmax", flat_bells),
    Limit("relative", "transformer_xl(memory=29)"),
    Limit("relative(clamp=4)", "transformer_xl(memory=29, clamp=4)"),
    # Without forgetting.
    Limit("forgetting(kv_heads=1)", "softmax(kv_heads=1)", never_forget),
    Limit("gated_deltanet(expand_v=1.0, gate=False)", "deltanet", never_decay),
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


S = 1 / (1 + math.exp(-1))  # silu(1): what every projected one becomes
E = math.exp
ROOT = math.sqrt(2)
KEYS = ((1, 0), (0, 1), (1, 0))


def silu(x):
    return x / (1 + E(-x))


def gates(*logits):
    """Silu of each, divided by their root mean square, as a gate and a norm leave them."""
    values = [silu(x) for x in logits]
    root = math.sqrt(sum(x * x for x in values) / len(values) + 1e-5)
    return tuple(x / root for x in values)


def mean(*pairs):
    """The mean of numbers (weight, number)."""
    return sum(weight * x for weight, x in pairs) / sum(weight for weight, _ in pairs)


def scaled(factor, *rows):
    return [tuple(factor * x for x in row) for row in rows]


def squash(a):
    u = math.log(a + 1e-6)
    return 2 ** (-u / (1 + abs(u)))


A = math.sqrt(math.log(2))
RIDGE = 0.25 + math.log(2)
OWN = E(4 / ROOT)
PATH = ((1 + 2 * OWN) / (2 + OWN), 1 / (2 + OWN))


class Hand(NamedTuple):
    """Outputs of one head for a few tokens; None stands for one that nobody worked out.

    Its projections change nothing. Without ``asking`` queries are 0, so that all keys tie. ``weights`` are set by name,
    ``__`` for a dot; ``bare`` is a norm that is left out.
    """

    spec: str
    tokens: tuple[Any, ...]
    expected: Any
    weights: Mapping[str, Any] = {}
    asking: bool = True
    bare: str = ""
    place: Mapping[str, Any] = {}
    within: float = 1e-9


def tie(spec, tokens, expected, weights={}, **place):  # noqa: B006
    return Hand(spec, tokens, expected, weights, asking=False, place=place)


FOUR, FIVE, BOTH = (1, 2, 4, 8), (1, 2, 4, 8, 16), {"causal": False}
ASKING = {"query__bias": 1.0}  # the query 1 for every token
UNIT = {"rate__weight": 0.0}  # beta = 1/2
HANDS = (
    # One slot is the mean of all tokens, the other weighs them by powers of two.
    Hand(
        "abc(slots=2)",
        (1, 2),
        [1, mean((1, 1.5), (E(2 * 5 / 3 - 2 * 1.5), 5 / 3))],
        {"control__weight": [[0.0], [math.log(2)]]},
    ),
    # The ramp after a span of one: distances 0 and 1 weigh 1, 2 weighs 1/2 and 3 nothing.
    tie("adaptive_span(span=4, ramp=2, initial=1.0)", FOUR, [1, 1.5, 6.5 / 2.5, 13 / 2.5]),
    # The slope of a single head is 2^-8.
    tie("alibi", (1, 2), [1, mean((E(-1 / 256), 1), (1, 2))]),
    # A layer of columns reads the mean of its column so far, the next one that of its row.
    tie("axial(width=2)", FIVE, [1, 2, 2.5, 5, 7], layer=0),
    tie("axial(width=2)", FIVE, [1, 1.5, 4, 6, 16], layer=1),
    # The block of two so far, and the first block.
    tie("bigbird(block=2, window=1, globals=1, random=0)", FIVE, [1, 1.5, 7 / 3, 15 / 4, 19 / 3]),
    # S_1 = [[s/2, 0], [0, 0]], S_2 = s/2 I; the first key returns and is replaced by half: s/2 + (s - s/2) / 2. A key's
    # length is sqrt(s^2 + 1e-6), here and below.
    Hand(
        "deltanet(convolution=0)", KEYS, scaled(S / ROOT, (0.5, 0), (0, 0.5), (0.75, 0)), UNIT, bare="norm", within=1e-5
    ),
    # beta = 1: a key has its last value.
    Hand("deltanet(convolution=0, negative=True)", KEYS, scaled(S / ROOT, *KEYS), UNIT, bare="norm", within=1e-5),
    # A norm of one channel is its bias, so the indexer's scores are equal and the first tokens win.
    tie("dsa(keys=2, index_heads=1, index_dim=1)", (4, 2, 8, 1), [4, 3, 3, 3]),
    # The global token, which is 10, a token and both its neighbors.
    tie("etc(globals=1, radius=1, clip=1)", FOUR, [13 / 3, 17 / 4, 6, 22 / 3], {"tokens": 10.0}, **BOTH),
    # One key is the largest so far.
    tie("exact_topk(keys=1)", (3, 1, 5, 2), [3, 3, 5, 5], ASKING),
    # Gates of 1/2, and of 1/4.
    tie("forgetting", (7, 4, 14), [7, 5, (7 / 4 + 4 / 2 + 14) / (7 / 4)], {"forget__weight": 0, "forget__bias": 0}),
    tie("forgetting", (7, 4), [7, (7 / 4 + 4) / (5 / 4)], {"forget__weight": 0, "forget__bias": -math.log(3)}),
    # A quarter turn per unit: the weights of the third token are -1, 0, 1. The denominator 0 becomes eps: 2 / 0.5.
    Hand("fourier(features=1, eps=0.5)", (0, 1, 2), [0, 1, 4], {"projection": math.pi / 2}),
    # beta = alpha = 1/2: of the first key s/8 is left, s/8 + (s - s/8) / 2.
    Hand(
        "gated_deltanet(convolution=0, gate=False, expand_v=1.0)",
        KEYS,
        scaled(S / ROOT, (0.5, 0), (0, 0.5), (9 / 16, 0)),
        UNIT | {"decay__weight": 0.0, "a_log": math.log(math.log(2)), "dt_bias": math.log(math.e - 1)},
        bare="norm",
        within=1e-5,
    ),
    # alpha = (1/2, 3/4). K_1 = V_1 = [[s/2, 0], [s/4, 0]], K_2 = V_2 = [[s/4, s/2], [3 s/16, s/4]]; both queries score
    # s^2/2 and s^2/4.
    Hand(
        "gsa(slots=2, temperature=1.0)",
        ((1, 0), (0, 1)),
        [
            gates(mean((E(S**2 / 4), S / 2), (1, S / 4)), 0.0),
            gates(mean((E(S**2 / 4), S / 4), (1, 3 * S / 16)), mean((E(S**2 / 4), S / 2), (1, S / 4))),
        ],
        {"decay__weight": [[0.0, 0.0], [math.log(3), math.log(3)]]},
    ),
    # The block of two so far, and the token before it.
    tie("image(block=2, memory=1)", FIVE, [1, 1.5, 3, 14 / 3, 12]),
    # The mean of the queries 0, ln 2 and 2 ln 2 weighs the keys 0, 1, 2 with 1/7, 2/7, 4/7. The best two have 6/7, that
    # each query shares out anew: 1 to 1, 1 to 2 and 1 to 4.
    Hand(
        "improved_clustered(clusters=1, topk=2)",
        (0, 1, 2),
        [9 / 7, 10 / 7, 54 / 35],
        {"query__weight": math.log(2)},
        place=BOTH,
    ),
    # Of two tokens one key is drawn and one query active, the first: the second reads the mean, not its softmax.
    tie("informer(factor=1)", (2, 4), [2, 3], ASKING),
    # alpha = (1/2, 1/4): the second key finds s/8 and the first one s/16.
    Hand(
        "kda(convolution=0)",
        ((1, 0), (0, 1), (0, 1), (1, 0)),
        scaled(S / ROOT, (0.5, 0), (0, 0.5), (0, 9 / 16), (17 / 32, 0)),
        UNIT | {"decay__1__weight": 0.0, "a_log": 0.0, "dt_bias": [[0.0, math.log(3)]]},
        bare="norm",
        within=1e-5,
    ),
    # log alpha = -2 sigmoid(0) = -1 in both channels.
    Hand(
        "kda(convolution=0, lower_bound=-2.0)",
        ((1, 0), (1, 0)),
        scaled(S / ROOT, (0.5, 0), (0.5 + 0.25 / math.e, 0)),
        UNIT | {"decay__1__weight": 0.0, "a_log": 0.0, "dt_bias": 0.0},
        bare="norm",
        within=1e-5,
    ),
    # s(2, 1) = (2 + 1)^2 and s(2, 2) = (4 + 1)^2; a bell at distance one.
    Hand("kernel(similarity='polynomial', degree=2, constant=1.0)", (1, 2), [1, (9 + 50) / 34]),
    Hand("kernel(similarity='rbf', bandwidth=1.0)", (1, 2), [1, mean((E(-0.5), 1), (1, 2))]),
    # phi is 1, 2 and 4, whatever the query; of relu 1, 0 and 2, where the second query reads 0 / eps = 0.
    Hand("linear(eps=0.0)", (0, 1, 3), [0, 2 / 3, 2]),
    Hand("linear(eps=0.0)", (0, 1, 3), [2, 2, 2], place=BOTH),
    Hand("linear(feature_map='relu')", (1, -3, 2), [1, 0, 5 / 3], within=1e-5),
    Hand("linear(feature_map='squared_relu')", (1, -3, 2), [1, 0, 9 / 5], within=1e-5),
    tie("local(window=2)", FOUR, [1, 1.5, 3, 6]),
    tie("local(window=2)", FOUR, [1.5, 7 / 3, 14 / 3, 6], **BOTH),
    Hand("local(window=1)", (3, -1), [3, -1]),
    # The mean of a token, the one before and the global one, which reads threefold.
    tie("longformer(window=1, globals=1)", FOUR, [3, 1.5, 7 / 3, 13 / 3], {"value_global__weight": 3.0}),
    # The mean of the last two and the mean of all are added.
    tie("lowrank_band(rank=1, window=2)", FOUR, [2, 3, 3 + 7 / 3, 6 + 15 / 4]),
    # The fourth of five sees the slots (0, 1) and (2, 3), the second and third only the first.
    tie("memory_compressed(stride=2, pool='mean')", (1, 3, 8, 12, 100), [0, 2, 2, 6, 6]),
    # gamma = beta = 1/2: G = H, which are diag(1/2, 0), diag(1/4, 1/2) and diag(5/8, 1/4).
    Hand(
        "mesa(convolution=0)",
        KEYS,
        [(0.5 / (0.5 + RIDGE), 0), (0, 0.5 / (0.5 + RIDGE)), (0.625 / (0.625 + RIDGE), 0)],
        UNIT | {"decay__weight": 0.0, "decay__bias": 0.0, "rate__bias": 0.0, "ridge": 0.0},
        bare="norm",
        within=1e-5,
    ),
    # Gates of 1/2. Token 3 reads the mean of both blocks, all tokens, and the last two; token 0 sees no whole block.
    tie("nsa(block=2, top=3, window=2)", (4, 8, 2, 6), [4, 9, (6 + 14 / 3 + 5) / 2, 7], {"gate__weight": 0.0}),
    # beta = 1: the second token removes nothing of the first key, the third all of it.
    Hand(
        "path(rank=0, convolution=0)",
        ((1, 0), (0, 1), (2, 0)),
        [(1, 0), (mean((1, 1), (E(1 / ROOT), 0)), mean((1, 0), (E(1 / ROOT), 1))), PATH],
        UNIT | {"direction__0__weight": [[1.0, 0.0], [0.0, 1.0]], "rate__bias": 0.0},
        within=1e-5,
    ),
    # y = 1, 2, 5.5, 10 are means of neighbors; slots hold 1.5 and 7.75; the last token is too far from the first.
    tie("poolingformer(window=1, far_window=2, kernel=2, stride=2)", (1, 3, 8, 12), [1, 3.5, 7, 17.75]),
    # (2 + 1)^2 and (4 + 1)^2; 1 + u + u^2 / 2 of u = 2 and 4.
    Hand("polynomial(eps=0.0)", (1, 2), [1, (9 + 50) / 34]),
    Hand("polynomial(taylor=True, eps=0.0)", (1, 2), [1, (5 + 26) / 18]),
    # All four gates are 1/2; A_1 = 1/2, A_2 = 3/4. The first write is M_1 s / 2, of which half is left.
    Hand(
        "preconditioned_deltanet(span=2.0, expand_v=1.0, convolution=0)",
        ((1, 0), (1, 0)),
        scaled(S / ROOT, (squash(0.5) / 2, 0), (squash(0.5) / 4 + squash(0.75) / 2 * (1 - squash(0.5) / 4), 0)),
        UNIT
        | {f"{part}__weight": 0.0 for part in ("weight", "decay", "fade")}
        | dict.fromkeys(("a_log", "fade_log", "dt_bias", "fade_bias", "center"), 0.0),
        bare="norm",
        within=1e-5,
    ),
    # Buckets right and left, chunks of one token: each token reads the one before in its bucket.
    Hand(
        "reformer(chunk=1, buckets=2, rounds=1)",
        ((1, 5), (-1, 6), (2, 7), (3, 8), (-4, 9)),
        [(1, 5), (-1, 6), (1, 5), (2, 7), (-1, 6)],
        {"rotations": [[[1.0]], [[0.0]]]},
    ),
    # v is 1: the score of a key d tokens back is W_r sin d, W_r = 1.
    tie(
        "relative",
        (1, 2, 4),
        [1, mean((E(math.sin(1)), 1), (1, 2)), mean((E(math.sin(2)), 1), (E(math.sin(1)), 2), (1, 4))],
        {"u": 0.0, "v": 1.0, "distance__weight": 1.0},
    ),
    # Two clusters, a window of two: a token reads the one before in its cluster, and the first reads itself.
    Hand(
        "routing(clusters=2, window=2)",
        ((2, 1), (5, 4), (1, 7), (9, 0), (0, 3)),
        [(2, 1), (2, 1), (1, 7), (5, 4), (1, 7)],
        {"sums": [[1.0, -1.0], [-3.0, 3.0]]},
    ),
    Hand("sinkhorn(block=1)", (1, 2), [1, mean((E(2), 1), (E(4), 2))]),
    # a^2 = log 2, so that the scores of the second token are -log 2 and log 2.
    Hand("softmax", (A, -A), [A, mean((0.5, A), (2, -A))]),
    Hand("softmax", (A, -A), [0.6 * A, -0.6 * A], place=BOTH),
    # Itself and every second token before; the last two and every second one before.
    tie("sparse(pattern='causal & strided(2)')", FIVE, [1, 2, 2.5, 5, 7]),
    tie("sparse_transformer(block=2, integration='merged')", FIVE, [1, 1.5, 7 / 3, 14 / 3, 29 / 4]),
    # The mean of both neighbors, itself as token and as input, and the mean of all, 10.
    *(
        tie(f"star(cycles=1, kind={kind!r})", (4, 8, 12, 16), expected, **BOTH)._replace(bare="rings.0.norm")
        for kind, expected in (("cyclic", [8.4, 8.4, 11.6, 11.6]), ("truncated", [6.5, 8.4, 11.6, 13.5]))
    ),
    # Every key takes half of what is left; a token does not see itself.
    tie("stick_breaking", (8, 4, 16, 1), [0, 4, 4 / 2 + 8 / 4, 16 / 2 + 4 / 4 + 8 / 8]),
)


@pytest.mark.whole
@pytest.mark.parametrize("case", [pytest.param(case, id=case.spec) for case in HANDS])
def test_outputs_are_those_worked_out_by_hand(case):
    dim = len(case.tokens[0]) if isinstance(case.tokens[0], tuple) else 1
    module = plain(case.spec, dim, asking=case.asking, **case.place)
    fill(module, **case.weights)
    if case.bare:
        module.set_submodule(case.bare, Bare())
    found = read(module, *(tuple(map(float, x)) if dim > 1 else float(x) for x in case.tokens))
    for token, (one, right) in enumerate(zip(found, case.expected, strict=True)):
        if right is not None:
            near = pytest.approx(right, rel=max(case.within, 1e-8), abs=case.within)
            assert (one.tolist() if dim > 1 else one) == near, f"token {token}"
