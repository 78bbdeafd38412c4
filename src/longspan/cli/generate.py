"""``longspan generate``: images, text or target sequences from a trained model."""

import codecs
import itertools
import math
import re
import sys
import time
from pathlib import Path

from .._utils import signals
from .parser import (
    BEAMS,
    MODEL,
    SEEDS,
    Parser,
    add_adapter_option,
    add_sampling_options,
    make,
    model_help,
    natural_int,
    number,
    positive_int,
    sampling_options,
)

HELP = (
    model_help("mnist, poems, text")
    + "; of a run, its best checkpoint is used. Or a GGUF file, or the folder of a recurrent "
    "model of transformers or flash-linear-attention with its tokenizer"
)
MEMORY = "--count, --beams or --tokens"


def parser() -> Parser:
    parser = make(
        "generate",
        "Generate images, text or target sequences from a trained model, one decode step per token. Images are written "
        "to a PNG file. Text is streamed to standard output. An encoder-decoder prints one target per source, by "
        "greedy decoding unless --temperature is given.\n\nThe pretrained models mnist, poems and text need no data. "
        "Completing images needs the data set: it is downloaded, or read from --data mnist:FOLDER.",
        "longspan generate mnist",
        "longspan generate mnist --complete test --top 0.5 --count 16",
        'longspan generate text --prompt "The prince " --temperature 0.7',
        'longspan generate poems --prompt "七絕《春夜》" --temperature 0.7',
        "longspan generate runs/digits --out samples.png --count 64",
        'longspan generate runs/text --prompt "def " --tokens 500 --temperature 0.8',
        'longspan generate ./Qwen3.5-0.8B --prompt "The prince " --draft prompt-lookup --weights int8',
        'longspan generate runs/web --prompt "The state" --stop "<|endoftext|>"',
        'longspan generate runs/dates --source "3rd of March, 2021" --beams 4 --n-best 2',
        "longspan generate runs/dates --sources FILE",
    )
    parser.add_argument("folder", type=str, metavar=MODEL, help=HELP)
    parser.add_flag("--ema", "take the moving average of the weights, which training with run.ema keeps")
    parser.add_text("--data", "DATA", "data set, e.g. mnist:FOLDER; by default the one that the model was trained on")
    parser.add_text("--out", "FILE", "images: the PNG file to write; samples.png by default")
    parser.add_argument("--count", type=positive_int(100_000), default=64, help="images: number of images")
    parser.add_argument("--seed", type=natural_int(SEEDS), default=0, help="seed of the samples")
    add_sampling_options(parser)
    parser.add_text(
        "--complete",
        "SPLIT",
        "images: complete examples of this split (train, validation or test); the PNG file shows the given part, "
        "the completion and the original of each",
    )
    parser.add_argument(
        "--top", type=number(1.0), default=0.5, help="with --complete: share of each image that is given, from the top"
    )
    parser.add_text("--prompt", "TEXT", "text: the beginning")
    parser.add_argument(
        "--tokens",
        type=natural_int(),
        default=0,
        help="text: bytes, or tokens of the model's tokenizer, to generate; 0: 256, or as many as the model has "
        "positions for. Pairs: largest number of tokens in a target; 0: as in training",
    )
    parser.add_text(
        "--stop",
        "TOKEN",
        "text of a model with a tokenizer: end at this token, e.g. <|endoftext|>, at which poems end by default",
    )
    parser.add_text(
        "--draft",
        "DRAFT",
        "text: guess several tokens and read them in one call, which changes no token: prompt-lookup guesses what "
        "followed the last tokens earlier in the text, and a model of the same tokens its most likely ones",
    )
    parser.add_argument(
        "--draft_tokens", type=positive_int(64), default=8, help="with --draft: largest number of tokens to guess"
    )
    parser.add_argument("--weights", choices=("int8", "int4"), help="round the weights of the model to 8 or 4 bits")
    add_adapter_option(parser)
    parser.add_argument("--source", type=str, default=None, metavar="TEXT", help="pairs: the source of one target")
    parser.add_text("--sources", "FILE", "pairs: a file with one source per line")
    parser.add_argument(
        "--beams",
        type=natural_int(BEAMS),
        default=0,
        help="text, pairs: beam size; 0: sample instead",
    )
    parser.add_argument(
        "--n_best",
        type=positive_int(BEAMS),
        default=1,
        help="with --beams: print the N best sequences, each after its score and a tab; the score is the "
        "log-probability in nats over the length penalty",
    )
    parser.add_argument(
        "--length_penalty",
        type=number(1000.0),
        default=0.0,
        help="with --beams: exponent of the length penalty (arXiv:1609.08144, eq. 14); 0: compare by probability, "
        "larger values favor longer sequences",
    )
    return parser


