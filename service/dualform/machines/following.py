"""Output units followed through training over machines, each of which has some steps' rows.

Under Adam and its kin what a row added is known once its unit was followed through all steps, in
their order. Every machine follows its own steps: forwards the unit's preconditioner goes from
machine to machine, backwards what later steps made of a gradient. What a machine then has to know
of the others' steps is a few numbers for each weight of the unit, however many steps and rows there
are: it is kept here, and goes with every question about the unit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa

from dualform.engine.memory.shards import check_stop
from dualform.engine.totals.followed import Way
from dualform.engine.totals.metric import Between, Head
from dualform.machines import asked
from dualform.machines.machine import Each
from dualform.machines.units import Units
from dualform.questions import OutputQuestion

if TYPE_CHECKING:
    from dualform.machines.asking import Spread

KEPT_BYTES = 64 << 20
"""Units that so many bytes are known of are kept for questions that come again."""

TOGETHER = 16
"""Units that go from machine to machine in one request."""

_WAIT_SECONDS = 0.05
"""Who waits for another's units asks so often whether its own caller gave up."""


class FollowedUnits:
    """What machines have to know of units, found once; thread-safe.

    Args:
        most_bytes: How much is kept; the oldest goes first.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._kept: OrderedDict[tuple[str, int, int], tuple[Sequence[Between], int]] = OrderedDict()

    def find(self, spread: Spread, units: Sequence[int], last: int) -> Each:
        """Of some units after `last` steps: for each machine, as `asked` takes them.

        Raises:
            DataLossError: A machine's rows are nowhere, and a unit was not followed before.
        """
        known = {unit: self._known(spread, unit, last) for unit in units}
        missing = [unit for unit in units if known[unit] is None]
        for first in range(0, len(missing), TOGETHER):
            known.update(self._made(spread, missing[first : first + TOGETHER], last))
        machines = range(len(spread.sizes))
        return Each(
            [{unit: of[at] for unit, of in known.items() if of is not None} for at in machines]
        )

    def _made(
        self, spread: Spread, units: Sequence[int], last: int
    ) -> dict[int, Sequence[Between] | None]:
        """Follow those of some units that nobody has followed meanwhile."""
        while not self._making.acquire(timeout=_WAIT_SECONDS):
            check_stop(spread.stop)
        try:
            known = {unit: self._known(spread, unit, last) for unit in units}
            missing = [unit for unit in units if known[unit] is None]
            for unit, found in follow(spread, missing, last).items():
                known[unit] = found
                self._keep((spread.layer.name, unit, last), found)
            return known
        finally:
            self._making.release()

    def _known(self, spread: Spread, unit: int, last: int) -> Sequence[Between] | None:
        key = (spread.layer.name, unit, last)
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def _keep(self, key: tuple[str, int, int], found: Sequence[Between]) -> None:
        with self._lock:
            self._kept[key] = found, sum(between.nbytes for between in found)
            while sum(size for _, size in self._kept.values()) > self._most_bytes:
                self._kept.popitem(last=False)


def follow(spread: Spread, units: Sequence[int], last: int) -> dict[int, Sequence[Between]]:
    """What each machine has to know of units after `last` steps, by unit.

    Args:
        spread: Who is asked.
        units: Which.
        last: After how many steps.
    """
    if not units:
        return {}
    layer, metrics = spread.layer, spread.opened.metrics
    firsts = [min(first, last) for first, _ in spread.ask(asked.steps_of, layer.name)]
    ranges = list(pairwise([0, *firsts[1:], last]))
    at = {unit: metrics.start(layer, unit, last) for unit in units}
    forwards: list[Units] = []
    for machine, (first, end) in enumerate(ranges):
        given = {unit: replace(between, first=first, end=end) for unit, between in at.items()}
        passed = spread.ask_one(machine, asked.forwards, layer.name, given)
        known: dict[int, Between] = {}
        for unit, between in given.items():
            found = passed[unit]
            # All rows of the first step are known together: where some lie before, their sum is.
            sums = None if between.rows is None else found.sums or None
            known[unit] = replace(between, rows=None, total=0.0, sums=sums)
            alone = _all(between, found.alone)
            after = replace(between, runs=found.runs, rows=found.rows, total=found.total)
            at[unit] = replace(after, alone=alone)
        forwards.append(known)
    heads: dict[int, Head] = {}
    whole: list[Units] = []
    for machine, of_machine in reversed(list(enumerate(forwards))):
        given = {
            unit: _with(replace(between, alone=at[unit].alone), heads.get(unit))
            for unit, between in of_machine.items()
        }
        whole.append(given)
        heads = spread.ask_one(machine, asked.backwards, layer.name, given)
    whole.reverse()
    return {unit: [known[unit] for known in whole] for unit in units}


def follow_layer(
    spread: Spread,
    question: OutputQuestion,
    way: Way,
    start: int,
    end: int,
    groups: pa.Array | None,
) -> Way:
    """Take a layer from a step to another, from machine to machine.

    Args:
        spread: Who is asked.
        question: Which rows take part.
        way: The layer before step `start`.
        start, end: Half-open range of steps.
        groups: As `asked.follow_some` takes them.
    """
    of_machines = spread.ask(asked.steps_of, spread.layer.name)
    way.run.go_on((), ())  # every machine has the ledger
    bounds = [min(max(first, start), end) for first, _ in of_machines]
    for machine, (first, then) in enumerate(pairwise([start, *bounds[1:], end])):
        of_first, of_last = of_machines[machine]
        if of_first < end and of_last >= start:
            way = spread.ask_one(
                machine, asked.follow_some, question, groups, way, (first, then, end)
            )
    return way


def _all(between: Between, alone: Mapping[str, bool]) -> dict[str, bool]:
    """Whether all steps are so, those before and those just followed."""
    before = between.alone or {}
    return {which: found and before.get(which, True) for which, found in alone.items()}


def _with(between: Between, head: Head | None) -> Between:
    """With what comes after; the last steps know that themselves."""
    if head is None:
        return between
    return replace(between, later=head.later, edge=head.edge)
