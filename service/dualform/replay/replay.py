"""The sink of the second training: checks that it repeats the first, and folds it into answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from dualform.engine.context import multiplies_in_float32, own_settings
from dualform.engine.memory.weights import tile_weights
from dualform.record import StepBatch
from dualform.record.sink import State
from dualform.replay.errors import DivergedError, ReplayError
from dualform.replay.first_run import FirstRun, step_digests
from dualform.replay.outputs import DualOutput
from dualform.replay.reducer import Reducer, checked_queries
from dualform.replay.sums import Sums
from dualform.replay.tiles import LiveTile, Tiles
from dualform.replay.top_k import TopK
from dualform.store.ledger import InexactMark, LedgerRow
from dualform.store.recording_format import RecordingManifest

_R = TypeVar("_R", bound=Reducer)

SCALE_TOLERANCE = 1e-6
"""Relative difference of two measured scales that measuring them explains."""

_FLOAT32_SAFE = 1e37
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
        self._asked: dict[str, list[_Asked]] = {}
        self._steps = 0
        self._opened = self._failed = False
        self._tiles = Tiles({})

    def top_k(
        self,
        layer: str,
        queries: np.ndarray | torch.Tensor,
        k: int,
        *,
        order: str = "largest",
        group_by: str | None = None,
    ) -> TopK:
        """The k rows with the largest, smallest or largest absolute attention weight.

        Args:
            layer: Its name.
            queries: float32 [n, d_in], finite.
            k: Per query, and per group with group_by.
            order: "largest", "smallest" or "absolute".
            group_by: A metadata column to rank within.

        Raises:
            ReplayError: An argument is wrong, or training has begun.
        """
        own = self._queries(layer, queries)
        return self._add(layer, own, TopK(own, k, order, group_by))

    def sums(
        self,
        layer: str,
        queries: np.ndarray | torch.Tensor,
        group_by: str,
        *,
        absolute: bool = False,
    ) -> Sums:
        """Total attention weight, signed or absolute, per value of a metadata column.

        Raises:
            ReplayError: An argument is wrong, or training has begun.
        """
        own = self._queries(layer, queries)
        return self._add(layer, own, Sums(len(own), group_by, absolute))

    def dual_output(self, layer: str, queries: np.ndarray | torch.Tensor) -> DualOutput:
        """The layer's output: the initial part and every row's contribution.

        Raises:
            ReplayError: An argument is wrong, training has begun, or the layer is inexact.
        """
        own = self._queries(layer, queries)
        spec = self._first.manifest.layers[layer]
        marks = [mark for name, mark in self._first.marks if name == layer]
        if marks:
            raise ReplayError(
                f"layer {layer!r} is inexact from step {marks[0].from_step} on: "
                f"{marks[0].reason}. Its dual output is not its output; top_k and sums are exact"
            )
        if not self._first.manifest.values:
            raise ReplayError("the dual output needs values; record with values=True")
        ledger = self._first.ledger()
        output = DualOutput(own, spec, ledger, self._first.initial)
        return self._add(layer, own, output)

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
            raise DivergedError("the replay was given up: this training is not the first one")
        if batch.step != self._steps or batch.step >= self._first.steps:
            self._refuse(
                f"step {batch.step} comes where the first run had step {self._steps} of "
                f"{self._first.steps}; train for as many steps"
            )
        self._compare_step(batch)
        self._steps += 1
        for tile in self._tiles.add(batch):
            self._fold(tile)

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
        for tile in self._tiles.rest():
            self._fold(tile)
        for asked in self._asked.values():
            for each in asked:
                for reducer in each.reducers:
                    reducer.finish()

    def _queries(self, layer: str, queries: np.ndarray | torch.Tensor) -> torch.Tensor:
        if self._opened:
            raise ReplayError("training has begun: rows are gone that this question is about")
        spec = self._first.manifest.layers.get(layer)
        if spec is None:
            raise ReplayError(
                f"no layer {layer!r} was recorded; there are "
                f"{', '.join(map(repr, self._first.manifest.layers))}"
            )
        return checked_queries(queries, layer, spec.d_in)

    def _add(self, layer: str, queries: torch.Tensor, reducer: _R) -> _R:
        """Questions with the same queries share one product per tile."""
        for asked in self._asked.setdefault(layer, []):
            if torch.equal(asked.queries, queries):
                asked.reducers.append(reducer)
                return reducer
        self._asked[layer].append(_Asked(queries, [reducer]))
        return reducer

    def _fold(self, tile: LiveTile) -> None:
        for asked in self._asked[tile.layer]:
            weights = asked.weights(tile)
            for reducer in asked.reducers:
                reducer.update(tile, weights)

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


class _Asked:
    """Questions with the same queries to one layer."""

    def __init__(self, queries: torch.Tensor, reducers: list[Reducer]) -> None:
        self.queries = queries
        self.reducers = reducers
        self._longest = float(torch.linalg.vector_norm(queries.double(), dim=1).max())

    def weights(self, tile: LiveTile) -> torch.Tensor:
        """Attention weights [n, rows]: float64 where float32 could overflow or is not itself."""
        risky = self._longest * tile.max_norm > _FLOAT32_SAFE
        wide = risky or not multiplies_in_float32()
        return tile_weights(self.queries, tile.keys, wide=wide)


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
