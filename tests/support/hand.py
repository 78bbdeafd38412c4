"""What cases worked out by hand need: one head whose projections change nothing, and few tokens."""

import torch

import longspan


@torch.no_grad()
def plain(spec, dim=1, *, asking=True, **place):
    """One head in float64: identities for projections, no biases; not ``asking``: queries are 0, so all keys tie."""
    module = longspan.build(spec, dim, 1, **place).double().eval()
    for name, weight in module.named_parameters():
        part, kind = name.split(".")[-2:] if "." in name else ("", "")
        if "query" in part and not asking:
            weight.zero_()
        elif part.removesuffix("_global").removeprefix("far_") in ("query", "key", "value", "out"):
            weight.copy_(torch.eye(dim) if kind == "weight" else torch.zeros(dim))
    return module


def numbers(*values):
    """Tokens of one number each (1,N,1), or of several (1,N,dim)."""
    x = torch.tensor([values], dtype=torch.float64)
    return x if x.dim() == 3 else x[..., None]


def read(module, *values):
    """What the module makes of these tokens, as ``numbers`` are given."""
    y = module(numbers(*values))[0][0]
    return [round(number, 9) for number in y[:, 0].tolist()] if y.shape[1] == 1 else y
