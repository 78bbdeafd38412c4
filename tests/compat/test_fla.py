"""flash-linear-attention's names: the formulas of the papers in its layout, packed sequences, and what is refused."""

import importlib
import sys

import pytest
import torch

from longspan.compat import fla
from longspan.compat.fla import ops

B, T, H, HV, K, V = 2, 37, 2, 4, 3, 5
NAMES = sorted({name for names in fla.FUNCTIONS.values() for name in names})


def operands(batch=B, tokens=T, heads=H):
    """q, k, v, g per head, g per channel, beta, state in float64."""
    random = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=random)

    return (
        drawn(batch, tokens, heads, K),
        drawn(batch, tokens, heads, K) / 2,
        drawn(batch, tokens, HV, V),
        -drawn(batch, tokens, HV).exp(),
        -drawn(batch, tokens, HV, K).exp(),
        drawn(batch, tokens, HV).sigmoid(),
        drawn(batch, HV, K, V),
    )


def naive(q, k, v, g=None, beta=None, state=None, scale=K**-0.5):
    """S = Diag(e^g) S; S = S + beta k (v - S^T k)^T, or S + k v^T; o = c S^T q: a loop over tokens."""
    groups = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
    state = v.new_zeros(len(v), v.shape[2], q.shape[3], v.shape[3]) if state is None else state
    out = []
    for t in range(q.shape[1]):
        if g is not None:
            alpha = g[:, t].exp()
            state = state * (alpha[..., None, None] if alpha.dim() == 2 else alpha[..., None])
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        out.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1), state


def gamma():
    return torch.tensor([1 - 2 ** (-5 - h) for h in range(HV)], dtype=torch.float64).log()


def calls():
    """Function -> arguments after q, k, v, those of ``naive``."""
    *_, g, gk, beta, _ = operands()
    rates, decays = {"beta": beta}, {"g": g, "beta": beta}
    found = {
        "chunk_delta_rule": (rates, rates),
        "fused_recurrent_delta_rule": (rates, rates),
        "chunk_gated_delta_rule": (decays, decays),
        "chunk_gdn": (decays, decays),
        "fused_recurrent_gated_delta_rule": ({"gk": gk, **decays}, {"g": g[..., None] + gk, "beta": beta}),
        "fused_recurrent_gdn": ({}, {"beta": torch.ones_like(beta)}),
        "chunk_kda": ({"g": gk, "beta": beta}, {"g": gk, "beta": beta}),
        "fused_recurrent_kda": ({"g": gk, "beta": beta}, {"g": gk, "beta": beta}),
        "chunk_gla": ({"g": gk}, {"g": gk}),
        "fused_chunk_gla": ({"g": gk}, {"g": gk}),
        "fused_recurrent_gla": ({"gk": gk}, {"g": gk}),
        "chunk_simple_gla": ({"g": g}, {"g": g}),
        "fused_chunk_simple_gla": ({"g_gamma": gamma()}, {"g": gamma().expand(B, T, HV)}),
        "fused_recurrent_simple_gla": ({"g": g, "g_gamma": gamma()}, {"g": g + gamma()}),
    }
    for form in ("chunk", "fused_chunk", "fused_recurrent"):
        found[f"{form}_retention"] = ({}, {"g": gamma().expand(B, T, HV)})
        found[f"{form}_linear_attn"] = ({"normalize": False}, {})
    return found


def test_every_name_is_tested():
    assert sorted(calls()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_formula_of_the_paper(name):
    given, formula = calls()[name]
    # Retention has fixed decays per head.
    heads = HV if "retention" in name else H
    q, k, v, *_, state = operands(heads=heads)
    function = getattr(ops, name)
    out, end = function(q, k, v, **given)
    assert end is None
    assert torch.allclose(out, naive(q, k, v, **formula)[0], rtol=1e-9)
    out, end = function(q, k, v, **given, scale=0.7, initial_state=state, output_final_state=True)
    expected, last = naive(q, k, v, **formula, state=state, scale=0.7)
    assert torch.allclose(out, expected, rtol=1e-9)
    assert torch.allclose(end, last, rtol=1e-9)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_delta_rule", "chunk_kda"])
def test_queries_and_keys_of_length_one(name):
    given, formula = calls()[name]
    q, k, v, *_ = operands()
    out, _ = getattr(ops, name)(q, k, v, **given, use_qk_l2norm_in_kernel=True)
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    assert torch.allclose(out, naive(q, k, v, **formula)[0], rtol=1e-9)


@pytest.mark.parametrize("name", [name for name in NAMES if "retention" not in name])
def test_packed_sequences_have_states_of_their_own(name):
    given, formula = calls()[name]
    given, formula = (
        {key: t[:1] if isinstance(t, torch.Tensor) and t.dim() > 1 else t for key, t in one.items()}
        for one in (given, formula)
    )
    q, k, v, *_ = operands(batch=1)
    state = operands(batch=3)[-1]
    borders = torch.tensor([0, 11, 12, T], dtype=torch.int32)
    out, end = getattr(ops, name)(q, k, v, **given, initial_state=state, output_final_state=True, cu_seqlens=borders)
    for s, (begin, after) in enumerate(zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)):
        part = slice(begin, after)
        alone, last = naive(
            q[:, part],
            k[:, part],
            v[:, part],
            **{key: t[:, part] for key, t in formula.items()},
            state=state[s : s + 1],
        )
        assert torch.allclose(out[:, part], alone, rtol=1e-9)
        assert torch.allclose(end[s : s + 1], last, rtol=1e-9)


