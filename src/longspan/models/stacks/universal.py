"""The same blocks again and again: the Universal Transformer, for so many steps or as many as each token wants."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._utils.spec import known
from ...modules.sinusoidal import sinusoid
from ...ops.tensors import positions, upcast_half
from .block import Block
from .plain import Plain, StackCall

COORDINATES = {"both": "of the token and of the step", "step": "of the step alone", "none": "neither"}


class UniversalState(NamedTuple):
    position: Tensor  # (B,) int64, tokens read so far
    layers: tuple[Any, ...]  # one state per block and step, those of a step side by side


class Universal(Plain):
    r"""All blocks ``steps`` times with the same weights: step t reads $H^{t-1} + P^t$.

    ``coordinates``: which sinusoids are added before each step. ``both``, of the token's position i and of the step t,
    $P^t_{i,2j} = \sin(i w_j) + \sin(t w_j)$, with cosines in channels 2j + 1; ``step``, of the step alone, for models
    whose positions are elsewhere; ``none``.

    Source: Dehghani et al. 2018 (1807.03819), section 2.1, where one block is repeated: ``depth=1``. The sum before the
    step is part of the residual stream. Raises ValueError for steps < 1 and unknown coordinates.
    """

    def __init__(self, dim: int, *, steps: int = 6, coordinates: str = "both"):
        super().__init__(dim)
        if steps < 1:
            raise ValueError(f"steps={steps} must be at least 1")
        self.steps, self.coordinates = steps, known(coordinates, COORDINATES, "coordinates of a universal stack")

    @property
    def positional(self) -> bool:
        """Whether the order of the tokens matters to it, whatever its attentions are."""
        return self.coordinates == "both"

    def start(self, blocks: list[Block], batch: int, capacity: int | None) -> UniversalState:
        """The states before the first token, one for each block and step."""
        layers = tuple(b.attention.init_state(batch, capacity) for _ in range(self.steps) for b in blocks)
        return UniversalState(torch.zeros(batch, dtype=torch.long, device=_device(blocks)), layers)

    def forward(
        self, blocks: list[Block], x: Tensor, state: UniversalState | None, call: StackCall
    ) -> tuple[Tensor, Any]:
        """x (B,N,dim), the state -> both after all steps."""
        add, end = coordinates(self.coordinates, x, state, call)
        layers: tuple[Any, ...] = ()
        for t in range(self.steps):
            x, new = Plain.forward(self, blocks, x + add(t), of_step(state, t, len(blocks)), call)
            layers += new or ()
        return x, None if state is None else UniversalState(end, layers)


class Act(Universal):
    r"""As many steps as each token wants, at most ``steps``: adaptive computation time.

    After step n a token halts with $h_n = \sigma(w \cdot s_n + b)$. Its last step N is the first with
    $\sum_{n \le N} h_n \ge 1 - \epsilon$, or ``steps``; $p_n = h_n$ before it and $p_N = 1 - \sum_{n < N} h_n$. The
    output is $\sum_n p_n s_n$. A token that has halted keeps its state, which others may still read. The penalty is the
    mean of $N + p_N$ over the real tokens, N taken as constant.

    ``threshold``: $\epsilon$. ``bias``: b at first. ``coordinates`` as in ``universal``. With a state all steps are
    made, since a later token may read what one that has halted left at each; without one, so many as the slowest wants.

    ``record`` gets ``ponder`` (B,N), $N + p_N$, and ``steps`` (B,N), N, beside the penalty.

    Source: Graves 2016 (1603.08983), section 2; per token, Dehghani et al. 2018 (1807.03819), section 2.2. The weights
    sum to 1 also where ``steps`` is reached. Raises ValueError for steps < 1, a threshold outside (0, 1), and unknown
    coordinates.
    """

    penalty = "steps that a token takes, and the weight of its last one"

    def __init__(
        self, dim: int, *, steps: int = 12, threshold: float = 0.01, bias: float = 1.0, coordinates: str = "both"
    ):
        super().__init__(dim, steps=steps, coordinates=coordinates)
        if not 0 < threshold < 1:
            raise ValueError(f"threshold={threshold} must be between 0 and 1")
        self.threshold = threshold
        # No linear map, whose bias an initialization would set to zero.
        self.halt, self.bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.tensor(float(bias)))

    def forward(
        self, blocks: list[Block], x: Tensor, state: UniversalState | None, call: StackCall
    ) -> tuple[Tensor, Any]:
        """x (B,N,dim), the state -> both after all steps that somebody wants."""
        add, end = coordinates(self.coordinates, x, state, call)
        layers: tuple[Any, ...] = ()
        total = upcast_half(x.new_zeros(x.shape[:2]))  # (B,N) what has been given out
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
    """A function of the step that gives what is added to x (B,N,dim) before it, and the next positions (B,)."""
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
    """The states of the blocks in step t."""
    return None if state is None else state.layers[t * count : (t + 1) * count]


def _device(blocks: list[Block]) -> torch.device:
    return next(blocks[0].parameters()).device
