"""The tokenizer of models of bytes, as tools of Hugging Face want one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

START = "<start>"


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Token b is byte b of the text in UTF-8, as in models that ``longspan train`` makes of texts; 256 is the start.

    >>> byte_tokenizer()("ü, 1").input_ids
    [195, 188, 44, 32, 49]

    The start token is named ``<start>`` and also stands for the end and for padding, which such a model never writes.
    It is not put before a text: the model does so by itself.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(vocab={**_letters(), START: 256}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=START, eos_token=START, pad_token=START, clean_up_tokenization_spaces=False
    )


def _letters() -> dict[str, int]:
    """What the library writes for each byte: itself where that can be printed, else letters from number 256 on.

    Source: Radford et al. 2019, GPT-2, byte-level BPE.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte if byte in printed else 256 + others.index(byte)): byte for byte in range(256)}
