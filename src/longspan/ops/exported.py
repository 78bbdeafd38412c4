"""Recurrences in an exported program: one operation each for any batch and length, which chooses its form when run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .operands import double_backward


def operation(schema: str, form: Callable[..., tuple[Tensor, Tensor]], *, inputs: int, like: int) -> Any:
    """Register the operation that stands for ``form`` under torch.export; the result takes the arguments of ``form``.

    A process that runs an exported program must import longspan. The backward pass runs the forward form again for its
    gradients.

    Args:
        schema: The name and the arguments, first tensors, then numbers, as in ``longspan::scan(Tensor x, bool early)``.
        form: Returns the output and the last state, neither of which is an operand.
        inputs: How many arguments may have gradients. They are the first, and the last of them is the state.
        like: Which argument has the shape and the dtype of the output.
    """

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        out, end = form(*given)
        return out.contiguous(), end.contiguous()

    def shapes(*given: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(given[i], memory_format=torch.contiguous_format) for i in (like, inputs - 1))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.numbers = tuple(t for t in inputs if isinstance(t, bool | int | float))
        ctx.save_for_backward(*inputs[: len(inputs) - len(ctx.numbers)])

    def gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Not an operation itself: inside one, autograd would not record the second forward pass.
        saved = ctx.saved_tensors
        operands, fixed = saved[:inputs], (*saved[inputs:], *ctx.numbers)
        if torch.is_grad_enabled():
            found = double_backward(lambda *given: form(*given, *fixed), operands, grads)
        else:
            given = [t if t is None else t.detach().requires_grad_() for t in operands]
            with torch.enable_grad():
                outputs = form(*given, *fixed)
            made = iter(torch.autograd.grad(outputs, [t for t in given if t is not None], grads))
            found = [None if t is None else next(made) for t in operands]
        return *found, *([None] * len(fixed))

    name, arguments = schema.split("(", 1)
    options: dict[str, Any] = {"mutates_args": (), "schema": f"({arguments} -> (Tensor, Tensor)"}
    made: Any = torch.library.custom_op(name, run, **options)
    made.register_fake(shapes)
    made.register_autograd(gradients, setup_context=keep)
    return made
