"""What devices offer to do of a question, and how long that takes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Offer:
    """Devices' part of an answer.

    Attributes:
        seconds: For the rows that lie on them.
        left: How many of the rows that take part do not.
        streamed: Seconds to bring those there and compute with them; None where nothing is left, or
            that can't be done.
    """

    seconds: float
    left: int
    streamed: float | None

    def streams(self, of_cpu: float) -> bool:
        """Whether to bring the rest to the devices, where the CPU takes so long for it."""
        return self.left > 0 and self.streamed is not None and self.streamed < of_cpu

    def whole(self, of_cpu: float) -> float:
        """Seconds for all rows, where the CPU takes so long for the rest."""
        if self.left == 0:
            return self.seconds
        rest = of_cpu if self.streamed is None else min(of_cpu, self.streamed)
        return self.seconds + rest
