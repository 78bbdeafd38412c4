"""The backend fla: when it serves a call, its test at first use, and what it must not change.

Without a GPU, modules named fla that compute by the definition stand in for the package. Like its kernels, they return
gradients that cannot be differentiated.
"""

import importlib.metadata
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch

import longspan
from longspan import decay_attention, delta_rule
from longspan.compat import fla as shim
from longspan.ops import gated, watch
from longspan.ops.gated import fla
from longspan.ops.gated.operands import Recurrence
from ops.families import FAMILIES

HALF = torch.bfloat16
OPS = {"gla": decay_attention, "kda": delta_rule}


def definition(q, k, v, g, state, beta, scale, offsets):
    q, k, v, g = (t.transpose(1, 2) for t in (q, k, v, g))
    beta = None if beta is None else beta.transpose(1, 2)
    o, end = gated.definition.attend(Recurrence(q, k, v, g, beta, state, cu_seqlens=offsets, scale=scale))
    return o.transpose(1, 2), end


class Standin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, state, beta, scale, offsets, wrong):
        ctx.save_for_backward(q, k, v, g, state, beta, offsets)
        ctx.scale, ctx.wrong = scale, wrong
        o, end = definition(q, k, v, g, state, beta, scale, offsets)
        return o * (1.1 if wrong == "values" else 1.0), end

    @staticmethod
    def backward(ctx, *upstream):
        *inputs, offsets = ctx.saved_tensors
        leaves = [t if t is None else t.detach().requires_grad_() for t in inputs]
        with torch.enable_grad():
            outputs = definition(*leaves, ctx.scale, offsets)
        grads = iter(torch.autograd.grad(outputs, [t for t in leaves if t is not None], upstream))
        grads = [None if t is None else next(grads) for t in leaves]
        if ctx.wrong == "gradients":
            grads[1] = grads[1] * 1.1
        return (*grads, None, None, None)


def modules(state):
    """The package's modules with the functions that the backend uses; ``state`` counts calls and plants bugs."""

    def run(name, q, k, v, g, beta, scale, initial_state, cu_seqlens):
        state.calls.append((name, q.dtype, q.shape[-1]))
        assert g.dtype == initial_state.dtype == torch.float32
        assert g.isfinite().all()
        if state.wrong == "error":
            raise RuntimeError("no kernel for this device")
        return Standin.apply(q, k, v, g, initial_state, beta, scale, cu_seqlens, state.wrong)

    def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
        assert output_final_state
        assert q.shape == k.shape == g.shape
        return run("chunk_gla", q, k, v, g, None, scale, initial_state, cu_seqlens)

    def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
        assert output_final_state
        assert beta.dtype == torch.float32
        return run("chunk_kda", q, k, v, g, beta, scale, initial_state, cu_seqlens)

    found = {name: ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.gla", "fla.ops.kda")}
    found["fla.ops.gla"].chunk_gla, found["fla.ops.kda"].chunk_kda = chunk_gla, chunk_kda
    return found


def forget():
    fla._tested.clear()
    fla._function.cache_clear()
    fla._version_reason.cache_clear()


@pytest.fixture
def installed(monkeypatch):
    """A package of version 0.6.0 that takes tensors on the CPU."""
    state = SimpleNamespace(calls=[], wrong="", version="0.6.0")
    for name, module in modules(state).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: state.version)
    monkeypatch.setattr(fla, "unreadable", lambda *tensors: "")
    forget()
    yield state
    forget()


