"""Mutated configs and recipes: a good object that can be said again, or a refusal in one line.

Fields of ``DecoderConfig``, ``EncoderConfig`` and ``TrainConfig`` set to what no field expects, and recipes in YAML,
read as ``longspan train`` reads them, with typed values, cut, doubled and nested: exit code 0 or 2 and one line on
stderr. Nothing is trained.
"""

import contextlib
import functools
import io
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import yaml

from longspan import DecoderConfig, EncoderConfig
from longspan._utils import model_memory
from longspan.cli import entry
from longspan.models.decoder import Decoder
from longspan.models.encoder import Encoder
from longspan.train import TrainConfig

from . import Case
from ._bounds import bounded, complaint

SHORT, LONG = 60, 6_000
SECONDS, GIB = 10.0, 0.5
KINDS: tuple[Any, ...] = (DecoderConfig, EncoderConfig, TrainConfig)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, 10**9, 10**23, 10**6, 10**400),
    *(0.0, 0.5, -0.5, 1.0, 1e-300, 1e39, float("inf"), float("-inf"), float("nan"), 1j, b"x", object, (), (1,), []),
    *([3],),
    *({}, {"a": 1}, "", " ", "x", "linear", "linear;", "softmax; linear", "star", "logistics", "none", "0", "1e3"),
    *("nan",),
    *("linear(eps=1e999)", "performer(features=100000000)", "\0", "\ud800", "\u2028", "a" * 5000, "(" * 5000),
)
TEXTS = (
    *("null", "~", "true", "yes", "1e3", "1_000", "0x10", ".nan", ".inf", "-.inf", "2020-01-01", "[]", "{}", "[1, 2]"),
    *("'x'", '"\\0"', "!!python/object/apply:os.system [ls]", "!!binary aGk=", "!!set {a}", "<<", "*a", "&a [*a]"),
    *("&a [1]", "? x", "%TAG", "---", "...", "5", "-1", "1000000000000", "99999999999999999999999", "|\n  x", ": :"),
    *("- -",),
    *("'" * 3, "\t", "[" * 3000, "{a: " * 200, "#", "@", "`"),
)
RECIPE = (
    "model:\n  dim: 16\n  depth: 2\n  heads: 2\n  vocab: 17\n  attention: linear\n"
    + "run:\n  data: digits\n  steps: 3\n"
)


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    draw = random.Random(seed)
    for i in range(count):
        if draw.random() < 0.6:
            kind = draw.choice(KINDS)
            names = [field.name for field in fields(kind)]
            values = {
                draw.choice([*names, *names, "x", 3, None]): draw.choice(VALUES) for _ in range(draw.randint(1, 3))
            }
            yield f"{i} {kind.__name__} {str(values)[:80]}", functools.partial(_fields, kind, values)
        else:
            text = _recipe(draw)
            path = folder / f"{i}.yaml"
            yield f"{i} recipe {text[:200]!r}", functools.partial(_read, path, text)


def _fields(kind: Any, values: Any) -> str | None:
    try:
        with bounded(SECONDS, GIB), mock.patch.object(model_memory, "memory", return_value=1 << 28):
            made = kind(**values) if all(isinstance(name, str) for name in values) and "x" not in values else None
            made = kind.from_dict(values) if kind is not TrainConfig else made or TrainConfig(**values)
            if kind(**json.loads(json.dumps(asdict(made), allow_nan=False))) != made:
                return f"{made} does not survive JSON"
            if kind is not TrainConfig and made.depth <= 8:
                (Decoder if kind is DecoderConfig else Encoder)(made)
    except TypeError as error:
        # Python's own, for an argument that does not exist.
        return None if "argument" in str(error) or "keywords" in str(error) else complaint(error)
    except Exception as error:
        return complaint(error)
    return None


def _recipe(draw: random.Random) -> str:
    lines = RECIPE.splitlines(keepends=True)
    for _ in range(draw.randint(1, 2)):
        at = draw.randrange(len(lines))
        key, colon, _ = lines[at].partition(":")
        section = next(line for line in lines[at::-1] if not line.startswith(" ")) if lines[0][:1] != " " else "model"
        names = [field.name for field in fields(DecoderConfig if section.startswith("model") else TrainConfig)]
        match draw.randrange(5):
            case 0:
                lines[at] = f"{key}{colon} {draw.choice(TEXTS)}\n"
            case 1:
                lines.insert(at + 1, f"  {draw.choice(names)}: {draw.choice(TEXTS)}\n")
            case 2:
                lines[at] = draw.choice(TEXTS) + "\n"
            case 3:
                lines.insert(at, lines[at].replace(":", draw.choice((":", "", "::", ": &a", " :"))))
            case 4:
                text = "".join(lines)
                lines = (text[: draw.randrange(len(text))] + draw.choice(TEXTS)).splitlines(keepends=True)
    return "".join(lines)


def _read(path: Path, text: str) -> str | None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    err = io.StringIO()
    nothing = SimpleNamespace(bits={})
    try:
        with (
            bounded(SECONDS, GIB),
            mock.patch("longspan.train.fit", return_value=nothing),
            mock.patch("longspan.data.load", return_value=SimpleNamespace(vocab=17)),
            contextlib.redirect_stderr(err),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            code = entry.main(["train", "--config", str(path)])
    except Exception as error:
        return complaint(error) or f"a {type(error).__name__} came through the command line: {error}"
    finally:
        path.unlink()
    if code == 0:
        with contextlib.suppress(yaml.YAMLError):
            return None if isinstance(yaml.safe_load(text), dict) else "what is no recipe was read as one"
    if code != entry.WRONG or err.getvalue().count("\n") != 1 or len(err.getvalue()) > 2000:
        return f"exit code {code} and {err.getvalue()[:200]!r}"
    return None
