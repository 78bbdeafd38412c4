"""Memory-compressed attention against its definition, slot by slot, and special cases of kernels."""

import pytest
import torch

from support.sparse import build, data, heads_of, softmax
from support.tensors import same

N = 23
BOTH = pytest.mark.parametrize("causal", [True, False])
CONV, MEAN = "memory_compressed(stride={})", "memory_compressed(stride={}, pool='mean')"


def slots_of(module, tokens, taps, whole):
    """(B,N,dim) -> (B,H,S,D), one slot after the other."""
    r, n = module.stride, tokens.shape[1]
    found = []
    for start in range(0, n, r):
        part = tokens[:, start : start + r]
        if part.shape[1] < r and whole:
            break
        if module.pool == "mean":
            found.append(part.mean(1))
        else:
            weight = taps.weight.unflatten(1, (r, -1))  # (dim,R,dim)
            found.append(sum(part[:, i] @ weight[:, i].mT for i in range(part.shape[1])))
    slots = torch.stack(found, 1) if found else tokens[:, :0]
    return slots.unflatten(-1, (module.heads, -1)).transpose(1, 2)


def definition(module, x):
    taps = (getattr(module, name, None) for name in ("compress_key", "compress_value"))
    k, v = (
        slots_of(module, part(x), tap, module.causal)
        for part, tap in zip((module.key, module.value), taps, strict=True)
    )
    n, s, r = x.shape[1], k.shape[2], module.stride
    allowed = torch.tensor([[not module.causal or j * r + r - 1 <= i for j in range(s)] for i in range(n)]).view(n, s)
    if module.null:
        null = (p[:, None].expand(len(x), -1, 1, -1) for p in (module.null_key, module.null_value))
        k, v = (torch.cat([first, rest], 2) for first, rest in zip(null, (k, v), strict=True))
        allowed = torch.cat([torch.ones(n, 1, dtype=torch.bool), allowed], 1)
    (q,) = heads_of(module, x, "query")
    return module.out(softmax(allowed, q, k, v).transpose(1, 2).flatten(-2))


@BOTH
@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("form", [CONV, MEAN])
@pytest.mark.parametrize(("stride", "n"), [(1, 5), (2, 9), (3, 2), (3, 3), (3, N), (4, N), (5, N + 1), (7, 1)])
def test_it_equals_the_definition(form, stride, n, null, causal):
    module, x = build(form.format(stride)[:-1] + f", null={null})", causal=causal), data(n).requires_grad_()
    same(module(x)[0], definition(module, x), (x, *module.parameters()))


def test_by_hand():
    """Means of two tokens: the fourth of five sees the slots (0, 1) and (2, 3), the second and third only the first."""
    module = build("memory_compressed(stride=2, pool='mean')", heads=1, dim=1)
    for part, (weight, bias) in {"query": (0, 0), "key": (1, 0), "value": (1, 0), "out": (1, 0)}.items():
        torch.nn.init.constant_(getattr(module, part).weight, weight)
        torch.nn.init.constant_(getattr(module, part).bias, bias)
    x = torch.tensor([1.0, 3.0, 8.0, 12.0, 100.0], dtype=torch.float64)[None, :, None]
    torch.testing.assert_close(module(x)[0].flatten(), torch.tensor([0.0, 2, 2, 6, 6], dtype=torch.float64))


def test_a_kernel_of_means_is_attention_to_means():
    for causal in (True, False):
        # 24 tokens, since in a short last slot a convolution counts missing tokens as zeros and a mean does not.
        module, other, x = build(CONV.format(3), causal=causal), build(MEAN.format(3), causal=causal), data(24)
        for taps in (module.compress_key, module.compress_value):
            taps.weight.data = torch.eye(6, dtype=torch.float64).repeat(1, 3) / 3
        other.load_state_dict({name: p for name, p in module.state_dict().items() if "compress" not in name})
        torch.testing.assert_close(module(x)[0], other(x)[0], rtol=0, atol=1e-10)


def test_the_first_tokens_read_nothing_or_the_null_slot():
    for null in (False, True):
        module, x = build(f"memory_compressed(stride=3, null={null})"), data()
        value = module.null_value.flatten() if null else torch.zeros(6, dtype=torch.float64)
        torch.testing.assert_close(module(x)[0][:, :2], module.out(value).expand(2, 2, -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cuts", [[1] * N, [2, 3, 18], [1, 22], [19, 4]])
def test_the_state_is_the_slots_and_the_remaining_tokens(cuts):
    module, x = build(CONV.format(3)), data(N)
    state, outs = module.init_state(2), []
    for part in x.split(cuts, 1):
        y, state = module(part, state)
        outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 1), definition(module, x), rtol=0, atol=1e-10)
    assert state.slots.length.tolist() == [N // 3] * 2
    assert state.keys.shape == (2, 2, 2, 3)
    assert state.position.tolist() == [N] * 2


def test_a_convolution_mixes_the_heads():
    """The kernel is over all channels."""
    module, x = build(CONV.format(3)), data(N)
    moved = build(CONV.format(3))
    moved.key.weight.data[3:] = 0.0  # the second head's keys
    one, other = (definition_of_keys(m, x)[:, 0] for m in (module, moved))
    assert (one - other).abs().max() > 1e-3


def definition_of_keys(module, x):
    return slots_of(module, module.key(x), module.compress_key, True)
