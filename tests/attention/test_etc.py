"""Global and long tokens against one dense attention over both, with the label of every pair."""

from typing import Any

import pytest
import torch

import longspan
from support.tensors import data, same

N = 11


def build(options="globals=3, radius=2, clip=1") -> Any:
    torch.manual_seed(0)
    return longspan.build(f"etc({options})", 6, 2, causal=False).double()


def definition(module, x, carry=None):
    """One row x (N,dim): the four pieces side by side -> y (N,dim), what the global tokens hand on."""
    count, clip = module.globals, module.clip
    g = module.tokens if carry is None else module.tokens + carry
    both = torch.cat([g, x])
    q, k, v = (part(both).unflatten(-1, (2, 3)).transpose(0, 1) for part in (module.query, module.key, module.value))
    labels = module.labels.unflatten(-1, (2, 3)).transpose(0, 1)
    logits = torch.full((2, len(both), len(both)), -torch.inf, dtype=x.dtype)
    for i in range(len(both)):
        for j in range(len(both)):
            if i >= count and j >= count and abs(i - j) > module.radius:
                continue
            mixed = (i < count) != (j < count)
            label = 2 * clip + 1 if mixed else clip + max(-clip, min(clip, j - i))
            logits[:, i, j] = (q[:, i] * (k[:, j] + labels[:, label])).sum(-1) * 3**-0.5
    y = module.out((logits.softmax(-1) @ v).transpose(0, 1).flatten(-2))
    return y[count:], torch.nn.functional.layer_norm(g + y[:count], (6,))


@pytest.mark.parametrize(
    "options", ["globals=3, radius=2, clip=1", "globals=1, radius=0, clip=0", "globals=2, radius=13"]
)
def test_it_equals_one_dense_attention(options):
    module = build(options)
    carry = data(2, module.globals, 6, seed=2).requires_grad_()
    x = data(2, N, 6).requires_grad_()
    y, _, handed = module(x, carry=carry)
    expected = torch.stack([torch.cat(definition(module, x[b], carry[b])) for b in range(2)])
    same(torch.cat([y, handed], 1), expected, (x, carry, *module.parameters()))
    torch.testing.assert_close(module(x)[0][0], definition(module, x[0])[0])


def test_without_labels_a_wide_window_is_full_attention():
    module, other, x = (
        build(f"globals=2, radius={N}"),
        longspan.build("softmax", 6, 2, causal=False).double(),
        data(1, N, 6),
    )
    torch.nn.init.zeros_(module.labels)
    other.load_state_dict({n: p for n, p in module.state_dict().items() if n not in ("tokens", "labels")})
    both = torch.cat([module.tokens[None], x], 1)
    torch.testing.assert_close(module(x)[0], other(both)[0][:, 2:], rtol=1e-10, atol=1e-10)


def test_bad_calls_are_refused():
    module, x = build(), data(2, N, 6)
    with pytest.raises(
        ValueError, match=r"carry must be the global tokens \(2, 3, 6\) of the layer below, not \(2, 2, 6\)"
    ):
        module(x, carry=x[:, :2])
    with pytest.raises(ValueError, match=r"carry must be the global tokens .*, not int"):
        module(x, carry=3)
    with pytest.raises(ValueError, match="etc does not support segments="):
        module(x, segments=torch.zeros(2, N, dtype=torch.long))
    with pytest.raises(ValueError, match="etc has no causal form"):
        longspan.build("etc", 6, 2)
