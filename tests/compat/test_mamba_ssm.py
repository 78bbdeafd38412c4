"""Names of mamba_ssm and causal_conv1d: a loop by the definition, layers of transformers, and what is refused."""

import importlib.util
import inspect
import itertools
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Mamba2Config, MambaConfig

from longspan.compat import causal_conv1d, mamba_ssm
from longspan.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from longspan.compat.mamba_ssm import blocks, ops
from longspan.compat.mamba_ssm.modules import Mamba, Mamba2
from longspan.compat.mamba_ssm.norms import rmsnorm_fn

B, L, H, P, G, N, K = 2, 7, 4, 3, 2, 5, 4
D = H * P
IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]], dtype=torch.int32)
OFFSETS = torch.tensor([0, 3, 4, L], dtype=torch.int32)
LIMIT = (0.3, 0.9)


class Drawn:
    """Draws float64 operands and keeps them as leaves for gradients."""

    def __init__(self):
        self.random, self.leaves = torch.Generator().manual_seed(5), []

    def __call__(self, *shape):
        self.leaves.append(torch.randn(*shape, dtype=torch.float64, generator=self.random).requires_grad_())
        return self.leaves[-1]


def loop(x, dt, A, b, c, D=None, z=None, h=None, ids=None):
    """h = exp(dt A) h + dt x b, y = (c h + D x) silu(z): x, dt (B,L,D), A (D,N), b and c (B,L,D,N)."""
    h, rows = x.new_zeros(len(x), *A.shape) if h is None else h, []
    for t in range(x.shape[1]):
        if ids is not None and t:
            h = h * (ids[:, t] == ids[:, t - 1])[:, None, None]
        h = torch.exp(dt[:, t, :, None] * A) * h + (dt[:, t] * x[:, t])[..., None] * b[:, t]
        y = (c[:, t] * h).sum(-1)
        y = y if D is None else y + D * x[:, t]
        rows.append(y if z is None else y * F.silu(z[:, t]))
    return torch.stack(rows, 1), h


def convolved(x, weight, bias=None, past=None, ids=None, silu=True):
    """x (B,D,L), weight (D,K), past (B,D,K-1): b + sum_j w_j x_{t-K+1+j} over the tokens of the same sequence."""
    taps, rows = weight.shape[1], []
    ids = torch.zeros(len(x), x.shape[2]) if ids is None else ids
    x = torch.cat([x.new_zeros(*x.shape[:2], taps - 1) if past is None else past, x], 2)
    ids = torch.cat([ids[:, :1].expand(-1, taps - 1), ids], 1)
    for t in range(taps - 1, x.shape[2]):
        same = (ids[:, t - taps + 1 : t + 1] == ids[:, t : t + 1])[:, None]
        y = (x[:, :, t - taps + 1 : t + 1] * weight * same).sum(-1)
        y = y if bias is None else y + bias
        rows.append((F.silu(y) if silu else y) * (ids[:, t] >= 0)[:, None])
    return torch.stack(rows, 2)


