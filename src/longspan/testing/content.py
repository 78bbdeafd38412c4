"""The law that contents of masked tokens and packed neighbors, even NaN and infinity, reach nothing else."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..ops.backends import backend
from .gauge import BATCH, EXACT, TOKENS, Gauge, Subject, derivatives
from .pairs import all_pairs

LARGEST = torch.finfo(torch.float64).max
# Contents of masked tokens.
CONTENTS = torch.tensor([float("nan"), float("inf"), -float("inf"), LARGEST, -LARGEST, 1.0], dtype=torch.float64)
# Backends and dtypes for packed sequences; auto includes the native kernels where they are available.
FORMS = (("auto", torch.float32), ("torch", torch.float64), ("reference", torch.float32))
SINGLE = 1e-4


def content(subject: Subject, gauge: Gauge) -> None:
    """Contents of masked tokens and packed neighbors, even NaN and infinity, reach no output, state or gradient."""
    segments = torch.tensor([[0] * 7 + [1] * 11 + [2] * 11, [0] * TOKENS], device=subject.device)
    masks = _masks(subject)
    for causal in (True, False):
        if subject.why_not(("causal" if causal else "bidirectional",)):
            continue
        forms: dict[str, dict[str, Any]] = {"a mask": {}}
        forms |= {} if subject.why_not(("segments",)) else {"segments": {"segments": segments}}
        if causal and not subject.why_not(("prefix",)):
            forms["a prefix"] = {"prefix": torch.tensor([5, 11], device=subject.device)}
        modules = {plain: _module(subject, causal, plain) for plain in (False, True)}
        for row in all_pairs(plain=(False, True), place=tuple(masks), form=tuple(forms)):
            mask, what = masks[row["place"]], f"padding {row['place']}, with {row['form']}"
            arguments = {"mask": mask, **forms[row["form"]]}
            _moves_nothing(modules[row["plain"]], subject.data(), mask, arguments, what, gauge)
    if not subject.why_not(("context",)) and not (module := _module(subject, subject.causal, True)).positional:
        for place, mask in masks.items():
            _moves_nothing_across(module, subject.data(), subject.data(2), mask, f"a context padded {place}", gauge)
    if not subject.why_not(("segments",)):
        for causal in (True, False):
            if not subject.why_not(("causal" if causal else "bidirectional",)):
                for name, dtype in FORMS:
                    with backend(name):
                        _neighbors(subject, causal, dtype, f"backend {name!r}, {dtype}", gauge)


def _neighbors(subject: Subject, causal: bool, dtype: torch.dtype, what: str, gauge: Gauge) -> None:
    """A sequence with NaN or infinity in its inputs or gradients does not change the others of its row."""
    segments = torch.tensor([[0] * 7 + [1] * 11 + [2] * 11, [0] * 13 + [1] * 16], device=subject.device)
    spoiled = torch.stack([segments[0] == 1, segments[1] == 0])
    module = subject.make(causal=causal, dtype=dtype)
    x, more = subject.data(dtype=dtype), subject.data(2, 5, dtype=dtype)
    generator = torch.Generator().manual_seed(9)

    def outcome(x: Tensor, factor: float = 1.0) -> list[Tensor]:
        """Results of the other sequences; ``factor`` scales the gradients of the spoiled outputs."""
        x = x.clone().requires_grad_()
        carry = {"carry": module.init_carry(x, None)} if getattr(module, "has_layer_carry", False) else {}
        outputs, after = [module(x, segments=segments, **carry)[0]], []
        if causal:
            y, state = module(x, module.init_state(BATCH), segments=segments)
            outputs.append(y)
            after.append(module(more, state)[0])
        generator.manual_seed(4)
        upstream = [torch.randn(y.shape, generator=generator).to(y) for y in (*outputs, *after)]
        for grad in upstream[: len(outputs)]:
            grad[spoiled] *= factor
        (of_x,) = torch.autograd.grad([*outputs, *after], [x], upstream)
        return [*after, *(t[~spoiled] for t in (*outputs, of_x))]

    large = x.clone()
    large[0, 9], large[1, 4] = torch.finfo(dtype).max / 2, -torch.finfo(dtype).max / 2
    expected, tolerance = outcome(x), EXACT if dtype == torch.float64 else SINGLE
    gauge.close(outcome(_spoiled(x, ~spoiled)), expected, f"{what}: NaN and infinity in a packed neighbor", tolerance)
    gauge.close(outcome(large), expected, f"{what}: the largest numbers in a packed neighbor", tolerance)
    gauge.close(outcome(x, torch.nan), expected, f"{what}: NaN in the gradients of a packed neighbor", tolerance)


def _module(subject: Subject, causal: bool, plain: bool) -> Any:
    """Build the module; ``plain`` sets biases to zero, so that projections keep a row of zeros."""
    module: nn.Module = subject.make(causal=causal)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if plain and name.endswith("bias"):
                weight.zero_()
    return module


def _masks(subject: Subject) -> dict[str, Tensor]:
    """Masks by position of the padding: row 0 has at least 11 real tokens, row 1 has no padding."""
    between = subject.mask(TOKENS, seed=7, kept=0.6)
    masks = {}
    for place, kept in {"left": slice(9, TOKENS), "right": slice(0, 20), "in between": between}.items():
        masks[place] = torch.zeros(BATCH, TOKENS, dtype=torch.bool, device=subject.device)
        masks[place][0, kept], masks[place][1] = True, True
    return masks


def _spoiled(x: Tensor, mask: Tensor) -> Tensor:
    which = torch.randint(len(CONTENTS), x.shape, generator=torch.Generator().manual_seed(8))
    return torch.where(mask[..., None], x, CONTENTS[which].to(x))


def _moves_nothing(module: Any, x: Tensor, mask: Tensor, arguments: dict[str, Any], what: str, gauge: Gauge) -> None:
    def outcome(x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        if getattr(module, "has_layer_carry", False):
            y, _, handed = module(x, carry=module.init_carry(x, mask), **arguments)
            outputs = [y, handed]
        else:
            outputs = [module(x, **arguments)[0]]
        if module.causal:
            _, state = module(x, module.init_state(BATCH), **arguments)
            y, state = module(x, state, **arguments)
            outputs += [y, *pytree.tree_leaves(state)]
        of_x, *of_weights = derivatives(outputs, [x], module)
        return [*outputs, *of_weights, of_x]

    _same(outcome(_spoiled(x, mask)), outcome(x), mask, what, gauge)


def _moves_nothing_across(module: Any, x: Tensor, context: Tensor, mask: Tensor, what: str, gauge: Gauge) -> None:
    def outcome(context: Tensor) -> list[Tensor]:
        context = context.clone().requires_grad_()
        y, state = module(x, context=context, context_mask=mask)
        outputs = [y, module(x, state)[0]]
        of_context, *of_weights = derivatives(outputs, [context], module)
        return [*outputs, *of_weights, of_context]

    _same(outcome(_spoiled(context, mask)), outcome(context), mask, what, gauge)


def _same(found: list[Tensor], expected: list[Tensor], mask: Tensor, what: str, gauge: Gauge) -> None:
    """Results equal those with ordinary content, and masked tokens have zero gradient (the last result)."""
    gauge.close(found, expected, f"{what}: NaN and infinity in masked tokens")
    gauge.require(not found[-1][~mask].any(), f"{what}: a masked token's gradient is not zero")
