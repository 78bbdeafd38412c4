"""Sampling, one decode step per token, and the log-likelihood of given sequences."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, Required, Unpack, overload

import torch
from torch import Tensor

from .._utils import model_memory
from .._utils.aliases import hinted
from .._utils.typecheck import check_type, format_value
from ..attention.validation import check_mask
from ..models.decoder import Decoder, DecoderState
from ..models.sampling import Sampling, SamplingOptions, with_sampling_options
from ..models.seq2seq import Seq2Seq
from ..ops.buffers import reuse_pages
from ..states import clone, fix_capacity, nbytes
from ..states.utils import check_like
from . import drafting, static_step
from .drafting import Draft
from .native_decoder import Engine

FEW = 8  # up to this number of tokens, preparing the decode engine takes longer than it saves
CAPTURE = 32  # up to this number of tokens, no CUDA graph is captured unless it is asked for
STOP_EVERY = 16  # tokens between two looks at the stop condition, each of which waits for a CUDA device


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of ``generate``."""

    max_new_tokens: Required[int]
    batch: int
    mask: Tensor | None
    source: Tensor | None
    source_mask: Tensor | None
    prefix: bool
    state: DecoderState | None
    seed: int | None
    stop: int | None
    cuda_graph: bool | None
    draft: Draft | None
    draft_tokens: int


@torch.no_grad()
def prefill(
    model: Decoder,
    prompt: Tensor,
    mask: Tensor | None = None,
    capacity: int = 0,
    *,
    prefix: bool = False,
    state: DecoderState | None = None,
) -> tuple[Tensor, DecoderState]:
    """Prefill: read the start token and a prompt in one call.

    Args:
        model: The decoder.
        prompt: (B,P) int64.
        mask: (B,P) bool, True on real tokens; either side may be padded.
        capacity: Slots of KV caches, as in ``init_state``.
        prefix: Let the start token and the prompt see each other, as in ``generate``.
        state: The state before the start token, which is left as it is; None: that of the model.

    Returns:
        The outputs (B,size) of each row's last real token, and the state.
    """
    begin = prompt.new_full((len(prompt), 1), model.start)
    tokens = torch.cat([begin, prompt], 1)
    if mask is not None:
        mask = torch.cat([torch.ones_like(begin, dtype=torch.bool), mask], 1)
    lengths = None
    if prefix:
        lengths = mask.sum(1) if mask is not None else begin.new_full((len(begin),), tokens.shape[1])
    before = model.init_state(len(prompt), capacity) if state is None else clone(state)
    outputs, after = model(tokens, before, mask=mask, prefix=lengths, donate=True)
    assert after is not None
    if mask is None:
        return outputs[:, -1], after
    last = mask.shape[1] - 1 - mask.long().flip(1).argmax(1)
    return outputs[torch.arange(len(last), device=last.device), last], after


@overload
def generate(
    model: Decoder | Seq2Seq,
    prompt: Tensor | None = None,
    *,
    stream: Literal[False] = False,
    **options: Unpack[GenerateOptions],
) -> Tensor: ...


@overload
def generate(
    model: Decoder | Seq2Seq, prompt: Tensor | None = None, *, stream: Literal[True], **options: Unpack[GenerateOptions]
) -> Iterator[Tensor]: ...


