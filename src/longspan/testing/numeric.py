"""Laws of numerics: every backend and dtype gives the reference's answer and gradients."""

import copy
import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..ops.backends import BACKENDS, backend
from ..ops.softmax.dense import repeat
from ..ops.tensors import merge, split
from .gauge import BATCH, DIM, EXACT, HEADS, SEVERAL, TOKENS, Broken, Gauge, Subject, agrees, derivatives, off_kinks
from .recurrent import run
from .rounding import Question

LONG = 100_003  # tokens, a prime
ROUNDED = 1e-5  # float32, relative like EXACT; rounding accumulates over the tokens
LAST_STEP = 1e-4  # float32, after LONG tokens
AUTOCAST = 0.05  # bfloat16


def oracle(subject: Subject, gauge: Gauge) -> None:
    """Every backend that serves a call gives the outputs, states and gradients of the reference, up to rounding."""
    # Values that float32 represents exactly, so that errors come from the computation alone. The reference is computed
    # on the CPU, so the law also compares a device with the CPU.
    x, before = subject.data(n=SEVERAL, dtype=torch.float32).cpu(), subject.data(2, 7, torch.float32).cpu()
    exact = subject.make(dtype=torch.float32).double().cpu()
    mask = subject.mask(BATCH, SEVERAL, seed=3, kept=0.7).cpu()
    segments = torch.tensor([[0] * 61 + [1] * 68 + [2] * 10, [0] * SEVERAL])
    cases: list[dict[str, Any]] = [{}]
    cases += [] if subject.why_not(("mask",)) else [{"mask": mask}]
    cases += [] if subject.why_not(("segments",)) else [{"segments": segments}]
    cases += [] if subject.why_not(("prefix",)) else [{"mask": mask, "prefix": torch.tensor([61, 7])}]
    cases += [] if subject.why_not(("context",)) or exact.positional else [{"context": before}]
    sums = len(list(exact.parameters()))
    # Without a state, as in training, and after a state: mechanisms have separate code for the two.
    starts = (False, True) if subject.causal else (False,)
    pairs = [(arguments, after) for arguments in cases for after in starts if not (after and "context" in arguments)]
    for arguments, after in pairs:
        question = Question(functools.partial(_outcome, after, arguments, "reference"), exact, x, before, sums=sums)
        given = ", ".join([*arguments, *(["a state"] if after else [])]) or "no arguments"
        for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, ROUNDED)):
            module = copy.deepcopy(exact).to(subject.device, dtype)
            for name in compared(subject.device):
                try:
                    found = _outcome(after, arguments, name, module, x, before)
                except ValueError as error:
                    if f"backend {name!r}" in str(error):  # the backend does not serve this call
                        continue
                    raise
                what = f"{name} in {dtype} with {given}"
                if dtype is torch.float64:  # precise enough even where rounding is magnified
                    gauge.close(found, question.answer, what, tolerance)
                else:
                    question.close(gauge, found, what, tolerance, dtype)


def compared(device: torch.device) -> list[str]:
    """Return the backends that ``oracle`` compares with the reference, as far as they serve a call.

    Triton kernels are compared on a GPU. On the CPU they would be interpreted, which takes minutes.
    """
    return [name for name in BACKENDS if name != "reference" and (name != "triton" or device.type == "cuda")]


def _outcome(after: bool, arguments: dict[str, Any], name: str, module: Any, x: Tensor, before: Tensor) -> list[Tensor]:
    """Outputs, state and gradients (of the weights last) on one backend, in the dtype and on the device of the weights.

    ``before`` is the context, or the tokens of an earlier call if ``after`` is True.
    """
    weight = next(module.parameters())
    inputs = [t.to(weight, copy=True).requires_grad_() for t in (x, before)]
    arguments = {argument: t.to(weight.device) for argument, t in arguments.items()}
    with backend(name):
        if "context" in arguments:
            y, state = module(inputs[0], **(arguments | {"context": inputs[1]}))
        else:
            state = module(inputs[1], module.init_state(BATCH))[1] if after else None
            y, state = module(inputs[0], state, **arguments)
    outputs = [y, *(() if state is None else pytree.tree_leaves(state))]
    return outputs + derivatives(outputs, inputs, module)


