"""``longspan reproduce``: reproduce published results at laptop scale."""

from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonargparse

from longspan._utils import terminal
from longspan._utils.spec import known
from longspan.cli.parser import HUGE, MANY, SEEDS, Number, Parser, kebab, make

from ..experiments import runner

COMMON = (
    "Writes NAME.json after every measured point, and NAME.png and NAME.md (all results as Markdown) at the end. The "
    "same command resumes a stopped run. Tables include the published figures if there are any."
)
ALL = "all"
EXAMPLES = {
    "approximation": "longspan reproduce approximation --estimators positive,trigonometric --size 64",
    "capacity": "longspan reproduce capacity --kinds dpfp1,softmax --keys 60,100,200",
    "language": "longspan reproduce language --models 'gla; lstm' --budget steps --data text:book.txt",
    "memory": "longspan reproduce memory --tasks memory_s7 --agents LSTM,GTrXL --discount 0.99",
    "mqar": "longspan reproduce mqar --specs 'linear; gla; kda' --dims 16,32",
    "transfer": "longspan reproduce transfer --features 32,128 --finetune 300",
}


class _Reproduce(Parser):
    def read(self, words: list[str]) -> jsonargparse.Namespace:
        if not words or words[0].startswith("-"):
            return super().read(words)
        from ..experiments import EXPERIMENTS

        name = known(words[0], {**EXPERIMENTS, ALL: None}, "experiment")
        made = series() if name == ALL else subparser(name, _scale(words))
        args = made.read(words[1:])
        args.name = name
        return args


def _scale(words: list[str]) -> str:
    """The scale whose settings are the defaults of the flags. Raises ValueError for two scales."""
    given = [word.partition("=")[2] for word in words if word.startswith("--scale=")]
    given += [after for word, after in pairwise(words) if word == "--scale"]
    if "--quick" in words and given:
        raise ValueError(f"--quick cannot be combined with --scale {given[0]}; pass one of them")
    return "quick" if "--quick" in words else (given or ["laptop"])[-1]


def parser() -> Parser:
    from ..experiments import EXPERIMENTS

    about = {**{name: experiment.about for name, experiment in EXPERIMENTS.items()}, ALL: "all of them, in turn"}
    lines = "\n".join(f"  {name}: {text}" for name, text in about.items())
    parser = make(
        "reproduce",
        f"Reproduce a published result at laptop scale. {COMMON}\n\nlongspan reproduce NAME --help prints the options "
        f"of an experiment. Experiments:\n\n{lines}",
        *(f"longspan reproduce {name} --quick" for name in (ALL, *EXPERIMENTS)),
        cls=_Reproduce,
    )
    parser.add_argument("name", type=str, metavar="NAME", help=f"an experiment, or {ALL}")
    return parser


def series() -> Parser:
    """The parser of ``longspan reproduce all``."""
    from ..experiments import EXPERIMENTS

    scales = dict.fromkeys(scale for one in EXPERIMENTS.values() for scale in one.scales)
    parser = make(
        f"reproduce {ALL}",
        "Run every experiment that has the scale, and write all results to reproduction.md. Results that the folder "
        "already holds are skipped, so the same command resumes a stopped run. An experiment that cannot run, for "
        "example because its data are missing, is reported and skipped; the exit code is then 1.",
        f"longspan reproduce {ALL} --scale laptop --out results",
        f"longspan reproduce {ALL} --data FOLDER --skip images,scaling",
        f"longspan reproduce {ALL} --quick",
    )
    parser.add_text("--scale", "SCALE", f"size of the experiments: {', '.join(scales)}", default="laptop")
    parser.add_flag("--quick", "use tiny sizes, as a smoke test of about a minute")
    parser.add_text("--out", "DIR", "output directory", default="reproduce")
    parser.add_text(
        "--data",
        "FOLDER",
        "directory of local data sets, used instead of downloads, with any of the subdirectories "
        f"{', '.join(_kinds())}",
    )
    parser.add_text("--only", "NAMES", "run only these, separated by commas")
    parser.add_text("--skip", "NAMES", "skip these, separated by commas")
    return parser


