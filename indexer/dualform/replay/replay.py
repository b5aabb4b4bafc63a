"""The sink of the second training: checks that it repeats the first, and folds it into answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch

from dualform.engine.context import own_settings
from dualform.engine.memory.tiles import Tile
from dualform.engine.messages.limits import Limits
from dualform.engine.rows.groups import Groups
from dualform.engine.topk.contribution import Contribution
from dualform.engine.topk.ranking import Ranking
from dualform.engine.topk.top_k import TopK as Reduced
from dualform.engine.totals.coefficients import LayerCoefficients, initial_part, layer_coefficients
from dualform.engine.totals.row_parts import WeightedValues
from dualform.optimizers import LayerRun, layer_state
from dualform.questions import OutputQuestion, SumsQuestion, TopKQuestion
from dualform.questions.questions import Order, RankBy
from dualform.record import StepBatch
from dualform.record.sink import State
from dualform.replay.answers import Answer, DualOutput, Sums, TopK
from dualform.replay.errors import DivergedError, ReplayError
from dualform.replay.first_run import FirstRun, step_digests
from dualform.replay.followed import FollowedOutput
from dualform.replay.questions import Asked, Question, checked_queries, filter_of, refusals
from dualform.replay.tiles import Tiles
from dualform.store.ledger import InexactMark, LedgerRow
from dualform.store.recording_format import RecordingManifest
from dualform.v1 import attribution_pb2 as pb

_A = TypeVar("_A", bound=Answer)

SCALE_TOLERANCE = 1e-6
"""Relative difference of two measured scales that measuring them explains."""

_REMEDY = (
    "start from the same weights and optimizer, see the same batches in the same order, seed every "
    "random generator (torch.manual_seed), use the same number of threads and the same machine, "
    "and torch.use_deterministic_algorithms(True) on a GPU"
)


class Replay:
    """Answers questions while training runs a second time. Nothing of a row is kept.

    Ask first, then train with this as the recorder's sink, then call each answer's `result`. Any
    number of questions and queries costs one training. Each step is compared with the first run's:
    the digests of every layer's keys and values, which are the forward and the backward pass bit
    for bit (the loss curve with them), and the ledger; at the end the last state.

    Args:
        first: The first training, closed.

    Example:
        >>> replay = Replay(first)
        >>> best = replay.top_k("0", queries, k=10)
        >>> with Recorder(model, optimizer, replay):
        ...     train(model, optimizer)
        >>> best.result().rows

    Raises:
        ReplayError: The first training's recorder is not closed, or had no step.
    """

    def __init__(self, first: FirstRun) -> None:
        if first.final is None or first.steps == 0:
            raise ReplayError(
                "a replay needs a first training of at least one step, its recorder closed"
            )
        self._first = first
        self._final = first.final
        self._ledger: dict[int, list[LedgerRow]] = {}
        for row in first.ledger_rows:
            self._ledger.setdefault(row.step, []).append(row)
        self._asked: dict[str, list[Asked]] = {}
        self._steps = 0
        self._opened = self._failed = False
        self._tiles = Tiles({})

    @own_settings()
    def top_k(
        self,
        layer: str,
        queries: np.ndarray | torch.Tensor,
        k: int,
        *,
        where: str | pb.Filter | None = None,
        group_by: str | None = None,
        order: str = "largest",
        rank_by: str = "weight",
        unit: int | None = None,
        at_step: int | None = None,
        distinct: str | None = None,
    ) -> TopK:
        """The k rows with the largest, smallest or largest absolute weight or contribution.

        Args:
            layer: Its name.
            queries: float32 [n, d_in], finite.
            k: Per query, and per group with group_by; at most 16,384, as elsewhere.
            where: Which rows take part, such as "label = 6 and step < 3000"; None for all.
            group_by: A metadata column to rank within.
            order: "largest", "smallest" or "absolute".
            rank_by: "weight", or "contribution": what a row added to one output unit.
            unit: The output unit, 0 to d_out - 1; with "contribution" alone.
            at_step: Contributions after so many steps; None for the trained layer. Likewise.
            distinct: A metadata column: of rows with the same value only the best counts; rows
                without a value stand for themselves.

        Raises:
            ReplayError: An argument is wrong, training has begun, or contributions are asked of an
                inexact layer.
        """
        checked = self._queries(layer, queries)
        with refusals():
            question = TopKQuestion(
                layer,
                checked.numpy(),
                k,
                filter_of(where),
                group_by,
                cast(Order, order),
                cast(RankBy, rank_by),
                unit,
                at_step,
                distinct,
            )
            Limits().check_k(question.k)
        if question.rank_by == "cosine":
            raise ReplayError(
                "a replay ranks by 'weight' or 'contribution'; ask an index for 'cosine'"
            )
        contribution = end = None
        if question.rank_by == "contribution":
            d_out = self._first.manifest.layers[layer].d_out
            if question.unit is None or not 0 <= question.unit < d_out:
                raise ReplayError(
                    f"unit is {unit!r}; rank_by='contribution' needs one of layer {layer!r}'s "
                    f"output units 0 to {d_out - 1}"
                )
            end = self._last_step(layer, question.at_step)
            contribution = Contribution(self._coefficients(layer, end), question.unit)
        ranking = Ranking(question.k, order, group_by, contribution, distinct)
        answer = TopK(Reduced(checked, ranking), group_by is not None)
        columns = [name for name in (group_by, distinct) if name is not None]
        return self._add(layer, checked, answer, question.where, end, columns)

    @own_settings()
    def sums(
        self,
        layer: str,
        queries: np.ndarray | torch.Tensor,
        group_by: str,
        *,
        absolute: bool = False,
        where: str | pb.Filter | None = None,
    ) -> Sums:
        """Total attention weight, signed or absolute, per value of a metadata column.

        Args:
            layer: Its name.
            queries: float32 [n, d_in], finite.
            group_by: The column.
            absolute: Sum |weight|.
            where: Which rows take part; None for all.

        Raises:
            ReplayError: An argument is wrong, or training has begun.
        """
        checked = self._queries(layer, queries)
        with refusals():
            question = SumsQuestion(layer, checked.numpy(), group_by, absolute, filter_of(where))
        answer = Sums(len(checked), group_by, question.absolute)
        return self._add(layer, checked, answer, question.where, None, [group_by])

    @own_settings()
    def dual_output(
        self,
        layer: str,
        queries: np.ndarray | torch.Tensor,
        *,
        where: str | pb.Filter | None = None,
        at_step: int | None = None,
        group_by: str | None = None,
    ) -> DualOutput:
        """The layer's output: the initial part and every row's contribution.

        Args:
            layer: Its name.
            queries: float32 [n, d_in], finite.
            where: Which rows take part; the initial part always stays.
            at_step: After so many steps, 0 to as many as there were; None for the trained layer.
            group_by: A metadata column: the output split by its values too (`parts`).

        Raises:
            ReplayError: An argument is wrong, training has begun, or the layer is inexact.
        """
        checked = self._queries(layer, queries)
        with refusals():
            question = OutputQuestion(layer, checked.numpy(), filter_of(where), at_step, group_by)
        end = self._last_step(layer, question.at_step)
        spec, groups = self._first.manifest.layers[layer], Groups(group_by)
        ledger, columns = self._first.ledger(), [] if group_by is None else [group_by]
        if not ledger.family.scalar:
            run = LayerRun(
                ledger.family,
                ledger.parameters[spec.weight],
                None if spec.bias is None else ledger.parameters[spec.bias],
                layer_state(self._first.initial, ledger.family, spec.weight, spec.bias),
                0,
                0,
            )
            followed = FollowedOutput(run, checked, end, groups)
            return self._add(layer, checked, followed, question.where, end, columns)
        coefficients = self._coefficients(layer, end)
        names = (spec.weight, spec.bias)
        state = {
            name: torch.from_numpy(np.array(array))
            for name, array in self._first.initial.items()
            if name.removeprefix("momentum:") in names
        }
        initial = initial_part(spec, state, coefficients, checked)
        rows = WeightedValues(len(checked), spec.d_out, coefficients, groups)
        answer = DualOutput(initial, rows, groups)
        return self._add(layer, checked, answer, question.where, end, columns)

    @own_settings()
    def open(self, manifest: RecordingManifest) -> None:
        """Start: as the recorder calls it.

        Raises:
            ReplayError: Another sink's work was taken over before, or no question was asked.
            DivergedError: Other layers are recorded than in the first run.
        """
        if self._opened:
            raise ReplayError("a replay runs once; make a new Replay for another training")
        if not self._asked:
            raise ReplayError("ask something (top_k, sums, dual_output) before the replay starts")
        self._opened = True
        ours, theirs = (
            replace(manifest, created_by=""),
            replace(self._first.manifest, created_by=""),
        )
        if ours != theirs:
            self._refuse(f"{_difference(theirs, ours)}; make the recorder as in the first run")
        self._tiles = Tiles({name: manifest.layers[name] for name in self._asked})

    def begin(self, initial: State, step_bytes: int, planned_steps: int | None) -> None:
        """Compare the state before the first step.

        Raises:
            DivergedError: It is another.
        """
        self._compare(self._first.initial, initial, "before the first step")

    def check(self) -> None:
        """Nothing runs in the background."""

    @own_settings()
    def append(self, batch: StepBatch) -> None:
        """Compare one step, and fold its rows.

        Raises:
            DivergedError: It is not the first run's.
        """
        if self._failed:
            raise DivergedError("the replay was given up; what was wrong was said then")
        if batch.step != self._steps or batch.step >= self._first.steps:
            self._refuse(
                f"step {batch.step} comes where the first run had step {self._steps} of "
                f"{self._first.steps}; train for as many steps"
            )
        self._compare_step(batch)
        self._steps += 1
        self._check_questions(batch)
        for name, tile in self._tiles.add(batch):
            self._fold(name, tile)

    def add_examples(
        self, ids: Sequence[int] | Sequence[str], kinds: Sequence[str], data: Sequence[bytes]
    ) -> None:
        """Payloads are not kept."""

    def commit(self) -> None:
        """Nothing is stored."""

    @own_settings()
    def close(self, final: State, marks: Sequence[tuple[str, InexactMark]]) -> None:
        """Compare the last state, and release the answers.

        Raises:
            DivergedError: It is another, or there were fewer steps.
        """
        if self._failed:
            return  # said already, at the step
        if self._steps != self._first.steps:
            self._refuse(f"training ended after {self._steps} of {self._first.steps} steps")
        self._compare(self._final, final, "after the last step")
        for name, tile in self._tiles.rest():
            self._fold(name, tile)
        for asked in self._asked.values():
            for each in asked:
                for question in each.questions:
                    question.answer.finish()

    def _queries(self, layer: str, queries: np.ndarray | torch.Tensor) -> torch.Tensor:
        if self._opened:
            raise ReplayError("training has begun: rows are gone that this question is about")
        spec = self._first.manifest.layers.get(layer) if isinstance(layer, str) else None
        if spec is None:
            raise ReplayError(
                f"no layer {layer!r} was recorded; there are "
                f"{', '.join(map(repr, self._first.manifest.layers))}"
            )
        return checked_queries(queries, layer, spec.d_in)

    def _last_step(self, layer: str, at_step: int | None) -> int:
        """After how many steps an output is asked for, once the layer is exact up to there."""
        end = self._first.steps if at_step is None else at_step
        if not 0 <= end <= self._first.steps:
            raise ReplayError(
                f"at_step is {at_step}; training had {self._first.steps} steps, so it is one of "
                f"0 to {self._first.steps}"
            )
        if not self._first.manifest.values:
            raise ReplayError("outputs and contributions need values; record with values=True")
        for name, mark in self._first.marks:
            if name == layer and mark.from_step < end:
                raise ReplayError(
                    f"layer {layer!r} is inexact from step {mark.from_step} on: {mark.reason}. Its "
                    f"dual output is not its output; ask with at_step <= {mark.from_step}, or for "
                    "weights (top_k, sums), which are exact"
                )
        return end

    def _coefficients(self, layer: str, end: int) -> LayerCoefficients:
        """By the first training's ledger: a row's coefficient depends on the steps after it."""
        ledger = self._first.ledger()
        if not ledger.family.scalar:
            raise ReplayError(
                f"rows trained by {self._first.manifest.optimizer} have no coefficients, and what "
                "one added to a unit is known once all later steps are; record and index the run, "
                "and ask the index, or ask for outputs (dual_output)"
            )
        return layer_coefficients(ledger, self._first.manifest.layers[layer], end)

    def _add(
        self,
        layer: str,
        queries: torch.Tensor,
        answer: _A,
        where: pb.Filter | None,
        before_step: int | None,
        columns: Sequence[str],
    ) -> _A:
        """Questions with the same queries share one product per tile."""
        question = Question(answer, where, before_step, columns)
        for asked in self._asked.setdefault(layer, []):
            if torch.equal(asked.queries, queries):
                asked.questions.append(question)
                return answer
        self._asked[layer].append(Asked(queries))
        self._asked[layer][-1].questions.append(question)
        return answer

    def _check_questions(self, batch: StepBatch) -> None:
        """Refuse what can't be answered when a layer's first rows are there, not hours later."""
        for name, rows in self._tiles.first(batch):
            for asked in self._asked[name]:
                for question in asked.questions:
                    try:
                        question.check(rows)
                    except ReplayError:
                        self._failed = True
                        raise

    def _fold(self, layer: str, tile: Tile) -> None:
        for asked in self._asked[layer]:
            try:
                asked.take(tile)
            except ReplayError:
                self._failed = True
                raise

    def _compare_step(self, batch: StepBatch) -> None:
        theirs, ours = self._first.digests[batch.step], step_digests(batch, self._first.manifest)
        for part, what in ((slice(8), "keys"), (slice(8, None), "values")):
            for name in self._first.manifest.layers:
                if theirs[name][part] != ours[name][part]:
                    self._refuse(f"layer {name!r} has other {what} at step {batch.step}")
        for before, now in zip(self._ledger.get(batch.step, ()), batch.ledger, strict=True):
            same = before._replace(scale=0.0) == now._replace(scale=0.0)
            if not same or not math.isclose(before.scale, now.scale, rel_tol=SCALE_TOLERANCE):
                self._refuse(
                    f"the ledger of {now.parameter!r} differs at step {batch.step}: "
                    f"{_difference(before, now)}"
                )

    def _compare(self, theirs: Mapping[str, np.ndarray], ours: State, when: str) -> None:
        for name in sorted({*theirs, *ours}):
            if name not in theirs or name not in ours or not _same(theirs[name], ours[name]):
                self._refuse(f"{name!r} differs {when}")

    def _refuse(self, problem: str) -> NoReturn:
        self._failed = True
        raise DivergedError(
            f"this training is not the first one: {problem}. To repeat it, {_REMEDY}"
        )


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _difference(theirs: Any, ours: Any) -> str:
    """The first field that differs."""
    names = theirs._fields if hasattr(theirs, "_fields") else [f.name for f in fields(theirs)]
    for name in names:
        before, now = getattr(theirs, name), getattr(ours, name)
        if before != now and name == "settings" and type(before) is type(now):
            return _difference(before, now)
        if before != now:
            return f"{name} was {before!r} and is {now!r}"
    return "nothing differs"
