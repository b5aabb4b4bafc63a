"""Reading recordings back in tests, and what the rows say in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dualform.store.recording import PassRecord, Recording


def keys(recording: Recording, layer: str, record: PassRecord) -> np.ndarray:
    """float32 [rows, d_in]."""
    out = np.empty((record.rows, recording.manifest.layers[layer].d_in), np.float32)
    recording.read_keys(record, out)
    return out


def values(recording: Recording, layer: str, record: PassRecord) -> np.ndarray:
    """float32 [rows, d_out]."""
    out = np.empty((record.rows, recording.manifest.layers[layer].d_out), np.float32)
    recording.read_values(record, out)
    return out


def step_sums(recording: Recording, layer: str) -> tuple[np.ndarray, np.ndarray]:
    """Per step: sum of e (x) x, float64 [steps, d_out, d_in], and of e, float64 [steps, d_out]."""
    spec = recording.manifest.layers[layer]
    weight = np.zeros((recording.steps, spec.d_out, spec.d_in))
    bias = np.zeros((recording.steps, spec.d_out))
    for record in recording.passes(layer):
        e = values(recording, layer, record).astype(np.float64)
        weight[record.step] += e.T @ keys(recording, layer, record)
        bias[record.step] += e.sum(0)
    return weight, bias


def assert_rebuilds(path: Path, parameters: Sequence[str] | None = None) -> None:
    """The rows and the ledger rebuild the parameters (all by default) from their initial state.

    Within 1e-5 of |W_T - W_0| (Frobenius), beside what float32 training rounds by itself: half an
    ulp of W and of the momentum buffer per step, at random.
    """
    recording = Recording.open(path)
    ledger, initial, final = recording.ledger(), recording.initial(), recording.final()
    assert final is not None
    for name, spec in recording.manifest.layers.items():
        for parameter, sums in zip(spec.parameters, step_sums(recording, name), strict=False):
            if parameters is not None and parameter not in parameters:
                continue
            c = ledger.coefficients(parameter, recording.steps)
            start = initial[parameter].astype(np.float64)
            momentum = initial.get(f"momentum:{parameter}")
            rebuilt = c.p * start + np.tensordot(c.c, sums, 1)
            if momentum is not None:
                rebuilt = rebuilt + c.r * momentum.astype(np.float64)
            moved = float(np.linalg.norm(final[parameter] - start))
            error = float(np.linalg.norm(rebuilt - final[parameter]))
            size = float(np.linalg.norm(start) + np.linalg.norm(final[parameter]))
            assert moved > 0
            assert error <= 1e-5 * moved + 2.0**-25 * recording.steps**0.5 * size, parameter


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    """|actual - expected| / |expected| in float64."""
    difference = np.linalg.norm(actual.astype(np.float64) - expected.astype(np.float64))
    return float(difference / np.linalg.norm(expected.astype(np.float64)))
