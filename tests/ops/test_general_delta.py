"""The general delta rule: the models of papers, one answer by every form, gradients, packed rows, states."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export

import longspan
from longspan import general_delta_rule
from longspan.ops.gated import chunks, general, general_chunks

FORMS = ("reference", "torch")
NAMES = ("query", "key", "value", "read", "erase", "log_decay", "state")
EARLY = {"read_before_decay": True}
DECAYS = ("none", "head", "channel")


def made(n, *, decay="channel", repeats=1, sizes=(6, 5), dtype=torch.float64, strength=0.6, batch=2, seed=0):
    """Operands with 2 heads of keys: reads of length 1 and erasures of 0 to 1 times the reads, as in RWKV-7."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    (d, e), heads = sizes, 2 * repeats
    read = F.normalize(randn(batch, 2, n, d), dim=-1)
    shapes = {"none": None, "head": (batch, heads, n), "channel": (batch, heads, n, d)}
    given = {
        "query": randn(batch, 2, n, d),
        "key": randn(batch, 2, n, d) / d**0.5,
        "value": randn(batch, heads, n, e),
        "read": read,
        "erase": read * rand(batch, 2, n, d),
        "log_decay": None if decay == "none" else -strength * rand(*shapes[decay]),
        "state": randn(batch, heads, d, e),
    }
    return {name: None if t is None else t.to(dtype) for name, t in given.items()}


def widened(given):
    return {name: None if t is None else t.double() for name, t in given.items()}


def outcome(form, given, **options):
    """The output, the last state, and the gradients of all operands."""
    given = {name: None if t is None else t.detach().clone().requires_grad_() for name, t in given.items()}
    with longspan.backend(form):
        found = general_delta_rule(**given, return_state=True, **options)
    upstream = [torch.cos(torch.arange(t.numel(), dtype=torch.float64)).to(t.dtype).view(t.shape) for t in found]
    return [*found, *torch.autograd.grad(found, [t for t in given.values() if t is not None], upstream)]


def assert_close(found, expected, tolerance=1e-12):
    """Equal up to ``tolerance`` of the largest number of each tensor."""
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        limit = tolerance * max(1.0, b.abs().max().item())
        torch.testing.assert_close(a.double(), b.double(), atol=limit, rtol=0.0)


class TestPapers:
    """Recurrences as their papers write them, in float64, token by token."""

    N, D, E = 80, 6, 5

    @pytest.fixture
    def given(self):
        return made(self.N, batch=1)

    def check(self, loop, *operands, expected, **options):
        for form in FORMS:
            with longspan.backend(form):
                found = general_delta_rule(*operands, scale=1.0, **options)
            assert_close([found], [expected], 1e-10)

    def loop(self, update, q):
        """The outputs S_t q_t of S_t = update(S_{t-1}, head, t), with S (E,D) as the papers have it."""
        out = torch.zeros(1, 2, self.N, self.E, dtype=torch.float64)
        for head in range(2):
            s = torch.zeros(self.E, self.D, dtype=torch.float64)
            for t in range(self.N):
                s = update(s, head, t)
                out[0, head, t] = s @ q[0, head, t]
        return out

    def test_rwkv7(self, given):
        """S_t = S_{t-1} (diag(w_t) - kk_t^T (a_t * kk_t)) + v_t^T k_t (2503.14456)."""
        q, k, v, kk, decay = (given[name] for name in ("query", "key", "value", "read", "log_decay"))
        a = torch.rand_like(kk)

        def update(s, head, t):
            at = 0, head, t
            transition = torch.diag(decay[at].exp()) - torch.outer(kk[at], a[at] * kk[at])
            return s @ transition + torch.outer(v[at], k[at])

        options = {"read": kk, "erase": kk * a, "log_decay": decay, "read_before_decay": True}
        self.check("rwkv7", q, k, v, **options, expected=self.loop(update, q))

    def test_diagonal_plus_low_rank(self, given):
        """S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T."""
        q, k, v, a, b, decay = (given[name] for name in ("query", "key", "value", "read", "erase", "log_decay"))

        def update(s, head, t):
            at = 0, head, t
            return s @ (torch.diag(decay[at].exp()) - torch.outer(a[at], b[at])) + torch.outer(v[at], k[at])

        options = {"read": a, "erase": b, "log_decay": decay, "read_before_decay": True}
        self.check("dplr", q, k, v, **options, expected=self.loop(update, q))

    def test_identity_plus_low_rank(self, given):
        """S_t = S_{t-1} (I + a_t b_t^T) + v_t k_t^T."""
        q, k, v, a, b = (given[name] for name in ("query", "key", "value", "read", "erase"))

        def update(s, head, t):
            at = 0, head, t
            return s + torch.outer(s @ a[at], b[at]) + torch.outer(v[at], k[at])

        self.check("iplr", q, k, v, read=a, erase=-b, expected=self.loop(update, q))

    def test_gated_deltanet_2(self, given):
        """P_t = S_{t-1} diag(alpha_t), S_t = P_t - (P_t (b_t * k_t)) k_t^T + (w_t * v_t) k_t^T."""
        q, k, v, decay = (given[name] for name in ("query", "read", "value", "log_decay"))
        b, w = torch.rand_like(k), torch.rand_like(v)

        def update(s, head, t):
            at = 0, head, t
            s = s * decay[at].exp()
            return s - torch.outer(s @ (b[at] * k[at]), k[at]) + torch.outer(w[at] * v[at], k[at])

        self.check("gdn2", q, k, w * v, read=b * k, erase=k, log_decay=decay, expected=self.loop(update, q))


