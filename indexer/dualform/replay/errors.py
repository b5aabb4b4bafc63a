"""What can go wrong in a replay.

ReplayError          a DualformError
└── DivergedError    the second training is not the first one's
"""

from __future__ import annotations

from dualform._errors import DualformError


class ReplayError(DualformError):
    """Base of everything that replay raises; the message says what to do next."""


class DivergedError(ReplayError):
    """The second training did not repeat the first one: there is no answer."""
