"""Compares newly compiled kernels with definitions, in the child process of a trial."""

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import interface, openmp
from .trial import PASSED, WRONG

# Relative to the largest value; the errors of a wrong kernel are larger.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}


def main() -> None:
    """Answer each request of ``trial`` on stdin: test the kernels in this process, and print PASSED or WRONG."""
    openmp.share()
    for line in sys.stdin:
        request = json.loads(line)
        print(_tested(request["libraries"], request["tested"]), flush=True)


def _tested(libraries: dict[str, str], tested: str) -> str:
    from .. import build

    opened = {
        unit: interface.declare(ctypes.CDLL(path), unit)
        for name, path in libraries.items()
        for unit in interface.units(name)
    }
    # All calls of this process use these libraries.
    build.loaded = opened.get
    family, _, part = tested.partition("/")
    for name, found, right in COMPARISONS[family](frozenset([part] if part else interface.FAMILIES[family])):
        error = ((found.double() - right).abs().max() / right.abs().max()).item()
        if not error < TOLERANCES[found.dtype]:
            return f"{WRONG}{name} is off by {error:.1e}, relative to the largest value"
    return PASSED


# (what is compared, result, correct result in float64)
Comparisons = Iterator[tuple[str, Tensor, Tensor]]
Parts = frozenset[str]  # which parts of a family to compare: its units without the family


def _lacks(tokens: int, parts: Parts) -> bool:
    """Return whether no part serves a call: the step serves one token, the passes over a sequence serve more."""
    return "step" not in parts if tokens == 1 else not parts & {"forward", "backward"}


def _linear(parts: Parts) -> Comparisons:
    """Linear attention of tokens and sequences, on sizes that use several threads."""
    from ... import linear
    from ...backends import backend
    from ...linear.features import MAPS

    generator = torch.Generator().manual_seed(0)
    for width, dtype in ((64, torch.float32), (37, torch.float32), (64, torch.bfloat16)):
        for name, phi in MAPS.items():
            native = partial(linear.linear_attention, feature_map=name, return_state=True)
            right = partial(_dense, phi)
            where = f"for feature map {name}, heads of {width} and {dtype}"
            for kind, batch, heads, tokens in (("a token", 9, 4, 1), ("a sequence", 2, 3, 300)):
                if _lacks(tokens, parts):
                    continue
                gradients = tokens > 1 and "backward" in parts
                given = [torch.randn(batch, heads, tokens, width, generator=generator).to(dtype) for _ in range(3)]
                state = torch.rand(batch, heads, width, width + 1, generator=generator)
                with backend("native"):
                    results = _values(native, given, state, gradients)
                expected = _values(right, [t.double() for t in given], state.double(), gradients)
                for part, result, definition in zip(PARTS, results, expected, strict=False):
                    yield f"{kind}'s {part} {where}", result, definition


def _gated(parts: Parts) -> Comparisons:
    """Decay and the delta rule, with two value heads per key head."""
    from ... import gated
    from ...backends import backend

    generator = torch.Generator().manual_seed(0)
    for n, shape in ((1, (3, 4, 1)), (70, (3, 4, 70)), (70, (3, 4, 70, 37))):
        if _lacks(n, parts):
            continue
        gradients = n > 1 and "backward" in parts
        q, k = (torch.nn.functional.normalize(torch.randn(3, 2, n, 37, generator=generator), dim=-1) for _ in "qk")
        v, state = torch.randn(3, 4, n, 64, generator=generator), torch.randn(3, 4, 37, 64, generator=generator)
        gates = {"log_decay": -torch.rand(shape, generator=generator), "beta": torch.rand(3, 4, n, generator=generator)}
        with backend("native"):
            results = _values(partial(gated.recur, **gates), [q, k, v], state, gradients)
        exact = {name: t.double() for name, t in gates.items()}

        def right(q: Tensor, k: Tensor, v: Tensor, state: Tensor, exact: Any = exact) -> tuple[Tensor, Tensor]:
            return gated.definition.attend(gated.Recurrence(q, k, v, **exact, state=state, scale=37**-0.5))

        expected = _values(right, [t.double() for t in (q, k, v)], state.double(), gradients)
        for part, result, definition in zip(PARTS, results, expected, strict=False):
            yield f"the {part} of the delta rule for {n} tokens, decay {shape}", result, definition


