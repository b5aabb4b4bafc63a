"""Annotations on the rows of layers that see a batch in different shapes.

A column belongs to a batch: one value for all of it, one per example [batch], or one per token
[batch, time]. Layers see that batch as [batch, time], flattened to [batch * time], sequence first,
in windows [batch * windows, places], with merged patches, or pooled to [batch]. What a column says
of a layer's rows follows from the two shapes. One that fits no layer is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np

from dualform.record.annotations import ROWS, Column
from dualform.record.errors import AnnotationError
from dualform.record.nulls import filled

_LOGGER = logging.getLogger("dualform.record")

Shape = tuple[int, ...]
"""Leading dimensions of a layer's input, its last axis apart."""

_AS_IT_IS = slice(None)
_Places = slice | np.ndarray
"""Which of a column's flat values each row has; all of them, as `Block` takes them, or int64."""


class Fitting:
    """Fits the columns of a recording's passes, step by step; says once of each column that it has
    nothing to say of some layer."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def fit(
        self, columns: Mapping[str, Column], shapes: Mapping[Shape, str]
    ) -> dict[Shape, dict[str, np.ndarray]]:
        """What an annotation says of the rows of the passes that it holds for.

        Args:
            columns: The annotation; `rows`, which rows are recorded, among them.
            shapes: Of the passes of all layers, each with a layer that has it.

        Returns:
            By shape: columns as `Block` has them. A column that says nothing of such rows is not
            among them.

        Raises:
            AnnotationError: A column fits none of the shapes.
        """
        found: dict[Shape, dict[str, np.ndarray]] = {shape: {} for shape in shapes}
        for name, column in columns.items():
            for shape, values in _fit(name, column, list(found)).items():
                if values is not None:
                    found[shape][name] = values
                elif name not in self._said:
                    self._said.add(name)
                    # Rows that the batch shares, as a position embedding's, are as they should be.
                    level = logging.INFO if shape[:1] == (1,) else logging.WARNING
                    _LOGGER.log(level, "%s", _silent(name, column.shape, shape, shapes[shape]))
        return found


def spread(column: Column, shapes: Sequence[Shape], like: Shape) -> dict[Shape, np.ndarray | None]:
    """What is drawn for each example, for the rows of passes; None where no batch is seen in them.

    Args:
        column: bool [batch].
        shapes: Of the passes.
        like: The shape, [batch, ...], of a column that fits one of them.
    """
    repeated = np.repeat(column.values, math.prod(like[1:]))
    return _fit(ROWS, Column(repeated, like), shapes)


def _fit(name: str, column: Column, shapes: Sequence[Shape]) -> dict[Shape, np.ndarray | None]:
    """One column's values for each of the shapes; None where it says nothing."""
    whole, turned = _whole(column.shape, shapes), _sequence_first(column.shape, shapes)
    if len(whole) == len(shapes) and not turned:  # as nearly always
        return {shape: column.values[places] for shape, places in whole.items()}
    by_example = _by_example(name, column)
    if not whole and all(len(shape) < 2 for shape in shapes):
        whole = _whole(by_example.shape, shapes)
    if not whole and not turned:
        raise AnnotationError(_misfit(name, column.shape, shapes))
    found: dict[Shape, np.ndarray | None] = dict.fromkeys(shapes)
    for shape in shapes:
        for given in (column, by_example):
            places = _places(given.shape, shape, list(whole), turned)
            if places is not None:
                found[shape] = given.values[places]
                break
    return found


def _places(
    given: Shape, leading: Shape, whole: Sequence[Shape], turned: Sequence[Shape]
) -> _Places | None:
    """Which value of a column each row of a pass has; None where nothing tells.

    Args:
        given: The column's shape.
        leading: The pass's.
        whole: Shapes of passes that the column fits as it is.
        turned: Shapes of passes that come sequence first, where none comes batch first.
    """
    for shape in turned:  # flattened
        if len(leading) == 1 and leading[0] == math.prod(shape):
            return _turned(given, shape)
    exact, other = _exact(given, leading), _turned(given, leading)
    if exact is not None or other is None:
        return _several(given, leading, whole) if exact is None else exact
    # [batch * windows, places], where there are as many places as examples, looks like it too.
    windows = any(len(s) > 1 and s[0] == given[0] for s in whole) and leading[0] % given[0] == 0
    return None if windows else other


def _whole(given: Shape, shapes: Sequence[Shape]) -> dict[Shape, _Places]:
    """Where a column that fits a pass as it is has the value of each row, by the pass's shape."""
    found = {shape: _exact(given, shape) for shape in shapes}
    return {shape: places for shape, places in found.items() if places is not None}


