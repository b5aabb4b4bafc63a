"""Sums and outputs where keys and values lie on devices; the CPU adds what lies on none.

Weights are float32 products and totals float64, as on the CPU; totals come back in one transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.devices.answers import DeviceAnswers
from dualform.engine.devices.device import OnDeviceError
from dualform.engine.devices.devices import Devices
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.plan.costs import device_seconds, output_costs, sums_seconds
from dualform.engine.plan.plan import check_strategy
from dualform.engine.totals.coefficients import LayerCoefficients, row_coefficients
from dualform.store.grouping import Grouping


@dataclass(frozen=True)
class OnDevices:
    """How devices take part in adding up.

    Attributes:
        devices: Which.
        seconds: What it is expected to take, the CPU's share included.
        stream: Bring what lies on none to one.
        forced: It was asked for: a failure is the caller's to know.
    """

    devices: Devices
    seconds: float
    stream: bool
    forced: bool


def for_sums(
    devices: Devices, layer: Layer, queries: torch.Tensor, selected: np.ndarray, strategy: str
) -> OnDevices | None:
    """How devices would add up weights of these rows, bool [total]; None where they can't.

    Raises:
        InvalidArgumentError: They were asked for, and can't.
    """
    return _planned(devices, layer, queries, selected, strategy, values=False)


def for_outputs(
    devices: Devices, layer: Layer, queries: torch.Tensor, selected: np.ndarray, strategy: str
) -> OnDevices | None:
    """How devices would add up weighted values; else as `for_sums`."""
    return _planned(devices, layer, queries, selected, strategy, values=True)


def _planned(
    devices: Devices,
    layer: Layer,
    queries: torch.Tensor,
    selected: np.ndarray,
    strategy: str,
    *,
    values: bool,
) -> OnDevices | None:
    if strategy not in ("auto", "device"):
        return None
    why, offer = devices.why_not(), None
    if why is None:
        answers = DeviceAnswers(devices, layer, queries, selected, values=values, stop=None)
        offer = answers.offer(lambda paces: paces.outputs if values else paces.sums)
        if offer is None:
            why = "no row of the layer lies on a device"
    check_strategy(strategy, {"device": why})
    if offer is None:
        return None
    n = len(queries)
    rest = (
        output_costs(layer, n, offer.left, 0)["scan"]
        if values
        else sums_seconds(layer, n, offer.left)
    )
    rest *= devices.cpu_pace
    return OnDevices(
        devices, device_seconds(offer, rest), offer.streams(rest), strategy == "device"
    )


def weights_added(
    on: OnDevices,
    layer: Layer,
    queries: torch.Tensor,
    grouping: Grouping,
    selected: np.ndarray,
    absolute: bool,
    stop: Stop | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Total weights per group of what devices have of the selected rows, bool [total].

    Returns:
        float64 [n, groups], and the rows that are left to the CPU, bool [total]: all of them where
        a device failed.

    Raises:
        ResourceExhaustedError, FailedPreconditionError: A device failed, and was asked for.
    """
    answers = DeviceAnswers(on.devices, layer, queries, selected, values=False, stop=stop)
    groups = len(grouping.values)
    try:
        found, searched = answers.totals(
            groups, grouping.codes, absolute=absolute, stream=on.stream
        )
    except OnDeviceError as error:
        if on.forced:
            raise error.refusal from None
        return np.zeros((len(queries), groups)), selected
    return found.T, _left(layer, selected, searched)


def rows_added(
    on: OnDevices,
    layer: Layer,
    queries: torch.Tensor,
    coefficients: LayerCoefficients,
    grouping: Grouping | None,
    selected: np.ndarray,
    stop: Stop | None,
) -> tuple[np.ndarray, np.ndarray]:
    """What devices have of the selected rows adds to the output.

    Returns:
        float64 [n, groups, d_out]; else as `weights_added`.

    Raises:
        ResourceExhaustedError, FailedPreconditionError: As `weights_added`.
    """
    answers = DeviceAnswers(on.devices, layer, queries, selected, values=True, stop=stop)
    groups = 1 if grouping is None else len(grouping.values)
    positions = np.flatnonzero(selected)
    of_weight, of_bias = row_coefficients(coefficients, layer.space.steps[positions])
    factors = np.zeros((len(selected), 2))
    factors[positions, 0] = of_weight.numpy()
    if of_bias is not None:
        factors[positions, 1] = of_bias.numpy()
    codes = None if grouping is None else grouping.codes
    try:
        found, searched = answers.totals(groups, codes, factors=factors, stream=on.stream)
    except OnDeviceError as error:
        if on.forced:
            raise error.refusal from None
        return np.zeros((len(queries), groups, layer.d_out)), selected
    return np.ascontiguousarray(found.transpose(1, 0, 2)), _left(layer, selected, searched)


def _left(layer: Layer, selected: np.ndarray, searched: np.ndarray) -> np.ndarray:
    """The selected rows that are in none of the shards that were searched, bool [shards]."""
    left: np.ndarray = selected.copy()
    for number in np.flatnonzero(searched):
        shard = layer.shards[number]
        left[shard.start : shard.start + shard.rows] = False
    return left
