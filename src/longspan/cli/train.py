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
DEEPEST = 8
ANY_VOCAB = 256  # stands for the number of tokens that only the data know
MEMORY = "--run.batch, --run.length or the sizes of the model"


class _Parser(Parser):
    kind = "decoder"

    def read(self, words: list[str]) -> jsonargparse.Namespace:
        # A recipe by its name becomes its file; "--config NAME" and "--config=NAME" alike.
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
        return super().read(words) if kind == self.kind else _made(kind).read(words)


def parser() -> Parser:
    return _made("decoder")


def _made(kind: str) -> Parser:
    """The parser for a kind of model, whose fields are its flags."""
    from ..train import TrainConfig

    # The docstrings under the fields become the flags' help.
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = make(
        "train",
        "Train a decoder, on pairs an encoder-decoder, or on labelled texts an encoder. A recipe is a YAML file with "
        "the two entries model and run; every field of it is also a flag, and flags win over the recipes before them; "
        "model.vocab 0 takes that of the data, and so do an encoder's model.outputs and model.labels. The run's folder "
        "gets config.yaml, checkpoints and metrics. Ctrl-C, SIGTERM or SIGHUP saves one from which --resume goes on to "
        "the very same result; a second one ends at once.",
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
        help=f"recipe: a YAML file with model and run, or one by name: {', '.join(recipes.names())}",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in run.out")
    parser.add_argument(
        "--model.kind",
        type=str,
        default=kind,
        help="decoder | seq2seq: an encoder-decoder, for pairs | encoder: for labelled texts; each has its own fields: "
        "longspan train --model.kind seq2seq --help",
    )
    parser.add_class_arguments(CONFIG_CLASSES[kind], "model")
    parser.add_class_arguments(TrainConfig, "run")
    parser.set_defaults({"model.vocab": 0})
    parser.kind = kind  # type: ignore[attr-defined]
    return parser


def run(args) -> int:
    from ..train import TrainConfig, fit, launch, parts_right

    fields, run = args.model.as_dict(), TrainConfig(**args.run.as_dict())
    # A mistake in a flag is reported before data, optional packages and the folder are looked at.
    _check(fields)
    launch.check(run.devices)
    config = checkpoint.config_of(completed(fields, run))
    try:
        result = fit(config, run, resume=args.resume)
    except KeyboardInterrupt as error:
        raise signals.told(error, _how_to_go_on(str(error), Path(run.out) / "config.yaml")) from error
    # Of several processes only the first one has the result.
    if result.bits:
        bits = ", ".join(f"{s} {value:.3f} ({result.examples[s]:,} examples)" for s, value in result.bits.items())
        bits = f"bits/{data.unit(run.data)}: {bits}{parts_right(result.exact, result.accuracy)}"
        print(f"{result.folder}: {result.steps} steps, {result.seconds:.1f} s, {bits}")
    return 0


def _check(fields: dict) -> None:
    """Raise ValueError for a model that cannot be built; its weights get shapes and no memory."""
    config = checkpoint.config_of({**fields, "vocab": fields["vocab"] or ANY_VOCAB})
    stacks.estimate_bytes(checkpoint.MODEL_CLASSES[checkpoint.kind_of(config)][1], config)


def completed(fields: dict[str, Any], run: Any) -> dict[str, Any]:
    """A model's fields with those that the data of the run determine: vocab 0, and the labels of a classifier."""
    if fields["vocab"] != 0:
        return fields
    found = data.load(run.data, run.length)
    if fields.get("kind") == "encoder" and isinstance(found, data.Labelled) and not fields["labels"]:
        fields = fields | {"labels": " ".join(found.labels), "outputs": fields["outputs"] or len(found.labels)}
    return fields | {"vocab": found.vocab}


def _how_to_go_on(said: str, recipe: Path) -> str:
    if not recipe.exists():
        return said or "interrupted; nothing was saved"
    said = said.removesuffix("; go on with resume") or "interrupted"
    modules = "".join(f" --import {module}" for module in plugins.brought())
    return f"{said}; go on with: longspan train{modules} --config {shlex.quote(str(recipe))} --resume"


def _recipe(text: str) -> tuple[str, dict]:
    """A recipe's file and content. Raises ValueError where it is missing, or has an entry that is not known."""
    try:
        path = str(recipes.find(text))
    except ValueError as error:
        raise ValueError(f"--config: {error}") from error
    # A device such as /dev/zero has no end.
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"--config: {path!r} is no file")
    try:
        content = atomic_io.read_text(Path(path))
    except ValueError as error:
        raise ValueError(f"--config: {error}") from error
    try:
        _plain(path, content)
        recipe = yaml.safe_load(content)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"--config: {path} is no YAML of a recipe: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"--config: {path} is no recipe, which has the entries model and run")
    for section, values in recipe.items():
        known(str(section), dict.fromkeys(SECTIONS), f"entry of {path}")
        if section == "resume":
            continue
        if not isinstance(values, dict):
            raise ValueError(f"--config: {section} of {path} must map fields to values, not be {format_value(values)}")
    return path, recipe


def _kind(words: list[str], recipes: list[dict]) -> str:
    """The kind of model that the flags ask for, or else the last recipe."""
    said = [recipe["model"]["kind"] for recipe in recipes if "kind" in recipe.get("model", {})]
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == "--model.kind":
            said.append(value if equals else after)
    return known(str(said[-1]), CONFIG_CLASSES, "kind of model to train") if said else "decoder"


def _check_fields(path: str, recipe: dict, kind: str) -> None:
    """Raise ValueError for a field that a model of this kind, or a run, does not have."""
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
                raise ValueError(f"--config: model.{name} of {path} belongs to an encoder-decoder; add kind: seq2seq")
            known(str(name), names, f"field of {section} in {path}")


def _plain(path: str, text: str) -> None:
    """Raise ValueError for YAML that is small as a text and large, or slow, as what it means."""
    depth = 0
    for event in yaml.parse(text):
        # A few aliases of aliases are larger than any memory when they are written out, as messages do.
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"--config: {path} has aliases (*name); a recipe says each value where it belongs")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(
                f"--config: {path} is nested more than {DEEPEST} deep; a recipe maps two entries to fields"
            )
