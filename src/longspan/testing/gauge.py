"""The parts of a law: the subject under test and the gauge that compares errors with tolerances."""

import contextlib
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

# Primes, so that no block size divides them; 29 tokens exceed the windows of every example.
BATCH, TOKENS, DIM, HEADS = 2, 29, 8, 2
# Tokens, a prime: more than one chunk, and too many for the forms for short sequences.
SEVERAL = 139
# Memory of the laws in units of the float32 weights: float64, gradients, several modules and backends.
COPIES = 16
EXACT = 1e-10  # float64, relative to the largest expected value (at least 1)


class Broken(AssertionError):
    """Raised where a law does not hold; the message names what differs, and by how much."""


class Gauge:
    """Compares values with expected ones, keeps the largest error, and raises ``Broken`` above the tolerance."""

    def __init__(self):
        self.error, self.tolerance = 0.0, 0.0
        self.excused = 0.0  # the largest error above its tolerance that ``granted`` covers

    def close(
        self, actual: Any, expected: Any, what: str, tolerance: float = EXACT, granted: list[Tensor] | None = None
    ) -> None:
        """Require two pytrees of tensors to be equal up to a tolerance.

        Args:
            actual: Tensor or pytree of tensors.
            expected: Tensor or pytree of the same structure and shapes.
            what: Name of the measurement, for messages.
            tolerance: Allowed error, relative to the largest expected value (at least 1).
            granted: For each tensor, absolute errors of its elements that do not count. Default: none.

        Raises:
            Broken: If the error exceeds the tolerance or is NaN, or shapes or numbers of tensors differ.
        """
        a, b = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
        self.require(len(a) == len(b), f"{what}: {len(a)} tensors where {len(b)} are expected")
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            self.require(x.shape == y.shape, f"{what}: shape {tuple(x.shape)} where {tuple(y.shape)} is expected")
            if x.numel() == 0:
                continue
            x, y = x.detach().double().to(y.device), y.detach().double()
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
        """Raise ``Broken`` with ``message`` unless ``condition`` holds."""
        if not condition:
            raise Broken(message)

    def raises(self, call: Callable[[], Any], what: str) -> None:
        """Raise ``Broken`` unless ``call`` raises ValueError; ``what`` names the wrong argument."""
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
    "carry": "passes nothing from layer to layer",
    "below N^2": "its cost is quadratic",
    "stack": "is not a stack",
    "reversible": "is not a reversible stack",
    "ponder": "has no adaptive computation time",
}


def usable(device: torch.device | str) -> torch.device:
    """Return the device on which the laws will run.

    Args:
        device: A device, or its name.

    Raises:
        ValueError: If there is no such device here, or it has no float64 numbers, which the laws compare.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device; pass cpu, cuda or cuda:1") from error
    if found.type == "meta":
        raise ValueError("device='meta' holds no values to check; pass cpu or cuda")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}: torch {torch.__version__} finds no CUDA GPU; pass cpu")
    try:
        torch.zeros(1, dtype=torch.float64, device=found)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device={str(device)!r} cannot hold the float64 numbers of the laws: {reason}") from error
    return found


class Subject:
    """The attention or stack under test.

    Args:
        spec: Spec of an attention, or several separated by ``;`` for a stack.
        seed: Seed of weights and inputs.
        stack: How the blocks of a stack run, such as ``universal(steps=3)``. The default tests a single attention
            alone, and several in a plain stack.
        device: Device of weights and inputs. They are drawn on the CPU, so they are the same on every device.

    Raises:
        ValueError: If the spec or stack cannot be built, the device cannot be used, or the laws would need more memory
            than this machine has.
    """

    def __init__(self, spec: str, seed: int = 0, stack: str = "", device: torch.device | str = "cpu"):
        self.spec, self.seed, self.stack, self.device = spec, seed, stack, usable(device)
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
            # Facts of the instances, since an option may rule out what the class supports.
            self.parts = [make() for make in made]

    def why_not(self, needs: tuple[str, ...]) -> str:
        """Return the first of the needed facts that does not hold, in words; "" if all hold."""
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
        """Whether the subject is one attention, without blocks around it."""
        return len(self.specs) == 1 and not self.stack

    @property
    def named(self) -> str:
        """The name in reports."""
        name = f"{self.spec} in {self.stack}" if self.stack else self.spec
        return name if self.device.type == "cpu" else f"{name} on {self.device}"

    def exempt(self, law: str) -> str:
        """Return the reason for which a part or the stack is exempt from a law; "" if the law must hold."""
        reasons = [part.exempt for part in self.parts] + ([self.kind.exempt] if self.kind else [])
        return next((reason[law] for reason in reasons if law in reason), "")

    @property
    def causal(self) -> bool:
        """Whether to build the causal form; True if it exists."""
        return not self.why_not(("causal",))

    def make(
        self, *, causal: bool | None = None, dtype: torch.dtype = torch.float64, fields: dict[str, Any] | None = None
    ) -> Any:
        """Build the module with weights from the seed, in eval mode.

        Args:
            causal: Direction. Default: causal if that form exists.
            dtype: Dtype of the weights.
            fields: Further fields of the ``StackConfig``, for a stack.

        Returns:
            An attention, or a stack.
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
        return module.to(self.device, dtype).eval()

    def data(self, seed: int = 1, n: int = TOKENS, dtype: torch.dtype = torch.float64, width: int = DIM) -> Tensor:
        """Return random numbers (BATCH, n, width), the same for the same seed."""
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        return torch.randn(BATCH, n, width, dtype=torch.float64, generator=generator).to(self.device, dtype)

    def fork_generators(self) -> contextlib.AbstractContextManager[None]:
        """Restore the global random generators of the CPU and the device at the end of a ``with`` block."""
        if self.device.type == "cpu":
            return torch.random.fork_rng(devices=[])
        index = self.device.index
        if index is None:
            index = torch.get_device_module(self.device).current_device()
        return torch.random.fork_rng(devices=[index], device_type=self.device.type)

    def generator_state(self) -> Tensor:
        """Return the state of the global random generator from which dropout on the device draws."""
        if self.device.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(self.device).get_rng_state(self.device)

    def mask(self, *shape: int, seed: int, kept: float) -> Tensor:
        """Return a random mask that keeps each token with probability ``kept``, the same for the same seed."""
        return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < kept).to(self.device)


def derivatives(outputs: list[Tensor], inputs: list[Tensor], module: nn.Module) -> list[Tensor]:
    """Return gradients of the inputs, then of the weights, for random output gradients; zeros if there is none."""
    generator = torch.Generator().manual_seed(4)
    outputs = [t for t in outputs if t.requires_grad]
    upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
    wanted = [*inputs, *module.parameters()]
    found = torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]


def agrees(call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> bool:
    """Return whether the gradients of ``call`` equal finite differences.

    The backward runs twice and must repeat. On a GPU torch adds gradients of gathered elements in any order, so there
    the two runs may differ by rounding.
    """
    repeats = 0.0 if inputs[0].device.type == "cpu" else EXACT
    return torch.autograd.gradcheck(call, inputs, raise_exception=False, fast_mode=True, nondet_tol=repeats)


def off_kinks(module: Any) -> Any:
    """Move the weights a little in place: some start where the gradient is undefined, such as a span of 0."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.01 * torch.rand(weight.shape, generator=generator, dtype=weight.dtype).to(weight.device))
    return module
