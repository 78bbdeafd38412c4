"""Model types whose recurrence is a scan by channel: kernels, padding at either end, and lengths."""

import pytest
import torch

from hybrids import MAMBA1, SCANS, accelerated, far, file, halved, judge, model, served, tokens
from longspan.compat import transformers as on_cpu
from longspan.compat.transformers import running, rwkv
from longspan.ops.native import build

pytestmark = pytest.mark.usefixtures("restored")


@pytest.mark.parametrize("kind", SCANS)
def test_native_kernels_serve_training_and_steps(kind):
    served(kind)
    if build.loaded("scan/selective") is None:
        pytest.skip("no native kernels here")
    made, x = model(kind), tokens(2, 11)
    on_cpu.accelerate(made)
    made(x, labels=x, use_cache=False).loss.backward()
    made.generate(x, max_new_tokens=5, do_sample=False, pad_token_id=0)
    found = on_cpu.status().functions[kind]
    assert sum(n for by in found.values() for n in by.values()) >= 6
    assert all(what.startswith(("native (", "the decode engine")) for by in found.values() for what in by)


@pytest.mark.parametrize("kind", SCANS)
def test_half_precision_trains_as_near_to_float64_as_the_original_code(kind):
    served(kind)
    made, x = halved(model(kind), torch.bfloat16), tokens(2, 40)
    exact = judge(kind, made)
    exact(x, labels=x, use_cache=False).loss.backward()
    right = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    errors = []
    for ours in (False, True):
        if ours:
            on_cpu.accelerate(made)
        made.zero_grad()
        made(x, labels=x, use_cache=False).loss.backward()
        grad = torch.cat([p.grad.double().flatten() for p in made.parameters() if p.grad is not None])
        errors.append(float((grad - right).norm() / right.norm()))
    assert errors[1] < 1.15 * errors[0]


def averaged(w, u, k, v, state):
    """RWKV-4 token by token, in float64, by its definition: weighted averages of the values so far."""
    w, u, k, v = (t.double() for t in (w, u, k, v))
    num, den = (t.double() * state[2].double().exp() for t in state[:2])
    out = []
    for t in range(k.shape[1]):
        own = (u + k[:, t]).exp()
        out.append((num + own * v[:, t]) / (den + own))
        decay = (-w.exp()).exp()
        num, den = decay * num + k[:, t].exp() * v[:, t], decay * den + k[:, t].exp()
    return torch.stack(out, 1), num, den


@pytest.mark.parametrize("n", [2, 8, 80, 600])
def test_averages_are_those_of_a_loop_in_float64(n):
    """With decays from 1e-3 to 20 a token, and keys whose exponents float32 cannot hold unless they are scaled."""
    torch.manual_seed(n)
    k, v = torch.randn(2, n, 12) * 12, torch.randn(2, n, 12)
    w, u = torch.linspace(-7.0, 3.0, 12), torch.randn(12)
    state = torch.randn(2, 12), torch.rand(2, 12) + 0.1, torch.randn(2, 12)
    leaves = [t.requires_grad_() for t in (w, u, k, v)]
    ours, last = rwkv.average(w, u, k, v, state)
    wanted, num, den = averaged(w, u, k, v, state)
    assert far(ours, wanted) < 1e-6
    scale = last[2].double().exp()
    assert float((last[0] * scale - num).abs().div(den).detach().max()) < 1e-5
    assert float((last[1] * scale - den).abs().div(den).detach().max()) < 1e-5
    weight = torch.randn(2, n, 12)
    found, right = (torch.autograd.grad((o * weight).sum(), leaves) for o in (ours, wanted))
    largest = max(float(grad.abs().max()) for grad in right)
    for one, exact in zip(found, right, strict=True):
        assert float((one - exact).abs().max()) < 2e-6 * largest


@pytest.mark.parametrize("packed", [False, True])
def test_the_running_maximum_is_that_of_a_loop(packed):
    torch.manual_seed(0)
    i, f, before = torch.randn(2, 50, 3) * 9, -torch.rand(2, 50, 3) * 9, torch.randn(2, 3)
    starts = torch.zeros(2, 50, dtype=torch.bool)
    if packed:
        starts[0, 7] = starts[0, 8] = starts[1, 33] = True
    m, previous = running.largest(i, f, before, starts if packed else None, -4.0)
    at = before.double()
    for t in range(50):
        at = torch.where(starts[:, t, None], torch.full_like(at, -4.0), at)
        assert far(previous[:, t], at) < 1e-12
        at = torch.maximum(at + f[:, t].double(), i[:, t].double())
        assert far(m[:, t], at) < 1e-12


