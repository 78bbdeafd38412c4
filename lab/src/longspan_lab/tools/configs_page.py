"""Write the reference page of all configs from their dataclasses; ``make docs`` runs it."""

import ast
import dataclasses
import inspect
import textwrap
from inspect import cleandoc

from longspan.models.config import DecoderConfig, EncoderConfig, Seq2SeqConfig, StackConfig, TranscriberConfig
from longspan.train.config import TrainConfig

from . import DOCS

CONFIGS = (StackConfig, DecoderConfig, EncoderConfig, Seq2SeqConfig, TranscriberConfig, TrainConfig)
OPENING = """\
Configs are frozen dataclasses of plain values. Their fields are the entries of a recipe and the flags of
[`longspan train`](../how-to/train-from-the-cli.md): the fields of a model's config under `model`, those of
`TrainConfig` under `run`. `from_dict` and `to_dict` convert a model's config. An unknown field or a value of another
type raises `ValueError`. [](models.md) describes the options of `attention`, `stack`, `residual` and `positions`."""


def meanings(cls: type) -> dict[str, str]:
    """The docstring below each field that a class defines itself."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found


def section(cls: type) -> str:
    """A class with its summary, its base class and a table of the fields that it defines."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    base = cls.__base__
    rows = (
        f"| `{name}` | {_name(fields[name].type)} | `{_cell(repr(fields[name].default))}` | {_cell(meaning)} |"
        for name, meaning in meanings(cls).items()
    )
    inherited = (
        (f"It has all fields of [`{base.__name__}`](#{base.__name__.lower()}), and:",)
        if base is not None and dataclasses.is_dataclass(base)
        else ()
    )
    table = "\n".join(("| field | type | default | meaning |", "|---|---|---|---|", *rows))
    return "\n\n".join((f"## {cls.__name__}", cleandoc(cls.__doc__ or "").partition("\n")[0], *inherited, table))


def page() -> str:
    """Every config with its fields, as Markdown."""
    return "\n\n".join(("# Configs", OPENING, *map(section, CONFIGS))) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _name(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


PAGES = {DOCS / "reference" / "configs.md": page}
