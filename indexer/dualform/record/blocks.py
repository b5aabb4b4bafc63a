"""A step's metadata: one block for the passes that layers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dualform.record.annotations import ROWS, Column
from dualform.record.capture import Pass
from dualform.record.fitting import Fitting, Shape
from dualform.store.row_metadata import Block


class StepBlocks:
    """Numbers the metadata of a step's passes, the same for layers that ran in the same passes.

    Args:
        step: Its number.
        passes: Of all layers, with the layers' names.
        fitting: What annotations say of which rows.

    Attributes:
        blocks: Those numbered so far.

    Raises:
        AnnotationError: A column fits none of the passes that it holds for.
    """

    def __init__(self, step: int, passes: Sequence[tuple[str, Pass]], fitting: Fitting) -> None:
        self.blocks: list[Block] = []
        self._step = step
        self._numbers: dict[tuple[int, Shape, int], int] = {}
        self._seen: dict[tuple[str, int, Shape], int] = {}
        annotations: dict[int, tuple[Mapping[str, Column], dict[Shape, None]]] = {}
        for _, item in passes:
            _, shapes = annotations.setdefault(id(item.annotation), (item.annotation, {}))
            shapes[item.leading] = None
        self._columns = {
            key: fitting.fit(columns, list(shapes))
            for key, (columns, shapes) in annotations.items()
        }

    def number(self, layer: str, item: Pass) -> int:
        """The n-th pass of a layer with one annotation and shape has the n-th such block."""
        seen = (layer, id(item.annotation), item.leading)
        repeat = self._seen[seen] = self._seen.get(seen, -1) + 1
        key = (id(item.annotation), item.leading, repeat)
        if key not in self._numbers:
            self._numbers[key] = len(self.blocks)
            self.blocks.append(self._block(item))
        return self._numbers[key]

    def _block(self, item: Pass) -> Block:
        found = self._columns[id(item.annotation)][item.leading]
        columns = {name: values for name, values in found.items() if name != ROWS}
        return Block(self._step, item.leading, columns)