def attention_matrix(subject: Subject, gauge: Gauge) -> None:
    """``record["matrix"]`` times the values is the heads' output; a value matters exactly where the matrix is not 0."""
    prefix = torch.tensor([13, 7], device=subject.device)
    forms: dict[str, dict[str, Tensor]] = {"causal": {}, "bidirectional": {}, "prefix": {"prefix": prefix}}
    for form, arguments in forms.items():
        if subject.why_not((form,)) or (form == "prefix" and not subject.causal):
            continue
        module, x = subject.make(causal=form != "bidirectional"), subject.data()
        if "record" not in module.supported_args:
            continue
        mask = torch.ones(BATCH, TOKENS, dtype=torch.bool, device=subject.device)
        mask[0, 20:], mask[1, 5:9] = False, False
        seen: dict[str, Tensor] = {}
        hooks = [
            module.value.register_forward_hook(lambda _m, _i, v, seen=seen: seen.setdefault("v", v)),
            module.out.register_forward_pre_hook(lambda _m, i, seen=seen: seen.update(o=i[0])),
        ]
        record: dict[str, Tensor] = {}
        module(x, mask=mask, record=record, **arguments)
        for hook in hooks:
            hook.remove()
        matrix, allowed = record["matrix"], record["mask"].expand(BATCH, -1, TOKENS, TOKENS)
        groups = seen["v"].shape[-1] // (DIM // HEADS)
        product = merge(matrix @ repeat(split(seen["v"], groups), HEADS))
        gauge.close(product[mask], seen["o"][mask], "the recorded matrix times the values")
        gauge.require(not matrix.masked_select(~allowed).any(), "the recorded matrix is not zero outside its mask")
        gauge.require(not allowed[0, 0, :, 20:].any(), "the recorded mask allows a masked key")
        future = (allowed & mask[:, None, :, None]).triu(1).sum((1, 2, 3))
        pairs = {"causal": 0 * prefix, "prefix": prefix * (prefix - 1) // 2}.get(form, future)
        gauge.close(future, pairs, "pairs of a query and a future key that the recorded mask allows", 0.0)
        for i in range(0, 20, 3):
            (g,) = torch.autograd.grad(seen["o"][0, i].sum(), seen["v"], retain_graph=True)
            moves, weighs = g[0].abs().sum(-1) > 0, matrix[0, :, i].abs().sum(0) > 0
            gauge.require(torch.equal(moves, weighs), f"values that move output {i} are not those of the matrix")
    if subject.causal and not subject.why_not(("segments",)):
        module, x, found = subject.make(), subject.data(), []
        segments = torch.tensor([0] * 7 + [1] * (TOKENS - 7), device=subject.device).expand(BATCH, -1)
        for state in (None, module(subject.data(2), module.init_state(BATCH))[1]):
            record = {}
            module(x, state, segments=segments, record=record)
            found.append(record["matrix"][:, :, 7:, -TOKENS + 7 :])
        gauge.close(found[1], found[0], "recorded weights in a segment that does not continue the state")


def gradients(subject: Subject, gauge: Gauge) -> None:
    """Gradients equal finite differences, exist for every parameter, and do not depend on the cut into calls."""
    module, x = off_kinks(subject.make()), subject.data(n=5)[:1].requires_grad_()
    names, values = zip(*module.named_parameters(), strict=True)

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))[0]

    gauge.require(agrees(call, (x, *values)), "gradcheck fails")
    call(x, *values).sum().backward()
    gauge.require(all(p.grad is not None for p in values), "a parameter gets no gradient")
    if not subject.causal:
        return
    found = []
    for cuts in ([TOKENS], [5, 8, 16]):
        x = subject.data().requires_grad_()
        y, _ = run(module, x, cuts, module.init_state(BATCH))
        found.append(derivatives([y], [x], module))
    gauge.close(found[1], found[0], "gradients through states")


def additive(subject: Subject, gauge: Gauge) -> None:
    """The gradient of a batch, penalty included, is the mean over its halves; recorded statistics add up."""
    x = subject.data()
    records = any(kind.penalty for kind in [*subject.classes, *([subject.kind] if subject.kind else [])])
    records = records or any(cls.statistics for cls in subject.classes)
    for how in ("as initialized", "far from initialization"):
        module = subject.make()
        if how != "as initialized":
            generator = torch.Generator().manual_seed(6)
            with torch.no_grad():
                # Far enough to leave the range that some parameters have.
                for weight in module.parameters():
                    weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype).to(weight.device))
        whole, *halves = (_pulled(module, rows, records) for rows in (x, x[:1], x[1:]))
        mean = [sum(grads) / 2 for grads in zip(*(gradients for gradients, _ in halves), strict=True)]
        gauge.close(mean, whole[0], f"gradients of two half batches, with weights {how}")
        counted = [sum(counts) for counts in zip(*(statistics for _, statistics in halves), strict=True)]
        gauge.close(counted, whole[1], f"statistics of two half batches, with weights {how}")


