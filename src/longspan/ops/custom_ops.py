"""Kernels as operations of torch: autograd, compiled graphs, exported programs and second derivatives, in one place.

The operands of a family are a NamedTuple: first tensors that may have gradients, then other tensors, then numbers.
Its annotations are the schema of the operations that are registered here.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from .operands import double_backward

R = TypeVar("R", bound=tuple[Any, ...])

TYPES: dict[Any, str] = {
    **{Tensor: "Tensor", Tensor | None: "Tensor?", Sequence[int]: "int[]"},
    **{float: "float", bool: "bool", int: "int", str: "str"},
}


def _fields(operands: type[tuple[Any, ...]]) -> tuple[str, int]:
    """Return the fields of a NamedTuple in the notation of a schema, and how many of them are tensors."""
    hints = get_type_hints(operands)
    kinds = [TYPES[hint] for hint in hints.values()]
    return ", ".join(f"{kind} {name}" for kind, name in zip(kinds, hints, strict=True)), sum("T" in k for k in kinds)


def register(
    name: str, run: Callable[..., Any], shapes: Callable[..., Any], schema: str | None = None, mutates: str = ""
) -> Any:
    """Register a function as the operation ``longspan::NAME``.

    Args:
        name: The name.
        run: The function.
        shapes: Takes the same arguments, and allocates the results only.
        schema: The schema; None: that of the annotations of ``run``.
        mutates: The argument that the function overwrites, if there is one.
    """
    changed = (mutates,) if mutates else ()
    made: Any = torch.library.custom_op(f"longspan::{name}", run, mutates_args=changed, schema=schema)
    made.register_fake(shapes)
    return made


def contiguous_like(like: Tensor) -> Tensor:
    """Allocate a contiguous tensor of the same shape."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


class Kernel(NamedTuple):
    """A differentiable function of the operands of a family, made by ``kernel``."""

    apply: Callable[..., Any]
    inputs: int
    prepare: Callable[[Any], Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]

    def arguments(self, r: Any) -> tuple[Any, ...]:
        """Return what ``apply`` takes: the operands, and whether there will be a backward pass."""
        r = self.prepare(r)
        grows = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in r[: self.inputs])
        return *r, grows

    def __call__(self, r: Any) -> Any:
        """Return the outputs."""
        return self.apply(*self.arguments(r))


