"""Continuing a recording after a restart: is the checkpoint the one that the memory led to?

The rows since the latest state before it must rebuild the weights and momentum buffers that were
loaded, in float64. Nothing is dropped until they do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from dualform.record.disk import DiskSink
from dualform.record.errors import ResumeError
from dualform.record.resume_followed import check_followed
from dualform.record.row_choice import LEFT_OUT
from dualform.store.errors import BusyError, NotFoundError, StoreError
from dualform.store.ledger import Coefficients, InexactMark, Ledger
from dualform.store.ranks import rank_folders
from dualform.store.recording import LayerSpec, PassRecord, Recording, RecordingManifest
from dualform.store.recording_format import MANIFEST
from dualform.store.segment_table import padded

TOLERANCE = 1e-4
"""Largest difference from the rebuilt state, relative to the way since the state it starts from."""

_FLOAT32_UNIT = 2.0**-24
_CHUNK = 2048

ParameterState = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""A parameter, and the optimizer's buffers for it, by the family's names."""


@dataclass(frozen=True)
class Resumed:
    """What a recording has so far.

    Attributes:
        columns: Types of its metadata columns by name.
        examples: Ids that have a payload.
        bytes_since_state: Of its rows since its latest state.
        left_out: Layers that are marked for rows that were left out.
    """

    columns: Mapping[str, str]
    examples: Sequence[int] | Sequence[str]
    bytes_since_state: int
    left_out: Sequence[str]


def resume(
    sink: DiskSink,
    manifest: RecordingManifest,
    step: int,
    states: Mapping[str, ParameterState],
    counts: Mapping[str, int],
) -> Resumed:
    """Check what was loaded, cut the recording back to `step`, and let the sink go on from there.

    Args:
        sink: With the path of the recording; neither opened nor resumed yet.
        manifest: What is going to be recorded.
        step: How many steps the checkpoint has behind it.
        states: By parameter name, as they are now.
        counts: How many steps the optimizer says that parameters took; empty where it does not
            count.

    Raises:
        ResumeError: There is no such recording or step, it does not fit, it can't be read, or
            another process records there; nothing was dropped. Or the disk failed in the middle:
            the same call can be made again.
    """
    _check_processes(sink.path, manifest, step)
    if not sink.path.is_dir():
        raise ResumeError(
            f"resume_at_step={step}: there is no recording at {sink.path}; without resume_at_step "
            "a new one is started"
        )
    try:
        sink.claim()
        return _resume(sink, manifest, step, states, counts)
    except BusyError as error:
        raise ResumeError(
            f"resume_at_step={step}: {sink.path} is being recorded by {error.holder}; end that "
            "process first, or record to another path. Nothing was dropped"
        ) from None
    except BaseException as error:
        sink.release()
        if isinstance(error, NotFoundError):
            raise ResumeError(
                f"resume_at_step={step}: {error}; without resume_at_step a new one is started"
            ) from None
        if isinstance(error, StoreError):
            raise ResumeError(f"resume_at_step={step}: {error}. Nothing was dropped") from error
        if isinstance(error, OSError):
            raise ResumeError(
                f"resume_at_step={step}: {sink.path} can't be continued now ({error}); mend that, "
                "such as by freeing space, and resume at the same step again"
            ) from error
        raise


def _resume(
    sink: DiskSink,
    manifest: RecordingManifest,
    step: int,
    states: Mapping[str, ParameterState],
    counts: Mapping[str, int],
) -> Resumed:
    with Recording.open(sink.path) as recording:
        _check_manifest(recording, manifest)
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= recording.steps:
            raise ResumeError(
                f"resume_at_step is {step!r}; {recording.path} can be continued from 0 to "
                f"{recording.steps:,} steps, the last that was committed: load a checkpoint of "
                "one of these steps"
            )
        ledger = recording.ledger()
        _check_counts(ledger, step, counts)
        if recording.steps and manifest.values and ledger.family.explains:
            check = _check_layer if manifest.ranks is None else _check_layer_of_rank
            for spec in manifest.layers.values():
                if not any(_hides(mark, step) for mark in recording.marks[spec.name]):
                    check(recording, ledger, spec, step, states)
        sink.resume(recording, step, manifest.packed)
    with Recording.open(sink.path) as kept:
        return Resumed(
            columns={
                key: kind for segment in kept.segments for key, kind in segment.columns.items()
            },
            examples=[i for table in kept.example_tables() for i in table["id"].to_pylist()],
            bytes_since_state=_bytes_since_state(kept),
            left_out=_left_out(kept),
        )


