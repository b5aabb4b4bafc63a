"""An opened index: what can be asked of it, and the checks that every question passes first."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import torch

from dualform.engine.api import validation
from dualform.engine.api.examples import Examples
from dualform.engine.api.explain import Questions, explain
from dualform.engine.api.results import (
    Coverage,
    DualOutput,
    Explanation,
    Sums,
    TopK,
    WeightsChunk,
)
from dualform.engine.context import own_settings
from dualform.engine.errors import (
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
)
from dualform.engine.memory.layer import Layer, open_layer
from dualform.engine.memory.shards import Stop
from dualform.engine.memory.states import States
from dualform.engine.plan.plan import Plan
from dualform.engine.plan.planner import Planner
from dualform.engine.rows.bins import binned
from dualform.engine.rows.rows import Rows
from dualform.engine.topk import scan
from dualform.engine.topk.candidates import Ranking
from dualform.engine.topk.distinct import Distinct
from dualform.engine.totals import outputs, sums
from dualform.engine.totals.coefficients import LayerCoefficients, layer_coefficients
from dualform.engine.totals.outputs import DualOutputs, Question
from dualform.engine.totals.streams import CHUNK_BYTES, weights_in_row_order
from dualform.store.errors import DamagedError
from dualform.store.files import FileEntry, check_digest
from dualform.store.grouping import Grouping
from dualform.store.index import REBUILD, IndexManifest
from dualform.store.ledger import Ledger
from dualform.v1 import attribution_pb2 as pb

Order = Literal["largest", "smallest", "absolute"]
RankBy = Literal["weight", "contribution"]
Strategy = Literal["auto", "certified", "flat", "scan"]


class Index:
    """A published index, open for questions. Thread-safe; use as a context manager or `close()`.

    Every method raises subclasses of `dualform.engine.errors.EngineError`: NotFoundError for an
    unknown layer, InvalidArgumentError for a bad argument (with its field), FailedPreconditionError
    where the index can't answer, DataLossError for a damaged file, CancelledError once `stop()`
    is true.

    Attributes:
        path: The index's directory.
        steps: Optimizer steps of the training run.
        optimizer: The optimizer's class name.
        layers: By name, as in `model.named_modules()`.
        damage: None, or what was found damaged; questions that need it are refused.
    """

    def __init__(self, path: Path, *, device: torch.device, use_faiss: bool) -> None:
        self.path = path
        self.damage: str | None = None
        self._device = device
        self._use_faiss = use_faiss
        self._manifest = IndexManifest.load(path)
        self._ledger = self._manifest.load_ledger(path)
        spaces = self._manifest.spaces
        self._rows = [Rows(path, space) for space in spaces]
        self.layers: Mapping[str, Layer] = {
            name: open_layer(path, layer, spaces[layer.space], self._rows[layer.space])
            for name, layer in self._manifest.layers.items()
        }
        self._states = States(path)
        self._outputs = DualOutputs(self._ledger, self._states, device)
        self._examples = Examples(path, self._manifest.examples)
        self._planner = Planner()
        self._closed = threading.Event()

    @classmethod
    @own_settings()
    def open(cls, path: Path | str, *, device: str = "auto", use_faiss: bool = True) -> Index:
        """Open an index.

        Args:
            path: Its directory.
            device: "cpu", "cuda", or "auto": cuda where torch has it.
            use_faiss: Let FAISS propose rows where it can; False scans with torch alone.

        Raises:
            dualform.store.StoreError: No index there, a newer one, or a damaged one.
            ValueError: The device is none, or not there.
        """
        return cls(Path(path), device=validation.device(device), use_faiss=use_faiss)

    def __enter__(self) -> Index:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Refuse further questions. Maps are released when the last answer is done."""
        self._closed.set()

    @property
    def steps(self) -> int:
        return self._manifest.steps

    @property
    def optimizer(self) -> str:
        return self._manifest.optimizer

    @property
    def complete(self) -> bool:
        """Whether training's recording was closed in an orderly way."""
        return self._manifest.complete

    def layer(self, name: str) -> Layer:
        """A layer by name, or NotFoundError with the names there are."""
        if self._closed.is_set():
            raise FailedPreconditionError(f"the index {self.path.name} is closed")
        if name not in self.layers:
            raise NotFoundError(
                f"no layer {name!r}; the layers are {', '.join(map(repr, self.layers))}",
                field="layer",
                reason="UNKNOWN_LAYER",
            )
        return self.layers[name]

    def top_k(
        self,
        layer: str,
        queries: np.ndarray,
        k: int,
        *,
        where: pb.Filter | None = None,
        group_by: str | None = None,
        order: Order = "largest",
        rank_by: RankBy = "weight",
        unit: int | None = None,
        at_step: int | None = None,
        distinct: str | None = None,
        strategy: Strategy = "auto",
        stop: Stop | None = None,
    ) -> TopK:
        """The k rows with the largest, smallest or largest absolute weight or contribution.

        Args:
            layer: The layer's name.
            queries: float32 [n, d_in], finite.
            k: At least 1.
            where: Which rows take part; None for all.
            group_by: A metadata column: the k best rows of each of its values.
            order: "absolute" sorts by |score| descending; scores stay signed.
            rank_by: "weight", or "contribution": what a row added to one output unit.
            unit: The output unit, 0 to d_out - 1; with "contribution" alone.
            at_step: Contributions after so many steps; None for the trained layer. Likewise.
            distinct: A metadata column: of rows with the same value only the best counts; rows
                without a value stand for themselves.
            strategy: How rows are proposed; the answer is the same. "certified" prunes by
                sketches, "flat" asks FAISS, "scan" multiplies tiles. One that does not apply is
                refused; "auto" takes the cheapest that does, by estimate.
            stop: Asked between tiles.
        """
        own = self.layer(layer)
        query = validation.query_tensor(queries, own.manifest)
        contribution, end = validation.contribution(own, self._ledger, rank_by, unit, at_step)
        grouping = None if group_by is None else own.space.grouping(group_by)
        apart = None if distinct is None else Distinct.of(own.space.grouping(distinct, "distinct"))
        ranking = validation.ranking(k, order, grouping, contribution, apart)
        mask = own.space.select(where, before_step=end)
        refused = self._top_k_refusals(own, ranking, mask is own.space.everything)
        coverage = _coverage(own, mask)
        plan = self._planner.top_k(
            own, ranking.order, ranking.hits, len(query), coverage.rows, refused, strategy
        )
        with self._guarded():
            faiss = refused["flat"] is None
            search = scan.Scan(own, query, ranking, self._device, plan.strategy, faiss, stop)
            begin = time.perf_counter()
            positions, scores = search.run(mask & own.finite)
            kept = search.kept / search.asked if search.asked else None
            seconds = time.perf_counter() - begin
        self._planner.learn(own, ranking.order, ranking.hits, len(query), plan, kept, seconds)
        return _hits(own, len(query), ranking, positions, scores, mask, coverage, plan)

    def sums(
        self,
        layer: str,
        queries: np.ndarray,
        group_by: str,
        *,
        absolute: bool = False,
        where: pb.Filter | None = None,
        bins: Sequence[float] | None = None,
        strategy: sums.Strategy = "auto",
        stop: Stop | None = None,
    ) -> Sums:
        """Total attention weight, signed or absolute, per group.

        A key that is not finite makes its group's total NaN: nothing is left out silently.

        Args:
            layer: The layer's name.
            queries: float32 [n, d_in], finite.
            group_by: A metadata column.
            absolute: Sum |weight|.
            where: Which rows take part; None for all.
            bins: Ascending edges for a numeric column, as in numpy.histogram: group i holds
                edges[i] <= value < edges[i + 1], the last one its upper edge too. Other rows take
                no part; groups are called by their lower edges.
            strategy: "key_sums" takes the stored sums of the keys of whole runs of rows with the
                same task and label, "distinct_keys" multiplies one row for each distinct key,
                "scan" every row; refused where it does not apply. "auto" takes key sums where
                there are any, and for the other rows the cheaper of the other two, by estimate.
            stop: Asked between tiles.
        """
        own = self.layer(layer)
        query = validation.query_tensor(queries, own.manifest)
        grouping = own.space.grouping(group_by)
        mask = own.space.select(where)
        if bins is None:
            runs, counts = own.space.run_codes(group_by), own.space.count(group_by, mask)
        else:
            grouping = binned(group_by, own.space.columns[group_by], bins)
            mask = mask & (grouping.codes >= 0)
            runs = own.space.codes_of_runs(grouping)
            counts = np.bincount(grouping.codes[mask], minlength=len(bins) - 1).astype(np.int64)
        question = sums.Question(query, grouping, runs, absolute, mask)
        way = sums.plan(own, question, strategy)
        with self._guarded():
            totals = sums.total_weights(own, question, way, self._device, stop)
        return Sums(grouping.values, totals, counts, _coverage(own, mask), way.plan)

    def dual_output(
        self,
        layer: str,
        queries: np.ndarray,
        *,
        where: pb.Filter | None = None,
        at_step: int | None = None,
        group_by: str | None = None,
        strategy: outputs.Strategy = "auto",
        stop: Stop | None = None,
    ) -> DualOutput:
        """The layer's output as initial part plus the sum of the rows' contributions.

        Eq. dual_linear of Irie et al. (2022), with the coefficients that the optimizer's settings
        imply: a row of step t adds (c_t x_t.x + c'_t) e_t, primes for the bias. Of all rows
        together, what those before the last stored state j <= at_step add comes in one product with
        it, and for the trained layer what all of them add in one product with the weight that they
        were added up to (docs/decisions, 7 and 8); everything else is a scan.

        Args:
            layer: The layer's name.
            queries: float32 [n, d_in], finite.
            where: Which rows take part; the initial part always stays.
            at_step: After so many steps, 0 to `steps`; None for the trained layer.
            group_by: A metadata column: the output split by its values, the initial part beside.
            strategy: How; for the trained layer "scan" adds every row instead of taking what they
                were added up to ("rebuilt", refused where it does not apply).
            stop: Asked between tiles.
        """
        own = self.layer(layer)
        query = validation.query_tensor(queries, own.manifest)
        end = validation.last_step(own, self._ledger, at_step)
        grouping = None if group_by is None else own.space.grouping(group_by)
        mask = own.space.select(where, before_step=None if at_step is None else end)
        question = Question(query, at_step, end, grouping, mask, where is not None, strategy)
        coverage = _coverage(own, mask)
        plan = outputs.plan(own, question, coverage.rows)
        with self._guarded():
            parts = self._outputs.answer(own, question, stop)
        counts = None if group_by is None else own.space.count(group_by, mask)
        return _output(parts, grouping, counts, coverage, plan)

    def explain(
        self,
        layer: str,
        queries: np.ndarray,
        *,
        k: int | None = None,
        order: Order = "largest",
        where: pb.Filter | None = None,
        group_by: str | None = None,
        absolute: bool = False,
        dual_output: bool = False,
        stop: Stop | None = None,
    ) -> Explanation:
        """Several answers about one layer, the same as asked one by one; what scans, scans once.

        Args:
            layer: The layer's name.
            queries: float32 [n, d_in], finite.
            k: So many best rows by weight, as `top_k` gives; None for none.
            order: As for `top_k`.
            where: Which rows take part, in all answers.
            group_by: A metadata column: `sums` over it, and the output split by it; None for no
                sums, and the output whole.
            absolute: Sum |weight|.
            dual_output: The trained layer's output too, as `dual_output` gives.
            stop: Asked between tiles.
        """
        own = self.layer(layer)
        query = validation.query_tensor(queries, own.manifest)
        ranking = None if k is None else validation.ranking(k, order)
        grouping = None if group_by is None else own.space.grouping(group_by)
        mask = own.space.select(where)
        coverage = _coverage(own, mask)
        totals = wanted = counts = None
        if group_by is not None and grouping is not None:
            runs, counts = own.space.run_codes(group_by), own.space.count(group_by, mask)
            totals = sums.Question(query, grouping, runs, absolute, mask)
        if dual_output:
            end = validation.last_step(own, self._ledger, None)
            wanted = Question(query, None, end, grouping, mask, where is not None, "auto")
        joins = False
        if ranking is not None:
            refused = self._top_k_refusals(own, ranking, mask is own.space.everything)
            alone = self._planner.top_k(
                own, ranking.order, ranking.hits, len(query), coverage.rows, refused, "auto"
            )
            joins = self._planner.joins(alone, len(query), coverage.rows)
        asked = Questions(query, mask, ranking, joins, totals, wanted)
        with self._guarded():
            found = explain(own, asked, coverage.rows, self._outputs, self._device, stop)
        best = None
        if ranking is not None and found.hits is not None:
            plan = found.plans["top_k"]
            best = _hits(own, len(query), ranking, *found.hits, mask, coverage, plan)
        elif ranking is not None:
            best = self.top_k(layer, queries, ranking.k, where=where, order=order, stop=stop)
        total = output = None
        if found.sums is not None and grouping is not None and counts is not None:
            plan = found.plans["sums"]
            total = Sums(grouping.values, found.sums, counts, coverage, plan)
        if found.output is not None:
            output = _output(found.output, grouping, counts, coverage, found.plans["output"])
        return Explanation(best, total, output)

    def stream_weights(
        self,
        layer: str,
        queries: np.ndarray,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        stop: Stop | None = None,
    ) -> Iterator[WeightsChunk]:
        """Every attention weight in row order, the float32 nearest to the exact one.

        Args:
            layer: The layer's name.
            queries: float32 [n, d_in], finite.
            chunk_bytes: Bytes of a chunk's weights, at most, unless one row has more.
            stop: Asked between tiles.

        Returns:
            Chunks, which are computed as they are asked for. The weights of a key that is not
            finite are not finite either.
        """
        own = self.layer(layer)
        query = validation.query_tensor(queries, own.manifest)
        chunks = weights_in_row_order(own, query, chunk_bytes, stop)

        def guarded() -> Iterator[WeightsChunk]:
            while True:
                self.layer(layer)  # refused once the index is closed
                with self._guarded():
                    found = next(chunks, None)
                if found is None:
                    return
                yield WeightsChunk(*found)

        return guarded()

    def check_queries(self, layer: str, queries: np.ndarray) -> None:
        """Refuse queries that the layer does not take: InvalidArgumentError, or NotFoundError."""
        validation.query_tensor(queries, self.layer(layer).manifest)

    def group_count(self, layer: str, group_by: str) -> int:
        """How many groups a column makes."""
        return len(self.layer(layer).space.grouping(group_by).values)

    def examples(self, ids: Sequence[int | str]) -> list[bytes | str | None]:
        """Payloads by example id, None where there is none."""
        with self._guarded():
            return self._examples.get(ids)

    @property
    def ledger(self) -> Ledger:
        """What the optimizer did, step by step."""
        return self._ledger

    def ledger_coefficients(self, layer: str, at_step: int) -> LayerCoefficients:
        """The coefficients of every row after so many steps."""
        return layer_coefficients(self._ledger, self.layer(layer).manifest, at_step)

    def state(
        self, layer: str, which: Literal["initial", "final", "rebuilt"] | int
    ) -> dict[str, np.ndarray] | None:
        """A layer's stored tensors: weight, bias, momentum buffers; None where there are none.

        Args:
            layer: Its name.
            which: Before the first step, after the last, or a stored state by its step; "rebuilt"
                is what the rows add up to in the trained layer, float64.
        """
        own = self.layer(layer).manifest
        ends = {"initial": own.initial, "final": own.final, "rebuilt": own.rebuilt}
        entry = dict(own.states).get(which) if isinstance(which, int) else ends[which]
        with self._guarded():
            if entry is None:
                return None
            return {name: own.numpy().copy() for name, own in self._states.read(entry).items()}

    def verify_files(self, stop: Stop | None = None) -> None:
        """Hash every file against the manifest.

        Raises:
            DataLossError: One differs; `damage` says which from now on.
        """
        entries: list[FileEntry | None] = [self._manifest.ledger, self._manifest.examples]
        for space in self._manifest.spaces:
            entries += [shard.sidecar for shard in space.shards]
        for layer in self._manifest.layers.values():
            entries += [layer.directions, layer.initial, layer.final, layer.rebuilt]
            entries.append(None if layer.equal_keys is None else layer.equal_keys.first)
            entries += [entry for _, entry in layer.states]
            for shard in layer.shards:
                entries += [shard.keys, shard.values, shard.sketch, shard.sums]
        with self._guarded():
            for entry in entries:
                if stop is not None and stop():
                    return
                if entry is not None:
                    check_digest(self.path, entry, REBUILD)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn damage found on the way into a refusal that lasts."""
        try:
            with own_settings():
                yield
        except DamagedError as error:
            self.damage = str(error)
            raise DataLossError(str(error)) from None

    def _top_k_refusals(self, layer: Layer, ranking: Ranking, whole: bool) -> dict[str, str | None]:
        """Why each strategy can't answer a top-k of all rows, or of some; None where it can."""
        faiss = scan.faiss_applies(ranking, whole, self._device)
        return {
            "certified": scan.sketches_apply(layer, ranking, self._device),
            "flat": faiss if self._use_faiss else "this process scans with torch alone",
            "scan": None,
        }


