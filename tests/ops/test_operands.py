"""What enters the operations: signs that are still to be changed, memory given away, and what masked tokens hold."""

import pytest
import torch

import longspan
from longspan import backend, decay_attention, delta_rule, linear_attention, sparse_attention
from longspan.ops import linear, operands
from longspan.ops.native.call import available
from longspan.ops.softmax import dense
from longspan.testing.pairs import all_pairs
from ops.families import FAMILIES

B, H, D, E = 2, 3, 5, 4
NAN = float("nan")
BACKENDS = ("reference", "torch", *(["native"] if available() else []))


# Operations that have no row in families.py: what the laws state for those, these tests state for them.
OPERATIONS = {
    "linear, all keys": lambda **given: linear_attention(causal=False, **given),
    "linear, own map": lambda **given: linear_attention(feature_map=torch.exp, **given),
    "sparse": lambda **given: sparse_attention(pattern="band(3)", **given),
    "sparse, both ways": lambda **given: sparse_attention(pattern="band(3, 2) | globals(2)", **given),
}


def made(n: int, dtype=torch.float32) -> dict:
    generator = torch.Generator().manual_seed(n)
    shapes = {"query": D, "key": D, "value": E}
    return {name: torch.randn(B, H, n, d, generator=generator).to(dtype) for name, d in shapes.items()}


