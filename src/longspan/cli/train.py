"""``longspan train``: train a model from a recipe or from flags."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from .. import data
from .._utils import atomic_io, signals
from .._utils.spec import known
from .._utils.typecheck import format_value
from ..attention import plugins
from ..models import checkpoint, stacks
from ..models.config import DecoderConfig, EncoderConfig, Seq2SeqConfig
from ..train import recipes
from .parser import Parser, make

SECTIONS = ("model", "run", "resume")
CONFIG_CLASSES = {"decoder": DecoderConfig, "seq2seq": Seq2SeqConfig, "encoder": EncoderConfig}
DEEPEST = 8  # largest nesting of a recipe
ANY_VOCAB = 256  # stands for a vocabulary size that only the data determine
MEMORY = "--run.batch, --run.length or the sizes of the model"


class _Parser(Parser):
    kind = "decoder"

    def read(self, words: list[str]) -> jsonargparse.Namespace:
        # Replace the name of a recipe by its file, in "--config NAME" and "--config=NAME".
        words, found = list(words), {}
        for i, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name != "--config" or not (equals or words[i + 1 :]):
                continue
            path, recipe = _recipe(value if equals else words[i + 1])
            found[path] = recipe
            words[i if equals else i + 1] = f"--config={path}" if equals else path
        kind = _kind(words, list(found.values()))
        for path, recipe in found.items():
            _check_fields(path, recipe, kind)
        return super().read(words) if kind == self.kind else parser_of(kind).read(words)


def parser() -> Parser:
    return parser_of("decoder")


def parser_of(kind: str) -> Parser:
    """The parser for a kind of model; the fields of its config are flags."""
    from ..train import TrainConfig

    # The docstrings under the fields become the help of the flags.
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = make(
        "train",
        "Train a decoder, an encoder-decoder (on pairs) or an encoder (on labeled texts). A recipe is a YAML file "
        "with two entries, model and run. Every field of a recipe is also a flag; a flag overrides the recipes before "
        "it. With model.vocab 0 the data determine the vocabulary size; the same holds for an encoder's model.outputs "
        "and model.labels.\n\nThe run directory gets config.yaml, checkpoints and metrics. Ctrl-C, SIGTERM or SIGHUP "
        "saves a checkpoint and stops; a second signal stops immediately. --resume continues, bit for bit as if the "
        "run had not stopped.",
        "longspan train --config digits --run.steps 100 --run.out runs/digits",
        "longspan train --config text --run.data text:book.txt --run.out runs/book",
        "longspan train --config dates --run.data pairs:FILE --run.out runs/pairs",
        "longspan train --config labels --run.data labels:FILE --run.out runs/labels",
        "longspan train --config runs/digits/config.yaml --resume",
        "longspan train --model.vocab 17 --model.dim 64 --run.data digits --print_config",
        cls=_Parser,
    )
    parser.add_argument(
        "--config",
        action="config",
        metavar="RECIPE",
        help=f"a YAML file, or a recipe of longspan by name: {', '.join(recipes.names())}; can be repeated",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in run.out")
    parser.add_argument(
        "--model.kind",
        type=str,
        default=kind,
        metavar="KIND",
        help="decoder, seq2seq (an encoder-decoder, for pairs) or encoder (for labeled texts); print the fields of "
        "each with longspan train --model.kind KIND --help",
    )
    parser.add_class_arguments(CONFIG_CLASSES[kind], "model")
    parser.add_class_arguments(TrainConfig, "run")
    parser.set_defaults({"model.vocab": 0})
    parser.kind = kind  # pyright: ignore[reportAttributeAccessIssue] (read by the help)
    return parser


def run(args) -> int:
    from ..train import TrainConfig, fit, launch, parts_right

    fields, run = args.model.as_dict(), TrainConfig(**args.run.as_dict())
    # Report a mistake in a flag before data, optional packages and the folder are used.
    _check(fields)
    launch.check(run.devices, run.nodes)
    config = checkpoint.config_of(completed(fields, run))
    try:
        result = fit(config, run, resume=args.resume)
    except KeyboardInterrupt as error:
        raise signals.with_text(error, _how_to_resume(str(error), Path(run.out) / "config.yaml")) from error
    # Only the first of several processes has the result.
    if result.bits:
        bits = ", ".join(f"{s} {value:.3f} ({result.examples[s]:,} examples)" for s, value in result.bits.items())
        bits = f"bits/{data.unit(run.data)}: {bits}{parts_right(result.exact, result.accuracy)}"
        print(f"{result.folder}: {result.steps} steps, {result.seconds:.1f} s, {bits}")
    return 0


def _check(fields: dict) -> None:
    """Raise ValueError for a model that cannot be built; only the shapes of its weights are computed."""
    config = checkpoint.config_of({**fields, "vocab": fields["vocab"] or ANY_VOCAB})
    stacks.estimate_bytes(checkpoint.MODEL_CLASSES[checkpoint.kind_of(config)][1], config)


def completed(fields: dict[str, Any], run: Any) -> dict[str, Any]:
    """Fill in the fields that the data determine: vocab 0, and the outputs and labels of a classifier."""
    if fields["vocab"] != 0:
        return fields
    found = data.load(run.data, run.length)
    if fields.get("kind") == "encoder" and isinstance(found, data.Labeled) and not fields["labels"]:
        fields = fields | {"labels": " ".join(found.labels), "outputs": fields["outputs"] or len(found.labels)}
    return fields | {"vocab": found.vocab}


def _how_to_resume(text: str, recipe: Path) -> str:
    if not recipe.exists():
        return text or "interrupted; nothing was saved"
    text = text.removesuffix("; continue with resume=True") or "interrupted"
    modules = "".join(f" --import {module}" for module in plugins.brought())
    return f"{text}; continue with: longspan train{modules} --config {shlex.quote(str(recipe))} --resume"


def _recipe(text: str) -> tuple[str, dict]:
    """The file and the content of a recipe. Raises ValueError if it is missing or has an unknown entry."""
    try:
        path = str(recipes.find(text))
    except ValueError as error:
        raise ValueError(f"--config: {error}") from error
    # A device such as /dev/zero never ends.
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"--config: {path!r} is not a file")
    try:
        content = atomic_io.read_text(Path(path))
    except ValueError as error:
        raise ValueError(f"--config: {error}") from error
    try:
        _plain(path, content)
        recipe = yaml.safe_load(content)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"--config: {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"--config: {path} is not a recipe; a recipe is a mapping with the entries model and run")
    for section, values in recipe.items():
        known(str(section), dict.fromkeys(SECTIONS), f"entry of {path}")
        if section == "resume":
            continue
        if not isinstance(values, dict):
            raise ValueError(f"--config: {section} of {path} must map fields to values, got {format_value(values)}")
    return path, recipe


def _kind(words: list[str], recipes: list[dict]) -> str:
    """The kind of model in the flags, or else in the last recipe."""
    kinds = [recipe["model"]["kind"] for recipe in recipes if "kind" in recipe.get("model", {})]
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == "--model.kind":
            kinds.append(value if equals else after)
    return known(str(kinds[-1]), CONFIG_CLASSES, "kind of model to train") if kinds else "decoder"


def _check_fields(path: str, recipe: dict, kind: str) -> None:
    """Raise ValueError for an unknown field of a model of this kind, or of a run."""
    from ..train import TrainConfig

    for section, made in (("model", CONFIG_CLASSES[kind]), ("run", TrainConfig)):
        names = {field.name: None for field in dataclasses.fields(made)} | (
            {"kind": None} if section == "model" else {}
        )
        for name in recipe.get(section, {}):
            if (
                kind == "decoder"
                and section == "model"
                and name in {field.name for field in dataclasses.fields(Seq2SeqConfig)} - set(names)
            ):
                raise ValueError(
                    f"--config: model.{name} of {path} is a field of an encoder-decoder; add kind: seq2seq"
                )
            known(str(name), names, f"field of {section} in {path}")


def _plain(path: str, text: str) -> None:
    """Raise ValueError for aliases and deep nesting, which can make a small YAML file huge or slow."""
    depth = 0
    for event in yaml.parse(text):
        # A few nested aliases expand to more than any memory, for example in an error message.
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"--config: {path} has aliases (*name); write each value where it is used")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(
                f"--config: {path} is nested more than {DEEPEST} levels deep; a recipe maps two entries to fields"
            )
