"""Reversible blocks: inputs are recomputed from outputs, so activation memory does not grow with the depth."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...ops.operands import transformed
from ...ops.tensors import upcast_half
from .block import Block
from .gates import Add
from .plain import Plain, StackCall


class Reversible(Plain):
    r"""Two streams: $y_1 = x_1 + F(x_2)$, $y_2 = x_2 + G(y_1)$, F the attention and G the feed-forward network.

    Both streams start as the input, and the output is their mean. In training without a state, the backward pass
    recomputes $x_2 = y_2 - G(y_1)$ and $x_1 = y_1 - F(x_2)$. This costs one more forward pass, with the same random
    numbers and autocast. Streams are float32 or float64, so recomputed values differ only by rounding. With a state,
    and under a compiler or a transform, autograd keeps the activations; the result is the same.

    ``check`` raises ValueError for blocks without prenorm, for residual gates, and for attentions that sample or pass a
    carry to the next layer.

    References:
        Gomez et al. 2017 (1707.04585), eqs. 6 to 8; Kitaev et al. 2020 (2001.04451), section 3.
    """

    def forward(self, blocks: list[Block], x: Tensor, state: Any, call: StackCall) -> tuple[Tensor, Any]:
        """Run all blocks; arguments and results as in ``Plain.forward``."""
        wide = upcast_half(x)
        parameters = [p for block in blocks for p in block.parameters() if p.requires_grad]
        graph = torch.is_grad_enabled() and (x.requires_grad or parameters)
        if state is None and graph and not torch.compiler.is_compiling() and not transformed():
            given = {name: value for name, value in call.arguments.items() if not _learned(value)}
            extra = {name: value for name, value in call.arguments.items() if _learned(value)}
            run = _Run(blocks, x.dtype, given, tuple(extra), call)
            end = _Reversed.apply(run, wide, *extra.values(), *parameters)
            one, two, penalties = cast(tuple[Tensor, Tensor, Tensor], end)
            for layer, penalty in zip(call.layers, penalties, strict=True):
                if "penalty" in layer:
                    layer["penalty"] = penalty
            return ((one + two) / 2).to(x.dtype), None
        one = two = wide
        new: list[Any] = []
        for i, block in enumerate(blocks):
            record, before = call.record_for(block), None if state is None else state[i]
            add, after = block.attention_branch(two.to(x.dtype), before, record=record, **call.arguments)
            one = one + add
            two = two + block.ffn_branch(one.to(x.dtype))
            call.layers.append(record or {})
            new.append(after)
        return ((one + two) / 2).to(x.dtype), None if state is None else tuple(new)


def check(blocks: list[Block]) -> None:
    """Raise ValueError for blocks that cannot be reversed."""
    for block in blocks:
        if not block.prenorm:
            raise ValueError("a reversible stack needs prenorm=True, because a norm of the stream cannot be reversed")
        if not isinstance(block.join1, Add):
            raise ValueError("a reversible stack needs residual='add', because gates cannot be reversed")
        if block.attention.samples:
            raise ValueError(f"a reversible stack does not support {block.attention.name}, which samples")
        if block.attention.has_layer_carry:
            raise ValueError(
                f"a reversible stack does not support {block.attention.name}, which passes a carry to the next layer"
            )


class _Run(NamedTuple):
    """The inputs of both passes, except tensors with gradients."""

    blocks: list[Block]
    dtype: torch.dtype
    given: dict[str, Any]
    names: tuple[str, ...]
    call: StackCall


class _Reversed(torch.autograd.Function):
    """Streams and penalties after all blocks; only the final streams are saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, run: _Run, x: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        arguments = run.given | dict(zip(run.names, tensors, strict=False))
        one = two = x
        ctx.run, ctx.generators, ctx.autocast, penalties = run, [], _autocast(x), []
        for block in run.blocks:
            record, before = run.call.record_for(block), _generators(x, block)
            one = one + block.attention_branch(two.to(run.dtype), None, record=record, **arguments)[0]
            ctx.generators.append((before, _generators(x, block)))
            two = two + block.ffn_branch(one.to(run.dtype))
            run.call.layers.append(record or {})
            penalties.append((record or {}).get("penalty", x.new_zeros(())))
        ctx.has_penalty = ["penalty" in layer for layer in run.call.layers]
        ctx.save_for_backward(one, two, *tensors)
        return one, two, torch.stack(penalties)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (one gradient for each output)
        ctx: Any, grad_one: Tensor, grad_two: Tensor, grad_penalties: Tensor
    ) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        one, two, *tensors = ctx.saved_tensors
        wanted = [t for t in tensors if t.requires_grad]
        arguments = run.given | dict(zip(run.names, tensors, strict=False))
        found: dict[int, Tensor] = {}

        def pull(outs: list[Tensor], grads: list[Tensor], read: Tensor) -> Tensor:
            """Return the gradient of ``read``; add those of weights and arguments to ``found``."""
            # None for what the outputs do not depend on, which the stubs leave out.
            first, *others = cast(
                tuple[Tensor | None, ...], torch.autograd.grad(outs, [read, *wanted], grads, allow_unused=True)
            )
            for tensor, grad in zip(wanted, others, strict=True):
                if grad is not None:
                    found[id(tensor)] = found[id(tensor)] + grad if id(tensor) in found else grad
            return torch.zeros_like(read) if first is None else first

        with _replayed(one, ctx.autocast):
            for i in reversed(range(len(run.blocks))):
                block, (before, between) = run.blocks[i], ctx.generators[i]
                read = one.detach().requires_grad_()
                with torch.enable_grad():
                    _set(one, between)
                    out = block.ffn_branch(read.to(run.dtype))
                two = two - out.detach()
                grad_one = grad_one + pull([out], [grad_two.to(out.dtype)], read)
                read = two.detach().requires_grad_()
                record: dict[str, Any] | None = {"penalty": None} if ctx.has_penalty[i] else None
                with torch.enable_grad():
                    _set(one, before)
                    add = block.attention_branch(read.to(run.dtype), None, record=record, **arguments)[0]
                one = one - add.detach()
                outs, grads = [add], [grad_one.to(add.dtype)]
                if record and record["penalty"].requires_grad:
                    outs, grads = [*outs, record["penalty"]], [*grads, grad_penalties[i].to(record["penalty"].dtype)]
                grad_two = grad_two + pull(outs, grads, read)
        return None, grad_one + grad_two, *(found.get(id(t)) for t in tensors)


def _learned(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _generators(x: Tensor, block: Block) -> tuple[Tensor, ...]:
    """The states of the random generators that dropout uses; empty outside training."""
    if not block.training:
        return ()
    return (
        torch.get_rng_state(),
        *([torch.get_device_module(x.device).get_rng_state(x.device)] if not x.is_cpu else []),
    )


def _set(x: Tensor, generators: tuple[Tensor, ...]) -> None:
    if generators:
        torch.set_rng_state(generators[0])
    if len(generators) > 1:
        torch.get_device_module(x.device).set_rng_state(generators[1], x.device)


def _autocast(x: Tensor) -> dict[str, Any]:
    kind = x.device.type
    return {
        "device_type": kind,
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


@contextmanager
def _replayed(x: Tensor, autocast: dict[str, Any]) -> Generator[None, None, None]:
    """Restore autocast of the forward pass, and the generators afterwards."""
    devices = [] if x.is_cpu else [x.device]
    with torch.random.fork_rng(devices=devices, device_type=x.device.type if devices else "cuda"):
        with torch.amp.autocast(**autocast):
            yield
