"""The backend fla: kernels of flash-linear-attention for recurrences that kernels of longspan do not serve.

It uses ``chunk_gla`` for decay attention and ``chunk_kda`` for the delta rule, both with a decay per channel, on CUDA
GPUs, if the package fla-core is installed. The first call of each kind compares the kernels with the torch form,
values and gradients, on the device at hand; kernels that differ are not used.
"""

import functools
import importlib
import importlib.metadata
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends import forced_backend
from ..operands import double_backward
from ..tensors import unit
from ..triton import unreadable
from . import chunks
from .operands import Recurrence, prepared

PACKAGE, NAME = "fla-core", "fla"
OLDEST = (0, 6, 0)
LARGEST = 256  # channels of a head
TYPES = (torch.float32, torch.bfloat16, torch.float16)
GLA, KDA = "chunk_gla", "chunk_kda"
MODULES = {GLA: "fla.ops.gla", KDA: "fla.ops.kda"}
# The log decay that stands for anything lower. The kernels add log decays up in float32, which must not lose the later
# ones of a chunk; what e^-60 leaves of a state is invisible in every type that the kernels take.
LOWEST = -60.0
# Root mean square of the error of a tensor, relative to that of the tensor. Wrong kernels are off by more.
TOLERANCES = {torch.float32: 0.01, torch.bfloat16: 0.03, torch.float16: 0.01}
INPUTS = 6  # operands that have gradients, the first ones
LEAVES = ("queries", "keys", "values", "log decays", "beta", "state")

# Results of the first-use tests: the reason against a kind of call, empty if it passed.
_tested: dict[tuple[Any, ...], str] = {}


def why_not(r: Recurrence) -> str:
    """Return why the kernels cannot serve these operands of ``gated.serve``; empty if they can.

    Imports fla and tests its kernels on the first call of each kind, unless the backend is not forced and the call is
    a single token, for which another form is faster.
    """
    q, k, v, log_decay, beta, state, mask, segments, cu_seqlens, *_ = r
    if reason := unreadable(q, k, v, state, log_decay, beta, mask, segments, cu_seqlens):
        return reason
    if log_decay is None or log_decay.dim() != 4:
        return "it is used for decays per channel only"
    if mask is not None or segments is not None:
        return "it has no masks and no segments"
    if torch.compiler.is_compiling():
        return "its functions break the graph of torch.compile"
    if v.dtype not in TYPES or q.dtype != v.dtype or k.dtype != v.dtype:
        return "it takes float32, bfloat16 or float16, the same for queries, keys and values"
    if torch.float64 in (log_decay.dtype, state.dtype, None if beta is None else beta.dtype):
        return "it takes gates and states in float32 or less"
    if v.dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        return "it multiplies float32 in TF32, which torch.backends.cuda.matmul.allow_tf32 = False rules out"
    if not (q.numel() and v.numel() and len(state)):
        return "there is nothing to compute"
    if max(q.shape[-1], v.shape[-1]) > LARGEST:
        return f"it takes at most {LARGEST} channels a head"
    name = GLA if beta is None else KDA
    if name == GLA and q.shape[1] != v.shape[1]:
        return f"{GLA} takes one query head per value head"
    if q.shape[2] == 1 and cu_seqlens is None and forced_backend() != NAME:
        return "longspan has a faster form of this call"
    return missing() or _differs(name, q, v, packed=cu_seqlens is not None)


def missing() -> str:
    """Return why fla cannot be used here; empty if it can. Imports nothing."""
    # The modules that ``longspan.compat.fla.install()`` puts under this name would call longspan again.
    if type(sys.modules.get(NAME)).__module__.startswith("longspan."):
        return "the modules named fla are those of longspan.compat.fla; call longspan.compat.fla.uninstall()"
    return _version_reason()


