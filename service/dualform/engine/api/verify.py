"""Verification: does what was recorded rebuild the trained weights?

Per layer, in float64: W_T' = p W_0 + r m_0 + sum_t c_t E_t from the ledger's coefficients and the
rows' outer products, compared with the stored W_T; the stored sum of the rows compared with theirs,
and the stored parts of a column with that sum;
and every state stored on the way against the rows since the one before it. Keys that are said to be
equal are compared byte for byte. All files are hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualform.engine.api.followed_check import check_by_following
from dualform.engine.api.index import Index
from dualform.engine.api.intervals import BadInterval, IntervalCheck
from dualform.engine.api.judgement import TOLERANCE, Rebuilt, judge
from dualform.engine.context import own_settings
from dualform.engine.errors import DataLossError
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import TILE_BYTES
from dualform.engine.memory.tiles import Tile
from dualform.engine.totals.coefficients import LayerCoefficients, left_behind, row_coefficients
from dualform.engine.totals.row_parts import rebuild
from dualform.store.encoding import FLOAT32
from dualform.store.errors import DamagedError
from dualform.store.files import FileEntry, check_digest
from dualform.store.index import REBUILD, IndexLayer, IndexManifest
from dualform.store.ledger import InexactMark

SAMPLE = 256
"""So many of a layer's keys are asked for their outputs."""

SUM_TOLERANCE = 3e-5
"""Of the sum of the terms' lengths, how far the stored sum of the rows may be off: float32 sums of
`PRODUCT_ROWS` rows that are all equal lose up to 1.4e-5 (docs/decisions/0006-recorder-checks.md),
and both sides are such sums, cut at other rows."""

_SMALLEST = 2.0**-100
"""Far above what rounds below float32's normal numbers, 2^-149 a product, however many of these."""


@dataclass(frozen=True)
class Damage:
    """A file that is not what was written.

    Attributes:
        file: Its name, relative to the index.
        what: What was found.
        layer: The layer whose file it is; None for files of all.
        first_row, last_row: Row ids, both included, that a shard's file is about; None for others.
    """

    file: str
    what: str
    layer: str | None = None
    first_row: int | None = None
    last_row: int | None = None


