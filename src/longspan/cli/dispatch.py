"""Find the backend of a mechanism: run small calls and record which backend each op used."""

import contextlib
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..attention import Attention, build
from ..generation.native_decoder import Engine
from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from ..ops.native import build as kernels
from ..ops.native.build import instruction_sets, interface, notice, openmp

TOKENS = 256  # length of the sequence that runs; default periods of periodic patterns are at most that


def probe_backends(text: str, dim: int, heads: int, *, causal: bool, device: str = "cpu") -> dict[str, Any]:
    """Run one sequence and, if causal, one decode step of a mechanism, in float32 without gradients.

    Compiles the native kernels that it needs on first use.

    Args:
        text: the spec of one mechanism.
        dim: width of the attention.
        heads: attention heads.
        causal: build the causal form.
        device: a device such as ``cpu`` or ``cuda``.

    Returns:
        ``device``; ``calls``: for each kind of call its ops, each with its ``backend`` and the reason ``why_not`` the
        native kernels did not serve it; ``kernels``: the origin of the native kernels; ``reason``: why ``calls`` is
        empty, or "".

    Raises:
        ValueError: for an unknown device, and as in ``longspan.build``.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device; pass e.g. cpu, cuda or mps") from error
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind != "cpu" and (accelerator is None or kind != accelerator.type):
        return {"device": device, "calls": {}, "kernels": kernels_status(), "reason": f"this machine has no {kind}"}
    # The result reports missing kernels, so the warning would only repeat it.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        torch.manual_seed(0)
        attention = build(text, dim, heads, causal=causal).to(device).eval()
        # At most the length that the weights allow.
        x = torch.randn(1, min(TOKENS + 1, getattr(attention, "length", TOKENS + 1)), dim).to(device)
        calls = {"whole sequences": _ops(attention, x)}
        if causal and attention.states:
            _, state = attention(x[:, :-1], attention.init_state(1, x.shape[1]))
            calls["steps"] = _ops(attention, x[:, -1:], state)
            if kind == "cpu" and _by_engine(text, heads):
                calls["a decoder's steps"] = [{"op": "the decode engine", "backend": "native", "why_not": ""}]
    return {"device": device, "calls": calls, "kernels": kernels_status(), "reason": ""}


def _ops(attention: Attention, x: Tensor, state: Any = None) -> list[dict[str, str]]:
    with ops.watch() as seen:
        attention(x, state, **({"donate": True} if state is not None and "donate" in attention.supported_args else {}))
    return [one._asdict() for one in seen] or [{"op": "PyTorch operations", "backend": "torch", "why_not": ""}]


def _by_engine(text: str, heads: int) -> bool:
    """Whether ``generate`` runs a decoder with this attention on the decode engine."""
    # Some mechanisms do not fit a default decoder, for example because they need other positions.
    with contextlib.suppress(ValueError):
        return not Engine.why_not(
            Decoder(DecoderConfig(vocab=2, length=2, dim=2 * heads, heads=heads, depth=1, attention=text))
        )
    return False


def kernels_status() -> str:
    """The origin of the native kernels that this process has used, or why there are none."""
    return kernels_facts(*kernels.tried())["native kernels"] if kernels.tried() else "none were used"


def kernels_facts(*names: str) -> dict[str, str]:
    """Facts about families or units of native kernels, by label. Compiles missing ones. Default: all families."""
    found: dict[str, list[kernels.Kernels]] = {}
    missing: dict[str, str] = {}
    units = {name: interface.units(name) for name in names or kernels.FAMILIES}
    with notice.shown():
        kernels.compile_ahead(*(unit for those in units.values() for unit in those))
        for name, those in units.items():
            try:
                found[name] = [kernels.find(unit) for unit in those]
            except kernels.Unavailable as error:
                missing[name] = f"not available: {error}"
    every = [one for those in found.values() for one in those]
    origins = _lines([*(one.origin for one in every), *missing.values()])
    if not found:
        return {"native kernels": origins}
    return {
        "native kernels": origins,
        "  instructions": f"{_lines(one.isa for one in every if one.isa) or 'unknown'} ({_processor()})",
        "  flags": _lines(one.flags for one in every),
        **{f"  {name}": missing.get(name) or _lines(one.path for one in found[name]) for name in units},
        "  reason": _lines(one.why for one in every),
        "  OpenMP": openmp.share() or "torch brings no OpenMP library",
    }


def _processor() -> str:
    """The instruction sets that this processor has, the simplest first."""
    with contextlib.suppress(kernels.Unavailable):
        return f"this processor has {', '.join(one.name for one in reversed(instruction_sets.owned()))}"
    return "those of this processor are not known"


def _lines(texts: Iterable[str]) -> str:
    """The distinct texts, separated by semicolons."""
    return "; ".join(dict.fromkeys(texts))


def format_call(call: list[dict[str, str]]) -> str:
    """Format one kind of call, such as ``native (linear attention)``.

    >>> format_call([{"op": "linear attention", "backend": "torch", "why_not": "they are for the CPU"}])
    'torch (linear attention; not native: the kernels are for the CPU)'
    """
    return ", ".join(f"{one['backend']} ({one['op']}{_reason(one['why_not'])})" for one in call)


def _reason(why_not: str) -> str:
    return why_not and f"; not native: {why_not.replace('they ', 'the kernels ', 1)}"
