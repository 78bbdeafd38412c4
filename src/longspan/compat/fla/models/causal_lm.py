"""A causal language model of flash-linear-attention with the interface of transformers."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import load_state_dict

from ...transformers import decoding, packing
from ...transformers.branches import SERVED
from ...transformers.cache import NAME, StateCache, StateGenerationMixin
from ...transformers.loading import StrictLoading
from .attention import Attention
from .config import FlaConfig
from .mixer import Call, GatedMLP, RMSNorm

# Arguments that callers pass besides: for the loss, and for packed rows.
_LOSS = ("num_items_in_batch", "shift_labels")
_PACKED = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class Block(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        softmax = config.attention_of(layer)
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = config.family.mixer(config, layer) if softmax is None else Attention(config.hidden_size, **softmax)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.hidden_ratio, config.intermediate_size)

    def start(self, batch: int) -> Any:
        """Return the state of ``batch`` rows before the first token."""
        return self.attn.start(batch)

    def forward(self, x: Tensor, state: Any, call: Call) -> tuple[Tensor, Any]:
        """x (B,N,hidden) -> (B,N,hidden), the next state."""
        y, state = self.attn(self.attn_norm(x), state, call)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state


class Body(nn.Module):
    """Embedding, blocks and final norm; families add parameters that layers share."""

    def __init__(self, config: Any):
        super().__init__()
        block = config.family.block or (lambda config, layer, mixer: Block(config, layer))
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(block(config, layer, config.family.mixer) for layer in layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def start(self, batch: int) -> list[Any]:
        """Return the states of all layers before the first token."""
        return [layer.start(batch) for layer in self.layers]  # pyright: ignore[reportCallIssue] (torch types modules as Tensor | Module)

    def forward(self, x: Tensor, states: list[Any] | None, call: Call) -> tuple[Tensor, list[Any]]:
        """x (B,N,hidden), embedded -> (B,N,hidden), the next states."""
        after = []
        for i, layer in enumerate(self.layers):
            x, state = layer(x, None if states is None else states[i], call)
            after.append(state)
        return self.norm(x), after


class FlaForCausalLM(StrictLoading, PreTrainedModel, StateGenerationMixin):
    """A causal language model of flash-linear-attention on longspan's operations.

    Parameters have the original's names. ``generate``, ``Trainer``, peft and ``save_pretrained`` work as for other
    models of transformers. Padding (``attention_mask``) may be on either side. Packed rows are marked by
    ``position_ids`` that restart, ``seq_idx`` or ``cu_seqlens``; states do not cross their boundaries.

    Args:
        config: The config of a family.

    Raises:
        ValueError: An argument of a call is not supported or does not fit.
    """

    config_class = FlaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules: ClassVar[list[str]] = ["Block", "RwkvBlock", "Rwkv7Block"]  # pyright: ignore[reportIncompatibleVariableOverride]
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: FlaConfig):
        super().__init__(config)
        self.model = (config.family.body or Body)(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if tied := config.family.tied(config):
            layers = [i for i in range(config.num_hidden_layers) if config.attention_of(i) is None]
            names = {f"model.layers.{i}.{a}": f"model.layers.{i}.{b}" for i in layers for a, b in tied.items()}
            self._tied_weights_keys = type(self)._tied_weights_keys | names
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        cache: StateCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Return the logits of the tokens after ``input_ids``; see the class.

        Args:
            input_ids: (B,N) int64.
            attention_mask: (B,N), or (B,past+N) with a cache: 1 on real tokens.
            position_ids: (B,N), marks where packed sequences begin.
            past_key_values: The cache that an earlier call returned. Without gradients, the call overwrites it.
            inputs_embeds: (B,N,hidden), instead of ``input_ids``.
            labels: (B,N), a copy of ``input_ids`` with -100 at positions that are ignored. The model shifts them.
            use_cache: Return the cache; None means in evaluation without labels.
            logits_to_keep: Keep the last N tokens, or the tokens at these indices; 0 keeps all.
            return_dict: False returns a tuple.
            cache: The cache, by its name from transformers 5.24 on.
            kwargs: Arguments of the loss and of packed rows.

        Returns:
            ``CausalLMOutputWithPast`` with logits (B,N,vocab_size), the loss and the cache, or a tuple of them.

        Raises:
            ValueError: An argument is not supported or has the wrong shape.
        """
        past = past_key_values if past_key_values is not None else cache
        if past is not None and not isinstance(past, StateCache):
            raise ValueError(f"the cache must be a StateCache, not {type(past).__name__}")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        for name in ("output_attentions", "output_hidden_states"):
            if kwargs.pop(name, None):
                raise ValueError(f"{name}=True is not supported")
        if odd := [name for name, value in kwargs.items() if name not in _LOSS + _PACKED and value is not None]:
            raise ValueError(f"{type(self).__name__}.forward has no argument {odd[0]!r}")
        whole = labels is None and use_cache is not False and isinstance(logits_to_keep, int)
        if whole and past is not None and (logits := self._stepped(input_ids, attention_mask, past)) is not None:
            found = CausalLMOutputWithPast(logits=logits, **{NAME: past})  # pyright: ignore[reportArgumentType] (NAME is one field)
            return found if return_dict is not False else found.to_tuple()
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.model.embeddings(input_ids)  # pyright: ignore[reportCallIssue]
        assert inputs_embeds is not None
        batch, n = inputs_embeds.shape[:2]
        given = dict(kwargs) | {"position_ids": position_ids, "attention_mask": attention_mask, NAME: past}
        segments = packing.found(given, batch, n) if n > 1 else None
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and not self.training and labels is None and segments is None
        if past is None and use_cache:
            past = StateCache()
        # A state that autograd may need must stay as it is.
        donate = past is not None and not torch.is_grad_enabled()
        call = Call(packing.mask_of_last(attention_mask, batch, n), segments, donate)
        states = None
        if past is not None:
            states = self.model.start(batch) if past.state is None else past.state  # pyright: ignore[reportCallIssue]
        hidden, states = self.model(inputs_embeds, states, call)
        if past is not None:
            past.state, past.seen = states, past.seen + n
        loss = None
        if labels is None:
            # 0 keeps all.
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, keep])
        else:
            logits = self.lm_head(hidden)
            if segments is not None:
                # The first token of a sequence is no target: the token before it belongs to another one.
                begins = torch.nn.functional.pad(segments.diff() != 0, (1, 0))
                labels = labels.masked_fill(begins, -100)
            more = {name: kwargs[name] for name in _LOSS if name in kwargs}
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **more)
        found = CausalLMOutputWithPast(loss=loss, logits=logits, **{NAME: past if use_cache else None})  # pyright: ignore[reportArgumentType] (NAME is one field)
        return found if return_dict is not False else found.to_tuple()

    def _stepped(self, tokens: Tensor | None, mask: Tensor | None, past: StateCache) -> Tensor | None:
        """Return the logits (B,1,V) of one more token by the decode engine; None if it does not serve the call."""
        if tokens is None or tokens.dim() != 2 or tokens.shape[1] != 1 or past.state is None:
            return None
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or self.config.model_type not in SERVED:
            return None
        if mask is not None and not bool(mask[:, -1].all()):
            return None
        found = decoding.advanced(self, tokens, past.state)
        if isinstance(found, str):
            return None
        past.state, past.seen = found[1], past.seen + 1
        return found[0]

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any) -> Any:
        """Load weights, those of an older format under today's names."""
        if (migrate := model.config.family.migrate) is not None:
            # Names and shapes show whether there is anything to do, before any weight is read.
            given: dict[str, Tensor] = dict(state_dict or {})
            for file in checkpoint_files or ():
                given |= load_state_dict(file, map_location="meta")
            if migrate(given).keys() != given.keys():
                if state_dict is None:
                    state_dict = {}
                    for file in checkpoint_files:
                        state_dict |= load_state_dict(file)
                state_dict, checkpoint_files = migrate(state_dict), None
        return StrictLoading._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.model.embeddings  # pyright: ignore[reportReturnType]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.model.embeddings = value  # pyright: ignore[reportAttributeAccessIssue]
