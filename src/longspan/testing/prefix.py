"""The law of prefix mode: the first tokens of a row see each other in both directions."""

from typing import Any

import torch
from torch import Tensor

from ..ops.backends import backend
from ..states import clone
from .gauge import BATCH, HEADS, TOKENS, Gauge, Subject, agrees
from .recurrent import run

LENGTHS = torch.tensor([11, 5])  # tokens of each row's prefix


def prefix_mode(subject: Subject, gauge: Gauge) -> None:
    """``prefix=``: the prompt sees all of itself and the state, the rest is causal, and decode steps continue it."""
    module, x = subject.make(), subject.data()
    lengths = LENGTHS.to(x.device)
    y = module(x, prefix=lengths)[0]
    gauge.close(module(x, prefix=0 * lengths)[0], module(x)[0], "a prefix of no tokens")
    _sees(module, x, y, subject.data(2), gauge)
    _continues(module, x, y, gauge)
    if not subject.why_not(("mask",)):
        _ignores_padding(module, x, y, subject.data(9), gauge)
    if subject.single:
        _equals_other_forms(subject, module, x, y, gauge)
    _numbers(subject, module, x, y, gauge)
    _refuses(subject, module, x, gauge)


def _sees(module: Any, x: Tensor, y: Tensor, other: Tensor, gauge: Gauge) -> None:
    lengths = LENGTHS.to(x.device)
    for row, length in enumerate(lengths.tolist()):
        gauge.close(module(x[row : row + 1], prefix=lengths[row : row + 1])[0], y[row : row + 1], f"row {row} alone")
        for t in range(length, TOKENS):
            changed = torch.cat([x[:, :t], 3 * other[:, t:]], 1)
            gauge.close(module(changed, prefix=lengths)[0][row, :t], y[row, :t], f"outputs before token {t}")
        last = x.index_copy(1, torch.tensor([length - 1], device=x.device), 3 * other[:, :1])
        moved = (module(last, prefix=lengths)[0] - y)[row, 0].abs().max()
        gauge.require(moved > 1e-6, "the first token does not see the last one of the prefix")


def _continues(module: Any, x: Tensor, y: Tensor, gauge: Gauge) -> None:
    """A prompt in one call, then any cut into calls; states stay unchanged, and donated ones give the same outputs."""
    lengths = LENGTHS.to(x.device)
    for cuts in ([TOKENS], [11] + [1] * (TOKENS - 11), [13, 5, 11]):
        for donate in (False, True):
            with torch.set_grad_enabled(not donate):
                state = module.init_state(BATCH, TOKENS if donate else None)
                first, state = module(x[:, : cuts[0]], state, prefix=lengths, donate=donate)
                rest, _ = run(module, x[:, cuts[0] :], cuts[1:], state, donate=donate) if cuts[1:] else (x[:, :0], None)
            gauge.close(torch.cat([first, rest], 1), y, f"calls of {cuts} tokens, donate={donate}")
    with torch.no_grad():
        _, kept = module(x[:, :7], module.init_state(BATCH, TOKENS))
        copy = clone(kept)
        expected, _ = module(x[:, 7:], kept, prefix=lengths)
        gauge.close(kept, copy, "the state that a prefix continued", 0.0)
        gauge.close(module(x[:, 7:], copy, prefix=lengths, donate=True)[0], expected, "a prefix with donate=True")


def _ignores_padding(module: Any, x: Tensor, y: Tensor, garbage: Tensor, gauge: Gauge) -> None:
    """Padding before and between the tokens of one row, after those of the other: a prefix counts real tokens."""
    lengths = LENGTHS.to(x.device)
    wide = 1e3 * torch.cat([garbage, garbage], 1)
    mask = torch.zeros(BATCH, 2 * TOKENS, dtype=torch.bool, device=x.device)
    mask[0, 1::2], mask[1, :TOKENS] = True, True
    wide[mask] = x.flatten(0, 1)
    start = module.init_state(BATCH)
    for state in (None, start):
        padded, end = module(wide, state, mask=mask, prefix=lengths)
        gauge.close(padded[mask].view_as(y), y, "a padded prefix")
        gauge.close(padded[~mask], torch.zeros_like(padded[~mask]), "masked outputs after a prefix", 0.0)
    _, expected = module(x, start, prefix=lengths)
    gauge.close(module(x, end)[0], module(x, expected)[0], "what comes after a padded prefix")