@pytest.mark.parametrize("form", ["chunk", "fused_chunk", "fused_recurrent"])
def test_the_normalizer_goes_on_in_a_separate_state(form):
    function = getattr(ops, f"{form}_linear_attn")
    q, k, v, *_ = operands(heads=HV)
    q, k = q.exp(), k.exp()
    weights = torch.einsum("bthk,bshk->bhts", q, k).tril()
    expected = torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), v)
    out, state = function(q, k, v, normalize=True, output_final_state=True)
    assert torch.allclose(out, expected, rtol=1e-7)
    assert state[1].shape == (B, 1, HV, K)
    assert torch.allclose(state[1], k.sum(1, keepdim=True), rtol=1e-9)
    first, state = function(q[:, :9], k[:, :9], v[:, :9], normalize=True, output_final_state=True)
    rest, none = function(q[:, 9:], k[:, 9:], v[:, 9:], normalize=True, initial_state=state)
    assert none is None
    assert torch.allclose(torch.cat([first, rest], 1), expected, rtol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_half_precision(name):
    given, formula = calls()[name]
    heads = HV if "retention" in name else H
    q, k, v, *_ = (t.requires_grad_() for t in operands(heads=heads))
    found = torch.autograd.grad(getattr(ops, name)(q, k, v, **given)[0].sin().sum(), (q, k, v))
    expected = torch.autograd.grad(naive(q, k, v, **formula)[0].sin().sum(), (q, k, v))
    assert all(torch.allclose(a, b, rtol=1e-7, atol=1e-9) for a, b in zip(found, expected, strict=True))
    halves = {key: t.bfloat16() if isinstance(t, torch.Tensor) else t for key, t in given.items()}
    out, end = getattr(ops, name)(
        *(t.detach().bfloat16() for t in (q, k, v)),
        **halves,
        output_final_state=True,
        initial_state=torch.zeros(B, HV, K, V, dtype=torch.bfloat16),
    )
    assert out.dtype == torch.bfloat16
    assert end.dtype == torch.float32
    assert out.isfinite().all()


@pytest.fixture
def installed():
    fla.install()
    yield
    fla.uninstall()


@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="the real fla is installed here")
def test_the_names_are_found_where_they_were(installed):
    from fla.ops import chunk_gla  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]
    from fla.ops.simple_gla.fused_recurrent import (  # pyright: ignore[reportMissingImports]
        fused_recurrent_simple_gla,
    )

    assert chunk_gated_delta_rule is ops.chunk_gated_delta_rule
    assert chunk_gla is ops.chunk_gla
    assert fused_recurrent_simple_gla is ops.fused_recurrent_simple_gla
    assert importlib.util.find_spec("fla") is not None
    fla.install()
    with pytest.raises(ImportError, match="'chunk_rwkv7'"):
        from fla.ops import chunk_rwkv7  # pyright: ignore[reportMissingImports]  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"fla\.modules"):
        importlib.import_module("fla.modules")
    with pytest.raises(AttributeError, match=r"fla.ops.gla.*'chunk_hgrn'.*chunk, chunk_gla, "):
        sys.modules["fla.ops.gla"].chunk_hgrn  # noqa: B018


@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="the real fla is installed here")
def test_a_real_one_is_displaced_only_where_that_is_meant(monkeypatch):
    real = type(sys)("fla")
    monkeypatch.setitem(sys.modules, "fla", real)
    with pytest.raises(ValueError, match="fla is already imported.*replace=True"):
        fla.install()
    fla.install(replace=True)
    assert sys.modules["fla"] is not real
    fla.uninstall()
    assert sys.modules["fla"] is real
    assert "fla.ops" not in sys.modules


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64)


