"""Machines in this process, without Ray: the same requests and replies, as bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dualform.engine.errors import DataLossError
from dualform.machines.fleet import Fleet, Lost, Traffic
from dualform.machines.machine import Machine, Refused, Settings, of_each, packed, unpacked
from dualform.machines.parts import Part


class NearFleet(Fleet):
    """So many machines here.

    Args:
        count: How many.

    Attributes:
        gone: Seats whose machine is out of reach.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.gone: set[int] = set()
        self.traffic = Traffic()
        self._machines = [Machine(Settings(), 1) for _ in range(count)]

    def ask(
        self,
        parts: Sequence[tuple[int, Part]],
        function: Callable[..., Any],
        *arguments: Any,
        stop: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """See Fleet."""
        each, found = of_each(arguments, len(parts)), []
        for place, (seat, part) in enumerate(parts):
            request = packed(function, *(arguments if each is None else each[place]))
            if seat in self.gone:
                found.append(Lost(DataLossError(f"machine {seat} is gone", reason="OUT_OF_REACH")))
                continue
            reply = self._machines[seat].ask(0, part, request)
            self.traffic.sent += len(request)
            self.traffic.received += len(reply)
            result = unpacked(reply)
            if isinstance(result, Refused):
                raise result.error()
            found.append(result)
        return found

    def forget(self, parts: Sequence[Part]) -> None:
        """See Fleet."""
        for machine in self._machines:
            for part in parts:
                machine.forget(part)

    def close(self) -> None:
        """See Fleet."""
