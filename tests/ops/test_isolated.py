"""Packed sequences next to one that holds NaN or infinity: operations, compiled calls, states and carries."""

import functools

import pytest
import torch
from torch.utils import _pytree as pytree

import longspan
from longspan import backend, decay_attention, delta_rule, linear_attention
from longspan.ops import isolated
from longspan.ops.native.call import available

B, H, N, D = 2, 2, 70, 4
SEGMENTS = torch.tensor([[0] * 20 + [1] * 30 + [2] * 20, [0] * 40 + [5] * 30])
SPOILT = torch.stack([SEGMENTS[0] == 1, SEGMENTS[1] == 0])
OTHERS = (~SPOILT)[:, None].expand(B, H, N)
BACKENDS = ("reference", "torch", *(["native"] if available() else []))
NAN, INF = float("nan"), float("inf")


def operands(dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(B, H, N, D, generator=generator, dtype=dtype) for name in ("query", "key", "value")}
    made["key"] = torch.nn.functional.normalize(made["key"], dim=-1)
    made["log_decay"] = -torch.rand(B, H, N, generator=generator, dtype=dtype)
    made["beta"] = torch.rand(B, H, N, generator=generator, dtype=dtype)
    return made


def call(name: str, given: dict, **options):
    q, k, v, log_decay, beta = given.values()
    options = {"segments": SEGMENTS, "return_state": True} | options
    match name:
        case "linear" | "bidirectional":
            if name == "bidirectional":
                options = {key: value for key, value in options.items() if key != "state"}
            return linear_attention(q, k, v, causal=name == "linear", **options)
        case "decay":
            return decay_attention(q, k, v, log_decay=log_decay, **options)
        case "by channel":
            return decay_attention(q, k, v, log_decay=log_decay[..., None].expand_as(k), **options)
    return delta_rule(q, k, v, beta=beta, log_decay=log_decay, **options)


NAMES = ("linear", "bidirectional", "decay", "by channel", "delta")


def parameters(name: str) -> tuple[str, ...]:
    more = {"decay": ("log_decay",), "by channel": ("log_decay",), "delta": ("log_decay", "beta")}
    return ("query", "key", "value", *more.get(name, ()))


def cases():
    """Name, backend and type of all forms that there are."""
    every = [(name, kind, dtype) for name in NAMES for kind in BACKENDS for dtype in (torch.float32, torch.float64)]
    return [(n, kind, t) for n, kind, t in every if kind != "native" or (t == torch.float32 and n != "bidirectional")]


@pytest.mark.parametrize(("name", "kind", "dtype"), cases())
class TestOperations:
    def outcome(self, name, given, dtype, factor=1.0):
        """Outputs, states and gradients of the sequences that are not spoilt."""
        given = {key: t.clone().requires_grad_(key in parameters(name)) for key, t in given.items()}
        state = torch.rand(B, H, D, D + (name == "linear"), generator=torch.Generator().manual_seed(1), dtype=dtype)
        out, after = call(name, given, state=state)
        grad = torch.ones_like(out)
        grad[~OTHERS] *= factor
        ends = [] if name == "bidirectional" else [after]
        wanted = [given[key] for key in parameters(name)]
        grads = torch.autograd.grad([out, *ends], wanted, [grad, *map(torch.ones_like, ends)])
        return [*ends, out[OTHERS], *(g[OTHERS] for g in grads)]

    def test_neighbors_stay_what_they_are(self, name, kind, dtype):
        given, tolerance = operands(dtype), {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
        with backend(kind):
            wanted = self.outcome(name, given, dtype)
            for key in parameters(name):
                for content in (
                    (NAN, torch.finfo(dtype).max) if kind == "reference" else (NAN, INF, torch.finfo(dtype).max)
                ):
                    spoilt = {k: t.clone() for k, t in given.items()}
                    # A decay is never positive; it can be endless.
                    spoilt[key][0, :, 33] = -content if key == "log_decay" else content
                    spoilt[key][1, :, 0] = -content
                    found = self.outcome(name, spoilt, dtype)
                    torch.testing.assert_close(found, wanted, **tolerance)
            torch.testing.assert_close(self.outcome(name, given, dtype, NAN), wanted, **tolerance)


@pytest.mark.parametrize("transformed", [False, True])
def test_a_bidirectional_sum_has_what_all_sequences_add(transformed):
    given = operands(torch.float64)
    given["value"][0, :, 33] = NAN
    run = functools.partial(call, "bidirectional")
    _, after = torch.func.vjp(run, given)[0] if transformed else run(given)
    assert after[0, ..., :-1].isnan().all()
    clean = {key: t[1:] for key, t in given.items()}
    wanted = linear_attention(*list(clean.values())[:3], causal=False, return_state=True)[1]
    torch.testing.assert_close(after[1:], wanted)


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
