"""An opened index: it answers questions, and refuses once it is closed or found damaged."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar, overload

import numpy as np
import torch

from dualform.engine.api.examples import Examples
from dualform.engine.api.keywords import Keywords
from dualform.engine.api.opened import Opened, check_target, query_tensor
from dualform.engine.api.results import (
    Attribution,
    DualOutput,
    Explanation,
    SelfInfluence,
    Sums,
    TopGroups,
    TopK,
    WeightsChunk,
)
from dualform.engine.api.several import attribute, explain
from dualform.engine.api.top_k import top_k
from dualform.engine.api.totals import dual_output, self_influence, sums, top_groups
from dualform.engine.context import own_settings
from dualform.engine.devices.devices import Devices
from dualform.engine.errors import DataLossError, FailedPreconditionError, NotFoundError
from dualform.engine.memory.layer import Layer, open_layer
from dualform.engine.memory.shards import RowFile, Stop
from dualform.engine.memory.shards import spared as spared_damage
from dualform.engine.memory.states import States
from dualform.engine.plan.planner import Planner
from dualform.engine.rows.rows import Rows
from dualform.engine.totals.coefficients import LayerCoefficients, layer_coefficients
from dualform.engine.totals.metric import UnitMetrics
from dualform.engine.totals.outputs import DualOutputs
from dualform.engine.totals.stored_parts import parts_off
from dualform.engine.totals.streams import CHUNK_BYTES, weights_in_row_order
from dualform.questions import (
    AttributeQuestion,
    ExplainQuestion,
    OutputQuestion,
    RowsQuestion,
    SelfInfluenceQuestion,
    StreamWeightsQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
)
from dualform.questions.placement import GPU_MEMORY
from dualform.store.errors import DamagedError
from dualform.store.files import FileEntry, check_digest, identity
from dualform.store.index import REBUILD, IndexManifest
from dualform.store.ledger import Ledger
from dualform.store.sampling import Sampling
from dualform.store.versions import Use

_Item = TypeVar("_Item")


class Index(Keywords):
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
        version: What whoever serves it calls this version.
        devices: Where its rows may lie beside the host's memory.
        machines: On how many others its rows are; 0 where they are here.
        use: What keeps its files from being removed, as long as somebody has the index.
    """

    machines = 0

    def __init__(
        self,
        path: Path,
        *,
        devices: Devices,
        use_faiss: bool,
        shards: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.path = path
        self.damage: str | None = None
        self.version = ""
        self.use: Use | None = None
        self._manifest = IndexManifest.load(path)
        if shards is not None:
            self._manifest = self._manifest.only(shards)
        self._ledger = self._manifest.load_ledger(path)
        spaces = self._manifest.spaces
        self._tables = [Rows(path, space) for space in spaces]
        self.layers: Mapping[str, Layer] = {
            name: open_layer(
                path, layer, spaces[layer.space], self._tables[layer.space], faiss=use_faiss
            )
            for name, layer in self._manifest.layers.items()
        }
        steps = self._manifest.steps
        for table in self._tables:
            if table.total and not 0 <= table.steps.min() <= table.steps.max() < steps:
                what = f"a row's step is none of the {steps:,} steps"
                raise DamagedError(path / "rows", what, REBUILD)
        self._states = States(path)
        outputs = DualOutputs(self._ledger, self._states)
        metrics = UnitMetrics(self._ledger, self._states)
        self.devices = devices
        planner = Planner(devices.cpu_pace)
        self._opened = Opened(self._ledger, outputs, metrics, planner, devices, use_faiss)
        self._examples = Examples(path, self._manifest.examples, self._manifest.payloads)
        self._closed = threading.Event()
        layers = list(self.layers.values())
        devices.add(path.name, layers)
        # Whoever lets go of it without a word, as a catalog does of an older version, frees them.
        self._leave_devices = weakref.finalize(self, devices.remove, layers)

    @classmethod
    @own_settings()
    def open(
        cls,
        path: Path | str,
        *,
        device: str | Sequence[str] = "auto",
        gpu_memory: float | str = GPU_MEMORY,
        devices: Devices | None = None,
        use_faiss: bool = True,
        shards: Sequence[Sequence[int]] | None = None,
    ) -> Index:
        """Open an index.

        Args:
            path: Its directory.
            device: "auto" (all GPUs that there are, or the CPU alone), "cpu", "cuda", "cuda:1", or
                a list such as ["cuda:0", "cuda:1"].
            gpu_memory: How much of each GPU's memory may be taken: a share, or bytes.
            devices: Those of several indexes, in place of `device` and `gpu_memory`.
            use_faiss: Let FAISS search whole shards on the CPU where it can, and multiply a few
                queries with large ones; False scans there with torch, and loads no FAISS. Rows and
                scores are the same; sums are within the same bound.
            shards: For each row space the numbers of those of its shards to open, ascending; None
                for all. Of a part, weights, sums of rows and contributions of SGD's family are
                those of its rows; whole outputs, and what has to see every step, are not.

        Raises:
            dualform.store.StoreError: No index there, a newer one, or a damaged one.
            ValueError: The device is none, or not there.
        """
        if devices is not None:
            return cls(Path(path), devices=devices, use_faiss=use_faiss, shards=shards)
        devices = Devices.find(device, gpu_memory)
        index = cls(Path(path), devices=devices, use_faiss=use_faiss, shards=shards)
        weakref.finalize(index, devices.close, wait=False)  # from whatever thread collects it
        return index

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
        self.use = None
        self._leave_devices()

    @property
    def closed(self) -> bool:
        """Whether further questions are refused."""
        return self._closed.is_set()

    @property
    def trouble(self) -> str | None:
        """Why some questions are refused though nothing is damaged; None where none are."""
        return None

    def look_again(self, stop: Stop | None = None) -> None:
        """Find out whether there is still `trouble`."""

    @property
    def steps(self) -> int:
        return self._manifest.steps

    @property
    def sampling(self) -> Sampling:
        """Which rows were recorded."""
        return self._manifest.sampling

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

    @overload
    def ask(self, question: TopKQuestion, stop: Stop | None = None) -> TopK: ...
    @overload
    def ask(self, question: TopGroupsQuestion, stop: Stop | None = None) -> TopGroups: ...
    @overload
    def ask(self, question: SumsQuestion, stop: Stop | None = None) -> Sums: ...
    @overload
    def ask(self, question: OutputQuestion, stop: Stop | None = None) -> DualOutput: ...

    def ask(
        self, question: RowsQuestion, stop: Stop | None = None
    ) -> TopK | TopGroups | Sums | DualOutput:
        """Answer a question about rows.

        Args:
            question: What is asked; its `index` and `explain_plan` say nothing here.
            stop: Asked between tiles; true once nobody waits for the answer.
        """
        layer = self.layer(question.layer)
        with self._guarded(layer):
            return answer(self._opened, layer, question, stop)

    def attribute(self, question: AttributeQuestion, stop: Stop | None = None) -> Attribution:
        """The groups whose rows, of all the question's layers, did most to each input's target."""
        layers = {each.layer: self.layer(each.layer) for each in question.layers}
        with self._guarded(*layers.values()):
            return attribute(self._opened, layers, question, stop)

    def self_influence(
        self, question: SelfInfluenceQuestion, stop: Stop | None = None
    ) -> SelfInfluence:
        """What groups' rows did to their own part of the loss."""
        layer = self.layer(question.layer)
        with self._guarded(layer):
            return self_influence(self._opened, layer, question, stop)

    def explain_layers(
        self, question: ExplainQuestion, stop: Stop | None = None
    ) -> Iterator[Explanation]:
        """Several answers about each of the question's layers, found as they are taken."""
        for name, queries in question.layers:
            layer = self.layer(name)
            with self._guarded(layer):
                found = explain(self._opened, layer, queries, question, stop)
            yield found

    def chunks(
        self,
        question: StreamWeightsQuestion,
        stop: Stop | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Iterator[WeightsChunk]:
        """Every attention weight in row order.

        Args:
            question: What is asked; it is checked before this returns.
            stop: Asked between tiles.
            chunk_bytes: Bytes of a chunk's weights, at most, unless one row has more.

        Returns:
            Chunks, which are computed as they are asked for. The weights of a key that is not
            finite are not finite either.
        """
        layer = self.layer(question.layer)
        found = weights_in_row_order(
            layer, query_tensor(layer, question.queries), chunk_bytes, stop
        )

        def guarded() -> Iterator[WeightsChunk]:
            while True:
                self.layer(question.layer)  # refused once the index is closed
                with self._guarded(layer):
                    chunk = next(found, None)
                if chunk is None:
                    return
                yield WeightsChunk(*chunk)

        return guarded()

    def check_queries(self, question: RowsQuestion) -> None:
        """Refuse queries and directions that the layer does not take: InvalidArgumentError, or
        NotFoundError."""
        layer = self.layer(question.layer)
        query_tensor(layer, question.queries)
        if isinstance(question, (TopKQuestion, TopGroupsQuestion)):
            direction = question.direction
            if direction is not None:
                check_target(layer, None, direction)

    def group_count(self, layer: str, group_by: str | None, field: str = "group_by") -> int:
        """How many groups a column makes, which the request named in this field; 1 without."""
        if group_by is None:
            return 1
        return len(self.layer(layer).space.grouping(group_by, field).values)

    def examples(self, ids: Sequence[int | str]) -> list[bytes | str | None]:
        """Payloads by example id, None where there is none; damage to them is no other answer's."""
        with self._guarded(), spared_damage():
            return self._examples.get(ids)

    def example_bytes(self, ids: Sequence[int | str]) -> int:
        """Bytes of these payloads together, known without reading them; 0 where it is not."""
        with self._guarded(), spared_damage():
            return self._examples.sizes(ids)

    @contextmanager
    def using(self, layer: Layer) -> Iterator[Opened]:
        """What a layer's answers are made with, for whoever makes a part of one; damage that is
        found meanwhile is a refusal."""
        with self._guarded(layer):
            yield self._opened

    @property
    def ledger(self) -> Ledger:
        """What the optimizer did, step by step."""
        return self._ledger

    @own_settings()
    def remainder(
        self, layer: str, queries: torch.Tensor
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """What no row explains of the trained layer's outputs, and those outputs.

        Args:
            layer: The layer's name.
            queries: float32 [n, d_in].

        Returns:
            float64 [n, d_out] both; None where the index does not know.
        """
        manifest = self.layer(layer).manifest
        outputs = self._opened.outputs
        return outputs.remainder(manifest, queries), outputs.trained(manifest, queries)

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
        manifest = self.layer(layer).manifest
        ends = {"initial": manifest.initial, "final": manifest.final, "rebuilt": manifest.rebuilt}
        entry = dict(manifest.states).get(which) if isinstance(which, int) else ends[which]
        with self._guarded():
            if entry is None:
                return None
            return {
                name: tensor.numpy().copy() for name, tensor in self._states.read(entry).items()
            }

    def parts_off(self, layer: str) -> list[str]:
        """Which columns' stored parts do not add up to what all of a layer's rows do, in words."""
        with self._guarded():
            return parts_off(self.layer(layer).manifest, self._states)

    def adopt(self, before: Index) -> None:
        """Use the memory of an earlier version where that is of the very same files: what it has
        read and checked is not read again."""
        for name, layer in self.layers.items():
            known = before.layers.get(name)
            for shard, theirs in zip(layer.shards, known.shards if known else (), strict=False):
                shard.adopt(theirs)

    def verify_files(self, stop: Stop | None = None) -> None:
        """Hash every file against the manifest, and hold what it says of the keys against them.

        Raises:
            DataLossError: One differs; `damage` says which from now on, unless it is a file that
                only makes answers cheaper, or payloads: what goes without is answered all the same.
        """
        with self._guarded():
            for file in _until(stop, self._row_files()):
                file.check()
            for entry in _until(stop, self._needed()):
                check_digest(self.path, entry, REBUILD)
        for entry in _until(stop, self._spared()):
            with spared_damage():
                check_digest(self.path, entry, REBUILD)

    def identities(self) -> dict[str, tuple[int, ...] | None]:
        """Of each file but the manifest what changes where it is written again or replaced; None
        for one that is not there."""
        entries = [entry for entry in (*self._needed(), *self._spared()) if entry is not None]
        paths = [file.path for file in self._row_files()]
        paths += [self.path / entry.name for entry in entries]
        return {str(path): _identity(path) for path in paths}

    def _row_files(self) -> list[RowFile]:
        """The keys and values."""
        shards = [shard for layer in self.layers.values() for shard in layer.shards]
        return [file for shard in shards for file in (shard.keys, shard.values) if file is not None]

    def _needed(self) -> list[FileEntry | None]:
        """What answers need besides keys and values; None where there is no such file."""
        manifest = self._manifest
        needed: list[FileEntry | None] = [manifest.ledger]
        for space in manifest.spaces:
            needed += [shard.sidecar for shard in space.shards]
        for layer in self.layers.values():
            published = layer.manifest
            needed += [
                published.initial,
                published.final,
                published.rebuilt,
                *(entry for _, entry in published.states),
            ]
            needed += [parts.file for parts in published.parts]
        return needed

    def _spared(self) -> list[FileEntry | None]:
        """What only makes answers cheaper, or is looked at; None where there is no such file."""
        spared = [self._manifest.examples, self._manifest.payloads]
        for layer in self.layers.values():
            published = layer.manifest
            spared += [
                published.directions,
                None if published.equal_keys is None else published.equal_keys.first,
            ]
            spared += [entry for shard in published.shards for entry in (shard.sketch, shard.sums)]
        return spared

    @contextmanager
    def _guarded(self, *layers: Layer) -> Iterator[None]:
        """Turn damage found on the way, or to the layer's files meanwhile, into a refusal that
        lasts."""
        try:
            with own_settings():
                yield
            for layer in layers:
                layer.check_unchanged()
        except DamagedError as error:
            self.damage = str(error)
            raise DataLossError(str(error)) from None


def answer(
    opened: Opened, layer: Layer, question: RowsQuestion, stop: Stop | None
) -> TopK | TopGroups | Sums | DualOutput:
    """Answer a question about a layer's rows."""
    if isinstance(question, TopKQuestion):
        return top_k(opened, layer, question, stop)
    if isinstance(question, TopGroupsQuestion):
        return top_groups(opened, layer, question, stop)
    if isinstance(question, SumsQuestion):
        return sums(opened, layer, question, stop)
    return dual_output(opened, layer, question, stop)


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        return identity(os.lstat(path))
    except OSError:
        return None


def _until(stop: Stop | None, items: Iterable[_Item | None]) -> Iterator[_Item]:
    """Those that are there, until the caller gives up."""
    for item in items:
        if stop is not None and stop():
            return
        if item is not None:
            yield item