@pytest.fixture
def tf32():
    """Products of float32 in TF32, which the package uses, are allowed."""
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def arguments(op, n=70, dtype=HALF, groups=1, batch=2, states=None, device="cpu"):
    family = FAMILIES["delta-channel" if op == "kda" else "decay-channel"]
    made = family.operands(n, (8, 6), batch=batch, states=states, dtype=torch.float32, repeats=groups)
    made["log_decay"][:, :, n // 3, ::2] = -torch.inf
    # The gates and the state stay in float32.
    return {name: t.to(device, dtype if name in ("query", "key", "value") else t.dtype) for name, t in made.items()}


def outcome(op, given, **options):
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    o, end = OPS[op](**leaves, return_state=True, **options)
    return [o, end, *torch.autograd.grad(o.float().sin().sum() + end.sin().sum(), list(leaves.values()))]


def served(op, given, **options):
    with watch() as seen:
        OPS[op](**given, **options)
    return seen[0]


CASES = [
    (op, kind)
    for op in OPS
    for kind in ("plain", "normalized", "cu_seqlens", *(["value heads share a query"] if op == "kda" else []))
]


@pytest.mark.parametrize(("op", "kind"), CASES)
def test_values_and_gradients_are_those_of_the_torch_form(installed, op, kind):
    packed = torch.tensor([0, 20, 20, 70]) if kind == "cu_seqlens" else None
    given = arguments(op, groups=2 if "share" in kind else 1, **({} if packed is None else {"batch": 1, "states": 3}))
    options = {"normalize": "l2" if kind == "normalized" else None, "cu_seqlens": packed}
    assert served(op, given, **options).backend == "fla"
    found = outcome(op, given, **options)
    with longspan.backend("torch"):
        expected = outcome(op, given, **options)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= 0.01 * b.double().norm()


def test_the_state_goes_on(installed):
    given = arguments("kda")
    whole, last = delta_rule(**given, return_state=True)
    tokens = {name: t for name, t in given.items() if name != "state"}
    first, state = delta_rule(
        **{name: t[:, :, :40] for name, t in tokens.items()}, state=given["state"], return_state=True
    )
    rest, state = delta_rule(**{name: t[:, :, 40:] for name, t in tokens.items()}, state=state, return_state=True)
    torch.testing.assert_close(torch.cat([first, rest], 2), whole)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("values", "the output is off by 1.0e-01"),
        ("gradients", "the gradient of keys is off by 1.0e-01"),
        ("error", "RuntimeError: no kernel for this device"),
    ],
)
def test_kernels_that_fail_their_test_are_not_used(installed, op, wrong, reason):
    installed.wrong, given = wrong, arguments(op)
    use = served(op, given)
    assert use.backend != "fla"
    fails = rf"chunk_{op} of fla-core 0.6.0 fails its test on this device: .*{reason}"
    with longspan.backend("fla"), pytest.raises(ValueError, match=fails):
        OPS[op](**given)
    assert f"chunk_{op} of fla-core 0.6.0 fails" in fla.why_not(operands(given))
    expected = outcome(op, given)
    installed.wrong = ""
    assert all(a.equal(b) for a, b in zip(outcome(op, given), expected, strict=True))


def operands(given, **marks):
    every = {"beta": None, "state": None} | given | marks
    q, k, v = (every.pop(name) for name in ("query", "key", "value"))
    return Recurrence(q, k, v, **every)


def test_the_reason_is_recorded(installed, monkeypatch):
    """On the device where native kernels do not come into question."""
    installed.wrong = "gradients"
    table = gated.FORMS.table
    monkeypatch.setitem(table, "native", table["native"]._replace(why_not=lambda r: "they are for the CPU"))
    monkeypatch.setitem(table, "triton", table["triton"]._replace(why_not=lambda r: "they take decays per head"))
    use = served("gla", arguments("gla"))
    assert use.backend == "torch"
    assert "fla: chunk_gla of fla-core 0.6.0 fails its test" in use.why_not
    assert "triton: they take decays per head" in use.why_not


def test_each_kind_of_call_is_tested_once(installed):
    counts = []
    for given in (
        arguments("gla"),
        arguments("gla", n=100),
        arguments("gla", n=20),
        arguments("kda"),
        arguments("kda", groups=2),
        arguments("kda", dtype=torch.float16),
    ):
        before = len(installed.calls)
        assert fla.why_not(operands(given)) == ""
        counts.append(len(installed.calls) - before)
    assert counts == [1, 0, 1, 1, 1, 1]


def test_nothing_is_imported_for_another_device(monkeypatch):
    def refuse(*anything):
        raise AssertionError("imported")

    for name in ("_function", "_version_reason", "_test"):
        monkeypatch.setattr(fla, name, refuse)
    given = arguments("gla")
    use = served("gla", given)
    assert use.backend in ("native", "torch")
    with longspan.backend("fla"), pytest.raises(ValueError, match="they are for CUDA GPUs"):
        decay_attention(**given)


def test_decays_per_channel_prefer_fla_and_those_per_head_triton(installed, monkeypatch):
    monkeypatch.setitem(gated.FORMS.table, "triton", gated.Form(lambda r: (r.v, r.state), lambda r: ""))
    given = arguments("gla")
    per_head = given | {"log_decay": given["log_decay"][..., 0]}
    assert served("gla", per_head).backend == "triton"
    assert not installed.calls
    assert served("gla", given).backend == "fla"


