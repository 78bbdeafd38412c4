"""Models of flash-linear-attention: the laws of each type, its files and errors, and layers equal to a definition.

Most layers are compared with the original's, in test_fla_kernels.py; here are those that it cannot run.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from fla_laws import IDS, LAWS, build, close, convolved, named_early, rms, saved
from fla_original import CASES, SMALL
from longspan.compat import fla
from longspan.compat.fla.models.mixer import Call
from support.mechanisms import pairs_of_tokens, three_terms


def made(case):
    name, options = CASES[case]
    return build(name, **options)


MAMBA2 = {"intermediate_size": None, "head_dim": 8}
MAMBA3 = {"intermediate_size": None, "head_dim": 16, "state_size": 8}
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
    ("delta_net", {"num_heads": 2, "qk_norm": "max"}, "max"),
    ("gated_deltanet", SMALL | {"output_gate_activation": "tanh"}, "tanh"),
    ("gated_deltanet", SMALL | {"num_v_heads": 3}, "3"),
    ("kda", SMALL | {"lower_bound": 1.0}, "1.0"),
    ("comba", SMALL | {"expand_v": 0.3}, "expand_v"),
    ("gla", {"use_gv": True}, "use_gv"),
    ("gla", {"attnres_block_size": 2}, "attnres_block_size=2"),
    ("gla", {"new_option": 3}, "new_option=3"),
    ("hgrn", {"expand_ratio": 2}, "expand_ratio=2 must be 1 with use_lower_bound"),
    ("log_linear_mamba2", MAMBA2 | {"D_has_hdim": True}, "D_has_hdim=True must be False"),
    ("log_linear_mamba2", MAMBA2 | {"norm_before_gate": True}, "norm_before_gate=True must be False"),
    ("log_linear_mamba2", MAMBA2 | {"rmsnorm": False}, "rmsnorm=False must be True"),
    ("log_linear_mamba2", MAMBA2 | {"dt_limit": [0.0, 1.0]}, "dt_limit="),
    ("log_linear_mamba2", MAMBA2 | {"num_heads": 3}, r"expand \* hidden_size = 64"),
    ("log_linear_mamba2", MAMBA2 | {"n_groups": 0}, "n_groups=0 must be a positive"),
    ("log_linear_mamba2", MAMBA2 | {"n_groups": 3}, "n_groups=3 must divide 8 heads"),
    ("log_linear_mamba2", MAMBA2 | {"intermediate_size": 48}, "intermediate_size=48"),
    ("log_linear_mamba2", MAMBA2 | {"attnres_block_size": 2}, "attnres_block_size=2"),
    ("mamba3", MAMBA3 | {"is_mimo": True}, "is_mimo=True must be False"),
    ("mamba3", MAMBA3 | {"rope_fraction": 0.75}, "rope_fraction=0.75 must be 0.5 or 1.0"),
    ("mamba3", MAMBA3 | {"state_size": 3}, "state_size=3 with rope_fraction=0.5"),
    ("mamba3", MAMBA3 | {"A_floor": 0.0}, "A_floor=0.0 must be positive"),
    ("mamba3", MAMBA3 | {"num_heads": 3}, r"expand \* hidden_size = 64"),
    ("mamba3", MAMBA3 | {"head_dim": 24}, "head_dim=24"),
    ("mamba3", MAMBA3 | {"n_groups": 3}, "n_groups=3 must divide 4 heads"),
    ("mamba3", MAMBA3 | {"attn": {"layers": [0], "num_heads": 2}}, "attn=.* must be None"),
    ("mamba3", MAMBA3 | {"intermediate_size": 48}, "intermediate_size=48"),
    ("mamba3", MAMBA3 | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("precond_gated_deltanet", {"squash_x": 3.0}, "squash_x"),
    ("precond_kda", {"squash_eps": 0.1}, "squash_eps"),
    ("precond_kda", {"safe_gate": True}, "lower_bound"),
    ("rwkv7", {"attn": {"layers": [1], "num_heads": 4}}, "attn=.* must be null"),
    ("rwkv7", {"value_dim": [32, 64, 32], "head_dim": 16}, "both 32 and 64"),
    ("rwkv7", {"value_dim": [32], "head_dim": 16}, "1 entries for num_hidden_layers=3"),
    ("rwkv7", {"head_dim": 24}, "1 heads of 24 channels"),
    ("rwkv7", {"head_dim": None}, "head_dim and num_heads"),
    ("rwkv7", {"head_dim": 16, "hidden_act": "swish"}, "hidden_act='swish' must be 'sqrelu'"),
    ("rwkv6", {"num_heads": 5}, "num_heads=5"),
    ("rwkv6", {"elementwise_affine": False}, "elementwise_affine"),
    ("gsa", {"feature_map": "elu"}, "feature_map"),
    ("gsa", {"expand_v": 2.0}, "expand_v"),
    ("raven", {"topk": 65}, "topk"),
    ("raven", {"router_type": "tree"}, "router_type"),
    ("mesa_net", {"lambda_lower_bound": 0.0}, "lambda_lower_bound"),
    ("mesa_net", {"max_cg_step_decoding": 5}, "max_cg_step_decoding"),
    ("retnet", {"feature_map": "tanh"}, "feature_map"),
    ("linear_attn", {"feature_map": "cosine"}, "feature_map"),
    ("hgrn2", {"expand_ratio": 24}, "heads of 24"),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("case", CASES)
def test_laws(law, case):
    law(made(case))


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded(case, tmp_path):
    saved(made(case), tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_unsupported_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)


@pytest.mark.parametrize("case", ["log_linear", "mamba3"])
def test_the_early_name_of_the_embedding_is_read(case, tmp_path):
    named_early(made(case), tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path):
    model = build("gla", num_heads=2)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:, :-1].clone())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        fla.load(tmp_path)


def test_unknown_types_are_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "cyclic_flow_attention"}')
    with pytest.raises(ValueError, match="rotating slots"):
        fla.load(tmp_path)


def test_auto_classes_find_the_model(tmp_path):
    from transformers import AutoModelForCausalLM

    model = build("gla", num_heads=2)
    model.save_pretrained(tmp_path)
    fla.register()
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("case", [case for case in CASES if "log_linear" in case])
def test_the_levels_that_a_text_has_learn(case):
    """23 tokens have 6 of 15 levels."""
    model = made(case).train()
    model(IDS, labels=IDS).loss.backward()
    assert model.backbone.layers[0].mixer.L.grad.ne(0).any(0).tolist() == [True] * 6 + [False] * 9


def test_a_router_draws_noise_in_training_only():
    model = build("raven", num_heads=2, num_slots=6, topk=2)
    layer, x = model.model.layers[1].attn, torch.randn(1, 9, 32)
    assert layer.shares(x).equal(layer.shares(x))
    layer.train()
    assert not layer.shares(x).equal(layer.shares(x))


# Definitions of layers, for x (N,hidden)


def heads_of(layer, x, options):
    """Queries, keys and values (N,H,D), those of shared heads repeated, and the number of repeats."""
    count = options["num_heads"]
    size = options.get("head_dim", 32 // count)
    parts = (getattr(layer, f"{name}_proj") for name in "qkv")
    q, k, v = (F.linear(x, part.weight, part.bias).unflatten(-1, (-1, size)) for part in parts)
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


def bit(project, x):
    """Activations of 8 bits times ternary weights."""
    x = rms(x, 1e-8, project.norm.weight)
    levels, size = 127 / x.abs().max(-1, keepdim=True).values, project.weight.abs().mean()
    near = torch.arange(-1.0, 2.0, dtype=x.dtype)
    ternary = near[(project.weight[..., None] / size - near).abs().argmin(-1)] * size
    return (x * levels).round() / levels @ ternary.T


def bitnet(layer, x, options):
    q, k, v = (bit(getattr(layer, f"{name}_proj"), x).unflatten(-1, (-1, 8)) for name in "qkv")
    k, v, at = *(t.repeat_interleave(2, 1) for t in (turned(k), v)), torch.arange(len(x))
    away = at[:, None] - at
    return bit(layer.o_proj, attended(turned(q), k, v, (away >= 0) & (away < options["window_size"])).flatten(1))


def deltaformer(layer, x, options):
    q, k, v, _ = heads_of(layer, x, options)
    if options.get("qk_norm"):
        q, k = rms(q, 1e-5, layer.q_norm.weight), rms(k, 1e-5, layer.k_norm.weight)
    q, k, beta, u = turned(q), turned(k), F.linear(x, layer.b_proj.weight, layer.b_proj.bias), v[:0]
    for t in range(len(x)):
        logits = torch.einsum("hd,jhd->hj", q[t], k[:t]) / q.shape[-1] ** 0.5
        before = torch.einsum("hj,jhd->hd", logits.softmax(-1), u)
        u = torch.cat([u, (v[t] - beta[t, :, None] * before)[None]])
    causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    return attended(q, k, u, causal).flatten(1) @ layer.o_proj.weight.T


def moba(layer, x, options):
    q, k, v, repeats = heads_of(layer, x, options)
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
    return o.flatten(1) @ layer.o_proj.weight.T


def stickbreaking_attn(layer, x, options):
    q, k, v, repeats = heads_of(layer, x, options)
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
    return torch.stack(rows).flatten(1) @ layer.o_proj.weight.T


def projected(layer, x, names, conv, activation=F.silu):
    found = []
    for name in names:
        y = x @ getattr(layer, f"{name}_proj").weight.T
        found.append(activation(convolved(y, getattr(layer, f"{name}_conv1d").weight)) if conv else y)
    return found


def mesa_net(layer, x, options):
    count, floor, rows = options["num_heads"], options.get("lambda_lower_bound", 0.25), []
    q, k = (t.view(len(x), count, -1) for t in projected(layer, x, "qk", True))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    v = (x @ layer.v_proj.weight.T).view_as(q)
    decay, beta = (F.linear(x, project.weight, project.bias).sigmoid() for project in (layer.a_proj, layer.b_proj))
    ridge = torch.diag_embed((F.softplus(layer.lambda_params) + floor).view(count, -1))
    first, second = 0.0, 0.0
    for t in range(len(x)):
        write = beta[t, :, None] * k[t]
        first = decay[t, :, None, None] * first + write[..., None] * k[t][:, None]
        second = decay[t, :, None, None] * second + write[..., None] * v[t][:, None]
        rows.append((torch.linalg.solve(first + ridge, q[t])[:, None] @ second)[:, 0])
    o = rms(torch.stack(rows), 1e-6, layer.o_norm.weight)
    if options.get("use_output_gate"):
        o = o * F.silu(x @ layer.g_proj.weight.T).view_as(o)
    return o.flatten(1) @ layer.o_proj.weight.T


def abc(layer, x, options):
    count, rows = options["num_heads"], []
    q, k, v = (t.view(len(x), count, -1) for t in projected(layer, x, "qkv", options.get("use_short_conv")))
    if options.get("use_rope", True):
        q, k = turned(q), turned(k)
    weights = (x @ layer.s_proj.weight.T).view(len(x), count, -1).clamp(-32, 32)
    for t in range(len(x)):
        shares = weights[: t + 1].softmax(0)
        keys, values = (torch.einsum("nhm,nhd->hmd", shares, y[: t + 1]) for y in (k, v))
        scores = torch.einsum("hmd,hd->hm", keys, q[t]) / q.shape[-1] ** 0.5
        rows.append(torch.einsum("hm,hmd->hd", scores.softmax(-1), values))
    o = rms(torch.stack(rows), 1e-6, layer.g_norm.weight)
    return (o * F.silu(x @ layer.g_proj.weight.T).view_as(o)).flatten(1) @ layer.o_proj.weight.T


def lightnet(layer, x, options):
    q, k, v = projected(layer, x, "qkv", options.get("use_short_conv", False), activation=lambda y: y)
    q, k, v = (t.view(len(x), layer.heads, -1) for t in (F.silu(q), k, v))
    rows = []
    for t in range(len(x)):
        weights = k[: t + 1].softmax(0)
        state = torch.einsum("nhd,nhe->hde", weights, v[: t + 1])
        rows.append(torch.einsum("hde,hd->he", state, q[t]) / q.shape[-1] ** 0.5)
    gate = F.silu(x @ layer.g_proj[0].weight.T @ layer.g_proj[1].weight.T)
    return (rms(torch.stack(rows).flatten(1), 1e-6, layer.g_norm.weight) * gate) @ layer.o_proj.weight.T


def log_linear_mamba2(layer, x, options):
    """The sum over pairs of tokens."""
    tokens, options = len(x), {"n_groups": 1, "expand": 2, "norm_eps": 1e-5} | options
    width, groups, keys = options["expand"] * 32, options["n_groups"], options["n_groups"] * options["state_size"]
    count = width // options["head_dim"]
    z, mixed, dt, level = (x @ layer.in_proj.weight.T + (layer.in_proj.bias if options.get("use_bias") else 0)).split(
        [width, width + 2 * keys, count, 15 * count], -1
    )
    mixed = convolved(mixed, layer.conv1d.weight)
    mixed = F.silu(mixed if layer.conv1d.bias is None else mixed + layer.conv1d.bias)
    v, b, c = mixed.split([width, keys, keys], -1)
    v = v.view(tokens, count, -1)
    b, c = (t.view(tokens, groups, -1).repeat_interleave(count // groups, 1) for t in (b, c))
    dt = F.softplus(dt + layer.dt_bias)
    weight = F.softplus(layer.L * level.view(tokens, count, 15))
    given = (t[None] for t in (v, b, c, dt))
    y = pairs_of_tokens(*given, -layer.A_log.exp(), lambda t, s: weight[t, :, (t ^ s).bit_length()])[0]
    y = y + layer.D[:, None] * v
    y = (y.flatten(1) * F.silu(z)).view(tokens, groups, -1)
    y = (y / (y.square().mean(-1, keepdim=True) + options["norm_eps"]).sqrt()).flatten(1) * layer.norm.weight
    return y @ layer.out_proj.weight.T + (layer.out_proj.bias if options.get("use_bias") else 0)


def mamba3(layer, x, options):
    """``three_terms`` of what the weights make of x."""
    defaults = {"n_groups": 1, "expand": 2, "norm_eps": 1e-5, "rope_fraction": 0.5, "A_floor": 1e-4}
    options = defaults | options
    width, size, keys, groups = options["expand"] * 32, options["head_dim"], options["state_size"], options["n_groups"]
    count, pairs = width // size, int(keys * options["rope_fraction"]) // 2
    mixed = F.linear(x, layer.in_proj.weight, layer.in_proj.bias)
    z, v, b, c, dt, rate, trap, angle = mixed.split(
        [width, width, groups * keys, groups * keys, count, count, count, pairs], -1
    )
    dt = F.softplus(dt + layer.dt_bias)
    decay = torch.exp(torch.clamp(-F.softplus(rate), max=-options["A_floor"]) * dt)
    trap = trap.sigmoid()
    theta = (math.pi * dt[..., None] * angle.tanh()[:, None]).cumsum(0)

    def prepared(t, norm, bias):
        t = F.rms_norm(t.unflatten(-1, (groups, keys)), (keys,), norm.weight, options["norm_eps"])
        return t.repeat_interleave(count // groups, 1) + bias[:, 0]

    k, q = prepared(b, layer.B_norm, layer.B_bias), prepared(c, layer.C_norm, layer.C_bias)
    v = v.unflatten(-1, (count, size))
    y = three_terms(*(t[None] for t in (q, k, v, theta, decay, dt, trap)))[0] + layer.D[:, None] * v
    if options.get("is_outproj_norm"):
        y = F.rms_norm(y, (size,), None, options["norm_eps"]) * layer.norm.weight.view(count, size)
    return F.linear(y.flatten(1) * F.silu(z), layer.out_proj.weight, layer.out_proj.bias)


DEFINED = (abc, bitnet, deltaformer, lightnet, log_linear_mamba2, mamba3, mesa_net, moba, stickbreaking_attn)


@pytest.mark.parametrize("tokens", [8, 80])
@pytest.mark.parametrize("case", [case for case, (name, _) in CASES.items() if name in {f.__name__ for f in DEFINED}])
def test_layers_equal_their_definition(case, tokens):
    name, options = CASES[case]
    layer = build(name, **options).double().model.layers[1]
    layer = layer.mixer if hasattr(layer, "mixer") else layer.attn
    x = torch.randn(tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(layer(x[None], None, Call())[0][0], globals()[name](layer, x, options), 1e-9)
