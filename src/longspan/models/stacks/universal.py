"""The Universal Transformer: blocks repeated with shared weights, for fixed or adaptive numbers of steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._utils.spec import known
from ...modules.sinusoidal import sinusoid
from ...ops.tensors import positions, upcast_half
from .block import Block
from .plain import Plain, StackCall

COORDINATES = {"both": "of the token and of the step", "step": "of the step only", "none": "no sinusoids"}


class UniversalState(NamedTuple):
    """Number of tokens so far, and the states of all blocks and steps."""

    position: Tensor  # (B,) int64, tokens read so far
    layers: tuple[Any, ...]  # one state per block and step; those of a step are adjacent


class Universal(Plain):
    r"""All blocks ``steps`` times with the same weights: the input of step t is $H^{t-1} + P^t$.

    The sum is part of the residual stream.

    ``steps``: How many times the blocks run. ``coordinates``: The sinusoids $P^t$ that are added before each step.
    ``both`` adds $P^t_{i,2j} = \sin(i w_j) + \sin(t w_j)$ for position i and step t, with cosines in channels 2j + 1.
    ``step`` adds only the part of the step, for models with other position embeddings. ``none`` adds nothing.

    Raises:
        ValueError: For steps < 1 and unknown coordinates.

    References:
        Dehghani et al. 2018 (1807.03819), section 2.1, which repeats one block: ``depth=1``.
    """

    def __init__(self, dim: int, *, steps: int = 6, coordinates: str = "both"):
        super().__init__(dim)
        if steps < 1:
            raise ValueError(f"steps={steps} must be at least 1")
        self.steps, self.coordinates = steps, known(coordinates, COORDINATES, "coordinates of a universal stack")

    @property
    def positional(self) -> bool:
        """Whether the stack adds positions of tokens, independent of its attentions."""
        return self.coordinates == "both"

    def start(self, blocks: list[Block], batch: int, capacity: int | None) -> UniversalState:
        """Return the states before the first token, one for each block and step."""
        layers = tuple(b.attention.init_state(batch, capacity) for _ in range(self.steps) for b in blocks)
        return UniversalState(torch.zeros(batch, dtype=torch.long, device=_device(blocks)), layers)

    def forward(
        self, blocks: list[Block], x: Tensor, state: UniversalState | None, call: StackCall
    ) -> tuple[Tensor, Any]:
        """Run all steps; arguments and results as in ``Plain.forward``."""
        add, end = coordinates(self.coordinates, x, state, call)
        layers: tuple[Any, ...] = ()
        for t in range(self.steps):
            x, new = Plain.forward(self, blocks, x + add(t), of_step(state, t, len(blocks)), call)
            layers += new or ()
        return x, None if state is None else UniversalState(end, layers)


class Act(Universal):
    r"""Adaptive computation time: each token takes up to ``steps`` steps, as a learned halting unit decides.

    The halting probability after step n is $h_n = \sigma(w \cdot s_n + b)$. The last step N of a token is the first
    with $\sum_{n \le N} h_n \ge 1 - \epsilon$, or ``steps``. The weights are $p_n = h_n$ before it and
    $p_N = 1 - \sum_{n < N} h_n$; they sum to 1 also if ``steps`` is reached. The output is $\sum_n p_n s_n$. A halted
    token keeps its vector, which other tokens can still attend to.

    The penalty is the mean of $N + p_N$ over the real tokens, with N taken as constant. ``record`` also gets ``ponder``
    (B,N), $N + p_N$, and ``steps`` (B,N), N. With a state all steps run, because later tokens may attend to halted ones
    at each step. Without one, the steps end when all tokens have halted.

    ``steps``: Largest number of steps. ``threshold``: $\epsilon$. ``bias``: Initial value of b. ``coordinates``: As in
    ``universal``.

    Raises:
        ValueError: For steps < 1, a threshold outside (0, 1), and unknown coordinates.

    References:
        Graves 2016 (1603.08983), section 2; per token, Dehghani et al. 2018 (1807.03819), section 2.2.
    """

    penalty = "number of steps of a token, and the weight of its last one"

    def __init__(
        self, dim: int, *, steps: int = 12, threshold: float = 0.01, bias: float = 1.0, coordinates: str = "both"
    ):
        super().__init__(dim, steps=steps, coordinates=coordinates)
        if not 0 < threshold < 1:
            raise ValueError(f"threshold={threshold} must be between 0 and 1")
        self.threshold = threshold
        # Not an ``nn.Linear``, whose bias initialization would set to zero.
        self.halt, self.bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.tensor(float(bias)))
        self.first_bias = float(bias)

    def reset_parameters(self) -> None:
        """Set the weights of the halting unit to their first values."""
        nn.init.zeros_(self.halt)
        nn.init.constant_(self.bias, self.first_bias)

    def forward(
        self, blocks: list[Block], x: Tensor, state: UniversalState | None, call: StackCall
    ) -> tuple[Tensor, Any]:
        """Run the steps until all tokens have halted; arguments and results as in ``Plain.forward``."""
        add, end = coordinates(self.coordinates, x, state, call)
        layers: tuple[Any, ...] = ()
        total = upcast_half(x.new_zeros(x.shape[:2]))  # (B,N) sum of the weights so far
        going = torch.ones_like(total, dtype=torch.bool)
        if call.mask is not None:
            going = going & call.mask
        mixed, ponder, count = torch.zeros_like(x), torch.zeros_like(total), torch.zeros_like(total)
        for t in range(self.steps):
            y, new = Plain.forward(self, blocks, x + add(t), of_step(state, t, len(blocks)), call)
            layers += new or ()
            x = torch.where(going[..., None], y, x)
            h = torch.sigmoid((upcast_half(x) * upcast_half(self.halt)).sum(-1) + upcast_half(self.bias))
            last = going & (total + h >= 1 - self.threshold) if t + 1 < self.steps else going
            p = torch.where(last, 1 - total, h).masked_fill(~going, 0.0)
            mixed = mixed + p[..., None].to(x.dtype) * x
            total = total + p
            count = count + going
            ponder = ponder + torch.where(last, p, 0.0)
            going = going & ~last
            if state is None and not torch.compiler.is_compiling() and not bool(going.any()):
                break
        ponder = ponder + count
        real = torch.ones_like(ponder) if call.mask is None else call.mask
        call.own_record |= {"penalty": ponder.sum() / real.sum().clamp(min=1)}
        call.own_record |= {"ponder": ponder.detach(), "steps": count.long()}
        return mixed, None if state is None else UniversalState(end, layers)


def coordinates(
    kind: str, x: Tensor, state: UniversalState | None, call: StackCall
) -> tuple[Callable[[int], Tensor], Tensor]:
    """Return a function from the step to the sinusoids that are added to x (B,N,dim), and the next positions (B,)."""
    start = None if state is None else state.position
    at, end = positions(x, start, mask=call.mask, segments=call.arguments.get("segments"))
    tokens = sinusoid(at, x.shape[-1], x.dtype) if kind == "both" else x.new_zeros(())

    def add(t: int) -> Tensor:
        if kind == "none":
            return x.new_zeros(())
        # Steps are counted from 1.
        step = torch.full((1, 1), t + 1, dtype=torch.long, device=x.device)
        return tokens + sinusoid(step, x.shape[-1], x.dtype)

    return add, end


def of_step(state: UniversalState | None, t: int, count: int) -> tuple[Any, ...] | None:
    """Return the states of the blocks in step t."""
    return None if state is None else state.layers[t * count : (t + 1) * count]


def _device(blocks: list[Block]) -> torch.device:
    return next(blocks[0].parameters()).device
