"""Triton kernels of linear attention against the definition in float64: values, gradients, states, one token."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import longspan
from longspan.ops.triton import tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies in float32. Three TF32 products and the fast exponential lose a few more bits.
LIMIT = 5e-7 if DEVICE == "cpu" else 1e-5
MAPS = ("elu", "relu", "squared_relu", "exp")
TILES = tiles.TILES
SIZES = [(1, 16, 16), (63, 1, 3), (65, 128, 128), (70, 7, 128)]


@pytest.fixture(autouse=True)
def _several_spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three spans of 32 tokens, of two chunks each, and blocks of 16 channels. Every call must be served by Triton.

    ``test_sizes`` has the tiles that GPUs get.
    """
    monkeypatch.setattr(tiles, "SHORTEST", 32)
    monkeypatch.setattr(tiles, "TILES", dict.fromkeys(tiles.TILES, tiles.Tile(16, 16, 4, 2)))
    with longspan.backend("triton"):
        yield


def data(
    n: int = 70, d: int = 12, e: int = 20, *, m: int | None = None, batch: int = 1, heads: int = 1
) -> list[Tensor]:
    """q, k, v with the heads of a token adjacent, so that tokens are not contiguous, and a state."""
    generator = torch.Generator().manual_seed(n + d)
    sizes = ((n, d), (m or n, d), (m or n, e))
    tokens = [torch.randn(batch, length, heads, x, generator=generator).transpose(1, 2) for length, x in sizes]
    return [t.to(DEVICE) for t in (*tokens, torch.rand(batch, heads, d, e + 1, generator=generator))]


