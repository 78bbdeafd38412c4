"""Where experiments of tests keep what they measure, watched by nobody."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longspan_lab.experiments.experiment import Place


def unwatched(items: Iterable[Any], *_: Any) -> Iterable[Any]:
    return items


NOWHERE = Place(Path("nowhere"), unwatched)
