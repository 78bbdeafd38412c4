"""What the tests of both scans share: operands, loops that define the results, and gradients."""

import torch
import torch.nn.functional as F

from longspan import backend, diagonal_scan, selective_scan
from longspan.ops.native import call

HAVE_KERNELS = call.available("scan")
SCANS = {"diagonal": diagonal_scan, "selective": selective_scan}


def operands(kind, n, channels=5, size=4, *, batch=2, states=None, bare=False, dtype=torch.float64):
    """Operands of a scan by name; ``bare``: only what the selective scan must have."""
    generator = torch.Generator().manual_seed(n + channels + size)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    states, tokens = batch if states is None else states, (batch, n, channels)
    if kind == "diagonal":
        found = {"x": draw(*tokens), "log_decay": -draw(*tokens).abs(), "state": draw(states, channels)}
    else:
        found = {"x": draw(*tokens), "dt": draw(*tokens) - 1, "A": -0.2 - draw(channels, size).abs()}
        found |= {"B": draw(batch, n, size), "C": draw(batch, n, size), "state": draw(states, channels, size)}
        if bare:
            found["dt"] = found["dt"].exp()
        else:
            found |= {"D": draw(channels), "z": draw(*tokens), "dt_bias": draw(channels)}
    return {name: t.to(dtype) for name, t in found.items()}


def extras(kind, given):
    return {"softplus": True} if kind == "selective" and "dt_bias" in given else {}


def packing(kind, n, batch=2, sequences=7):
    """What marks packed sequences, which begin anywhere: an empty one among those of cu_seqlens."""
    generator = torch.Generator().manual_seed(n)
    if kind == "segments":
        return {"segments": (torch.rand(batch, n, generator=generator) < 0.1).long().cumsum(1)}
    cuts = torch.randint(n + 1, (sequences - 2,), generator=generator)
    return {"cu_seqlens": torch.cat([torch.tensor([0, n]), cuts, cuts[:1]]).sort().values}


def defined(given, mask=None, segments=None, cu_seqlens=None, softplus=False):
    """The scan of one number after the other, from the equations: output and last state."""
    x, state, out = given["x"], given["state"], []
    if cu_seqlens is not None:
        ends, states = cu_seqlens.tolist(), []
        for s in range(len(ends) - 1):
            here = {k: t[:, ends[s] : ends[s + 1]] if k in TOKENS else t for k, t in given.items()}
            real = None if mask is None else mask[:, ends[s] : ends[s + 1]]
            y, last = defined(here | {"state": state[s : s + 1]}, real, softplus=softplus)
            out.append(y)
            states.append(last)
        return torch.cat(out, 1), torch.cat(states)
    for t in range(x.shape[1]):
        if segments is not None and t:
            new = segments[:, t] != segments[:, t - 1]
            state = torch.where(new.view(-1, *[1] * (state.dim() - 1)), 0.0, state)
        if "log_decay" in given:
            y = after = given["log_decay"][:, t].exp() * state + x[:, t]
        else:
            dt = given["dt"][:, t] + given.get("dt_bias", 0.0)
            dt = (torch.logaddexp(dt, torch.zeros_like(dt)) if softplus else dt)[..., None]
            after = (dt * given["A"]).exp() * state + dt * given["B"][:, t, None] * x[:, t, :, None]
            y = torch.einsum("bcs,bs->bc", after, given["C"][:, t]) + given.get("D", 0.0) * x[:, t]
            y = y * F.silu(given["z"][:, t]) if "z" in given else y
        if mask is not None:
            y = torch.where(mask[:, t, None], y, 0.0)
            after = torch.where(mask[:, t].view(-1, *[1] * (after.dim() - 1)), after, state)
        state = after
        out.append(y)
    return torch.stack(out, 1) if out else torch.zeros_like(x), state


TOKENS = ("x", "log_decay", "dt", "B", "C", "z")


def outcome(function, given, **options):
    """Output, last state and the gradients of all operands, of a sum with fixed weights."""
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    y, state = function(leaves, **options)
    weights = [
        torch.linspace(-1, 2, t.numel(), dtype=torch.float64).sin().view(t.shape).to(t.dtype) for t in (y, state)
    ]
    loss = (y * weights[0]).sum() + (state * weights[1]).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(("y", "last", *leaves), (y.detach(), state.detach(), *grads), strict=True))


def by(kind, name):
    """The op by a backend, as ``outcome`` takes functions."""

    def run(given, **options):
        with backend(name):
            return SCANS[kind](**given, **options, return_state=True)

    return run


def assert_close(found, expected, tolerance):
    """Relative to the largest value of each."""
    for name, right in expected.items():
        size = right.double().abs().max() if right.numel() else 0.0
        error = (found[name].double() - right.double()).abs().max() / size if size else found[name].abs().sum()
        assert error <= tolerance, f"{name} is off by {error:.1e}"
