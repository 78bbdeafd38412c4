"""The tokenizers of models of bytes and of tokens on disk, for Hugging Face tools."""

from typing import TYPE_CHECKING

from ...data import tokenization

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

START = "<start>"


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a tokenizer of bytes, for models that ``longspan train`` makes from texts.

    Token b is byte b of the text in UTF-8. Token 256 is the start token, named ``<start>``. It is also the end and
    padding token, which such a model never writes. The tokenizer does not insert it, because the model does.

    Returns:
        A ``PreTrainedTokenizerFast`` of transformers.

    Example:
        >>> byte_tokenizer()("ü, 1").input_ids
        [195, 188, 44, 32, 49]
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(vocab={**tokenization.byte_letters(), START: 256}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue] (missing in the stubs)
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] (missing in the stubs)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=START, eos_token=START, pad_token=START, clean_up_tokenization_spaces=False
    )


def tokenizer_of(content: str, vocab: int) -> "PreTrainedTokenizerFast":
    """Return the tokenizer of a decoder of tokens, with the decoder's start token as number ``vocab``.

    The start token is also the padding token. Documents end with ``<|endoftext|>`` if the tokenizer has it.

    Args:
        content: the decoder's ``tokenizer``.
        vocab: number of levels of the decoder's tokens.

    Raises:
        ValueError: the tokenizer has a token ``<start>`` already, or its numbers have gaps.
    """
    from transformers import PreTrainedTokenizerFast

    made = tokenization.parsed(tokenization.special_start(content, vocab, START))
    end = START if made.token_to_id(tokenization.END) is None else tokenization.END
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=START, eos_token=end, pad_token=START, clean_up_tokenization_spaces=False
    )
