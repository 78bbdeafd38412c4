"""``longspan show``: facts about a mechanism, a pattern, a training run or a saved model, and a picture."""

import json
import re
from pathlib import Path

from .._utils import terminal
from .parser import Parser, make, model_help, positive_int

MEMORY = "--dim or --tokens"
INDENT = 14  # at which values begin
SIZE = 256  # smallest height of a head's picture, in pixels


def parser() -> Parser:
    parser = make(
        "show",
        "Show a mechanism: formulas, options, paper, cost, forms, backend, number of parameters, and FLOPs and state "
        "size by length. A stack is shown spec by spec.\n\nFor a pattern, or a mechanism with one, show how far and "
        "how many keys a query sees. For a training run, show its config, steps, bits, size and data, and its learned "
        "spans and ponder times. For a saved model, show its kind, config and size. --draw makes a picture of a "
        "pattern, or of what a run has learned.",
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
        metavar="SPEC|MODEL",
        help=f"a spec of an attention or a pattern, several separated by ';', or {model_help('mnist, digits, text')}",
    )
    parser.add_argument("--dim", type=positive_int(1_000_000), default=256, help="width of the model, in channels")
    parser.add_argument("--heads", type=positive_int(1_000_000), default=8, help="attention heads")
    parser.add_text("--device", "DEVICE", "device of the backend report: cpu, cuda, ...", default="cpu")
    parser.add_text(
        "--draw",
        "FILE",
        "write a PNG file. Of a pattern: which keys each query sees, queries downwards, keys to the right, black "
        "is seen, grey is the future; heads that differ are drawn next to each other, and separate global tokens come "
        "first. Of a run: its learned spans and ponder times",
    )
    parser.add_argument(
        "--tokens",
        type=positive_int(),
        default=None,
        help="tokens of the picture and of the key counts; by default enough to show the pattern",
    )
    parser.add_flag("--json", "print JSON instead of text")
    return parser


def run(args) -> int:
    from .._utils import png, spec
    from ..attention import list_mechanisms
    from ..models import pretrained
    from ..train import run_summary
    from . import describe

    # A run in a folder with the name of a mechanism is shown by ./NAME.
    if run_summary.is_run_dir(args.spec) and args.spec not in list_mechanisms():
        return _run(args)
    if args.spec not in list_mechanisms() and (Path(args.spec).is_dir() or pretrained.is_pretrained_name(args.spec)):
        return _model(args)
    specs = list(dict.fromkeys(spec.split(args.spec)))
    if args.draw:
        if len(specs) > 1:
            raise ValueError(f"--draw requires a single spec; {args.spec!r} has {len(specs)}")
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
    """Show a training run, and draw its learned spans and ponder times."""
    from .._utils import optional_deps, png
    from ..train import run_summary
    from ..train.learned import history

    found, learned = run_summary.facts(args.spec), history(Path(args.spec))
    if args.draw:
        if not learned:
            raise ValueError(
                f"{args.spec} has nothing to draw; --draw requires spans of adaptive_span or ponder times of "
                f"stack='act(...)', and at least one evaluation"
            )
        optional_deps.need("the plot", "matplotlib", "PIL")
        png.check(args.draw)
        from ..train.plots import draw

        draw(Path(args.draw), learned, text=found["unit"] == "byte")
    found["learned"] = learned[-1] if learned else None
    print(json.dumps(found, indent=2) if args.json else _run_text(found))
    return 0


def _model(args) -> int:
    """Show a saved model."""
    from ..models import pretrained
    from ..train import run_summary

    if args.draw:
        raise ValueError(f"--draw requires a pattern or a training run; {args.spec} is a saved model")
    found = run_summary.model_facts(
        pretrained.path(args.spec) if pretrained.is_pretrained_name(args.spec) else args.spec
    )
    found["folder"] = args.spec
    print(json.dumps(found, indent=2) if args.json else _model_text(found))
    return 0


def _model_text(one: dict) -> str:
    """The text about a saved model."""
    lines = [
        f"{one['folder']}: a saved {one['kind']}",
        f"  size        {one['parameters']:,} parameters; "
        f"{_short(one['bytes'], 1024, ('', 'Ki', 'Mi', 'Gi'))}B in its files",
    ]
    for part in ("model", "run"):
        if one[part]:
            text = ", ".join(f"{name}={value!r}" for name, value in one[part].items())
            lines += _listed(part, [text])
    return "\n".join(lines)


def _learned(one: dict) -> list[str]:
    """The lines about spans and ponder times at the last evaluation."""
    lines = []
    if "spans" in one:
        layers = [f"layer {i}: {' '.join(f'{z:.4g}' for z in heads)}" for i, heads in one["spans"]]
        lines += _listed("spans", [f"of each head, in tokens, at step {one['step']}", *layers])
    if "ponder" in one:
        ponder = one["ponder"]
        low, high = ponder.index(min(ponder)), ponder.index(max(ponder))
        lines += _listed(
            "ponder",
            [
                f"{sum(ponder) / len(ponder):.3f} steps and remainder per token at step {one['step']}: from "
                f"{ponder[low]:.3f} at position {low} to {ponder[high]:.3f} at position {high}"
            ],
        )
    return lines


