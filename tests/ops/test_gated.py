"""Decay and the delta rule: chunks and steps equal the loop, and the loop equals a separate dense form."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import longspan
from longspan.ops import gated
from longspan.ops.gated import chunks, definition
from longspan.ops.gated.operands import Recurrence
from longspan.ops.segments import cut

KINDS = ("none", "head", "channel")


def arguments(n, *, decay="head", delta=True, repeats=1, dtype=torch.float64, seed=0, strength=1.0, sizes=(5, 3)):
    """Operands of a call with 2 rows, 2 key heads and ``repeats`` value heads for each."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(dtype)

    (d, e), heads = sizes, 2 * repeats
    shapes = {"none": None, "head": (heads, n), "channel": (heads, n, d)}
    log_decay = None if shapes[decay] is None else -strength * random(*shapes[decay]).abs()
    return {
        "q": random(2, n, d),
        "k": F.normalize(random(2, n, d), dim=-1),
        "v": random(heads, n, e),
        "log_decay": log_decay,
        "beta": random(heads, n).sigmoid() if delta else None,
        "state": random(heads, d, e).to(torch.promote_types(dtype, torch.float32)),
    }


def of(form, **options):
    """A form as a function of operands by name."""
    return lambda **given: form(Recurrence(**given), **options)


def outcome(function, given, **options):
    """Outputs, the state and the gradients of all inputs from random ones of both."""
    inputs = {name: None if t is None else t.clone().requires_grad_() for name, t in given.items()}
    outputs = function(**inputs, **options)
    generator = torch.Generator().manual_seed(9)
    upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [t for t in inputs.values() if t is not None], upstream)]


def assert_close(found, expected, tolerance=1e-12):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).abs().max() <= tolerance * b.abs().max().clamp(min=1)