@functools.cache
def _version_reason() -> str:
    """Return why the installed version cannot be used; empty if it can."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed"
    oldest = ".".join(map(str, OLDEST))
    # A pre-release such as 0.6.0rc1 counts as the version before it.
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(rc|a|b|\.?dev)?", version)
    numbers = tuple(int(found[i] or 0) for i in (1, 2, 3)) if found else ()
    if found is None or numbers < OLDEST or (numbers == OLDEST and found[4]):
        return f"{PACKAGE} {version} is too old; install {oldest} or later"
    return ""


def _differs(name: str, q: Tensor, v: Tensor, *, packed: bool) -> str:
    """Return why kernels cannot serve a kind of call, by a test at its first use; empty if they can."""
    # The kernels are compiled for the chunk that the length gives.
    chunk = min(64, max(16, 1 << (q.shape[2] - 1).bit_length()))
    groups = v.shape[1] // q.shape[1]
    kind = name, q.device, v.dtype, q.shape[-1], v.shape[-1], groups > 1, packed, chunk
    if kind not in _tested:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return f"the first call of {name} tests it, which a CUDA graph cannot record; call it before the capture"
        _tested[kind] = _test(name, q, v, groups=2 if groups > 1 else 1, packed=packed, chunk=chunk)
    return _tested[kind]


def _test(name: str, q: Tensor, v: Tensor, *, groups: int, packed: bool, chunk: int) -> str:
    """Compare the kernels with the torch form in float64; return what is wrong."""
    device, dtype, tokens = q.device, v.dtype, chunk - 3 if chunk < 64 else 150
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    keys, values, heads = q.shape[-1], v.shape[-1], 2 * groups
    offsets = torch.tensor([0, tokens // 3, tokens // 3, tokens], device=device) if packed else None
    batch, sequences = (1, 3) if packed else (2, 2)
    decays = torch.nn.functional.logsigmoid(random(batch, heads, tokens, keys))
    # Some channels are cleared.
    decays[:, :, tokens // 2, ::3] = -torch.inf
    q, k = random(batch, 2, tokens, keys), torch.nn.functional.normalize(random(batch, 2, tokens, keys), dim=-1)
    v, state = random(batch, heads, tokens, values), random(sequences, heads, keys, values)
    beta = torch.rand(batch, heads, tokens, generator=generator).to(device) if name == KDA else None
    q, k, v = (t.to(device, dtype) for t in (q, k, v))
    given = Recurrence(q, k, v, decays.to(device), beta, state.to(device), cu_seqlens=offsets, scale=keys**-0.5)
    weights = [random(*v.shape).to(device, dtype), random(*state.shape).to(device)]

    def found(form: Callable[[Recurrence], tuple[Tensor, Tensor]], r: Recurrence) -> list[Tensor]:
        leaves = [None if t is None else t.detach().requires_grad_() for t in r[:INPUTS]]
        outputs = form(Recurrence._make([*leaves, *r[INPUTS:]]))
        upstream = [w.to(o.dtype) for o, w in zip(outputs, weights, strict=True)]
        return [*outputs, *torch.autograd.grad(outputs, [t for t in leaves if t is not None], upstream)]

    package = f"{name} of {PACKAGE} {importlib.metadata.version(PACKAGE)}"
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            results = found(_run, given)
            wide = [t if t is None else t.double() for t in given[:INPUTS]]
            expected = found(_torch_form, Recurrence._make([*wide, *given[INPUTS:]]))
    except Exception as error:  # whatever their compiler raises here
        return f"{package} fails its test on this device: {type(error).__name__}: {str(error).strip()[:200]}"
    leaves = [f"gradient of {leaf}" for leaf, t in zip(LEAVES, given, strict=False) if t is not None]
    for part, result, right in zip(["output", "last state", *leaves], results, expected, strict=True):
        error = ((result.double() - right).norm() / right.norm()).item()
        if not error <= TOLERANCES[dtype]:
            return (
                f"{package} fails its test on this device: in {dtype}, D = {keys} and E = {values}, the {part} is off "
                f"by {error:.1e}"
            )
    return ""


def attend(r: Recurrence) -> tuple[Tensor, Tensor]:
    """``gated.serve`` by fla -> o (B,H,N,E) in v's dtype, state (B,H,D,E) float32.

    Log decays below -60 count as -60. Normalized queries and keys are rounded to their dtype. Derivatives of higher
    order are those of the torch form. Only for operands for which ``why_not`` is empty.
    """
    if r.normalize:
        r = r._replace(q=unit(r.q), k=unit(r.k), normalize=False)
    return _Attend.apply(*r, torch.is_grad_enabled())


class _Attend(torch.autograd.Function):
    """Keeps the graph that fla makes, since its own backward pass has no derivatives, and would not say so."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        r, grads = Recurrence(*given[:-1]), given[-1]
        ctx.save_for_backward(*r[:-2])
        ctx.numbers, ctx.graph = r[-2:], None
        if not (grads and any(ctx.needs_input_grad)):
            return _run(r)
        ctx.graph = _graph(r, ctx.needs_input_grad)
        o, end = ctx.graph[1]
        return o.detach(), end.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        r = Recurrence(*ctx.saved_tensors, *ctx.numbers)
        needed, others = ctx.needs_input_grad[:INPUTS], [None] * (len(r) - INPUTS + 1)
        if torch.is_grad_enabled():
            rest = r[INPUTS:]
            return *double_backward(
                lambda *t: _torch_form(Recurrence._make([*t, *rest])), r[:INPUTS], upstream
            ), *others
        # A second backward pass through the same graph computes it again, so that the first can free its memory.
        leaves, outputs = ctx.graph or _graph(r, needed)
        ctx.graph = None
        wanted = [t for t, need in zip(leaves, needed, strict=True) if need and t is not None]
        grads = iter(torch.autograd.grad(outputs, wanted, upstream, allow_unused=True, materialize_grads=True))
        return *(next(grads) if need else None for need in needed), *others


def _graph(r: Recurrence, needed: Sequence[bool]) -> tuple[list[Any], tuple[Tensor, Tensor]]:
    """Return inputs as leaves of a new graph, and the outputs of fla on them."""
    leaves: list[Any] = []
    for t, need in zip(r[:INPUTS], needed, strict=False):
        leaves.append(None if t is None else t.detach().requires_grad_(need))
    with torch.enable_grad():
        return leaves, _run(Recurrence._make([*leaves, *r[INPUTS:]]))


def _run(r: Recurrence) -> tuple[Tensor, Tensor]:
    """Call fla in its layout (B,N,H,...)."""
    assert r.log_decay is not None
    q, k, v = (t.transpose(1, 2) for t in (r.q, r.k, r.v))
    options: dict[str, Any] = {"g": r.log_decay.float().clamp(min=LOWEST).transpose(1, 2)}
    if r.beta is not None:
        options["beta"] = r.beta.float().transpose(1, 2)
    if r.cu_seqlens is not None:
        options["cu_seqlens"] = r.cu_seqlens.long()
    function = _function(GLA if r.beta is None else KDA)
    o, end = function(q, k, v, scale=r.scale, initial_state=r.state, output_final_state=True, **options)
    return o.transpose(1, 2), end


@functools.cache
def _function(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    with warnings.catch_warnings():
        # Advice of fla on versions of Python and Triton, which changes nothing that the test at first use sees.
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(MODULES[name]), name)


def _torch_form(r: Recurrence) -> tuple[Tensor, Tensor]:
    """The same from operations of torch, with derivatives of any order."""
    return prepared(chunks.composed, r)
