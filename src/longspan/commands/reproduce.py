"""``longspan reproduce``: published results, had again at the scale of a laptop."""

from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonargparse

from ..spec import known
from .parser import Parser, make

COMMON = (
    "Writes NAME.json after every point that is measured, and at the end NAME.png and NAME.md, all of it as Markdown. "
    "The same command goes on where an earlier one was stopped. Published figures, where there are any, stand beside "
    "ours."
)
EXAMPLES = {
    "approximation": "longspan reproduce approximation --estimators positive,trigonometric --size 64",
    "capacity": "longspan reproduce capacity --kinds dpfp1,softmax --keys 60,100,200",
    "memory": "longspan reproduce memory --tasks memory_s7 --agents LSTM,GTrXL --discount 0.99",
    "mqar": "longspan reproduce mqar --specs 'linear; gla; kda' --dims 16,32",
    "transfer": "longspan reproduce transfer --features 32,128 --finetune 300",
}


class _Reproduce(Parser):
    def read(self, words: list[str]) -> jsonargparse.Namespace:
        if not words or words[0].startswith("-"):
            return super().read(words)
        from ..reproduce import EXPERIMENTS

        name = known(words[0], EXPERIMENTS, "experiment")
        args = subparser(name, _scale(words)).read(words[1:])
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
    from ..reproduce import EXPERIMENTS

    parser = make(
        "reproduce",
        f"Have a published result again. {COMMON} longspan reproduce NAME --help has the options of each.",
        *(f"longspan reproduce {name} --quick" for name in EXPERIMENTS),
        cls=_Reproduce,
    )
    lines = ";\n".join(f"{name}: {experiment.about}" for name, experiment in EXPERIMENTS.items())
    parser.add_argument("name", type=str, help=f"one of: {lines}")
    return parser


def subparser(name: str, scale: str = "laptop") -> Parser:
    """The parser of ``longspan reproduce NAME``: every setting of the experiment is a flag, its default the scale's.

    Raises ValueError for a scale that the experiment has not.
    """
    from ..reproduce import EXPERIMENTS

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
            type=str if several else type(default),
            default=",".join(map(str, default)) if several else default,
            help=f"{one.metadata['help']}{', separated by commas' if several else ''}",
        )
    scales = " | ".join(experiment.scales)
    parser.add_argument("--scale", type=str, default="laptop", help=f"{scales}: what the settings' defaults are")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in seconds, that only show that it works")
    parser.add_argument("--out", type=str, default="reproduce", help="folder for the files")
    return parser


def run(args) -> int:
    from ..progress import track
    from ..reproduce import EXPERIMENTS, experiment, page

    one, out = EXPERIMENTS[args.name], Path(args.out)
    scale = "quick" if args.quick else args.scale
    usual = one.settings(scale)
    settings = replace(usual, **{field.name: _value(args, field.name, usual) for field in fields(usual)})
    result = experiment.run(args.name, one, scale, settings, out, track)
    print(page.show(one, result))
    files = [f"{args.name}.json", *page.pictures(out, args.name), f"{args.name}.md"]
    print(f"Files: {', '.join(str(out / file) for file in files)}")
    return 0


def _value(args: Any, name: str, settings: Any) -> Any:
    """A flag as the setting's type. Raises ValueError for a list of something else."""
    # Not getattr: a Namespace has methods of its own, such as keys.
    value, default = args[name], getattr(settings, name)
    if not isinstance(default, tuple):
        return value
    kind = type(default[0])
    try:
        return tuple(dict.fromkeys(kind(word.strip()) for word in value.split(",")))
    except ValueError as error:
        example = ",".join(map(str, default[:2]))
        raise ValueError(f"--{name}={value}: expected numbers, separated by commas: {example}") from error
