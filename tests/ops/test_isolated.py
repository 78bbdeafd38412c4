"""Packed sequences next to one that holds NaN or infinity: attentions, compiled calls, states and carries."""

import pytest
import torch
from torch.utils import _pytree as pytree

import longspan
from longspan import linear_attention
from longspan.ops import isolated
from support.tensors import data

B, H, N, D = 2, 2, 70, 4
SEGMENTS = torch.tensor([[0] * 20 + [1] * 30 + [2] * 20, [0] * 40 + [5] * 30])
SPOILT = torch.stack([SEGMENTS[0] == 1, SEGMENTS[1] == 0])
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("transformed", [False, True])
def test_a_bidirectional_sum_has_what_all_sequences_add(transformed):
    """The other sequences keep their outputs and gradients, as the laws state for causal sums."""
    q, k, v = (data(B, H, N, D, seed=seed) for seed in range(3))
    spoilt = v.clone()
    spoilt[0, :, 33] = NAN

    def run(v):
        return linear_attention(q, k, v, causal=False, segments=SEGMENTS, return_state=True)

    out, after = torch.func.vjp(run, spoilt)[0] if transformed else run(spoilt)
    assert after[0, ..., :-1].isnan().all()
    wanted = linear_attention(q[1:], k[1:], v[1:], causal=False, return_state=True)[1]
    torch.testing.assert_close(after[1:], wanted)
    others = SEGMENTS != 1
    torch.testing.assert_close(out.movedim(2, 1)[others], run(v)[0].movedim(2, 1)[others])
    grads = []
    for x, fill in ((spoilt, NAN), (v, 1.0)):
        above = torch.where(others[:, None, :, None], 1.0, fill).expand_as(out)
        grads += torch.autograd.grad(run(x.requires_grad_())[0], x, above.to(x))
    torch.testing.assert_close(*(grad.movedim(2, 1)[others] for grad in grads))


def made(spec):
    torch.manual_seed(0)
    return longspan.build(spec, 8, 2).double().eval(), torch.randn(B, N, 8, dtype=torch.float64)


@pytest.mark.parametrize("spec", ["softmax", "linear", "realformer", "luna(slots=3)", "transformer_xl(memory=5)"])
class TestAttentions:
    def test_the_spoilt_sequence_is_what_it_is_alone(self, spec):
        module, x = made(spec)
        x[0, 33], x[1, 5] = NAN, INF
        y, _ = module(x, segments=SEGMENTS)
        for row, start, stop in ((0, 0, 20), (0, 20, 50), (0, 50, 70), (1, 0, 40), (1, 40, 70)):
            part = slice(start, stop)
            torch.testing.assert_close(y[row : row + 1, part], module(x[row : row + 1, part])[0], equal_nan=True)


@pytest.mark.parametrize("spec", ["softmax", "linear", "realformer", "luna(slots=3)"])
def test_gradients_of_gradients(spec):
    module, x = made(spec)

    def second(x, factor):
        x = x.clone().requires_grad_()
        y, _ = module(x, segments=SEGMENTS)
        weights = torch.where(SPOILT[..., None], factor, 1.0).to(x)
        (grad,) = torch.autograd.grad((y.square() * weights).sum(), [x], create_graph=True)
        return torch.autograd.grad(grad[~SPOILT].square().sum(), [x])[0][~SPOILT]

    torch.testing.assert_close(second(x, NAN), second(x, 1.0))


@pytest.mark.full
# torch.compile instantiates autograd functions, about which torch warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("spec", ["softmax", "linear"])
def test_a_compiled_call(spec):
    module, x = made(spec)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    wanted, _ = module(x, segments=SEGMENTS)
    torch.testing.assert_close(compiled(x, segments=SEGMENTS)[0], wanted)
    spoilt = x.clone().requires_grad_()
    with torch.no_grad():
        spoilt[0, 33], spoilt[1, 5] = NAN, INF
    y, _ = compiled(spoilt, segments=SEGMENTS)
    torch.testing.assert_close(y[~SPOILT], wanted[~SPOILT])
    # The tokens before it in its own sequence do not see it.
    torch.testing.assert_close(y[0, 20:33], wanted[0, 20:33])
    assert y[0, 33:50].isnan().all()
    (grad,) = torch.autograd.grad(y[~SPOILT].sum(), [spoilt])
    assert grad[~SPOILT].isfinite().all()


