"""Improved clustered attention: clustered attention that is exact on the top keys of each cluster."""

from typing import Any, Never

from torch import Tensor, nn

from ..ops.compress import prototypes
from ..ops.linear.random_features import projection
from ..ops.tensors import merge, split
from .base import Attention


class ImprovedClustered(Attention[Never]):
    r"""Clustered attention with exact softmax weights on the top keys of each cluster.

    $T_c$ are the top keys of cluster c, with the largest $p_{cj}$, and $m_c$ is their total weight. Each query
    distributes $m_c$ over $T_c$ by its own softmax; the other keys have the weights of the cluster. The weights of each
    query are at least as close to softmax attention as in ``clustered``, in the sum of absolute differences. They equal
    softmax attention if ``topk`` includes all keys, and ``clustered`` with ``topk=1``.

    ``clusters``: C, the number of clusters. ``bits``: the number of planes of the hashes, at most 63. ``iterations``:
    the number of steps of Lloyd's algorithm. ``topk``: k, the number of top keys.

    Clusters are those of ``clustered``; as there, there is no causal form and no cross attention. ``record`` also gets
    ``groups`` (B,H,N) int64, the cluster of each token, C for a masked token, and ``chosen``, bool (B,H,N,M), the keys
    in $T_c$.

    Source: Vyas et al. 2020, section 3.3; sizes as in the authors' code, which stops the gradient of $m_c$, unlike
    here. Raises ValueError for clusters, iterations or topk < 1 and for bits outside 1 to 63.
    """

    name, paper, cost = "improved_clustered", "2007.04825", "N C D + N k D"
    family = "compressed"
    equations = (
        r"o_i = m_c \sum_{j \in T_c} p_{ij}^\prime v_j + \sum_{j \in \mathcal{A}_i \setminus T_c} p_{cj} v_j, "
        r"\quad m_c = \sum_{j \in T_c} p_{cj}, \quad c = c_i",
        r"p_{ij}^\prime = \mathrm{softmax}_{j \in T_c} \frac{q_i \cdot k_j}{\sqrt D}, \quad "
        r"p_{cj} = \mathrm{softmax}_j \frac{\bar q_c \cdot k_j}{\sqrt D}, \quad "
        r"\bar q_c = \frac{1}{\lvert c \rvert} \sum_{i : c_i = c} q_i",
    )
    citation = (
        "Vyas, Apoorv and Katharopoulos, Angelos and Fleuret, Fran{\\c c}ois",
        "Fast Transformers with Clustered Attention",
        2020,
    )
    examples = ("improved_clustered(clusters=3, bits=17, iterations=4, topk=5)",)
    directions = ("bidirectional",)
    planes: Tensor  # (bits,D+1)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = False,
        layer: int = 0,
        clusters: int = 100,
        bits: int = 63,
        iterations: int = 10,
        topk: int = 32,
    ):
        super().__init__(dim, heads, causal=causal)
        prototypes.check(clusters, bits, iterations)
        if topk < 1:
            raise ValueError(f"topk={topk} must be at least 1; without top keys, build clustered")
        self.layer, self.clusters, self.bits, self.iterations = layer, clusters, bits, iterations
        self.topk = topk
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        planes = projection(bits, dim // heads + 1, rows="iid", layer=layer)
        self.register_buffer("planes", planes.to(self.out.weight))

    def attend(
        self,
        x: Tensor,
        state: None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict[str, Any] | None = None,
    ) -> tuple[Tensor, None]:
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        reader = prototypes.Reader(self.planes, self.clusters, self.iterations, self.topk)
        if record is not None:
            record.update(reader.record(q, k, mask=mask, segments=segments))
        return self.out(merge(reader(q, k, v, mask=mask, segments=segments))), state
