"""Clustered attention: softmax attention of clusters of queries instead of single queries."""

from typing import Any, Never

from torch import Tensor, nn

from ..ops.compress import prototypes
from ..ops.linear.random_features import projection
from ..ops.tensors import merge, split
from .base import Attention


class Clustered(Attention[Never]):
    r"""Softmax attention of the mean query of each cluster; all queries of a cluster get the same output.

    Lloyd's algorithm clusters the queries of each row and head by their hashes, in Hamming distance. Bit b of a hash is
    the side of the random plane $a_b$ that the query is on. The planes are fixed for a layer, and the first centroids
    are hashes of real tokens, so that the result is deterministic. In a sequence of at most C tokens each token is a
    separate cluster, and the output is that of softmax attention.

    ``clusters``: C, the number of clusters. ``bits``: the number of planes, at most 63. ``iterations``: the number of
    steps of Lloyd's algorithm.

    There is no causal form, since a cluster mixes queries of all positions. There is no cross attention, since the
    output of a query depends on the other queries of the call.

    ``record`` also gets ``groups`` (B,H,N) int64: the cluster of each token, C for a masked token.

    Source: Vyas et al. 2020, sections 3.1 and 3.2; sizes as in the authors' code, where the first centroids are
    random tokens. Raises ValueError for clusters or iterations < 1 and for bits outside 1 to 63.
    """

    name, paper, cost = "clustered", "2007.04825", "N C D"
    family = "compressed"
    equations = (
        r"o_i = \sum_j p_{c_i j} v_j, \quad p_{cj} = \mathrm{softmax}_j \frac{\bar q_c \cdot k_j}{\sqrt D}, \quad "
        r"\bar q_c = \frac{1}{\lvert c \rvert} \sum_{i : c_i = c} q_i",
        r"c_i = \mathrm{argmin}_c \sum_b \lvert h_{ib} - \mu_{cb} \rvert, \quad h_{ib} = [a_b \cdot q_i > \beta_b], "
        r"\quad \mu_{cb} = [\sum_{i : c_i = c} (h_{ib} - \frac{1}{2}) > 0]",
    )
    citation = (
        "Vyas, Apoorv and Katharopoulos, Angelos and Fleuret, Fran{\\c c}ois",
        "Fast Transformers with Clustered Attention",
        2020,
    )
    examples = ("clustered(clusters=3, bits=17, iterations=4)",)
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
    ):
        super().__init__(dim, heads, causal=causal)
        prototypes.check(clusters, bits, iterations)
        self.layer, self.clusters, self.bits, self.iterations = layer, clusters, bits, iterations
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
        reader = prototypes.Reader(self.planes, self.clusters, self.iterations)
        if record is not None:
            record.update(reader.record(q, k, mask=mask, segments=segments))
        return self.out(merge(reader(q, k, v, mask=mask, segments=segments))), state