GATED = {"g": zeros(B, T, HV), "beta": zeros(B, T, HV)}
HEADS, CHANNELS = zeros(B, T, HV), zeros(B, T, HV, K)
OTHER_AXES = r"^gk? .*\(B, T, HV(, K)?\)"
# Function, arguments after q, k and v, and the message.
REFUSED = [
    ("chunk_gated_delta_rule", GATED | {"head_first": True}, r"head_first=True: .*\(B, T, H, D\)"),
    ("chunk_gated_delta_rule", GATED | {"use_gate_in_kernel": True}, "use_gate_in_kernel=True: .*g = -A_log.exp"),
    ("chunk_gated_delta_rule", GATED | {"use_beta_sigmoid_in_kernel": True}, "in_kernel=True: .*beta.sigmoid"),
    ("chunk_gated_delta_rule", GATED | {"state_v_first": True}, "state_v_first=True: "),
    ("chunk_gated_delta_rule", GATED | {"offsets": torch.tensor([0, 3])}, "chunk_gated_delta_rule.*'offsets'"),
    ("chunk_gated_delta_rule", GATED | {"q": torch.zeros(2, T, K)}, r"q .*\(B, T, H, D\).*\(2, 37, 3\)"),
    ("chunk_gated_delta_rule", GATED | {"g": torch.zeros(B, HV, T)}, r"\(2, 37, 4\).*\(2, 4, 37\)"),
    ("chunk_gated_delta_rule", GATED | {"beta": torch.zeros(B, T, HV, V)}, r"beta .*\(2, 37, 4\)"),
    ("chunk_gated_delta_rule", GATED | {"cu_seqlens": torch.tensor([0, T])}, "cu_seqlens.*2"),
    ("chunk_gated_delta_rule", GATED | {"initial_state": torch.zeros(1, HV, K, V)}, r"state .*float64.*\(2, 4, 3, 5\)"),
    ("fused_recurrent_gated_delta_rule", {"g": zeros(B, T, 1), "gk": CHANNELS}, r"g .*\(2, 37, 4\).*gk.*\(2, 37, 1\)"),
    ("chunk_simple_gla", {"g_gamma": torch.zeros(3)}, r"g_gamma .*\(4,\).*\(3,\)"),
    ("chunk_simple_gla", {"g": zeros(B, T, 1), "g_gamma": zeros(HV)}, r"g .*\(2, 37, 4\).*\(2, 37, 1\)"),
    ("fused_recurrent_gla", {"gv": zeros(B, T, HV, V)}, "fused_recurrent_gla.*gv="),
    ("fused_recurrent_simple_gla", {"reverse": True}, r"reverse=True.*flip\(1\)"),
    # Decays per head and per channel do not stand for each other.
    ("chunk_gated_delta_rule", {"g": CHANNELS, "beta": HEADS}, OTHER_AXES),
    ("fused_recurrent_gated_delta_rule", {"g": CHANNELS}, OTHER_AXES),
    ("fused_recurrent_gated_delta_rule", {"gk": HEADS}, OTHER_AXES),
    ("chunk_kda", {"g": HEADS, "beta": HEADS}, OTHER_AXES),
    ("fused_recurrent_kda", {"g": HEADS, "beta": HEADS}, OTHER_AXES),
    ("chunk_gla", {"g": HEADS}, OTHER_AXES),
    ("fused_recurrent_gla", {"gk": HEADS}, OTHER_AXES),
    ("chunk_simple_gla", {"g": CHANNELS}, OTHER_AXES),
    ("fused_recurrent_simple_gla", {"g": CHANNELS}, OTHER_AXES),
]


@pytest.mark.parametrize(("name", "given", "message"), REFUSED)
def test_what_is_not_carried_over_is_refused(name, given, message):
    q, k, v, *_ = operands()
    with pytest.raises(ValueError, match=message):
        getattr(ops, name)(**{"q": q, "k": k, "v": v} | given)


def test_places_and_arguments_without_an_effect():
    q, k, v, g, *_ = operands()
    # The third decay argument is gk, not beta.
    with pytest.raises(ValueError, match=r"gk .*\(B, T, HV, K\)"):
        ops.fused_recurrent_gated_delta_rule(q, k, v, g, torch.rand(B, T, HV))
    assert ops.chunk_gla(q, k, v, CHANNELS, cu_seqlens_cpu=None, head_first=False)[1] is None
