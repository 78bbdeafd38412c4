"""Print a digest of outputs, states and gradients of every example spec, to compare two versions of the code.

    python -m longspan_lab.tools digests > before.txt

Float64 on one thread, with seeded weights and inputs: plain, masked and packed calls in parallel, and a prompt of 20
tokens followed by single tokens. Two runs of one version on one machine print the same lines.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import longspan
from longspan.attention.base import REGISTRY, Attention

BATCH, TOKENS, DIM, HEADS = 2, 29, 16, 2


def digest(values: Iterable[Tensor | None]) -> str:
    """Twelve hexadecimal digits of all bytes."""
    found = hashlib.sha256()
    for value in values:
        found.update(b"-" if value is None else value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def parallel(attention: Attention, x: Tensor, given: dict[str, Tensor]) -> str:
    """Outputs of one call and gradients of x and of every parameter."""
    x = x.clone().requires_grad_()
    torch.manual_seed(2)
    more = (
        {}
        if not getattr(attention, "has_layer_carry", getattr(attention, "carries", False))
        else {"carry": attention.init_carry(x, given.get("mask"))}
    )
    y = attention(x, **given, **more)[0]
    parameters = [p for p in attention.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(y.square().sum(), [x, *parameters], allow_unused=True)
    return digest([y, *gradients])


def recurrent(attention: Attention, x: Tensor) -> str:
    """Outputs and the last state of a prompt and single tokens."""
    torch.manual_seed(2)
    more = {}
    if getattr(attention, "has_layer_carry", getattr(attention, "carries", False)):
        return "carry"
    with torch.no_grad():
        y, state = attention(x[:, :20], attention.init_state(len(x)), **more)
        outputs = [y]
        for token in x[:, 20:].split(1, 1):
            y, state = attention(token, state)
            outputs.append(y)
    return digest([*outputs, *pytree.tree_leaves(state)])


def main() -> None:
    torch.set_num_threads(1)
    for name in sorted(REGISTRY):
        for spec in REGISTRY[name].examples:
            for causal in (form == "causal" for form in REGISTRY[name].directions):
                torch.manual_seed(0)
                try:
                    attention = longspan.build(spec, DIM, HEADS, causal=causal).double().train()
                except ValueError:
                    continue
                torch.manual_seed(1)
                x = torch.randn(BATCH, TOKENS, DIM, dtype=torch.float64)
                mask = torch.rand(BATCH, TOKENS) < 0.8
                segments = torch.randint(0, 2, (BATCH, TOKENS)).cumsum(1)
                calls = {"plain": {}, "mask": {"mask": mask}, "segments": {"segments": segments}}
                found = {}
                for kind, given in calls.items():
                    try:
                        found[kind] = parallel(attention, x, given)
                    except ValueError:
                        found[kind] = "refused"
                if causal:
                    found["steps"] = recurrent(attention.eval(), x)
                print(
                    f"{spec} {'causal' if causal else 'bidirectional'}:",
                    *(f"{k}={v}" for k, v in found.items()),
                    flush=True,
                )
