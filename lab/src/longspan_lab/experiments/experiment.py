"""Definition of an experiment, which is measured and saved point by point."""

import contextlib
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from longspan._utils import atomic_io
from longspan._utils.spec import known
from longspan.train import TrainConfig

from .._utils.tables import Table

Result = dict[str, Any]

Row = dict[str, Any]

Track = Callable[[Iterable[Any], int, str], Iterable[Any]]

QUICK = "quick"

DEVICES: dict[str, None] = {"cpu": None, "cuda": None}


class Place(NamedTuple):
    """Where a long-running point saves its progress, and how it reports it.

    ``folder``: the experiment's folder, ``out/NAME-work``, created on first use; everything in it belongs to the
    settings of ``out/NAME.json``. Additional pictures go to ``folder.parent`` as ``NAME-*.png``.
    ``track(items, total, label)``: yields the items, with a bar on a terminal.
    """

    folder: Path
    track: Track

    def load(self, name: str) -> Row | None:
        """Return what ``save`` last stored under this name; None if there is nothing.

        Raises ValueError for a file of another kind.
        """
        path = self.folder / f"{name}.pt"
        if not path.exists():
            return None
        try:
            with atomic_io.open_regular(path) as file:
                return torch.load(file, weights_only=True)
        # A foreign file can raise anything in the unpickler.
        except Exception as error:
            raise ValueError(f"{path} is corrupt or foreign; delete it") from error

    def save(self, name: str, values: Mapping[str, Any]) -> None:
        """Save plain values and tensors atomically. Raises OSError, with the file's name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        torch.save(dict(values), content)
        atomic_io.write(self.folder / f"{name}.pt", content.getvalue())


def setting(
    laptop: Any,
    what: str,
    *,
    least: int | None = None,
    positive: bool = False,
    among: Mapping[str, Any] | None = None,
    **scales: Any,
) -> Any:
    """Declare a field of an experiment's settings: its values, the help of its flag, and what it accepts.

    Args:
        laptop: the value at the laptop scale, which is the default.
        what: the help.
        least: the smallest number, for a number or for each of several.
        positive: whether the number must be above 0.
        among: the accepted names.
        scales: the values at the scales ``quick``, ``gpu`` and ``paper``. Without one, ``paper`` has the value of
            ``gpu``, and the others have that of ``laptop``.
    """
    rules = {"help": what, "least": least, "positive": positive, "among": among, "scales": scales}
    return field(default=laptop, metadata=rules)


def training(settings: Any, folder: Path, **fields: Any) -> TrainConfig:
    """A training in a folder with the settings that a ``TrainConfig`` has too, and ``fields`` in addition.

    Raises ValueError for a field out of range.
    """
    names = ("data", "length", "steps", "batch", "learning_rate", "evaluate_every", "evaluate_examples", "seed")
    same = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    more = {"warmup": min(settings.warmup, settings.steps), "save_every": settings.evaluate_every, "out": str(folder)}
    return TrainConfig(**same | more | fields)


def synthetic(settings: Any) -> dict[str, str]:
    """Return no checksums, for experiments whose seed generates all data."""
    return {}


@dataclass(frozen=True)
class Buildable:
    """The base of an experiment's settings, which checks each field as its ``setting`` declares.

    Raises ValueError for a value that a field does not accept.
    """

    def __post_init__(self):
        for one in fields(self):
            value, rules = getattr(self, one.name), one.metadata
            if rules["least"] is not None:
                at_least(rules["least"], **{one.name: value})
            if rules["positive"] and not value > 0:
                raise ValueError(f"{one.name}={value} must be positive")
            if rules["among"] is not None:
                known(value, rules["among"], one.name)

    @classmethod
    def at(cls, scale: str) -> Self:
        """Return the settings of a scale, see ``setting``."""
        order = ("paper", "gpu") if scale == "paper" else (scale,)
        given = {one.name: one.metadata["scales"] for one in fields(cls)}
        return cls(**{name: of[one] for name, of in given.items() for one in reversed(order) if one in of})

    @classmethod
    def scales(cls, *larger: str) -> dict[str, Self]:
        """Return the settings of the scale ``laptop`` and of the larger ones."""
        return {scale: cls.at(scale) for scale in ("laptop", *larger)}

    def same(self, *names: str) -> dict[str, Any]:
        """The settings of these names, for a config whose fields have the same names."""
        return {name: getattr(self, name) for name in names}

    def buildable(self) -> None:
        """Raise ValueError for a model that cannot be built.

        Called before the first point is measured, so that errors come early. Not called when settings are created,
        because every import creates those of all scales, and building models takes time even without memory.
        """


class Experiment(NamedTuple):
    """A published result that can be reproduced.

    ``scales`` (name -> settings; always "laptop", for some "gpu" and "paper") and ``quick`` are frozen
    dataclasses of the same type, a ``Buildable``, whose fields (int, float, str, and tuples of numbers
    or strings, each with a ``help`` in its metadata) are the flags of the command. ``points`` lists what to
    measure as plain dicts; ``measure(settings, point, place)`` returns one point's figures, which depend on the
    settings and the point alone, except for timings; ``tables`` and ``draw`` show the result, which ``run`` describes.
    """

    about: str
    scales: dict[str, Any]
    quick: Any
    points: Callable[[Any], list[Row]]
    measure: Callable[[Any, Row, Place], Row]
    tables: Callable[[Result], list[Table]]
    draw: Callable[[Any, Result], Any]
    source: str  # what is reproduced, and the source of the published figures
    differs: str  # deviations from the publication and their reasons, in sentences
    data: Callable[[Any], dict[str, str]] = synthetic  # settings -> name -> sha256 of the data used
    takes: tuple[str, ...] = ("data",)  # settings that name data; see ``with_data``
    minutes: float = 0.0  # processor time of the laptop scale, from earlier runs; 0: unknown
    needs: tuple[str, ...] = ()  # further packages whose versions are recorded

    def settings(self, scale: str) -> Any:
        """Return the settings of a scale, or the quick ones. Raises ValueError for an unknown scale."""
        if scale == QUICK:
            return self.quick
        if scale not in self.scales:
            raise ValueError(f"this experiment has no scale {scale!r}; it has: {', '.join(self.scales)}")
        return self.scales[scale]

    def with_data(self, settings: Any, folder: Path) -> Any:
        """Return the settings with the data in ``folder``: a setting of ``takes`` that is the bare name of a folder in
        it, as ``mnist`` or one of several words with semicolons between, becomes ``mnist:FOLDER/mnist``.

        A setting with an explicit source, such as ``text:stdlib``, stays.
        """

        def placed(word: str) -> str:
            return f"{word}:{folder / word}" if word.isidentifier() and (folder / word).is_dir() else word

        words = {one.name: getattr(settings, one.name).split(";") for one in fields(settings) if one.name in self.takes}
        return replace(settings, **{name: "; ".join(placed(one.strip()) for one in words[name]) for name in words})


def generator(seed: int, *names: object) -> torch.Generator:
    """Return a generator that depends on these arguments alone, so that points can be measured in any order."""
    digest = hashlib.sha256(json.dumps([seed, *names], sort_keys=True).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


@contextlib.contextmanager
def drawing(seed: int, *names: object) -> Iterator[None]:
    """Seed PyTorch inside the context from these arguments; the outer random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, *names).initial_seed())
        yield


def words(value: Any) -> str:
    """Format a setting as on the command line, several values separated by commas."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def at_least(least: int, **values: int | tuple[int, ...]) -> None:
    """Raise ValueError unless each number is at least ``least``."""
    for name, value in values.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not numbers or min(numbers) < least:
            raise ValueError(f"{name}={words(value)} must be at least {least}")


def check_device(name: str) -> None:
    """Raise ValueError if torch does not see the device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch sees no GPU here; --device cpu measures on the processor")
