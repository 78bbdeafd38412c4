"""Recipes by name: the YAML files in this folder, for ``longspan train --config NAME``."""

from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """The names of the recipes."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def find(text: str) -> Path:
    """The file of a path or of a recipe's name; an existing path comes first.

    Raises ValueError if there is neither.
    """
    if Path(text).exists():
        return Path(text)
    if text not in names():
        raise ValueError(f"cannot read {text!r}: No such file; recipes of longspan: {', '.join(names())}")
    return FOLDER / f"{text}.yaml"
