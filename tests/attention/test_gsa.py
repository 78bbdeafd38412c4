"""Gated slot attention: slots against their definition in float64."""

import pytest
import torch
import torch.nn.functional as F

from longspan.ops.gated import slots


def definition(q, k, v, write, log_decay, scale, keys, values):
    """Slot by slot and token by token, without the operations of longspan."""
    out = []
    for t in range(q.shape[2]):
        left = log_decay[:, :, t].exp()
        keys = keys * left[:, :, None] + k[:, :, t, :, None] * write[:, :, t, None]
        values = values * left[..., None] + write[:, :, t, :, None] * v[:, :, t, None]
        shares = (scale * q[:, :, t, None] @ keys).softmax(-1)
        out.append((shares @ values)[:, :, 0])
    return torch.stack(out, 2), keys, values


def drawn(n, *, batch=2, heads=2, sizes=(5, 6), count=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n)
    shapes = (sizes[0], sizes[0], sizes[1], count, count)
    q, k, v, write, g = (
        torch.randn(batch, heads, n, size, generator=generator, dtype=torch.float64).to(dtype) for size in shapes
    )
    keys = torch.randn(batch, heads, sizes[0], count, generator=generator, dtype=torch.float64).to(dtype)
    values = torch.randn(batch, heads, count, sizes[1], generator=generator, dtype=torch.float64).to(dtype)
    return [t.requires_grad_() for t in (q, k, v, write.sigmoid().detach(), F.logsigmoid(g).detach(), keys, values)]


@pytest.mark.parametrize("n", [1, 29, 139])
def test_slots_equal_their_definition(n):
    given = drawn(n)
    q, k, v, write, g, keys, values = given
    o, after = slots.attend(q, k, v, write, log_decay=g, scale=0.7, state=(keys, values))
    right = definition(q, k, v, write, g, 0.7, keys, values)

    def gradients(found):
        return torch.autograd.grad(sum(t.sin().sum() for t in found), given)

    torch.testing.assert_close((o, *after), right, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradients((o, *after)), gradients(right), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("packed", [False, True])
def test_a_running_softmax_is_the_softmax_of_all_tokens_so_far(packed):
    n, masked = 23, 11
    generator = torch.Generator().manual_seed(0)
    logits, values = (torch.randn(1, 1, n, 3, generator=generator, dtype=torch.float64) * 5 for _ in range(2))
    segments = torch.tensor([[0] * 9 + [1] * 14]) if packed else None
    mask = torch.ones(1, n, dtype=torch.bool)
    mask[0, masked] = False
    start = torch.full((1, 1, 3), slots.NOTHING, dtype=torch.float64)
    weights, decays, total = slots.running_softmax(logits, start, mask, segments)
    average = torch.zeros(1, 1, 3, dtype=torch.float64)
    for t in range(n):
        begin = 9 if packed and t >= 9 else 0
        if mask[0, t]:
            average = average * decays[:, :, t].exp() + weights[:, :, t] * values[:, :, t]
        seen = [j for j in range(begin, t + 1) if j != masked]
        right = (logits[:, :, seen].softmax(2) * values[:, :, seen]).sum(2)
        torch.testing.assert_close(average, right, rtol=0, atol=1e-12)
    torch.testing.assert_close(total, logits[:, :, seen].logsumexp(2))
