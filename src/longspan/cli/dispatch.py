"""Which backend serves a mechanism: small calls run, and the ops under them tell what ran them."""

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
from ..ops.native.build import openmp

TOKENS = 256  # of the sequence that runs; patterns that are periodic have periods of at most that, by default


def probe_backends(text: str, dim: int, heads: int, *, causal: bool, device: str = "cpu") -> dict[str, Any]:
    """What ran one sequence and, where it is causal, one step of a mechanism, in float32 and without gradients.

    -> device; ``calls``, by the kind of call the ops that it made, each with its ``backend`` and, where kernels in C++
    could not serve, ``why_not``; ``kernels``: which of these there are; ``reason``: why there are no calls, or "".

    Compiles the native kernels that it needs on first use. Raises ValueError for something that is no device, and as
    ``build``.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is no device; known are e.g. cpu, cuda, mps") from error
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind != "cpu" and (accelerator is None or kind != accelerator.type):
        return {"device": device, "calls": {}, "kernels": kernels_status(), "reason": f"this machine has no {kind}"}
    # Where there are no kernels, that is what is told, so nobody needs to be warned of it.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        torch.manual_seed(0)
        attention = build(text, dim, heads, causal=causal).to(device).eval()
        # Of a mechanism whose weights have the length of a sequence, no longer one.
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
    return [one._asdict() for one in seen] or [{"op": "operations of its own", "backend": "torch", "why_not": ""}]


def _by_engine(text: str, heads: int) -> bool:
    """Whether ``generate`` has a decoder of this attention run by the decode engine."""
    # A mechanism that a decoder cannot have, such as one that needs other positions, is not served.
    with contextlib.suppress(ValueError):
        return not Engine.why_not(
            Decoder(DecoderConfig(vocab=2, length=2, dim=2 * heads, heads=heads, depth=1, attention=text))
        )
    return False


def kernels_status() -> str:
    """The origin of the native kernels that this process has used, or why it has none."""
    return kernels_facts(*kernels.tried())["native kernels"] if kernels.tried() else "none were used"


def kernels_facts(*families: str) -> dict[str, str]:
    """What is known of families of native kernels, by default all, which are compiled if need be, by name."""
    found: dict[str, kernels.Kernels] = {}
    missing: dict[str, str] = {}
    for family in families or kernels.FAMILIES:
        try:
            found[family] = kernels.find(family)
        except kernels.Unavailable as error:
            missing[family] = f"not here, since {error}"
    origins = _lines([*(one.origin for one in found.values()), *missing.values()])
    if not found:
        return {"native kernels": origins}
    return {
        "native kernels": origins,
        "  flags": _lines(one.flags for one in found.values()),
        **{f"  {name}": found[name].path if name in found else missing[name] for name in families or kernels.FAMILIES},
        "  why these": _lines(one.why for one in found.values()),
        "  OpenMP": openmp.share() or "torch has none to share",
    }


def _lines(texts: Iterable[str]) -> str:
    """Different texts, separated by semicolons."""
    return "; ".join(dict.fromkeys(texts))


def format_call(call: list[dict[str, str]]) -> str:
    """One kind of call in words: ``native (linear attention)``.

    >>> format_call([{"op": "linear attention", "backend": "torch", "why_not": "they are for the CPU"}])
    'torch (linear attention; not native, since the kernels are for the CPU)'
    """
    return ", ".join(f"{one['backend']} ({one['op']}{_reason(one['why_not'])})" for one in call)


def _reason(why_not: str) -> str:
    return why_not and f"; not native, since {why_not.replace('they ', 'the kernels ', 1)}"
