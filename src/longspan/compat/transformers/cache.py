"""A state as a cache of transformers: it can be reordered and repeated, and with the decode engine cropped."""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from ... import states
from ...generation.native_decoder import Engine
from ...generation.sampling import FEW
from ...models.decoder import Decoder, DecoderState
from ...states.utils import clone, select, tensors

# Its name in outputs and in ``generate``: ``cache`` from transformers 5.24 on.
NAME = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
AHEAD = 64  # a longer call that continues a cache is read by the decoder, except for what ``logits_to_keep`` covers


class StateCache(Cache):
    """The state of a recurrent model between calls; each call overwrites the given cache.

    Args:
        state: the state, a nest of tensors with the batch first, or None before the first token.
        seen: number of tokens read, including padding.
    """

    def __init__(self, state: Any = None, seen: int = 0):
        super().__init__(layers=[])
        self.state, self.seen = state, seen

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seen={self.seen})"

    def __deepcopy__(self, memo: dict) -> Self:
        return type(self)(None if self.state is None else clone(self.state), self.seen)

    @property
    def is_linear(self) -> list[bool]:
        """[False], so that ``generate`` skips the tokens that the cache has read."""
        return [False]

    @property
    def is_croppable(self) -> bool:
        """False; see ``crop``."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read, including padding."""
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys of a mask, and the offset of the first."""
        return self.seen + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows ``beam_idx`` (R,), in this order. Beam search calls it."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` (R,), in this order; repeats are allowed."""
        if self.state is not None:
            self.state = select(self.state, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, with the copies next to each other."""
        if self.state is not None:
            rows = len(tensors(self.state)[0])
            self.state = select(self.state, torch.arange(rows).repeat_interleave(repeats))

    def reset(self) -> None:
        """Remove the state."""
        self.state, self.seen = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError: a state of fixed size cannot drop its last tokens."""
        raise ValueError(
            f"cannot crop {tokens_to_remove} tokens: a recurrent state cannot return to an earlier token; keep a "
            "copy.deepcopy of the cache at that token"
        )


class StateGenerationMixin(GenerationMixin):
    """``generate`` of a model whose cache is a ``StateCache``."""

    cache_type: ClassVar[type[StateCache]] = StateCache

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any):
        if (kind := generation_config.cache_implementation) is not None:
            raise ValueError(
                f"cache_implementation={kind!r} is not supported; the model uses {self.cache_type.__name__}"
            )
        if model_kwargs.get(NAME) is None and generation_config.use_cache is not False:
            model_kwargs[NAME] = self.cache_type()
            if NAME == "cache" and generation_config.is_assistant:
                model_kwargs[NAME].activate_past_recording()


