"""Verification: does what was recorded rebuild the trained weights?

Per layer, in float64: W_T' = p W_0 + r m_0 + sum_t c_t E_t from the ledger's coefficients and the
rows' outer products, compared with the stored W_T. All files are hashed on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualform.engine.errors import EngineError
from dualform.engine.index import Index, Layer
from dualform.engine.output import left_behind, rebuild
from dualform.store.errors import StoreError

TOLERANCE = 1e-4
"""Relative error up to which weights count as rebuilt: training rounds in float32 at every step."""


@dataclass(frozen=True)
class LayerReport:
    """One layer's verdict.

    Attributes:
        layer: Its name.
        ok: The weights rebuild within TOLERANCE, or there is a reason why they need not.
        weight_error: |W_T' - W_T| / |W_T - W_0| in the Frobenius norm; None if not rebuilt.
        bias_error: Likewise for the bias; None without one.
        exact_steps: Steps from the start up to which the layer is exact.
        note: Why it was not rebuilt, or what is wrong; empty otherwise.
    """

    layer: str
    ok: bool
    weight_error: float | None
    bias_error: float | None
    exact_steps: int
    note: str


@dataclass(frozen=True)
class VerifyReport:
    """The verdict on an index.

    Attributes:
        path: The index.
        ok: Every file is whole and every layer is ok.
        damage: What is damaged, or empty.
        steps: Optimizer steps of the training run.
        layers: Per layer.
    """

    path: str
    ok: bool
    damage: str
    steps: int
    layers: tuple[LayerReport, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def verify_index(
    path: Path | str, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Hash every file and rebuild every layer's weights.

    A layer that is not exact throughout, or has no values, is not rebuilt, and says why; it counts
    as ok, as it claims nothing. So does a recording that was cut short: its final weights are lost.

    Args:
        path: The index.
        progress: Called with (rows done, rows in all).

    Raises:
        StoreError: There is no index, or its manifest can't be read.
    """
    with Index.open(path, device="cpu", use_faiss=False) as index:
        total = sum(layer.space.total for layer in index.layers.values())
        done = 0

        def advance(rows: int) -> None:
            nonlocal done
            done += rows
            if progress is not None:
                progress(done, total)

        try:
            index.verify_files()
            layers = tuple(_verify_layer(index, layer, advance) for layer in index.layers.values())
        except (EngineError, StoreError) as error:
            return VerifyReport(str(path), False, str(error), index.steps, ())
        return VerifyReport(str(path), all(own.ok for own in layers), "", index.steps, layers)


def _verify_layer(index: Index, layer: Layer, advance: Callable[[int], None]) -> LayerReport:
    own = layer.manifest
    first_mark = min(own.inexact, key=lambda mark: mark.from_step, default=None)
    exact_steps = index.steps if first_mark is None else min(first_mark.from_step, index.steps)
    final = index.state(own.name, "final")
    note = ""
    if first_mark is not None:
        note = f"not exact from step {first_mark.from_step} on: {first_mark.reason}"
    elif not own.values:
        note = "indexed without values: weights can't be rebuilt"
    elif final is None:
        note = "the recording was cut short: there are no final weights to compare with"
    if note or final is None:
        advance(layer.space.total)
        return LayerReport(own.name, True, None, None, exact_steps, note)
    initial = index.state(own.name, "initial")
    assert initial is not None
    coefficients = index.ledger_coefficients(own.name, index.steps)
    everything = np.ones(layer.rows, bool)
    device = torch.device("cpu")
    weight, bias = rebuild(layer, coefficients, None, everything, device, advance=advance)
    rebuilt = left_behind(initial, own.weight, coefficients.weight) + weight[0].numpy()
    weight_error = _relative(rebuilt, final[own.weight], initial[own.weight])
    bias_error = None
    if own.bias is not None and bias is not None and coefficients.bias is not None:
        rebuilt = left_behind(initial, own.bias, coefficients.bias) + bias[0].numpy()
        bias_error = _relative(rebuilt, final[own.bias], initial[own.bias])
    ok = weight_error <= TOLERANCE and (bias_error is None or bias_error <= TOLERANCE)
    note = "" if ok else f"the rows do not rebuild the weights to {TOLERANCE:g}"
    return LayerReport(own.name, ok, weight_error, bias_error, exact_steps, note)


def _relative(rebuilt: np.ndarray, final: np.ndarray, initial: np.ndarray) -> float:
    """|rebuilt - final| / |final - initial|; 0 where all three agree and nothing was learned."""
    final = final.astype(np.float64)
    error = float(np.linalg.norm(rebuilt - final))
    moved = float(np.linalg.norm(final - initial.astype(np.float64)))
    return error / moved if moved > 0 else (0.0 if error == 0 else np.inf)
