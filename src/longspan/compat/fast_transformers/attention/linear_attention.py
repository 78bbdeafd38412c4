"""Linear attention: every query reads one sum over all keys."""

from collections.abc import Callable

from torch import Tensor, nn

from ....ops import linear
from ....ops.linear import features
from ....ops.tensors import upcast_half
from ..attention_registry import AttentionRegistry, EventDispatcherInstance, Float, Int, Optional
from ..attention_registry import Callable as CallableSpec
from ..events import EventDispatcher
from ..feature_maps.base import ActivationFunctionFeatureMap, FeatureMap, elu_feature_map
from ..masking import Masks, keys_of
from .attention_layer import SequenceAttention


class Sums(nn.Module):
    r"""Base class of linear attentions.

    Args:
        query_dimensions: channels of a head.
        feature_map: a function that makes the feature map for a number of channels; None means elu(x) + 1.
        eps: added to the denominator, $\sum_j \phi(q) \cdot \phi(k_j)$.
        event_dispatcher: a dispatcher, or its name.
    """

    def __init__(
        self,
        query_dimensions: int,
        feature_map: Callable[[int], FeatureMap] | None = None,
        eps: float = 1e-6,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__()
        self.feature_map = (feature_map or elu_feature_map)(query_dimensions)
        self.eps = eps
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)

    @property
    def elu(self) -> bool:
        """Whether the feature map is elu(x) + 1, which the fast paths apply themselves."""
        phi = self.feature_map
        return type(phi) is ActivationFunctionFeatureMap and phi.activation_function is features.elu

    def read(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool, mask: Tensor | None = None
    ) -> Tensor:
        """Attend: queries (N,L,H,E), keys (N,S,H,E), values (N,S,H,D), mask bool (N,S) -> (N,L,H,D)."""
        arguments = {"causal": causal, "eps": self.eps, "mask": mask}
        v = values.transpose(1, 2)
        if self.elu:
            q, k = queries.transpose(1, 2), keys.transpose(1, 2)
            out, _ = linear.named(q, k, v, feature_map="elu", **arguments)
        else:
            q = upcast_half(self.feature_map.forward_queries(queries)).transpose(1, 2)
            k = upcast_half(self.feature_map.forward_keys(keys)).transpose(1, 2)
            out, _ = linear.attend(q, k, v, **arguments)
        return out.transpose(1, 2).contiguous()


class LinearAttention(Sums, SequenceAttention):
    """phi(q)^T sum_j phi(k_j) v_j^T / (phi(q)^T sum_j phi(k_j) + eps) over all keys that ``key_lengths`` keeps.

    Arguments are as in ``Sums``.

    References:
        Katharopoulos et al. 2020 (2006.16236), eq. 5.
    """

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        """Return (N,L,H,D) for queries (N,L,H,E), keys (N,S,H,E) and values (N,S,H,D).

        Raises:
            RuntimeError: ``attn_mask`` hides a key; all queries share one sum.
        """
        if not masks.attention.all_ones:
            raise RuntimeError("LinearAttention sees all keys; attn_mask must be all ones, FullMask(L, S)")
        self.feature_map.new_feature_map(queries.device)
        return self.read(queries, keys, values, causal=False, mask=keys_of(masks.keys))


LINEAR_PARAMETERS = [
    ("query_dimensions", Int),
    ("feature_map", Optional(CallableSpec)),
    ("eps", Optional(Float, 1e-6)),
    ("event_dispatcher", Optional(EventDispatcherInstance, "")),
]
AttentionRegistry.register("linear", LinearAttention, LINEAR_PARAMETERS)
