"""Long sequences to be classified: the tasks of the Long Range Arena, by loaders and generators of our own.

| task | tokens | sources |
|---|---|---|
| ``listops`` | 15 symbols of a nested expression; its value is one of 10 classes | ``made``, or a folder of TSV files |
| ``text`` | bytes of a review; is it a good one? | ``imdb`` (downloaded), ``imdb:FOLDER`` |
| ``image`` | grey pixels, row by row; 10 classes | ``digits``, ``mnist``, ``cifar10``, ``mnist:FOLDER`` ... |
| ``retrieval`` | bytes of two passages; are they of one document? | ``text:stdlib``, ``text:FOLDER`` |
| ``pathfinder`` | pixels; do the two discs lie on one dashed path? | ``made`` |

Source: Tay et al. 2020 (2011.04006), section 2.2.
"""

from collections.abc import Callable
from functools import lru_cache

from longspan._utils.spec import known

from . import listops, passages, pathfinder, pixels, reviews
from .sequences import Arena, Batch, Sequences

__all__ = ["TASKS", "Arena", "Batch", "Sequences", "load"]

TASKS: dict[str, Callable[..., Arena]] = {
    "listops": listops.load,
    "text": reviews.load,
    "image": pixels.load,
    "retrieval": passages.load,
    "pathfinder": pathfinder.load,
}


@lru_cache(maxsize=len(TASKS))
def load(task: str, source: str, length: int, examples: int, tests: int, seed: int = 0) -> Arena:
    """The examples of a task, the same for the same arguments.

    ``length``: most tokens of a sequence; images have their own. ``examples``: how many of training there are at most,
    ``tests``: how many of validation, and how many of the test. Files give those that come first, of each class in
    turn; what is made is drawn with the seed.

    Raises ValueError for an unknown task or source, files that are missing or of another kind, a download that fails,
    and sizes with which there is nothing to learn; ImportError where an optional package is missing.
    """
    for name, value in (("length", length), ("examples", examples), ("tests", tests)):
        if value < 1:
            raise ValueError(f"{name}={value} of {task} must be at least 1")
    return TASKS[known(task, TASKS, "task")](source, length, examples, tests, seed)
