"""``longspan show``: all that is known of one mechanism or pattern, or of each one in a stack; and a picture of it."""

import json
import textwrap
from pathlib import Path

from .parser import Parser, make, positive_int

MEMORY = "--dim or --tokens"
SIZE = 256  # pixels that a head's picture is high at least


def parser() -> Parser:
    parser = make(
        "show",
        "One mechanism: what it computes, its options and what they mean, paper, cost, parameters, the FLOPs of "
        "attention against those of the feed-forward network and the bytes of the recurrent state by length, and the "
        "backend that serves it. Where it has a pattern, or is one: how far and how many keys a query sees, and a "
        "picture of that. Of a training run: its config, steps, bits, size and data, and the spans and ponder "
        "times that it has learned. Of a saved model: its kind, config and size.",
        "longspan show linear",
        "longspan show \"linear(feature_map='relu'); softmax\" --dim 512 --heads 8 --json",
        "longspan show runs/digits",
        "longspan show mnist",
        "longspan show runs/adaptive_span --draw spans.png",
        "longspan show \"sparse(pattern='band(8) | globals(2)')\" --draw sparse.png",
        'longspan show "causal & (band(3) | strided(8))" --draw strided.png --tokens 48',
    )
    parser.add_argument(
        "spec",
        type=str,
        help="a spec of an attention or a pattern, or a stack of which each distinct one is shown; or the "
        "folder of a training run or of a saved model",
    )
    parser.add_argument("--dim", type=positive_int(1_000_000), default=256, help="width of the model")
    parser.add_argument("--heads", type=positive_int(1_000_000), default=8, help="attention heads")
    parser.add_argument("--device", type=str, default="cpu", help="where it would run: cpu, cuda, ...")
    parser.add_argument(
        "--draw",
        type=str,
        default="",
        help="draw which keys each query sees as this PNG file: queries downwards, keys to the right, black is seen, "
        "grey comes later; heads side by side where they differ; global tokens of their own come first; of a "
        "run: the spans and ponder times that it has learned",
    )
    parser.add_argument(
        "--tokens",
        type=positive_int(),
        default=None,
        help="tokens of the picture, and of the number of keys; otherwise as many as show what the pattern does",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def run(args) -> int:
    from .._utils import png, spec
    from ..attention import list_mechanisms
    from ..models import pretrained
    from ..train import run_summary
    from . import describe

    # A run in a folder named as a mechanism is ./linear.
    if run_summary.is_run_dir(args.spec) and args.spec not in list_mechanisms():
        return _run(args)
    if args.spec not in list_mechanisms() and (Path(args.spec).is_dir() or pretrained.is_pretrained_name(args.spec)):
        return _model(args)
    specs = list(dict.fromkeys(spec.split(args.spec)))
    if args.draw:
        if len(specs) > 1:
            raise ValueError(f"--draw takes one spec, not the {len(specs)} of {args.spec!r}")
        png.check(args.draw)
        images = describe.picture(specs[0], args.dim, args.heads, args.tokens)
        png.save(args.draw, images, columns=len(images), size=SIZE)
    described = []
    for one in specs:
        if describe.is_pattern(one):
            described.append({"spec": one, "view": describe.view(one, args.dim, args.heads, args.tokens)})
        else:
            described += describe.facts(one, args.dim, args.heads, args.device, args.tokens)
    if args.json:
        print(json.dumps(described, indent=2, default=str))
    else:
        print("\n\n".join(_text(one) if "paper" in one else "\n".join(_view(one)) for one in described))
    return 0


def _run(args) -> int:
    """Show a training run, and draw what it has learned to choose."""
    from .._utils import optional_deps, png
    from ..train import run_summary
    from ..train.learned import history

    found, told = run_summary.facts(args.spec), history(Path(args.spec))
    if args.draw:
        if not told:
            raise ValueError(
                f"{args.spec} has learned nothing to be drawn: no spans of adaptive_span, no ponder time of "
                f"stack='act(...)', or no evaluation yet"
            )
        optional_deps.need("the picture", "matplotlib", "PIL")
        png.check(args.draw)
        from ..train.plots import draw

        draw(Path(args.draw), told, text=found["unit"] == "byte")
    found["learned"] = told[-1] if told else None
    print(json.dumps(found, indent=2) if args.json else _run_text(found))
    return 0


def _model(args) -> int:
    """Show a saved model."""
    from ..models import pretrained
    from ..train import run_summary

    if args.draw:
        raise ValueError(f"--draw is for a pattern or a training run; {args.spec} is a saved model")
    found = run_summary.model_facts(
        pretrained.path(args.spec) if pretrained.is_pretrained_name(args.spec) else args.spec
    )
    found["folder"] = args.spec
    print(json.dumps(found, indent=2) if args.json else _model_text(found))
    return 0


def _model_text(one: dict) -> str:
    """The lines about a saved model."""
    lines = [
        f"{one['folder']}: a saved {one['kind']}",
        f"  size        {one['parameters']:,} parameters; "
        f"{_short(one['bytes'], 1024, ('', 'Ki', 'Mi', 'Gi'))}B in its files",
    ]
    for part in ("model", "run"):
        if one[part]:
            text = ", ".join(f"{name}={value!r}" for name, value in one[part].items())
            lines += textwrap.wrap(f"  {part:<11} {text}", 118, subsequent_indent=" " * 14)
    return "\n".join(lines)


def _learned(one: dict) -> list[str]:
    """The lines about spans and ponder times, as they were at the last evaluation."""
    lines = []
    if "spans" in one:
        layers = [f"layer {i}: {' '.join(f'{z:.4g}' for z in heads)}" for i, heads in one["spans"]]
        lines += _listed("spans", [f"of the heads, in tokens, at step {one['step']}", *layers])
    if "ponder" in one:
        ponder = one["ponder"]
        low, high = ponder.index(min(ponder)), ponder.index(max(ponder))
        lines += _listed(
            "ponder",
            [
                f"{sum(ponder) / len(ponder):.3f} steps and remainder a token at step {one['step']}: from "
                f"{ponder[low]:.3f} at position {low} to {ponder[high]:.3f} at position {high}"
            ],
        )
    return lines


def _run_text(one: dict) -> str:
    """The lines about a training run."""
    settings = {part: ", ".join(f"{name}={value!r}" for name, value in one[part].items()) for part in ("model", "run")}
    bits = "none yet" if one["bits"] is None else f"{one['bits']:.4f} bits/{one['unit']} at step {one['best_step']}"
    bits += "" if one["exact"] is None else f", {one['exact']:.1%} of the targets exact"
    bits += "" if one["accuracy"] is None else f", {one['accuracy']:.1%} of the labels right"
    weights = "" if one["parameters"] is None else f"{one['parameters']:,} parameters; "
    lines = [
        f"{one['folder']}: a training run on {one['run'].get('data')}",
        f"  validation  {bits}",
        f"  steps       {one['steps']} of {one['run'].get('steps')}, {one['seconds']:.0f} s, "
        f"{_short(one['tokens_per_second'])} tokens/s at last",
        f"  size        {weights}{one['checkpoints']} checkpoints; "
        f"{_short(one['bytes'], 1024, ('', 'Ki', 'Mi', 'Gi'))}B in all",
    ]
    lines += _learned(one["learned"] or {})
    for part, text in settings.items():
        lines += textwrap.wrap(f"  {part:<11} {text}", 118, subsequent_indent=" " * 14)
    return "\n".join(lines)


def _view(one: dict) -> list[str]:
    """The lines about a pattern."""
    view, lines = one["view"], []
    if "paper" not in one:
        lines.append(f"{one['spec']}: a pattern")
    lines += textwrap.wrap(f"  pattern     {view['pattern']}", 118, subsequent_indent=" " * 14)
    back, ahead = ("no bound" if view[name] is None else view[name] for name in ("lookback", "lookahead"))
    keys, heads = view["keys"], "; heads differ" if view["per_head"] else ""
    return [
        *lines,
        f"  look-back   {back}; look-ahead {ahead}{heads}",
        f"  keys        {keys['mean']:.4g} per query at {view['tokens']} tokens, from {keys['fewest']} to "
        f"{keys['most']}",
    ]


def _text(one: dict) -> str:
    from .._utils.latex import inline, text
    from ..attention.families import LEGEND

    paper, counts, sizes = one["paper"], one["counts"], one["parameters"]
    lines = [
        f"{one['spec']}: {one['summary']}",
        f"  paper       {paper['title']} ({paper['year']}), https://arxiv.org/abs/{paper['arxiv']}",
        *_listed("computes", [text(equation) for equation in one["equations"]]),
        *_listed("where", [inline(words) for symbol, words in LEGEND.items() if symbol in "".join(one["equations"])]),
        f"  cost        {one['cost']} for a sequence of N tokens with heads of size D",
        f"  forms       {', '.join(one['forms'])}",
        *(_view(one) if one["view"] else []),
        *_listed("backend", _backend(one["backend"])),
        f"  parameters  attention {sizes['attention']:,}, feed-forward {sizes['feedforward']:,} "
        f"(dim={one['dim']}, heads={one['heads']}, {4 * one['dim']} inner units)",
        "  options",
    ]
    width = max((len(f"{o['name']}={o['value']!r}") for o in one["options"]), default=0)
    for option in one["options"]:
        default = "" if option["value"] == option["default"] else f"(default {option['default']!r}) "
        start = f"    {option['name']}={option['value']!r}".ljust(width + 6)
        text = f"{default}{option['meaning']}"
        lines += textwrap.wrap(start + text, 118, subsequent_indent=" " * (width + 6)) or [start.rstrip()]
    form = "causal" if one["causal"] else "bidirectional"
    lines += [
        f"  FLOPs of one layer for one sequence ({form}, parallel form, matrix products), and its recurrent state",
        f"    {'tokens':>8} {'projections':>12} {'mixing':>12} {'feed-forward':>13} {'mixing share':>13} {'state':>11}",
    ]
    for row in counts:
        share = row["mixing"] / (row["projections"] + row["mixing"] + row["feedforward"])
        state = "none" if row["state"] is None else f"{_short(row['state'], 1024, ('', 'Ki', 'Mi', 'Gi'))}B"
        lines.append(
            f"    {row['tokens']:>8} {_short(row['projections']):>12} {'' if row['measured'] else '~'}"
            f"{_short(row['mixing']):>{12 if row['measured'] else 11}} {_short(row['feedforward']):>13} "
            f"{share:>12.0%} {state:>11}"
        )
    if not all(row["measured"] for row in counts):
        longest = max(row["tokens"] for row in counts if row["measured"])
        lines.append(f"    ~ continued from counts up to {longest} tokens")
    return "\n".join(lines)


def _backend(one: dict) -> list[str]:
    """Which backend serves which kind of call, and what there is of native kernels."""
    from .dispatch import format_call

    calls = [f"{kind} on {one['device']}: {format_call(call)}" for kind, call in one["calls"].items()]
    return [*(calls or [f"unknown, since {one['reason']}"]), f"native kernels: {one['kernels']}"]


def _listed(name: str, said: list[str]) -> list[str]:
    """Each text on lines of its own, the first one beside the name."""
    lines = [
        line for text in said for line in textwrap.wrap(text, 104, subsequent_indent="    ", break_on_hyphens=False)
    ]
    return [(f"  {name:<12}" if number == 0 else " " * 14) + line for number, line in enumerate(lines)]


def _short(number: float, base: int = 1000, letters: tuple[str, ...] = ("", "k", "M", "G", "T", "P")) -> str:
    for letter in letters:
        if number < base or letter == letters[-1]:
            return f"{number:.4g} {letter}".strip() if not letter else f"{number:.3g} {letter}"
        number /= base
    raise AssertionError("the last letter always serves")
