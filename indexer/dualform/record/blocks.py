"""A step's metadata: one block for the passes that layers share, and the rows that are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from dualform.record.annotations import ROWS, Column
from dualform.record.fitting import Fitting, Shape
from dualform.record.passes import USE, Pass
from dualform.record.row_choice import StepChoice, each
from dualform.record.sink import CapturedPass
from dualform.store.row_metadata import Block
from dualform.store.sampling import DroppedRows, Sampling


class StepBlocks:
    """Takes a step's passes: leaves out the rows that are not recorded, and numbers the metadata of
    the others, the same for layers that ran in the same passes.

    Args:
        step: Its number.
        passes: Of all layers, with the layers' names.
        fitting: What annotations say of which rows.
        sampling: Which rows are recorded.
        of_step: Columns with one value for all rows of the step.

    Attributes:
        blocks: Those numbered so far.
        dropped: The rows that are not recorded.
        told: Layers that had such rows whose value is not zero.

    Raises:
        AnnotationError: A column fits none of the passes that it holds for.
    """

    def __init__(
        self,
        step: int,
        passes: Sequence[tuple[str, Pass]],
        fitting: Fitting,
        sampling: Sampling,
        of_step: Mapping[str, np.ndarray],
    ) -> None:
        self.blocks: list[Block] = []
        self.dropped: list[DroppedRows] = []
        self.told: set[str] = set()
        self._step = step
        self._of_step = of_step
        self._numbers: dict[tuple[int, Shape, str | None, int, bytes], int] = {}
        self._seen: dict[tuple[str, int, Shape, str | None], int] = {}
        annotations: dict[int, tuple[Mapping[str, Column], dict[Shape, str]]] = {}
        for layer, item in passes:
            _, shapes = annotations.setdefault(id(item.annotation), (item.annotation, {}))
            shapes.setdefault(item.leading, layer)
        self._columns = {
            key: fitting.fit(columns, shapes) for key, (columns, shapes) in annotations.items()
        }
        self._choice = StepChoice(sampling, step)
        for columns, shapes in annotations.values():
            self._choice.draw(columns, list(shapes))

    def take(self, layer: str, item: Pass, values: bool) -> CapturedPass | None:
        """A layer's pass as it is recorded; None where none of its rows is.

        Args:
            layer: Its name.
            item: With its key and value, which are cut to the rows that are kept.
            values: Whether values are recorded.
        """
        assert item.key is not None
        assert item.value is not None
        columns = self._columns[id(item.annotation)][item.leading]
        choice = self._choice.choose(item, columns)
        self.dropped += [
            DroppedRows(self._step, layer, reason, rows) for reason, rows in choice.dropped.items()
        ]
        if choice.told:
            self.told.add(layer)
        kept = choice.kept
        number = self._number(layer, item, _places(item, kept))
        if kept is not None:
            if not len(kept):
                return None
            item.key, item.value = item.key.keep(kept), item.value.keep(kept)
        item.key.seal()
        if values:
            item.value.seal()
        return CapturedPass(layer, item.key.rows, number, item.key, item.value if values else None)

    def _number(self, layer: str, item: Pass, kept: np.ndarray | None) -> int:
        """The n-th pass of a layer with one annotation and shape has the n-th such block, if the
        same rows are kept."""
        seen = (layer, id(item.annotation), item.leading, item.use)
        repeat = self._seen[seen] = self._seen.get(seen, -1) + 1
        if kept is not None and not len(kept):
            return -1
        rows = b"" if kept is None else kept.tobytes()
        key = (*seen[1:], repeat, rows)
        if key not in self._numbers:
            self._numbers[key] = len(self.blocks)
            self.blocks.append(self._block(item, kept))
        return self._numbers[key]

    def _block(self, item: Pass, kept: np.ndarray | None) -> Block:
        found = self._columns[id(item.annotation)][item.leading]
        columns = {name: values for name, values in found.items() if name != ROWS}
        rows = math.prod(item.leading)
        if kept is not None:
            columns = {
                name: values if len(values) == 1 else each(values, rows)[kept]
                for name, values in columns.items()
            }
        columns = {**self._of_step, **columns}
        if item.use is not None:
            columns[USE] = np.array([item.use], object)
        return Block(self._step, item.leading, columns, kept)


def _places(item: Pass, kept: np.ndarray | None) -> np.ndarray | None:
    """Which of the rows of a pass's shape are kept, None for all of them."""
    if item.places is None:
        return kept
    return item.places if kept is None else np.asarray(item.places[kept])


def rows_bytes(passes: Sequence[Pass], values: bool) -> int:
    """What keys and values of whole passes take."""
    return sum(
        len(buffer.memory)
        for item in passes
        for buffer in (item.key, item.value if values else None)
        if buffer is not None
    )