@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.float32), (7, torch.float16), (300, torch.bfloat16)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_negated_views_are_read_with_their_sign(name, tokens, dtype):
    call, given = OPERATIONS[name], made(tokens, dtype)
    expected = call(**given)
    for which in given:
        negated = given | {which: torch._neg_view(-given[which])}
        assert negated[which].is_neg()
        torch.testing.assert_close(call(**negated), expected, msg=lambda m, which=which: f"{which}: {m}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_sign_in_attention_under_a_mask(dtype):
    q, k, v = (torch.randn(B, H, 7, D).to(dtype) for _ in "qkv")
    mask = torch.rand(B, 1, 7, 7) > 0.3
    expected = dense.attend(q, k, v, mask=mask)
    found = dense.attend(*(torch._neg_view(-t) for t in (q, k, v)), mask=mask)
    torch.testing.assert_close(found, expected)


class TestDonation:
    def calls(self, state, tokens):
        """By name, calls that give ``state`` (1,1,D,D) away, which may be what they read too."""
        plain = {name: torch.rand(1, 1, tokens, D) for name in ("query", "key", "value")}
        rate = torch.rand(1, 1, tokens)
        for which in plain:
            given = plain | {which: state[:, :, :tokens]}
            yield which, lambda given=given: decay_attention(**given, log_decay=-rate, state=state, donate=True)
            yield which, lambda given=given: delta_rule(**given, beta=rate, state=state, donate=True)
            wide = torch.rand(1, 1, D, D + 1)
            part = wide.flatten()[: tokens * D].view(1, 1, tokens, D)
            given = plain | {which: part}
            yield which, lambda given=given, wide=wide: linear_attention(**given, state=wide, donate=True)
            given = plain | {which: wide[:, :, :tokens, :D]}
            yield which, lambda given=given, wide=wide: linear_attention(**given, state=wide, donate=True)
        yield "beta", lambda: delta_rule(**plain, beta=state[..., :tokens, 0], state=state, donate=True)
        yield "log_decay", lambda: decay_attention(**plain, log_decay=state[:, :, :tokens], state=state, donate=True)

    @pytest.mark.parametrize("tokens", [1, 3])
    @pytest.mark.parametrize("kind", BACKENDS)
    def test_what_is_read_may_not_be_given_away(self, kind, tokens):
        for which, call in self.calls(torch.rand(1, 1, D, D), tokens):
            with (
                backend(kind),
                pytest.raises(ValueError, match=f"overwrites the state, which shares memory with {which}"),
            ):
                call()

    def test_memory_that_torch_does_not_know_to_be_shared(self):
        numbers = torch.rand(D * D).numpy()
        state, x = (torch.from_numpy(numbers[i:]) for i in (0, D))
        state, x = state.view(1, 1, D, D), x[:D].view(1, 1, 1, D)
        with pytest.raises(ValueError, match="shares memory with query"):
            delta_rule(x, x, x, beta=torch.ones(1, 1, 1), state=state, donate=True)

    def test_rows_of_a_state_that_are_one(self):
        x, state = torch.rand(B, H, 1, D), torch.rand(1, H, D, D).expand(B, H, D, D)
        with pytest.raises(ValueError, match="overwrites the state, parts of which share memory"):
            decay_attention(x, x, x, log_decay=-x[..., 0], state=state, donate=True)

    def test_neighbors_and_nothing_are_fine(self):
        both = torch.rand(2 * D * D)
        state, x = both[: D * D].view(1, 1, D, D), both[D * D : D * D + D].view(1, 1, 1, D)
        kept = state.clone()
        found = delta_rule(x, x, x, beta=torch.ones(1, 1, 1), state=state, donate=True)
        torch.testing.assert_close(found, delta_rule(x, x, x, beta=torch.ones(1, 1, 1), state=kept))
        operands.check_donation(both, x=both[:0], y=None)

    def test_an_attention_may_not_be_given_what_it_reads(self):
        module = longspan.build("linear", 8, 2)
        state = module.init_state(1)
        with torch.no_grad(), pytest.raises(ValueError, match="overwrites the state, which shares memory with x"):
            module(state.sums.flatten()[:8].view(1, 1, 8), state, donate=True)


def masked(name, given, mask, content):
    """What an operation makes of operands that hold ``content`` at masked tokens: outputs, and gradients of a loss."""
    away = ~mask[:, None, :, None]
    held = {n: t.masked_fill(away if t.dim() == 4 else away[..., 0], content) for n, t in given.items()}
    if name == "linear, all keys":  # where a mask is one of keys
        held["query"] = given["query"]
    leaves = {n: t.requires_grad_() for n, t in held.items()}
    out = OPERATIONS[name](**leaves, mask=mask)
    real = out if name == "linear, all keys" else out[mask[:, None].expand(out.shape[:3])]
    return real, torch.autograd.grad(real.sin().sum(), leaves.values())


@pytest.mark.parametrize(("tokens", "content"), [(7, NAN), (300, NAN), (300, float("inf")), (7, 1e30)])
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_masked_token_does_not_exist_whatever_it_holds(name, kind, tokens, content):
    if kind == "native" and name.startswith("linear"):
        pytest.skip("the backend does not serve it")
    mask = torch.rand(B, tokens, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, :3], mask[1, -2:] = False, False
    with backend(kind):
        expected, right = masked(name, made(tokens), mask, 0.5)
        found, grads = masked(name, made(tokens), mask, content)
    torch.testing.assert_close(found, expected)
    for given, grad, wanted in zip(made(tokens), grads, right, strict=True):
        torch.testing.assert_close(grad, wanted, msg=lambda m, given=given: f"gradient of {given}: {m}")
        if not (name == "linear, all keys" and given == "query"):
            hidden = ~mask[:, None, :].expand(grad.shape[:3])
            assert not grad[hidden].any(), given


@pytest.mark.parametrize("name", ["sparse", "sparse, both ways"])
def test_a_masked_token_of_a_compiled_call(name):
    call, given, mask = OPERATIONS[name], made(7), torch.tensor([[True, False] * 3 + [True], [False] + [True] * 6])
    away = ~mask[:, None, :, None]
    held = {n: t.masked_fill(away, NAN) for n, t in given.items()}
    if name == "sparse":
        pattern = longspan.patterns.band(3)
    else:
        pattern = longspan.patterns.band(3, 2) | longspan.patterns.globals(2)
    compiled = torch.compile(
        lambda q, k, v: sparse_attention(q, k, v, pattern, mask=mask), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(*held.values()), call(**given, mask=mask))


@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_a_query_that_no_key_answers_reads_nothing(kind, tokens, causal):
    """Also without an eps: 0 / 0 at the masked tokens before the first real one was in everyone's gradients."""
    if kind == "native" and not causal:
        pytest.skip("the backend does not serve it")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, tokens, D, generator=generator).requires_grad_() for _ in "qkv")
    mask = torch.ones(B, tokens, dtype=torch.bool)
    mask[0, : tokens - 2 if tokens > 2 else tokens] = False
    state = torch.zeros(B, H, D, D + 1) if causal else None
    with backend(kind):
        out = linear_attention(q, k, v, eps=0.0, mask=mask, causal=causal, state=state)
        real = out if not causal else out[mask[:, None].expand(out.shape[:3])]
        grads = torch.autograd.grad(real.sin().sum(), (q, k, v))
    assert torch.isfinite(out).all()
    if causal:
        assert not out[0, :, : tokens - 2].any()
    wanted = linear_attention(q[1:], k[1:], v[1:], eps=0.0, causal=causal)
    torch.testing.assert_close(out[1:], wanted, atol=1e-5, rtol=1e-4)
    expected = torch.autograd.grad(wanted.sin().sum(), (q, k, v))
    for found, right in zip(grads, expected, strict=True):
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found[1:], right[1:], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_step_that_no_key_answers(kind):
    x, state = -torch.ones(1, 1, 1, D), torch.zeros(1, 1, D, D + 1)
    with backend(kind):
        out = linear_attention(x, x, x, feature_map="relu", eps=0.0, state=state)
        named = linear.named(x, x, x, causal=True, feature_map="relu", eps=0.0)[0]
    assert not out.any()
    assert not named.any()