class LongspanCache(StateCache):
    """The state of a ``LongspanForCausalLM`` between calls; each call overwrites the given cache.

    After ``activate_past_recording()``, which assisted generation calls, the decode engine reads the tokens, and
    ``crop`` undoes the last ones.

    Args:
        state: a ``DecoderState``, or None before the first token.
        seen: number of tokens read, including padding but not the start token.
    """

    def __init__(self, state: DecoderState | None = None, seen: int = 0):
        super().__init__(state, seen)
        # A copy builds a separate engine when it needs one.
        self._engine: Engine | None = None
        self._steps = 0
        self.record_past = False
        # Since the last crop: the tokens that can be undone, None without a call, and the state before the first call
        # of several.
        self._read: Tensor | None = None
        self._before: DecoderState | None = None

    def __deepcopy__(self, memo: dict) -> Self:
        self._settle(0)
        return super().__deepcopy__(memo)

    @property
    def is_croppable(self) -> bool:
        """Whether the cache has recorded a call."""
        return self._read is not None

    def activate_past_recording(self) -> None:
        """Make the next calls such that ``crop`` can undo their tokens."""
        self.record_past = True

    def ahead(self, tokens: Tensor, kept: int | Tensor) -> int:
        """Return how many of the last tokens (B,N) of a call ``read_ahead`` must read.

        Args:
            tokens: all tokens of the call.
            kept: its ``logits_to_keep``: in assisted generation, the number of drafted tokens and 1.
        """
        records, n = self.record_past and not torch.is_grad_enabled(), tokens.shape[1]
        if records and self.state is not None and n <= AHEAD:
            return n
        self._settle(0)
        if not records:
            return 0
        self._read = tokens[:, :0]
        # The last token of a prompt too: a model that drafts may read it again.
        return min(n - 1, max(kept, 1)) if isinstance(kept, int) else 0

    def read_ahead(self, decoder: Decoder, tokens: Tensor) -> Tensor:
        """Read tokens that ``crop`` may undo, without gradients.

        Args:
            decoder: the decoder whose state this is.
            tokens: (B,K) int64.

        Returns:
            Outputs (B,K,size).

        Raises:
            ValueError: the decode engine does not support the decoder.
        """
        if self._engine is None:
            if reason := Engine.why_not(decoder):
                raise ValueError(
                    f"only the decode engine can read drafts, and it does not support this model: {reason}"
                )
            self._engine = Engine(decoder)
        if self._read is None:
            self._read = tokens[:, :0]
        elif self._before is None:
            self._before = clone(states.settle(_undone(self.state, states.rewindable(self.state))))
        self._read, self.seen = torch.cat([self._read, tokens], 1), self.seen + tokens.shape[1]
        outputs, self.state = self._engine.verify(tokens, self.state)
        return outputs

    def crop(self, tokens_to_remove: int) -> None:
        """Undo tokens of the calls since the last crop.

        Args:
            tokens_to_remove: minus the number of tokens; 0 ends the record of these calls.

        Raises:
            ValueError: the number is positive, or the cache has not recorded as many.
        """
        known = 0 if self._read is None else self._read.shape[1]
        if not 0 <= -tokens_to_remove <= known and -tokens_to_remove != self.seen:
            raise ValueError(
                f"crop({tokens_to_remove}) cannot undo tokens; it takes 0 to -{known}, minus the number of tokens read "
                "after activate_past_recording() since the last crop; else keep a copy.deepcopy of the cache"
            )
        self._settle(-tokens_to_remove)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` (R,), in this order; repeats are allowed."""
        self._settle(0)
        super().batch_select_indices(indices)

    def _settle(self, undone: int) -> None:
        """Undo tokens, and end the record."""
        if undone and undone == self.seen:
            self.reset()
            return
        if self._before is not None and undone > states.rewindable(self.state):
            assert self._engine is not None
            assert self._read is not None
            self.state = self._engine.verify(self._read[:, : self._read.shape[1] - undone], self._before)[1]
        else:
            self.state = _undone(self.state, undone)
        self.state, self.seen = states.settle(self.state), self.seen - undone
        self._read, self._before = None, None

    def step(self, decoder: Decoder, token: Tensor) -> Tensor:
        """Run one decode step without gradients.

        It uses the decode engine if that supports the decoder and the text is long enough for its setup to pay off. The
        engine keeps the weights of its first step, so start a new cache after you change the weights.

        Args:
            decoder: the decoder whose state this is.
            token: one token per row, (B,1) int64.

        Returns:
            Outputs (B,1,size).
        """
        assert self.state is not None
        self._steps += 1
        if self._steps == FEW and not Engine.why_not(decoder):
            self._engine = Engine(decoder)
        if self._engine is None:
            outputs, self.state = decoder(token, self.state, donate=True)
        else:
            outputs, self.state = self._engine(token, self.state)
        return outputs

    def reset(self) -> None:
        """Remove the state."""
        super().reset()
        self._engine, self._steps = None, 0
        self._read, self._before = None, None


def _undone(state: Any, tokens: int) -> Any:
    return states.rewind(state, tokens=tokens) if tokens else state