def test_the_delta_rule_is_a_case():
    given = made(70, repeats=1)
    q, k, v = (given[name] for name in ("query", "read", "value"))
    beta, options = torch.rand(2, 2, 70).double(), {"log_decay": given["log_decay"], "state": given["state"]}
    expected = longspan.delta_rule(q, k, v, beta=beta, **options, return_state=True)
    rate = beta[..., None]
    found = general_delta_rule(q, k, rate * v, read=k, erase=rate * k, **options, return_state=True)
    assert_close(found, expected)


@pytest.mark.parametrize(("decay", "early"), list(itertools.product(DECAYS, (False, True))))
def test_chunks_are_the_loop(decay, early):
    """In values and all seven gradients, for sizes around a chunk, and with masks and packed rows."""
    cases = [(1, 1, False, False), (13, 2, True, True), (65, 1, False, True), (139, 2, True, False)]
    for n, repeats, masked, packed in cases:
        generator = torch.Generator().manual_seed(n)
        mask = torch.rand(2, n, generator=generator) < 0.7 if masked else None
        segments = torch.randint(0, 2, (2, n), generator=generator).cumsum(1) // 9 if packed else None
        given = made(n, decay=decay, repeats=repeats)
        options = {"scale": 0.7, "mask": mask, "segments": segments, "read_before_decay": early}
        assert_close(outcome("torch", given, **options), outcome("reference", given, **options))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_strong_decay(decay, early):
    """Of every strength; -inf clears the state. No exponent is positive, so nothing overflows."""
    given = made(139, decay=decay)
    strength = torch.tensor([0.0, 1.0, 1.0, 50.0, 1e4, torch.inf], dtype=torch.float64)
    picked = strength[torch.randint(6, given["log_decay"].shape, generator=torch.Generator().manual_seed(1))]
    given["log_decay"] = torch.where(picked.isinf(), -picked, given["log_decay"] * picked)
    options = {"read_before_decay": early}
    assert_close(outcome("torch", given, **options), outcome("reference", given, **options))


@pytest.mark.parametrize("early", [False, True])
def test_what_is_forgotten_is_gone(early):
    """The state before -inf has no effect, except on a token that reads before its decay."""
    given = made(3)
    given["log_decay"][:, :, 1] = -torch.inf
    same = {**given, "state": given["state"] * 0, "read": given["read"].clone()}
    same["read"][:, :, :2] = given["read"][:, :, :2] = 0.0
    found = [general_delta_rule(**one, read_before_decay=early)[:, :, 1:] for one in (given, same)]
    assert_close(found[:1], found[1:])


def test_the_decay_of_rwkv7_over_a_long_sequence():
    """At the strongest decay e^-0.6065 of each token and channel, for 4096 tokens, with a = 1 and a = 0."""
    given = made(4096, batch=1, sizes=(8, 8), dtype=torch.float32)
    given["log_decay"] = torch.full_like(given["log_decay"], -0.60653066)
    rates = torch.arange(8.0).remainder(2)
    given["erase"] = given["read"] * rates
    exact = [t.detach() for t in outcome("torch", widened(given), read_before_decay=True)]
    for form in FORMS[1:]:
        assert_close(outcome(form, given, read_before_decay=True), exact, 2e-5)
    with longspan.backend("reference"):
        right = general_delta_rule(**widened(given), read_before_decay=True)
    assert_close(exact[:1], [right])


