"""What an experiment is, and how one runs: point by point, each kept as soon as it is done."""

import contextlib
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._utils import atomic_io
from .._utils.tables import Table

Result = dict[str, Any]

Row = dict[str, Any]

Track = Callable[[Iterable[Any], int, str], Iterable[Any]]

QUICK = "quick"

DEVICES: dict[str, None] = {"cpu": None, "cuda": None}


class Place(NamedTuple):
    """Where a point that takes long may keep what it has, and how it shows that it is getting on.

    ``folder``: the experiment's own, ``out/NAME-work``, made by who first needs it; everything in it belongs to the
    settings of ``out/NAME.json``. Pictures besides the experiment's own go to ``folder.parent`` as ``NAME-*.png``.
    ``track(items, total, label)``: yields the items, with a bar on a terminal.
    """

    folder: Path
    track: Track

    def load(self, name: str) -> Row | None:
        """What ``save`` was last given under this name; None where there is nothing.

        Raises ValueError for a file of another kind.
        """
        path = self.folder / f"{name}.pt"
        if not path.exists():
            return None
        try:
            with atomic_io.open_regular(path) as file:
                return torch.load(file, weights_only=True)
        # A foreign file may make the unpickler stumble over anything.
        except Exception as error:
            raise ValueError(f"{path} is corrupt or foreign; delete it") from error

    def save(self, name: str, values: Mapping[str, Any]) -> None:
        """Keep plain values and tensors, whole or not at all. Raises OSError, with the file's name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        torch.save(dict(values), content)
        atomic_io.write(self.folder / f"{name}.pt", content.getvalue())


def setting(default: Any, what: str) -> Any:
    """A field of an experiment's settings: its default, and what the help of its flag says."""
    return field(default=default, metadata={"help": what})


def synthetic(settings: Any) -> dict[str, str]:
    """No data but what the seed makes."""
    return {}


class Buildable:
    """The base of an experiment's settings."""

    def buildable(self) -> None:
        """Raise ValueError for a model that cannot be built.

        Asked before any point is measured, since it should not wait for its turn; and not when settings are made, as
        those of all scales are with the module: models take time, even where they are nothing but shapes.
        """


class Experiment(NamedTuple):
    """A published result that can be had again.

    ``scales`` (name -> settings; "laptop" always, "gpu" and "paper" where there is more) and ``quick`` are frozen
    dataclasses of the same type, a ``Buildable``, whose fields (whole and broken numbers, words, and tuples of numbers
    or words, each with a ``help`` in its metadata) are the flags of the command. ``points`` lists what is to be
    measured as plain dicts; ``measure(settings, point, place)`` gives one point's figures, which depend on the settings
    and the point alone, except for timings; ``tables`` and ``draw`` show the result, which ``run`` describes.
    """

    about: str
    scales: dict[str, Any]
    quick: Any
    points: Callable[[Any], list[Row]]
    measure: Callable[[Any, Row, Place], Row]
    tables: Callable[[Result], list[Table]]
    draw: Callable[[Any, Result], Any]
    source: str  # what is reproduced, and where the published figures, if there are any, are from
    differs: str  # what is not as published, and why, in sentences
    data: Callable[[Any], dict[str, str]] = synthetic  # settings -> name -> sha256 of the data used
    takes: tuple[str, ...] = ("data",)  # settings, where there are such, that name data; see ``beside``
    minutes: float = 0.0  # of processor time that the scale of a laptop takes, as far as runs tell; 0: not known
    needs: tuple[str, ...] = ()  # packages besides those that draw, whose versions are written down

    def settings(self, scale: str) -> Any:
        """The settings of a scale, or the quick ones. Raises ValueError for a scale that there is not."""
        if scale == QUICK:
            return self.quick
        if scale not in self.scales:
            raise ValueError(f"this experiment has no scale {scale!r}; it has: {', '.join(self.scales)}")
        return self.scales[scale]

    def beside(self, settings: Any, folder: Path) -> Any:
        """The settings with the data that ``folder`` has: a setting of ``takes`` that is the bare name of a folder in
        it, as ``mnist`` or one of several words with semicolons between, becomes ``mnist:FOLDER/mnist``.

        What names its source itself stays, as ``text:stdlib`` does.
        """

        def placed(word: str) -> str:
            return f"{word}:{folder / word}" if word.isidentifier() and (folder / word).is_dir() else word

        words = {one.name: getattr(settings, one.name).split(";") for one in fields(settings) if one.name in self.takes}
        return replace(settings, **{name: "; ".join(placed(one.strip()) for one in words[name]) for name in words})


def generator(seed: int, *names: object) -> torch.Generator:
    """Random numbers that depend on these arguments alone, so that points can be measured in any order."""
    digest = hashlib.sha256(json.dumps([seed, *names], sort_keys=True).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


@contextlib.contextmanager
def drawing(seed: int, *names: object) -> Iterator[None]:
    """What PyTorch draws inside, as some mechanisms do, depends on these alone, and nothing outside on that."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, *names).initial_seed())
        yield


def words(value: Any) -> str:
    """A setting as it is typed: several values with commas between."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def at_least(least: int, **values: int | tuple[int, ...]) -> None:
    """Raise ValueError unless each of these numbers, or each of several, is that large."""
    for name, value in values.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not numbers or min(numbers) < least:
            raise ValueError(f"{name}={words(value)} must be at least {least}")


def check_device(name: str) -> None:
    """Raise ValueError where torch does not see the device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch sees no GPU here; --device cpu measures on the processor")
