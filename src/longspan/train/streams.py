"""The objective of streams: rows read a text in its order, with a state that goes from micro-batch to micro-batch."""

from typing import Any

from torch import Tensor
from torch import distributed as dist

from ..data import Dataset
from ..data.streams import Stream, Stretch, row_windows
from ..model import Decoder
from . import along
from .carry import Carry
from .objective import NextToken
from .run import Run


class Streams(NextToken):
    """A decoder predicts each token of a text from those before it, also from those of earlier micro-batches.

    The states of the rows are part of the checkpoint, those of all ranks in the order of one process with as many rows;
    where the rows stand in the text follows from the number of the micro-batch. Evaluations carry states, too.

    Raises ValueError for images, and for a text too short for a stretch a row.
    """

    def __init__(self, run: Run, dataset: Dataset):
        super().__init__(run, dataset)
        self.stream = Stream(dataset, "train")
        row_windows(self.stream.count, 0, run.batch, 0, run.devices)
        self.carry: Carry | None = None
        self.saved: list[Tensor] = []

    def batch(self, index: int, rank: int, world: int) -> Stretch:
        windows = row_windows(self.stream.count, index, self.run.batch, rank, world)
        return self.stream.take(windows, fresh=index == 0)

    def read(self, model: Decoder, batch: Any, record: dict | None) -> tuple[Tensor, Tensor, Tensor | None]:
        stretch = Stretch(*batch)
        if self.carry is None:
            self.carry = Carry(model, self.run.batch)
            if self.saved:
                self.carry.restore(self.saved, *_place())
                self.saved = []
        state = self.carry.begin(stretch.fresh)
        outputs, state = model(stretch.inputs, state, segments=stretch.segments, record=record)
        assert state is not None
        self.carry.end(state)
        return outputs, stretch.targets, stretch.segments

    def get_extra_state(self) -> dict[str, list[Tensor]]:
        """The rows' states, for the checkpoint; every rank must call."""
        return {"leaves": self.saved if self.carry is None else self.carry.leaves(_place()[1])}

    def set_extra_state(self, state: dict[str, list[Tensor]]) -> None:
        """Take them from a checkpoint; the first micro-batch goes on with them."""
        self.carry, self.saved = None, state["leaves"]

    def sums(self, model: Decoder, split: str, rank: int = 0, world: int = 1) -> Tensor:
        examples = self.run.evaluate_examples
        rows = along.rows(self.dataset, split, examples)
        return along.carried(model, self.dataset, split, rows, examples, rank, world)


def _place() -> tuple[int, int]:
    """The rank of this process and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
