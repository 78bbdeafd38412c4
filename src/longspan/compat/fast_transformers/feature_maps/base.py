"""The contract of feature maps, and maps that treat each channel alone."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ....ops.linear import features


class FeatureMap(nn.Module):
    """Maps the last axis of queries and keys, ``query_dims`` channels, to features: (..., E) -> (..., F)."""

    def __init__(self, query_dims: int):
        super().__init__()
        self.query_dims = query_dims

    def new_feature_map(self, device: torch.device) -> None:
        """Draw anew what is random; called before each sequence."""
        raise NotImplementedError(f"{type(self).__name__} must define new_feature_map(device)")

    def forward_queries(self, x: Tensor) -> Tensor:
        """The features of queries; ``forward``, unless overridden."""
        return self(x)

    def forward_keys(self, x: Tensor) -> Tensor:
        """The features of keys; ``forward``, unless overridden."""
        return self(x)

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(x)")

    @classmethod
    def factory(cls, *args, **kwargs) -> Callable[[int], "FeatureMap"]:
        """What attentions take as ``feature_map=``: a function that makes one for a number of query channels."""
        return lambda query_dims: cls(query_dims, *args, **kwargs)


class ActivationFunctionFeatureMap(FeatureMap):
    """The same function of every channel."""

    def __init__(self, query_dims: int, activation_function: Callable[[Tensor], Tensor]):
        super().__init__(query_dims)
        self.activation_function = activation_function

    def new_feature_map(self, device: torch.device) -> None:
        """Nothing is random."""

    def forward(self, x: Tensor) -> Tensor:
        return self.activation_function(x)


def elu_feature_map(query_dims: int) -> ActivationFunctionFeatureMap:
    """elu(x) + 1, the default (Katharopoulos et al. 2020, eq. 7); the one that the native kernels know."""
    return ActivationFunctionFeatureMap(query_dims, features.elu)