def kernel(
    name: str,
    operands: type[R],
    forward: Callable[[R, bool], tuple[Tensor, ...]],
    backward: Callable[[R, Sequence[Tensor], Sequence[Tensor], Sequence[bool]], Sequence[Tensor | None]],
    *,
    shapes: Callable[[R, bool], tuple[Tensor, ...]],
    again: Callable[[R], tuple[Tensor, ...]],
    inputs: int,
    kept: int,
    saves: int = 0,
    prepare: Callable[[R], R] = lambda r: r,
    ready: Callable[[], bool] = lambda: True,
    gradient_shapes: Callable[[R], Sequence[Tensor | None]] | None = None,
) -> Kernel:
    """Return ``forward`` as a differentiable function, one operation each way in the graphs of torch.compile.

    Args:
        name: Names the operations, ``longspan::NAME_forward`` and ``longspan::NAME_backward``.
        operands: The NamedTuple that the function takes.
        forward: Returns two outputs and what the backward pass needs; the flag is False if there will be none.
        backward: Takes the operands, the gradients of the outputs, what ``forward`` kept, and which of the first
            ``inputs`` operands need a gradient. Returns the gradients of these, None where there is none.
        shapes: Like ``forward``, but allocates only.
        again: The outputs by operations of torch, for derivatives of higher order.
        inputs: How many operands may have gradients. They come first; the last of them is the state, if there is one.
        kept: How many tensors ``forward`` returns after the outputs.
        saves: How many of the two outputs the backward pass takes, before what ``forward`` kept.
        prepare: Converts operands to the types that ``forward`` takes, so that autograd sees it.
        ready: Returns whether ``backward`` can run; ``again`` replaces it where not.
        gradient_shapes: Allocates the gradients of all inputs; None for tensors like the inputs, with a contiguous one
            for the last.

    Returns:
        A function of the operands. It returns the outputs.
    """
    fields, tensors = _fields(operands)
    more = saves + kept

    def forward_flat(*given: Any) -> tuple[Tensor, ...]:
        return forward(operands(*given[:-1]), given[-1])

    def forward_shapes(*given: Any) -> tuple[Tensor, ...]:
        return shapes(operands(*given[:-1]), given[-1])

    def unpacked(given: Sequence[Any]) -> tuple[R, Sequence[Tensor], Sequence[Tensor], Sequence[bool]]:
        grads, rest, needed = given[:2], given[2:-1], given[-1]
        return operands(*rest[: len(rest) - more]), grads, rest[len(rest) - more :], needed

    def backward_flat(*given: Any) -> list[Tensor]:
        r, grads, saved, needed = unpacked(given)
        return _wanted(r, backward(r, grads, saved, needed), needed)

    def backward_shapes(*given: Any) -> list[Tensor]:
        r, _, _, needed = unpacked(given)
        results = [None if t is None else torch.empty_like(t) for t in r[:inputs]]
        last = r[inputs - 1]
        results[-1] = None if last is None else contiguous_like(last)
        return _wanted(r, results if gradient_shapes is None else gradient_shapes(r), needed)

    several = ", ".join(["Tensor"] * (2 + kept))
    saved = "".join(f"Tensor kept{i}, " for i in range(more))
    forward_op = register(f"{name}_forward", forward_flat, forward_shapes, f"({fields}, bool keeps) -> ({several})")
    schema = f"(Tensor grad0, Tensor grad1, {fields}, {saved}bool[] needed) -> Tensor[]"
    backward_op = register(f"{name}_backward", backward_flat, backward_shapes, schema)

    def attend(ctx: Any, *numbers: Any) -> Any:
        *given, keeps = numbers
        compiling = torch.compiler.is_compiling()
        results = forward_op(*given, keeps) if compiling else forward(operands(*given), keeps)
        ctx.save_for_backward(*given[:tensors], *results[:saves], *results[2:])
        ctx.numbers = given[tensors:]
        return results[:2]

    def retreat(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved, needed = ctx.saved_tensors, list(ctx.needs_input_grad[:inputs])
        given, also = saved[:tensors], saved[tensors:]
        if torch.is_grad_enabled() or not ready():
            rest = (*given[inputs:], *ctx.numbers)
            results = double_backward(lambda *t: again(operands(*t, *rest)), given[:inputs], grads)
        else:
            run = backward_op if torch.compiler.is_compiling() else backward_flat
            made = iter(run(*grads, *given, *ctx.numbers, *also, needed))
            results = [next(made) if t is not None and need else None for t, need in zip(given, needed, strict=False)]
        return (*results, *[None] * (len(given) - inputs + len(ctx.numbers) + 1))

    # A class of this name, so that profiles and graphs of autograd show which kernel they mean.
    methods = {"forward": staticmethod(attend), "backward": staticmethod(retreat)}
    function: Any = type(name, (torch.autograd.Function,), methods)
    return Kernel(function.apply, inputs, prepare, forward, backward)


def _wanted(r: tuple[Any, ...], results: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor]:
    """Return the gradients of the operands that are given and need one."""
    pairs = zip(r, results, needed, strict=False)
    return [grad for t, grad, need in pairs if t is not None and need and grad is not None]


def exported(
    name: str, operands: type[R], form: Callable[[R], tuple[Tensor, Tensor]], *, inputs: int, like: int
) -> Callable[[R], tuple[Tensor, Tensor]]:
    """Register the operation that stands for ``form`` under torch.export, for any batch and length.

    A process that runs an exported program must import longspan. The operation chooses its form when it runs, and its
    backward pass runs the forward form again.

    Args:
        name: Names the operation, ``longspan::NAME``.
        operands: The NamedTuple that ``form`` takes.
        form: Returns the output and the last state, neither of which is an operand.
        inputs: How many operands may have gradients. They are the first, and the last of them is the state.
        like: Which operand has the shape and the dtype of the output.

    Returns:
        The operation as a function of the operands.
    """

    def run(r: R) -> tuple[Tensor, Tensor]:
        out, end = form(r)
        return out.contiguous(), end.contiguous()

    def shapes(r: R) -> tuple[Tensor, Tensor]:
        return contiguous_like(r[like]), contiguous_like(r[inputs - 1])

    return operation(name, operands, run, shapes=shapes, again=form, inputs=inputs)


class Operation(NamedTuple):
    """An operation of torch on the operands of a family, made by ``operation``."""

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    """takes the gradient of the first output, the operands and both outputs"""

    def __call__(self, r: Any) -> Any:
        """Return the outputs."""
        return self.forward(*r)


def operation(
    name: str,
    operands: type[R],
    forward: Callable[[R], tuple[Tensor, Tensor]],
    *,
    shapes: Callable[[R], tuple[Tensor, Tensor]],
    again: Callable[[R], tuple[Tensor, Tensor]],
    inputs: int,
    backward: Callable[[R, Tensor, Tensor, Tensor], Sequence[Tensor]] | None = None,
    ready: Callable[[R], bool] = lambda r: True,
) -> Operation:
    """Register ``forward`` as one operation, in eager calls too, so that dispatch modes and programs see it.

    Args:
        name: Names the operation, ``longspan::NAME``, or ``longspan::NAME_forward`` and ``longspan::NAME_backward``.
        operands: The NamedTuple that ``forward`` takes.
        forward: Returns two outputs, neither of which is an operand.
        shapes: Like ``forward``, but allocates only.
        again: The outputs by operations of torch, for derivatives of higher order.
        inputs: How many operands may have gradients. They are the first.
        backward: Takes the operands, the gradient of the first output, which is then the only one that has one, and
            both outputs. Returns the gradients of the inputs, each contiguous. None for those of ``again``.
        ready: Returns whether ``backward`` can run; ``again`` replaces it where not.

    Returns:
        The operation as a function of the operands.
    """
    fields, tensors = _fields(operands)

    def run_backward(grad: Tensor, *given: Any) -> list[Tensor]:
        assert backward is not None
        return list(backward(operands(*given[:-2]), grad, *given[-2:]))

    def backward_shapes(grad: Tensor, *given: Any) -> list[Tensor]:
        return [contiguous_like(t) for t in given[:inputs]]

    backward_op = None
    if backward is not None:
        schema = f"(Tensor grad, {fields}, Tensor first, Tensor second) -> Tensor[]"
        backward_op = register(f"{name}_backward", run_backward, backward_shapes, schema)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.numbers = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors], *(() if backward_op is None else output))

    def gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        given, fixed = saved[:inputs], (*saved[inputs:tensors], *ctx.numbers)
        if backward_op is None or torch.is_grad_enabled() or not ready(operands(*given, *fixed)):
            # Not an operation itself: inside one, autograd would not record the second forward pass.
            results = double_backward(lambda *t: again(operands(*t, *fixed)), given, grads)
        else:
            results = backward_op(grads[0], *given, *fixed, *saved[tensors:])
        return *results, *([None] * len(fixed))

    full = name if backward_op is None else f"{name}_forward"
    made = register(
        full, lambda *t: forward(operands(*t)), lambda *t: shapes(operands(*t)), f"({fields}) -> (Tensor, Tensor)"
    )
    made.register_autograd(gradients, setup_context=keep)
    return Operation(made, backward_op)
