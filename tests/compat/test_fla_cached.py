"""Checkpoints of flash-linear-attention whose layers keep all keys and values."""

import pytest
import torch
import torch.nn.functional as F

from fla_laws import build, close, convolved, rms, shared_tests
from longspan.compat.fla.models.mixer import Call

SHARED = {"num_heads": 4, "num_kv_heads": 2}
WIDE = SHARED | {"qkv_bias": True, "qk_norm": True}
CASES = {
    "forgetting": ("forgetting_transformer", {"num_heads": 2}),
    "forgetting-shared": ("forgetting_transformer", WIDE | {"use_output_gate": True}),
    "path": ("path_attn", {"num_heads": 2}),
    "path-shared": ("path_attn", SHARED | {"use_low_rank_w": False, "use_w_shortconv": False}),
    "moba": ("moba", {"num_heads": 2, "moba_chunk_size": 4, "moba_topk": 3}),
    "moba-shared": ("moba", WIDE | {"moba_chunk_size": 5, "moba_topk": 2, "use_output_gate": True}),
    "nsa": ("nsa", SHARED | {"head_dim": 8, "block_size": 3, "block_counts": 4, "window_size": 5}),
    "nsa-wide": (
        "nsa",
        SHARED | {"head_dim": 12, "qkv_bias": True, "block_size": 4, "block_counts": 3, "window_size": 2},
    ),
    "stick_breaking": ("stickbreaking_attn", {"num_heads": 2, "use_cache": True}),
    "stick_breaking-shared": ("stickbreaking_attn", WIDE | {"attend_current": True, "use_cache": True}),
}
LATENT = {"num_heads": 4, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "qk_head_dim": None}
CASES |= {
    "transformer": ("transformer", {"num_heads": 2}),
    "transformer-shared": ("transformer", WIDE | {"window_size": 5}),
    "bitnet": ("bitnet", SHARED | {"window_size": 5}),
    "deltaformer": ("deltaformer", {"num_heads": 2, "use_cache": True}),
    "deltaformer-wide": ("deltaformer", {"num_heads": 4, "qkv_bias": True, "qk_norm": True, "use_cache": True}),
    "mla": ("mla", LATENT | {"v_head_dim": 8, "q_lora_rank": 12}),
    "mla-window": ("mla", LATENT | {"v_head_dim": 10, "q_lora_rank": None, "window_size": 5}),
}
REFUSED = [
    ("transformer", {"rope_theta": None}, "rope_theta=None"),
    ("deltaformer", {"num_kv_heads": 2}, "num_kv_heads=2 must be num_heads=8"),
    ("mla", {"qk_head_dim": 7}, "qk_head_dim=7 must be qk_nope_head_dim [+] qk_rope_head_dim = 192"),
    ("mla", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters"),
    ("forgetting_transformer", {"window_size": 8}, "window_size=8 must be null"),
    ("moba", {"window_size": 8}, "window_size=8 must be null"),
    ("moba", {"rope_theta": None}, "rope_theta=None"),
    ("nsa", {"window_size": None}, "window_size=None must be at least 1"),
    ("nsa", {"block_counts": 2}, "block_counts=2 must be at least 3"),
    ("path_attn", {"use_forget_gate": True}, "use_forget_gate must be false"),
]
test_laws, test_saved_and_loaded, test_unsupported_options_are_refused = shared_tests(CASES, REFUSED)


def linear(project, x):
    return F.linear(x, project.weight, project.bias)


def projected(layer, x, options):
    """Queries, keys and values (N,H,D), those of shared heads repeated, and the number of repeats."""
    count = options["num_heads"]
    size = options.get("head_dim", 32 // count)
    q, k, v = (linear(getattr(layer, f"{name}_proj"), x).unflatten(-1, (-1, size)) for name in "qkv")
    return q, k, v, count // k.shape[1]


def turned(x):
    """Rotary positions of x (N,H,D)."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
    pair = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([pair.real, pair.imag], -1)


def attended(q, k, v, seen, more=0.0):
    """Softmax over seen pairs (N,N) or (H,N,N): q, k, v (N,H,D) -> (N,H,D), 0 where nothing is seen."""
    logits = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5 + more
    p = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("hij,jhd->ihd", p, v)


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


def forgetting_transformer(layer, x, options):
    q, k, v, repeats = projected(layer, x, options)
    if options.get("qk_norm"):
        q, k = (rms(t, 1e-5, norm.weight.view(t.shape[1:])) for t, norm in ((q, layer.q_norm), (k, layer.k_norm)))
    sums = F.logsigmoid(linear(layer.f_proj, x)).cumsum(0).T
    k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
    o = attended(q, k, v, causal(len(x)), sums[:, :, None] - sums[:, None]).flatten(1)
    return o * linear(layer.g_proj, x).sigmoid() if options.get("use_output_gate") else o


def path_attn(layer, x, options):
    q, k, v, repeats = projected(layer, x, options)
    if options.get("use_low_rank_w", True):
        w = x @ layer.w_proj[0].weight.T @ layer.w_proj[1].weight.T
    else:
        w = x @ layer.w_proj.weight.T
    if options.get("use_w_shortconv", True):
        w = F.silu(convolved(w, layer.w_conv1d.weight))
    w = w.view_as(k)
    w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    beta = 2 * linear(layer.bt_proj, x).sigmoid()
    rows, keys = [], k.new_zeros(0, *k.shape[1:])
    for t in range(len(x)):
        keys = keys - beta[t, :, None] * (keys * w[t]).sum(-1, keepdim=True) * w[t]
        keys = torch.cat([keys, k[t : t + 1]])
        wide, values = (y.repeat_interleave(repeats, 1) for y in (keys, v[: t + 1]))
        p = (torch.einsum("hd,jhd->hj", q[t], wide) / q.shape[-1] ** 0.5).softmax(-1)
        rows.append(torch.einsum("hj,jhd->hd", p, values))
    return torch.stack(rows).flatten(1)


def moba(layer, x, options):
    q, k, v, repeats = projected(layer, x, options)
    if options.get("qk_norm"):
        q, k = rms(q, 1e-5, layer.q_norm.weight), rms(k, 1e-5, layer.k_norm.weight)
    k, v = (t.repeat_interleave(repeats, 1) for t in (turned(k), v))
    q, size, top, n = turned(q), options["moba_chunk_size"], options["moba_topk"], len(x)
    seen = torch.zeros(q.shape[1], n, n, dtype=torch.bool)
    for i in range(n):
        own = i // size
        means = [k[u * size : (u + 1) * size].mean(0) for u in range(own)]
        fits = torch.stack([(q[i] * mean).sum(-1) for mean in means], -1) if own else q.new_zeros(q.shape[1], 0)
        seen[:, i, own * size : i + 1] = True
        for h, u in torch.nonzero(fits >= fits.sort(-1, descending=True).values[:, : top - 1][:, -1:]) if own else ():
            seen[h, i, u * size : (u + 1) * size] = True
    o = rms(attended(q, k, v, seen), 1e-6, layer.o_norm.weight)
    if options.get("use_output_gate"):
        first, second = layer.g_proj
        o = o * (x @ first.weight.T @ second.weight.T).view_as(o).sigmoid()
    return o.flatten(1)


def nsa(layer, x, options):
    q, k, v, repeats = projected(layer, x, options)
    k, v = (t.repeat_interleave(repeats, 1) for t in (turned(k), v))
    q, size, n = turned(q), options["block_size"], len(x)
    at, whole = torch.arange(n), n // size
    means = [t[: whole * size].view(whole, size, *t.shape[1:]).mean(1) for t in (k, v)]
    over = (torch.arange(whole) + 1) * size - 1 <= at[:, None]
    first = attended(q, *means, over)
    logits = torch.einsum("ihd,jhd->hij", q, means[0]) / q.shape[-1] ** 0.5
    shares = logits.masked_fill(~over, -torch.inf).softmax(-1).nan_to_num().unflatten(0, (-1, repeats)).sum(1)
    seen = torch.zeros(k.shape[1], n, n, dtype=torch.bool)
    for g, i in torch.cartesian_prod(torch.arange(len(shares)), at).tolist():
        own = i // size
        always = {0, own, max(own - 1, 0)}
        others = sorted(set(range(own)) - always, key=lambda u, g=g, i=i: -shares[g, i, u])
        for u in [*always, *others[: max(0, options["block_counts"] - len(always))]]:
            seen[g * repeats : (g + 1) * repeats, i, u * size : (u + 1) * size] = True
    second = attended(q, k, v, seen & causal(n))
    third = attended(q, k, v, banded(n, options["window_size"]))
    gates = linear(layer.g_proj, x).view(n, -1, 3).sigmoid()
    return sum(gates[..., b, None] * part for b, part in enumerate((first, second, third))).flatten(1)


def stickbreaking_attn(layer, x, options):
    q, k, v, repeats = projected(layer, x, options)
    if options.get("qk_norm"):
        q, k = rms(q, 1e-6, layer.q_norm.weight), rms(k, 1e-6, layer.k_norm.weight)
    k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
    shares = (torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5).sigmoid()
    rows = []
    for i in range(len(x)):
        left, o = torch.ones(q.shape[1], 1, dtype=x.dtype), torch.zeros_like(v[0])
        for j in range(i if options.get("attend_current") else i - 1, -1, -1):
            o, left = o + left * shares[:, i, j, None] * v[j], left * (1 - shares[:, i, j, None])
        rows.append(o)
    return torch.stack(rows).flatten(1)


def banded(n, window):
    at = torch.arange(n)
    return causal(n) & (at[:, None] - at < (window or n))


def transformer(layer, x, options):
    q, k, v, repeats = projected(layer, x, options)
    if options.get("qk_norm"):
        q, k = rms(q, 1e-5, layer.q_norm.weight), rms(k, 1e-5, layer.k_norm.weight)
    k, v = (t.repeat_interleave(repeats, 1) for t in (turned(k), v))
    return attended(turned(q), k, v, banded(len(x), options.get("window_size"))).flatten(1)


def bit(project, x):
    """Activations of 8 bits times ternary weights."""
    x = rms(x, 1e-8, project.norm.weight)
    levels, size = 127 / x.abs().max(-1, keepdim=True).values, project.weight.abs().mean()
    near = torch.arange(-1.0, 2.0, dtype=x.dtype)
    ternary = near[(project.weight[..., None] / size - near).abs().argmin(-1)] * size
    return (x * levels).round() / levels @ ternary.T


def bitnet(layer, x, options):
    q, k, v = (bit(getattr(layer, f"{name}_proj"), x).unflatten(-1, (-1, 8)) for name in "qkv")
    k, v = (t.repeat_interleave(2, 1) for t in (turned(k), v))
    o = attended(turned(q), k, v, banded(len(x), options["window_size"])).flatten(1)
    # The test multiplies by the weights of the output.
    return bit(layer.o_proj, o) @ torch.linalg.inv(layer.o_proj.weight.T)


def deltaformer(layer, x, options):
    q, k, v, _ = projected(layer, x, options)
    if options.get("qk_norm"):
        q, k = rms(q, 1e-5, layer.q_norm.weight), rms(k, 1e-5, layer.k_norm.weight)
    q, k, beta, u = turned(q), turned(k), linear(layer.b_proj, x), v[:0]
    for t in range(len(x)):
        logits = torch.einsum("hd,jhd->hj", q[t], k[:t]) / q.shape[-1] ** 0.5
        before = torch.einsum("hj,jhd->hd", logits.softmax(-1), u)
        u = torch.cat([u, (v[t] - beta[t, :, None] * before)[None]])
    return attended(q, k, u, causal(len(x))).flatten(1)


def mla(layer, x, options):
    def through(part):
        if isinstance(part, torch.nn.Linear):
            return x @ part.weight.T
        first, norm, second = part
        return rms(x @ first.weight.T, 1e-5, norm.weight) @ second.weight.T

    count, plain, value = options["num_heads"], options["qk_nope_head_dim"], options["v_head_dim"]
    q = through(layer.q_proj).view(len(x), count, -1)
    k, v = through(layer.kv_proj).view(len(x), count, -1).split([plain, value], -1)
    shared = turned((x @ layer.k_rope.weight.T)[:, None]).expand(-1, count, -1)
    q, k = torch.cat([q[..., :plain], turned(q[..., plain:])], -1), torch.cat([k, shared], -1)
    return attended(q, k, v, banded(len(x), options.get("window_size"))).flatten(1)


@pytest.mark.parametrize("tokens", [8, 80])
@pytest.mark.parametrize("case", CASES)
def test_layers_equal_their_definition(case, tokens):
    name, options = CASES[case]
    layer = build(name, **options).double().model.layers[1].attn
    x = torch.randn(tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(layer(x[None], None, Call())[0][0], globals()[name](layer, x, options) @ layer.o_proj.weight.T, 1e-9)
