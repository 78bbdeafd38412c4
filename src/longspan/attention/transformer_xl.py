"""Softmax attention by content and distance, over a memory of the inputs of earlier calls."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import patterns
from ..ops import rows
from ..ops.softmax import relative
from ..ops.tensors import merge, positions
from ..patterns import Pattern
from ..states import memory as memories
from ..states.memory import Memory, MemoryCall
from .base import Attention


class TransformerXL(Attention[Memory]):
    """Softmax attention by content and distance over the last tokens; the state keeps their inputs.

    Each call projects keys and values anew from the inputs that the state keeps, as they entered this layer. The
    weights learn from the memory. Gradients stop between calls, so earlier calls get none.

    ``memory``: m, earlier tokens that a query sees. ``same_length``: whether each query sees exactly m of them; False
    is the training form. ``segment``: s, tokens per segment, for same_length=False only. ``clamp``: largest distance
    that is distinguished (0: no limit). ``stop_gradient``: False lets gradients through the state to its first token;
    calls then keep their graphs.

    With same_length=False, sequences are cut into segments from their first token on. A query sees the earlier tokens
    of its segment, and m tokens before the segment. One call per segment is the published training, and any other cut
    into calls gives the same output.

    The bidirectional form sees m tokens on either side, with distances of both signs. $r_d$ is the sinusoid of d in dim
    channels. Each layer has its own u and v. Distances count real tokens. The state holds the last m inputs, or $m + s
    - 1$ with segments.

    Source: Dai et al. 2019, sections 3.2 and 3.3. same_length and clamp come from the evaluation of the authors' code.
    There all sines of r precede the cosines, which permutes the columns of $W_r$.

    Raises:
        ValueError: For memory < 1, clamp < 0, a ``segment`` with same_length=True, no ``segment`` with
            same_length=False, or, if bidirectional, segments or stop_gradient=False.
    """

    name, paper, cost = "transformer_xl", "1901.02860", "N m D"
    family = "sparse"
    equations = (
        r"o_i = \sum_{j \in P_i} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in P_i} \frac{(q_i + u) \cdot k_j + (q_i + v) \cdot W_r r_{i-j}}{\sqrt D}",
        r"P_i = \lbrace j \in \mathcal{A}_i : \lvert i - j \rvert \le m \rbrace, \quad "
        r"\text{in segments of } s: \quad "
        r"P_i = \lbrace j \le i : j \ge s \lfloor i / s \rfloor - m \rbrace",
    )
    citation = (
        "Dai, Zihang and Yang, Zhilin and Yang, Yiming and Carbonell, Jaime and Le, Quoc V. and Salakhutdinov, Ruslan",
        "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context",
        2019,
    )
    examples = (
        "transformer_xl(memory=5, stop_gradient=False)",
        "transformer_xl(memory=7, clamp=3)",
        "transformer_xl(memory=4, same_length=False, segment=3, stop_gradient=False)",
    )
    exempt = dict.fromkeys(
        ("gradients", "blocks"), "a state carries no gradient, so gradients stop at the beginning of a call"
    )
    states, native_positions = (Memory,), "relative"
    no_decay = ("u", "v")

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        memory: int = 256,
        same_length: bool = True,
        segment: int = 0,
        clamp: int = 0,
        stop_gradient: bool = True,
    ):
        super().__init__(dim, heads, causal=causal)
        if memory < 1:
            raise ValueError(f"memory={memory} is the number of tokens and must be at least 1")
        if clamp < 0:
            raise ValueError(f"clamp={clamp} must be a positive distance, or 0 for no limit")
        if same_length and segment:
            raise ValueError(f"segment={segment} needs same_length=False; with same_length=True there are no segments")
        if not same_length and segment < 1:
            raise ValueError(f"segment={segment} must be at least 1 token with same_length=False")
        if not causal and (segment or not stop_gradient):
            raise ValueError("segment= and stop_gradient=False apply to states, and a bidirectional form has no state")
        if segment or not stop_gradient:
            self.directions = ("causal",)
        if not stop_gradient:
            self.exempt = {}  # pyright: ignore[reportAttributeAccessIssue]  # gradients pass, so all laws hold
        self.memory, self.same_length, self.segment, self.clamp = memory, same_length, segment, clamp
        self.stop_gradient, self.slots = stop_gradient, memory + max(segment - 1, 0)
        pattern = patterns.band(memory, right=0 if causal else memory)
        pattern = patterns.local1d(segment, memory) & patterns.causal() if segment else pattern
        self.key_pattern: Pattern = pattern  # pyright: ignore[reportIncompatibleVariableOverride]  # never None
        self.query, self.key, self.value, self.distance, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(5))
        self.u, self.v = (nn.Parameter(0.02 * torch.randn(heads, dim // heads)) for _ in range(2))

    def start(self, batch: int, capacity: int) -> Memory:
        return memories.empty(batch, self.slots, self.dim, self.weight_like)

    def attend(
        self,
        x: Tensor,
        state: Memory | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, Memory | None]:
        call = memories.begin(x, state, mask, segments, stop=self.stop_gradient)
        # Of the earlier tokens, a query sees only those of its document.
        far, near = call.at.clamp(max=self.memory), None
        if self.segment:
            far = call.at.minimum(self.memory + call.at % self.segment)
        if not self.causal:
            near = _behind(call).clamp(max=self.memory)
        few = state is not None and x.shape[1] * self.heads < self.dim
        weights = memories.Weights(self.u, self.v, self.key, self.value, self.distance)
        view = memories.view(call, self.query(x), weights, clamp=self.clamp, few=few)
        k, v = (call.together(part, 2) for part in view.project(call.tokens))
        scale = (self.dim // self.heads) ** -0.5
        operands = relative.Operands(view.content, view.position, k, v, view.table, far, near, scale)
        if record is not None:
            _, p, allowed = relative.dense(operands)
            record.update(mask=rows.spread(allowed, mask), matrix=rows.spread(p, mask))
        ahead = 0 if self.causal else self.memory
        o = relative.attend(operands, back=self.slots, ahead=ahead)
        if state is not None:
            state = memories.end(call, state, segments, stop=self.stop_gradient)
        return self.out(rows.scatter_back(mask, merge(view.after(o)))), state


def _behind(call: MemoryCall) -> Tensor:
    """The number of real tokens after each in its document, (B,N)."""
    n = call.at.shape[1]
    own = torch.zeros_like(call.at) if call.segments is None else call.segments
    if call.mask is not None:
        # Masked tokens come last, as a separate document with a unique id.
        last = torch.arange(n, device=own.device) >= call.mask.sum(1, keepdim=True)
        own = own.masked_fill(last, torch.iinfo(torch.int64).min)
    return positions(call.at, segments=own.flip(1))[0].flip(1)