@hinted
@with_sampling_options
def generate(
    model: Decoder | Seq2Seq,
    prompt: Tensor | None = None,
    *,
    max_new_tokens: int,
    batch: int = 1,
    mask: Tensor | None = None,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
    prefix: bool = False,
    state: DecoderState | None = None,
    seed: int | None = None,
    stop: int | None = None,
    stream: bool = False,
    cuda_graph: bool | None = None,
    draft: Draft | None = None,
    draft_tokens: int = 8,
    **options: Unpack[SamplingOptions],
) -> Tensor | Iterator[Tensor]:
    """Generate up to ``max_new_tokens`` tokens for every sequence.

    Args:
        model: A ``Decoder``, or a ``Seq2Seq``, which writes the target of each ``source``.
        prompt: (B, P) int64. Without a prompt, ``batch`` sequences start from nothing.
        max_new_tokens: Number of tokens to generate.
        batch: Number of sequences where there is no prompt.
        mask: (B, P) bool, True on real tokens, where prompts differ in length; either side may be padded.
        source: (B, M) int64, the source of a ``Seq2Seq``.
        source_mask: (B, M) bool, where sources differ in length.
        prefix: Let the start token and the prompt see each other, for models trained with ``prefix=``.
        state: The state of a ``Decoder`` before the start token, one row for each sequence, such as
            ``adapter.states(B)`` of ``longspan.adapt``. None: that of the model.
        seed: Makes the samples reproducible, independent of the global generator.
        stop: A row that has drawn this token repeats it; generation ends when every row has drawn it.
        stream: Return an iterator that yields the next token of every sequence, (B,) int64, as it is drawn.
        cuda_graph: Capture the decode step in a CUDA graph, and replay it for each token. None: on a CUDA device, if
            the model's step can be captured and there are more than 32 tokens to generate.
        draft: Reads several tokens at a time, guessed by this: ``"prompt-lookup"`` guesses what followed the last
            tokens earlier in the text, a smaller ``Decoder`` of the same tokens its most likely ones, and a function
            gets the tokens so far (B,T) and a count and returns at most as many (B,K). The text is the same, to the
            bit. All rows go on together, so a guess helps only if it is right for every row.
        draft_tokens: Tokens to guess at most; fewer where guesses fail.
        **options: As in ``longspan.serving.Sampling``.

    Returns:
        The new tokens, (B, T) int64 with T at most ``max_new_tokens``; with ``stream=True`` an iterator of (B,) int64.

    Raises:
        ValueError: At the call, for a prompt, source or sampling option out of range, for ``prefix=True`` without a
            prompt or with an attention without a prefix mode, for ``cuda_graph=True`` with a model whose step
            cannot be captured, for ``draft`` with a model that the decode engine does not support, and for a ``state``
            of another model or number of rows, or one that has read tokens.

    Example:
        >>> import torch, longspan
        >>> model = longspan.Decoder(longspan.DecoderConfig(dim=8, depth=2, heads=2, feedforward=16, vocab=5)).eval()
        >>> prompt = torch.tensor([[3, 1, 4]])
        >>> longspan.generate(model, prompt, max_new_tokens=7, seed=0).shape
        torch.Size([1, 7])

    The prompt is read in one call, and each token takes one decode step. If the native decoder supports the model, it
    runs these steps with a copy of the weights, made at the call.

    On a CUDA device, KV caches get a fixed capacity of all tokens, and the stop condition is read every 16 tokens, or
    after each one with ``stream=True``. The tokens are the same, but without a seed, the global generator advances to
    the end of the last 16.
    """
    check_source(model, prompt, mask, source, source_mask)
    device = model.device
    reuse_pages()
    for name, value in (("max_new_tokens", max_new_tokens), ("batch", batch)):
        check_type(name, value, int)
    check_type("stop", stop, int | None)
    check_type("seed", seed, int | None)
    check_type("cuda_graph", cuda_graph, bool | None)
    check_type("draft_tokens", draft_tokens, int)
    sampling = Sampling(**options)
    if draft is not None and (reason := drafting.why_not(model, draft)):
        raise ValueError(f"draft= cannot be used: {reason}")
    if draft is not None and draft_tokens < 1:
        raise ValueError(f"draft_tokens={draft_tokens} must be at least 1")
    if cuda_graph and (reason := static_step.why_not(model)):
        raise ValueError(f"cuda_graph=True cannot capture the decode step: {reason}; pass cuda_graph=None or False")
    if source is not None:
        if prefix or batch != 1:
            raise ValueError("prefix= and batch= are for a Decoder; a Seq2Seq writes one target per source")
        prompt = source.new_zeros(len(source), 0) if prompt is None else prompt
    elif prompt is None:
        if batch < 1:
            raise ValueError(f"batch={batch} must be at least 1")
        if prefix:
            raise ValueError("prefix=True needs a prompt")
        prompt = torch.zeros(batch, 0, dtype=torch.long, device=device)
    elif mask is not None:
        check_mask("mask", mask, tuple(prompt.shape))
    tokens = max_new_tokens
    if tokens < 0:
        raise ValueError(f"max_new_tokens={tokens} must not be negative")
    if model.config.positions == "learned" and prompt.shape[1] + tokens > model.config.length:
        raise ValueError(
            f"{prompt.shape[1]} tokens of prompt and {tokens} new tokens need {prompt.shape[1] + tokens} positions, "
            f"but the table of learned positions has {model.config.length}"
        )
    if state is not None:
        _check_first_state(model, state, len(prompt))
    if stop is not None and not 0 <= stop < model.start:
        raise ValueError(f"stop={stop} is not a token; this model has 0 to {model.start - 1}")
    if source is None and isinstance(model, Decoder):
        afford_rows(model, len(prompt), prompt.shape[1] + tokens, f"the states of {len(prompt)} sequences")
    outputs, state, step = begun(model, prompt, mask, source, source_mask, tokens, prefix=prefix, first=state)
    # Packing the weights takes as long as a few decode steps.
    if isinstance(model, Decoder) and (draft is not None or (tokens > FEW and not Engine.why_not(model))):
        step = Engine(model)
        if draft is not None:
            step = drafting.Speculation(step, draft, prompt, draft_tokens, tokens)
    if cuda_graph is None:
        cuda_graph = device.type == "cuda" and tokens > CAPTURE and not static_step.why_not(model)
    waits = cuda_graph or device.type == "cuda"
    if waits and tokens > 1:
        state = fix_capacity(state, prompt.shape[1] + tokens)
    if cuda_graph:
        step = static_step.StaticStep(step, static_step.capture_cuda_graph)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    every = STOP_EVERY if waits and not stream else 1
    drawn = _tokens(model, step, outputs, state, tokens, sampling, generator, stop, every)
    if stream:
        return drawn
    columns = list(drawn)
    found = torch.stack(columns, 1) if columns else prompt.new_zeros(len(prompt), 0)
    return found if every == 1 or stop is None else _until_stopped(found, stop)


