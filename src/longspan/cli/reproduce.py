"""``longspan reproduce``: published results, had again at the scale of a laptop."""

from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonargparse

from .._utils.spec import known
from ..experiments import runner
from .parser import HUGE, MANY, SEEDS, Number, Parser, kebab, make

COMMON = (
    "Writes NAME.json after every point that is measured, and at the end NAME.png and NAME.md, all of it as Markdown. "
    "The same command goes on where an earlier one was stopped. Published figures, where there are any, stand beside "
    "ours."
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
    """The scale whose settings are the defaults of the flags. Raises ValueError for two of them."""
    asked = [word.partition("=")[2] for word in words if word.startswith("--scale=")]
    asked += [after for word, after in pairwise(words) if word == "--scale"]
    if "--quick" in words and asked:
        raise ValueError(f"--quick is a scale of its own, so --scale {asked[0]} beside it is one too many")
    return "quick" if "--quick" in words else (asked or ["laptop"])[-1]


def parser() -> Parser:
    from ..experiments import EXPERIMENTS

    parser = make(
        "reproduce",
        f"Have a published result again. {COMMON} longspan reproduce NAME --help has the options of each.",
        *(f"longspan reproduce {name} --quick" for name in (ALL, *EXPERIMENTS)),
        cls=_Reproduce,
    )
    lines = ";\n".join(f"{name}: {experiment.about}" for name, experiment in EXPERIMENTS.items())
    every = f"{ALL}: each of them, one after the other"
    parser.add_argument("name", type=str, help=f"one of: {lines};\n{every}")
    return parser


def series() -> Parser:
    """The parser of ``longspan reproduce all``."""
    from ..experiments import EXPERIMENTS

    scales = dict.fromkeys(scale for one in EXPERIMENTS.values() for scale in one.scales)
    parser = make(
        f"reproduce {ALL}",
        "Run every experiment that has the scale, one after the other, and write reproduction.md, one page of all "
        "results, from their JSON files. What the folder holds already is skipped, so the same command goes on where "
        "an earlier one was stopped. One that cannot run, for want of data say, is told and the next begins; the exit "
        "code is then 1.",
        f"longspan reproduce {ALL} --scale laptop --out results",
        f"longspan reproduce {ALL} --data FOLDER --skip images,scaling",
        f"longspan reproduce {ALL} --quick",
    )
    parser.add_argument("--scale", type=str, default="laptop", help=f"{' | '.join(scales)}: how large they are")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, in a minute, that only show that all of it works"
    )
    parser.add_argument("--out", type=str, default="reproduce", help="folder for the files")
    parser.add_argument(
        "--data",
        type=str,
        default="",
        metavar="FOLDER",
        help="where data are that would otherwise be downloaded or missing: a folder that holds some of the folders "
        f"{', '.join(_kinds())}; what needs no files, as text:stdlib, is read as ever",
    )
    parser.add_argument("--only", type=str, default="", help="these experiments alone, separated by commas")
    parser.add_argument("--skip", type=str, default="", help="not these, separated by commas")
    return parser


def _kinds() -> list[str]:
    """The names of folders that experiments take from ``--data``."""
    from ..experiments import EXPERIMENTS

    settings = [(one, each) for one in EXPERIMENTS.values() for each in one.scales.values()]
    values = [getattr(each, field.name) for one, each in settings for field in fields(each) if field.name in one.takes]
    # cifar10 is the other data of the images, and the default of no scale.
    return sorted({word.strip() for value in values for word in value.split(";") if ":" not in word} | {"cifar10"})


def subparser(name: str, scale: str = "laptop") -> Parser:
    """The parser of ``longspan reproduce NAME``: every setting of the experiment is a flag, its default the scale's.

    Raises ValueError for a scale that the experiment has not.
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
    scales = " | ".join(experiment.scales)
    parser.add_argument("--scale", type=str, default="laptop", help=f"{scales}: what the settings' defaults are")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in seconds, that only show that it works")
    parser.add_argument("--out", type=str, default="reproduce", help="folder for the files")
    return parser


def _number(name: str, default: Any) -> Any:
    """The type of a setting's flag: of numbers with bounds; only a setting that is negative by default may be so."""
    kind = type(default)
    if kind not in (int, float):
        return kind
    high = SEEDS if name == "seed" else MANY if kind is int else HUGE
    return Number(kind, -high if default < 0 else 0, high)


def run(args) -> int:
    from .._utils.progress import track
    from ..experiments import EXPERIMENTS, page

    if args.name == ALL:
        return _all(args)
    one, out = EXPERIMENTS[args.name], Path(args.out)
    scale = "quick" if args.quick else args.scale
    usual = one.settings(scale)
    settings = replace(usual, **{field.name: _value(args, field.name, usual) for field in fields(usual)})
    result = runner.run(args.name, one, scale, settings, out, track)
    print(page.show(one, result))
    files = [f"{args.name}.json", *page.pictures(out, args.name), f"{args.name}.md"]
    print(f"Files: {', '.join(str(out / file) for file in files)}")
    return 0


def _all(args: Any) -> int:
    from .._utils.progress import say, track
    from ..experiments import EXPERIMENTS, every

    if args.quick and args.scale != "laptop":
        raise ValueError(f"--quick is a scale of its own, so --scale {args.scale} beside it is one too many")
    chosen, left = ([word.strip() for word in text.split(",") if word.strip()] for text in (args.only, args.skip))
    for name in (*chosen, *left):
        known(name, EXPERIMENTS, "experiment")
    if args.data and not Path(args.data).is_dir():
        raise ValueError(f"--data={args.data}: no such folder")
    scale, out = "quick" if args.quick else args.scale, Path(args.out)
    names = every.names(scale, chosen, left)
    found = every.run(names, scale, out, Path(args.data) if args.data else None, track, say)
    print(every.summary(found))
    print(f"Page: {out / every.PAGE}")
    return int(any(one.failed for one in found))


def _value(args: Any, name: str, settings: Any) -> Any:
    """A flag as the setting's type. Raises ValueError for a list of something else."""
    # Not getattr: a Namespace has methods of its own, such as keys.
    value, default = args[name], getattr(settings, name)
    if not isinstance(default, tuple):
        return value
    kind = type(default[0])
    try:
        found = tuple(dict.fromkeys(kind(word.strip()) for word in value.split(",")))
    except ValueError as error:
        example = ",".join(map(str, default[:2]))
        raise ValueError(f"--{kebab(name)}={value}: expected numbers, separated by commas: {example}") from error
    for one in found if kind in (int, float) else ():
        _number(name, min(default)).check(f"--{kebab(name)}", one)
    return found
