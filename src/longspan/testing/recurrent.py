"""Laws of time: causality, and equal results for any cut of a sequence into calls."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..states import clone, detach, nbytes, select
from ..states import load as load_state
from ..states import save as save_state
from .gauge import BATCH, TOKENS, Gauge, Subject

CUTS = ([1] * TOKENS, [2, 3, 8, 16], [TOKENS - 1, 1], [TOKENS])


def run(module, x: Tensor, cuts: list[int], state: Any, mask: Tensor | None = None, **arguments) -> tuple[Tensor, Any]:
    """Run a sequence in calls of the given lengths -> all outputs, the last state."""
    outputs = []
    masks = [None] * len(cuts) if mask is None else mask.split(cuts, 1)
    for part, real in zip(x.split(cuts, 1), masks, strict=True):
        y, state = module(part, state, mask=real, **arguments)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def causal(subject: Subject, gauge: Gauge) -> None:
    """Changing the tokens after t leaves the outputs up to t unchanged."""
    module, x, other = subject.make(), subject.data(), 3 * subject.data(2)
    y = module(x)[0]
    for t in range(1, TOKENS):
        gauge.close(module(torch.cat([x[:, :t], other[:, t:]], 1))[0][:, :t], y[:, :t], f"outputs before token {t}")


def beginning(subject: Subject, gauge: Gauge) -> None:
    """The first t tokens alone have the outputs that they have in the whole sequence."""
    module, x = subject.make(), subject.data()
    y = module(x)[0]
    for t in range(1, TOKENS):
        gauge.close(module(x[:, :t])[0], y[:, :t], f"the first {t} tokens alone")


def parallel_is_recurrent(subject: Subject, gauge: Gauge) -> None:
    """Any cut of a sequence into calls gives the outputs of one call, with or without an initial state."""
    module, x, before = subject.make(), subject.data(), subject.data(3, 7)
    y = module(x)[0]
    both = module(torch.cat([before, x], 1))[0][:, 7:]
    for cuts in CUTS:
        gauge.close(run(module, x, cuts, module.init_state(BATCH))[0], y, f"calls of {cuts} tokens")
        _, state = module(before, module.init_state(BATCH))
        gauge.close(run(module, x, cuts, state)[0], both, f"calls of {cuts} tokens after a prompt")


def state(subject: Subject, gauge: Gauge) -> None:
    """A state is a value: calls leave it unchanged; forked, selected, saved and donated states continue correctly."""
    module, x, other = subject.make(), subject.data(), subject.data(2)
    # With spare capacity, a growing state could be written in place without a visible effect.
    for capacity in (None, TOKENS):
        _continued(module, x, other, capacity, gauge)


def _continued(module, x: Tensor, other: Tensor, capacity: int | None, gauge: Gauge) -> None:
    with torch.no_grad():
        _, kept = module(x[:, :11], module.init_state(BATCH, capacity), donate=capacity is not None)
        copy = clone(kept)
        steps = [module(tail[:, 11:12], kept)[0] for tail in (x, other)]
        gauge.close(kept, copy, "the state after two steps that continued it", 0.0)
        gauge.require(nbytes(copy) == nbytes(kept) > 0, "a state and its copy differ in size, or are empty")
        ends = [module(tail[:, 11:], kept)[0] for tail in (x, other)]
        gauge.close(kept, copy, "the state after two calls that continued it", 0.0)
        for tail, one, end in zip((x, other), steps, ends, strict=True):
            gauge.close(one, end[:, :1], "a step from a state that another step continued")
            whole = module(torch.cat([x[:, :11], tail[:, 11:]], 1))[0][:, 11:]
            gauge.close(end, whole, "one of two continuations of a state")
            gauge.close(module(tail[:, 11:], detach(clone(kept)))[0], end, "a continuation of a copy")
            _donated(module, tail[:, 11:], kept, copy, end, gauge)
        swapped = module(x[[1, 0], 11:], select(kept, [1, 0]))[0]
        gauge.close(swapped, ends[0][[1, 0]], "a continuation of selected rows")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            save_state(kept, path)
            loaded = load_state(path, module.init_state(BATCH))
        gauge.close(loaded, kept, "a state that was saved and loaded", 0.0)
        gauge.close(module(x[:, 11:], loaded)[0], ends[0], "a continuation of a loaded state")


def _donated(module, tail: Tensor, kept: Any, copy: Any, end: Tensor, gauge: Gauge) -> None:
    gauge.close(module(tail, clone(kept), donate=True)[0], end, "a continuation with donate=True")
    for capacity in (None, TOKENS):
        fresh = module.init_state(BATCH, capacity)
        whole = run(module, tail, [1] * tail.shape[1], fresh, donate=True)[0]
        gauge.close(whole, module(tail)[0], f"steps with donate=True and capacity={capacity}")
    # A later call must not write into the state of an earlier one through shared memory.
    _, later = module(tail[:, :3], kept)
    module(tail[:, 3:], later, donate=True)
    gauge.close(kept, copy, "a state whose successor was donated", 0.0)


def padding(subject: Subject, gauge: Gauge) -> None:
    """Masked tokens are ignored, wherever they are: left, right, in the middle, or before later calls."""
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            _padding(subject, gauge)


def _padding(subject: Subject, gauge: Gauge) -> None:
    module, x, more = subject.make(), subject.data(), subject.data(2, 5)
    kept = subject.mask(TOKENS, seed=7, kept=0.6)
    places = {"left": slice(4, TOKENS), "right": slice(0, 20), "middle": kept}
    for place, keep in places.items():
        mask = torch.zeros(BATCH, TOKENS, dtype=torch.bool, device=subject.device)
        mask[0, keep], mask[1] = True, True
        garbage = torch.where(mask[..., None], x, 1e3 * subject.data(9))
        alone, full = module(x[:1, mask[0]])[0], module(x[1:])[0]
        y = module(garbage, mask=mask)[0]
        gauge.close(y[:1, mask[0]], alone, f"padding on the {place}: the padded row")
        gauge.close(y[1:], full, f"padding on the {place}: the other row")
        gauge.close(y[:1, ~mask[0]], torch.zeros_like(y[:1, ~mask[0]]), f"padding on the {place}: masked outputs", 0.0)
        if not subject.causal:
            continue
        for cuts in ([TOKENS], [5, 8, 16]):
            y, after = run(module, garbage, cuts, module.init_state(BATCH), mask)
            gauge.close(y[:1, mask[0]], alone, f"padding on the {place}, in calls of {cuts}")
            _, expected = module(x[:1, mask[0]], module.init_state(1))
            then = module(more[:1], expected)[0]
            gauge.close(module(more, after)[0][:1], then, f"padding on the {place}, then more tokens")
            with torch.no_grad():
                _, given = run(module, garbage, cuts, module.init_state(BATCH, 2), mask, donate=True)
                gauge.close(module(more, given, donate=True)[0][:1], then, f"padding on the {place}, donate=True")


def mixed_rows(subject: Subject, gauge: Gauge) -> None:
    """Fresh and used rows share one state; each row continues as it would alone."""
    _mixed_rows(subject, 0, gauge)
    with torch.no_grad():
        for fresh in range(BATCH):
            _mixed_rows(subject, fresh, gauge)


def _mixed_rows(subject: Subject, fresh: int, gauge: Gauge) -> None:
    module, before, x, more = subject.make(), subject.data(3, 7), subject.data(), subject.data(2, 5)
    forms: dict[str, dict[str, Tensor]] = {"one call": {}}
    forms["a mask"] = {"mask": subject.mask(BATCH, TOKENS, seed=7, kept=0.7)}
    if not subject.why_not(("segments",)):
        segments = torch.tensor([[0] * 7 + [1] * (TOKENS - 7), [0] * TOKENS], device=subject.device)
        forms["segments"] = {"segments": segments}
    if not subject.why_not(("prefix",)):
        forms["a prefix"] = {"prefix": torch.tensor([5, 11], device=subject.device)}
    read = (torch.arange(BATCH, device=subject.device) != fresh)[:, None].expand(-1, 7)
    _, state = module(before, module.init_state(BATCH), mask=read)
    for row in range(BATCH):
        own, alone = slice(row, row + 1), module.init_state(1)
        if row != fresh:
            _, alone = module(before[own], alone)
        what = f"a {'fresh' if row == fresh else 'used'} row next to another"
        for form, arguments in forms.items():
            y, after = module(x, state, **arguments)
            expected, then = module(x[own], alone, **{name: value[own] for name, value in arguments.items()})
            gauge.close(y[own], expected, f"{what}: {form}")
            gauge.close(module(more, after)[0][own], module(more[own], then)[0], f"{what}: calls after {form}")
        y, _ = run(module, x[:, :3], [1, 1, 1], state)
        gauge.close(y[own], module(x[own, :3], alone)[0], f"{what}: steps")


def rows_independent(subject: Subject, gauge: Gauge) -> None:
    """The outputs of a row do not depend on the other rows of the batch."""
    module, x = subject.make(), subject.data()
    y = module(x)[0]
    changed = torch.cat([x[:1], 5 * subject.data(2)[1:]])
    gauge.close(module(x[:1])[0], y[:1], "row 0 alone")
    gauge.close(module(changed)[0][:1], y[:1], "row 0 next to another row 1")


def packed(subject: Subject, gauge: Gauge) -> None:
    """Packed segments have the outputs and the state of separate runs, with or without gradients."""
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            _packed(subject, gauge)


def _packed(subject: Subject, gauge: Gauge) -> None:
    directions = [d for d in (True, False) if not subject.why_not(("causal" if d else "bidirectional",))]
    x, more = subject.data(), subject.data(2, 5)
    segments = torch.tensor([[0] * 7 + [3] * 11 + [4] * 11, [2] * TOKENS], device=subject.device)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool, device=subject.device)
    mask[0, [0, 2, 7, 17, 28]] = False
    for direction in directions:
        module = subject.make(causal=direction)
        y = module(x, segments=segments)[0]
        holes = module(x, segments=segments, mask=mask)[0]
        odd = torch.where(mask, segments, torch.arange(TOKENS, device=subject.device).flip(0) - 5)
        gauge.close(module(x, segments=odd, mask=mask)[0], holes, "other ids of masked tokens")
        for part in (slice(0, 7), slice(7, 18), slice(18, TOKENS)):
            gauge.close(y[:1, part], module(x[:1, part])[0], "a packed segment")
            gauge.close(holes[:1, part], module(x[:1, part], mask=mask[:1, part])[0], "a packed segment with padding")
        gauge.close(y[1:], module(x[1:])[0], "a row of one segment")
    if subject.causal:
        _packed_states(subject.make(), x, more, segments, mask, gauge)


def _packed_states(module, x, more, segments, mask, gauge: Gauge) -> None:
    _, before = module(more, module.init_state(BATCH))
    # The ids of masked tokens are ignored, also at the ends of a row.
    y, after = module(x, before, segments=torch.where(mask, segments, -1), mask=mask)
    first = pytree.tree_map(lambda t: t[:1], before)
    gauge.close(y[:1, :7], module(x[:1, :7], first, mask=mask[:1, :7])[0], "the first segment continues the state")
    gauge.close(y[:1, 7:18], module(x[:1, 7:18], mask=mask[:1, 7:18])[0], "the second segment starts without a state")
    _, last = module(x[:1, 18:], module.init_state(1), mask=mask[:1, 18:])
    gauge.close(module(more, after)[0][:1], module(more[:1], last)[0], "the state is the last segment's")
    row = pytree.tree_map(lambda t: t[1:], before)
    _, last = module(x[1:], row)
    gauge.close(module(more, after)[0][1:], module(more[1:], last)[0], "the state of a row of one segment")
