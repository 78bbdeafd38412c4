"""Models of transformers with weights of ``longspan.quantize``, in ``save_pretrained`` and ``from_pretrained``."""

from dataclasses import dataclass, field
from typing import Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...models import quantization
from ...models.quantization import METHOD


@register_quantization_config(METHOD)
@dataclass
class BlockConfig(QuantizationConfigMixin):
    """The quantized layers of a model, as ``longspan.quantize`` writes them into its config."""

    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    quant_method: Any = METHOD


@register_quantizer(METHOD)
class BlockQuantizer(HfQuantizer):
    """Gives a model its quantized layers before their weights are loaded."""

    requires_calibration = True  # it loads quantized weights, and does not quantize others

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        quantization.restore(model, self.quantization_config.layers)  # pyright: ignore[reportAttributeAccessIssue] (a BlockConfig)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        quantization.share(model, self.quantization_config.layers)  # pyright: ignore[reportAttributeAccessIssue] (a BlockConfig)
        return model

    def is_serializable(self) -> bool:
        """Return whether ``save_pretrained`` writes the weights."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters may be trained on the frozen weights."""
        return True