def _kinds() -> list[str]:
    """The names of subdirectories of ``--data`` that experiments use."""
    from ..experiments import EXPERIMENTS

    settings = [(one, each) for one in EXPERIMENTS.values() for each in one.scales.values()]
    values = [getattr(each, field.name) for one, each in settings for field in fields(each) if field.name in one.takes]
    # cifar10 is an alternative for the images, and not the default of any scale.
    return sorted({word.strip() for value in values for word in value.split(";") if ":" not in word} | {"cifar10"})


def subparser(name: str, scale: str = "laptop") -> Parser:
    """The parser of ``longspan reproduce NAME``: each setting is a flag, with the default of the scale.

    Raises ValueError for a scale that the experiment does not have.
    """
    from ..experiments import EXPERIMENTS

    experiment = EXPERIMENTS[name]
    parser = make(
        f"reproduce {name}",
        f"{experiment.about[0].upper()}{experiment.about[1:]}. After {experiment.source}. {COMMON}",
        f"longspan reproduce {name}",
        f"longspan reproduce {name} --quick",
        *([EXAMPLES[name]] if name in EXAMPLES else []),
    )
    settings = experiment.settings(scale)
    for one in fields(settings):
        default = getattr(settings, one.name)
        several = isinstance(default, tuple)
        parser.add_argument(
            f"--{one.name}",
            type=str if several else _number(one.name, default),
            default=",".join(map(str, default)) if several else default,
            help=f"{one.metadata['help']}{', separated by commas' if several else ''}",
        )
    parser.add_text(
        "--scale",
        "SCALE",
        f"scale that determines the defaults above: {', '.join(experiment.scales)}",
        default="laptop",
    )
    parser.add_flag("--quick", "use tiny sizes, as a smoke test of seconds")
    parser.add_text("--out", "DIR", "output directory", default="reproduce")
    return parser


def _number(name: str, default: Any) -> Any:
    """The type of a flag, with bounds if numeric; only settings with a negative default may be negative."""
    kind = type(default)
    if kind not in (int, float):
        return kind
    high = SEEDS if name == "seed" else MANY if kind is int else HUGE
    return Number(kind, -high if default < 0 else 0, high)


def run(args) -> int:
    from longspan._utils.progress import track

    from ..experiments import EXPERIMENTS, page

    if args.name == ALL:
        return _all(args)
    one, out = EXPERIMENTS[args.name], Path(args.out)
    scale = "quick" if args.quick else args.scale
    usual = one.settings(scale)
    settings = replace(usual, **{field.name: _value(args, field.name, usual) for field in fields(usual)})
    result = runner.run(args.name, one, scale, settings, out, track)
    print(page.show(one, result, terminal.columns()))
    files = [f"{args.name}.json", *page.pictures(out, args.name), f"{args.name}.md"]
    print(f"Files: {', '.join(str(out / file) for file in files)}")
    return 0


def _all(args: Any) -> int:
    from longspan._utils.progress import say, track

    from ..experiments import EXPERIMENTS, every

    if args.quick and args.scale != "laptop":
        raise ValueError(f"--quick cannot be combined with --scale {args.scale}; pass one of them")
    chosen, skipped = ([word.strip() for word in text.split(",") if word.strip()] for text in (args.only, args.skip))
    for name in (*chosen, *skipped):
        known(name, EXPERIMENTS, "experiment")
    if args.data and not Path(args.data).is_dir():
        raise ValueError(f"--data={args.data} is not a directory")
    scale, out = "quick" if args.quick else args.scale, Path(args.out)
    names = every.names(scale, chosen, skipped)
    found = every.run(names, scale, out, Path(args.data) if args.data else None, track, say)
    print(every.summary(found))
    print(f"Page: {out / every.PAGE}")
    return int(any(one.failed for one in found))


def _value(args: Any, name: str, settings: Any) -> Any:
    """The value of a flag in the type of the setting. Raises ValueError for a list of another type."""
    # Not getattr: a Namespace has methods, such as keys.
    value, default = args[name], getattr(settings, name)
    if not isinstance(default, tuple):
        return value
    kind = type(default[0])
    try:
        found = tuple(dict.fromkeys(kind(word.strip()) for word in value.split(",")))
    except ValueError as error:
        example = ",".join(map(str, default[:2]))
        raise ValueError(f"--{kebab(name)}={value}: expected numbers separated by commas, such as {example}") from error
    for one in found if kind in (int, float) else ():
        _number(name, min(default)).check(f"--{kebab(name)}", one)
    return found