def rms(x, weight, eps, size=None):
    y = x.unflatten(-1, (-1, size or x.shape[-1]))
    return (y / (y.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * weight


def per_channel(t, channels=D):
    """Repeat (..., G or H, N) over consecutive channels."""
    return t.repeat_interleave(channels // t.shape[-2], -2)


def scan(draw, keys="shared", options=(), last=False):
    u, delta, A = draw(B, D, L), draw(B, D, L).exp(), -draw(D, N).exp()
    shape = {"shared": (B, N, L), "groups": (B, G, N, L), "constants": (D, N)}[keys]
    b, c = draw(*shape), draw(*shape)
    more = {"D": draw(D), "z": draw(B, D, L), "delta_bias": draw(D)}
    more = {name: more[name] for name in options} | {"delta_softplus": "delta_bias" in options}
    found = ops.selective_scan_fn(u, delta, A, b, c, **more, return_last_state=last)
    dt = F.softplus(delta + more["delta_bias"][:, None]) if "delta_bias" in options else delta
    if keys == "constants":
        b, c = (t.expand(B, L, D, N) for t in (b, c))
    else:
        b, c = (per_channel(t.view(B, -1, N, L).permute(0, 3, 1, 2)) for t in (b, c))
    gate = more["z"].mT if "z" in options else None
    y, h = loop(u.mT, dt.mT, A, b, c, more.get("D"), gate)
    return found, (y.mT, h) if last else y.mT


def inner(draw, norms=False, given=""):
    rank, out = 3, 4
    xz, A = draw(B, 2 * D, L), -draw(D, N).exp()
    weights = [draw(D, 1, K), draw(D), draw(rank + 2 * N, D), draw(D, rank) / 2, draw(out, D), draw(out)]
    more = {"D": draw(D), "delta_bias": draw(D)}
    if given:
        more |= {name: draw(D, N) for name in given}
    if norms:
        weights[1] = weights[5] = None
        more |= {"B_proj_bias": draw(N), "C_proj_bias": draw(N)}
        more |= {"b_rms_weight": draw(N), "c_rms_weight": draw(N), "dt_rms_weight": draw(D), "b_c_dt_rms_eps": 0.1}
    found = ops.mamba_inner_fn(xz, *weights, A, **more)
    x = convolved(xz[:, :D], weights[0][:, 0], weights[1]).mT
    dt, b, c = (x @ weights[2].T).split([rank, N, N], -1)
    dt = dt @ weights[3].T
    if norms:
        b, c = (
            rms(b + more["B_proj_bias"], more["b_rms_weight"], 0.1),
            rms(c + more["C_proj_bias"], more["c_rms_weight"], 0.1),
        )
        dt = rms(dt, more["dt_rms_weight"], 0.1)
    b, c = (more["B"], more["C"]) if given else (b[:, :, None], c[:, :, None])
    b, c = (t.expand(B, L, D, N) for t in (b, c))
    y, _ = loop(x, F.softplus(dt + more["delta_bias"]), A, b, c, more["D"], xz[:, D:].mT)
    return found, F.linear(y, weights[4], weights[5])


def decoded(draw, heads=True, tied=True, options=(), rows=None):
    batch, lead = (B, (H, P) if heads else (D,))
    state, x = draw(batch if rows is None else 5, *lead, N), draw(batch, *lead)
    A, dt = (
        ((-draw(H).exp())[:, None, None].expand(H, P, N), draw(batch, H, 1).expand(-1, -1, P))
        if tied
        else (-draw(*lead, N).exp(), draw(batch, *lead))
    )
    bias = draw(H, 1).expand(H, P) if tied else draw(*lead)
    b, c = (draw(batch, G, N) if heads else draw(batch, N) for _ in range(2))
    more = {"D": draw(*lead), "z": draw(batch, *lead), "dt_bias": bias}
    more = {name: more[name] for name in options} | {"dt_softplus": "dt_bias" in options}
    held = state.clone()
    found = ops.selective_state_update(held, x, dt, A, b, c, **more, state_batch_indices=rows)
    dt = F.softplus(dt + bias) if "dt_bias" in options else dt
    flat = {name: t.reshape(batch, 1, D) for name, t in (("x", x), ("dt", dt))}
    b, c = (per_channel(t.view(batch, 1, -1, N)) for t in (b, c))
    skip = more["D"].reshape(D) if "D" in options else None
    gate = more["z"].reshape(batch, 1, D) if "z" in options else None
    picked = (state if rows is None else state[rows]).reshape(batch, D, N)
    y, h = loop(flat["x"], flat["dt"], A.reshape(D, N), b, c, skip, gate, picked)
    h = h.view(batch, *lead, N)
    return (found, held), (y.view(batch, *lead), h if rows is None else state.index_copy(0, rows, h))


def chunked(draw, batch=B, options=(), skip=(H,), limit=None, **more):
    x, dt, A, b, c = draw(batch, L, H, P), draw(batch, L, H), -draw(H).exp(), draw(batch, L, G, N), draw(batch, L, G, N)
    drawn = {"D": draw(*skip), "z": draw(batch, L, H, P), "dt_bias": draw(H), "initial_states": draw(batch, H, P, N)}
    given = {name: drawn[name] for name in options}
    softplus = {"dt_softplus": True} if "dt_bias" in options else {}
    limited = {} if limit is None else {"dt_limit": limit}
    found = ops.mamba_chunk_scan_combined(
        x, dt if softplus else dt.exp(), A, b, c, 4, **given, **softplus, **limited, **more
    )
    steps = F.softplus(dt + given["dt_bias"]) if softplus else dt.exp()
    return found, by_heads(x, steps.clamp(*(limit or (0, torch.inf))), A, b, c, given, more)


def by_heads(x, dt, A, b, c, given, more):
    """What a loop computes for Mamba-2's operands, with the states that ``more`` requests."""
    batch, ids, offsets = len(x), more.get("seq_idx"), more.get("cu_seqlens")
    if offsets is not None:
        ids = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.long().diff())[None]
    flat = {"A": A.repeat_interleave(P)[:, None].expand(D, N), "dt": dt.repeat_interleave(P, -1)}
    b, c = per_channel(b), per_channel(c)
    skip = given.get("D")
    skip = None if skip is None else skip.reshape(D) if skip.dim() == 2 else skip.repeat_interleave(P)
    gate, first = given.get("z"), given.get("initial_states")

    def run(part, h, ids=None):
        z = None if gate is None else gate.flatten(-2)[:, part]
        return loop(x.flatten(-2)[:, part], flat["dt"][:, part], flat["A"], b[:, part], c[:, part], skip, z, h, ids)

    first = None if first is None else first.reshape(batch, D, N)
    y, last = run(slice(None), first, ids)
    found = [y.view(batch, L, H, P)]
    if more.get("return_final_states"):
        found.append(last.view(batch, H, P, N))
    if more.get("return_varlen_states"):
        spans = itertools.pairwise(offsets.tolist())
        found.append(torch.cat([run(slice(*span), None if span[0] else first)[1] for span in spans]).view(-1, H, P, N))
    return tuple(found) if len(found) > 1 else found[0]


def split(draw, skipped=0, norm=None, skip=(H,), project=True, ids=None, options=(), final=False):
    mixed = D + 2 * G * N
    zxbcdt, weight = draw(B, L, 2 * skipped + D + mixed + H), draw(mixed, K)
    conv_bias, bias, A, d = draw(mixed), draw(H), -draw(H).exp(), draw(*skip)
    more = {"initial_states": draw(B, H, P, N), "dt_limit": LIMIT}
    more = {name: more[name] for name in options}
    size = {"headdim": P} if len(skip) == 1 else {}
    normed = (
        {} if norm is None else {"rmsnorm_weight": draw(D), "rmsnorm_eps": 0.1, "norm_before_gate": norm == "before"}
    )
    out = {"outproj_weight": draw(4, skipped + D), "outproj_bias": draw(4)} if project else {}
    found = ops.mamba_split_conv1d_scan_combined(
        *(zxbcdt, weight, conv_bias, bias, A, d, 4),
        **(more | size | normed | out),
        seq_idx=ids,
        ngroups=G,
        return_final_states=final,
    )
    mlp, z, x, dt = zxbcdt.split([2 * skipped, D, mixed, H], -1)
    x, b, c = convolved(x.mT, weight, conv_bias, ids=ids).mT.split([D, G * N, G * N], -1)
    x, b, c = (t.unflatten(-1, (n, -1)) for t, n in ((x, H), (b, G), (c, G)))
    given = {"D": d, "initial_states": more.get("initial_states")}
    given |= {} if norm else {"z": z.unflatten(-1, (H, P))}
    dt = F.softplus(dt + bias).clamp(*more.get("dt_limit", (0, torch.inf)))
    y, last = by_heads(x, dt, A, b, c, given, {"seq_idx": ids, "return_final_states": True})
    y = y.flatten(-2)
    if norm == "before":
        y = rms(y, normed["rmsnorm_weight"], 0.1, D // G) * F.silu(z)
    elif norm:
        y = rms(y * F.silu(z), normed["rmsnorm_weight"], 0.1, D // G)
    y = torch.cat([F.silu(mlp[..., :skipped]) * mlp[..., skipped:], y], -1)
    y = F.linear(y, out["outproj_weight"], out["outproj_bias"]) if project else y
    return found, (y, last) if final else y


def short(draw, bias=False, ids=None, states=False, activation=None):
    x, weight, more = draw(B, D, L), draw(D, K), {"bias": draw(D)} if bias else {}
    past = {"initial_states": draw(B, D, K - 1)} if states else {}
    held = {"return_final_states": True, "final_states_out": x.new_zeros(B, D, K - 1)} if states else {}
    found = causal_conv1d_fn(x, weight, **more, **past, **held, seq_idx=ids, activation=activation)
    y = convolved(x, weight, *more.values(), past=past.get("initial_states"), ids=ids, silu=activation is not None)
    if not states:
        return found, y
    return (*found, held["final_states_out"]), (y, x[:, :, -3:], x[:, :, -3:])


def one_more(draw, shape=(B, D), size=K, seen=None, rows=None):
    state, x, weight, bias = draw(B if rows is None else 5, D, size), draw(*shape), draw(D, K), draw(D)
    held = state.clone()
    more = {} if seen is None else {"cache_seqlens": seen}
    more |= {} if rows is None else {"conv_state_indices": rows}
    found = causal_conv1d_update(x, held, weight, bias, "silu", **more)
    old, new = state if rows is None else state[rows], x.view(B, D, -1)
    if seen is not None:  # in order, oldest first
        old = torch.stack([one.roll(-int(n), -1) for one, n in zip(old, seen, strict=True)])
    y = convolved(new, weight, bias, old[..., size - K + 1 :]).view(shape)
    kept = torch.cat([old, new], 2)[..., -size:]
    if seen is not None:
        ends = seen + new.shape[2]
        kept = torch.stack([one.roll(int(n), -1) for one, n in zip(kept, ends, strict=True)])
    return (found, held), (y, kept if rows is None else state.index_copy(0, rows, kept))


def normalized(draw, gate="", size=None):
    x, weight, bias = draw(B, L, D), draw(D), draw(D)
    more = {"z": draw(B, L, D), "norm_before_gate": gate == "before"} if gate else {}
    found = rmsnorm_fn(x, weight, bias, **more, eps=0.1, group_size=size)
    inside = x * F.silu(more["z"]) if gate == "after" else x
    y = rms(inside, weight, 0.1, size) + bias
    return found, y * F.silu(more["z"]) if gate == "before" else y


def added(draw, rms_norm=True, second=False, scaled=False, prenorm=False):
    x, residual, weight, bias = draw(B, L, D), draw(B, L, D), draw(D), draw(D)
    more = {"x1": draw(B, L, D), "weight1": draw(D), "bias1": draw(D)} if second else {}
    more |= {"rowscale": draw(B, L)} if scaled else {}
    function = blocks.rms_norm_fn if rms_norm else blocks.layer_norm_fn
    found = function(x, weight, bias, residual, **more, eps=0.1, prenorm=prenorm)
    total = (x + more["x1"] if second else x) * (more["rowscale"][..., None] if scaled else 1) + residual
    ones = torch.ones(D, dtype=torch.float64)
    normalized = rms(total if rms_norm else total - total.mean(-1, keepdim=True), ones, 0.1)
    y = (normalized * weight + bias, *([normalized * more["weight1"] + more["bias1"]] if second else []))
    return found, (*y, total) if prenorm else y


EVERY = ("D", "z", "delta_bias")
ROWS = torch.tensor([3, 1])
CASES = {
    "selective_scan_fn": (scan, {}),
    "selective_scan_fn-groups": (scan, {"keys": "groups", "options": EVERY, "last": True}),
    "selective_scan_fn-shared": (scan, {"options": ("D", "z"), "last": True}),
    "selective_scan_fn-constants": (scan, {"keys": "constants", "options": EVERY, "last": True}),
    "mamba_inner_fn": (inner, {}),
    "mamba_inner_fn-norms": (inner, {"norms": True}),
    "mamba_inner_fn-constants": (inner, {"given": "BC"}),
    "selective_state_update": (decoded, {"heads": False, "tied": False}),
    "selective_state_update-options": (decoded, {"heads": False, "tied": False, "options": ("D", "z", "dt_bias")}),
    "selective_state_update-heads": (decoded, {"options": ("D", "z", "dt_bias")}),
    "selective_state_update-rows": (decoded, {"options": ("D",), "rows": ROWS}),
    "selective_state_update-free": (decoded, {"tied": False, "options": ("z", "dt_bias"), "rows": ROWS}),
    "mamba_chunk_scan_combined": (chunked, {}),
    "mamba_chunk_scan_combined-states": (
        chunked,
        {"options": ("D", "z", "dt_bias", "initial_states"), "return_final_states": True},
    ),
    "mamba_chunk_scan_combined-packed": (
        chunked,
        {"options": ("D", "dt_bias", "initial_states"), "skip": (H, P), "limit": LIMIT, "seq_idx": IDS},
    ),
    "mamba_chunk_scan_combined-offsets": (
        chunked,
        {"options": ("z", "initial_states"), "batch": 1, "cu_seqlens": OFFSETS}
        | {"return_final_states": True, "return_varlen_states": True},
    ),
    "mamba_split_conv1d_scan_combined": (split, {"norm": "after"}),
    "mamba_split_conv1d_scan_combined-gated": (split, {"skipped": 3, "skip": (H, P), "ids": IDS}),
    "mamba_split_conv1d_scan_combined-states": (
        split,
        {"skipped": 2, "norm": "before", "project": False, "options": ("initial_states", "dt_limit"), "final": True},
    ),
    "causal_conv1d_fn": (short, {}),
    "causal_conv1d_fn-states": (short, {"bias": True, "states": True, "activation": "swish"}),
    "causal_conv1d_fn-packed": (short, {"bias": True, "ids": torch.where(IDS == 2, -1, IDS), "activation": "silu"}),
    "causal_conv1d_update": (one_more, {}),
    "causal_conv1d_update-tokens": (one_more, {"shape": (B, D, 2), "size": 6, "rows": ROWS}),
    "causal_conv1d_update-circular": (one_more, {"size": 3, "seen": torch.tensor([7, 2], dtype=torch.int32)}),
    "causal_conv1d_update-around": (one_more, {"shape": (B, D, 6), "size": 5, "seen": torch.tensor([4, 0])}),
    "layer_norm_fn": (added, {"rms_norm": False}),
    "layer_norm_fn-options": (added, {"rms_norm": False, "second": True, "scaled": True, "prenorm": True}),
    "rms_norm_fn": (added, {}),
    "rms_norm_fn-sum": (added, {"prenorm": True, "scaled": True}),
    "rmsnorm_fn": (normalized, {}),
    "rmsnorm_fn-before": (normalized, {"gate": "before", "size": 4}),
    "rmsnorm_fn-after": (normalized, {"gate": "after"}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_of_a_loop(case):
    function, options = CASES[case]
    draw = Drawn()
    both = [one if isinstance(one, tuple) else (one,) for one in function(draw, **options)]
    for found, expected in zip(*both, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    unused = {"allow_unused": True, "materialize_grads": True}
    gradients = [
        torch.autograd.grad(sum(t.sin().sum() for t in side), draw.leaves, retain_graph=True, **unused) for side in both
    ]
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_every_function_has_a_case():
    names = {
        name
        for place in mamba_ssm.PLACES.values()
        for name, one in place.items()
        if inspect.isfunction(one) or isinstance(one, partial)
    }
    names |= {"causal_conv1d_fn", "causal_conv1d_update"}
    assert {case.split("-")[0] for case in CASES} == names - {"selective_scan_ref"}


@pytest.fixture
def installed():
    mamba_ssm.install()
    causal_conv1d.install()
    yield
    causal_conv1d.uninstall()
    mamba_ssm.uninstall()


@pytest.fixture
def imported(monkeypatch):
    """Import a modeling file of transformers anew: it looks for the packages when it is imported."""

    def module(model_type, name):
        package = f"transformers.models.{model_type}"
        path = importlib.util.find_spec(f"{package}.modeling_{model_type}").origin
        spec = importlib.util.spec_from_file_location(f"{package}.{name}", path)
        found = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, found)
        spec.loader.exec_module(found)
        return found

    return module


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 23, "conv_kernel": 3}
CONFIGS = {
    "mamba": MambaConfig(**SIZES, state_size=5, time_step_rank=3, use_bias=True),
    "mamba2": Mamba2Config(**SIZES, state_size=6, head_dim=8, num_heads=4, n_groups=2, chunk_size=4),
}
LAYERS = {
    "mamba": lambda: Mamba(16, 5, 3, dt_rank=3, bias=True, layer_idx=1),
    "mamba2": lambda: Mamba2(16, 6, 3, headdim=8, ngroups=2, layer_idx=1),
}
TOKENS = torch.arange(2 * 11).view(2, 11) * 7 % 23


def build(module, kind):
    torch.manual_seed(0)
    model = getattr(module, f"{kind.capitalize()}ForCausalLM")(CONFIGS[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_of_transformers_computes_the_same(kind, installed, imported):
    with_shims = build(imported(kind, "with_shims"), kind)
    mamba_ssm.uninstall()
    causal_conv1d.uninstall()
    without = build(imported(kind, "without"), kind)
    results = []
    for model in (with_shims, without):
        loss = model.train()(TOKENS, labels=TOKENS).loss  # by the fused function
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            logits = model.eval()(TOKENS).logits
            texts = model.generate(TOKENS[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)
        results.append((loss, gradients, logits, texts))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_packed_rows_of_transformers_keep_their_sequences_apart(installed, imported):
    model = build(imported("mamba2", "packed"), "mamba2").backbone
    ids = torch.tensor([[0] * 4 + [1] * 7], dtype=torch.int32)
    for training in (True, False):
        model.train(training)
        alone = [model(TOKENS[:1, part]).last_hidden_state for part in (slice(4), slice(4, None))]
        packed = model(TOKENS[:1], seq_idx=ids).last_hidden_state
        torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("norm", [nn.LayerNorm, partial(blocks.RMSNorm, eps=0.1)])
def test_blocks_add_before_they_normalize(norm, fused):
    torch.manual_seed(0)
    mixer, x, mlp = partial(Mamba, layer_idx=0), torch.randn(2, 5, 16), partial(nn.Linear, out_features=16)
    made = [blocks.Block(16, mixer, inner, norm, fused) for inner in (nn.Identity, mlp)]
    y, residual = made[0](x)
    (z, last), total = made[1](y, residual), x + y
    mixed = made[1].mixer(made[1].norm(total))
    torch.testing.assert_close(y, made[0].mixer(made[0].norm(x)))
    torch.testing.assert_close(z, made[1].mlp(made[1].norm2(total + mixed)))
    torch.testing.assert_close((residual, last), (x, total + mixed))
    halves = blocks.Block(16, nn.Identity, norm_cls=norm, fused_add_norm=fused, residual_in_fp32=True).bfloat16()
    halves.mixer.forward = lambda y, inference_params: y
    out, residual = halves(x.bfloat16())
    assert (out.dtype, residual.dtype) == (torch.bfloat16, torch.float32)
    states = made[0].allocate_inference_cache(2, 5)
    assert [one.shape for one in states] == [one.shape for one in made[0].mixer.allocate_inference_cache(2, 5)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_layer_loads_weights_and_continues(kind):
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    original = build(module, kind).backbone.layers[1].mixer
    layer = LAYERS[kind]()
    layer.load_state_dict(original.state_dict())
    x = torch.randn(2, 9, 16)
    with torch.no_grad():
        whole = layer(x)
        torch.testing.assert_close(whole, original(x), rtol=1e-4, atol=1e-5)
        params = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
        for begin, end in itertools.pairwise((0, 2, *range(3, 10))):
            params.seqlen_offset = begin
            part = layer(x[:, begin:end], inference_params=params)
            torch.testing.assert_close(part, whole[:, begin:end], rtol=1e-4, atol=1e-5)
    states = layer.allocate_inference_cache(2, 9, dtype=torch.bfloat16)
    assert [(one.shape, one.dtype) for one in states] == [
        (one.shape, torch.bfloat16) for one in params.key_value_memory_dict[1]
    ]


def test_options_of_mamba2():
    # Channels past the scan, one D per channel, limits of the steps, no norm, flat rows, packed rows, half precision.
    torch.manual_seed(0)
    options = {"d_ssm": 16, "D_has_hdim": True, "dt_limit": (0.02, 0.05), "rmsnorm": False, "conv_init": 0.3}
    layer = Mamba2(16, 6, headdim=4, layer_idx=0, bias=True, **options).double()
    assert {name: tuple(one.shape) for name, one in layer.state_dict().items()} == {
        "dt_bias": (4,),
        "A_log": (4,),
        "D": (16,),
        "in_proj.weight": (80, 16),
        "in_proj.bias": (80,),
        "conv1d.weight": (28, 1, 4),
        "conv1d.bias": (28,),
        "out_proj.weight": (16, 32),
        "out_proj.bias": (16,),
    }
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    with torch.no_grad():
        alone = torch.cat([layer(x[:, :3]), layer(x[:, 3:4]), layer(x[:, 4:])], 1)
        torch.testing.assert_close(layer(x, cu_seqlens=OFFSETS), alone)
        flat = torch.cat([x[0], x[0]])
        torch.testing.assert_close(layer(flat, seqlen=7), layer(x)[0].repeat(2, 1))
        params = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
        parts = []
        for begin, end in ((0, 5), (5, 6), (6, 7)):
            params.seqlen_offset = begin
            parts.append(layer(x[:, begin:end], inference_params=params))
        torch.testing.assert_close(torch.cat(parts, 1), layer(x))
        half = layer.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()


def test_the_names_are_found_where_they_were(installed):
    from causal_conv1d.causal_conv1d_interface import (  # pyright: ignore[reportMissingImports]
        causal_conv1d_fn as convolve,
    )
    from mamba_ssm import Mamba as Layer  # pyright: ignore[reportMissingImports]
    from mamba_ssm import selective_scan_fn  # pyright: ignore[reportMissingImports]
    from mamba_ssm.modules.mamba2 import RMSNormGated  # pyright: ignore[reportMissingImports]
    from mamba_ssm.ops.triton.layernorm_gated import RMSNorm  # pyright: ignore[reportMissingImports]

    assert (Layer, convolve, RMSNormGated) == (Mamba, causal_conv1d_fn, RMSNorm)
    assert selective_scan_fn is ops.selective_scan_fn
    assert sys.modules["mamba_ssm"].__version__ >= "2.0.4"  # what transformers requires
    with pytest.raises(ImportError, match="'Mamba3'"):
        from mamba_ssm import Mamba3  # pyright: ignore[reportMissingImports]  # noqa: F401
    with pytest.raises(AttributeError, match=r"'Mamba3'; it has .*Mamba.*from-mamba-ssm.md"):
        sys.modules["mamba_ssm.modules.mamba_simple"].Mamba3  # noqa: B018


def zeros(*shape):
    return torch.zeros(*shape)


def scanned(**changed):
    given = {
        "x": zeros(B, L, H, P),
        "dt": zeros(B, L, H),
        "A": zeros(H),
        "B": zeros(B, L, G, N),
        "C": zeros(B, L, G, N),
    }
    return ops.mamba_chunk_scan_combined(**(given | {"chunk_size": 4} | changed))


def splits(zxbcdt=2 * D + 2 * G * N + H, weight=D + 2 * G * N, **changed):
    fixed = (zeros(B, L, zxbcdt), zeros(weight, K), None, zeros(H), zeros(H), zeros(H), 4)
    return ops.mamba_split_conv1d_scan_combined(*fixed, **({"headdim": P, "ngroups": G} | changed))


def selected(A=(D, N), b=(B, N, L), c=(B, N, L), dtype=torch.float32):
    return ops.selective_scan_fn(zeros(B, D, L), zeros(B, D, L), zeros(*A).to(dtype), zeros(*b), zeros(*c))


def updated(heads=H, groups=G):
    keys = zeros(B, groups, N)
    return ops.selective_state_update(zeros(B, H, P, N), zeros(B, heads, P), zeros(B, H, P), zeros(H, P, N), keys, keys)


def short_of(**changed):
    return causal_conv1d_fn(zeros(B, D, L), zeros(D, K), **changed)


PARAMS = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=3)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: selected(dtype=torch.complex64), NotImplementedError, "complex A"),
        (lambda: selected(b=(D, N)), NotImplementedError, r"\(D, N\) for only one of B and C"),
        (lambda: selected(b=(B, G, N, L)), ValueError, "2 and 1 groups"),
        (lambda: scanned(state_dtype=torch.bfloat16), NotImplementedError, "state_dtype=torch.bfloat16"),
        (lambda: scanned(return_varlen_states=True), ValueError, "needs cu_seqlens"),
        (lambda: scanned(seq_idx=IDS + 1, initial_states=zeros(B, H, P, N)), ValueError, "sequence 0"),
        (lambda: scanned(seq_idx=IDS[:, 1:]), ValueError, r"seq_idx must be \(2, 7\)"),
        (lambda: scanned(cu_seqlens=OFFSETS), ValueError, r"cu_seqlens=\[0, 3, 4, 7\].*single row"),
        (lambda: splits(headdim=None), ValueError, r"headdim=None .*D \(4,\)"),
        (lambda: Mamba(16, dt_rank="half"), ValueError, "dt_rank='half' must be 'auto'"),
        (lambda: splits(zxbcdt=40), ValueError, r"zxbcdt \(2, 7, 40\).*2 groups"),
        (lambda: splits(outproj_bias=zeros(3)), ValueError, "needs outproj_weight"),
        (lambda: updated(heads=3), ValueError, r"x \(2, 3, 3\)"),
        (lambda: updated(groups=3), ValueError, "3 groups"),
        (lambda: short_of(activation="gelu"), NotImplementedError, "activation .*'gelu'"),
        (lambda: short_of(seq_idx=IDS, return_final_states=True), ValueError, "seq_idx without"),
        (lambda: short_of(final_states_out=zeros(B, D, 3)), ValueError, "return_final_states=True"),
        (lambda: short_of(initial_states=zeros(B, D, 5)), ValueError, "hold 3 inputs, not 5"),
        (lambda: rmsnorm_fn(zeros(B, 6), zeros(6), None, group_size=4), ValueError, "group_size=4 .*6"),
        (lambda: Mamba(8, dt_init="zeros"), NotImplementedError, "dt_init .*'zeros'"),
        (lambda: Mamba(8, layer_idx=0)(zeros(1, 2, 8), PARAMS), ValueError, r"one token .*\(1, 2, 8\)"),
        (lambda: Mamba(8)(zeros(1, 1, 8), PARAMS), ValueError, "needs layer_idx"),
        (lambda: Mamba2(8, process_group=object()), NotImplementedError, "process_group"),
        (lambda: Mamba2(8, headdim=5), ValueError, "16 inner channels .*headdim=5"),
        (lambda: Mamba2(8, headdim=8, A_init_range=(0, 1)), ValueError, r"A_init_range=\(0, 1\)"),
        (
            lambda: Mamba2(8, headdim=8, layer_idx=0)(zeros(1, 7, 8), None, None, OFFSETS, PARAMS),
            NotImplementedError,
            "cu_seqlens .*inference_params",
        ),
    ],
)
def test_what_is_not_carried_over_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()