@pytest.mark.parametrize("name", ["linear", "decay-head", "delta-channel", "sparse"])
def test_operands_on_two_devices(name):
    given = FAMILIES[name].operands(3) if name in FAMILIES else made(3)
    call = FAMILIES[name].call if name in FAMILIES else lambda given: OPERATIONS[name](**given)
    for which in [one for one in given if one not in ("query", "state")]:
        with pytest.raises(ValueError, match=f"query is on cpu and {which} on meta"):
            call(given | {which: given[which].to("meta")})


class Slopes:
    """A score that differs by head, with a separate head axis."""

    def __init__(self, heads: int):
        self.slopes = torch.arange(1.0, heads + 1)[:, None, None] / heads

    def score(self, q_tile, i, j):
        return -self.slopes * (i[:, None] - j[None]).abs()


class Asked(Slopes):
    """One that depends on the queries, of all heads."""

    def score(self, q_tile, i, j):
        return super().score(q_tile, i, j) * q_tile.mean(-1, keepdim=True).sigmoid()


@pytest.mark.parametrize(
    "row",
    all_pairs(
        pattern=("random(2)", "causal & by_head(band(3), dilated(2, 3))", "band(3)"),
        bias=("table", Slopes, Asked),
        mask=("none", "all", "some"),
    ),
    ids=lambda row: "-".join(getattr(value, "__name__", value) for value in row.values()),
)
def test_a_bias_for_each_head_under_a_pattern_for_each_head(row):
    pattern, bias, mask = row.values()
    n, generator = 43, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, 4, n, D, dtype=torch.float64, generator=generator).requires_grad_() for _ in "qkv")
    table = torch.randn(4, n, n, dtype=torch.float64, generator=generator).requires_grad_()
    real = torch.rand(B, n, generator=generator) > 0.3
    options = {
        "bias": table if bias == "table" else bias(4),
        "mask": {"none": None, "all": torch.ones_like(real), "some": real}[mask],
    }
    leaves = (q, k, v, table) if bias == "table" else (q, k, v)
    with backend("reference"):
        expected = sparse_attention(q, k, v, pattern, **options)
        right = torch.autograd.grad(expected.sin().sum(), leaves)
    with backend("torch"):
        found = sparse_attention(q, k, v, pattern, **options)
        grads = torch.autograd.grad(found.sin().sum(), leaves)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grads, right)


