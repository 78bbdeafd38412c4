"""Attention through a few learned points: the points read the whole set, then its elements read the points."""

from typing import NamedTuple

from torch import Tensor

from ..modules.set_blocks import ISAB
from ..ops import rows
from .base import Attention


class InducedContext(NamedTuple):
    """Everything that queries need of a context of any length."""

    points: Tensor  # (B,points,dim) outputs of the inducing points


class SetTransformer(Attention[InducedContext]):
    r"""Learned points read all tokens, then the tokens read the points: two small softmax attentions.

    It is the induced set attention block. ``longspan.ISAB`` is the same block outside of stacks, next to ``MAB``,
    ``SAB`` and ``PMA``. $\mathrm{attend}(X, Y)$ is multi-head softmax attention with output projection, with queries
    from X and keys and values from Y. Each of the two blocks has its own projections. Residual paths, norms and the
    network are part of the block, whose output is y.

    ``points``: m, rows of I, the inducing points. ``norm``: use layer normalization; without it, norm is the identity.

    The order of the tokens has no effect. The points read everything, so there is no causal form. The state of cross
    attention holds what the points have read.

    Source: Lee et al. 2019, eqs 6, 7, 9 and 10.

    Raises:
        ValueError: For points < 1.
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

    def attend(
        self,
        x: Tensor,
        state: InducedContext | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, InducedContext | None]:
        if context is not None:
            state = InducedContext(self.block.induce(context, context_mask))
        if state is not None:
            return self.block.unpack(x, state.points), state
        if segments is not None:
            return rows.cut(lambda _, tokens: self.block(tokens), (x,), x, mask, segments, exact=True), None
        return self.block(x, mask), None
