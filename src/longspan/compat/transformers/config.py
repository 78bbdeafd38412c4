"""A decoder's config as a config of transformers."""

from dataclasses import fields
from typing import Any, Self

from transformers import AutoConfig, PreTrainedConfig

from ...models.config import DecoderConfig


class LongspanConfig(PreTrainedConfig):
    """Config of a longspan decoder: the fields of ``longspan.DecoderConfig`` and those of every transformers config.

    The start token, number ``vocab``, is not among the ``vocab_size`` tokens that the model predicts.

    Args:
        run: settings of the training run, as ``longspan train`` stores them; None without a run.
        use_cache: whether the model returns its cache by default.
        values: fields of ``longspan.DecoderConfig`` and of ``PreTrainedConfig``.

    Raises:
        ValueError: ``longspan.DecoderConfig`` rejects a field.

    Example:
        >>> from longspan.compat.transformers import LongspanConfig
        >>> config = LongspanConfig(dim=8, depth=2, heads=2, attention="linear; softmax")
        >>> config.hidden_size, config.num_hidden_layers, config.vocab_size
        (8, 2, 256)
    """

    model_type = "longspan"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "vocab_size": "vocab",
        "hidden_size": "dim",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "max_position_embeddings": "length",
    }

    def __init__(self, *, run: dict[str, Any] | None = None, use_cache: bool = True, **values: Any):
        names = {name: self.attribute_map.get(name, name) for name in values}
        own = {field.name for field in fields(DecoderConfig)}
        config = DecoderConfig(**{names[name]: value for name, value in values.items() if names[name] in own})
        for name, value in config.to_dict().items():
            setattr(self, name, value)
        self.run, self.use_cache = run, use_cache
        # Tied weights are one parameter of the decoder, so transformers must not tie them.
        rest = {name: value for name, value in values.items() if names[name] not in own} | {
            "tie_word_embeddings": False
        }
        super().__init__(**rest)  # pyright: ignore[reportArgumentType] (fields of any type)

    def native(self) -> DecoderConfig:
        """Return the config as a ``longspan.DecoderConfig``."""
        return DecoderConfig(**{field.name: getattr(self, field.name) for field in fields(DecoderConfig)})

    @classmethod
    def of(cls, config: DecoderConfig, run: dict[str, Any] | None = None) -> Self:
        """Return the config of a decoder built by longspan; ``run`` as in the class."""
        return cls(run=run, **config.to_dict())


AutoConfig.register(LongspanConfig.model_type, LongspanConfig, exist_ok=True)