def _check_processes(path: Path, manifest: RecordingManifest, step: int) -> None:
    """Refuse to go on in another number of processes than the run had."""
    there = path if manifest.ranks is None else path.parent
    worlds = {
        rank.world
        for folder in rank_folders(there)
        if (folder / MANIFEST).exists()
        and (rank := RecordingManifest.load(folder).ranks) is not None
    }
    now = 1 if manifest.ranks is None else manifest.ranks.world
    if worlds and worlds != {now}:
        raise ResumeError(
            f"resume_at_step={step}: {there} was recorded by "
            f"{' or '.join(map(str, sorted(worlds)))} processes, and now there {_are(now)}: rows "
            "of steps that others averaged would be missing; go on with as many, or record to "
            "another path. Nothing was dropped"
        )


def _are(count: int) -> str:
    return "is one" if count == 1 else f"are {count}"


def _check_manifest(recording: Recording, manifest: RecordingManifest) -> None:
    there = recording.manifest
    problem = None
    if there.optimizer != manifest.optimizer:
        problem = f"its optimizer was {there.optimizer}, not {manifest.optimizer}"
    elif there.values != manifest.values:
        problem = f"it was recorded with values={there.values}, not values={manifest.values}"
    elif there.sampling != manifest.sampling:
        problem = f"it was recorded with {_options(there)}, not with {_options(manifest)}"
    elif list(there.layers) != list(manifest.layers):
        problem = f"its layers are {list(there.layers)}, not {list(manifest.layers)}"
    else:
        for name, spec in manifest.layers.items():
            for field in fields(LayerSpec):
                old, new = getattr(there.layers[name], field.name), getattr(spec, field.name)
                if problem is None and old != new:
                    problem = f"{field.name} of layer {name!r} was {old!r}, not {new!r}"
    if problem is not None:
        raise ResumeError(
            f"{recording.path} can't be continued: {problem}; make the recorder with what it was "
            "made with, or record to another path"
        )


def _left_out(recording: Recording) -> list[str]:
    return [
        name
        for name, marks in recording.marks.items()
        if any(mark.reason.startswith(LEFT_OUT) for mark in marks)
    ]


def _options(manifest: RecordingManifest) -> str:
    return manifest.sampling.options or "all rows"


def _check_counts(ledger: Ledger, step: int, counts: Mapping[str, int]) -> None:
    """The optimizer's own count of each parameter's steps is the ledger's."""
    for parameter, count in counts.items():
        before = ledger.parameters.get(parameter, [])[:step]
        expected = next((n for row in reversed(before) if (n := row.settings.nth) > 0), 0)
        if before and count != expected:
            raise ResumeError(
                f"resume_at_step={step}: the optimizer says that it took {count:,} steps with "
                f"parameter {parameter!r}, the recording {expected:,}; load the optimizer's state "
                "of the checkpoint of that step before making the recorder. Nothing was dropped"
            )


def _hides(mark: InexactMark, step: int) -> bool:
    """Whether rows and ledger no longer say what a layer was after a step."""
    return mark.from_step < step and not mark.reason.startswith("optimizer ")


def _check_layer(
    recording: Recording,
    ledger: Ledger,
    spec: LayerSpec,
    step: int,
    states: Mapping[str, ParameterState],
) -> None:
    start, state = 0, recording.initial()
    for after, read in reversed(recording.states()):
        if after <= step and spec.weight in (found := read()):
            start, state = after, found
            break
    if not ledger.family.scalar:
        check_followed(recording, ledger, spec, (start, step), state, states)
        return
    for parameter in spec.parameters:
        tensor, buffers = states[parameter]
        buffer = buffers.get("momentum")
        before = state[parameter].astype(np.float64)
        zeros = np.zeros_like(before)
        before_buffer = state.get(f"momentum:{parameter}", zeros).astype(np.float64)
        now = _array(tensor)
        now_buffer = zeros if buffer is None else _array(buffer)
        plain = ledger.coefficients(parameter, step, start)
        other = ledger.momentum_coefficients(parameter, step, start)
        of_rows = functools.partial(_sums, recording, spec, parameter, start, (plain, other))
        rows, rows_buffer = of_rows(now.shape)
        way = float(np.linalg.norm(now - before))
        rebuilt = plain.p * before + plain.r * before_buffer + rows
        sizes = functools.partial(of_rows, now.shape, sizes=True)
        _compare(f"parameter {parameter!r}", (start, step), rebuilt, now, way, (sizes, 0))
        rebuilt = other.p * before + other.r * before_buffer + rows_buffer
        size = float(np.linalg.norm(rebuilt))
        what = f"the momentum buffer of {parameter!r}"
        _compare(what, (start, step), rebuilt, now_buffer, size, (sizes, 1))


