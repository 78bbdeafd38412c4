"""``longspan eval``: bits per token, exact match or accuracy of a trained model."""

import json
import math

from .._utils import signals
from .generate import HELP
from .parser import BEAMS, MODEL, Parser, make, natural_int, number, positive_int

MEMORY = "--batch, --beams or --length"


def parser() -> Parser:
    parser = make(
        "eval",
        "Evaluate a trained model on a held-out split. A decoder gets bits per dimension (images) or per byte (text). "
        "An encoder-decoder gets bits per token and the share of targets that it generates exactly. A classifier gets "
        "its accuracy and bits per label.\n\nBy default, examples are scored independently. --stream and --sliding "
        "score a text from beginning to end.\n\n--tasks runs tasks of lm-evaluation-harness, on models of other "
        "libraries too.",
        "longspan eval runs/digits",
        "longspan eval mnist --data mnist:FOLDER --stepwise",
        "longspan eval runs/digits --split validation --stepwise 20 --json",
        "longspan eval runs/xl --stream",
        "longspan eval runs/xl --stream --sliding 1 --examples 32",
        "longspan eval runs/dates --beams 4",
        "longspan eval runs/labels --data labels:FOLDER",
        "longspan eval ./Qwen3.5-0.8B --tasks lambada_openai,piqa --examples 200",
    )
    parser.add_argument("folder", type=str, metavar=MODEL, help=HELP)
    parser.add_flag("--ema", "take the moving average of the weights, which training with run.ema keeps")
    parser.add_text(
        "--data", "DATA", "data set, e.g. mnist:FOLDER or text:FILE; by default the one that the model was trained on"
    )
    parser.add_text("--split", "SPLIT", "train, validation or test", default="test")
    parser.add_argument(
        "--batch",
        type=positive_int(1_000_000),
        default=None,
        help="examples per forward pass, at most 64 by default; affects speed and memory only. With --stream or "
        "--sliding: number of equal stretches into which the text is cut, read in parallel",
    )
    parser.add_argument(
        "--stepwise",
        nargs="?",
        type=natural_int(),
        const=100,
        default=0,
        metavar="N",
        help="also score N examples token by token, as an RNN, and print the largest difference from the parallel "
        "form; N is 100 if omitted",
    )
    parser.add_argument(
        "--beams",
        type=natural_int(BEAMS),
        default=0,
        help="encoder-decoders: also report the exact match of a beam search with N beams; 0: greedy decoding only",
    )
    parser.add_argument(
        "--length_penalty",
        type=number(1000.0),
        default=0.0,
        help="exponent of the beam search's length penalty; larger values favor longer targets",
    )
    parser.add_flag(
        "--stream",
        "carry the state from window to window, as training with run.stream does, so that each token is computed "
        "once; also print tokens per second",
    )
    parser.add_argument(
        "--sliding",
        type=natural_int(),
        default=0,
        metavar="STRIDE",
        help="sliding-window evaluation: advance a window of the run's length by STRIDE tokens, score only those, "
        "carry no state. With --stream: score the same tokens in both ways and print the ratio of the speeds. 0: off",
    )
    parser.add_flag(
        "--segments", "texts and tokens: keep the documents of a window apart, as training with run.segments does"
    )
    parser.add_argument(
        "--examples",
        type=natural_int(),
        default=0,
        help="score about N examples or windows, evenly spaced; 0: all",
    )
    parser.add_argument(
        "--length", type=natural_int(), default=0, help="tokens per window of a text; 0: as in training"
    )
    parser.add_text("--tasks", "NAMES", "tasks of lm-evaluation-harness, separated by commas")
    parser.add_text("--task_path", "DIR", "with --tasks: a folder of further tasks, as YAML")
    parser.add_argument(
        "--shots", type=natural_int(1000), default=None, help="with --tasks: examples before each question"
    )
    parser.add_argument(
        "--capacity",
        type=positive_int(10**9),
        default=4096,
        help="with --tasks: tokens of a text, for models with a KV cache",
    )
    parser.add_flag("--json", "print JSON instead of text")
    return parser