def run(operands: list[Tensor | None], **options: Any) -> list[Tensor]:
    """The output, the last state and the gradients of all operands."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in operands]
    q, k, v, state = leaves
    results = longspan.linear_attention(q, k, v, state=state, return_state=True, **options)
    generator = torch.Generator().manual_seed(1)
    # Numbers that bfloat16 holds, so that all dtypes get the same gradients.
    above = [torch.randn(r.shape, generator=generator).bfloat16().to(r) for r in results]
    found = torch.autograd.grad(results, [t for t in leaves if t is not None], above)
    return [t.detach() for t in (*results, *found)]


def wide(operands: list[Tensor | None]) -> list[Tensor | None]:
    return [t if t is None else t.double() for t in operands]


def distances(found: list[Tensor], right: list[Tensor]) -> list[float]:
    """Norms of the differences, relative to the norm of what is right."""
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)]


def compare(operands: list[Tensor | None], limit: float = LIMIT, **options: Any) -> None:
    found = run(operands, **options)
    with longspan.backend("reference"):
        right = run(wide(operands), **options)
    with longspan.backend("torch"):
        plain = run(operands, **options)
    # Gradients of q can cancel almost completely, which costs digits in any form.
    for ours, theirs in zip(distances(found, right), distances(plain, right), strict=True):
        assert ours <= max(limit, 1.5 * theirs)


@pytest.mark.parametrize("feature_map", MAPS)
def test_values_and_gradients_of_bidirectional_attention(feature_map):
    q, k, v, _ = data(70, m=40)
    compare([q, k, v, None], feature_map=feature_map, causal=False)


@pytest.mark.full
@pytest.mark.parametrize(("n", "d", "e"), SIZES)
@pytest.mark.parametrize("causal", [True, False])
def test_sizes(n, d, e, causal, monkeypatch):
    monkeypatch.setattr(tiles, "TILES", TILES)
    monkeypatch.setattr(tiles, "SHORTEST", 64)
    # With one or two keys the gradient of a query nearly cancels, so its rounding has no scale in a single head.
    q, k, v, state = data(n, d, e, m=n if causal else n + 7, heads=4 if n == 1 else 1)
    compare([q, k, v, state if causal else None], causal=causal)


@pytest.mark.parametrize("causal", [True, False])
def test_masked_tokens_may_hold_nan(causal):
    q, k, v, state = data(batch=2)
    mask = (torch.rand(2, 70, generator=torch.Generator().manual_seed(0)) < 0.7).to(DEVICE)
    mask[1] = False
    away, real = ~mask[:, None, :, None], mask[:, None, :, None]
    spoilt = [q, *(t.masked_fill(away, torch.nan) for t in (k, v))]
    leaves = [t.detach().requires_grad_() for t in spoilt]
    # Straight to the kernels, since the public function clears masked tokens itself.
    options: dict[str, Any] = {"causal": causal, "feature_map": "elu", "eps": 1e-6, "mask": mask}
    options["state"] = state if causal else None
    o, end = longspan.ops.linear.named(*leaves, **options)
    found = [o, end, *torch.autograd.grad((o.sum(), end.sum()), leaves)]
    with longspan.backend("reference"):
        plain = [t.double().requires_grad_() for t in (q, k.masked_fill(away, 0.0), v.masked_fill(away, 0.0))]
        options["state"] = state.double() if causal else None
        o, end = longspan.ops.linear.named(*plain, **options)
        right = [o, end, *torch.autograd.grad((o.sum(), end.sum()), plain)]
    assert max(distances(found, right)) <= LIMIT
    assert not any((t * ~real).any() for t in found[3:])


@pytest.mark.parametrize("causal", [True, False])
def test_a_denominator_of_zero_gives_zero(causal):
    q, k, v, _ = data(40)
    q[:, :, ::3], k[:, :, :20] = -1.0, -1.0
    options: dict[str, Any] = {"feature_map": "relu", "eps": 0, "causal": causal}
    found = run([q, k, v, None], **options)
    assert not found[0][:, :, ::3].any()
    assert not found[2][:, :, ::3].any()
    compare([q, k, v, None], **options)


def test_nan_of_a_token_reaches_its_output():
    q, k, v, _ = data(20)
    q[0, 0, 3, 0] = torch.nan
    for feature_map in MAPS:
        o = longspan.linear_attention(q, k, v, feature_map=feature_map)
        assert o[0, 0, 3].isnan().all()
        assert o.isnan().sum() == o.shape[-1]


@pytest.mark.parametrize(
    ("feature_map", "dtype"), [("elu", torch.bfloat16), ("exp", torch.bfloat16), ("elu", torch.float16)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_half_precision(causal, feature_map, dtype):
    """At most 1.5 times the error of the torch form, which multiplies in float32. States are sums in float32.

    The mean of the values is not 0, so that the two terms of the gradient of a query almost cancel.
    """
    q, k, v, state = data(40, 24, 20)
    halves = [t.to(dtype) for t in (q, k, v + 1)]
    halves.append(state if causal else None)
    found = run(halves, causal=causal, feature_map=feature_map)
    with longspan.backend("torch"):
        plain = run(halves, causal=causal, feature_map=feature_map)
    with longspan.backend("reference"):
        right = run(wide(halves), causal=causal, feature_map=feature_map)
    for ours, theirs, result in zip(distances(found, right), distances(plain, right), found, strict=True):
        assert ours <= (2e-5 if result.dtype == torch.float32 else 1.5 * theirs)


def test_digits_that_the_output_lost_are_kept_for_gradients_only():
    from longspan.ops.linear import triton
    from longspan.ops.linear.operands import LinearOperands

    q, k, v, state = (t.bfloat16() for t in data(20))
    kept = []
    for leaf in (q.detach(), q.detach().requires_grad_()):
        pack = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
        with pack:
            o, _ = triton.attend(LinearOperands(leaf, k, v, state.float(), None, None, "elu", 1e-6))
        with longspan.backend("reference"):
            right = longspan.linear_attention(*(t.double() for t in (q, k, v)), state=state.double())
        assert leaf.requires_grad == bool(kept)
    (rest,) = [t for t in kept if t.shape == o.shape and distances([o.double() + t], [right])[0] < 2e-5]
    assert rest.dtype == torch.bfloat16


def test_large_numbers_in_float16():
    q, k, v, _ = (t.half() for t in data(70))
    q, k = q + 20, k + 20  # products of features exceed the largest number of float16
    o = longspan.linear_attention(q, k, v, feature_map="squared_relu")
    with longspan.backend("reference"):
        right = longspan.linear_attention(q.double(), k.double(), v.double(), feature_map="squared_relu")
    torch.testing.assert_close(o.double(), right, rtol=1e-3, atol=1e-4)


def test_a_step_runs_one_kernel(monkeypatch):
    from longspan.ops.linear import triton

    q, k, v, state = data(1)
    monkeypatch.setattr(triton, "_forward", None)
    with torch.no_grad():
        longspan.linear_attention(q, k, v, state=state)


# torch warns about its own tracing of autograd functions.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("causal", [True, False])
def test_compiled_by_torch(causal):
    operands = data(40)
    if not causal:
        operands[3] = None
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    function = torch.compile(
        run_compiled, fullgraph=True, backend=aot_autograd(fw_compiler=backend, bw_compiler=backend)
    )
    leaves = [t if t is None else t.detach().requires_grad_() for t in operands]
    results = function(*leaves, causal)
    found = torch.autograd.grad(results, [t for t in leaves if t is not None], [torch.ones_like(r) for r in results])
    leaves = [t if t is None else t.detach().requires_grad_() for t in operands]
    results = run_compiled(*leaves, causal)
    right = torch.autograd.grad(results, [t for t in leaves if t is not None], [torch.ones_like(r) for r in results])
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert {f"longspan.triton_linear_{name}.default" for name in ("forward", "backward")} <= set(nodes)


def run_compiled(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    return longspan.linear_attention(q, k, v, state=state, causal=causal, return_state=True)


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_compiled_by_torch(donate):
    q, k, v, state = data(1)

    def step(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return longspan.linear_attention(q, k, v, state=state, return_state=True, donate=donate)

    with torch.no_grad():
        right, end = longspan.linear_attention(q, k, v, state=state, return_state=True)
        before = state.clone()
        o, after = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, state)
    assert torch.equal(o, right)
    assert torch.equal(after, end)
    assert torch.equal(state, end if donate else before)


def test_packed_bidirectional_attention_is_refused():
    q, k, v, _ = data()
    with pytest.raises(ValueError, match="packed sequences with causal attention only"):
        longspan.linear_attention(q, k, v, causal=False, segments=torch.arange(70, device=DEVICE)[None] // 9)