def dense(q, k, v, *, log_decay, beta, scale, state):
    """Every output as a sum over all tokens before it, from explicit products of D by D transition matrices."""
    (batch, heads, n, e), d = v.shape, q.shape[-1]
    q, k = (t.repeat_interleave(heads // k.shape[1], 1) for t in (q, k))
    eye = torch.eye(d, dtype=v.dtype)
    decay = torch.zeros(batch, heads, n, d, dtype=v.dtype) if log_decay is None else log_decay
    decay = decay[..., None].expand(-1, -1, -1, d) if decay.dim() == 3 else decay
    erase = torch.zeros(batch, heads, n, dtype=v.dtype) if beta is None else beta
    moves = (eye - erase[..., None, None] * k[..., :, None] * k[..., None, :]) @ torch.diag_embed(decay.exp())
    writes = v if beta is None else beta[..., None] * v
    out = []
    for t in range(n):
        read, o = q[:, :, t, None, :] * scale, torch.zeros(batch, heads, 1, e, dtype=v.dtype)
        for s in range(t, -1, -1):
            o = o + (read @ k[:, :, s, :, None]) * writes[:, :, s, None, :]
            read = read @ moves[:, :, s]
        out.append(o + read @ state)
    return torch.cat(out, 2)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", KINDS)
def test_the_loop_is_the_dense_form(decay, delta):
    given = arguments(11, decay=decay, delta=delta, repeats=2)
    o, _ = definition.attend(Recurrence(**given, scale=0.7))
    assert_close([o], [dense(**given, scale=0.7)])


@pytest.mark.parametrize(
    ("decay", "delta", "masked", "packed", "repeats"),
    list(itertools.product(KINDS, (False, True), (False, True), (False, True), (1, 2))),
)
def test_chunks_are_the_loop(decay, delta, masked, packed, repeats):
    for n in (2, 29, 139):
        generator = torch.Generator().manual_seed(n)
        mask = torch.rand(2, n, generator=generator) < 0.7 if masked else None
        segments = torch.randint(0, 2, (2, n), generator=generator).cumsum(1) // 7 if packed else None
        options = {"scale": 0.7, "mask": mask, "segments": segments}
        given = arguments(n, decay=decay, delta=delta, repeats=repeats)
        assert_close(
            outcome(of(chunks.chunked, chunk=8), given, **options), outcome(of(definition.attend), given, **options)
        )


@pytest.mark.parametrize("decay", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_states_of_more_chunks_than_one_product_holds(decay, packed, monkeypatch):
    """As on a GPU, where a span is the whole sequence."""
    monkeypatch.setattr(chunks, "GROUP", 3)
    monkeypatch.setattr(chunks.Chunked, "places", property(lambda r: cut(r.q.shape[2], r.chunk, r.q.shape[2])))
    segments = (torch.arange(67) // 13)[None].expand(2, -1) if packed else None
    given, options = arguments(67, decay=decay, delta=False), {"scale": 0.7, "mask": None, "segments": segments}
    expected = outcome(of(definition.attend), given, **options)
    assert_close(outcome(of(chunks.attend), given, **options), expected)


@pytest.mark.parametrize("decay", KINDS)
def test_any_chunk_gives_one_answer(decay):
    given, options = arguments(67, decay=decay), {"scale": 0.7, "mask": None, "segments": None}
    expected = outcome(of(definition.attend), given, **options)
    for chunk in (1, 2, 16, 128):
        assert_close(outcome(of(chunks.chunked, chunk=chunk), given, **options), expected)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("spans", [1, 3])
def test_spans_give_one_answer(monkeypatch, spans, packed, decay, delta):
    monkeypatch.setattr(chunks, "SPAN", spans * 16 * 4)
    # Of the packed sequences some begin where spans do.
    segments = torch.arange(139).div(48, rounding_mode="floor").expand(2, -1) if packed else None
    given, options = arguments(139, decay=decay, delta=delta), {"scale": 0.7, "mask": None, "segments": segments}
    expected = outcome(of(definition.attend), given, **options)
    assert_close(outcome(of(chunks.chunked, chunk=16), given, **options), expected)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_strong_decay_keeps_the_digits_of_what_remains(decay, delta, dtype):
    """Decays of 0, -1, -50, -1e4 and -inf in one chunk: sums of them must not swallow the small ones."""
    given = arguments(139, decay=decay, delta=delta, dtype=dtype)
    shape = given["log_decay"].shape
    strength = torch.tensor([0.0, 1.0, 1.0, 50.0, 1e4, torch.inf], dtype=dtype)
    picked = strength[torch.randint(6, shape, generator=torch.Generator().manual_seed(1))]
    given["log_decay"] = torch.where(picked.isinf(), -picked, given["log_decay"] * picked)
    options = {"scale": 0.7, "mask": None, "segments": None}
    wide = {name: None if t is None else t.double() for name, t in given.items()}
    expected = outcome(of(definition.attend), wide, **options)
    found = outcome(of(chunks.attend), given, **options)
    assert all(t.isfinite().all() for t in found)
    assert_close(found, expected, 1e-11 if dtype is torch.float64 else 3e-6)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", KINDS)
def test_a_step_is_the_loop(decay, delta):
    for repeats, masked in itertools.product((1, 2), (False, True)):
        given = arguments(1, decay=decay, delta=delta, repeats=repeats)
        mask = torch.tensor([[True], [False]]) if masked else None
        expected = outcome(of(definition.attend), given, scale=0.7, mask=mask, segments=None)
        assert_close(outcome(gated.recur, given, scale=0.7, mask=mask), expected)
        with torch.no_grad():
            own = given | {"state": given["state"].clone()}
            found = gated.recur(**own, scale=0.7, mask=mask, donate=True)
        assert_close(found, expected[:2])


@pytest.mark.parametrize(("decay", "delta"), [("channel", True), ("head", False)])
def test_derivatives_and_their_derivatives_are_exact(decay, delta):
    given = arguments(5, decay=decay, delta=delta, repeats=2, sizes=(2, 2))
    names = [name for name, t in given.items() if t is not None]

    def call(*tensors):
        tensors = dict.fromkeys(given) | dict(zip(names, tensors, strict=True))
        return chunks.chunked(Recurrence(**tensors, scale=0.7), chunk=2)

    inputs = [given[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", KINDS)
def test_gradients_that_can_be_differentiated_are_the_gradients(decay, delta):
    """They come from other code, with which second derivatives would agree even if it were wrong."""
    given = arguments(29, decay=decay, delta=delta, repeats=2)
    inputs = [t.requires_grad_() for t in given.values() if t is not None]
    o, end = chunks.chunked(Recurrence(**given, scale=0.7), chunk=8)
    loss = o.sin().sum() + end.square().sum()
    plain = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert_close(torch.autograd.grad(loss, inputs, create_graph=True), plain)


@pytest.mark.parametrize("donate", [False, True])
def test_the_state_after_no_tokens_is_a_tensor_of_its_own(donate):
    given = arguments(0)
    _, after = gated.recur(**given, donate=donate)
    torch.testing.assert_close(after, given["state"], atol=0, rtol=0)
    assert after.data_ptr() != given["state"].data_ptr()


def test_second_derivatives_survive_a_strong_decay():
    """Above the diagonal e^(G_i - G_j) would be infinite, and 0 times it is NaN in a derivative."""
    given = arguments(29, decay="head", strength=500.0)
    inputs = [t.requires_grad_() for t in given.values()]
    o, _ = chunks.attend(Recurrence(**given, scale=0.7))
    first = torch.autograd.grad(o.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(t.square().sum() for t in first), inputs)
    assert all(t.isfinite().all() for t in (*first, *second))


def test_the_backward_pass_keeps_the_inputs_and_a_state_per_span(monkeypatch):
    monkeypatch.setattr(chunks, "SPAN", 64 * 4)
    given, kept = arguments(257, decay="channel"), []
    inputs = {name: t.requires_grad_() for name, t in given.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        chunks.attend(Recurrence(**inputs, scale=0.7))
    ours = {t.data_ptr() for t in given.values()}
    (starts,) = (t for t in kept if t.data_ptr() not in ours)
    assert starts.shape == (4, *given["state"].shape)


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("delta", [False, True])
def test_masked_tokens_are_not_read(decay, delta):
    """Not even where they are not finite; and their gradients are zero."""
    given = arguments(29, decay=decay, delta=delta)
    mask = torch.rand(2, 29, generator=torch.Generator().manual_seed(2)) < 0.6
    clean = outcome(of(chunks.attend), given, scale=0.7, mask=mask, segments=None)
    hidden = ~mask[:, None, :]
    for name in ("q", "k", "v", "log_decay", "beta") if delta else ("q", "k", "v", "log_decay"):
        t = given[name]
        given[name] = t.masked_fill(hidden if t.dim() == 3 else hidden[..., None], torch.nan)
    found = outcome(of(chunks.attend), given, scale=0.7, mask=mask, segments=None)
    assert_close(found, clean)
    assert not found[0].masked_select(hidden[..., None]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("form", [chunks.attend, definition.attend])
def test_what_is_forgotten_is_gone(form, decay, dtype):
    """A log decay of -inf leaves nothing of what was there, however large."""
    given = arguments(29, decay=decay, delta=False, dtype=dtype, strength=0.1)
    given["v"][:, :, :9] *= 1e30
    given["v"][:, :, 9:] = 0.0
    given["log_decay"][:, :, 9] = -torch.inf
    o, state = form(Recurrence(**given, scale=0.7))
    assert o[:, :, :9].abs().max() > 1e28
    assert not o[:, :, 9:].any()
    assert not state.any()


class TestFunctional:
    """What the public functions guarantee besides the recurrence."""

    def test_the_scale_is_one_over_the_root_of_d(self):
        given = arguments(13)
        q, k, v = (given.pop(name) for name in "qkv")
        o = longspan.delta_rule(q, k, v, **given)
        torch.testing.assert_close(o, longspan.delta_rule(q * 5**-0.5, k, v, scale=1.0, **given))

    @pytest.mark.parametrize("name", ["reference", "torch"])
    def test_a_forced_backend_serves(self, name):
        given = arguments(13, delta=False)
        q, k, v = (given.pop(x) for x in "qkv")
        del given["beta"]
        with longspan.backend(name):
            found = longspan.decay_attention(q, k, v, return_state=True, **given)
        assert_close(found, longspan.decay_attention(q, k, v, return_state=True, **given))

    def test_a_state_continues(self):
        given = arguments(29, decay="channel", repeats=2)
        q, k, v, state = (given.pop(x) for x in ("q", "k", "v", "state"))
        whole = longspan.delta_rule(q, k, v, state=state, return_state=True, **given)
        out, first, kept = [], state, state.clone()
        for part in (slice(0, 11), slice(11, 12), slice(12, 12), slice(12, 29)):
            options = {name: t[:, :, part] for name, t in given.items()}
            o, state = longspan.delta_rule(
                q[:, :, part], k[:, :, part], v[:, :, part], state=state, return_state=True, **options
            )
            out.append(o)
        assert_close([torch.cat(out, 2), state], whole)
        assert torch.equal(first, kept)

    @pytest.mark.parametrize("delta", [False, True])
    @pytest.mark.parametrize("decay", ["head", "channel"])
    def test_a_masked_token_leaves_the_state_alone(self, decay, delta):
        given = arguments(1, decay=decay, delta=delta, dtype=torch.float32, repeats=2)
        q, k, v = (given.pop(x) for x in "qkv")
        call = longspan.delta_rule if delta else longspan.decay_attention
        given = {name: t for name, t in given.items() if t is not None}
        wanted = call(q, k, v, return_state=True, **given)
        o, state = call(q, k, v, mask=torch.tensor([[True], [False]]), return_state=True, **given)
        assert_close([o[:1], state[:1]], [t[:1] for t in wanted], 1e-5)
        assert not o[1].any()
        assert state[1].equal(given["state"][1])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_is_widened(self, dtype):
        given = arguments(37, decay="channel", dtype=dtype)
        q, k, v = (given.pop(x) for x in "qkv")
        o, state = longspan.delta_rule(q, k, v, return_state=True, **given)
        assert o.dtype is dtype
        assert state.dtype is torch.float32
        wide = {name: t.double() for name, t in given.items()}
        exact = longspan.delta_rule(q.double(), k.double(), v.double(), return_state=True, **wide)
        assert_close([state], exact[1:], 1e-5)
        assert_close([o], exact[:1], torch.finfo(dtype).eps)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"query": torch.zeros(2, 2, 7)}, r"^query .*torch.float32 \(2, 2, 7\)"),
            ({"value": torch.zeros(2, 3, 7, 3)}, r"value \(2, 3, 7, 3\) do not fit"),
            ({"key": torch.zeros(2, 2, 6, 5)}, "do not fit"),
            ({"log_decay": torch.zeros(2, 4, 6)}, r"^log_decay .*\(2, 4, 7\) or \(2, 4, 7, 5\).*\(2, 4, 6\)"),
            ({"log_decay": torch.zeros(2, 2, 7)}, r"not torch.float32 \(2, 2, 7\)"),
            ({"beta": torch.zeros(2, 4, 7, 1)}, r"^beta .*\(2, 4, 7\).*\(2, 4, 7, 1\)"),
            ({"mask": torch.zeros(2, 7)}, r"^mask .*bool \(2, 7\).*torch.float32"),
            ({"segments": torch.zeros(2, 7)}, r"^segments .*int64 \(2, 7\).*torch.float32"),
            ({"state": torch.zeros(2, 4, 3, 5)}, r"state must be torch.float32 \(B, H, D, E\) = \(2, 4, 5, 3\)"),
            ({"state": torch.zeros(2, 4, 5, 3).double()}, "not torch.float64"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, changes, message):
        given = {
            "query": torch.zeros(2, 2, 7, 5),
            "key": torch.zeros(2, 2, 7, 5),
            "value": torch.zeros(2, 4, 7, 3),
            "beta": torch.zeros(2, 4, 7),
        }
        given |= changes
        with pytest.raises(ValueError, match=message):
            longspan.delta_rule(given.pop("query"), given.pop("key"), given.pop("value"), **given)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"value": torch.zeros(2, 3, 1, 3), "beta": torch.zeros(2, 3, 1)}, "do not fit"),
            ({"key": torch.zeros(2, 2, 1, 4)}, "do not fit"),
            ({"log_decay": torch.zeros(2, 2, 1)}, r"not torch.float32 \(2, 2, 1\)"),
            ({"beta": torch.zeros(2, 4, 1, 1)}, r"^beta .*\(2, 4, 1\).*\(2, 4, 1, 1\)"),
            ({"mask": torch.zeros(2, 1)}, r"^mask .*bool \(2, 1\).*torch.float32"),
            ({"state": torch.zeros(2, 4, 3, 5)}, r"state must be torch.float32 \(B, H, D, E\) = \(2, 4, 5, 3\)"),
        ],
    )
    def test_nor_does_one_token_with_a_state(self, changes, message):
        query, value = torch.zeros(2, 2, 1, 5), torch.zeros(2, 4, 1, 3)
        given = {"key": query, "value": value, "beta": torch.zeros(2, 4, 1), "state": torch.zeros(2, 4, 5, 3)} | changes
        if len(given["value"][0]) == 3:
            given["state"] = torch.zeros(2, 3, 5, 3)
        with pytest.raises(ValueError, match=message):
            longspan.delta_rule(query, **given)