def test_ordinary_rows_run_packed(monkeypatch):
    def apart(*given):
        raise AssertionError("sequences ran alone")

    monkeypatch.setattr(isolated, "_alone", apart)
    module, x = longspan.build("softmax", 8, 2), torch.randn(B, N, 8, requires_grad=True)
    module(x, segments=SEGMENTS)[0].sum().backward()
    with pytest.raises(AssertionError, match="sequences ran alone"):
        module(x * NAN, segments=SEGMENTS)


def test_weights_get_what_a_spoilt_sequence_gives_them():
    """Their gradients are not finite, as those of a separate call are not: a scaler of gradients has to see it."""
    module, x = longspan.build("softmax", 8, 2), torch.randn(B, N, 8)
    x[0, 33] = NAN
    module(x, segments=SEGMENTS)[0].sum().backward()
    assert all(p.grad.isnan().any() for p in (module.value.weight, module.query.weight))


def test_outputs_can_be_changed_in_place():
    module, x = longspan.build("linear", 8, 2), torch.randn(B, N, 8, requires_grad=True)
    y, state = module(x, module.init_state(B), segments=SEGMENTS)
    y.mul_(2)
    pytree.tree_leaves(state)[0].add_(1)
    y.sum().backward()
    wanted = x.grad.clone()
    x.grad = None
    (2 * module(x, segments=SEGMENTS)[0]).sum().backward()
    torch.testing.assert_close(x.grad, wanted)


def test_half_precision_under_autocast():
    module, x = longspan.build("softmax", 8, 2), torch.randn(B, N, 8)
    x = x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = module(x, segments=SEGMENTS)
    weights = torch.where(SPOILT[..., None], NAN, 1.0)
    (found,) = torch.autograd.grad((y.float() * weights).sum(), [x], retain_graph=True)
    (wanted,) = torch.autograd.grad((y.float() * weights.nan_to_num(1.0)).sum(), [x])
    assert found[SPOILT].isnan().any()
    torch.testing.assert_close(found[~SPOILT], wanted[~SPOILT], rtol=2e-2, atol=2e-2)


def test_rows_in_a_checkpoint():
    from torch.utils.checkpoint import checkpoint

    module, x = longspan.build("alibi", 8, 2).double(), torch.randn(B, N, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.where(SPOILT[..., None], NAN, 1.0).double()
    y = checkpoint(lambda x: module(x, segments=SEGMENTS)[0], x, use_reentrant=False)
    (found,) = torch.autograd.grad((y * weights).sum(), [x])
    (wanted,) = torch.autograd.grad((module(x, segments=SEGMENTS)[0] * weights.nan_to_num(1.0)).sum(), [x])
    torch.testing.assert_close(found[~SPOILT], wanted[~SPOILT])


def test_the_pad_of_a_cut_out_sequence_is_zeros():
    """Sequences of about one length share a call; the pad of shorter ones must not be the next one's tokens."""
    from longspan.ops.rows import cut

    x = torch.ones(1, 7, 1)
    x[0, 3:] = NAN
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    y = cut(lambda _, rows: rows.cumsum(1) + 0 * rows.sum(1, keepdim=True), (x,), x, None, segments, exact=False)
    assert y[0, :3, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["plain", "reversible", "universal(steps=2)"])
def test_a_stack_runs_sequences_apart(kind):
    """Layers leave it to the stack, which looks at its outputs once: also at numbers that overflow in a later layer."""
    config = longspan.StackConfig(dim=8, heads=2, feedforward=12, depth=2, attention="linear; softmax", stack=kind)
    torch.manual_seed(0)
    stack, x = longspan.Stack(config).eval(), torch.randn(B, N, 8)
    more = torch.randn(B, 3, 8)

    def outcome(x, factor=1.0):
        x = x.clone().requires_grad_()
        y, after = stack(x, stack.init_state(B), segments=SEGMENTS)
        outputs = [stack(x, segments=SEGMENTS)[0], y, stack(more, after)[0]]
        upstream = [torch.where(SPOILT[..., None], factor, 1.0) * torch.ones_like(t) for t in outputs[:2]]
        (grad,) = torch.autograd.grad(outputs, [x], [*upstream, torch.ones_like(outputs[2])])
        return [*(t[~SPOILT] for t in outputs[:2]), outputs[2], grad[~SPOILT]]

    wanted = outcome(x)
    for content in (NAN, 3e38, 1e18):
        spoilt = x.clone()
        spoilt[0, 33], spoilt[1, 5] = content, -content
        torch.testing.assert_close(outcome(spoilt), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outcome(x, NAN), wanted, rtol=1e-4, atol=1e-4)