def _general(parts: Parts) -> Comparisons:
    """The general delta rule, with two value heads per key head, reads before and after the decay."""
    from ...backends import backend
    from ...gated import general

    generator = torch.Generator().manual_seed(0)
    cases = (1, (3, 4, 1, 37), True), (1, (3, 4, 1), False), (70, (3, 4, 70), False), (70, (3, 4, 70, 37), True)
    for n, shape, early in cases:
        if _lacks(n, parts):
            continue
        gradients = n > 1 and "backward" in parts
        vectors = [torch.randn(3, 2, n, 37, generator=generator) for _ in range(4)]
        q, k, read, erase = (torch.nn.functional.normalize(t, dim=-1) for t in vectors)
        v, state = torch.randn(3, 4, n, 64, generator=generator), torch.randn(3, 4, 37, 64, generator=generator)
        gates = {"read": read, "erase": erase, "log_decay": -torch.rand(shape, generator=generator)}
        for t in gates.values():
            t.requires_grad_(gradients)
        with backend("native"):
            results = _values(
                partial(general.recur, **gates, read_before_decay=early), [q, k, v], state, gradients, gates
            )
        exact = {name: t.detach().double().requires_grad_(gradients) for name, t in gates.items()}
        right = partial(_general_definition, exact, early)
        expected = _values(right, [t.double() for t in (q, k, v)], state.double(), gradients, exact)
        names = (*PARTS, "gradient of reads", "gradient of erasures", "gradient of decays")
        for part, result, definition in zip(names, results, expected, strict=False):
            yield f"the {part} of the general delta rule for {n} tokens, decay {shape}", result, definition


