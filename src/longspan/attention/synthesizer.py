"""Attention without queries and keys: scores from the token alone, the same for every input, or sums of both."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils.spec import known
from ..ops.softmax import scores, similarity
from ..ops.tensors import merge, positions, split, upcast_half
from ..states import kv_cache
from ..states.kv_cache import KeyValues
from .base import Attention

MATRIX_KINDS = {
    "dense": "a network's outputs, one per position",
    "random": "a learned matrix",
    "factored_dense": "products of the outputs of two smaller networks",
    "factored_random": "a learned matrix of low rank",
    "dot": "products of queries and keys, in a mixture with other kinds",
}


class SynthesizerState(NamedTuple):
    """Values of all tokens so far; slot j of a row holds the value of its j-th real token."""

    values: Tensor  # (B,H,capacity,E)
    length: Tensor  # (B,) int64, slots in use


class Synthesizer(Attention[SynthesizerState | KeyValues]):
    r"""Softmax over scores from the query's token alone, over learned scores, or over a mixture.

    i and j are positions, which count real tokens.

    ``kind``: dense, one score per position by a network; factored_dense, products of the outputs of two such networks a
    and b with $A = \lceil \sqrt{n} \rceil$ and $\lceil n / A \rceil$ outputs for the length n; random, a learned matrix
    per head that is independent of the input; factored_random, one of low rank. ``length``: largest number of tokens of
    a sequence, which is a size of the weights; random has $n^2$ weights per head. ``rank``: columns of $R_1$ and $R_2$,
    for factored_random.

    Different kinds joined by + are a mixture, with one learned number w per kind, all equal at first. A mixture may
    include dot, $q_i \cdot k_j / \sqrt D$, the scores of softmax attention.

    Only the rows and columns that a sequence reaches are used, and the softmax is over them, so a shorter sequence
    gives the beginning of the output of a longer one. The state holds the values so far, and the keys if the mixture
    includes dot.

    It materializes the scores, so it is slower than fused softmax at every length.

    Source: Tay et al. 2020, section 3, which requires the alpha to be learned and to sum to one.

    Raises:
        ValueError: For an unknown or repeated kind, dot alone, length < 1, rank < 1, a rank without factored_random, or
            a sequence of more than ``length`` tokens.
    """

    name, paper, cost = "synthesizer", "2005.00743", "N^2 D"
    family = "softmax"
    equations = (
        r"o_i = \sum_{j \in \mathcal{A}_i} p_{ij} v_j, \quad p_{ij} = \mathrm{softmax}_{j \in \mathcal{A}_i} S_{ij}",
        r"\text{dense:} \quad S_i = W_2 \mathrm{relu}(W_1 x_i + b_1) + b_2",
        r"\text{factored dense:} \quad S_{ij} = a_{i, \, j \bmod A} \, b_{i, \lfloor j / A \rfloor}",
        r"\text{random:} \quad S = R, \quad \text{factored random:} \quad S = R_1 R_2^\top",
        r"\text{a mixture:} \quad S = \sum_n \alpha_n S_n, \quad \alpha = \mathrm{softmax}(w)",
    )
    citation = (
        "Tay, Yi and Bahri, Dara and Metzler, Donald and Juan, Da-Cheng and Zhao, Zhe and Zheng, Che",
        "Synthesizer: Rethinking Self-Attention in Transformer Models",
        2020,
    )
    examples = (
        "synthesizer",
        "synthesizer(kind='factored_random', length=307, rank=3)",
        "synthesizer(kind='random+dense+dot', length=307)",
    )
    states = (SynthesizerState, KeyValues)
    no_decay = ("offsets",)

    def __init__(
        self, dim: int, heads: int, *, causal: bool = True, kind: str = "dense", length: int = 4096, rank: int = 8
    ):
        super().__init__(dim, heads, causal=causal)
        kinds = kind.split("+")
        for part in kinds:
            known(part, MATRIX_KINDS, "kind of scores")
        if kinds == ["dot"]:
            raise ValueError("kind='dot' alone is softmax attention; use 'softmax', or add another kind with +")
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"kind={kind!r} has the same kind twice")
        if length < 1:
            raise ValueError(f"length={length} is the largest number of tokens and must be positive")
        if "factored_random" not in kinds and rank != 8:
            raise ValueError(f"rank belongs to kind='factored_random', not {kind!r}")
        if rank < 1:
            raise ValueError(f"rank={rank} must be positive")
        self.kind, self.length, self.rank, self.kinds = kind, length, rank, kinds
        own = KeyValues if "dot" in kinds else SynthesizerState
        self.states = (own,)  # pyright: ignore[reportAttributeAccessIssue]  # per instance
        size, tile = dim // heads, ceil_sqrt(length)
        # Networks: dense has the first one, factored_dense the last two.
        sizes = [length] if "dense" in kinds else []
        sizes += [tile, -(-length // tile)] if "factored_dense" in kinds else []
        # Standard deviation of the scores of standard normal x: 1 (random, factored_random), 0.58 (dense), 0.35
        # (factored_dense).
        self.hidden = nn.ModuleList(nn.Linear(dim, dim) for _ in sizes)
        self.outputs = nn.ParameterList(torch.randn(heads, size, n) * (2 / size) ** 0.5 for n in sizes)
        self.offsets = nn.ParameterList(torch.zeros(heads, 1, n) for n in sizes)
        if "random" in kinds:
            self.table = nn.Parameter(torch.randn(heads, length, length))
        if "factored_random" in kinds:
            self.rows, self.columns = (nn.Parameter(torch.randn(heads, length, rank) * rank**-0.25) for _ in range(2))
        self.value, self.out = (nn.Linear(dim, dim) for _ in range(2))
        if "dot" in kinds:
            self.query, self.key = (nn.Linear(dim, dim) for _ in range(2))
        if len(kinds) > 1:
            self.mixture = nn.Parameter(torch.zeros(len(kinds)))

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch: int, capacity: int) -> SynthesizerState | KeyValues:
        room, size = min(capacity, self.length), self.dim // self.heads
        kept = kv_cache.empty(batch, self.heads, room, size, self.weight_like)
        return kept if "dot" in self.kinds else SynthesizerState(kept.values, kept.length)

    def attend(
        self,
        x: Tensor,
        state: SynthesizerState | KeyValues | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, SynthesizerState | KeyValues | None]:
        v = split(self.value(x), self.heads)
        at, _ = positions(x, state and state.length, mask=mask, segments=segments)
        # Without dot, the keys of the cache have 0 channels.
        k = split(self.key(x), self.heads) if "dot" in self.kinds else v[..., :0]
        given: kv_cache.Visible = {"mask": mask, "segments": segments, "prefix": prefix}
        if isinstance(state, SynthesizerState):
            state = KeyValues(state.values[..., :0], state.values, state.length)
        view, state = kv_cache.continued(k, v, state, causal=self.causal, donate=donate, **given)
        allowed = view.allowed(x.shape[1])
        places = scores.key_positions(at, view.values.shape[2], kept=state is not None, packed=segments is not None)
        # Invisible keys may have positions beyond the tables.
        places = places.masked_fill(~allowed.any(-2)[:, 0], 0)
        self._check(places, x.shape[1])
        at = at if mask is None else at.masked_fill(~mask, 0)
        p = scores.weights(self._mixed(x, view.keys, at, places), allowed)
        if record is not None:
            record.update(mask=allowed, matrix=p)
        y = self.out(merge(similarity.attend(p, view.values)))
        return y, state if state is None or "dot" in self.kinds else SynthesizerState(state.values, state.length)

    def _check(self, places: Tensor, queries: int) -> None:
        if torch.compiler.is_compiling() or not places.numel():
            return  # in compiled code, the look-up of a position beyond the tables raises
        if places.is_cuda and queries == 1:
            # A decode step must not wait for the device.
            fits, message = (places < self.length).all(), "a position is beyond length= of this synthesizer"
            torch._assert_async(fits, message)  # pyright: ignore[reportPrivateImportUsage]  # no public equivalent
            return
        if (last := int(places.max())) >= self.length:
            raise ValueError(
                f"position {last} is beyond length={self.length} of this synthesizer; shorten the sequence, or train "
                f"with a larger length="
            )

    def _mixed(self, x: Tensor, k: Tensor, at: Tensor, places: Tensor) -> Tensor:
        """Mix the scores of queries at (B,N) and keys at (B,M): (B,H,N,M), float32 or wider."""
        found = [self._scores(kind, x, k, at, places) for kind in self.kinds]
        if len(found) == 1:
            return found[0]
        alpha = upcast_half(self.mixture).softmax(0)
        mixed = alpha[0] * found[0]
        for share, part in zip(alpha[1:], found[1:], strict=True):
            mixed = mixed + share * part
        return mixed

    def _scores(self, kind: str, x: Tensor, k: Tensor, at: Tensor, places: Tensor) -> Tensor:
        # Positions are smaller than the number of keys, so only these columns are needed.
        keys = min(places.shape[1], self.length)
        match kind:
            case "dot":
                found = scores.products(split(self.query(x), self.heads), k)
            case "random":
                found = self.table[:, at[:, :, None], places[:, None, :]].transpose(0, 1)
            case "factored_random":
                found = (upcast_half(self.rows)[:, at] @ upcast_half(self.columns)[:, places].mT).transpose(0, 1)
            case "dense":
                found = _pick(self._network(x, 0, keys), places)
            case _:
                a = self._network(x, -2, self.length)
                b = self._network(x, -1, -(-keys // a.shape[-1]))
                found = _pick((b[..., :, None] * a[..., None, :]).flatten(-2)[..., :keys], places)
        return upcast_half(found)

    def _network(self, x: Tensor, i: int, n: int) -> Tensor:
        """The first n outputs of network i for x (B,N,dim): (B,H,N,n)."""
        hidden = split(F.relu(self.hidden[i](x)), self.heads)
        return upcast_half(hidden @ self.outputs[i][..., :n] + self.offsets[i][..., :n])


def _pick(outputs: Tensor, places: Tensor) -> Tensor:
    """Select columns: outputs (B,H,N,L), places (B,M) -> (B,H,N,M)."""
    return outputs.gather(-1, places[:, None, None, :].expand(*outputs.shape[:3], -1))


def ceil_sqrt(n: int) -> int:
    """The smallest integer whose square is at least n."""
    return next(root for root in range(int(n**0.5), n + 1) if root * root >= n)
