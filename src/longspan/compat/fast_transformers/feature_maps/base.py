"""Base class of feature maps, and maps that act on each channel separately."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ....ops.linear import features


class FeatureMap(nn.Module):
    """Base class: map the last axis of queries and keys, ``query_dims`` channels, to features."""

    def __init__(self, query_dims: int):
        super().__init__()
        self.query_dims = query_dims

    def new_feature_map(self, device: torch.device) -> None:
        """Draw new random features; called before each sequence."""
        raise NotImplementedError(f"{type(self).__name__} must define new_feature_map(device)")

    def forward_queries(self, x: Tensor) -> Tensor:
        """Return the features of queries; ``forward``, unless overridden."""
        return self(x)

    def forward_keys(self, x: Tensor) -> Tensor:
        """Return the features of keys; ``forward``, unless overridden."""
        return self(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return features: (..., E) -> (..., F)."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(x)")

    @classmethod
    def factory(cls, *args, **kwargs) -> Callable[[int], "FeatureMap"]:
        """Return the argument ``feature_map`` of attentions: a function that makes a map for a number of channels."""
        return lambda query_dims: cls(query_dims, *args, **kwargs)


class ActivationFunctionFeatureMap(FeatureMap):
    """Apply one function to every channel."""

    def __init__(self, query_dims: int, activation_function: Callable[[Tensor], Tensor]):
        super().__init__(query_dims)
        self.activation_function = activation_function

    def new_feature_map(self, device: torch.device) -> None:
        """Do nothing, because the map is not random."""

    def forward(self, x: Tensor) -> Tensor:
        return self.activation_function(x)


def elu_feature_map(query_dims: int) -> ActivationFunctionFeatureMap:
    """Return elu(x) + 1, the default, which the native kernels support.

    References:
        Katharopoulos et al. 2020 (2006.16236), eq. 7.
    """
    return ActivationFunctionFeatureMap(query_dims, features.elu)
