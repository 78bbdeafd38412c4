"""Random feature attention as a matrix of all pairs, against softmax, and with extreme gates."""

import pytest
import torch

import longspan
from support.mechanisms import DIM, HEADS, B, N, seeded


@torch.no_grad()
def gate_of(module, logit, weight=0.0):
    """A gate whose logit is ``logit`` plus ``weight`` times the old one."""
    module.decay.weight.mul_(weight)
    module.decay.bias.fill_(logit)
    return module


def kernel(module, x):
    """phi(q).phi(k) for all pairs (B,H,N,N), written without the features."""

    def turned(project):
        t = project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        t = t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() * module.sigma
        return t @ module.projection.mT

    q, k = turned(module.query)[:, :, :, None], turned(module.key)[:, :, None]
    return (q - k).cos().mean(-1) if module.map == "gaussian" else (q.relu() * k.relu()).mean(-1)


def mixed(module, weights, x):
    v = module.value(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return module.out((weights @ v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("name", ["gaussian", "arccos"])
def test_with_a_gate_it_is_the_matrix_of_all_pairs(name):
    """W_ts = (1 - g_s) g_{s+1} ... g_t, as in section 3.2."""
    module, x = seeded(f"rfa(map='{name}', gate=True, features=31, eps=1e-13)")
    g = module.decay(x).sigmoid().mT
    weights = kernel(module, x)
    for t in range(N):
        for s in range(N):
            w = (1 - g[:, :, s]) * g[:, :, s + 1 : t + 1].prod(-1) if s <= t else 0.0
            weights[:, :, t, s] *= w
    weights = weights / weights.sum(-1, keepdim=True)
    record: dict = {}
    torch.testing.assert_close(module(x, record=record)[0], mixed(module, weights, x))
    torch.testing.assert_close(record["matrix"], weights)


@pytest.mark.parametrize("name", ["gaussian", "arccos"])
def test_without_a_gate_it_is_the_matrix_of_all_pairs(name):
    module, x = seeded(f"rfa(map='{name}', features=31, eps=1e-13)")
    weights = kernel(module, x).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(module(x)[0], mixed(module, weights, x))


@pytest.mark.parametrize(
    ("dtype", "logit", "name"),
    [(torch.float32, 1e4, "gaussian"), (torch.float64, 20.0, "gaussian"), (torch.float32, 40.0, "arccos")],
)
def test_a_gate_of_one_is_no_gate(dtype, logit, name):
    """1 - g, a factor of numerator and denominator, is then 2e-9 or less."""
    options = f"map='{name}', features=31, eps=1e-13"
    (gated, x), (plain, _) = seeded(f"rfa({options}, gate=True)"), seeded(f"rfa({options})")
    plain.load_state_dict(gate_of(gated, logit).state_dict(), strict=False)
    gated, plain, x = gated.to(dtype), plain.to(dtype), x.to(dtype)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-7}[dtype]
    torch.testing.assert_close(gated(x)[0], plain(x)[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("logit", [-50.0, -1e4])
def test_gates_that_stay_shut_for_long(logit):
    """A thousand factors of e^-50: the past underflows, and the denominator does not."""
    module, x = seeded("rfa(map='arccos', gate=True, features=31)", n=1009)
    module.key.load_state_dict(module.query.state_dict())  # so that no token is orthogonal to itself
    module, x = gate_of(module, logit).float(), x.float().requires_grad_()
    y, state = module(x, module.init_state(B))
    torch.testing.assert_close(y, module.out(module.value(x)), rtol=1e-3, atol=1e-4)
    last, _ = module(x[:, -1:], state)
    torch.testing.assert_close(last, y[:, -1:], rtol=1e-3, atol=1e-4)
    y.square().sum().backward()
    assert all(t.grad.isfinite().all() for t in (x, *module.parameters()))


@pytest.mark.parametrize("name", ["gaussian", "arccos"])
def test_gates_that_open_and_shut(name):
    """Logits of a few hundred in either direction, float32 against float64."""
    module, x = seeded(f"rfa(map='{name}', gate=True, features=31, eps=1e-3)", n=509)
    exact = gate_of(module, 0.0, weight=100.0)(x)[0]
    y = module.float()(x.float())[0]
    assert (exact - y).abs().max() < 1e-3 * exact.abs().max()


def test_a_context_is_read_without_the_gate():
    (gated, x), (plain, context) = seeded("rfa(gate=True, features=31)"), seeded("rfa(features=31)", seed=1)
    plain.load_state_dict(gated.state_dict(), strict=False)
    y, state = gated(x, context=context)
    torch.testing.assert_close((y, state), plain(x, context=context))
    torch.testing.assert_close(gated(x, state)[0], y)


def test_a_gate_needs_an_order():
    with pytest.raises(ValueError, match="gate=True needs causal=True"):
        longspan.build("rfa(gate=True)", DIM, HEADS, causal=False)
    module, x = seeded("rfa(gate=True)")
    with pytest.raises(ValueError, match="rfa does not support prefix="):
        module(x, prefix=torch.tensor([3, 2]))


@pytest.mark.parametrize("gate", [False, True])
def test_a_record_after_a_state_is_the_end_of_the_whole_record(gate):
    module, x = seeded(f"rfa(map='arccos', gate={gate}, features=31)")
    segments = torch.tensor([[0] * 8 + [1] * 5, [0] * N])
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, [2, 9]] = False
    whole, end = {}, {}
    module(x, mask=mask, segments=segments, record=whole)
    _, state = module(x[:, :5], module.init_state(B), mask=mask[:, :5])
    module(x[:, 5:], state, mask=mask[:, 5:], segments=segments[:, 5:], record=end)
    torch.testing.assert_close(end["matrix"], whole["matrix"][..., 5:, 5:])


def test_the_mass_is_the_sum_of_the_weights():
    module, x = seeded("rfa(gate=True)")
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0, [0, 7]] = False
    g = module.decay(x).sigmoid().masked_fill(~mask[..., None], 1.0)
    _, state = module(x[:, :5], module.init_state(B), mask=mask[:, :5])
    _, state = module(x[:, 5:], state, mask=mask[:, 5:])
    torch.testing.assert_close(state.mass, 1 - g.prod(1))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_before_the_first_token_outputs_are_finite(backend):
    module, x = seeded("rfa(gate=True)")
    x.requires_grad_()
    mask = torch.arange(N).expand(B, -1) >= 3
    with longspan.backend(backend):
        y, _ = module(x, mask=mask)
        y.square().sum().backward()
    assert not x.grad[:, :3].any()
    assert all(t.grad.isfinite().all() for t in (x, *module.parameters()))
