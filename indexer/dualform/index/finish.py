"""What belongs to no shard: states, sums, equal keys, the ledger, payloads; the manifest last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import save as save_safetensors

from dualform.index.layer import write_array
from dualform.index.parts import write_parts
from dualform.index.payloads import write_payloads
from dualform.index.plan import Plan
from dualform.index.row_sum import FollowedSum, RowSums
from dualform.store.files import FileEntry, sync_directory, write_atomic
from dualform.store.index import IndexManifest
from dualform.store.index_parts import (
    EXAMPLES,
    LEDGER,
    PAYLOADS,
    EqualKeys,
    IndexLayer,
    LayerShard,
    RowSpace,
    SpaceShard,
    StoredParts,
    layer_directory,
    layer_file,
)
from dualform.store.ledger import to_parquet
from dualform.store.recording import LayerSpec

State = Mapping[str, np.ndarray]
ByParameter = Mapping[str, State]
"""A parameter and its optimizer's buffers, by its name."""
Share = Callable[[str], "FileEntry | None"]
"""Puts a file that an earlier version of the index has below the new one; None where none has it,
or where it may have changed."""


@dataclass(frozen=True)
class Summed:
    """What a layer's rows add up to.

    Attributes:
        total: float64 by parameter; None where that is not finite.
        parts: Of each stored part, likewise.
    """

    total: State | None
    parts: Sequence[State]

    @classmethod
    def of(cls, row_sum: RowSums | FollowedSum) -> Summed:
        """Of rows that were all taken; nothing may be added any more."""
        total = row_sum.result()
        return cls(total, [] if total is None else row_sum.parts())


@dataclass(frozen=True)
class MadeLayer:
    """A layer whose shards are written.

    Attributes:
        shards: What the manifest says of them.
        directions: Of the sketches; None without any.
        equal_keys: None where keys come again too seldom.
        summed: Gives what the rows add up to; None where nothing does.
    """

    shards: Sequence[LayerShard]
    directions: np.ndarray | None
    equal_keys: EqualKeys | None
    summed: Callable[[], Summed] | None


def finish(
    directory: Path,
    plan: Plan,
    spaces: Sequence[Sequence[SpaceShard]],
    made: Mapping[str, MadeLayer],
    share: Share | None = None,
) -> None:
    """Write what is missing of an index under construction, and its manifest.

    Args:
        directory: The index's, with the files of all shards.
        plan: What is built.
        spaces: The shards of each row space.
        made: Each layer.
        share: Of files that do not change while training goes on.
    """
    source = plan.source
    initial, last = _by_parameter(source.initial()), source.final()
    final = None if last is None else _by_parameter(last)
    writers = {
        name: _Layer(directory, layer.spec, share or _nothing)
        for name, layer in plan.layers.items()
    }
    # An index without values has no use for the states kept on the way.
    for step, read in source.states() if plan.options.values else ():
        state = cache(lambda read=read: _by_parameter(read()))
        for writer in writers.values():
            writer.add_state(step, state)
    layers: dict[str, IndexLayer] = {}
    # Those whose rows were added up already let go of what they hold before others begin.
    for name in sorted(made, key=lambda name: name not in plan.at_once):
        layers[name] = writers[name].finish(plan, made[name], initial, final)
    ledger_rows = [row for parameter in plan.ledger.parameters.values() for row in parameter]
    examples, payloads = _payloads(plan, directory, share or _nothing)
    IndexManifest(
        steps=source.steps,
        optimizer=source.manifest.optimizer,
        complete=source.complete,
        ledger=write_atomic(directory / LEDGER, to_parquet(ledger_rows)),
        examples=examples,
        payloads=payloads,
        layers={name: layers[name] for name in source.manifest.layers},
        spaces=tuple(
            RowSpace(space.rows, tuple(shards))
            for space, shards in zip(plan.spaces, spaces, strict=True)
        ),
        sampling=source.manifest.sampling,
    ).save(directory)
    for path in (directory / "layers").iterdir():
        sync_directory(path)
    sync_directory(directory)


