"""What one device computes for one question: blocks of rows go in, one transfer comes out.

A block is what lies on the device: a layer's resident shards, or some that are streamed. Which of
its rows take part goes to the device once per block, not once per tile; where not all do, theirs
are gathered there, as many at a time as the scratch memory holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from dualform.engine.devices.device import MAX_K, Device, queries_at_a_time

FEW_GROUPS = 64
"""Sums of up to so many groups are a float64 product with a matrix that says which group a row is
in; of more, sums are added row by row."""


@dataclass(frozen=True)
class Block:
    """Rows on a device.

    Attributes:
        keys: float32 [rows, d_in].
        values: float32 [rows, d_out], or None.
    """

    keys: torch.Tensor
    values: torch.Tensor | None


@dataclass(frozen=True)
class Part:
    """What of a block takes part.

    Attributes:
        block: Whose rows.
        chosen: int64 [m], places in the block, in the order of `codes`; None for all in order.
        codes: The groups of these rows, int32 [m]; None without groups.
        factors: What a row's weight counts, and what is added to that, float64 [m, 2]; None where
            only weights are asked for.
    """

    block: Block
    chosen: np.ndarray | None = None
    codes: np.ndarray | None = None
    factors: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.block.keys) if self.chosen is None else len(self.chosen)


class Nearest:
    """The k rows of all blocks with the largest float32 weights.

    Args:
        device: Where.
        queries: float32 [n, d_in], on the CPU.
        k: At most `MAX_K`.
        scratch: Bytes to gather rows in.
    """

    def __init__(self, device: Device, queries: torch.Tensor, k: int, scratch: int) -> None:
        assert 0 < k <= MAX_K
        self._device, self._k, self._scratch = device, k, scratch
        self._queries = queries.contiguous().to(device.where)
        self._scores: torch.Tensor | None = None
        self._places: torch.Tensor | None = None
        self._before = self._offered = 0

    def take(self, part: Part) -> Iterator[None]:
        """Search a part; yields between tiles."""
        chosen = _uploaded(part.chosen, self._device)
        for first, last, keys, _ in _tiles(part, chosen, self._step(part), values=False):
            k = min(self._k, last - first)
            found = []
            for queries in self._queries.split(queries_at_a_time(len(keys), k, self._scratch)):
                yield
                found.append(self._device.nearest(keys, queries, k))
            scores, places = (torch.cat(each) for each in zip(*found, strict=True))
            places = places + first if chosen is None else chosen[first:last][places]
            self._keep(scores, places + self._before)
        self._before += len(part.block.keys)
        self._offered += len(part)

    def _step(self, part: Part) -> int:
        if part.chosen is None:
            return len(part)  # FAISS tiles by itself
        return max(1024, self._scratch // (4 * part.block.keys.shape[1]))

    def _keep(self, scores: torch.Tensor, places: torch.Tensor) -> None:
        if self._scores is not None and self._places is not None:
            scores = torch.cat([self._scores, scores], dim=1)
            places = torch.cat([self._places, places], dim=1)
        if scores.shape[1] > self._k:
            scores, best = torch.topk(scores, self._k, dim=1)
            places = torch.gather(places, 1, best)
        self._scores, self._places = scores, places

    def result(self) -> tuple[np.ndarray, np.ndarray, bool]:
        """Weights, float32 [n, m], and places, int64 [n, m], counted over the blocks in the order
        that they were taken; whether any row is left out, which then is no better than the lowest.
        """
        if self._scores is None or self._places is None:
            n = len(self._queries)
            return np.zeros((n, 0), np.float32), np.zeros((n, 0), np.int64), False
        m = self._scores.shape[1]
        # One transfer, of bytes.
        packed = torch.cat(
            [_bytes(self._scores), _bytes(self._places)],
            dim=1,
        )
        found = packed.cpu().numpy()
        scores = np.ascontiguousarray(found[:, : 4 * m]).view(np.float32)
        places = np.ascontiguousarray(found[:, 4 * m :]).view(np.int64)
        return scores, places, self._offered > m


class Totals:
    """Weights, or weighted values, added up per group in float64.

    Args:
        device: Where.
        queries: float32 [n, d_in], on the CPU.
        groups: How many.
        d_out: Length of a value; 0 for the sums of weights alone.
        absolute: Add |weight|.
        scratch: Bytes to compute in.
    """

    def __init__(
        self,
        device: Device,
        queries: torch.Tensor,
        groups: int,
        d_out: int,
        absolute: bool,
        scratch: int,
    ) -> None:
        self._device, self._absolute, self._scratch = device, absolute, scratch
        self._queries = queries.to(device.where)
        shape = (groups, len(queries), d_out) if d_out else (groups, len(queries))
        self._totals = torch.zeros(shape, dtype=torch.float64, device=device.where)

    def take(self, part: Part) -> Iterator[None]:
        """Add a part; yields between tiles."""
        chosen = _uploaded(part.chosen, self._device)
        codes = _uploaded(part.codes, self._device)
        factors = _uploaded(part.factors, self._device)
        weighted = factors is not None
        for first, last, keys, values in _tiles(part, chosen, self._step(part), values=weighted):
            yield
            weights = self._queries @ keys.T
            if factors is None or values is None:
                self._add(weights, None if codes is None else codes[first:last])
            else:
                wide = weights.double() * factors[first:last, 0] + factors[first:last, 1]
                self._add_values(wide, values.double(), part.codes, first, last)

    def _step(self, part: Part) -> int:
        """Rows at a time: gathered where not all take part, multiplied, and in float64."""
        values = 0 if part.block.values is None else part.block.values.shape[1]
        gathered = 4 * part.block.keys.shape[1] if part.chosen is not None else 0
        row = gathered + 12 * values + 24 * len(self._queries)
        return max(64, self._scratch // (row + 8 * min(len(self._totals), FEW_GROUPS)))

    def _add(self, weights: torch.Tensor, codes: torch.Tensor | None) -> None:
        if self._absolute:
            weights = weights.abs()
        if codes is None:
            self._totals[0] += weights.sum(dim=1, dtype=torch.float64)
        elif len(self._totals) <= FEW_GROUPS:
            numbers = torch.arange(len(self._totals), device=codes.device)
            inside = (codes == numbers[:, None]).double()
            self._totals += inside @ weights.T.double()
        else:
            self._totals.index_add_(0, codes, weights.T.double())

    def _add_values(
        self,
        weights: torch.Tensor,
        values: torch.Tensor,
        codes: np.ndarray | None,
        first: int,
        last: int,
    ) -> None:
        if codes is None:
            self._totals[0].addmm_(weights, values)
            return
        inside = codes[first:last]
        bounds = [0, *(np.flatnonzero(np.diff(inside)) + 1).tolist(), len(inside)]
        for a, b in pairwise(bounds):
            self._totals[int(inside[a])].addmm_(weights[:, a:b], values[a:b])

    def result(self) -> np.ndarray:
        """float64 [groups, n], or [groups, n, d_out]; the one transfer."""
        return np.asarray(self._totals.cpu().numpy())


def by_group(codes: np.ndarray) -> np.ndarray | None:
    """An order in which the rows of each group lie together, int64 [m]; None where they are in few
    runs already.

    Args:
        codes: int32 [m].
    """
    if np.count_nonzero(np.diff(codes)) <= FEW_GROUPS:
        return None
    return np.argsort(codes, kind="stable")


def _tiles(
    part: Part, chosen: torch.Tensor | None, step: int, *, values: bool
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor | None]]:
    """First and last place among the rows that take part, their keys, and their values if asked."""
    block = part.block
    for first in range(0, len(part), step):
        last = min(first + step, len(part))
        which = slice(first, last) if chosen is None else chosen[first:last]
        taken = block.values[which] if values and block.values is not None else None
        yield first, last, block.keys[which], taken


def _uploaded(array: np.ndarray | None, device: Device) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array).to(device.where)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).reshape(len(tensor), -1)
