"""A causal mechanism run in both directions, for encoders."""

from typing import Any, Never

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._utils import spec
from .base import Attention
from .build import make
from .registry import mechanism
from .validation import Trusted

# Attributes of mechanisms that return more than outputs, with a description.
_PASSED_ON = {
    "has_layer_carry": "a carry for the next layer",
    "penalty": "a loss",
    "samples": "the log probability of what it draws",
    "statistics": "statistics that update its buffers",
}


class Bidirectional(Attention[Never]):
    r"""Adds the outputs of a causal mechanism over the sequence and over the reversed sequence.

    f and g return the output of a causal mechanism for its last token: f reads the tokens up to t, g reads them from
    the end back to t. Both directions read token t itself. Each direction has its own weights and projections, and the
    two outputs are added without a further projection. Masked tokens are skipped in both directions, and packed
    segments are reversed each within its own borders.

    ``of``: the mechanism, as a nested spec, for instance ``bidirectional(ssd(channels=64))``. It must have a causal
    form and a state of fixed size. ``share``: both directions use the same weights, so that $g = f$.

    Source: Schiff et al. 2024 (2403.03234), section 3.1, which runs Mamba in both directions and adds the outputs; the
    paper shares the projections of the two directions and nothing else, where ``share`` shares all weights or none.
    """

    name, paper, cost = "bidirectional", "2403.03234", "N D^2"
    family = "gated"
    equations = (r"y_t = f(x_1, \ldots, x_t) + g(x_N, \ldots, x_t)",)
    citation = (
        "Schiff, Yair and Kao, Chia-Hsiang and Gokaslan, Aaron and Dao, Tri and Gu, Albert and Kuleshov, Volodymyr",
        "Caduceus: Bi-Directional Equivariant Long-Range DNA Sequence Modeling",
        2024,
    )
    examples = ("bidirectional(gla(rank=3, expand_v=1.5))", "bidirectional(retention, share=True)")
    directions = ("bidirectional",)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = False,
        layer: int = 0,
        depth: int = 1,
        of: spec.Spec = "gla",
        share: bool = False,
    ):
        super().__init__(dim, heads, causal=causal)
        if (name := spec.head(of)) and "causal" not in (cls := mechanism(name)).directions:
            raise ValueError(
                f"bidirectional runs a causal mechanism in both directions, and {name} has no causal form; "
                f"it has: {', '.join(cls.directions)}"
            )

        def direction() -> Attention:
            return make(of, dim, heads, causal=True, layer=layer, depth=depth, positions="none")

        self.forwards = direction()
        if passed := [fact for fact in _PASSED_ON if getattr(self.forwards, fact)]:
            raise ValueError(
                f"bidirectional adds outputs and returns nothing else, but {name} also returns {_PASSED_ON[passed[0]]}"
            )
        if _shapes(self.forwards, 0) != _shapes(self.forwards, 1024):
            raise ValueError(
                f"bidirectional runs mechanisms with a state of fixed size, and the state of {self.forwards.spec} "
                f"grows with the sequence; build {name} with causal=False"
            )
        self.backwards = None if share else direction()
        self.of, self.share = self.forwards.spec, share
        self.supported_args = self.supported_args & self.forwards.supported_args

    def reset_parameters(self) -> None:
        """Draw all weights and buffers of both directions as a new module does."""
        for direction in self.children():
            if isinstance(direction, Attention):
                direction.reset_parameters()

    @property
    def positional(self) -> bool:
        """Always True: each direction is causal, so that reordering the tokens changes the outputs."""
        return True

    def attend(
        self, x: Tensor, state: None, *, mask: Tensor | None = None, segments: Tensor | None = None
    ) -> tuple[Tensor, None]:
        # This call's arguments have been checked, and its packed sequences are kept apart.
        checked: dict[str, Any] = {"_trusted": Trusted.ISOLATED}
        y, _ = self.forwards(x, mask=mask, segments=segments, **checked)
        turned = {
            "mask": None if mask is None else mask.flip(1),
            # ~id = -id - 1 turns the falling ids of a reversed row into rising ones.
            "segments": None if segments is None else ~segments.flip(1),
        }
        reverse, _ = (self.backwards or self.forwards)(x.flip(1), **turned, **checked)
        return y + reverse.flip(1), None


def _shapes(attention: Attention, capacity: int) -> list[torch.Size]:
    return [leaf.shape for leaf in pytree.tree_leaves(attention.start(1, capacity))]
