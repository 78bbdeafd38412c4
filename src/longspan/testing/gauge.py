"""What a law is: a function that measures a subject and fails where an error exceeds its tolerance."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._utils import model_memory
from .._utils.spec import split
from ..attention import build
from ..attention.registry import mechanism
from ..models.config import StackConfig
from ..models.stacks import Act, Reversible, Stack, kind_of

# Primes, so that no size is a multiple of a block; 29 tokens leave the windows of every example.
BATCH, TOKENS, DIM, HEADS = 2, 29, 8, 2
# Tokens, a prime: chunks end inside, and the forms for short sequences have ended.
SEVERAL = 139
# Times the weights in float32 that laws take: in float64, with gradients, of several modules and backends at once.
COPIES = 16
EXACT = 1e-10  # float64, relative to the largest expected value (at least 1)


class Broken(AssertionError):
    """A law does not hold; says which numbers differ by how much."""


class Gauge:
    """Collects the largest error that a law has measured, and fails where it exceeds its tolerance."""

    def __init__(self):
        self.error, self.tolerance = 0.0, 0.0
        self.excused = 0.0  # the largest error beyond its tolerance, of those that were granted

    def close(
        self, actual: Any, expected: Any, what: str, tolerance: float = EXACT, granted: list[Tensor] | None = None
    ) -> None:
        """Two tensors, or pytrees of them, are equal up to ``tolerance`` x the largest expected value (at least 1).

        ``granted``: for each tensor, errors (absolute) of its elements that do not count.
        """
        a, b = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
        self.require(len(a) == len(b), f"{what}: {len(a)} tensors where {len(b)} are expected")
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            self.require(x.shape == y.shape, f"{what}: shape {tuple(x.shape)} where {tuple(y.shape)} is expected")
            if x.numel() == 0:
                continue
            x, y = x.detach().double(), y.detach().double()
            error = (x - y).abs()
            scale = y.abs().max().clamp(min=1)
            whole = (error.max() / scale).item()
            error = whole if granted is None else ((error - granted[i]).max() / scale).item()
            if not error <= tolerance:  # also where the error is NaN
                raise Broken(f"{what}: differ by {error:.2e}, allowed {tolerance:.0e}")
            if whole > tolerance:
                self.excused = max(self.excused, whole)
            if self.tolerance == 0 or error / max(tolerance, 1e-300) >= self.error / max(self.tolerance, 1e-300):
                self.error, self.tolerance = error, tolerance

    def require(self, condition: Any, message: str) -> None:
        """A yes-or-no part of a law."""
        if not condition:
            raise Broken(message)

    def raises(self, call: Callable[[], Any], what: str) -> None:
        """``call`` refuses with a ValueError."""
        try:
            call()
        except ValueError:
            return
        raise Broken(f"{what} is accepted; it must raise ValueError")


_MISSING = {
    "causal": "has no causal form",
    "bidirectional": "has no bidirectional form",
    "context": "has no cross attention",
    "segments": "takes no packed segments",
    "prefix": "takes no prefix",
    "mask": "takes no mask",
    "record": "records no matrix",
    "carry": "hands nothing from layer to layer",
    "below N^2": "its cost is quadratic",
    "stack": "is no stack",
    "reversible": "is no reversible stack",
    "ponder": "no token halts",
}


class Subject:
    """What is checked: the spec of one attention, or of a stack of several (separated by ``;``).

    ``stack``: how blocks around them are run, such as ``universal(steps=3)``; "": one attention is none, several are
    plain. Raises ValueError for a spec or a stack that cannot be built, and where laws would take more memory than this
    machine has.
    """

    def __init__(self, spec: str, seed: int = 0, stack: str = ""):
        self.spec, self.seed, self.stack = spec, seed, stack
        self.specs = split(spec)
        self.kind: Any = kind_of(stack) if stack else None
        self.classes = [mechanism(part.split("(")[0].strip()) for part in self.specs]
        made = [
            partial(build, part, DIM, HEADS, causal="causal" in cls.directions)
            for part, cls in zip(self.specs, self.classes, strict=True)
        ]
        model_memory.check_fits_in_memory(
            COPIES * sum(model_memory.nbytes(model_memory.shapes(make)) for make in made), f"laws of {spec}"
        )
        with torch.random.fork_rng(devices=[]):
            # Their facts, and not the classes', as an option may rule some out.
            self.parts = [make() for make in made]

    def why_not(self, needs: tuple[str, ...]) -> str:
        """The first of the needed facts that does not hold, in words; "" where all do."""
        facts = {
            "causal": all("causal" in part.directions for part in self.parts),
            "bidirectional": all("bidirectional" in part.directions for part in self.parts),
            "context": all("context" in part.supported_args for part in self.parts) and self.single,
            "segments": all("segments" in part.supported_args for part in self.parts),
            "prefix": all("prefix" in part.supported_args for part in self.parts),
            "mask": all("mask" in part.supported_args for part in self.parts),
            "record": all("record" in part.supported_args for part in self.parts) and self.single,
            "carry": all(cls.has_layer_carry for cls in self.classes) and self.single,
            "below N^2": all(not cls.cost.startswith("N^2") for cls in self.classes),
            "stack": bool(self.stack),
            "reversible": self.kind is Reversible,
            "ponder": self.kind is Act,
        }
        missing = [need for need in needs if not facts[need]]
        return _MISSING[missing[0]] if missing else ""

    @property
    def single(self) -> bool:
        """Whether it is one attention, without blocks around it."""
        return len(self.specs) == 1 and not self.stack

    @property
    def named(self) -> str:
        """What a report calls it."""
        return f"{self.spec} in {self.stack}" if self.stack else self.spec

    def exempt(self, law: str) -> str:
        """Why it need not keep a law, as one of its parts or its stack says; "" where it must."""
        reasons = [part.exempt for part in self.parts] + ([self.kind.exempt] if self.kind else [])
        return next((reason[law] for reason in reasons if law in reason), "")

    @property
    def causal(self) -> bool:
        """The direction to build where a law holds for both: causal where it exists."""
        return not self.why_not(("causal",))

    def make(
        self, *, causal: bool | None = None, dtype: torch.dtype = torch.float64, fields: dict[str, Any] | None = None
    ) -> Any:
        """The module with weights from the seed, in eval mode: an attention, or a stack of blocks around several.

        ``fields``: further ones of the stack's config.
        """
        causal = self.causal if causal is None else causal
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if self.single:
                module: nn.Module = build(self.spec, DIM, HEADS, causal=causal)
            else:
                how = {"stack": self.stack or "plain", "feedforward": 2 * DIM} | (fields or {})
                config = StackConfig(DIM, max(len(self.specs), 2), HEADS, self.spec, **how)
                module = Stack(config, causal=causal)
        return module.to(dtype).eval()

    def data(self, seed: int = 1, n: int = TOKENS, dtype: torch.dtype = torch.float64, width: int = DIM) -> Tensor:
        """Random numbers (BATCH, n, width), the same for the same seed."""
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        return torch.randn(BATCH, n, width, dtype=torch.float64, generator=generator).to(dtype)


def derivatives(outputs: list[Tensor], inputs: list[Tensor], module: nn.Module) -> list[Tensor]:
    """Gradients of the inputs and then of the weights, from random ones of the outputs; zeros where there is none."""
    generator = torch.Generator().manual_seed(4)
    outputs = [t for t in outputs if t.requires_grad]
    upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
    wanted = [*inputs, *module.parameters()]
    found = torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]


def off_kinks(module: Any) -> Any:
    """The module with its weights moved a little, since they may begin where no gradient is, such as at a span of 0."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.01 * torch.rand(weight.shape, generator=generator, dtype=weight.dtype))
    return module