def _general_definition(
    gates: dict[str, Tensor], early: bool, q: Tensor, k: Tensor, v: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    from ...gated import general

    r = general.GeneralRecurrence(q, k, v, **gates, state=state, scale=37**-0.5, early=early)
    return general.general_definition.attend(r)


def _convolutions(parts: Parts) -> Comparisons:
    """The causal convolution of tokens and sequences in each dtype."""
    from ... import convolution
    from ...backends import backend

    generator = torch.Generator().manual_seed(0)
    names = ("output", "last state", "gradient of x", "gradient of weight", "gradient of bias", "gradient of state")
    for n, dtype in ((1, torch.float32), (300, torch.float32), (70, torch.bfloat16), (70, torch.float16)):
        if _lacks(n, parts):
            continue
        gradients = n > 1 and "backward" in parts
        shapes = (3, n, 133), (133, 4), (133,), (3, 3, 133)
        given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        results = []
        for name, leaves in (("native", given), ("reference", [t.double() for t in given])):
            leaves = [t.detach().requires_grad_(gradients) for t in leaves]
            with backend(name):
                found = convolution.convolve(*leaves, activation="silu")
            grads = torch.autograd.grad(found[0].sin().sum() + found[1].sin().sum(), leaves) if gradients else ()
            results.append([t.detach() for t in (*found, *grads)])
        for part, result, definition in zip(names, *results, strict=False):
            yield f"the {part} of the convolution of {n} tokens in {dtype}", result, definition


def _scans(parts: Parts) -> Comparisons:
    """Both scans of tokens and sequences, on sizes that use several threads."""
    from ... import scan
    from ...backends import backend

    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for n, channels, size in ((1, 133, 16), (150, 133, 16), (70, 21, 5), (70, 21, 64)):
        tokens, states = (3, n, channels), (3, n, size)
        g, rates = (-torch.rand(shape, generator=generator) for shape in (tokens, (channels, size)))
        simple = {"x": numbers(*tokens), "log_decay": g, "state": numbers(3, channels)}
        rich = {"x": numbers(*tokens), "dt": numbers(*tokens), "A": 4 * rates, "B": numbers(*states)}
        rich |= {"C": numbers(*states), "D": numbers(channels), "z": numbers(*tokens), "dt_bias": numbers(channels)}
        rich |= {"state": numbers(3, channels, size)}
        calls: Any = ("diagonal", scan.diagonal, simple), ("selective", partial(scan.selective, softplus=True), rich)
        for call, given in ((call, given) for part, call, given in calls if part in parts):
            results = []
            for name, dtype in (("native", torch.float32), ("reference", torch.float64)):
                leaves = {part: t.to(dtype).requires_grad_(n > 1) for part, t in given.items()}
                with backend(name):
                    found = call(**leaves)
                loss = found[0].sin().sum() + found[1].sin().sum()
                grads = torch.autograd.grad(loss, list(leaves.values())) if n > 1 else ()
                results.append([t.detach() for t in (*found, *grads)])
            names = ("output", "last state", *(f"gradient of {part}" for part in given))
            for part, result, definition in zip(names, *results, strict=False):
                yield f"the {part} of a scan of {n} tokens, {channels} channels, {size} states", result, definition


def _patterns(parts: Parts) -> Comparisons:
    """Attention under patterns with full, partial and empty blocks, with two query heads per key head."""
    from .... import patterns
    from ... import sparse
    from ...backends import backend

    generator, backward = torch.Generator().manual_seed(0), "backward" in parts
    for text in ("band(40)", "causal - band(40)") if parts & {"forward", "backward"} else ():
        pattern, leaves = patterns.parse(text), []
        for heads, width in ((4, 37), (2, 37), (2, 64)):
            leaves.append(torch.randn(3, heads, 150, width, generator=generator).requires_grad_(backward))
        exact = [t.detach().double().requires_grad_(backward) for t in leaves]
        with backend("native"):
            output = sparse.attend(leaves[0], leaves[1], leaves[2], pattern)
        k, v = (t.repeat_interleave(2, 1) for t in exact[1:])
        right = sparse.dense(exact[0], k, v, pattern, sparse.Logits(37**-0.5))[0]
        found, expected = (
            [o, *(torch.autograd.grad(o.sin().sum(), x) if backward else ())]
            for o, x in ((output, leaves), (right, exact))
        )
        for part, result, definition in zip((PARTS[0], *PARTS[2:5]), found, expected, strict=False):
            yield f"the {part} under {text}", result.detach(), definition.detach()


def _quantized(parts: Parts) -> Comparisons:
    """Every format and kind of activations, on sizes that use several threads."""
    from ...backends import backend
    from ...quantized import formats, native, operands, pack, quantized_linear
    from ...quantized.packing import rows

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 512, generator=generator)
    for name in native.FORMATS:
        # Bytes below 120, so that no float16 number of them is infinity or NaN.
        width = formats.FORMATS[name].row_bytes(512)
        data = torch.randint(0, 120, (37, width), dtype=torch.uint8, generator=generator)
        weight = pack(formats.Blocks(data, name, 512))
        for activations in operands.ACTIVATIONS if "forward" in parts else ():
            results = []
            for chosen in ("native", "reference"):
                with backend(chosen):
                    results.append(quantized_linear(x, weight, activations=activations))
            yield f"a product with {name} and {activations} activations", results[0], results[1].double()
        if "entropy" not in parts:
            continue
        # Small logits, so that many tokens have a share.
        numbers, target = rows(weight, 0, 37).double(), torch.arange(6)
        x = x / numbers.norm() * 6
        for dtype in (torch.float32, torch.bfloat16):
            read = operands.Map(x.to(dtype), None, *weight, "float32")
            found = native.entropy(read, target, 0.0, pulled=True, even=True)
            logits = read.x.double() @ numbers.T
            shares = logits.softmax(-1).scatter(1, target[:, None], 0.0)
            yield f"a loss with {name} of {dtype}", found.total, logits.logsumexp(-1)
            for part, result, right in (
                ("gradient of", found.pulled, shares @ numbers),
                ("sum of", found.even, numbers.sum(0).expand(6, -1)),
            ):
                assert result is not None
                yield f"the {part} {name} of {dtype}", result.to(dtype), right


COMPARISONS: dict[str, Callable[[Parts], Comparisons]] = {
    "linear": _linear,
    "gated": _gated,
    "general": _general,
    "convolution": _convolutions,
    "scan": _scans,
    "pattern": _patterns,
    "quantized": _quantized,
}
PARTS = ("output", "last state", "gradient of queries", "gradient of keys", "gradient of values", "gradient of state")


def _dense(phi: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, with the full matrix of weights."""
    q, k, v = phi(q), phi(k), torch.nn.functional.pad(v, (0, 1), value=1.0)
    read = (q @ k.mT).tril() @ v + q @ state
    return read[..., :-1] / (read[..., -1:] + 1e-6), state + k.mT @ v


def _values(
    call: Callable[..., Any], parts: list[Tensor], state: Tensor, gradients: bool, more: dict[str, Tensor] | None = None
) -> list[Tensor]:
    """Return the output, the last state, and with ``gradients`` those of all operands, and of ``more`` tensors."""
    leaves = [t.detach().requires_grad_(gradients) for t in (*parts, state)]
    q, k, v, first = leaves
    output, last = call(q, k, v, state=first)
    values = [output.detach(), last.detach()]
    if gradients:
        values += torch.autograd.grad(output.sin().sum() + last.sin().sum(), [*leaves, *(more or {}).values()])
    return values
