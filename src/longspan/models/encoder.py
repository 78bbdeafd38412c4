"""The encoder: reads whole sequences of tokens or vectors, with pooling and a head."""

from collections.abc import Sequence
from typing import NamedTuple, Never

import torch
from torch import Tensor, nn

from .._utils.aliases import refuse
from ..attention.validation import check_x
from ..data import tokenization
from ..modules.norms import norm
from ..modules.positions import Learned
from ..ops.tensors import upcast_half
from .config import EncoderConfig
from .embedding import Embedding, Model, _check_own, check_tokens, initialize, outputs_of
from .stacks import Stack, check_fits_in_memory


class Classes(NamedTuple):
    """The predictions of a classifier."""

    labels: list[str]  # the most likely label of each text
    probabilities: Tensor  # (B, labels), float32 at least


class Encoder(Model):
    """Maps tokens (B,N) or vectors (B,N,dim) to features (B,N,dim), or to the outputs of a linear head.

    With ``pool="mean"`` or ``"first"`` there is one result per sequence, (B,dim) or (B,outputs): the mean over the real
    tokens, or the first real token. With ``labels``, the names of the outputs, it is a classifier: the outputs are
    logits, and ``classify`` reads texts. With pooling, ``embed`` returns the embeddings of texts.

    ``tokenizer`` is the content of its tokenizer's file, or "" for a model of bytes. Checkpoints keep it.

    Args:
        config: Sizes, attention, positions, pooling and head.

    Raises:
        ValueError: For a spec that cannot be built, and weights that do not fit into memory.

    Example:
        >>> import torch, longspan
        >>> config = longspan.EncoderConfig(dim=8, depth=2, heads=2, feedforward=16, outputs=3, pool="mean")
        >>> longspan.Encoder(config)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 3])
    """

    config: EncoderConfig
    tokenizer = ""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        check_fits_in_memory(config, Encoder)
        self.config = config
        self.embedding = Embedding(config.vocab, config)
        self.embedding_norm = norm(config.norm, config.dim) if config.embedding_norm else nn.Identity()
        self.stack = Stack(config, causal=False, positions=config.positions)
        if config.embedding_norm and config.prenorm:
            self.stack.blocks[0].norm1 = nn.Identity()
        self.head = nn.Linear(config.dim, config.outputs) if config.outputs else nn.Identity()
        initialize(self, config.depth)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Encode sequences.

        Args:
            x: (B,N) int64 tokens, or (B,N,dim) vectors if ``vocab`` is 0.
            mask: (B,N) bool, True on real tokens.
            segments: (B,N) int64, the sequence of each token in a packed row; not together with pooling.
            record: Filled as by ``Stack``.

        Returns:
            (B,N,dim) or (B,N,outputs); with pooling (B,dim) or (B,outputs).

        Raises:
            ValueError: For input of another shape or dtype, tokens out of range, and pooled packed rows.
        """
        if unknown:
            refuse("Encoder", unknown, ("x", "mask", "segments", "record"))
        if self.config.vocab:
            check_tokens(x, self.config.vocab - 1, mask, segments)
        else:
            check_x(self, self.config.dim, x)
            _check_own(x, mask, segments)
        if segments is not None and self.config.pool != "none":
            raise ValueError(f"pool={self.config.pool!r} returns one output per row, so it does not support segments=")
        return self.pooled(self.features(x, mask=mask, segments=segments, record=record), mask)

    def features(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict | None = None,
    ) -> Tensor:
        """Return the outputs of the stack (B,N,dim), before pooling and head; the arguments are those of a call."""
        x, _ = self.embedding(x, mask=mask, segments=segments)
        return self.stack(self.embedding_norm(x), mask=mask, segments=segments, record=record)[0]

    def pooled(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool features (B,N,dim) as the config says, and apply the head."""
        if self.config.pool != "none":
            real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
            if self.config.pool == "first":
                real = real & (real.cumsum(1) == 1)
            weights = real.to(x.dtype)
            x = (x * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1)
        return outputs_of(self.head, x)

    @torch.no_grad()
    def embed(self, texts: Sequence[str], *, length: int = 0, batch: int = 64, normalize: bool = True) -> Tensor:
        """Return the embeddings of texts: the pooled outputs.

        A model with a tokenizer reads its tokens, with the special ones that the tokenizer adds. A model of bytes,
        ``vocab=256``, reads UTF-8.

        Args:
            texts: Strings that are not empty.
            length: Tokens of each text to read, special ones included; 0: all, or the size of the table of learned
                positions.
            batch: Texts per call; changes speed and memory only.
            normalize: Scale each embedding to length 1.

        Returns:
            (B,dim), or (B,outputs) with a head; float32 at least.

        Raises:
            ValueError: For a model without pooling, or without a tokenizer and ``vocab=256``; for texts that are empty
                or not strings; for a negative length and a batch below 1.
            ImportError: For a model with a tokenizer, without the package ``tokenizers``.

        Example:
            >>> import longspan
            >>> config = longspan.EncoderConfig(dim=8, depth=1, heads=2, feedforward=16, vocab=256, pool="mean")
            >>> embeddings = longspan.Encoder(config).eval().embed(["a fine film", "dull"])
            >>> embeddings.shape
            torch.Size([2, 8])
        """
        if self.config.pool == "none" or not (self.tokenizer or self.config.vocab == 256):
            raise ValueError(
                "embed needs one output per text, and a tokenizer or bytes: pool='mean' or 'first', and a tokenizer or "
                f"vocab=256, not pool={self.config.pool!r} with vocab={self.config.vocab} and no tokenizer"
                if not self.tokenizer
                else f"embed needs one output per text: pool='mean' or 'first', not pool={self.config.pool!r}"
            )
        found = self._read(texts, length, batch)
        found = found if len(texts) else found.reshape(0, self.config.outputs or self.config.dim)
        return nn.functional.normalize(found, dim=-1) if normalize else found

    def _read(self, texts: Sequence[str], length: int, batch: int) -> Tensor:
        """The outputs (B,.) for texts, float32 at least. Raises ValueError."""
        if isinstance(texts, str) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("texts must be a list of strings that are not empty")
        if length < 0 or batch < 1:
            raise ValueError(f"length={length} must not be negative, and batch={batch} must be at least 1")
        if isinstance(self.embedding.positions, Learned):
            length = min(length or self.config.length, self.config.length)
        if self.tokenizer:
            rows = tokenization.framed(self.tokenizer, list(texts), length)
        else:
            rows = [list(text.encode()[: length or None]) for text in texts]
        found = []
        for begin in range(0, len(texts), batch):
            part = [torch.tensor(row) for row in rows[begin : begin + batch]]
            tokens = nn.utils.rnn.pad_sequence(part, batch_first=True)
            mask = torch.arange(tokens.shape[1]) < torch.tensor([len(row) for row in part])[:, None]
            found.append(upcast_half(self(tokens.to(self.device), mask=mask.to(self.device))))
        return torch.cat(found) if found else torch.zeros(0, device=self.device)

    @torch.no_grad()
    def classify(self, texts: Sequence[str], *, length: int = 0, batch: int = 64) -> Classes:
        """Classify texts with a classifier of UTF-8 bytes, such as ``longspan train`` trains on ``labels:FILE``.

        Args:
            texts: Strings that are not empty.
            length: Bytes of each text to read; 0: all, or the size of the table of learned positions. Pass the
                ``run.length`` of the training to read as much of a text as it did.
            batch: Texts per call; changes speed and memory only.

        Returns:
            The most likely label of each text, and the probabilities (B, labels) in the order of ``config.labels``.

        Raises:
            ValueError: For a model without labels or pooling, or whose tokens are not bytes; for texts that are empty
                or not strings; for a negative length and a batch below 1.

        Example:
            >>> import longspan
            >>> sizes = {"dim": 8, "depth": 1, "heads": 2, "feedforward": 16}
            >>> config = longspan.EncoderConfig(**sizes, vocab=256, outputs=2, labels="bad good", pool="mean")
            >>> labels, probabilities = longspan.Encoder(config).eval().classify(["a fine film", "dull"])
            >>> len(labels), probabilities.shape
            (2, torch.Size([2, 2]))
        """
        config = self.config
        names = config.labels.split()
        if not names or config.pool == "none" or config.vocab != 256:
            raise ValueError(
                "classify needs a model of bytes with labels and one output per text: vocab=256, labels and "
                f"pool='mean' or 'first', not vocab={config.vocab}, labels={config.labels!r}, pool={config.pool!r}"
            )
        found = self._read(texts, length, batch)
        probabilities = (found if len(texts) else found.reshape(0, len(names))).softmax(-1)
        return Classes([names[i] for i in probabilities.argmax(-1).tolist()], probabilities)