def _pulled(module: Any, x: Tensor, records: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the weights for a loss that is a mean over rows, and the recorded statistics."""
    record: dict[str, Any] = {"penalty": None, "statistics": None}
    y = module(x, record=record)[0] if records else module(x)[0]
    upstream = torch.randn(y.shape[1:], generator=torch.Generator().manual_seed(4), dtype=y.dtype).to(y.device)
    loss = (y * upstream).sum((1, 2)).mean()
    if record.get("penalty") is not None:
        loss = loss + record["penalty"]
    layers = [record, *record.get("layers", ())]
    counted = [leaf for one in layers for leaf in pytree.tree_leaves(one.get("statistics")) if leaf is not None]
    return [*torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True)], counted


def dtypes(subject: Subject, gauge: Gauge) -> None:
    """Each dtype is preserved and finite; its error is at most twice the reference's, or explained by rounding."""
    exact, x = subject.make(), subject.data()
    question = Question(lambda module, x: [module(x)[0]], exact, x)
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            module, low = subject.make(dtype=dtype), x.to(dtype)
            # Each order of the sums is one draw of rounding errors: the reference's bound is the larger of its two.
            with backend("reference"):
                reference = _both_ways(subject, module, low).values()
            plain = max((y.double() - question.answer[0]).abs().max().item() for y in reference)
            outputs = _both_ways(subject, module, low)
            for how, y in outputs.items():
                gauge.require(y.dtype is dtype and y.isfinite().all(), f"{dtype}, {how}: {y.dtype}, or not finite")
                allowed = 2 * plain + torch.finfo(dtype).eps
                question.close(gauge, [y], f"{dtype}, {how}", allowed, dtype)
        module = subject.make(dtype=torch.float32)
        with torch.autocast(subject.device.type, torch.bfloat16):
            outputs = _both_ways(subject, module, x.float())
        for how, y in outputs.items():
            gauge.require(y.isfinite().all(), f"autocast, {how}: not finite")
            question.close(gauge, [y], f"autocast, {how}", AUTOCAST, torch.bfloat16)


def _both_ways(subject: Subject, module: Any, x: Tensor) -> dict[str, Tensor]:
    """The output of one call, and of a token per call if the mechanism is causal."""
    outputs = {"one call": module(x)[0]}
    if subject.causal:
        outputs["steps"] = run(module, x, [1] * TOKENS, module.init_state(BATCH))[0]
    return outputs


def adversarial(subject: Subject, gauge: Gauge) -> None:
    """Tiny and huge inputs and empty, one-token, fully masked and very long sequences stay finite and consistent."""
    module = subject.make(dtype=torch.float32)
    for scale in (1e-4, 1.0, 30.0):
        x = (subject.data(dtype=torch.float32) * scale).requires_grad_()
        y = module(x)[0]
        y.sum().backward()
        gauge.require(y.isfinite().all() and x.grad.isfinite().all(), f"inputs of norm {scale}: not finite")  # pyright: ignore[reportOptionalMemberAccess] (x has a gradient)
    for n in (0, 1):
        y = module(subject.data(n=n, dtype=torch.float32))[0]
        gauge.require(y.shape == (BATCH, n, DIM) and y.isfinite().all(), f"{n} tokens: {tuple(y.shape)}, or not finite")
    if not subject.why_not(("mask",)):
        x = subject.data(dtype=torch.float32).requires_grad_()
        mask = torch.ones(BATCH, TOKENS, dtype=torch.bool, device=subject.device)
        mask[0] = False
        y = module(x, mask=mask)[0]
        gauge.close(y[0], torch.zeros_like(y[0]), "a row of padding only", 0.0)
        y.square().sum().backward()
        grad = x.grad
        gauge.require(
            grad is not None and grad.isfinite().all() and not grad[0].any(),
            "a row of padding only: its gradient is not zero",
        )
    if subject.causal:
        _empty_calls(subject, module, gauge)
    if subject.causal and not subject.why_not(("below N^2",)):
        with torch.no_grad():
            x = subject.data(n=LONG, dtype=torch.float32)
            y = module(x)[0]
            _, state = module(x[:, :-1], module.init_state(BATCH))
            gauge.require(y.isfinite().all(), f"{LONG} tokens: not finite")
            _last_step(subject, gauge, module(x[:, -1:], state)[0], y[:, -1:])


def _last_step(subject: Subject, gauge: Gauge, step: Tensor, y: Tensor) -> None:
    """The last token as a decode step equals one call; in float64 if rounding changes a content-based choice."""
    what = f"{LONG} tokens: the last one as a step"
    try:
        gauge.close(step, y, what, LAST_STEP)
    except Broken:
        if all(cls.family != "content" for cls in subject.classes):
            raise
        module, x = subject.make(), subject.data(n=LONG)
        _, state = module(x[:, :-1], module.init_state(BATCH))
        gauge.close(module(x[:, -1:], state)[0], module(x)[0][:, -1:], f"{what}, in float64", EXACT)
        gauge.close(step, y, what, LAST_STEP, granted=[(step - y).abs()])  # for the report


def _empty_calls(subject: Subject, module: Any, gauge: Gauge) -> None:
    x = subject.data(dtype=torch.float32)
    with torch.no_grad():
        _, state = module(x[:, :3], module.init_state(BATCH))
        y, same = module(x[:, :0], state)
        gauge.require(y.shape == (BATCH, 0, DIM), f"no tokens after a state: {tuple(y.shape)}")
        gauge.close(module(x[:, 3:], same)[0], module(x[:, 3:], state)[0], "a call without tokens", 0.0)
        _, state = module(x[:0], module.init_state(0))
        gauge.require(module(x[:0, :1], state)[0].shape == (0, 1, DIM), "a batch without rows")
