"""Output units whose contributions have no coefficients, on the machine that is asked about them.

The server sends of each unit what the machine has to know of other machines' steps
(`engine.totals.metric.Between`); of that and its own rows the machine makes the unit's metric, and
keeps it. A machine that takes a part over makes it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dualform.engine.api.opened import Opened
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.totals.metric import Between, UnitMetric, UnitMetrics

Units = Mapping[int, Between]
"""By output unit of one layer, what a part has to know of the steps of others."""


class PartMetrics(UnitMetrics):
    """The metrics of units whose steps are followed by several.

    Args:
        kept: The part's, where those that were made are kept.
        units: Those of the question.
    """

    def __init__(self, kept: UnitMetrics, units: Units) -> None:
        self._all, self._units = kept, units

    def find(
        self,
        layer: Layer,
        unit: int,
        end: int,
        stop: Stop | None,
        between: Between | None = None,
    ) -> UnitMetric:
        """As of `UnitMetrics`."""
        return self._all.find(layer, unit, end, stop, self._units[unit])


def with_units(opened: Opened, units: Units | None) -> Opened:
    """What a part's answers are made with, where these units are asked about."""
    if units is None:
        return opened
    return replace(opened, metrics=PartMetrics(opened.metrics, units))
