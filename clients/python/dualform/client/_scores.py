"""Score matrices: the parts of an answer as they come, to memory, a .npy file or Parquet."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualform._install import pip_install
from dualform.client._arrays import array_of, groups_of
from dualform.client._attribution import Beside, beside_of, check_same_index, join_beside
from dualform.client._results import pandas_of
from dualform.client.errors import FailedPreconditionError, InvalidArgumentError, bad_answer
from dualform.questions import AttributeQuestion
from dualform.v1 import attribution_pb2 as pb

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class ScoresResult(Beside):
    """What every group's rows, of all layers together, did to each input's target.

    Attributes:
        groups: The groups in ascending order, None (rows without a value) last.
        values: float64 [n, groups]; of a .npy file its map; None where it went to Parquet.
        counts: int64 [groups], the rows that were added up, of all layers.
        path: The file that was written; None for none.
    """

    groups: list[Any]
    values: npt.NDArray[np.float64] | None
    counts: npt.NDArray[np.int64]
    path: Path | None

    def to_pandas(self) -> pd.DataFrame:
        """A line per input, a column per group.

        Raises:
            FailedPreconditionError: pandas is not installed, or the values are in a Parquet file.
        """
        pandas = pandas_of()
        if self.values is None:
            raise FailedPreconditionError(
                f"the values are in {self.path}: pandas.read_parquet gives a line for each input "
                "and group"
            )
        dtype: Any = object if None in self.groups else None
        return pandas.DataFrame(
            self.values,
            index=pandas.RangeIndex(len(self.values), name="query"),
            columns=pandas.Index(self.groups, name="group", dtype=dtype),
        )


def path_of(out: object) -> Path | None:
    """Where scores go: None for memory; a file is one of two kinds."""
    if out is None:
        return None
    if not isinstance(out, (str, Path)) or Path(out).suffix not in (".npy", ".parquet"):
        raise InvalidArgumentError(
            f"out={out!r}: a path that ends in .npy or .parquet is needed, or None for memory",
            field="out",
        )
    path = Path(out)
    if path.suffix == ".parquet":
        _pyarrow()
    if not path.parent.is_dir():
        raise InvalidArgumentError(f"out={out!r}: there is no folder {path.parent}", field="out")
    if path.exists():
        raise InvalidArgumentError(
            f"out: {path} is there already; name another file, or remove it", field="out"
        )
    return path


def scores_of(
    message: pb.AttributeResponse,
    question: AttributeQuestion,
    targets: npt.NDArray[np.float64],
    unrecorded: npt.NDArray[np.float64],
) -> ScoresResult:
    """To an AttributeQuestion without k, with what the model said."""
    if message.HasField("by_layer"):
        raise bad_answer("scores by layer that were not asked for")
    values = array_of(message.scores, "scores", np.float64, (question.inputs, None))
    groups = groups_of(message.groups, values.shape[1])
    counts = array_of(message.counts, "counts", np.int64, (len(groups),))
    return ScoresResult(
        **beside_of(message, question, targets, unrecorded, counts),
        groups=groups,
        values=values,
        counts=counts,
        path=None,
    )


class Collector:
    """Takes the parts of an answer, each about the next of the inputs.

    A file appears under its name once it is whole.

    Args:
        path: As `path_of` gives it.
        n: How many inputs there are.
    """

    def __init__(self, path: Path | None, n: int) -> None:
        self._path = path
        self._n = n
        self._parts: list[ScoresResult] = []
        self._put: Callable[[int, npt.NDArray[np.float64]], None] | None = None
        self._close: Callable[[], None] = lambda: None
        self._values: npt.NDArray[np.float64] | None = None
        self._done = 0

    @property
    def _unfinished(self) -> Path:
        assert self._path is not None
        return self._path.with_name(f".{self._path.name}.{os.getpid()}.part")

    def take(self, part: ScoresResult) -> None:
        """Take a part, as `scores_of` gives it."""
        assert part.values is not None
        values, part = part.values, replace(part, values=None, path=self._path)
        self._parts.append(part)
        check_same_index([self._parts[0], part])
        if repr(part.groups) != repr(self._parts[0].groups):  # a NaN is not equal to itself
            raise bad_answer("its parts have different groups")
        if self._put is None:
            self._open(part.groups)
        assert self._put is not None
        self._put(self._done, values)
        self._done += len(values)

    def _open(self, groups: list[Any]) -> None:
        shape = (self._n, len(groups))
        if self._path is not None and self._path.suffix == ".parquet":
            self._open_parquet(groups)
            return
        if self._path is None:
            self._values = np.empty(shape)
        else:
            self._values = np.lib.format.open_memmap(
                self._unfinished, mode="w+", dtype=np.float64, shape=shape
            )

        def put(start: int, values: npt.NDArray[np.float64]) -> None:
            assert self._values is not None
            self._values[start : start + len(values)] = values

        self._put = put

    def _open_parquet(self, groups: list[Any]) -> None:
        pyarrow, parquet = _pyarrow()
        column = pyarrow.array(groups)
        schema = pyarrow.schema(
            {"query": pyarrow.int64(), "group": column.type, "score": pyarrow.float64()}
        )
        writer = parquet.ParquetWriter(self._unfinished, schema)

        def put(start: int, values: npt.NDArray[np.float64]) -> None:
            for place, row in enumerate(values, start):
                numbers = np.full(len(row), place)
                writer.write_table(pyarrow.table([numbers, column, row], schema=schema))

        self._put, self._close = put, writer.close

    def result(self) -> ScoresResult:
        """The whole answer."""
        self._close()
        values = self._values
        if self._path is not None:
            if values is not None:
                values.flush()  # type: ignore[attr-defined]
            self._values = values = None
            os.replace(self._unfinished, self._path)
            if self._path.suffix == ".npy":
                values = np.load(self._path, mmap_mode="r")
        return join_beside(self._parts, values=values)

    def give_up(self) -> None:
        """Leave no file behind."""
        if self._path is not None:
            with suppress(Exception):
                self._close()
            self._values = None
            self._unfinished.unlink(missing_ok=True)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise FailedPreconditionError(
            f"Parquet needs pyarrow: {pip_install('cpu')}, or write to .npy",
            reason="NOT_INSTALLED",
        ) from None
    return pyarrow, pyarrow.parquet
