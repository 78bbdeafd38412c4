"""A state as a cache of transformers: it can be reordered and repeated, but not cropped."""

from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...generation.native_decoder import Engine
from ...generation.sampling import FEW
from ...models.decoder import Decoder, DecoderState
from ...states.utils import clone, select, tensors

# Its name in outputs and in ``generate``: ``cache`` from transformers 5.24 on.
NAME = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


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

    def crop(self, tokens_to_remove: int) -> NoReturn:
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


class LongspanCache(StateCache):
    """The state of a ``LongspanForCausalLM`` between calls; each call overwrites the given cache.

    Args:
        state: a ``DecoderState``, or None before the first token.
        seen: number of tokens read, including padding but not the start token.
    """

    def __init__(self, state: DecoderState | None = None, seen: int = 0):
        super().__init__(state, seen)
        # A copy builds a separate engine when it needs one.
        self._engine: Engine | None = None
        self._steps = 0

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