@pytest.mark.parametrize("bias", [torch.zeros(2, 7, 7), torch.zeros(3, 7, 7, dtype=torch.long)])
def test_a_bias_that_does_not_fit(bias):
    x = torch.zeros(1, 3, 7, 4)
    with pytest.raises(ValueError, match=r"bias .* H=3, N=7"):
        sparse_attention(x, x, x, "causal", bias=bias)


@pytest.mark.parametrize(
    "row",
    all_pairs(
        size=(-1e29, -4.9e29, -1e30, -3e30, -1e38, 1e30, 1e38),
        pattern=("causal", "band(3)", "band(40)", "band(3) | strided(16)", "blockwise(5, 1)"),
        kind=BACKENDS,
    ),
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_logits_of_any_size(row):
    """No logit is so low that its key is not seen: the softmax of a row does not depend on a constant."""
    size, pattern, kind = row.values()
    n, generator = 150, torch.Generator().manual_seed(0)
    k = torch.randn(1, 2, n, 4, generator=generator)
    q, v = torch.randn(1, 2, n, 4, generator=generator), torch.randn(1, 2, n, 3, generator=generator)
    # One channel sets the size. It differs by key, since sums of rows cannot distinguish equal keys.
    q[..., 0], k[..., 0] = size, 1 + torch.randperm(n, generator=generator) * 2.0**-20
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    with backend("reference"):
        expected = sparse_attention(*leaves, pattern, scale=1.0)
        right = torch.autograd.grad(expected.sum(), leaves[2])[0]
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    with backend(kind):
        found = sparse_attention(*leaves, pattern, scale=1.0)
        grad = torch.autograd.grad(found.sum(), leaves[2])[0]
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad.double(), right, atol=1e-4, rtol=1e-4)


CALLS = {
    "sparse": lambda q, v, g: sparse_attention(q, q, v, "causal"),
    "linear": lambda q, v, g: linear_attention(q, q, v),
    "linear, bidirectional": lambda q, v, g: linear_attention(q, q, v, causal=False),
    "decay": lambda q, v, g: decay_attention(q, q, v, log_decay=g, return_state=True)[0],
    "decay by channel": lambda q, v, g: decay_attention(q, q, v, log_decay=g[..., None].expand_as(q)),
    "delta": lambda q, v, g: delta_rule(q, q, v, beta=g.exp(), log_decay=g),
    "a packed decay": lambda q, v, g: decay_attention(
        q, q, v, log_decay=g, cu_seqlens=torch.tensor([0, 2, g.shape[2]])
    ),
}


@pytest.mark.parametrize("kind", ["auto", "reference", "torch"])
@pytest.mark.parametrize("name", CALLS)
def test_heads_of_no_channels(name, kind, n=5):
    """The product of no channels is 0: a softmax is a mean, and a sum of products reads nothing."""
    q, v, g = torch.zeros(1, 2, n, 0), torch.randn(1, 2, n, 4, requires_grad=True), -torch.ones(1, 2, n)
    with backend(kind):
        found = CALLS[name](q, v, g)
        found.sum().backward() if found.requires_grad else None
        assert CALLS[name](torch.randn(1, 2, n, 3), v[..., :0], g).shape == (1, 2, n, 0)
    means = v.cumsum(2) / torch.arange(1, n + 1)[:, None]
    torch.testing.assert_close(found, means if name == "sparse" else torch.zeros_like(v))


@pytest.mark.parametrize("kind", ["auto", "reference", "torch"])
def test_no_heads(kind):
    q, g = torch.zeros(1, 0, 5, 4), torch.zeros(1, 0, 5)
    with backend(kind):
        for name, call in CALLS.items():
            if name != "sparse":
                assert call(q, q, g).shape == q.shape
        with pytest.raises(ValueError, match="do not fit"):
            decay_attention(q, q, torch.zeros(1, 2, 5, 4), log_decay=torch.zeros(1, 2, 5))


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_query_that_sees_nothing_reads_nothing_whatever_there_is(kind):
    x = torch.full((1, 2, 5, 4), NAN)
    with backend(kind):
        assert torch.equal(sparse_attention(x, x, x, "causal - causal"), torch.zeros_like(x))
