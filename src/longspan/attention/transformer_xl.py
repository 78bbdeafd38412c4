"""Softmax attention by content and distance, over a memory of the inputs of earlier calls."""

import torch
from torch import nn

from .. import patterns
from ..ops import rows
from ..ops.softmax import relative
from ..ops.tensors import merge, positions
from ..patterns import Pattern
from ..states import memory as memories
from ..states.memory import Memory
from .base import Attention


class TransformerXL(Attention):
    r"""Softmax attention by content and distance over the last tokens, of which a state keeps the inputs.

    Keys and values are projected anew in each call from the inputs that the state keeps, as they came into this layer.
    Their weights learn from the memory, and the tokens of earlier calls do not: gradients stop between calls.

    ``memory``: m, how many earlier tokens a query sees. ``same_length``: each query sees m of them. False is the form
    of the training: sequences are cut from their first token on into segments of ``segment`` tokens, and a query sees
    those before it in its own segment, and m tokens before that. A call per segment is the published training, and the
    answer is the same however a sequence is cut into calls. ``clamp``: the largest distance that is told apart (0: all
    are). ``stop_gradient=False`` lets gradients through the state, to its first token; calls then keep their graphs.

    The bidirectional form sees m tokens on either side, at distances of both signs. $r_d$ is the sinusoid of d in dim
    channels; u and v are each layer's own. Distances count real tokens. The state is the last m inputs, with segments
    $m + s - 1$.

    Source: Dai et al. 2019, sections 3.2 and 3.3; same_length and clamp are of its evaluation, in the authors' code,
    where all sines of r come before the cosines: a permutation of the columns of $W_r$. Raises ValueError for memory <
    1, clamp < 0, a ``segment`` with same_length or none without, and, for a bidirectional form, segments and
    stop_gradient=False, which it has no use for.
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
    exempt = dict.fromkeys(("gradients", "blocks"), "a state holds no gradient, so these end where a call begins")
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
            raise ValueError(f"memory={memory} is a number of tokens; it must be at least 1")
        if clamp < 0:
            raise ValueError(f"clamp={clamp} is the largest distance told apart; it must be positive, or 0 for all")
        if same_length and segment:
            raise ValueError(f"segment={segment} belongs to same_length=False; with same_length=True there are none")
        if not same_length and segment < 1:
            raise ValueError(f"segment={segment} is a number of tokens; same_length=False needs at least 1")
        if not causal and (segment or not stop_gradient):
            raise ValueError("segments and stop_gradient=False are about states, which no bidirectional form has")
        if segment or not stop_gradient:
            self.directions = ("causal",)
        if not stop_gradient:
            self.exempt = {}  # type: ignore[misc]
        self.memory, self.same_length, self.segment, self.clamp = memory, same_length, segment, clamp
        self.stop_gradient, self.slots = stop_gradient, memory + max(segment - 1, 0)
        alike = patterns.band(memory, right=0 if causal else memory)
        self.key_pattern: Pattern = patterns.local1d(segment, memory) & patterns.causal() if segment else alike
        self.query, self.key, self.value, self.distance, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(5))
        self.u, self.v = (nn.Parameter(0.02 * torch.randn(heads, dim // heads)) for _ in range(2))

    def start(self, batch, capacity):
        return memories.empty(batch, self.slots, self.dim, self.weight_like)

    def attend(self, x, state, *, mask=None, segments=None, record=None, donate=False):
        call = memories.begin(x, state, mask, segments, stop=self.stop_gradient)
        # Of what came before, a document's own tokens alone.
        far, near = call.at.clamp(max=self.memory), None
        if self.segment:
            far = call.at.minimum(self.memory + call.at % self.segment)
        if not self.causal:
            near = _behind(call).clamp(max=self.memory)
        few = state is not None and x.shape[1] * self.heads < self.dim
        parts = self.u, self.v, self.key, self.value, self.distance
        view = memories.view(call, self.query(x), *parts, clamp=self.clamp, few=few)
        k, v = (call.together(part, 2) for part in view.project(call.tokens))
        operands, scale = (view.content, view.position, k, v, view.table), (self.dim // self.heads) ** -0.5
        if record is not None:
            _, p, allowed = relative.dense(*operands, far, near, scale=scale)
            record.update(mask=rows.spread(allowed, mask), matrix=rows.spread(p, mask))
        ahead = 0 if self.causal else self.memory
        o = relative.attend(*operands, far, near, back=self.slots, ahead=ahead, scale=scale)
        if state is not None:
            state = memories.end(call, state, segments, stop=self.stop_gradient)
        return self.out(rows.scatter_back(mask, merge(view.after(o)))), state


def _behind(call):
    """How many real tokens come after each in its own document, (B,N)."""
    n = call.at.shape[1]
    own = torch.zeros_like(call.at) if call.segments is None else call.segments
    if call.mask is not None:
        # Those that are not real stand last; they are a document of their own, with an id that no other has.
        last = torch.arange(n, device=own.device) >= call.mask.sum(1, keepdim=True)
        own = own.masked_fill(last, torch.iinfo(torch.int64).min)
    return positions(call.at, segments=own.flip(1))[0].flip(1)