def _by_parameter(state: State) -> ByParameter:
    """Grouped once for all layers: of a thousand layers each would look through them all."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, array in state.items():
        for parameter in {name, name.partition(":")[2]}:
            found.setdefault(parameter, {})[name] = array
    return found


def make_directories(directory: Path, plan: Plan) -> None:
    """The folders of an index under construction."""
    (directory / "rows").mkdir(exist_ok=True)
    for name in plan.layers:
        (directory / layer_directory(name)).mkdir(parents=True, exist_ok=True)


class _Layer:
    """Writes what belongs to no shard of a layer."""

    def __init__(self, directory: Path, spec: LayerSpec, share: Share) -> None:
        self._directory, self._spec, self._share = directory, spec, share
        self._states: list[tuple[int, FileEntry]] = []

    def add_state(self, step: int, state: Callable[[], ByParameter]) -> None:
        """Write the state after so many steps, if the recording kept the layer's."""
        which = f"states-{step}"
        entry = self._share(self._name(which))
        if entry is None and self._spec.weight in state():
            entry = self._write(which, state())
        if entry is not None:
            self._states.append((step, entry))

    def finish(
        self, plan: Plan, made: MadeLayer, initial: ByParameter, final: ByParameter | None
    ) -> IndexLayer:
        """Write the rest; what the rows add up to is let go of after.

        Returns:
            What the manifest says of the layer.
        """
        spec = self._spec
        number = plan.space_of[spec.name]
        summed = None if made.summed is None else made.summed()
        rebuilt: FileEntry | None = None
        parts: tuple[StoredParts, ...] = ()
        if summed is not None and summed.total is not None:
            groups = plan.parts.spaces[number]
            parts = write_parts(self._directory, spec, groups, summed.parts)
            rebuilt = self._write("rebuilt", _by_parameter(summed.total))
        directions = None
        if made.directions is not None:
            name = layer_file(spec.name, "directions.npy")
            directions = write_array(self._directory, name, made.directions)
        first = self._share(self._name("initial")) or self._write("initial", initial)
        of_keys, of_values = plan.layers[spec.name].encodings
        return IndexLayer(
            name=spec.name,
            kind=spec.kind,
            d_in=spec.d_in,
            d_out=spec.d_out,
            weight=spec.weight,
            bias=spec.bias,
            space=number,
            values=plan.options.values,
            inexact=tuple(plan.marks(spec.name)),
            directions=directions,
            initial=first,
            final=None if final is None else self._write("final", final),
            states=tuple(self._states),
            shards=tuple(made.shards),
            rebuilt=rebuilt,
            equal_keys=made.equal_keys,
            key_encoding=of_keys.name,
            value_encoding=of_values.name,
            parts=parts,
            dropped=plan.source.dropped(spec.name),
        )

    def _write(self, which: str, state: ByParameter) -> FileEntry:
        """The layer's weight, bias and optimizer buffers, by the names the recording uses."""
        spec = self._spec
        parameters = [spec.weight] + ([] if spec.bias is None else [spec.bias])
        arrays = {n: a for each in parameters for n, a in state.get(each, {}).items()}
        data = save_safetensors({n: np.ascontiguousarray(a) for n, a in arrays.items()})
        name = self._name(which)
        entry = write_atomic(self._directory / name, data)
        return FileEntry(name, entry.bytes, entry.xxh3)

    def _name(self, which: str) -> str:
        return layer_file(self._spec.name, f"{which}.safetensors")


def _payloads(
    plan: Plan, directory: Path, share: Share
) -> tuple[FileEntry | None, FileEntry | None]:
    payloads = share(PAYLOADS)
    examples = None if payloads is None else share(EXAMPLES)
    if examples is not None:
        return examples, payloads
    return write_payloads(plan.source, directory) or (None, None)


def _nothing(name: str) -> None:
    """No file is shared."""