def _equals_other_forms(subject: Subject, module: Any, x: Tensor, y: Tensor, gauge: Gauge) -> None:
    """One layer in prefix mode equals the bidirectional form, then the causal form; a state extends the prefix."""
    lengths = LENGTHS.to(x.device)
    before, row = subject.data(3, 7), torch.arange(TOKENS, device=x.device) < lengths[:, None]
    causal = module(x)[0]
    gauge.close(y[~row], causal[~row], "what comes after the prefix")
    last = torch.arange(BATCH, device=x.device), lengths - 1
    gauge.close(y[last], causal[last], "the last token of the prefix")
    if not subject.why_not(("bidirectional",)):
        both = subject.make(causal=False)
        for i, length in enumerate(lengths.tolist()):
            gauge.close(y[i, :length], both(x[i : i + 1, :length])[0][0], "a prefix against the bidirectional form")
    _, state = module(before, module.init_state(BATCH))
    longer = module(torch.cat([before, x], 1), prefix=lengths + 7)[0][:, 7:]
    gauge.close(module(x, state, prefix=lengths)[0], longer, "a prefix after a state")
    if subject.why_not(("record",)):
        return
    record: dict[str, Tensor] = {}
    module(x, prefix=lengths, record=record)
    allowed = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device).tril() | (row[:, :, None] & row[:, None, :])
    gauge.close(record["mask"].expand(BATCH, 1, -1, -1), allowed[:, None], "the recorded mask of a prefix", 0.0)
    shape = record["matrix"].shape
    gauge.require(shape == (BATCH, HEADS, TOKENS, TOKENS), f"the recorded matrix of a prefix is {tuple(shape)}")


def _numbers(subject: Subject, module: Any, x: Tensor, y: Tensor, gauge: Gauge) -> None:
    """Gradients equal finite differences, also through a given state; lower precisions stay accurate."""
    lengths = LENGTHS.to(x.device)
    short, prefix = x[:1, :7].clone().requires_grad_(), torch.tensor([3], device=x.device)

    def call(x: Tensor) -> Tensor:
        _, state = module(x[:, :2], module.init_state(1), prefix=prefix - 1)
        return module(x[:, 2:], state, prefix=prefix)[0]

    gauge.require(agrees(call, (short,)), "gradcheck of a prefix fails")
    for dtype in (torch.float32, torch.bfloat16):
        lower = subject.make(dtype=dtype)
        with backend("reference"):
            plain = (lower(x.to(dtype), prefix=lengths)[0].double() - y).abs().max().item()
        low = lower(x.to(dtype), prefix=lengths)[0]
        gauge.require(low.dtype is dtype and low.isfinite().all(), f"a prefix in {dtype}: {low.dtype}, or not finite")
        gauge.close(low, y, f"a prefix in {dtype}", 2 * plain + torch.finfo(dtype).eps)


def _refuses(subject: Subject, module: Any, x: Tensor, gauge: Gauge) -> None:
    lengths = LENGTHS.to(x.device)
    gauge.raises(lambda: module(x, prefix=lengths + TOKENS), "a prefix that is longer than the row")
    gauge.raises(lambda: module(x, prefix=-lengths), "a prefix of a negative length")
    gauge.raises(lambda: module(x, prefix=lengths[:1]), "a prefix of another batch size")
    gauge.raises(lambda: module(x, prefix=lengths.to(x.dtype)), "a prefix that is not int64")
    none = torch.zeros(BATCH, TOKENS, dtype=torch.bool, device=x.device)
    gauge.raises(lambda: module(x, mask=none, prefix=lengths), "a prefix of more than the real tokens")
    gauge.raises(lambda: module(x, segments=none.long(), prefix=lengths), "a prefix of packed segments")
    if not subject.why_not(("bidirectional",)):
        both = subject.make(causal=False)
        gauge.raises(lambda: both(x, prefix=lengths), "a prefix of a bidirectional attention")