def test_caches_of_recurrent_gemma_are_independent():
    """Its original keeps one state per layer, which the next prompt finds."""
    from transformers import DynamicCache

    made, (x, y) = accelerated("recurrent_gemma"), tokens(2, 1, 20)
    with torch.no_grad():
        one, other = DynamicCache(config=made.config), DynamicCache(config=made.config)
        for text, cache in ((x, one), (y, other)):
            made(text[:, :9], cache=cache, use_cache=True)
        found = [made(text[:, 9:], cache=cache, use_cache=True).logits for text, cache in ((x, one), (y, other))]
        for logits, text in zip(found, (x, y), strict=True):
            assert far(logits, made(text, use_cache=False).logits[:, 9:]) < 1e-5


@pytest.mark.parametrize(
    ("kind", "owner", "name"),
    [
        ("rwkv", "RwkvForCausalLM", "_reorder_cache"),
        ("xlstm", "xLSTMForCausalLM", "_reorder_cache"),
        ("recurrent_gemma", "RecurrentGemmaModel", "__call__"),
    ],
)
def test_restore_takes_away_what_was_added(kind, owner, name):
    served(kind)
    of = getattr(file(kind), owner)
    on_cpu.accelerate(model(kind))
    assert name in vars(of)
    on_cpu.restore()
    assert name not in vars(of)


def test_what_is_better_than_the_original_is_named():
    served("mamba")
    parts = on_cpu.accelerate().parts
    for kind in MAMBA1:
        assert "several tokens after a cache" in parts[kind]
    assert "beam search" in parts["rwkv"]


@pytest.mark.parametrize("mode", ["train", "train_with_padding", "inference"])
def test_modes_of_xlstm_return_what_they_should(mode):
    made = accelerated("xlstm", mode=mode, return_last_states=mode != "train_with_padding")
    backend = made.backbone.blocks[0].mlstm_layer.mlstm_backend
    q, v, gate = torch.randn(1, 2, 64, 4), torch.randn(1, 2, 64, 6), torch.randn(1, 2, 64)
    ours = backend(q, q, v, gate, gate)
    on_cpu.restore()
    theirs = backend(q, q, v, gate, gate)
    if mode == "train_with_padding":
        ours, theirs = (ours, ()), (theirs, ())
    assert far(ours[0], theirs[0]) < 1e-5
    assert len(ours[1]) == len(theirs[1])
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert one.shape == other.shape
        assert far(one, other) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_xlstm_continues_states_of_another_dtype(dtype):
    """A cache in half precision: the numbers are those of the same states in float32, and the exponent survives it."""
    made = accelerated("xlstm", return_last_states=True)
    backend = made.backbone.blocks[0].mlstm_layer.mlstm_backend
    torch.manual_seed(0)
    q, v, gate = torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 6), torch.randn(2, 2, 9)
    states = [torch.randn(2, 2, *size).to(dtype) for size in ((4, 6), (4,), (1,))]
    found, (c, n, m) = backend(q, q, v, gate, gate, *states)
    wanted, (exact_c, exact_n, exact_m) = backend(q, q, v, gate, gate, *(t.float() for t in states))
    assert far(found, wanted) < 1e-5
    assert torch.equal(m.to(dtype).to(m.dtype), m)
    assert far(c * m.exp()[..., None], exact_c * exact_m.exp()[..., None]) < 1e-5
    assert far(n * m.exp(), exact_n * exact_m.exp()) < 1e-5


def test_position_0_clears_the_state_of_rglru():
    made = accelerated("recurrent_gemma")
    layer = made.model.layers[0].temporal_block.rg_lru
    x, state = torch.randn(2, 9, layer.num_attention_heads * layer.block_width), None

    def run(x, positions, state):
        layer.recurrent_states = state
        return layer(x, torch.tensor(positions)[None]), layer.recurrent_states

    with torch.no_grad():
        _, state = run(x[:, :3], range(3), None)
        first, middle = run(x[:, 3:6], range(3), None), run(x[:, 6:], range(3), None)
        # At the first token after a state, and in the middle.
        found, last = run(x[:, 3:], [0, 1, 2, 0, 1, 2], state)
    assert far(found[:, :3], first[0]) < 1e-6
    assert far(found[:, 3:], middle[0]) < 1e-6
    assert far(last, middle[1]) < 1e-6
    with torch.no_grad():
        assert far(run(x[:, 3:6], [3, 4, 5], state)[0], first[0]) > 1e-3
