"""Attention through a few learned points, which read the whole set before its elements read them."""

from typing import NamedTuple

from torch import Tensor

from ..modules.set_blocks import ISAB
from ..ops import rows
from .base import Attention


class InducedContext(NamedTuple):
    """All that queries need of a context, whatever its length."""

    points: Tensor  # (B,points,dim) what the inducing points have read


class SetTransformer(Attention):
    r"""Learned points read all tokens, and the tokens read the points: two softmaxes over few pairs each.

    It is the induced set attention block; ``longspan.ISAB`` is the same outside of stacks, with ``MAB``, ``SAB`` and
    ``PMA`` beside it. $\mathrm{attend}(X, Y)$ is softmax attention with heads, of the queries of X over keys and values
    of Y, with an output projection; both blocks have projections of their own. Residual paths, norms and the network
    belong to the block, so y is what comes out of it.

    ``points``: m, rows of I, the inducing points. ``norm``: layer normalization; without it, norm is left out.

    Order plays no part. The points read everything, so there is no causal form. What they have read of a context is the
    state of cross attention.

    Source: Lee et al. 2019, eqs 6, 7, 9 and 10. Raises ValueError for points < 1.
    """

    name, paper, cost = "set_transformer", "1810.00825", "N m D"
    family = "compressed"
    equations = (
        r"Y = \mathrm{MAB}(X, \mathrm{MAB}(I, X))",
        r"\mathrm{MAB}(X, Y) = \mathrm{norm}(H + \mathrm{relu}(W H + b)), \quad "
        r"H = \mathrm{norm}(X + \mathrm{attend}(X, Y))",
    )
    citation = (
        "Lee, Juho and Lee, Yoonho and Kim, Jungtaek and Kosiorek, Adam R. and Choi, Seungjin and Teh, Yee Whye",
        "Set Transformer: A Framework for Attention-based Permutation-Invariant Neural Networks",
        2019,
    )
    examples = ("set_transformer(points=5)", "set_transformer(points=3, norm=False)")
    directions, contexts = ("bidirectional",), (InducedContext,)

    def __init__(self, dim: int, heads: int, *, causal: bool = False, points: int = 32, norm: bool = True):
        super().__init__(dim, heads, causal=causal)
        self.points, self.norm = points, norm
        self.block = ISAB(dim, heads, points=points, norm=norm)

    def attend(self, x, state, *, mask=None, segments=None, context=None, context_mask=None):
        if context is not None:
            state = InducedContext(self.block.induce(context, context_mask))
        if state is not None:
            return self.block.unpack(x, state.points), state
        if segments is not None:
            return rows.cut(lambda _, tokens: self.block(tokens), (x,), x, mask, segments, exact=True), None
        return self.block(x, mask), None