def run(args) -> int:
    from ..ops.buffers import reuse_pages
    from ..train.evaluate import default_batch_size
    from . import targets, trained

    if args.tasks:
        return _tasks(args)
    targets.refuse(args, {"task_path": "", "shots": None, "capacity": 4096}, "requires --tasks")
    if args.stepwise and (args.stream or args.sliding):
        raise ValueError("--stepwise scores independent examples; it cannot be combined with --stream or --sliding")
    if args.segments and (args.stepwise or args.stream or args.sliding):
        raise ValueError("--segments cannot be combined with --stepwise, --stream or --sliding")
    targets.check_search(args)
    found = trained.model(args.folder, args.data, *trained.WRITERS, "encoder", ema=args.ema)
    model, name = found.model, found.data
    pairs, labels = trained.kind(name) == trained.PAIRS, trained.kind(name) == trained.LABELS
    if labels:
        alone = {"stepwise": 0, "stream": False, "sliding": 0, "beams": 0, "segments": False}
        targets.refuse(args, alone, "requires a model that generates tokens; a classifier does not")
    elif pairs:
        targets.refuse(args, {"stepwise": 0}, "requires a decoder; an encoder-decoder generates token by token anyway")
        targets.refuse(
            args,
            {"stream": False, "sliding": 0, "length": 0, "segments": False},
            "requires a text; pairs are scored independently",
        )
    else:
        targets.refuse(args, {"beams": 0}, f"requires pairs; {name} has no targets")
    data = trained.dataset(found, args.length, short=True)
    reuse_pages()
    if labels:
        return _classified(args, model, data)
    if pairs:
        targets.measure(model, data, args)
        return 0
    if args.stream or args.sliding:
        return _along(args, model, data)
    batch = args.batch or default_batch_size(data.length, data.vocab)
    result = _bits(model, data, args.split, batch, args.examples, args.segments)
    if args.stepwise:
        result["stepwise"] = _stepwise(model, data, args.split, args.stepwise)
    if args.json:
        print(json.dumps({"folder": args.folder, **result}, indent=2))
        return 0
    print(f"{result['bits']:.4f} bits/{data.unit} on {result['examples']} examples of {data.name}, {args.split}")
    if step := result.get("stepwise"):
        print(
            f"stepwise: one parallel pass and {data.length} steps differ by at most "
            f"{step['largest_difference']:.1e} nats; an example has {step['mean']:.1f} nats on average "
            f"({step['examples']} examples)"
        )
    return 0


def _tasks(args) -> int:
    """Print the metrics of tasks of lm-evaluation-harness."""
    from .._utils.optional_deps import need
    from . import targets
    from .serve import loaded

    need("--tasks", "lm_eval")
    own = {"ema": False, "data": "", "split": "test", "stepwise": 0, "beams": 0, "length_penalty": 0.0}
    own |= {"stream": False, "sliding": 0, "segments": False, "length": 0}
    targets.refuse(args, own, "cannot be combined with --tasks")
    from ..ops.buffers import reuse_pages
    from ..serving import Pool
    from ..serving.lm_eval import evaluate

    reuse_pages()
    model, codec, *_ = loaded(args.folder, "")
    if codec is None:
        raise ValueError(f"{args.folder} has no text, which --tasks requires")
    batch = args.batch or 16
    pool = Pool(model, slots=batch, queue=batch, capacity=args.capacity)
    tasks = [name for name in args.tasks.split(",") if name]
    found = evaluate(pool, codec, tasks, folder=args.task_path, examples=args.examples, shots=args.shots)
    if args.json:
        print(json.dumps({"folder": args.folder, "tasks": found}, indent=2))
        return 0
    for task, values in found.items():
        for name, value in values.items():
            if not name.endswith("_stderr") and name != "sample_len":
                error = values.get(f"{name}_stderr")
                print(f"{task:<24} {name:<20} {value:.4f}" + ("" if error is None else f" ± {error:.4f}"))
    return 0


def _along(args, model, data) -> int:
    """Score a text with carried states, with sliding windows, or with both on the same tokens."""
    import time

    from .._utils.progress import track
    from ..train import streaming_eval
    from ..train.evaluate import Share

    rows = args.batch or streaming_eval.rows(data, args.split, args.examples)
    ways: dict = {"stream": lambda: streaming_eval.carried(model, data, args.split, rows, Share(args.examples), track)}
    ways["sliding"] = lambda: streaming_eval.sliding(
        model, data, args.split, args.sliding, rows, args.examples, track=track
    )
    result = {"folder": args.folder, "data": data.name, "split": args.split, "length": data.length, "rows": rows}
    result |= {"unit": data.unit, "stride": args.sliding} if args.sliding else {"unit": data.unit}
    for way, chosen in (("stream", args.stream), ("sliding", args.sliding)):
        if chosen:
            begin = time.perf_counter()
            nats, tokens = ways[way]().tolist()
            seconds = time.perf_counter() - begin
            bits = nats / tokens / math.log(2)
            result[way] = {"bits": bits, "tokens": int(tokens), "seconds": seconds}
            result[way]["tokens_per_second"] = tokens / seconds
    if args.stream and args.sliding:
        result["ratio"] = result["stream"]["tokens_per_second"] / result["sliding"]["tokens_per_second"]
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    labels = {"stream": "carried state", "sliding": f"window of {data.length}, stride {args.sliding}"}
    print(f"{data.name}, {args.split}, {rows} stretches:")
    for way, words in labels.items():
        if way in result:
            one = result[way]
            print(
                f"  {words}: {one['bits']:.4f} bits/{data.unit} on {one['tokens']:,} tokens, "
                f"{one['tokens_per_second']:,.0f} tokens/s"
            )
    if "ratio" in result:
        print(f"  speed-up of the carried state: {result['ratio']:.3g}x")
    return 0