def run(args) -> int:
    from ..serving import hub
    from . import targets, trained

    if hub.is_foreign(args.folder):
        _foreign(args, sampling_options(args, 1.0, args.seed))
        return 0
    found = trained.model(args.folder, args.data, ema=args.ema)
    model, name = found.model, found.data
    adapter = None
    if args.adapter:
        from ..finetune import adapted

        if trained.kind(name) == trained.PAIRS or trained.shape(model, name).grid:
            raise ValueError(f"--adapter requires text; {args.folder} has {name}")
        adapter = adapted(model, args.adapter)
        if adapter is not None and args.beams:
            raise ValueError("--beams cannot start from the states of --adapter; leave one of them out")
    if args.weights:
        from ..models.quantization import quantize

        quantize(model, args.weights)
    if args.draft and (args.beams or trained.kind(name) == trained.PAIRS or trained.shape(model, name).grid):
        raise ValueError("--draft is for samples of text, without --beams")
    if trained.kind(name) == trained.PAIRS:
        targets.write(model, name, found.length, args)
        return 0
    targets.refuse(
        args, targets.SOURCES, f"requires an encoder-decoder; {args.folder} holds a decoder, which reads no source"
    )
    options = sampling_options(args, 1.0, args.seed)
    shape = trained.shape(model, name)
    if not shape.grid:
        targets.check_beams(args)
        _text(model, args, options, adapter)
        return 0
    targets.refuse(args, targets.SEARCH, f"requires text or pairs; {name} has images, which are sampled")
    if args.prompt or args.tokens or args.stop:
        raise ValueError(f"--prompt, --tokens and --stop require text; {name} has images, see --complete")
    _images(model, args, options, trained.dataset(found, 0) if args.complete else shape)
    return 0


