"""Feature maps: modules whose inner products replace the softmax kernel."""

from .base import ActivationFunctionFeatureMap, FeatureMap, elu_feature_map
from .fourier_features import Favor, GeneralizedRandomFeatures, RandomFourierFeatures, SmoothedRandomFourierFeatures

__all__ = [
    "ActivationFunctionFeatureMap",
    "Favor",
    "FeatureMap",
    "GeneralizedRandomFeatures",
    "RandomFourierFeatures",
    "SmoothedRandomFourierFeatures",
    "elu_feature_map",
]
