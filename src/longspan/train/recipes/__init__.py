"""Training runs by name: the YAML files in this folder, for ``longspan train --config NAME``."""

from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """The recipes that are here."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def find(text: str) -> Path:
    """The file that is meant by a path or by a name of a recipe here; a file of that path comes first.

    Raises ValueError where there is neither.
    """
    if Path(text).exists():
        return Path(text)
    if text not in names():
        raise ValueError(f"cannot read {text!r}: No such file; the recipes inside longspan are {', '.join(names())}")
    return FOLDER / f"{text}.yaml"