def test_spans_and_chunks_give_one_answer(monkeypatch):
    given = made(150, repeats=2)
    expected = outcome("reference", given, read_before_decay=True)
    monkeypatch.setattr(chunks, "SPAN", 2 * 2 * 2 * 64)
    assert_close(outcome("torch", given, read_before_decay=True), expected)
    r = general.GeneralRecurrence(*given.values(), scale=6**-0.5, early=True)
    for chunk in (1, 2, 8, 32):
        found = general_chunks.composed(r, chunk=chunk)
        assert_close(found, expected[:2])


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_derivatives_and_their_derivatives_are_exact(decay, early):
    given = made(5, decay=decay, batch=1, sizes=(3, 2), repeats=2)
    names = [name for name, t in given.items() if t is not None]
    mask = torch.tensor([[True, True, False, True, True]])

    def call(*tensors):
        options = {"mask": mask, "read_before_decay": early, "return_state": True}
        return general_delta_rule(**dict(zip(names, tensors, strict=True)), **options)

    leaves = [given[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("early", [False, True])
def test_transforms(early):
    given = made(20, repeats=2)
    names = [name for name, t in given.items() if t is not None]

    def loss(*tensors):
        options = {"read_before_decay": early, "return_state": True}
        out, end = general_delta_rule(**dict(zip(names, tensors, strict=True)), **options)
        return out.sin().sum() + end.cos().sum()

    leaves = [t.requires_grad_() for t in given.values()]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.func.grad(loss, tuple(range(len(leaves))))(*given.values())
    assert_close(found, expected)
    tangents = tuple(torch.ones_like(t) for t in leaves)
    with warnings.catch_warnings():
        # torch compiles some rules on first use, by what it calls deprecated itself.
        warnings.simplefilter("ignore")
        _, slope = torch.func.jvp(loss, tuple(t.detach() for t in leaves), tangents)
    assert_close([slope], [sum(g.sum() for g in expected)])


class TestExported:
    """torch.export: one operation for every batch and length."""

    class Recurrence(nn.Module):
        def forward(self, *tensors):
            return general_delta_rule(**dict(zip(NAMES, tensors, strict=True)), **EARLY, return_state=True)

    def test_one_program_for_every_batch_and_length(self):
        batch, tokens = Dim("B", min=1), Dim("N", min=1)
        shapes = [{0: batch, 2: tokens}] * 6 + [{0: batch}]
        program = export(self.Recurrence(), tuple(made(50).values()), dynamic_shapes=(tuple(shapes),)).module()
        for rows, n in ((1, 1), (3, 9), (2, 145)):
            given = [t.requires_grad_() for t in made(n, batch=rows, repeats=1).values()]
            found, expected = program(*given), self.Recurrence()(*given)
            assert_close(found, expected)
            slopes = [torch.autograd.grad(sum(t.sin().sum() for t in one), given) for one in (found, expected)]
            assert_close(*slopes)

    def test_the_operation_keeps_the_rules_of_torch(self):
        given = [t.requires_grad_() for t in made(4).values()]
        wanted = ("test_schema", "test_autograd_registration", "test_faketensor")
        operation = torch.ops.longspan.general_recurrence
        torch.library.opcheck(operation, (*given, None, None, None, 0.5, True), test_utils=wanted)


class TestRows:
    """Masks and packed sequences."""

    SEGMENTS = torch.tensor([[0] * 20 + [1] * 45 + [2] * 5, [0] * 40 + [5] * 30])

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("early", [False, True])
    def test_no_gradient_crosses_a_border(self, form, early):
        given = {name: t.requires_grad_() for name, t in made(70, repeats=2).items()}
        with longspan.backend(form):
            out = general_delta_rule(**given, segments=self.SEGMENTS, read_before_decay=early)
        grads = torch.autograd.grad(out[0, :, 20:65].square().sum(), given.values())
        for name, grad in zip(NAMES, grads, strict=True):
            inside = grad[0] if name == "state" else grad[0, :, 20:65]
            assert inside.any() == (name != "state")
            assert grad.count_nonzero() == inside.count_nonzero()

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("name", NAMES[:6])
    def test_neighbors_of_nan_stay_what_they_are(self, form, name):
        """In values and gradients: of the other segments, and of the row that has no NaN."""
        given, others = made(70, repeats=2), torch.ones(2, 70, dtype=torch.bool)
        others[0, 20:65] = False
        spoilt = {key: t.clone() for key, t in given.items()}
        spoilt[name][0, :, 33] = torch.nan
        options = {"segments": self.SEGMENTS, "read_before_decay": True}
        found, wanted = (
            [t if t.shape[2:] == (6, 5) else t.movedim(1, 2)[others] for t in outcome(form, one, **options)]
            for one in (spoilt, given)
        )
        assert_close(found, wanted)
        with longspan.backend(form):
            assert general_delta_rule(**spoilt, **options)[0, :, 33:65].isnan().any()

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("early", [False, True])
    def test_masked_tokens_are_not_read(self, form, early):
        given = made(70, repeats=2)
        mask = torch.rand(2, 70, generator=torch.Generator().manual_seed(2)) < 0.6
        hidden = ~mask[:, None, :, None]
        found = []
        for garbage in (torch.nan, 0.0):
            one = {name: t if name == "state" else t.masked_fill(hidden, garbage) for name, t in given.items()}
            found.append(outcome(form, one, mask=mask, read_before_decay=early))
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("form", FORMS)
    def test_offsets_are_separate_runs(self, form):
        given, offsets = made(70, batch=1, repeats=2), [0, 3, 3, 68, 70]
        mask = torch.arange(70)[None] % 5 > 0
        given["state"] = torch.randn(4, 4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        expected, ends, grads = [], [], []
        for s, (begin, end) in enumerate(itertools.pairwise(offsets)):
            own = {name: t[s : s + 1] if name == "state" else t[:, :, begin:end] for name, t in given.items()}
            with longspan.backend(form):
                out, after = general_delta_rule(**own, mask=mask[:, begin:end], return_state=True)
            expected.append(out)
            ends.append(after)
        with longspan.backend(form):
            leaves = {name: t.requires_grad_() for name, t in given.items()}
            options = {"mask": mask, "return_state": True}
            found = general_delta_rule(**leaves, cu_seqlens=torch.tensor(offsets), **options)
        assert_close(found, [torch.cat(expected, 2), torch.cat(ends)])
        grads = torch.autograd.grad(found[0][:, :, 3:68].sum(), list(leaves.values()))
        assert not any(g[:, :, :3].any() or g[:, :, 68:].any() for g in grads[:6])
        assert grads[6][2].any()
        assert not grads[6][[0, 1, 3]].any()


class TestState:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize(("decay", "early"), list(itertools.product(DECAYS, (False, True))))
    def test_two_parts_and_single_tokens_are_the_whole(self, form, decay, early):
        given, options = made(37, decay=decay, repeats=2), {"read_before_decay": early, "return_state": True}

        def part(begin, end, state):
            cut = {name: t if t is None else t[:, :, begin:end] for name, t in given.items() if name != "state"}
            return general_delta_rule(**cut, state=state, **options)

        with longspan.backend(form):
            expected = general_delta_rule(**given, **options)
            first, state = part(0, 20, given["state"])
            out = [first]
            for t in range(20, 37):
                one, state = part(t, t + 1, state)
                out.append(one)
        assert_close([torch.cat(out, 2), state], expected)

    @pytest.mark.parametrize("early", [False, True])
    def test_a_donated_state_is_overwritten(self, early):
        given = made(1)
        expected = general_delta_rule(**given, read_before_decay=early, return_state=True)
        state = given["state"].clone()
        given["state"] = state.clone()
        found = general_delta_rule(**given, read_before_decay=early, return_state=True, donate=True)
        assert found[1].data_ptr() == given["state"].data_ptr()
        assert not given["state"].equal(state)
        assert_close(found, expected)

    def test_a_donated_state_that_is_also_read_is_refused(self):
        state = torch.zeros(1, 1, 4, 4)
        x = state[:, :, :1]
        with pytest.raises(ValueError, match="shares memory with query"):
            general_delta_rule(x, x, x, read=x, erase=x, state=state, donate=True)

    def test_no_tokens_and_no_channels(self):
        given = made(0)
        out, end = general_delta_rule(**given, return_state=True)
        assert out.shape == (2, 2, 0, 5)
        assert end.equal(given["state"])
        given = made(4, sizes=(0, 3))
        out, end = general_delta_rule(**given, return_state=True)
        assert out.shape == (2, 2, 4, 3)
        assert not out.any()
        assert end.shape == (2, 2, 0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    given = made(80, dtype=torch.float32)
    low = given | {name: given[name].to(dtype) for name in ("query", "key", "value", "read", "erase")}
    found = general_delta_rule(**low, return_state=True)
    expected = general_delta_rule(**widened(low), return_state=True)
    assert found[0].dtype is dtype
    assert_close(found[:1], expected[:1], torch.finfo(dtype).eps)
    assert_close(found[1:], expected[1:], 1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"read": torch.zeros(2, 2, 4, 5)}, "read must be a floating-point tensor"),
        ({"erase": torch.zeros(2, 2, 4, 6, dtype=torch.long)}, "erase must be a floating-point tensor"),
        ({"value": torch.zeros(2, 3, 4, 5)}, "do not fit"),
        ({"log_decay": torch.zeros(2, 2, 4, 5)}, "log_decay must be a floating-point tensor"),
        ({"state": torch.zeros(2, 2, 5, 6)}, "state must be"),
        ({"scale": float("nan")}, "must be a finite number"),
        ({"segments": torch.zeros(2, 4)}, "segments must be int64"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "B must be 1"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        general_delta_rule(**made(4, dtype=torch.float32) | changes)