def _classified(args, model, data) -> int:
    """Print accuracy and bits per label of a classifier."""
    import torch

    from .._utils.progress import track
    from ..train.evaluate import Share, classified, default_batch_size

    count = min(args.examples or data.count(args.split), data.count(args.split))
    batch = args.batch or default_batch_size(data.length)
    parts, sums = -(-count // batch), []
    try:
        for i in track(range(parts), parts, "batches"):
            sums.append(classified(model, data, args.split, batch, Share(args.examples, i, parts)))
    except KeyboardInterrupt as error:
        if not sums:
            raise
        _, right, seen = torch.stack(sums).sum(0).tolist()
        text = f"interrupted: {right / seen:.2%} accuracy on {int(seen)} of {count} examples, evenly spaced"
        raise signals.with_text(error, text) from error
    nats, right, _ = torch.stack(sums).sum(0).tolist()
    result = {"data": data.name, "split": args.split, "examples": count, "accuracy": right / count}
    result |= {"bits": nats / count / math.log(2), "unit": data.unit}
    if args.json:
        print(json.dumps({"folder": args.folder, **result}, indent=2))
        return 0
    where = f"{count} examples of {data.name}, {args.split}"
    print(f"{result['accuracy']:.2%} accuracy, {result['bits']:.4f} bits/{data.unit} on {where}")
    return 0


def _bits(model, data, split: str, batch: int, examples: int = 0, segments: bool = False) -> dict:
    from .._utils.progress import track
    from ..train import streaming_eval, tbptt
    from ..train.evaluate import Share, total

    if segments:
        tbptt.check_segments(model.config)
    sums_of = streaming_eval.apart if segments else total

    count = data.count(split)
    if not count:
        raise ValueError(f"split {split!r} of {data.name} has no examples")
    chosen = min(examples or count, count)
    parts = -(-chosen // batch)
    sums: list[list[float]] = []
    try:
        # Every parts-th example from the i-th on: at most ``batch`` of them, so that the bar can move after each call.
        for i in track(range(parts), parts, "batches"):
            sums.append(sums_of(model, data, split, batch, Share(examples, i, parts)).tolist())
    except KeyboardInterrupt as error:
        if not sums:
            raise
        bits, tokens = _mean(sums)
        seen = f"{int(tokens) // data.length} of {chosen} examples, evenly spaced"
        raise signals.with_text(error, f"interrupted: {bits:.4f} bits/{data.unit} on {seen}") from error
    bits, tokens = _mean(sums)
    return {
        "data": data.name,
        "split": split,
        "examples": chosen,
        "tokens": int(tokens),
        "bits": bits,
        "unit": data.unit,
    }


def _mean(sums: list[list[float]]) -> tuple[float, float]:
    """Bits per token and number of tokens, from pairs of (nats, tokens)."""
    nats, tokens = (math.fsum(column) for column in zip(*sums, strict=True))
    return nats / tokens / math.log(2), tokens


def _stepwise(model, data, split: str, examples: int) -> dict:
    import torch

    from .._utils.progress import track
    from ..generation.sampling import log_likelihood

    count = data.count(split)
    chosen = min(examples, count)
    parts = (torch.arange(chosen) * count).div(chosen, rounding_mode="floor").split(25)
    nats, worst = 0.0, 0.0
    for indices in track(parts, len(parts), "stepwise"):
        tokens = data.take(split, indices)
        whole = log_likelihood(model, tokens)
        worst = max(worst, (whole - log_likelihood(model, tokens, chunk=1)).abs().max().item())
        nats -= whole.sum().item()
    return {"examples": chosen, "largest_difference": worst, "mean": nats / chosen}