@dataclass(frozen=True)
class LayerReport:
    """One layer's verdict.

    Attributes:
        layer: Its name.
        ok: The weights rebuild within TOLERANCE, or there is a reason why they need not
            (`judgement`).
        weight_error: |W_T' - W_T| / |W_T - W_0| in the Frobenius norm; None if not rebuilt.
        bias_error: Likewise for the bias; None without one.
        output_error: Of the outputs for a sample of the layer's keys, the largest part, by
            Euclidean length, that no row explains; None where it is not known.
        exact_steps: Steps from the start up to which the layer is exact: the largest at_step.
        inexact: The recorder's marks: from which step on the rows do not add up, and why.
        note: Why it was not rebuilt, or what is wrong; empty otherwise.
        states: How many states were stored on the way.
        bad_steps: The first two states (after how many steps) between which the rows do not add
            up; None where they all do.
        dropped: How many rows were not recorded, by reason.
    """

    layer: str
    ok: bool
    weight_error: float | None
    bias_error: float | None
    output_error: float | None
    exact_steps: int
    inexact: tuple[InexactMark, ...]
    note: str
    states: int = 0
    bad_steps: tuple[int, int] | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class VerifyReport:
    """The verdict on an index.

    Attributes:
        path: The index.
        ok: Every file is whole and every layer is ok.
        damage: Every damaged file; empty where all are whole.
        steps: Optimizer steps of the training run.
        layers: Per layer.
    """

    path: str
    ok: bool
    damage: tuple[Damage, ...]
    steps: int
    layers: tuple[LayerReport, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@own_settings()
def verify_index(
    path: Path | str, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Hash every file and rebuild every layer's weights.

    A layer that is not exact throughout, or has no values, is not rebuilt, and says why; it counts
    as ok, as it claims nothing. So does a recording that was cut short: its final weights are lost.
    Where files are damaged, no layer is rebuilt.

    Args:
        path: The index.
        progress: Called with (rows done, rows in all).

    Raises:
        StoreError: There is no index, or its manifest can't be read.
    """
    path = Path(path)
    manifest = IndexManifest.load(path)
    damage = [
        Damage(entry.name, error.what, layer, *rows)
        for entry, layer, rows in _files(manifest)
        if (error := _damage(path, entry)) is not None
    ]
    if not damage:
        try:
            layers = _verify_layers(path, progress)
            ok = all(report.ok for report in layers)
            return VerifyReport(str(path), ok, (), manifest.steps, layers)
        except DamagedError as error:  # whole, but its content is not what it must be
            damage = [Damage(_name(path, error.path), error.what)]
        except DataLossError as error:  # damaged since it was hashed
            damage = [Damage(".", str(error))]
    reports = tuple(
        LayerReport(
            layer=layer.name,
            ok=False,
            weight_error=None,
            bias_error=None,
            output_error=None,
            exact_steps=_exact_steps(manifest.steps, layer),
            inexact=layer.inexact,
            note="not rebuilt: the index is damaged",
            dropped=layer.dropped,
        )
        for layer in manifest.layers.values()
    )
    return VerifyReport(str(path), False, tuple(damage), manifest.steps, reports)


def _verify_layers(
    path: Path, progress: Callable[[int, int], None] | None
) -> tuple[LayerReport, ...]:
    with Index.open(path, device="cpu", use_faiss=False) as index:
        total = sum(layer.rows for layer in index.layers.values())
        done = 0

        def advance(rows: int) -> None:
            nonlocal done
            done += rows
            if progress is not None:
                progress(done, total)

        return tuple(_verify_layer(index, layer, advance) for layer in index.layers.values())


def _verify_layer(index: Index, layer: Layer, advance: Callable[[int], None]) -> LayerReport:
    _unpack(layer)
    manifest = layer.manifest
    first_mark = min(manifest.inexact, key=lambda mark: mark.from_step, default=None)
    exact_steps = _exact_steps(index.steps, manifest)
    notes = []
    if first_mark is not None:
        notes.append(f"not exact from step {first_mark.from_step} on: {first_mark.reason}")
    if layer.dropped:
        notes.append(f"{layer.dropped:,} of {layer.rows + layer.dropped:,} rows not recorded")
    why_not = _why_not_rebuilt(index, layer)
    if why_not is not None:
        notes.append(f"not rebuilt: {why_not}")
    output_error = unexplained_share(index, layer) if layer.values else None
    rebuilt: list[Rebuilt] = []
    off: list[str] = []
    bad: BadInterval | None = None
    if manifest.values and index.ledger.family.scalar:
        rebuilt, off, bad = _check_by_coefficients(index, layer, exact_steps, why_not, advance)
    elif why_not is None:
        found = check_by_following(index, layer, TOLERANCE, exact_steps, advance)
        rebuilt, off, bad = found.rebuilt, found.off, found.bad
    else:
        advance(layer.rows)
    judgement = judge(rebuilt, index.steps, output_error, first_mark is not None)
    faults = list(judgement.faults)
    faults += [f"the stored sum of the rows is not theirs: {name} is off" for name in off]
    faults += [
        f"stored parts do not add up to all rows: {what}" for what in index.parts_off(manifest.name)
    ]
    if bad is not None:
        faults.append(
            f"steps {bad.first} to {bad.last} do not add up: {bad.what} is off by {bad.error:.2g}"
        )
    unequal = _first_unequal(layer)
    if unequal is not None:
        faults.append(f"row {unequal} has not the key of the row that stands for it")
    errors = {parameter.parameter: parameter.relative for parameter in rebuilt}
    return LayerReport(
        layer=manifest.name,
        ok=not faults,
        weight_error=errors.get(manifest.weight),
        bias_error=None if manifest.bias is None else errors.get(manifest.bias),
        output_error=output_error,
        exact_steps=exact_steps,
        inexact=manifest.inexact,
        note="; ".join([*faults, *judgement.notes, *notes]),
        states=len(manifest.states),
        bad_steps=None if bad is None else (bad.first, bad.last),
        dropped=manifest.dropped,
    )


def _why_not_rebuilt(index: Index, layer: Layer) -> str | None:
    """Why the trained weights can't be rebuilt at all; None where they can be tried."""
    if not layer.values:
        return "indexed without values"
    if layer.manifest.final is None:
        return "the recording was cut short: there are no final weights to compare with"
    if not index.ledger.family.explains:
        return "the optimizer is of no known family, so all that moved is the remainder"
    if layer.manifest.rebuilt is None:
        return "the index has no sum of the rows that is finite"
    return None


def unexplained_share(index: Index, layer: Layer) -> float | None:
    """Of the outputs for some of the layer's own keys, the largest part that no row explains, by
    Euclidean length; None where that is not known."""
    finite = np.flatnonzero(layer.finite)
    if not len(finite):
        return None
    sample = np.random.default_rng(0).choice(finite, min(SAMPLE, len(finite)), replace=False)
    queries = layer.keys_at(np.sort(sample))
    residual, whole = index.remainder(layer.name, queries)
    if residual is None or whole is None:
        return None
    with np.errstate(all="ignore"):
        size = np.linalg.norm(residual, axis=1)
        return float(np.max(np.where(size == 0, 0, size / np.linalg.norm(whole, axis=1))))


def _check_by_coefficients(
    index: Index,
    layer: Layer,
    exact_steps: int,
    why_not: str | None,
    advance: Callable[[int], None],
) -> tuple[list[Rebuilt], list[str], BadInterval | None]:
    """Where each step has one coefficient: rebuild the parameters, and check the stored states.

    Returns:
        The parameters, unless `why_not`; those of which the stored sum of the rows is not theirs;
        and the first two states between which the rows do not add up.
    """
    exact = not layer.manifest.inexact and why_not is None
    check = IntervalCheck(index, layer, final=exact, up_to=exact_steps, tolerance=TOLERANCE)

    def watch(tile: Tile) -> None:
        advance(len(tile.positions))
        if layer.space.steps[tile.positions].min() < check.last_step:
            check.add(tile)

    rebuilt, off = _rebuild(index, layer, watch)
    check.finish()
    return [] if why_not is not None else rebuilt, off, check.bad


def _rebuild(
    index: Index, layer: Layer, watch: Callable[[Tile], None]
) -> tuple[list[Rebuilt], list[str]]:
    """Rebuild the weight and the bias from the initial state and all rows.

    Returns:
        Both, none without final weights, and the parameters of which the stored sum of the rows is
        not what it must be.
    """
    manifest = layer.manifest
    coefficients = index.ledger_coefficients(manifest.name, index.steps)
    everything = np.ones(layer.rows, bool)
    terms = np.zeros(2)

    def add(tile: Tile) -> None:
        watch(tile)
        terms[:] += _lengths(coefficients, tile)

    weight, bias = rebuild(layer, coefficients, None, everything, watch=add)
    sums = {manifest.weight: (weight[0].numpy(), coefficients.weight)}
    if manifest.bias is not None and bias is not None and coefficients.bias is not None:
        sums[manifest.bias] = (bias[0].numpy(), coefficients.bias)
    stored = index.state(manifest.name, "rebuilt")
    off = [
        name
        for (name, (total, _)), size in zip(sums.items(), terms, strict=False)
        if stored is not None and not _agree(stored.get(name), total, size)
    ]
    initial, final = index.state(manifest.name, "initial"), index.state(manifest.name, "final")
    assert initial is not None
    if final is None:
        return [], off
    found = []
    for (name, (total, of_parameter)), size in zip(sums.items(), terms, strict=False):
        trained, first = (state[name].astype(np.float64) for state in (final, initial))
        error = left_behind(initial, name, of_parameter) + total - trained
        found.append(
            Rebuilt(
                name,
                error=float(np.linalg.norm(error)),
                moved=float(np.linalg.norm(trained - first)),
                size=max(float(np.linalg.norm(trained)), float(np.linalg.norm(first))),
                terms=float(size),
            )
        )
    return found, off


def _unpack(layer: Layer) -> None:
    """What is packed must become the plain file, by its digest."""
    for shard in layer.shards if any(layer.packed) else ():
        for file in shard.files:
            file.check()


def _first_unequal(layer: Layer) -> int | None:
    """The id of a row whose key is not, byte for byte, that of the first with the same key."""
    if layer.first_equal is None:
        return None
    step = max(1, TILE_BYTES // FLOAT32.row_bytes(layer.d_in))
    repeats = np.flatnonzero(layer.first_equal != np.arange(layer.rows))
    for start in range(0, len(repeats), step):
        positions = repeats[start : start + step]
        first, which = np.unique(layer.first_equal[positions], return_inverse=True)
        keys = layer.keys_at(positions).view(torch.int32)
        others = layer.keys_at(first.astype(np.int64)).view(torch.int32)
        equal = (keys == others[torch.from_numpy(which)]).all(1)
        if not equal.all():
            return int(layer.space.ids[positions[int(equal.int().argmin())]])
    return None


def _lengths(coefficients: LayerCoefficients, tile: Tile) -> tuple[float, float]:
    """Of a tile's terms: |c| |e| |x| of the weight, |c'| |e| of the bias, added up."""
    assert tile.values is not None
    of_weight, of_bias = row_coefficients(coefficients, tile.steps)
    values = torch.linalg.vector_norm(tile.values, dim=1, dtype=torch.float64)
    keys = torch.linalg.vector_norm(tile.keys, dim=1, dtype=torch.float64)
    bias = 0.0 if of_bias is None else float(of_bias.abs() @ values)
    return float((of_weight.abs() * keys) @ values), bias


def _agree(stored: np.ndarray | None, total: np.ndarray, terms: float) -> bool:
    if stored is None or stored.shape != total.shape:
        return False
    return bool(np.linalg.norm(stored - total) <= SUM_TOLERANCE * terms + _SMALLEST)


def _exact_steps(steps: int, layer: IndexLayer) -> int:
    return min([steps, *(mark.from_step for mark in layer.inexact)])


_Rows = tuple[int, int] | tuple[None, None]


def _files(manifest: IndexManifest) -> Iterator[tuple[FileEntry, str | None, _Rows]]:
    """Every file that the manifest names, with the layer and the row ids that it is about."""
    for entry in _entries([manifest.ledger, manifest.examples, manifest.payloads]):
        yield entry, None, (None, None)
    for space in manifest.spaces:
        for place in space.shards:
            yield place.sidecar, None, (place.start, place.start + place.rows - 1)
    for layer in manifest.layers.values():
        besides_shards = [
            getattr(layer, each.name) for each in fields(layer) if each.name != "shards"
        ]
        for entry in _entries(besides_shards):
            yield entry, layer.name, (None, None)
        places = manifest.spaces[layer.space].shards
        for place, shard in zip(places, layer.shards, strict=True):
            for entry in _entries(shard):
                yield entry, layer.name, (place.start, place.start + place.rows - 1)


def _entries(value: object) -> Iterator[FileEntry]:
    """Every FileEntry in a part of the manifest: a kind of file that comes later is checked too."""
    if isinstance(value, FileEntry):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _entries(item)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _entries(getattr(value, each.name))


def _damage(path: Path, entry: FileEntry) -> DamagedError | None:
    try:
        check_digest(path, entry, REBUILD)
    except DamagedError as error:
        return error
    return None


def _name(directory: Path, file: Path) -> str:
    return file.relative_to(directory).as_posix() if file.is_relative_to(directory) else str(file)