def _sequence_first(given: Shape, shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes [time, batch] of a model that nowhere sees the batch first."""
    of_axes = [shape for shape in shapes if len(shape) > 1]
    turned = [shape for shape in of_axes if _turned(given, shape) is not None]
    return turned if len(turned) == len(of_axes) else []


def _exact(given: Shape, leading: Shape) -> _Places | None:
    """Where a column of this shape has the value of each row; None where its axes are others."""
    if given in ((), leading[:1], leading) or (not leading and given == (1,)):
        return _AS_IT_IS
    given = _without_ones(given)
    size, rows = math.prod(given), math.prod(leading)
    if given == leading[: len(given)]:
        return np.repeat(np.arange(size), rows // max(1, size))
    if size == rows and (len(leading) == 1 or given[0] == leading[0]):
        return _AS_IT_IS  # flattened, in the same order
    return None


def _turned(given: Shape, leading: Shape) -> _Places | None:
    """The same of rows that come sequence first: [time, batch]."""
    given = _without_ones(given)
    if not (len(leading) > 1 and 0 < len(given) < 3 and given == leading[1::-1][: len(given)]):
        return None
    table = np.arange(math.prod(given)).reshape(*given, *(1,) * (2 - len(given))).T
    places = np.broadcast_to(table, leading[:2]).reshape(-1)
    return np.repeat(places, math.prod(leading[2:]))


def _several(given: Shape, leading: Shape, whole: Sequence[Shape]) -> _Places | None:
    """The same where there are several windows, or rows, of each example.

    Args:
        given: (batch,), or another, of which nothing is known.
        leading: The pass's.
        whole: Shapes that a column of the batch fits as it is.
    """
    if len(given) != 1 or not leading or leading[0] % max(1, given[0]):
        return None
    batch, rows = max(1, given[0]), math.prod(leading)
    if len(leading) < 2 and rows not in [math.prod(shape) for shape in whole]:
        return None
    return np.repeat(np.arange(batch), rows // batch)


def _without_ones(given: Shape) -> Shape:
    while len(given) > 1 and given[-1] == 1:
        given = given[:-1]
    return given


def _by_example(name: str, column: Column) -> Column:
    """A column's batch-level form: the value that an example's rows share; null where they differ.
    Of `rows`: whether any of them is recorded."""
    values, shape = column
    if len(shape) < 2 or 0 in shape:
        return column
    table = values.reshape(shape[0], -1)
    if name == ROWS:
        return Column(np.asarray(table.any(1)), shape[:1])
    there = _there(table)
    chosen = np.ma.getdata(table)[np.arange(shape[0]), there.argmax(1)]
    shared = there.any(1) & ((np.ma.getdata(table) == chosen[:, None]) | ~there).all(1)
    return Column(chosen if shared.all() else filled(chosen[shared], ~shared), shape[:1])


def _there(values: np.ndarray) -> np.ndarray:
    if isinstance(values, np.ma.MaskedArray):
        return ~np.ma.getmaskarray(values)
    if values.dtype == object:
        return np.array([item is not None for item in values.flat], np.bool_).reshape(values.shape)
    return np.ones(values.shape, np.bool_)


def _silent(name: str, given: Shape, leading: Shape, layer: str) -> str:
    what = "all of them are recorded" if name == ROWS else "it is null there"
    if _turned(given, leading) is not None:
        return (
            f"annotate({name}=...): leading dimensions {list(leading)} of the input of layer "
            f"{layer!r} may be windows of {leading[1]} places, or come sequence first for "
            f"{leading[1]} examples, so {what}; any other batch size tells"
        )
    return (
        f"annotate({name}=...) of shape {list(given)} says nothing of the rows of layer {layer!r}, "
        f"whose leading dimensions are {list(leading)}: {what}"
    )


def _misfit(name: str, given: Shape, shapes: Sequence[Shape]) -> str:
    leading = max(shapes, key=len)
    allowed = ["one value for the whole batch"]
    if leading:
        allowed.append(f"{leading[0]} values, one per example")
    if len(leading) > 1:
        allowed.append(f"shape {list(leading)}, one per row")
    windows = ""
    if len(given) == 1 and given[0] and leading and leading[0] % given[0] == 0:
        times = leading[0] // given[0]
        windows = (
            f" Where such a layer sees {times} windows of each example, record a layer too that "
            f"sees examples whole, or repeat every value {times} times."
        )
    return (
        f"annotate({name}=...) was given shape {list(given)}, but the input of a recorded layer "
        f"has leading dimensions {list(leading)} ({math.prod(leading):,} rows): allowed are "
        f"{'; '.join(allowed)}.{windows} Annotate each pass with its own batch, or leave layers "
        "with other shapes out with Recorder(..., layers=[...])"
    )