def check_source(
    model: Any, prompt: Tensor | None, mask: Tensor | None, source: Tensor | None, source_mask: Tensor | None
) -> None:
    """Raise ValueError for a model that does not generate, and for inputs that do not fit it."""
    for name, ids in (("prompt", prompt), ("source", source)):
        if ids is not None:
            check_ids(name, ids)
    if isinstance(model, Seq2Seq):
        if source is None:
            raise ValueError("a Seq2Seq needs a source; pass source=(B,M) int64")
        if mask is not None:
            raise ValueError("mask= is for the prompts of a Decoder; for a source pass source_mask=")
        if source_mask is not None:
            check_mask("source_mask", source_mask, tuple(source.shape))
        if prompt is not None and len(prompt) != len(source):
            raise ValueError(f"prompt has {len(prompt)} rows, but source has {len(source)}; pass one prompt per source")
    elif not isinstance(model, Decoder):
        raise ValueError(f"model must be a Decoder or a Seq2Seq, not {type(model).__name__}")
    elif source is not None or source_mask is not None:
        raise ValueError("a Decoder has no source; pass a prompt instead of source= and source_mask=")


def _check_first_state(model: Decoder | Seq2Seq, state: Any, rows: int) -> None:
    """Raise ValueError unless this is a state of a decoder before the start token, with this number of rows."""
    if not isinstance(model, Decoder):
        raise ValueError("state= is for a Decoder")
    try:
        check_like(state, model.init_state(1))
    except ValueError as error:
        raise ValueError(f"state does not fit this model: {error}") from error
    if len(state.position) != rows or state.position.any():
        raise ValueError(
            f"state must have {rows} rows before the start token, not {len(state.position)} rows after "
            f"{state.position.tolist()} tokens"
        )


def afford_rows(model: Decoder, rows: int, capacity: int, what: str) -> None:
    """Raise ValueError if the states of ``rows`` sequences do not fit into the memory of this machine."""
    if rows > FEW and model.device.type == "cpu":
        model_memory.check_fits_in_memory(rows * nbytes(model.init_state(1, capacity)), what)


def check_ids(name: str, ids: Any) -> None:
    """Raise ValueError unless ``ids`` are tokens, int64 (B,N); for a string, with a hint how to convert it."""
    if isinstance(ids, str):
        raise ValueError(
            f"{name} must be int64 (B, N), not the text {format_value(ids)}; for a model of bytes pass "
            f"torch.tensor([list(text.encode())])"
        )
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 2:
        came = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{name} must be int64 (B, N), not {came}")


