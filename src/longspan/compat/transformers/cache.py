"""A decoder's state where transformers keeps a cache: it can be reordered and repeated, and not be cut back."""

from typing import NoReturn

import torch
from torch import Tensor
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...generation.native_decoder import Engine
from ...generation.sampling import FEW
from ...models.decoder import Decoder, DecoderState
from ...states.utils import clone, select

# What outputs and ``generate`` call it: ``cache`` from transformers 5.24 on.
NAME = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class LongspanCache(Cache):
    """The state of a ``LongspanForCausalLM`` between calls, which each call that gets it overwrites.

    ``state``: a ``DecoderState``, or None before the first token. ``seen``: how many tokens have been read, padding
    included, the start token not.
    """

    def __init__(self, state: DecoderState | None = None, seen: int = 0):
        super().__init__(layers=[])
        self.state, self.seen = state, seen
        self._engine: Engine | None = None
        self._steps = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seen={self.seen})"

    def __deepcopy__(self, memo: dict) -> "LongspanCache":
        # What goes on from the copy makes an engine of its own.
        return type(self)(None if self.state is None else clone(self.state), self.seen)

    def step(self, decoder: Decoder, token: Tensor) -> Tensor:
        """One token of every row, (B,1) int64 -> outputs (B,1,size); without gradients.

        By the decode engine where that serves the decoder and the text is long enough to be worth its preparation. It
        has the weights of its first step: after a change of the weights, begin a new cache.
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

    @property
    def is_linear(self) -> list[bool]:
        """[False]: ``generate``, given a text from its start, leaves out what the cache has read."""
        return [False]

    @property
    def is_croppable(self) -> bool:
        """False; see ``crop``."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that have been read, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that a mask would speak of, and the first of them."""
        return self.seen + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with these rows, in this order: what beam search asks for."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Go on with these rows, in this order, repeats allowed."""
        if self.state is not None:
            self.state = select(self.state, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times, side by side."""
        if self.state is not None:
            self.state = select(self.state, torch.arange(len(self.state.position)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.seen, self._engine, self._steps = None, 0, None, 0

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Raise ValueError: a state of fixed size cannot forget the tokens that it has read last."""
        raise ValueError(
            "a recurrent state cannot go back to an earlier token; keep a copy.deepcopy of the cache from then"
        )
