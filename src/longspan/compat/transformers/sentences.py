"""An encoder as a model of transformers, in a folder that sentence-transformers loads."""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ...data import tokenization
from ...models import checkpoint
from ...models.config import EncoderConfig
from ...models.encoder import Encoder
from .encoders import MODULES, POOLINGS
from .loading import StrictLoading


class LongspanEncoderConfig(PreTrainedConfig):
    """Config of a longspan encoder: the fields of ``longspan.EncoderConfig`` and those of every transformers config.

    Args:
        values: fields of ``longspan.EncoderConfig`` and of ``PreTrainedConfig``.

    Raises:
        ValueError: ``longspan.EncoderConfig`` rejects a field.

    Example:
        >>> from longspan.compat.transformers import LongspanEncoderConfig
        >>> LongspanEncoderConfig(dim=8, depth=2, heads=2, vocab=17).hidden_size
        8
    """

    model_type = "longspan_encoder"
    attribute_map = {  # noqa: RUF012
        "vocab_size": "vocab",
        "hidden_size": "dim",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "max_position_embeddings": "length",
    }

    def __init__(self, **values: Any):
        names = {name: self.attribute_map.get(name, name) for name in values}
        own = {field.name for field in fields(EncoderConfig)}
        config = EncoderConfig(**{names[name]: value for name, value in values.items() if names[name] in own})
        for name, value in config.to_dict().items():
            setattr(self, name, value)
        super().__init__(**{name: value for name, value in values.items() if names[name] not in own})

    def native(self) -> EncoderConfig:
        """Return the config as a ``longspan.EncoderConfig``."""
        return EncoderConfig(**{field.name: getattr(self, field.name) for field in fields(EncoderConfig)})


class LongspanEncoder(StrictLoading, PreTrainedModel):
    """A ``longspan.Encoder`` of tokens with the interface of transformers; ``model.encoder`` is the encoder.

    It returns the outputs of tokens, before pooling. ``save_pretrained`` also writes the tokenizer and, for an encoder
    with pooling and without a head, the files by which sentence-transformers pools and normalizes. To load such a
    folder there, import this class first: it registers the type of the model.

    Args:
        config: the config of the model.
        encoder: the encoder to use; None means a new one built from ``config``.

    Raises:
        ValueError: for an encoder of vectors, ``vocab=0``, or with a head, whose outputs this model would leave out.

    Example:
        >>> import torch
        >>> from longspan.compat.transformers import LongspanEncoder, LongspanEncoderConfig
        >>> config = LongspanEncoderConfig(dim=8, depth=1, heads=2, feedforward=16, vocab=5)
        >>> LongspanEncoder(config).eval()(torch.tensor([[3, 1, 4]])).last_hidden_state.shape
        torch.Size([1, 3, 8])
    """

    config_class = LongspanEncoderConfig
    base_model_prefix = "encoder"
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: LongspanEncoderConfig, encoder: Encoder | None = None):
        super().__init__(config)
        if not config.native().vocab or config.native().outputs:
            raise ValueError(
                "a model of sentences reads tokens and has no head: pass an encoder with vocab > 0 and outputs=0, not "
                f"vocab={config.native().vocab}, outputs={config.native().outputs}"
            )
        self.encoder = Encoder(config.native()) if encoder is None else encoder
        self.post_init()

    @classmethod
    def from_longspan(cls, source: str | os.PathLike | Encoder) -> Self:
        """Return the model of a longspan checkpoint, a run or an encoder, which is not copied.

        Raises:
            ValueError: the folder does not hold an encoder, or the class rejects it.
        """
        encoder = source if isinstance(source, Encoder) else checkpoint.load(checkpoint.resolve(Path(source)))
        if not isinstance(encoder, Encoder):
            raise ValueError(f"{source} holds a {type(encoder).__name__}; only an encoder embeds sentences")
        model = cls(LongspanEncoderConfig(**encoder.config.to_dict()), encoder).train(encoder.training)
        model.config.dtype = next(encoder.parameters()).dtype
        return model

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the encoder has initialized itself, and missing weights of a file raise an error."""

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Write the model as transformers does, its tokenizer, and the modules of sentence-transformers.

        Arguments and errors are those of transformers.
        """
        config, folder = self.encoder.config, Path(save_directory)
        if is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            if self.encoder.tokenizer:
                _write_tokenizer(folder, self.encoder.tokenizer)
            if config.pool != "none":
                _write_modules(folder, config)
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput | tuple:
        """Return the outputs of tokens.

        Args:
            input_ids: (B,N) int64.
            attention_mask: (B,N), 1 on real tokens.
            token_type_ids: (B,N), all 0: texts have one part.
            return_dict: False returns a tuple.

        Returns:
            ``BaseModelOutput`` with ``last_hidden_state`` (B,N,dim), or a tuple of it.

        Raises:
            ValueError: token types that are not 0, and what the encoder rejects.
        """
        if input_ids is None or (token_type_ids is not None and bool(token_type_ids.any())):
            raise ValueError("pass input_ids, and token_type_ids of 0 or none: texts have one part")
        mask = None if attention_mask is None else attention_mask.bool()
        found = BaseModelOutput(last_hidden_state=self.encoder.features(input_ids, mask=mask))  # pyright: ignore[reportArgumentType] (a Tensor)
        return found if return_dict is not False else found.to_tuple()


def _write_tokenizer(folder: Path, content: str) -> None:
    """Write the tokenizer with a padding token, as batches of sentences need one."""
    tokenization.write_files(folder, content)
    added = [one["content"] for one in json.loads(content).get("added_tokens") or []]
    path = folder / tokenization.TOKENIZER_CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    config["model_input_names"] = ["input_ids", "attention_mask"]
    if pads := [name for name in ("[PAD]", "<pad>") if name in added]:
        config["pad_token"] = pads[0]
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_modules(folder: Path, config: EncoderConfig) -> None:
    places = ["" if not i else f"{i}_{name}" for i, name in enumerate(MODULES)]
    modules = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{name}"}
        for i, (name, place) in enumerate(zip(MODULES, places, strict=True))
    ]
    modes = {name: pool == config.pool for name, pool in POOLINGS.items()}
    length = {"max_seq_length": config.length if config.positions == "learned" else None, "do_lower_case": False}
    contents: dict[str, Any] = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": config.dim} | modes,
        "2_Normalize/config.json": {},
        "sentence_bert_config.json": length,
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


AutoConfig.register(LongspanEncoderConfig.model_type, LongspanEncoderConfig, exist_ok=True)
AutoModel.register(LongspanEncoderConfig, LongspanEncoder, exist_ok=True)
