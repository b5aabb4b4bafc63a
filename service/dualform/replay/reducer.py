"""What is folded over the tiles of a live run."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from dualform.replay.errors import ReplayError
from dualform.replay.tiles import LiveTile


class Reducer(Protocol):
    """Takes every tile of one layer, in row order."""

    def update(self, tile: LiveTile, weights: torch.Tensor) -> None:
        """Take a tile and its attention weights [n, rows], float32 or float64, left as they are."""

    def finish(self) -> None:
        """Training has ended and was the first one's: the result may be asked for."""


class Pending:
    """A result that is there once the replay has ended."""

    def __init__(self) -> None:
        self._finished = False

    def finish(self) -> None:
        """The result may be asked for."""
        self._finished = True

    def _check_finished(self) -> None:
        if not self._finished:
            raise ReplayError(
                "there is no answer yet: it is complete once the recorder of the second training "
                "is closed, after as many steps as the first one"
            )


def checked_queries(queries: np.ndarray | torch.Tensor, layer: str, d_in: int) -> torch.Tensor:
    """Queries as float32 [n, d_in], a copy.

    Raises:
        ReplayError: Another shape or dtype, none at all, or not finite.
    """
    given = torch.as_tensor(queries).detach()
    if given.dtype != torch.float32 or given.dim() != 2 or given.shape[1] != d_in or not len(given):
        raise ReplayError(
            f"queries to layer {layer!r} are {given.dtype} {list(given.shape)}; float32 "
            f"[n, {d_in}] with at least one query is needed"
        )
    if not bool(torch.isfinite(given).all()):
        raise ReplayError(f"queries to layer {layer!r} hold NaN or infinity")
    return given.cpu().clone()
