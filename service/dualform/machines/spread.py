"""An index whose rows are on several machines: it asks all of them, and makes one answer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from dualform.engine.api.index import Index, answer
from dualform.engine.api.opened import Opened, query_tensor
from dualform.engine.api.results import (
    Attribution,
    DualOutput,
    Explanation,
    SelfInfluence,
    Sums,
    TopK,
    WeightsChunk,
)
from dualform.engine.api.totals import self_influence as self_influence_here
from dualform.engine.devices.devices import Devices
from dualform.engine.errors import DataLossError, EngineError, FailedPreconditionError
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.messages.versions import Version
from dualform.engine.totals.streams import CHUNK_BYTES, chunk_rows
from dualform.machines import asked
from dualform.machines.answers import ANSWERS, self_influence
from dualform.machines.asking import Spread
from dualform.machines.attributing import attribute
from dualform.machines.fleet import Fleet, Lost
from dualform.machines.following import FollowedUnits
from dualform.machines.parts import Part, split
from dualform.machines.rows import FarRows
from dualform.machines.unions import union
from dualform.questions import (
    AttributeQuestion,
    ExplainQuestion,
    OutputQuestion,
    RowsQuestion,
    SelfInfluenceQuestion,
    StreamWeightsQuestion,
    SumsQuestion,
    TopKQuestion,
)
from dualform.questions.placement import GPU_MEMORY, device_names
from dualform.store.index import IndexManifest

Parts = Sequence["tuple[int, Part]"]


class Machines:
    """Opens indexes on the machines of a fleet.

    Args:
        fleet: Who they are.
        device, gpu_memory: Of each, as `Index.open` takes them.
        count: On how many of them; None for all.
    """

    def __init__(
        self,
        fleet: Fleet,
        device: str | Sequence[str] = "auto",
        count: int | None = None,
        gpu_memory: float | str = GPU_MEMORY,
    ) -> None:
        self._fleet, self._device, self._gpu_memory = fleet, device_names(device), gpu_memory
        self._count = fleet.count if count is None else count
        self._indexes: weakref.WeakSet[SpreadIndex] = weakref.WeakSet()

    @property
    def fleet(self) -> Fleet:
        """Who they are."""
        return self._fleet

    @property
    def indexes(self) -> list[SpreadIndex]:
        """Those that are open."""
        return [index for index in list(self._indexes) if not index.closed]

    def open(self, version: Version) -> SpreadIndex:
        """Open an index on them: see `dualform.engine.messages.opening.Opener`."""
        index = SpreadIndex(version, self._fleet, self._count, self._device, self._gpu_memory)
        index.version = version.name
        self._indexes.add(index)
        return index

    def close(self) -> None:
        """End them."""
        self._fleet.close()


class SpreadIndex(Index):
    """What `Index` is, of rows that are elsewhere.

    Here are the states, the ledger and the payloads, of which the index's directory is read; the
    shards are opened by the machines alone.

    Args:
        version: Of the index.
        fleet: The machines.
        count: On how many of them.
        device, gpu_memory: As `Part` has them.
    """

    def __init__(
        self,
        version: Version,
        fleet: Fleet,
        count: int,
        device: str | tuple[str, ...] = "auto",
        gpu_memory: float | str = GPU_MEMORY,
    ) -> None:
        manifest = IndexManifest.load(version.path)
        none: list[tuple[int, ...]] = [()] * len(manifest.spaces)
        super().__init__(version.path, devices=Devices(), use_faiss=False, shards=none)
        self._here, self._opened = self._opened, cast(Opened, _NotHere())
        self._nowhere: dict[Part, str] = {}
        self._units = FollowedUnits()
        self._rowless, self._published = self.layers, manifest
        self._fleet, self.machines = fleet, count
        self._parts = [
            (seat, Part(version.path, version.name, shards, device, gpu_memory))
            for seat, shards in enumerate(split(manifest, count))
            if any(shards)
        ]
        weakref.finalize(self, fleet.forget, [part for _, part in self._parts])
        self.layers = self._far_layers()

    def ask(self, question: RowsQuestion, stop: Stop | None = None) -> Any:
        """Answer a question about rows: all machines are asked, and their answers made one.

        Raises:
            DataLossError: A machine's rows are nowhere.
        """
        layer = self.layer(question.layer)
        with self._guarded():
            if not layer.rows:
                return answer(self._here, self._rowless[layer.name], question, stop)
            found = ANSWERS.get(type(question))
            if found is None:
                raise _refused(type(question).__name__)
            return found(self._spread(layer, stop), question)

    def explain_layers(
        self, question: ExplainQuestion, stop: Stop | None = None
    ) -> Iterator[Explanation]:
        """Several answers about each of the question's layers, asked one by one."""
        column, where = question.group_by, question.where
        for name, queries in question.layers:
            best: TopK | None = None
            total: Sums | None = None
            output: DualOutput | None = None
            if column is not None:
                sums = SumsQuestion(name, queries, column, absolute=question.absolute, where=where)
                total = self.ask(sums, stop)
            if question.output:
                wanted = OutputQuestion(
                    name, queries, where=where, group_by=column, max_residual=question.max_residual
                )
                output = self.ask(wanted, stop)
            if question.k:
                rows = TopKQuestion(name, queries, k=question.k, order=question.order, where=where)
                best = self.ask(rows, stop)
            yield Explanation(best, total, output)

    def attribute(self, question: AttributeQuestion, stop: Stop | None = None) -> Attribution:
        """The groups that did most to a model's outputs, over several layers."""
        spreads = [self._spread(self.layer(each.layer), stop) for each in question.layers]
        with self._guarded():
            return attribute(spreads, question)

    def self_influence(
        self, question: SelfInfluenceQuestion, stop: Stop | None = None
    ) -> SelfInfluence:
        """What groups' rows did to their own part of the loss."""
        layer = self.layer(question.layer)
        with self._guarded():
            if not layer.rows:
                return self_influence_here(self._here, self._rowless[layer.name], question, stop)
            return self_influence(self._spread(layer, stop), question)

    def chunks(
        self,
        question: StreamWeightsQuestion,
        stop: Stop | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Iterator[WeightsChunk]:
        """Every attention weight in row order: chunk by chunk, from whoever has the rows."""
        layer = self.layer(question.layer)
        query_tensor(layer, question.queries)
        rows = chunk_rows(len(question.queries), chunk_bytes)
        space = self._published.spaces[layer.row_space]
        homes = self._of(layer)

        def found() -> Iterator[WeightsChunk]:
            for number, shard in enumerate(space.shards):
                home = next(home for home in homes if number in home[1].numbers(layer.row_space))
                inside = home[1].numbers(layer.row_space).index(number)
                for first in range(0, shard.rows, rows):
                    self.layer(question.layer)  # refused once the index is closed
                    (chunk,) = _whole(
                        self._fleet.ask(
                            [home], asked.weights, question, inside, first, rows, stop=stop
                        )
                    )
                    yield WeightsChunk(*chunk)

        return found()

    def verify_files(self, stop: Stop | None = None) -> None:
        """Hash every file: the states here, each machine its shards.

        Raises:
            DataLossError: One differs; `damage` says which from now on.
        """
        super().verify_files(stop)
        for found in self._fleet.ask(self._parts, asked.verify, stop=stop):
            if isinstance(found, Lost):
                if found.error.reason == DataLossError.default_reason:
                    self.damage = str(found.error)
                raise found.error

    def identities(self) -> dict[str, tuple[int, ...] | None]:
        """As of `Index`; of the files of a machine that is out of reach nothing is known."""
        known = super().identities()
        for found in self._fleet.ask(self._parts, asked.identities):
            if not isinstance(found, Lost):
                known.update(found)
        return known

    @property
    def trouble(self) -> str | None:
        """Which rows are nowhere, as far as was noticed; None while all are there."""
        nowhere = dict(self._nowhere)
        if not nowhere:
            return None
        rows = sum(self.rows_of(part) for part in nowhere)
        whole = sum(space.rows for space in self._published.spaces)
        return (
            f"{rows:,} of {whole:,} rows, of {len(nowhere)} of {len(self._parts)} parts, are "
            f"nowhere: {next(iter(nowhere.values()))}; questions with partial=True are answered "
            "from the others"
        )

    def rows_of(self, part: Part) -> int:
        """How many rows a part has, of all row spaces."""
        return sum(
            space.shards[shard].rows
            for number, space in enumerate(self._published.spaces)
            for shard in part.numbers(number)
        )

    def nowhere(self) -> int:
        """How many rows are nowhere, as far as was noticed."""
        return sum(self.rows_of(part) for part in list(self._nowhere))

    def seats(self) -> list[tuple[int, int]]:
        """Of each part, the machine that it belongs to, and how many shards it has."""
        return [
            (seat, sum(end - first for ranges in part.shards for first, end in ranges))
            for seat, part in self._parts
        ]

    def look_again(self, stop: Stop | None = None) -> None:
        """Whether what was nowhere is somewhere again."""
        homes = [home for home in self._parts if home[1] in self._nowhere]
        if homes:
            self._noted(homes, self._fleet.ask(homes, asked.describe, stop=stop))

    def _noted(self, homes: Parts, found: list[Any]) -> list[Any]:
        """Note which parts are nowhere."""
        for (_, part), each in zip(homes, found, strict=True):
            if isinstance(each, Lost):
                self._nowhere[part] = str(each.error)
            else:
                self._nowhere.pop(part, None)
        return found

    def close(self) -> None:
        """Refuse further questions; the machines close their parts."""
        super().close()
        self._fleet.forget([part for _, part in self._parts])

    def _of(self, layer: Layer) -> Parts:
        """Those with rows of the layer."""
        return [home for home in self._parts if home[1].shards[layer.row_space]]

    def _spread(self, layer: Layer, stop: Stop | None) -> Spread:
        homes, spaces = self._of(layer), self._published.spaces
        shards = spaces[layer.row_space].shards

        def ask(function: Callable[..., Any], *arguments: Any) -> list[Any]:
            return self._noted(homes, self._fleet.ask(homes, function, *arguments, stop=stop))

        sizes = [
            sum(shards[number].rows for number in part.numbers(layer.row_space))
            for _, part in homes
        ]

        def ask_machine(machine: int, function: Callable[..., Any], *arguments: Any) -> Any:
            home = homes[machine : machine + 1]
            return self._noted(home, self._fleet.ask(home, function, *arguments, stop=stop))[0]

        return Spread(self._here, layer, ask, sizes, stop, ask_machine, self._units)

    def _far_layers(self) -> Mapping[str, Layer]:
        columns: dict[int, asked.Columns] = {}
        for found in _whole(self._fleet.ask(self._parts, asked.describe)):
            columns = {**found, **columns}
        tables = {
            number: FarRows(space.rows, dict(columns[number]), self._values(number))
            for number, space in enumerate(self._published.spaces)
            if number in columns
        }
        layers = {}
        for name, layer in self._rowless.items():
            far = tables.get(layer.row_space)
            ranges = [
                end - first
                for shard in self._published.layers[name].shards
                for first, end in shard.nonfinite
            ]
            layers[name] = (
                layer if far is None else replace(layer, space=far, nonfinite=sum(ranges))
            )
        return layers

    def _values(self, space: int) -> Callable[[str, str], tuple[Any, bool]]:
        """Asks the machines for the values of a space's column; see `rows.Values`."""
        layer = next(layer for layer in self._rowless.values() if layer.row_space == space)
        homes = self._of(layer)
        # No cycle: whoever asks holds the index.
        fleet, name = self._fleet, layer.name

        def values(column: str, field: str) -> tuple[Any, bool]:
            found = fleet.ask(homes, asked.values_of, name, column, field)
            known = [each for each in found if not isinstance(each, Lost)]
            if not known:
                raise found[0].error
            return union(known)[0], len(known) == len(found)

        return values


class _NotHere:
    """In the place of what an index answers with: what is not distributed yet says so."""

    def __getattr__(self, name: str) -> Any:
        raise _refused("this")


def _refused(what: str) -> EngineError:
    return FailedPreconditionError(
        f"{what} cannot be asked of an index on several machines yet; serve it without --ray on "
        "one that has all of it",
        reason="NOT_DISTRIBUTED",
    )


def _whole(found: list[Any]) -> list[Any]:
    """What all machines found, or the refusal."""
    for each in found:
        if isinstance(each, Lost):
            raise each.error
    return found