def _check_layer_of_rank(
    recording: Recording,
    ledger: Ledger,
    spec: LayerSpec,
    step: int,
    states: Mapping[str, ParameterState],
) -> None:
    """Compare with the state that was stored after that very step, if one was: between states the
    other ranks' rows would be needed."""
    stored = dict(recording.states()).get(step) if step else recording.initial
    state = {} if stored is None else stored()
    for parameter in spec.parameters:
        if parameter in state:
            before, now = state[parameter].astype(np.float64), _array(states[parameter][0])
            zeros = functools.partial(_zeros, now.shape)
            _compare(f"parameter {parameter!r}", (step, step), before, now, 0.0, (zeros, 0))


def _zeros(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(shape), np.zeros(shape)


def _compare(
    what: str,
    between: tuple[int, int],
    rebuilt: np.ndarray,
    now: np.ndarray,
    way: float,
    terms: tuple[Callable[[], tuple[np.ndarray, np.ndarray]], int],
) -> None:
    """Refuse what is not as it was rebuilt.

    Args:
        what: It is.
        between: The steps from which, and to which, it was rebuilt.
        rebuilt: From rows and ledger.
        now: As it was loaded.
        way: What the tolerance is relative to.
        terms: What gives the sums of the sizes of all that the rows brought, called in doubt alone,
            and which of them it is.
    """
    start, step = between
    steps = step - start
    difference = float(np.linalg.norm(rebuilt - now))
    size = float(np.linalg.norm(rebuilt))
    # Beside the tolerance: what rounding to float32, once a step and at random, may leave.
    allowed = TOLERANCE * way + 4 * (steps + 1) ** 0.5 * _FLOAT32_UNIT * size
    if difference <= allowed:
        return
    # Gradients that cancel, as of a bias that a softmax or a norm takes out, are all rounding.
    sizes, which = terms
    if difference <= allowed + 4 * _FLOAT32_UNIT * float(np.linalg.norm(sizes()[which])):
        return
    relative = difference / size if size > 0 else float("inf")
    raise ResumeError(
        f"resume_at_step={step}: {what} is not what the recording says it was after {step} steps "
        f"(relative difference {relative:.2g}); load the model's and the optimizer's state of the "
        "checkpoint of that step before making the recorder. Nothing was dropped"
    )


def _sums(
    recording: Recording,
    spec: LayerSpec,
    parameter: str,
    start: int,
    coefficients: tuple[Coefficients, Coefficients],
    shape: tuple[int, ...],
    sizes: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """sum c_t E_t over the rows of the coefficients' steps, for each of the two; with `sizes` the
    sum of its terms' magnitudes."""
    totals = [torch.zeros(shape, dtype=torch.float64, device="cpu") for _ in coefficients]
    steps = len(coefficients[0].c)
    passes = [r for r in recording.passes(spec.name) if start <= r.step < start + steps]
    for offsets, keys, values in _chunks(recording, spec, passes, start):
        for total, factors in zip(totals, coefficients, strict=True):
            scaled = values * torch.from_numpy(factors.c[offsets])[:, None]
            if sizes:
                scaled, keys = scaled.abs(), keys.abs()
            if parameter == spec.weight:
                total.addmm_(scaled.T, keys)
            else:
                total += scaled.sum(0)
    return totals[0].numpy(), totals[1].numpy()


def _chunks(
    recording: Recording, spec: LayerSpec, passes: Sequence[PassRecord], start: int
) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
    """Rows of several passes at once: step less `start`, keys and values, float64."""
    waiting: list[PassRecord] = []
    rows = 0
    for number, record in enumerate(passes, 1):
        waiting.append(record)
        rows += record.rows
        if rows < _CHUNK and number < len(passes):
            continue
        keys = np.empty((rows, spec.d_in), np.float32)
        values = np.empty((rows, spec.d_out), np.float32)
        first = 0
        for item in waiting:
            recording.read_keys(item, keys[first : first + item.rows])
            recording.read_values(item, values[first : first + item.rows])
            first += item.rows
        offsets = np.repeat(
            [item.step - start for item in waiting], [item.rows for item in waiting]
        )
        yield offsets, torch.from_numpy(keys).double(), torch.from_numpy(values).double()
        waiting, rows = [], 0


def _bytes_since_state(recording: Recording) -> int:
    latest = max((after for after, _ in recording.states()), default=0)
    return sum(
        padded(record.keys.whole) + (0 if record.values is None else padded(record.values.nbytes))
        for name in recording.manifest.layers
        for record in recording.passes(name)
        if record.step >= latest
    )


def _array(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(tensor.detach().double().cpu().numpy())
