"""What a layer is asked about for each input: queries with directions, one or many for an input.

A row adds sum_p (c_t x_t.x_p + b_p c'_t) (e_t.g_p) to an input with places p, primes for the bias;
b_p is 1. That is c_t e_t M x_t + c'_t e_t.h with M = sum_p g_p x_p^T and h = sum_p g_p. Where there
are many places, as in a convolution, M's rows are taken instead, one for each output unit u, as
x = M[u, :], g the unit vector and b = h[u].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class Pairs:
    """Queries and directions of some inputs.

    Attributes:
        count: How many inputs.
        queries: float32 [m, d_in], x_p.
        directions: float32 [m, d_out], g_p.
        inputs: int64 [m], the input that each belongs to, ascending.
        bias: float64 [m], b_p; None for ones.
    """

    count: int
    queries: torch.Tensor
    directions: torch.Tensor
    inputs: np.ndarray
    bias: torch.Tensor | None = None

    @cached_property
    def single(self) -> bool:
        """Whether each input has one, in order."""
        return len(self.inputs) == self.count and bool((np.diff(self.inputs) == 1).all())

    def part(self, first: int, last: int) -> Pairs:
        """Those of the inputs from first to last, which are counted from 0 again."""
        low, high = np.searchsorted(self.inputs, [first, last])
        return Pairs(
            last - first,
            self.queries[low:high],
            self.directions[low:high],
            self.inputs[low:high] - first,
            None if self.bias is None else self.bias[low:high],
        )

    def few(self) -> Pairs:
        """The same sums by one query for each output unit and input, where that are fewer."""
        d_out = self.directions.shape[1]
        if len(self.inputs) <= self.count * d_out:
            return self
        queries = torch.zeros(self.count, d_out, self.queries.shape[1])
        bias = torch.zeros(self.count, d_out, dtype=torch.float64)
        edges = np.searchsorted(self.inputs, np.arange(self.count + 1))
        for number in range(self.count):
            places = slice(int(edges[number]), int(edges[number + 1]))
            g = self.directions[places].double()
            queries[number] = (g.T @ self.queries[places].double()).float()
            bias[number] = g.sum(dim=0)
        units = torch.eye(d_out).expand(self.count, -1, -1)
        return Pairs(
            self.count,
            queries.flatten(0, 1),
            units.flatten(0, 1),
            np.repeat(np.arange(self.count), d_out),
            bias.flatten(),
        )

    def fold(self, parts: torch.Tensor) -> torch.Tensor:
        """Add up the places of each input: float64 [m, ...] becomes [count, ...]."""
        if self.single:
            return parts
        places = torch.from_numpy(self.inputs)
        return parts.new_zeros((self.count, *parts.shape[1:])).index_add_(0, places, parts)
