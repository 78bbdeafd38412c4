"""A decoder as a causal language model of transformers, for generate, Trainer, peft and other tools."""

import os
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..._utils import model_memory
from ...data import tokenization
from ...models import checkpoint, pretrained
from ...models.decoder import Decoder
from ...models.likelihood import Categorical
from .cache import NAME, LongspanCache, StateGenerationMixin
from .config import LongspanConfig
from .loading import StrictLoading, shift_smoothed_labels
from .packing import mask_of_last
from .tokens import read

# Additional arguments that callers pass: for the loss, and for packed rows, which position_ids describe too.
_LOSS = ("num_items_in_batch", "shift_labels")
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Options of gradient checkpointing: the values that the stack implements.
_CHECKPOINTING = {"use_reentrant": False, "every_n_layers": 1, "offload": False}
IGNORED = -100


class LongspanForCausalLM(StrictLoading, PreTrainedModel, StateGenerationMixin):
    """A ``longspan.Decoder`` with the interface of transformers; ``model.decoder`` is the decoder.

    A decoder's sequences begin with its start token, number ``vocab_size``. Where the given tokens lack it, the model
    inserts it and returns no logits for it, so ``logits[:, t]`` predict the token after ``input_ids[:, t]``. The loss
    does not count the first token of a sequence, also after padding and in packed rows. To count it, begin
    ``input_ids`` and ``labels`` with the start token, which is ``generation_config.bos_token_id``.

    Padding (``attention_mask``) may be on either side. ``position_ids`` only mark where packed sequences begin: where
    they return to the smallest number of their row, which may differ from 0 (``position_ids_start`` of
    ``DataCollatorWithFlattening``). Learned and sinusoidal positions do not depend on them: the decoder counts from the
    start of each sequence. For a likelihood that is not categorical, logits are the logarithms of its
    probabilities. Auxiliary losses of mechanisms (``penalty``) are not part of the loss.

    Args:
        config: the config of the model.
        decoder: the decoder to use; None means a new decoder built from ``config``.

    Raises:
        ValueError: the decoder rejects its arguments, or ``inputs_embeds``, attentions or hidden states are requested,
            which are not supported.

    Example:
        >>> import torch
        >>> from longspan.compat.transformers import LongspanConfig, LongspanForCausalLM
        >>> model = LongspanForCausalLM(LongspanConfig(dim=8, depth=2, heads=2, feedforward=16, vocab=5)).eval()
        >>> model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=4, do_sample=False).shape
        torch.Size([1, 7])
    """

    config_class = LongspanConfig
    base_model_prefix = "decoder"
    supports_gradient_checkpointing = True
    cache_type = LongspanCache
    _is_stateful = NAME != "cache"  # before transformers 5.24, ``generate`` has another way to undo drafted tokens
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: LongspanConfig, decoder: Decoder | None = None):
        super().__init__(config)
        self.decoder = Decoder(config.native()) if decoder is None else decoder
        self.post_init()
        self._begin()

    @classmethod
    def from_longspan(cls, source: str | os.PathLike | Decoder) -> Self:
        """Return the model of a longspan run, checkpoint, pretrained model or decoder.

        For example, ``LongspanForCausalLM.from_longspan("runs/digits").save_pretrained("folder")``.

        Args:
            source: the folder of a run of ``longspan train``, a checkpoint, the name of a pretrained model of longspan,
                or a decoder, which is not copied.

        Raises:
            ValueError: the folder does not hold a decoder.
        """
        run = None
        if not isinstance(source, Decoder):
            name = os.fspath(source)
            if pretrained.is_pretrained_name(name):
                path, decoder = pretrained.path(name), pretrained.load(name)
            else:
                path = checkpoint.resolve(Path(name))
                decoder = checkpoint.load(path)
            header = checkpoint.read_config(path)
            if not isinstance(decoder, Decoder):
                article = "an" if header["kind"] == "encoder" else "a"
                raise ValueError(f"{name} holds {article} {header['kind']}; only a decoder is a causal language model")
            source, run = decoder, header.get("run")
        training, dtype = source.training, next(source.parameters()).dtype
        model = cls(LongspanConfig.of(source.config, run), source).train(training)
        model.config.dtype = dtype
        return model

    def to_longspan(self, folder: str | os.PathLike) -> None:
        """Write the decoder as a checkpoint for ``longspan.load``, ``longspan eval`` and ``longspan generate``.

        Args:
            folder: the folder to write.

        Raises:
            ValueError: ``longspan.save`` rejects the folder, or the model has weights that a decoder does not have,
                such as adapters.
        """
        own = set(model_memory.shapes(lambda: Decoder(self.decoder.config)).state_dict())
        if odd := sorted(own ^ set(self.decoder.state_dict())):
            raise ValueError(
                f"the model does not have the weights of a decoder, {odd[0]!r} first; merge adapters before, e.g. by "
                f"peft's merge_and_unload()"
            )
        checkpoint.save(self.decoder, folder, extra={"run": self.config.run} if self.config.run else None)

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Write the model as transformers does, and the files of its tokenizer if the decoder has one.

        ``push_to_hub`` of the model uploads both. Arguments and errors are those of transformers.
        """
        if self.decoder.tokenizer and is_main_process:
            os.makedirs(save_directory, exist_ok=True)
            tokenization.write_files(Path(save_directory), self.decoder.tokenizer)
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LongspanCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        cache: LongspanCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Return the logits of the tokens after ``input_ids``; see the class.

        Args:
            input_ids: (B,N) int64.
            attention_mask: (B,N), or (B,past+N) with a cache: 1 on real tokens.
            position_ids: (B,N), marks where packed sequences begin.
            past_key_values: the cache that an earlier call returned. Without gradients, the call overwrites it.
            labels: (B,N), the ids themselves, -100 where there is no loss. The model shifts them.
            use_cache: return the cache; None means in evaluation without labels.
            logits_to_keep: keep the last N tokens, or the tokens at these indices; 0 keeps all.
            return_dict: False returns a tuple.
            cache: the cache, by its name from transformers 5.24 on.
            kwargs: arguments of the loss and of packed rows that transformers passes.

        Returns:
            ``CausalLMOutputWithPast`` with logits (B,N,vocab_size), the loss and the cache, or a tuple of them.

        Raises:
            ValueError: an argument is not supported, has the wrong shape, or is rejected by the decoder.
        """
        cache = self._given(past_key_values, cache)
        self._refuse(input_ids, position_ids, kwargs)
        assert input_ids is not None
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and not self.training and labels is None
        if cache is None and use_cache:
            cache = LongspanCache()
        mask = mask_of_last(attention_mask, *input_ids.shape)
        ahead = 0 if cache is None else cache.ahead(input_ids, logits_to_keep)
        outputs, begins = self._outputs(input_ids, mask, position_ids, cache, ahead)
        logits = self._logits(outputs)
        loss = None
        if labels is not None:
            # The token before the first one of a sequence is padding, or belongs to another sequence.
            labels = self._targets(labels if begins is None else labels.masked_fill(begins, IGNORED))
            given = {name: kwargs[name] for name in _LOSS if name in kwargs}
            if given.get("shift_labels") is not None:
                given["shift_labels"] = self._targets(given["shift_labels"])
            loss = self.loss_function(logits.contiguous(), labels, vocab_size=self.config.vocab_size, **given)
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        elif logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        found = CausalLMOutputWithPast(loss=loss, logits=logits, **{NAME: cache if use_cache else None})  # pyright: ignore[reportArgumentType] (NAME is one field)
        return found if return_dict is not False else found.to_tuple()

    def _outputs(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, cache: LongspanCache | None, ahead: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Return the decoder's outputs of the tokens, and where sequences begin (B,N), None if nowhere.

        The cache can undo the last ``ahead`` tokens.
        """
        if cache is not None and ahead:
            if mask is not None and not bool(mask[:, -ahead:].all()):
                raise ValueError("tokens that can be undone cannot be padding; pad prompts on the left")
            if ahead == ids.shape[1]:
                return cache.read_ahead(self.decoder, ids), None
            mask, positions = (None if t is None else t[:, :-ahead] for t in (mask, positions))
            outputs, begins = self._outputs(ids[:, :-ahead], mask, positions, cache)
            last = cache.read_ahead(self.decoder, ids[:, -ahead:])
            return torch.cat([outputs, last], 1), None if begins is None else F.pad(begins, (0, ahead))
        state: Any = None if cache is None else cache.state
        if cache is not None:
            if state is None:
                if self.decoder.device.type == "meta" and not ids.is_meta:
                    raise ValueError("the weights are offloaded (device_map), which no cache supports: use_cache=False")
                state = self.decoder.init_state(len(ids))
            elif ids.shape[1] == 1 and mask is None and not torch.is_grad_enabled() and self._single(positions, state):
                cache.seen += 1
                return cache.step(self.decoder, ids), None
        begun = None if state is None else state.position > 0
        given = read(ids, self.decoder.start, mask=mask, positions=positions, begun=begun)
        donate = cache is not None and not torch.is_grad_enabled()
        outputs, state = self.decoder(given.tokens, state, mask=given.mask, segments=given.segments, donate=donate)
        if cache is not None:
            cache.state, cache.seen = state, cache.seen + ids.shape[1]
        return given.outputs(outputs), given.begins

    def _single(self, positions: Tensor | None, state: Any) -> bool:
        """Return whether one more token continues every row."""
        return bool((state.position > 0).all()) and (positions is None or bool((positions > 0).all()))

    def _logits(self, outputs: Tensor) -> Tensor:
        likelihood = self.decoder.likelihood
        return outputs if isinstance(likelihood, Categorical) else likelihood.log_probs(outputs)

    def _targets(self, labels: Tensor) -> Tensor:
        """Return labels without the start token, which is not a target, because no token precedes it."""
        return labels.masked_fill(labels == self.decoder.start, IGNORED)

    def _given(self, past_key_values: Any, cache: Any) -> LongspanCache | None:
        """Return the cache, from either of its names."""
        if past_key_values is not None and cache is not None:
            raise ValueError("cache and past_key_values are names of the same argument; pass one of them")
        name, found = ("cache", cache) if past_key_values is None else ("past_key_values", past_key_values)
        if found is not None and not isinstance(found, LongspanCache):
            raise ValueError(f"{name} must be a LongspanCache, not {type(found).__name__}")
        return found

    def _refuse(self, ids: Any, positions: Any, kwargs: dict[str, Any]) -> None:
        """Raise ValueError for arguments that this model does not support."""
        if ids is None or kwargs.pop("inputs_embeds", None) is not None:
            raise ValueError("a longspan decoder reads tokens: pass input_ids, not inputs_embeds")
        for name in ("output_attentions", "output_hidden_states"):
            if kwargs.pop(name, None):
                raise ValueError(f"{name}=True is not supported; use record= of longspan.Decoder")
        known = _LOSS + (_PACKED if positions is not None else ())
        if odd := [name for name, value in kwargs.items() if name not in known and value is not None]:
            hint = "; pass position_ids to mark packed rows" if odd[0] in _PACKED else ""
            raise ValueError(f"LongspanForCausalLM.forward has no argument {odd[0]!r}{hint}")

    def _loaded(self) -> None:
        self._begin()

    def _begin(self) -> None:
        if self.generation_config is not None and self.generation_config.bos_token_id is None:
            self.generation_config.bos_token_id = self.decoder.start

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the decoder has initialized itself, and missing weights of a file raise an error."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding; the start token is its last row."""
        return self.decoder.embedding.tokens

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer. With ``tied``, its weight is that of the token embedding, with the start token."""
        return self.decoder.head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any):
        """Raise ValueError: a decoder's likelihood and start token depend on its vocabulary."""
        raise ValueError(
            "cannot resize the vocabulary of a longspan decoder; build one with another vocab= and copy the weights"
        )

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None, **kwargs: Any) -> None:
        """Store only each block's input for the backward (``DecoderConfig.checkpointing``).

        Args:
            gradient_checkpointing_kwargs: None or the only supported options, ``{"use_reentrant": False}``.
            kwargs: ``every_n_layers=1`` and ``offload=False``, which transformers passes.

        Raises:
            ValueError: an option has another value or is unknown.
        """
        for name, value in {**(gradient_checkpointing_kwargs or {}), **kwargs}.items():
            if name not in _CHECKPOINTING or value != _CHECKPOINTING[name]:
                supported = ", ".join(f"{name}={value}" for name, value in _CHECKPOINTING.items())
                raise ValueError(f"gradient checkpointing with {name}={value!r} is not supported, only {supported}")
        self.decoder.stack.checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Store all tensors that the backward needs."""
        self.decoder.stack.checkpointing = False

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether the backward recomputes blocks."""
        return self.decoder.stack.checkpointing


AutoModelForCausalLM.register(LongspanConfig, LongspanForCausalLM, exist_ok=True)
shift_smoothed_labels(LongspanConfig.model_type, LongspanForCausalLM.__name__)