@torch.no_grad()
def begun(
    model: Decoder | Seq2Seq,
    prompt: Tensor,
    mask: Tensor | None,
    source: Tensor | None,
    source_mask: Tensor | None,
    tokens: int,
    *,
    prefix: bool = False,
    first: DecoderState | None = None,
) -> tuple[Tensor, DecoderState, Callable]:
    """Return outputs (B,size) for the first new token, the state before it, and the function of a decode step."""
    if isinstance(model, Decoder):
        outputs, state = prefill(model, prompt, mask, prompt.shape[1] + tokens, prefix=prefix, state=first)
        return outputs, state, lambda token, state: model(token, state, donate=True)
    assert source is not None
    state = model.init_state(source, source_mask=source_mask, capacity=prompt.shape[1] + tokens)
    begin = prompt.new_full((len(prompt), 1), model.start)
    outputs, state = model.step(torch.cat([begin, prompt], 1), state, donate=True)
    return outputs[:, -1], state, lambda token, state: model.step(token, state, donate=True)


def _tokens(model, step, outputs, state, tokens, sampling, generator, stop, every) -> Iterator[Tensor]:
    """Draw up to ``tokens`` tokens; all rows may have drawn ``stop`` up to ``every`` - 1 tokens before the last one."""
    done = torch.zeros(len(outputs), dtype=torch.bool, device=outputs.device)
    for i in range(tokens):
        token = model.likelihood.draw(outputs, sampling, generator)
        if stop is not None:
            token = token.masked_fill(done, stop)
            done = done | (token == stop)
        yield token
        if i + 1 == tokens or (stop is not None and (i + 1) % every == 0 and bool(done.all())):
            return
        # Entered for each token: a generator must not keep a context open while its caller runs.
        with torch.no_grad():
            outputs, state = step(token[:, None], state)
            outputs = outputs[:, 0]


def _until_stopped(found: Tensor, stop: int) -> Tensor:
    """Cut tokens (B,T) after the one with which the last row stops."""
    ended = (found == stop).all(0)
    # A row that has stopped repeats the token, so all later columns are equal.
    return found[:, : int((~ended).sum()) + 1].contiguous()


@hinted
@torch.no_grad()
def log_likelihood(model: Decoder, tokens: Tensor, *, mask: Tensor | None = None, chunk: int = 0) -> Tensor:
    """Return the log-likelihood of each sequence in nats.

    Args:
        model: The decoder.
        tokens: (B,N) int64.
        mask: (B,N) bool, True on real tokens.
        chunk: Tokens per call, with the state carried from call to call; 1 reads token by token, 0 reads the whole
            sequence in one call. The results agree up to rounding.

    Returns:
        (B,) float64, summed in float64.

    Raises:
        ValueError: For tokens or a mask of another shape or dtype, and a negative chunk.

    Example:
        >>> import torch, longspan
        >>> model = longspan.Decoder(longspan.DecoderConfig(dim=8, depth=2, heads=2, feedforward=16, vocab=5)).eval()
        >>> tokens = torch.tensor([[3, 1, 4, 1]])
        >>> whole, by_token = longspan.log_likelihood(model, tokens), longspan.log_likelihood(model, tokens, chunk=1)
        >>> torch.allclose(whole, by_token, atol=1e-4)
        True
    """
    check_ids("tokens", tokens)
    check_type("chunk", chunk, int)
    if chunk < 0:
        raise ValueError(f"chunk={chunk} must be 0 (the whole sequence) or a number of tokens")
    if mask is not None:
        check_mask("mask", mask, tuple(tokens.shape))
        # Each token is predicted from the real token before it, which may not be its neighbor.
        tokens, mask = _left_aligned(tokens, mask)
    inputs = model.shift(tokens)
    state = model.init_state(len(tokens), tokens.shape[1]) if chunk else None
    total = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
    for start in range(0, tokens.shape[1], chunk or max(tokens.shape[1], 1)):
        part = slice(start, start + (chunk or tokens.shape[1]))
        real = None if mask is None else mask[:, part]
        outputs, state = model(inputs[:, part], state, mask=real, donate=bool(chunk))
        nats = model.likelihood.log_prob(outputs, tokens[:, part]).double()
        total += (nats if real is None else nats.masked_fill(~real, 0.0)).sum(1)
    return total


def _left_aligned(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.argsort(~mask, dim=1, stable=True)
    return tokens.gather(1, order), mask.gather(1, order)