def _hits(
    layer: Layer,
    queries: int,
    ranking: Ranking,
    positions: np.ndarray,
    scores: np.ndarray,
    selected: np.ndarray,
    coverage: Coverage,
    plan: Plan,
) -> TopK:
    """The answer to n queries: positions, int64 [n * groups, k], and scores, of selected rows."""
    grouping, k = ranking.grouping, ranking.k
    shape = (queries, k) if grouping is None else (queries, ranking.groups, k)
    found = positions >= 0
    counts = None
    if ranking.distinct is not None:
        counts = ranking.distinct.counts(positions, selected, grouping).reshape(shape)
    ids = np.full(positions.shape, -1, np.int64)
    ids[found] = layer.space.ids[positions[found]]
    return TopK(
        rows=ids.reshape(shape),
        scores=scores.reshape(shape),
        counts=counts,
        groups=None if grouping is None else grouping.values,
        columns=layer.space.take(positions.reshape(-1)),
        coverage=coverage,
        plan=plan,
    )


def _output(
    parts: outputs.Parts,
    grouping: Grouping | None,
    counts: np.ndarray | None,
    coverage: Coverage,
    plan: Plan,
) -> DualOutput:
    return DualOutput(
        values=parts.values.astype(np.float32),
        initial=parts.initial.astype(np.float32),
        trained=None if parts.trained is None else parts.trained.astype(np.float32),
        residual=None if parts.residual is None else parts.residual.astype(np.float32),
        groups=None if grouping is None else grouping.values,
        counts=counts,
        coverage=coverage,
        plan=plan,
    )


def _coverage(layer: Layer, mask: np.ndarray) -> Coverage:
    if mask is layer.space.everything:
        return Coverage(layer.rows, layer.rows, layer.nonfinite)
    rows = int(np.count_nonzero(mask))
    return Coverage(rows, layer.space.total, rows - int(np.count_nonzero(mask & layer.finite)))