def test_modules_of_longspan_are_refused(installed):
    for name in ("fla", "fla.ops", "fla.ops.gla", "fla.ops.kda"):
        del sys.modules[name]
    shim.install(replace=True)  # the real library may be there
    try:
        given = arguments("gla")
        with longspan.backend("fla"), pytest.raises(ValueError, match="are those of longspan.compat.fla"):
            decay_attention(**given)
        assert served("gla", given).backend != "fla"
    finally:
        shim.uninstall()


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.5.9", "fla-core 0.5.9 is too old; install 0.6.0 or later"),
        ("0.6.0rc1", "fla-core 0.6.0rc1 is too old"),
        ("0.6.0.dev3", "is too old"),
        ("unknown", "fla-core unknown is too old"),
        ("0.6.0", ""),
        ("0.6.1rc1", ""),
        ("0.10", ""),
        ("1.0.0+cu130", ""),
    ],
)
def test_old_versions_are_refused(installed, version, reason):
    installed.version = version
    found = fla.missing()
    assert reason in found
    assert bool(found) is bool(reason)


def test_without_the_package(installed, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with longspan.backend("fla"), pytest.raises(ValueError, match="fla-core is not installed"):
        decay_attention(**arguments("gla"))


def test_what_it_does_not_have_is_refused(installed):
    given = arguments("gla")
    ids = torch.zeros(2, 70, dtype=torch.int64)
    wide = arguments("gla", dtype=torch.float32)
    shared = arguments("gla", groups=2)
    cases = [
        (operands(given, mask=ids == 0), "no masks and no segments"),
        (operands(given, segments=ids), "no masks and no segments"),
        (operands(given, log_decay=given["log_decay"][..., 0]), "decays per channel only"),
        (operands(given, log_decay=None), "decays per channel only"),
        (operands(given, log_decay=given["log_decay"].double()), "gates and states in float32 or less"),
        (operands({name: t.double() for name, t in given.items()}), "float32, bfloat16 or float16"),
        (operands(wide), "allow_tf32 = False"),
        (operands(shared), "chunk_gla takes one query head per value head"),
        (operands({name: t[:, :, :0] if name != "state" else t for name, t in given.items()}), "nothing to compute"),
        (
            operands({name: t.repeat_interleave(40, -1) if name != "state" else t for name, t in given.items()}),
            "at most",
        ),
    ]
    for refused, reason in cases:
        assert reason in fla.why_not(refused)
    assert not installed.calls


def test_float32_is_served_where_tf32_is_allowed(installed, tf32):
    assert fla.why_not(operands(arguments("gla", dtype=torch.float32))) == ""


def test_other_operations_do_not_take_it():
    q = torch.randn(1, 2, 8, 16)
    with longspan.backend("fla"), pytest.raises(ValueError, match="does not serve linear attention"):
        longspan.linear_attention(q, q, q)


def test_compiled_calls_take_another_form(installed):
    given = arguments("gla")
    torch._dynamo.reset()
    compiled = torch.compile(lambda **tensors: decay_attention(**tensors), fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
        found = compiled(**given)
    assert not installed.calls
    torch.testing.assert_close(found, decay_attention(**given), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("op", OPS)
def test_derivatives_of_second_order_are_those_of_the_torch_form(installed, tf32, op):
    given, found = arguments(op, n=9, dtype=torch.float32), []
    for name in ("fla", "torch"):
        leaves = {which: t.detach().requires_grad_() for which, t in given.items()}
        with longspan.backend(name):
            loss = OPS[op](**leaves).square().sum()
        first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(t.sin().sum() for t in first), list(leaves.values()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_second_backward_pass_gives_the_same_gradients(installed):
    given = arguments("kda")
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    loss = delta_rule(**leaves).float().square().sum()
    first, second = (torch.autograd.grad(loss, list(leaves.values()), retain_graph=True) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def test_operands_without_gradients_get_none(installed):
    given = arguments("kda")
    leaves = {name: t.detach().requires_grad_(name in ("key", "beta")) for name, t in given.items()}
    delta_rule(**leaves).float().square().sum().backward()
    assert {name for name, t in leaves.items() if t.grad is not None} == {"key", "beta"}
    every = {name: t.detach().requires_grad_() for name, t in given.items()}
    delta_rule(**every).float().square().sum().backward()
    assert all(leaves[name].grad.equal(every[name].grad) for name in ("key", "beta"))


@pytest.mark.cuda
@pytest.mark.full
@pytest.mark.parametrize("dtype", [HALF, torch.float16])
@pytest.mark.parametrize(("op", "packed"), [("gla", False), ("gla", True), ("kda", False), ("kda", True)])
def test_the_package_itself_passes_its_test(op, packed, dtype):
    pytest.importorskip("fla")
    given = arguments(op, n=150, dtype=dtype, batch=1 if packed else 2, states=3 if packed else 2, device="cuda")
    cuts = torch.tensor([0, 20, 20, 150], device="cuda") if packed else None
    assert fla.why_not(operands(given, cu_seqlens=cuts)) == ""
