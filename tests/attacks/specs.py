"""Mutated specs of mechanisms, patterns and likelihoods: each builds and can be said again, or is refused in one line.

Values that no option expects, options that are missing or doubled, characters that come, go and change places, deep
nesting, halves of two specs: within seconds and half a GiB of memory. What was built is called once, and its ``spec``
builds the same again.
"""

import functools
import inspect
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import longspan
from longspan import patterns
from longspan._utils import model_memory, spec, typecheck
from longspan.attention import REGISTRY, Attention
from longspan.attention.base import own_options
from longspan.models import likelihood

from . import Case
from ._bounds import bounded, complaint

SHORT, LONG = 250, 20_000
SECONDS, GIB = 10.0, 0.5
PATTERNS = (
    *("causal", "band(3)", "band(3, 2)", "dilated(2, 3)", "strided(3)", "block(4)", "blockwise(3, 1)", "fixed(4, 1)"),
    *("globals(2)", "globals((1, 5))", "prefix(3)", "random(2)", "random(2, seed=3, block=4)", "rows(3)", "columns(3)"),
    *("local1d(3, 4)", "local2d((2, 2), (1, 1), 6)", "by_head(band(1), strided(2))", "by_layer(band(1), causal)"),
    *("causal & (band(2) | globals(1))", "everywhere - band(2)", "(band(5) - band(2)) & causal | prefix(2)"),
)
LIKELIHOODS = ("categorical", "logistics", "logistics(mixtures=3)")
VALUES = (
    *("0", "1", "2", "3", "-1", "-3", "17", "4096", "100000000", "2147483648", "4611686018427387904"),
    *("9223372036854775807", "9223372036854775808", "99999999999999999999999", "0.0", "0.5", "-0.5", "1.5", "1e-9"),
    *("1e-400", "1e30", "1e39", "1e300", "1e999", "-1e999", "True", "False", "None", "'x'", "''", "'elu'"),
    *("'dense+dot'", "()", "(1,)", "(1, 2)", "(2, 3, 4)", "('a', 'b')", "[]", "[3]", "((1, 2), 3)", "{}"),
    *("lambda: 0", "band", "band(2)", "'band(2)'", "linear", "linear()", "'band(99999999999)'", "x", "1 + 1"),
    *("b'x'", "1j", "...", "'random(100000000)'", "'band(1) - globals(100000000)'"),
)
CHARACTERS = "()[]{},;=|&-+*'\"\\ \t\n\0.:#@!~^<>01234567899eExXabck_\u00e9\u2028\ud800\U0001f600"


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    draw = random.Random(seed)
    things: tuple[tuple[str, Callable[[str], str | None], list[str]], ...] = (
        (
            "attention",
            _attention,
            [text for name in longspan.list_mechanisms() for text in longspan.mechanism_examples(name)],
        ),
        ("pattern", _pattern, list(PATTERNS)),
        ("likelihood", _likelihood, list(LIKELIHOODS)),
    )
    for i in range(count):
        name, build, texts = draw.choices(things, (6, 3, 1))[0]
        text = draw.choice(texts)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            text = draw.choice((_value, _value, _value, _characters, _nested, _spliced))(draw, text, texts)
        yield f"{i} {name} {typecheck.format_value(text)}", functools.partial(_held, build, text)


def _held(build: Callable[[str], str | None], text: str) -> str | None:
    try:
        # A machine with little memory, so that what is refused for that is refused here.
        with bounded(SECONDS, GIB), mock.patch.object(model_memory, "memory", return_value=1 << 28):
            return build(text)
    except Exception as error:
        return complaint(error)


def _attention(text: str) -> str | None:
    def made(text: str) -> Attention:
        causal = not re.match(r"\W*(star|etc)\b", text)
        return longspan.build(text, 12, 4, causal=causal)

    built = made(text)
    again = made(built.spec)
    shapes = [{name: t.shape for name, t in one.state_dict().items()} for one in (built, again)]
    if again.spec != built.spec or shapes[0] != shapes[1]:
        return f"its spec {built.spec} builds {again.spec}"
    if getattr(built, "context_dim", 0) in (0, 12):
        try:
            with torch.no_grad():
                built(torch.zeros(1, 5, 12))
        except RuntimeError as error:
            # The memory of a call beyond the weights is not predicted: docs/reference/guarantees.md.
            if "allocate memory" not in str(error):
                raise
    return None


def _pattern(text: str) -> str | None:
    built = patterns.parse(text)
    if patterns.parse(repr(built)) != built:
        return f"its repr {built!r} is another pattern"
    seen = built.dense(7, heads=2)
    for bound, gap in ((built.lookback, 1), (built.lookahead, -1)):
        far = (torch.arange(7)[:, None] - torch.arange(7)) * gap
        if bound is not None and bool((seen & (far > bound)).any()):
            return f"a query looks further than {bound}"
    return None


def _likelihood(text: str) -> str | None:
    built = likelihood.build(text, 17)
    return None if likelihood.build(text, 17) == built else f"{built} is built twice differently"


def _value(draw: random.Random, text: str, texts: list[str]) -> str:
    """An option of the thing set to something."""
    name = re.split(r"\W", text, maxsplit=1)[0]
    value, options = draw.choice(VALUES), list(_options(name)) or ["x"]
    found = list(re.finditer(r"(?<==)[^,()]+|(?<=[(, ])\d+", text))
    if found and draw.random() < 0.5:
        where = draw.choice(found)
        return text[: where.start()] + value + text[where.end() :]
    given = f"{draw.choice(options)}={value}" if draw.random() < 0.9 else value
    return f"{text[:-1]}, {given})" if text.endswith(")") else f"{text}({given})"


def _options(name: str) -> Any:
    if name in REGISTRY:
        return own_options(REGISTRY[name])
    if name in patterns.NAMES:
        return inspect.signature(patterns.NAMES[name]).parameters
    return spec.options(likelihood.LIKELIHOODS[name]) if name in likelihood.LIKELIHOODS else ()


def _characters(draw: random.Random, text: str, texts: list[str]) -> str:
    for _ in range(draw.randint(1, 4)):
        at = draw.randint(0, len(text))
        new = draw.choice(CHARACTERS) * draw.choice((0, 1, 1, 1, 2, 50))
        text = text[:at] + new + text[at + draw.randint(0, 2) :]
    return text


def _nested(draw: random.Random, text: str, texts: list[str]) -> str:
    deep, inner = draw.choice((1, 2, 5, 20, 60, 100, 300, 3000, 100_000)), draw.choice(texts)
    match draw.randrange(6):
        case 0:
            return "(" * deep + text + ")" * deep
        case 1:
            return "-" * deep + text
        case 2:
            return "by_head(" * deep + text + ")" * deep
        case 3:
            return f" {draw.choice('&|-')} ".join([text, inner] * min(deep, 300))
        case 4:
            turns = min(deep, 1000)
            return f"({inner} {draw.choice('&|-')} " * turns + text + ")" * turns
    return text + "(" * deep


def _spliced(draw: random.Random, text: str, texts: list[str]) -> str:
    other = draw.choice(texts)
    return (
        text[: draw.randint(0, len(text))] + draw.choice(("", ", ", "; ", " & ")) + other[draw.randint(0, len(other)) :]
    )
