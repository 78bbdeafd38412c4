"""Encoder-decoders in ``eval`` and ``generate``, and the options of beam search."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

from .._utils import atomic_io, signals
from ..data import pairs
from .parser import DRAWS, kebab, sampling_options

BATCH = 32  # sources decoded together
IMAGES = {"out": "", "count": 64, "complete": "", "top": 0.5}
TEXT = {"prompt": "", "stop": ""}
SEARCH = {"beams": 0, "n_best": 1, "length_penalty": 0.0}
SOURCES = {"source": None, "sources": ""}


def refuse(args: Any, options: dict[str, Any], why: str) -> None:
    """Raise ValueError if one of these options differs from its default."""
    for name, default in options.items():
        if getattr(args, name) != default:
            raise ValueError(f"--{kebab(name)} {why}")


def check_search(args: Any) -> None:
    """Raise ValueError for an option of a beam search without --beams."""
    if not args.beams:
        searching = {name: default for name, default in SEARCH.items() if name != "beams" and hasattr(args, name)}
        refuse(args, searching, "requires a beam search; pass --beams N")


def check_beams(args: Any) -> None:
    """Raise ValueError for options that a beam search over targets or text does not accept."""
    check_search(args)
    if not args.beams:
        return
    refuse(args, DRAWS, "requires sampling; it cannot be combined with --beams")
    if args.n_best > args.beams:
        raise ValueError(f"--n-best={args.n_best} must be at most --beams={args.beams}")


def write(model: Any, name: str, length: int, args: Any) -> None:
    """``generate``: print one target per source and line; with --n-best after its score in nats and a tab."""
    refuse(args, IMAGES, "requires a model of images; this model generates the target of a --source")
    refuse(args, TEXT, "requires a model of text; this model generates the target of a --source")
    check_beams(args)
    numbers = pairs.of_numbers(name)
    found = _sources(args, numbers)
    config = model.config
    steps = args.tokens or length or pairs.MOST
    if config.positions == "learned":
        steps = min(steps, config.length) if not args.tokens else steps
        for words, tokens in found:
            if len(tokens) > config.length:
                raise ValueError(
                    f"the source {words[:40]!r} has {len(tokens)} tokens; this model has {config.length} learned "
                    "positions, so at most that many tokens"
                )
    done = 0
    try:
        for done in range(0, len(found), BATCH):
            some = [tokens for _, tokens in found[done : done + BATCH]]
            for line in _targets(model, some, steps, numbers, args, args.seed + done):
                print(line, flush=True)
    except KeyboardInterrupt as error:
        raise signals.with_text(error, f"interrupted after the targets of {done} of {len(found)} sources") from error


def _sources(args: Any, numbers: bool) -> list[tuple[str, list[int]]]:
    """The sources given by --source or --sources, as text and as tokens."""
    if (args.source is None) == (not args.sources):
        raise ValueError('this model generates the target of a source; pass --source "..." or --sources FILE')
    lines = [args.source]
    if args.sources:
        path = Path(args.sources)
        try:
            content = atomic_io.without_mark(atomic_io.read(path))
            atomic_io.refuse_nul(content, path)
            lines = content.decode("utf-8", "surrogateescape").split("\n")
        except OSError as error:
            raise ValueError(f"--sources: cannot read {path}: {error.strerror}") from error
        lines = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
    for number, line in enumerate(lines, 1):
        where = f"line {number} of {args.sources}" if args.sources else "--source"
        if not line:
            raise ValueError(f"{where} is empty; a source needs at least one character")
        if "\t" in line and not numbers:
            raise ValueError(
                f"{where} contains a tab, which a source cannot; put one source without its target on each line"
            )
    return [(line, pairs.encode(line, numbers)) for line in lines]


def _targets(model: Any, sources: list[list[int]], steps: int, numbers: bool, args: Any, seed: int) -> list[str]:

    from ..generation.beam_search import beam_search
    from ..generation.sampling import generate

    source, mask = pairs.padded(sources)
    stop = model.config.vocab - 1
    given = {"source": source, "source_mask": mask, "max_new_tokens": steps, "stop": stop}
    if args.beams:
        found = beam_search(model, **given, beams=args.beams, best=args.n_best, length_penalty=args.length_penalty)
        rows = found.tokens.flatten(0, 1).tolist()
        scores = [f"{score:.4f}\t" * (args.n_best > 1) for score in found.scores.flatten().tolist()]
    else:
        rows = generate(model, **given, **sampling_options(args, 0.0, seed)).tolist()
        scores = [""] * len(rows)
    return [score + _words(row, stop, numbers) for score, row in zip(scores, rows, strict=True)]


def _words(row: list[int], stop: int, numbers: bool) -> str:
    """A target up to its stop token, on one line."""
    kept = list(itertools.takewhile(lambda token: token != stop, row))
    return pairs.decode(kept, numbers).replace("\n", "\N{REPLACEMENT CHARACTER}")


def measure(model: Any, data: Any, args: Any) -> None:
    """``eval``: print bits per token and exact match, by greedy decoding and, with --beams, by beam search."""
    from ..train.evaluate import default_batch_size

    count = min(args.examples or data.count(args.split), data.count(args.split))
    batch = args.batch or default_batch_size(data.length)
    nats, tokens, exact, _ = _sums(model, data, args, batch, 0)
    result = {
        "data": data.name,
        "split": args.split,
        "examples": count,
        "tokens": int(tokens),
        "bits": nats / tokens / math.log(2),
        "unit": data.unit,
        "exact": exact / count,
    }
    if args.beams:
        result["beams"] = args.beams
        result["length_penalty"] = args.length_penalty
        result["exact_beams"] = _sums(model, data, args, batch, args.beams)[2] / count
    if args.json:
        print(json.dumps({"folder": args.folder, **result}, indent=2))
        return
    print(f"{result['bits']:.4f} bits/{data.unit} on {count} examples of {data.name}, {args.split}")
    beams = f", {result['exact_beams']:.2%} by beam search with {args.beams} beams" if args.beams else ""
    print(f"exact match: {result['exact']:.2%} by greedy decoding{beams}")


def _sums(model: Any, data: Any, args: Any, batch: int, beams: int) -> list[float]:
    """Nats, tokens, exact targets and pairs of a split.

    Raises Interrupted, with the exact match so far in its message.
    """
    from .._utils.progress import track
    from ..train.evaluate import Share, evaluate_seq2seq

    count = min(args.examples or data.count(args.split), data.count(args.split))
    parts, sums = -(-count // batch), []
    options = {"beams": beams, "length_penalty": args.length_penalty}
    try:
        # Every parts-th pair from the i-th on: at most ``batch`` of them, so that the bar can move after each call.
        for i in track(range(parts), parts, f"{beams} beams" if beams else "batches"):
            sums.append(
                evaluate_seq2seq(model, data, args.split, batch, Share(args.examples, i, parts), **options).tolist()
            )
    except KeyboardInterrupt as error:
        if not sums:
            raise
        _, _, exact, seen = map(math.fsum, zip(*sums, strict=True))
        text = f"interrupted: {exact / seen:.2%} exact on {int(seen)} of {count} examples"
        raise signals.with_text(error, f"{text}, evenly spaced") from error
    return [math.fsum(column) for column in zip(*sums, strict=True)]
