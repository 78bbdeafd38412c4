"""The law of longer sequences, which fill several blocks and end inside one."""

from typing import Any

import torch
from torch import Tensor

from ..ops.backends import backend
from .gauge import BATCH, SEVERAL, Gauge, Subject, derivatives, off_kinks
from .pairs import all_pairs
from .recurrent import run

LENGTHS = (SEVERAL, 300)  # 300 tokens exceed the default windows
SINGLE = 61, 67  # tokens of the first packed sequences; the last sequence has the rest


def blocks(subject: Subject, gauge: Gauge) -> None:
    """At 139 and 300 tokens, whole, cut, packed and padded rows have the outputs and gradients of separate runs."""
    served = [causal for causal in (True, False) if not subject.why_not(("causal" if causal else "bidirectional",))]
    forms = {n: _forms(subject, n) for n in LENGTHS}
    for row in all_pairs(n=LENGTHS, causal=served, form=tuple(forms[LENGTHS[0]])):
        n, (arguments, pieces) = row["n"], forms[row["n"]][row["form"]]
        module, x = off_kinks(subject.make(causal=row["causal"])), subject.data(n=n).requires_grad_()
        _equal(module, x, arguments, pieces, f"{n} tokens, {row['form']}", gauge)


def _forms(subject: Subject, n: int) -> dict[str, tuple[dict[str, Tensor], list[list[Tensor]]]]:
    """Arguments of each call, with the tokens of each row that form separate runs."""
    everything = torch.arange(n, device=subject.device)
    forms: dict[str, tuple[dict[str, Tensor], list[list[Tensor]]]] = {"whole": ({}, [[everything]] * BATCH)}
    if not subject.why_not(("segments",)):
        first = torch.tensor([0] * SINGLE[0] + [1] * SINGLE[1] + [2] * (n - sum(SINGLE)), device=subject.device)
        segments = torch.stack([first, torch.zeros_like(first)])
        forms["packed"] = {"segments": segments}, [[*everything.split([*SINGLE, n - sum(SINGLE)])], [everything]]
    if not subject.why_not(("mask",)):
        mask = subject.mask(BATCH, n, seed=3, kept=0.7)
        forms["padded"] = {"mask": mask}, [[everything[row]] for row in mask]
    return forms


def _equal(module: Any, x: Tensor, arguments: dict[str, Tensor], pieces: list, what: str, gauge: Gauge) -> None:
    # Whole rows test the backend against the reference; other forms test it against its own whole rows.
    with backend("auto" if arguments else "reference"):
        y = torch.stack([_alone(module, x[i : i + 1], pieces[i]) for i in range(BATCH)])
    expected = [y, *derivatives([y], [x], module)]
    outputs = {"from nothing": lambda: module(x, **arguments)[0]}
    if module.causal:
        outputs["with a state"] = lambda: module(x, module.init_state(BATCH), **arguments)[0]
        if "segments" not in arguments:
            cuts = [x.shape[1] - 61, 1, 60]
            outputs["in calls"] = lambda: run(module, x, cuts, module.init_state(BATCH), **arguments)[0]
    for how, output in outputs.items():
        y = output()
        gauge.close([y, *derivatives([y], [x], module)], expected, f"{what}, {how}")
        with torch.no_grad():
            gauge.close(output(), expected[0], f"{what}, {how}, without gradients")


def _alone(module: Any, row: Tensor, pieces: list[Tensor]) -> Tensor:
    """Outputs (N,dim) of separate runs over pieces of one row (1,N,dim); zeros for tokens in no piece."""
    y = row.new_zeros(row.shape[1:])
    for piece in pieces:
        y = y.index_copy(0, piece, module(row[:, piece])[0][0])
    return y
