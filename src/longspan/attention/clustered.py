"""Softmax attention of a few clusters of queries instead of each query."""

import torch
from torch import nn

from ..ops.compress import prototypes
from ..ops.linear.random_features import projection
from ..ops.tensors import merge, split
from .base import Attention


class Clustered(Attention):
    r"""Queries that point the same way read the same: what the mean query of their cluster reads, by softmax.

    Clusters are found in each row and head on their own by Lloyd's algorithm on hashes: bit b of a query tells on which
    side of the random plane $a_b$ it is. ``clusters``: C. ``bits``: planes, which ``iterations`` steps of Lloyd's then
    compare by Hamming distance. The planes are those of the layer, the first centroids hashes of real tokens, so that
    nothing is random. Where a sequence has no more than C tokens, each is a cluster of its own, and this is softmax
    attention.

    The mean mixes queries of all positions, so there is no causal form. A token's output depends on the others'
    queries, not on their keys and values alone, so there is no cross attention either: queries that read a context in
    several calls would read otherwise than in one.

    ``record`` also gets ``groups`` (B,H,N) int64, the clusters, C for a masked token.

    Source: Vyas et al. 2020, sections 3.1 and 3.2; sizes as in the authors' code, of which the first centroids are
    random tokens. Raises ValueError for clusters or iterations < 1 and for bits that are not 1 to 63.
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
    planes: torch.Tensor  # (bits,D+1)

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

    def attend(self, x, state, *, mask=None, segments=None, record=None):
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        reader = prototypes.Reader(self.planes, self.clusters, self.iterations)
        if record is not None:
            record.update(reader.told(q, k, mask=mask, segments=segments))
        return self.out(merge(reader(q, k, v, mask=mask, segments=segments))), state
