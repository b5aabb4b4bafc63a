"""What is asked of a replay: checked when it is asked, and which rows it is about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.errors import EngineError, InvalidArgumentError
from dualform.engine.memory.fold import Fold
from dualform.engine.memory.tiles import Tile
from dualform.engine.rows.table import Table
from dualform.questions import QuestionError
from dualform.replay.answers import Answer, DualOutput
from dualform.replay.errors import ReplayError
from dualform.replay.followed import FollowedOutput
from dualform.v1 import attribution_pb2 as pb


@dataclass(frozen=True)
class Question:
    """One question, and its answer in the making.

    Attributes:
        answer: Takes the rows.
        where: Which rows take part; None for all.
        before_step: Rows of this step and later ones do not; None for all.
        columns: Metadata columns that it groups by.
    """

    answer: Answer
    where: pb.Filter | None = None
    before_step: int | None = None
    columns: Sequence[str] = ()

    def check(self, rows: Table) -> None:
        """Refuse what can't be answered about rows like the first ones that come.

        Raises:
            ReplayError: There is no such column, or it can't be compared as the filter does.
        """
        for name in self.columns:
            if name not in rows.columns:
                raise ReplayError(
                    f"rows of step {int(rows.steps[0])} have no column {name!r}; there are "
                    f"{', '.join(rows.columns)}: annotate it from there on, or take one of these"
                )
        try:
            rows.select(self.where, self.before_step)
        except InvalidArgumentError as error:
            raise ReplayError(str(error)) from None


class Asked:
    """Questions with the same queries to one layer: they share one product per tile.

    Args:
        queries: float32 [n, d_in], finite.
    """

    def __init__(self, queries: torch.Tensor) -> None:
        self.queries = queries
        self.questions: list[Question] = []
        self._fold = Fold(queries, [])

    def take(self, tile: Tile) -> None:
        """Fold a tile into every answer: also where it has no rows, for it may have new groups."""
        weights = None
        for question in self.questions:
            chosen = tile.table.select(question.where, question.before_step)
            if isinstance(question.answer, FollowedOutput):
                question.answer.follow(tile, chosen)
            elif isinstance(question.answer, DualOutput):
                question.answer.codes(tile)  # before anything is allocated for new groups
            selected, which = tile, None
            if not chosen.all():
                which = np.flatnonzero(chosen)
                selected = tile.select(which)
            if which is not None and not len(which):
                columns = torch.zeros(len(self.queries), 0)
            else:
                weights = self._fold.weights(tile) if weights is None else weights
                columns = weights if which is None else weights[:, torch.from_numpy(which)]
            for reducer in question.answer.reducers:
                reducer.update(selected, columns)


@contextmanager
def refusals() -> Iterator[None]:
    """Make a ReplayError of what is wrong with a question whatever it is asked of."""
    try:
        yield
    except (QuestionError, EngineError) as error:
        raise ReplayError(str(error)) from None


def checked_queries(queries: np.ndarray | torch.Tensor, layer: str, d_in: int) -> torch.Tensor:
    """Queries as float32 [n, d_in], a copy.

    Raises:
        ReplayError: Another shape or dtype, none at all, or not finite.
    """
    try:
        given = torch.as_tensor(queries).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ReplayError(f"queries to layer {layer!r} do not form a tensor ({error})") from None
    if given.dtype != torch.float32 or given.dim() != 2 or given.shape[1] != d_in or not len(given):
        raise ReplayError(
            f"queries to layer {layer!r} are {given.dtype} {list(given.shape)}; float32 "
            f"[n, {d_in}] with at least one query is needed"
        )
    if not bool(torch.isfinite(given).all()):
        raise ReplayError(f"queries to layer {layer!r} hold NaN or infinity")
    return given.cpu().clone()


def filter_of(where: str | pb.Filter | None) -> pb.Filter | None:
    """A filter, given as text or as a message.

    Raises:
        ReplayError: Text that is no filter, or something else.
    """
    if where is None or isinstance(where, pb.Filter):
        return where
    if not isinstance(where, str):
        raise ReplayError(
            f'where is of type {type(where).__name__}; a str such as "label = 6 and step < 3000", '
            "or a dualform.client.Filter, is needed"
        )
    from dualform.client import InvalidArgumentError as NoFilterError
    from dualform.client import parse_filter

    try:
        return parse_filter(where)
    except NoFilterError as error:
        raise ReplayError(str(error)) from None