def _images(model, args, options, data) -> None:
    import torch

    from .._utils import png
    from ..generation.sampling import generate

    path = Path(args.out or "samples.png")
    png.check(path)
    begin = time.perf_counter()
    if not args.complete:
        tokens = _drawn(
            generate(model, batch=args.count, max_new_tokens=data.length, **options, stream=True),
            data.length,
            path,
            data,
        )
        speed = args.count / (time.perf_counter() - begin)
        png.save(path, data.picture(tokens))
        print(f"{path}: {args.count} samples, {speed:.3g} images/s")
        return
    originals, known = _examples(args, data)
    prompt, hidden = originals[:, :known], torch.full_like(originals[:, known:], data.vocab // 2)
    begin = time.perf_counter()
    drawn = generate(model, prompt, max_new_tokens=hidden.shape[1], **options, stream=True)
    tokens = torch.cat([prompt, _drawn(drawn, hidden.shape[1], path, data, prompt)], 1)
    speed = args.count / (time.perf_counter() - begin)
    # The hidden part is shown in a middle grey.
    shown = (torch.cat([prompt, hidden], 1), tokens, originals)
    columns = 3 * math.ceil((args.count / 3) ** 0.5)
    png.save(path, data.picture(torch.stack(shown, 1).flatten(0, 1)), columns=columns)
    print(f"{path}: {args.count} images (given part, completion, original); {speed:.3g} images/s")


def _drawn(steps, count: int, path: Path, data, prompt=None):
    """Collect the tokens (B, count) that ``steps`` yields one by one.

    Raises Interrupted after saving the pixels so far, ``prompt`` included; the rest is a middle grey.
    """
    import torch

    from .._utils import png
    from .._utils.progress import track

    found: list[torch.Tensor] = []
    try:
        found += track(steps, count, "tokens")
    except KeyboardInterrupt as error:
        if not found:
            raise
        partial = path.with_stem(f"{path.stem}.partial")
        rest = torch.full((len(found[0]), count - len(found)), data.vocab // 2)
        parts = [*([] if prompt is None else [prompt]), torch.stack(found, 1), rest]
        png.save(partial, data.picture(torch.cat(parts, 1)))
        text = f"interrupted: {len(found)} of {count} pixels of each of {len(rest)} images are in {partial}"
        raise signals.with_text(error, text) from error
    return torch.stack(found, 1)


def _examples(args, data):
    """Return evenly spaced examples of a split (count, length) and the number of tokens given of each."""
    import torch

    if not 0 < args.top < 1:
        raise ValueError(f"--top={args.top} must lie between 0 and 1; it is the share of each image that is given")
    if args.count > (count := data.count(args.complete)):
        raise ValueError(
            f"--count={args.count} is more than the {count} examples in split {args.complete!r} of {data.name}"
        )
    height = data.grid[0]
    rows = min(max(round(args.top * height), 1), height - 1)
    chosen = (torch.arange(args.count) * count).div(args.count, rounding_mode="floor")
    return data.take(args.complete, chosen), rows * data.length // height


def _text(model, args, options, adapter) -> None:
    import torch

    from ..data import tokenization
    from ..generation.sampling import generate
    from ..models import pretrained

    if args.complete or args.out:
        raise ValueError("--complete and --out require images; text continues --prompt and goes to standard output")
    forms = pretrained.forms(args.folder)
    if forms and not re.match(f"({'|'.join(forms)})(《|$)|$", args.prompt):
        raise ValueError(
            f"--prompt={args.prompt!r} must begin with a form, {', '.join(forms[:-1])} or {forms[-1]}, and a title: "
            f"{forms[0]}《春夜》"
        )
    coder = _Tokens(model.tokenizer) if model.tokenizer else _Bytes()
    stop = coder.number(args.stop or (tokenization.END if forms else ""))
    data = coder.encode(args.prompt)
    config = model.config
    room = config.length - len(data) if config.positions == "learned" else None
    steps = args.tokens or (256 if room is None else min(256, max(room, 1)))
    if room is not None and steps > room:
        raise ValueError(
            f"a prompt of {len(data)} {coder.unit} and {steps} more exceed the model's {config.length} learned "
            "positions; shorten the prompt, pass a smaller --tokens, or train with other positions"
        )
    prompt = torch.tensor([data]) if data else None
    if args.beams:
        _searched(model, torch.zeros(1, 0, dtype=torch.long) if prompt is None else prompt, steps, args, coder, stop)
        return
    more = {} if stop is None else {"stop": stop}
    if adapter is not None:
        more["state"] = adapter.state
    if args.draft:
        from . import trained

        draft = args.draft if args.draft == "prompt-lookup" else trained.model(args.draft, args.data).model
        more |= {"draft": draft, "draft_tokens": args.draft_tokens}
    tokens = generate(model, prompt, max_new_tokens=steps, **more, **options, stream=True)
    _write("".join(map(coder.step, data)))
    done = 0
    try:
        for token in tokens:
            if int(token) == stop:
                break
            done += 1
            _write(coder.step(int(token)))
    except KeyboardInterrupt as error:
        # End the line, so that the message on stderr begins a new one.
        _write(coder.rest() + "\n")
        raise signals.with_text(error, f"interrupted after {done} of {steps} {coder.unit}") from error
    _write(coder.rest() + "\n")


def _foreign(args, options) -> None:
    """Continue a text with a model of another library."""
    from ..models.sampling import Sampling
    from ..ops.buffers import reuse_pages
    from ..serving import Pool
    from . import targets
    from .serve import loaded

    own = {"ema": False, "data": "", "out": "", "complete": "", **targets.SOURCES, **targets.SEARCH}
    targets.refuse(args, own, f"is for models of longspan, and {args.folder} is of another library")
    if args.draft not in ("", "prompt-lookup"):
        raise ValueError(f"--draft={args.draft!r} must be prompt-lookup for a model of another library")
    reuse_pages()
    model, codec, _, adapter = loaded(args.folder, args.stop, args.weights, args.adapter)
    if codec is None:
        raise ValueError(f"{args.folder} has no tokenizer, so it has no text")
    prompt, steps, decoding = codec.encode(args.prompt), args.tokens or 256, codec.decoder()
    pool = Pool(model, slots=1, queue=1, capacity=len(prompt) + steps, draft_tokens=args.draft_tokens)
    options = {"sampling": Sampling(**options), "stop": codec.ends, "draft": args.draft or None, "adapter": adapter}
    _write(args.prompt)
    try:
        for token in pool.stream(prompt, max_new_tokens=steps, **options):
            _write(decoding.add(token))
    except KeyboardInterrupt as error:
        _write("\n")
        raise signals.with_text(error, f"interrupted before {steps} tokens") from error
    _write(decoding.end() + "\n")


def _searched(model, prompt, steps: int, args, coder: "_Bytes | _Tokens", stop: int | None) -> None:
    """Print the prompt with the best continuations of a beam search; several are printed with their scores."""
    from ..generation.beam_search import beam_search

    search = {"beams": args.beams, "best": args.n_best, "length_penalty": args.length_penalty, "stop": stop}
    found = beam_search(model, prompt, max_new_tokens=steps, **search)
    for tokens, score in zip(found.tokens[0].tolist(), found.scores[0].tolist(), strict=True):
        kept = itertools.takewhile(lambda token: token != stop, tokens)
        _write(f"{score:.4f}\t" * (args.n_best > 1) + coder.decode([*prompt[0].tolist(), *kept]) + "\n")


class _Bytes:
    """The text of a model of bytes. Invalid UTF-8 becomes replacement characters."""

    unit = "bytes"

    def __init__(self):
        # The bytes of a character come in several steps.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    def step(self, token: int) -> str:
        """The text that a further token completes."""
        return self.decoder.decode(bytes([token]))

    def rest(self) -> str:
        """The text of an incomplete character."""
        return self.decoder.decode(b"", final=True)

    def number(self, stop: str) -> int | None:
        """The token to stop at. Raises ValueError for one that the model cannot have."""
        if stop:
            raise ValueError(f"--stop {stop!r} requires a model with a tokenizer; this one generates bytes")
        return None


class _Tokens:
    """The text of a model of tokens of a tokenizer; methods as those of ``_Bytes``."""

    unit = "tokens"

    def __init__(self, content: str):
        from ..data import tokenization

        self.tokenizer = tokenization.encoder(content)
        from tokenizers.decoders import DecodeStream

        self.stream = DecodeStream(skip_special_tokens=False)
        self.tokens: list[int] = []
        self.written = ""

    def encode(self, text: str) -> list[int]:
        from ..data import tokenization

        return tokenization.encode(self.tokenizer, [text])[0]

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def step(self, token: int) -> str:
        self.tokens.append(token)
        text = self.stream.step(self.tokenizer, token) or ""
        self.written += text
        return text

    def rest(self) -> str:
        whole = self.decode(self.tokens)
        return whole[len(self.written) :] if whole.startswith(self.written) else ""

    def number(self, stop: str) -> int | None:
        from ..data import tokenization

        return tokenization.end_of(self.tokenizer, stop)


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
