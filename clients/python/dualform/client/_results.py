"""What the questions answer: numpy arrays, what they cover, and pandas where asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualform.client.errors import FailedPreconditionError, UnknownColumnError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Coverage:
    """How many rows an answer covers.

    Attributes:
        rows: Rows that passed the filter (and lie before `at_step`).
        total: Rows of the layer.
        nonfinite: Of `rows`, those whose key is not finite: never ranked.
        dropped: Rows of the layer that training had and that were not recorded: where there are
            any, the answer is of a part of the memory.
        missing: Rows of the layer on machines that are out of reach, where `partial` allowed that:
            they are not in the answer.
    """

    rows: int
    total: int
    nonfinite: int
    dropped: int = 0
    missing: int = 0


@dataclass(frozen=True)
class ChosenPlan:
    """How the server found an answer, and why; the answer is the same by every strategy.

    Attributes:
        strategy: "scan", "flat", "certified", "key_sums", "distinct_keys", "device", "rebuilt" or
            "parts".
        reason: One sentence.
        costs: Estimated seconds by strategy, of those that apply.
    """

    strategy: str
    reason: str
    costs: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class TopKResult:
    """The k best rows per query, or per query and group.

    `hits["label"]` is a metadata column, in the shape of `rows`: int64, float64 or bool where every
    place holds a value; otherwise, and for text, an object array with None where there is none.

    Attributes:
        rows: int64 [n, k], or [n, groups, k]; -1 where fewer rows match.
        scores: float32, the shape of `rows`; NaN where fewer rows match.
        columns: Every metadata column by name.
        groups: The groups in ascending order, None (rows without a value) last; None without
            `group_by`.
        coverage: How many rows took part.
        counts: int64, the shape of `rows`: how many rows that took part share the row's value (in
            its group), 0 where fewer match; None without `distinct`.
        plan: How the answer was found; None without `explain_plan`.
        index_version: Which version of the index answered; the same for the same files.
    """

    rows: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    columns: Mapping[str, npt.NDArray[Any]]
    groups: list[Any] | None
    coverage: Coverage
    counts: npt.NDArray[np.int64] | None = None
    plan: ChosenPlan | None = None
    index_version: str = ""

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        if not isinstance(column, str) or column not in self.columns:
            raise UnknownColumnError(
                f"no metadata column {column!r}; there are {sorted(self.columns)}"
            )
        return self.columns[column]

    def to_pandas(self) -> pd.DataFrame:
        """One line per hit: query, rank (from 0), row, score, `distinct`'s count, and the columns.

        Padding is left out. A metadata column called like one of the first gets "_column"
        behind its name. With `group_by` a line's group is its value in that column.

        Raises:
            FailedPreconditionError: pandas is not installed.
        """
        pandas = pandas_of()
        hit = self.rows >= 0
        places = np.nonzero(hit)
        table: dict[str, Any] = {
            "query": places[0],
            "rank": places[-1],
            "row": self.rows[hit],
            "score": self.scores[hit],
        }
        if self.counts is not None:
            table["count"] = self.counts[hit]
        for name, column in self.columns.items():
            key = f"{name}_column" if name in table else name
            table[key] = plain(column[hit])
        return pandas.DataFrame(table)


@dataclass(frozen=True, eq=False)
class TopGroupsResult:
    """The k best groups per query: by what the weights, or contributions, of their rows add up to.

    Attributes:
        groups: [n, k], the groups' values: int64, float64 or bool where every place holds one;
            otherwise, and for text, an object array. None is the group of the rows without a value;
            where fewer groups have rows it is there too, with a count of 0.
        scores: float64 [n, k], the sums; NaN where fewer groups have rows.
        counts: int64 [n, k], how many rows were added up; 0 where fewer groups have rows.
        coverage: How many rows took part.
        plan: How the answer was found; None without `explain_plan`.
        index_version: Which version of the index answered; the same for the same files.
    """

    groups: npt.NDArray[Any]
    scores: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    coverage: Coverage
    plan: ChosenPlan | None = None
    index_version: str = ""

    def to_pandas(self) -> pd.DataFrame:
        """One line per group: query, rank (from 0), group, score, count; without padding.

        Raises:
            FailedPreconditionError: pandas is not installed.
        """
        pandas = pandas_of()
        found = self.counts > 0
        places = np.nonzero(found)
        return pandas.DataFrame(
            {
                "query": places[0],
                "rank": places[1],
                "group": plain(self.groups[found]),
                "score": self.scores[found],
                "count": self.counts[found],
            }
        )


@dataclass(frozen=True, eq=False)
class SumsResult:
    """Total attention weight per group.

    Attributes:
        groups: Ascending, None (rows without a value) last.
        values: float64 [n, groups].
        counts: int64 [groups]: rows per group.
        coverage: How many rows took part.
        plan: How the answer was found; None without `explain_plan`.
        index_version: Which version of the index answered; the same for the same files.
    """

    groups: list[Any]
    values: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    coverage: Coverage
    plan: ChosenPlan | None = None
    index_version: str = ""

    def to_pandas(self) -> pd.DataFrame:
        """A line per query, a column per group.

        Raises:
            FailedPreconditionError: pandas is not installed.
        """
        pandas = pandas_of()
        return pandas.DataFrame(
            self.values,
            index=pandas.RangeIndex(len(self.values), name="query"),
            columns=pandas.Index(self.groups, name="group", dtype=_label_dtype(self.groups)),
        )


@dataclass(frozen=True, eq=False)
class Explanation:
    """Several answers about one layer.

    Attributes:
        top_k: The best rows by weight; None without `k`.
        sums: Totals per group; None without `group_by`.
        output: The dual output, split by group with `group_by`; None without `output`.
        index_version: Which version of the index answered.
    """

    top_k: TopKResult | None
    sums: SumsResult | None
    output: DualOutputResult | None
    index_version: str = ""


@dataclass(frozen=True, eq=False)
class WeightsChunk:
    """Attention weights of consecutive rows.

    Attributes:
        start: The first row's id.
        weights: float32 [n, m], of rows start to start + m - 1.
        index_version: Which version of the index answered.
    """

    start: int
    weights: npt.NDArray[np.float32]
    index_version: str = ""


@dataclass(frozen=True, eq=False)
class DualOutputResult:
    """The layer's output as initial part plus sum of contributions.

    Attributes:
        values: float32 [n, d_out], `initial` included; with `group_by` [n, groups, d_out], the
            groups' parts alone.
        initial: float32 [n, d_out]: what the initial weights, biases and momentum buffers left
            behind.
        trained: float32 [n, d_out]: the trained layer's own output; None with `at_step`, or where
            training did not end in an orderly way.
        groups: As in SumsResult; None without `group_by`.
        counts: int64 [groups]: rows per group; None without `group_by`.
        coverage: How many rows took part.
        residual: float32 [n, d_out]: what neither `initial` nor any row explains of the layer's own
            output, which is `initial` + all rows' parts + `residual`: float32 rounding in training,
            reduced precision, edits by hand. None where no stored weights tell.
        plan: How the answer was found; None without `explain_plan`.
        index_version: Which version of the index answered; the same for the same files.
    """

    values: npt.NDArray[np.float32]
    initial: npt.NDArray[np.float32]
    trained: npt.NDArray[np.float32] | None
    groups: list[Any] | None
    counts: npt.NDArray[np.int64] | None
    coverage: Coverage
    residual: npt.NDArray[np.float32] | None = None
    plan: ChosenPlan | None = None
    index_version: str = ""

    def to_pandas(self) -> pd.DataFrame:
        """A line per query (with `group_by`: per query and group), a column per output unit.

        Raises:
            FailedPreconditionError: pandas is not installed.
        """
        pandas = pandas_of()
        units = pandas.RangeIndex(self.values.shape[-1], name="unit")
        queries = range(len(self.values))
        if self.groups is None:
            index = pandas.RangeIndex(len(queries), name="query")
        else:
            labels = pandas.Index(self.groups, dtype=_label_dtype(self.groups))
            index = pandas.MultiIndex.from_product([queries, labels], names=["query", "group"])
        return pandas.DataFrame(
            self.values.reshape(-1, self.values.shape[-1]), index=index, columns=units
        )


def plain(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A column's values; those that padding alone had made an object array are plain again."""
    found = np.array(values.tolist()) if values.dtype == object and len(values) else values
    return found if found.dtype.kind in "ifb" else values


def _label_dtype(groups: list[Any]) -> Any:
    # None would become NaN, and ints floats.
    return object if None in groups else None


def pandas_of() -> Any:
    try:
        import pandas
    except ImportError:
        raise FailedPreconditionError(
            "to_pandas() needs pandas: pip install pandas (the arrays are there without it)",
            reason="NOT_INSTALLED",
        ) from None
    return pandas
