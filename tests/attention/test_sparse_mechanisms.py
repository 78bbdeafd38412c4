"""Published sparse attentions equal the sets of keys in their papers, and keep what those promise."""

from typing import Any

import pytest
import torch

import longspan
from longspan import patterns
from longspan.states.cache import KeyValues

N = 37


def data(n=N, dim=6, batch=2, seed=0):
    return torch.randn(batch, n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def build(spec, heads=2, dim=6, **place) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return longspan.build(spec, dim, heads, **place).double().eval()


def heads_of(module, x, *parts):
    return (getattr(module, part)(x).unflatten(-1, (module.heads, -1)).transpose(1, 2) for part in parts)


def softmax(allowed, q, k, v):
    weights = (q @ k.mT * q.shape[-1] ** -0.5).exp() * allowed
    # A query that sees nothing reads 0.
    return weights / weights.sum(-1, keepdim=True).where(allowed.any(-1, keepdim=True), 1.0) @ v


def dense(module, x, allowed):
    """The definition, under a mask (N,N) or (H,N,N)."""
    o = softmax(allowed, *heads_of(module, x, "query", "key", "value"))
    return module.out(o.transpose(1, 2).flatten(-2))


def agree(module, x, allowed):
    """In outputs and in the gradients of all weights."""
    found, expected = module(x)[0], dense(module, x, allowed)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    upstream, wanted = data(x.shape[1], x.shape[2], seed=9), list(module.parameters())
    for a, b in zip(*(torch.autograd.grad(y, wanted, upstream) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def pairs(n, rule):
    return torch.tensor([[rule(i, j) for j in range(n)] for i in range(n)])


def product(a, b):
    """Who reaches whom in two steps, of which a is the later layer's."""
    return (a.double() @ b.double()) > 0


def past(n=N):
    return torch.ones(n, n, dtype=torch.bool).tril()


def steps(kind, size, c, n=N):
    near = {"strided": lambda i, j: i - j < size, "fixed": lambda i, j: j // size == i // size}[kind]
    far = {"strided": lambda i, j: (i - j) % size == 0, "fixed": lambda i, j: j % size >= size - c}[kind]
    return pairs(n, near) & past(n), pairs(n, far) & past(n)


class TestSparseTransformer:
    options = (("strided", "block=5"), ("fixed", "block=5, summary=2"))

    @pytest.mark.parametrize(("kind", "sizes"), options)
    def test_it_equals_the_papers_sets(self, kind, sizes):
        near, far = steps(kind, 5, 2)
        spec = f"sparse_transformer(kind={kind!r}, {sizes}, integration=%r)"
        agree(build(spec % "merged"), data(), near | far)
        for layer, expected in enumerate((near, far, near)):
            agree(build(spec % "interleaved", layer=layer), data(), expected)
        agree(build(spec % "per_head"), data(), torch.stack([near, far]))

    def test_two_layers_of_strided_steps_reach_the_whole_past(self):
        near, far = (build("sparse_transformer(block=5, integration='interleaved')", layer=i).sees for i in (0, 1))
        assert product(far.dense(N)[0], near.dense(N)[0]).equal(past())

    def test_two_fixed_steps_need_both_sets_in_each(self):
        spec = "sparse_transformer(kind='fixed', block=5, summary=1, integration=%r)"
        near, far = (build(spec % "interleaved", layer=i).sees.dense(N)[0] for i in (0, 1))
        both = build(spec % "merged").sees.dense(N)[0]
        assert not product(far, near).equal(past())
        assert product(both, both).equal(past())

    @pytest.mark.parametrize("integration", ["merged", "per_head", "interleaved"])
    def test_a_block_that_covers_all_is_causal_softmax(self, integration):
        """A1 is then the whole past, and of one head, it is all that there is."""
        agree(build(f"sparse_transformer(block=41, integration={integration!r})", heads=1), data(), past())

    def test_with_one_set_for_all_heads_the_integrations_coincide(self):
        """Of a stride of 1, merged sees the whole past, as does the head of A2; A1 is the token alone."""
        agree(build("sparse_transformer(block=1, integration='merged')"), data(), past())
        agree(build("sparse_transformer(block=1)"), data(), torch.stack([torch.eye(N).bool(), past()]))
        one, near = (
            build("sparse_transformer(block=5)", heads=1),
            "sparse_transformer(block=5, integration='interleaved')",
        )
        assert one.sees.dense(N).equal(build(near, heads=1).sees.dense(N))

    def test_every_summary_head_has_a_sub_block_of_its_own(self):
        sees = build("sparse_transformer(kind='fixed', block=7, summary=2)", heads=8, dim=8).sees.dense(N, heads=8)
        parts = ((5, 6), (3, 4), (1, 2), (5, 6))
        for head, part in enumerate(parts):
            assert sees[2 * head].equal(steps("fixed", 7, 2)[0])
            assert sees[2 * head + 1].equal(pairs(N, lambda i, j, part=part: j % 7 in part) & past())

    def test_without_direction_both_sides_are_seen(self):
        sees = build("sparse_transformer(block=5, integration='merged')", causal=False).sees.dense(N)[0]
        assert sees.equal(pairs(N, lambda i, j: abs(i - j) < 5 or (i - j) % 5 == 0))

    def test_layers_of_near_keys_keep_a_ring(self):
        for kind, sizes in self.options:
            spec = f"sparse_transformer(kind={kind!r}, {sizes}, integration='interleaved')"
            assert build(spec).init_state(2).keys.shape[2] == 5
            assert isinstance(build(spec, layer=1).init_state(2), KeyValues)

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("sparse_transformer(kind='free')", "unknown kind of sparse transformer 'free'; known: fixed, strided"),
            (
                "sparse_transformer(integration='sum')",
                "unknown integration 'sum'; known: interleaved, merged, per_head",
            ),
            ("sparse_transformer(summary=3)", "summary belongs to kind='fixed', not 'strided'"),
            (
                "sparse_transformer(kind='fixed', block=3, summary=4)",
                "summary=4 keys cannot be taken from a block of 3",
            ),
            ("sparse_transformer(block=0)", "must be a whole number of at least"),
            ("sparse_transformer(kind='fixed', block=3, summary=0)", "summary=0 must be a whole number of at least 1"),
        ],
    )
    def test_bad_options_are_refused(self, spec, message):
        with pytest.raises(ValueError, match=message):
            build(spec)


def bigbird_set(n, b, side, g, drawn, causal):
    """Block by block, as the paper has it: the window, global rows and columns, and what was drawn."""
    seen = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        for j in range(n):
            u, v = i // b, j // b
            seen[i, j] = abs(u - v) <= side or u < g or v < g or v in drawn[u]
    return seen & past(n) if causal else seen


class TestBigBird:
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize(("g", "r"), [(0, 0), (1, 0), (0, 2), (2, 1)])
    @pytest.mark.parametrize("n", [13, 53])  # below and above (5 + 2 r) b, where others fall back on full attention
    def test_it_equals_the_union_of_sets(self, causal, g, r, n):
        module = build(f"bigbird(block=5, globals={g}, random={r}, seed=3)", causal=causal, layer=2)
        units = torch.arange(-(-n // 5))
        atom = patterns.random(max(r, 1), 3, 5)
        drawn = [atom.draws(units, head, 2).tolist() if r else [()] * len(units) for head in range(2)]
        agree(module, data(n), torch.stack([bigbird_set(n, 5, 1, g, d, causal) for d in drawn]))

    def test_a_block_counts_once(self):
        """A window, global blocks and random blocks that all hold the whole past: still plain softmax."""
        agree(build("bigbird(block=5, window=17, globals=8, random=8)"), data(), past())

    def test_so_many_random_blocks_see_all(self):
        agree(build("bigbird(block=5, window=1, globals=0, random=8)"), data(), past())

    def test_without_globals_and_random_blocks_it_keeps_a_ring(self):
        assert build("bigbird(block=5, globals=0, random=0)").init_state(1).keys.shape[2] == 10
        assert isinstance(build("bigbird(block=5, random=0)").init_state(1), KeyValues)

    @pytest.mark.parametrize("law", ["causal", "parallel_is_recurrent", "padding", "packed", "attention_matrix"])
    def test_all_parts_together_keep_the_laws(self, law):
        """Blocks of the battery's example are larger: a long sequence lists small ones at random slowly."""
        row = longspan.checks.check(law, "bigbird(block=4, globals=1, random=1)")
        assert row.status == "passed", row.note

    def test_random_blocks_depend_on_seed_layer_and_head_alone(self):
        spec, x = "bigbird(block=2, window=1, globals=0, random=1, seed=%d)", data()
        y = build(spec % 0)(x)[0]
        torch.manual_seed(99)
        assert build(spec % 0)(x)[0].equal(y)
        places = ((0, 0), (1, 0), (0, 1))
        tables = [build(spec % seed, layer=at).sees.dense(N, heads=2, layer=at) for seed, at in places]
        assert not tables[0][0].equal(tables[0][1])
        assert not tables[0].equal(tables[1])
        assert not tables[0].equal(tables[2])
        assert not build(spec % 0, layer=1)(x)[0].equal(y)

    @pytest.mark.parametrize(("size", "side", "tile"), [(5, 1, 4), (3, 2, 8), (7, 0, 7), (2, 3, 32)])
    def test_blocks_around_list_the_tiles_that_they_need(self, size, side, tile):
        pattern = patterns.blockwise(size, side)
        assert patterns.parse(repr(pattern)) == pattern
        expected = pairs(53, lambda i, j: abs(i // size - j // size) <= side)
        assert pattern.dense(53)[0].equal(expected)
        assert pattern.lookback == pattern.lookahead == int((expected.nonzero().diff(dim=1)).max())
        listed = pattern.blocks(53, tile)
        for row, keys in enumerate(listed.index.tolist()):
            wanted = expected[row * tile : row * tile + tile].any(0).nonzero()[:, 0] // tile
            assert sorted(set(wanted.tolist())) == [key for key in keys if key >= 0]

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("bigbird(window=2)", "window=2 blocks have the query's own in their middle, so window must be odd"),
            ("bigbird(window=-1)", "window=-1 blocks have"),
            ("bigbird(globals=-1)", "globals=-1 and random=3 are numbers of blocks and must not be negative"),
            ("bigbird(block=0)", "block=0 must be a whole number of at least 1"),
        ],
    )
    def test_bad_options_are_refused(self, spec, message):
        with pytest.raises(ValueError, match=message):
            build(spec)
        with pytest.raises(ValueError, match=message):
            build(spec, causal=False)


@pytest.mark.parametrize("law", ["causal", "parallel_is_recurrent", "padding", "bidirectional"])
def test_layers_that_take_turns_keep_the_laws(law):
    """The examples of the battery are built as first layers."""
    stack = "sparse_transformer(block=7, integration='interleaved'); axial(width=7)"
    row = longspan.checks.check(law, stack + "; sparse_transformer(block=7, integration='interleaved'); axial(width=7)")
    assert row.status == "passed", row.note


@pytest.mark.parametrize("masked", [False, True])
def test_packed_rows_do_not_meet_when_compiled_either(masked):
    module, x = build("local(window=5)"), data()
    given = {"segments": torch.tensor([[0] * 11 + [1] * 26, [0] * 37])}
    given |= {"mask": torch.arange(N) % 5 > 0 * torch.ones(2, 1)} if masked else {}
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: module(x, **given)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x, **given)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "spec", ["local(window=5)", "sparse(pattern='causal & (band(3) | strided(4))')", "bigbird(block=4)"]
)
@pytest.mark.parametrize("used", [0, 1])
def test_a_fresh_row_beside_a_used_one(spec, used):
    """A prompt is read as from nothing only where no row has come further."""
    module, x = build(spec).double(), data(20)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[used] = True
    with torch.no_grad():
        _, state = module(x[:, :7], module.init_state(2), mask=mask)
        found, _ = module(x[:, 7:], state)
        for row in range(2):
            own = x[row : row + 1, 0 if row == used else 7 :]
            torch.testing.assert_close(found[row], module(own)[0][0, -13:])
