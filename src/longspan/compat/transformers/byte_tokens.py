"""The tokenizer of models of bytes, for Hugging Face tools."""

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
