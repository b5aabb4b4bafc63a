"""Certified pruning of contributions: what a row can have added at most, before its key is read.

A row's contribution is (c x.q + c') E with E = e.g. Its sketch bounds x.q from both sides
(`memory.sketch`), so that

    (c x.q + c') E  <=  |cE| (sgn(cE) z.y + |s| rho + allowance) + c'E.

Of a unit E is the value itself. Of a direction |E| is at most |e| |g|, which needs no values: rows
that this can't rule out have theirs read, and E is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import pick
from dualform.engine.memory.sketch import Basis, SketchedQueries
from dualform.engine.threads import over_shards
from dualform.engine.topk.contribution import Contribution

_TINY = 1.2e-38  # more than what float32 may flush to zero
_ROUND = 1 + 2.0**-21


class Bounds(Protocol):
    """What sketches say of rows' merits.

    Attributes:
        allowance: float64 [n], what merits may exceed the last bounds by.
    """

    allowance: torch.Tensor

    def bounds(
        self,
        parts: Sequence[tuple[torch.Tensor, slice | np.ndarray]],
        rows: Sequence[int],
        where: slice | np.ndarray,
        longest: float,
    ) -> torch.Tensor:
        """What merits are at most, `allowance` aside.

        Args:
            parts: Sketches, float32 [any, m + 1] each, and which of them are asked about.
            rows: How many, of each part.
            where: Positions of the rows in the layer.
            longest: At least the norm of their finite keys.

        Returns:
            float32 [rows, n].
        """


class WeightBounds:
    """Of attention weights.

    Args:
        queries: float32 [n, d_in].
        basis: The layer's.
        order: "largest", "smallest" or "absolute".
    """

    def __init__(self, queries: torch.Tensor, basis: Basis, order: str) -> None:
        self._sketched = SketchedQueries(queries, basis, order)
        self.allowance = torch.zeros(len(queries), dtype=torch.float64)

    def bounds(
        self,
        parts: Sequence[tuple[torch.Tensor, slice | np.ndarray]],
        rows: Sequence[int],
        where: slice | np.ndarray,
        longest: float,
    ) -> torch.Tensor:
        """See Bounds."""
        self.allowance = self._sketched.allowance(longest)
        return self._sketched.bounds(parts, rows)


class ContributionBounds:
    """Bounds of contributions to a few queries, for one span of shards after the other.

    Args:
        layer: Whose rows.
        contribution: With coefficients.
        queries: float32 [n, d_in].
        basis: The layer's.
        order: "largest", "smallest" or "absolute".
    """

    def __init__(
        self,
        layer: Layer,
        contribution: Contribution,
        queries: torch.Tensor,
        basis: Basis,
        order: str,
    ) -> None:
        self._layer, self._contribution, self._order = layer, contribution, order
        self._sketched = SketchedQueries(queries, basis, "largest")
        wide = queries.double()
        self._z = (wide @ basis.wide.T).float()
        rest = torch.linalg.vector_norm(wide - self._z.double() @ basis.wide, dim=1)
        self._rest = torch.nextafter((rest * (1 + 1e-9)).float(), torch.tensor(torch.inf))
        self._norms = torch.linalg.vector_norm(wide, dim=1)
        self._sizes: torch.Tensor | None = None
        if contribution.directions is not None:
            g = contribution.directions.double()
            self._sizes = torch.linalg.vector_norm(g, dim=1) * (1 + 1e-9)
        self._middle = self._half = torch.empty(0)
        self._longest = 0.0
        self.allowance = torch.zeros(len(queries), dtype=torch.float64)  # the bounds have it

    def bounds(
        self,
        parts: Sequence[tuple[torch.Tensor, slice | np.ndarray]],
        rows: Sequence[int],
        where: slice | np.ndarray,
        longest: float,
    ) -> torch.Tensor:
        """See Bounds; without any value where directions are asked about."""
        self._longest = longest
        c, of_bias = self._factors(where)
        if self._sizes is None:
            e = self._unit_values(where).double()
            return self._of_unit(parts, rows, c * e, of_bias * e)
        self._weigh(parts, rows)
        lengths = torch.from_numpy(self._layer.value_norms[where]).double()
        sizes = self._sizes
        return self._unsigned(
            torch.outer(c.abs() * lengths, sizes), torch.outer(of_bias.abs() * lengths, sizes)
        )

    @property
    def narrows(self) -> bool:
        """Whether values, once they are read, say more than the bounds so far."""
        return self._sizes is not None

    def narrowed(self, which: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """The bounds of some rows of the last span, their values read: float32 [m, n].

        Args:
            which: int64 [m], their places in the span.
            positions: int64 [m], theirs in the layer, ascending.
        """
        directions = self._contribution.directions
        assert directions is not None
        c, of_bias = self._factors(positions)
        values = self._layer.value_rows(positions).double()
        wide = directions.double()
        e = values @ wide.T
        off = torch.outer(
            torch.linalg.vector_norm(values, dim=1), torch.linalg.vector_norm(wide, dim=1)
        ) * ((wide.shape[1] + 4) * 2.0**-52)
        found = self._merits(c[:, None] * e, of_bias[:, None] * e, torch.from_numpy(which))
        # E itself is rounded; twice what the weight can be at most, for both signs.
        most = (c.abs()[:, None] * (2 * self._norms * self._longest) + of_bias.abs()[:, None]) * off
        found += (most * _ROUND).float()
        return found

    def _of_unit(
        self,
        parts: Sequence[tuple[torch.Tensor, slice | np.ndarray]],
        rows: Sequence[int],
        factors: torch.Tensor,
        of_bias: torch.Tensor,
    ) -> torch.Tensor:
        """Bounds of contributions to a unit from cE and c'E, float64 [rows]: each weight's middle
        times |cE|, signed, and what else there is as one product, of four numbers of each row with
        four of each query: |cE| rho with |s|, |cE| with the slack, c'E with 1, and 1 with what may
        be flushed to zero.

        Enlarging |cE| and c'E by 2^-21, eight roundings, makes up for the six that follow; where
        the middle is negative it adds to them, and the slack has all fifteen.
        """
        ends, absolute = np.cumsum([0, *rows]), self._order == "absolute"
        size = _factor(factors)
        signed, of_bias = size, of_bias.abs()
        if not absolute:
            sign = -1.0 if self._order == "smallest" else 1.0
            signed, of_bias = size * (factors.sign() * sign).float(), of_bias * sign
        of_bias = (of_bias + of_bias.abs() * 2.0**-21).float()
        norms = self._norms
        flushed = (_TINY * (4 * norms * self._longest + norms + 16)).float()
        ones = torch.ones(len(size))
        asked = torch.stack([self._rest, self._slack(), ones.new_ones(len(norms)), flushed])
        found = torch.empty((ends[-1], len(self._z)))

        def fill(number: int) -> None:
            span = slice(ends[number], ends[number + 1])
            sketches, some = pick(*parts[number]), found[span]
            torch.mm(sketches[:, :-1], self._z.T, out=some)
            if absolute:
                some.abs_()
            some *= signed[span, None]
            four = (size[span] * sketches[:, -1], size[span], of_bias[span], ones[span])
            some.addmm_(torch.stack(four, dim=1), asked)

        over_shards(fill, range(len(parts)), len(self._z))
        return _ranked(found, factors[:, None])

    def _slack(self) -> torch.Tensor:
        """What rounding can add to weights, those of the bounds' own sums too: float32 [n]."""
        allowance = self._sketched.allowance(self._longest)
        allowance += 2.0**-20 * self._longest * self._norms
        return torch.nextafter(allowance.float(), torch.tensor(torch.inf))

    def _weigh(
        self, parts: Sequence[tuple[torch.Tensor, slice | np.ndarray]], rows: Sequence[int]
    ) -> None:
        """The middle of each weight's interval, z.y, and half its width, float32 [rows, n]."""
        ends = np.cumsum([0, *rows])
        self._middle = torch.empty((ends[-1], len(self._z)))
        self._half = torch.empty((ends[-1], len(self._z)))
        slack = self._slack()

        def fill(number: int) -> None:
            span = slice(ends[number], ends[number + 1])
            sketches = pick(*parts[number])
            torch.mm(sketches[:, :-1], self._z.T, out=self._middle[span])
            torch.outer(sketches[:, -1], self._rest, out=self._half[span])
            self._half[span] += slack

        over_shards(fill, range(len(parts)), len(self._z))

    def _factors(self, where: slice | np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return self._contribution.factors(self._layer.space.steps[where])

    def _unit_values(self, where: slice | np.ndarray) -> torch.Tensor:
        positions = np.arange(where.start, where.stop) if isinstance(where, slice) else where
        return torch.from_numpy(self._layer.values_at(positions, self._contribution.unit))

    def _merits(
        self, factors: torch.Tensor, of_bias: torch.Tensor, which: slice | torch.Tensor
    ) -> torch.Tensor:
        """Bounds of merits from cE and c'E, float64 [rows, n]."""
        if self._order == "absolute":
            return self._unsigned(factors.abs(), of_bias.abs(), which)
        sign = 1.0 if self._order == "largest" else -1.0
        found = self._middle[which] * (factors.sign() * sign).float()
        found += self._half[which]
        found *= _factor(factors)
        found += self._up(of_bias * sign)
        return _ranked(found, factors)

    def _up(self, numbers: torch.Tensor) -> torch.Tensor:
        """What is added last, float64 [rows, n], in float32: larger by more
        than roundings, and by what factors that float32 flushes to zero would have made."""
        flushed = _TINY * (4 * self._norms * self._longest + 4)
        raised: torch.Tensor = numbers + numbers.abs() * 2.0**-21 + flushed
        return raised.float()

    def _unsigned(
        self,
        factors: torch.Tensor,
        of_bias: torch.Tensor,
        which: slice | torch.Tensor = slice(None),
    ) -> torch.Tensor:
        """Bounds of a merit's size, from |cE| and |c'E| or more."""
        found = self._middle[which].abs()
        found += self._half[which]
        found = found * _factor(factors)
        found += self._up(of_bias)
        return _ranked(found, factors)


def _factor(numbers: torch.Tensor) -> torch.Tensor:
    """|cE|, float64, in float32 and larger by more than its roundings: a relative 2^-21, which the
    allowance makes up for where what it multiplies is negative."""
    return (numbers.abs() * (1 + 2.0**-21)).float()


def _ranked(bounds: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Bounds that say nothing are infinite, and those of rows that are never ranked minus that."""
    if not bool(torch.isfinite(factors.sum())) or not bool(torch.isfinite(bounds.sum())):
        bounds = torch.nan_to_num(bounds, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        bounds = torch.where(torch.isnan(factors), -torch.inf, bounds)
    return bounds