def _run_text(one: dict) -> str:
    """The text about a training run."""
    settings = {part: ", ".join(f"{name}={value!r}" for name, value in one[part].items()) for part in ("model", "run")}
    bits = "none yet" if one["bits"] is None else f"{one['bits']:.4f} bits/{one['unit']} at step {one['best_step']}"
    bits += "" if one["exact"] is None else f", {one['exact']:.1%} exact match"
    bits += "" if one["accuracy"] is None else f", {one['accuracy']:.1%} accuracy"
    weights = "" if one["parameters"] is None else f"{one['parameters']:,} parameters; "
    lines = [
        f"{one['folder']}: a training run on {one['run'].get('data')}",
        *_listed("validation", [bits]),
        *_listed(
            "steps",
            [
                f"{one['steps']} of {one['run'].get('steps')}, {one['seconds']:.0f} s, "
                f"{_short(one['tokens_per_second'])} tokens/s at the last evaluation"
            ],
        ),
        *_listed(
            "size",
            [
                f"{weights}{one['checkpoints']} checkpoints; "
                f"{_short(one['bytes'], 1024, ('', 'Ki', 'Mi', 'Gi'))}B in total"
            ],
        ),
    ]
    lines += _learned(one["learned"] or {})
    for part, text in settings.items():
        lines += _listed(part, [text])
    return "\n".join(lines)


def _view(one: dict) -> list[str]:
    """The lines about a pattern."""
    view, lines = one["view"], []
    if "paper" not in one:
        lines.append(f"{one['spec']}: a pattern")
    lines += _listed("pattern", [view["pattern"]])
    back, ahead = ("unbounded" if view[name] is None else view[name] for name in ("lookback", "lookahead"))
    keys, heads = view["keys"], "; heads differ" if view["per_head"] else ""
    return [
        *lines,
        *_listed("look-back", [f"{back}; look-ahead {ahead}{heads}"]),
        *_listed(
            "keys",
            [f"{keys['mean']:.4g} per query at {view['tokens']} tokens, from {keys['fewest']} to {keys['most']}"],
        ),
    ]


def _text(one: dict) -> str:
    from .._utils.latex import inline, text
    from ..attention.families import LEGEND

    paper, counts, sizes = one["paper"], one["counts"], one["parameters"]
    lines = [
        *terminal.wrapped(f"{one['spec']}: {one['summary']}".replace("``", ""), 2, first=""),
        *_listed("paper", [f"{paper['title']} ({paper['year']}), https://arxiv.org/abs/{paper['arxiv']}"]),
        *_listed("computes", [part for equation in one["equations"] for part in _lines(text(equation))]),
        *_listed("where", [inline(words) for symbol, words in LEGEND.items() if symbol in "".join(one["equations"])]),
        *_listed("cost", [f"{one['cost']} for a sequence of N tokens with heads of size D"]),
        *_listed("forms", [", ".join(one["forms"])]),
        *(_view(one) if one["view"] else []),
        *_listed("backend", _backend(one["backend"])),
        *_listed(
            "parameters",
            [
                f"attention {sizes['attention']:,}, feed-forward {sizes['feedforward']:,} "
                f"(dim={one['dim']}, heads={one['heads']}, {4 * one['dim']} inner units)"
            ],
        ),
        "  options",
    ]
    width = max((len(f"{o['name']}={o['value']!r}") for o in one["options"]), default=0)
    for option in one["options"]:
        default = "" if option["value"] == option["default"] else f"(default {option['default']!r}) "
        start = f"    {option['name']}={option['value']!r}".ljust(width + 6)
        text = f"{default}{option['meaning']}"
        if width + 6 > terminal.columns() // 2:
            lines += [start.rstrip(), *terminal.wrapped(text, 8)]
        else:
            lines += terminal.entry(start, [text], width + 6)
    form = "causal" if one["causal"] else "bidirectional"
    lines += [
        *terminal.wrapped(
            f"FLOPs of one layer for one sequence ({form}, parallel form, matrix products), and its recurrent state",
            2,
            first="  ",
        ),
        f"    {'tokens':>6} {'projections':>12} {'mixing':>10} {'feed-forward':>13} {'mixing share':>13} {'state':>10}",
    ]
    for row in counts:
        share = row["mixing"] / (row["projections"] + row["mixing"] + row["feedforward"])
        state = "none" if row["state"] is None else f"{_short(row['state'], 1024, ('', 'Ki', 'Mi', 'Gi'))}B"
        lines.append(
            f"    {row['tokens']:>6} {_short(row['projections']):>12} {'' if row['measured'] else '~'}"
            f"{_short(row['mixing']):>{10 if row['measured'] else 9}} {_short(row['feedforward']):>13} "
            f"{share:>13.0%} {state:>10}"
        )
    if not all(row["measured"] for row in counts):
        longest = max(row["tokens"] for row in counts if row["measured"])
        lines.append(f"    ~ extrapolated from counts up to {longest} tokens")
    return "\n".join(lines)


def _backend(one: dict) -> list[str]:
    """The backend of each kind of call, and the origin of the native kernels."""
    from .dispatch import format_call

    calls = [f"{kind} on {one['device']}: {format_call(call)}" for kind, call in one["calls"].items()]
    return [*(calls or [f"unknown: {one['reason']}"]), f"native kernels: {one['kernels']}"]


def _lines(equation: str) -> list[str]:
    """The parts of an equation, on separate lines if it does not fit one line."""
    return [equation] if len(equation) <= terminal.columns() - INDENT else re.split(r"(?<=,) {2,}", equation)


def _listed(name: str, texts: list[str]) -> list[str]:
    """A label and its texts, each wrapped in a paragraph next to the label."""
    return terminal.entry(f"  {name}", texts, INDENT)


def _short(number: float, base: int = 1000, letters: tuple[str, ...] = ("", "k", "M", "G", "T", "P")) -> str:
    for letter in letters:
        if number < base or letter == letters[-1]:
            return f"{number:.4g} {letter}".strip() if not letter else f"{number:.3g} {letter}"
        number /= base
    raise AssertionError("unreachable: the last letter has no limit")
