"""What the optimizer did at each step to each parameter, and what follows for every row.

For the SGD family a parameter W and its momentum buffer m are a linear system in what the rows
added (design: *The ledger*). With E_t the sum over step t's rows of e (x) x (of e alone for a bias,
e being the value, -dL/dy):

    W_s = p W_j + r m_j + sum_{j <= t < s} c_{s,t} E_t

`Ledger.coefficients` computes p, r and c from products of 2x2 matrices in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dualform.store.parquet import read_parquet, write_parquet

SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("parameter", pa.string(), nullable=False),
        pa.field("lr", pa.float64(), nullable=False),
        pa.field("momentum", pa.float64(), nullable=False),
        pa.field("dampening", pa.float64(), nullable=False),
        pa.field("nesterov", pa.bool_(), nullable=False),
        pa.field("weight_decay", pa.float64(), nullable=False),
        pa.field("maximize", pa.bool_(), nullable=False),
        pa.field("scale", pa.float64(), nullable=False),
        pa.field("took_part", pa.bool_(), nullable=False),
        pa.field("first", pa.bool_(), nullable=False),
    ]
)


class LedgerRow(NamedTuple):
    """One parameter at one step.

    Attributes:
        step: Number of the optimizer step, from 0.
        parameter: Name as in `model.named_parameters()`.
        scale: The gradient at the step, as a multiple of what backward accumulated.
        took_part: False where the gradient was None: nothing moves.
        first: The momentum buffer was created at this step (dampening does not apply).
    """

    step: int
    parameter: str
    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False
    scale: float = 1.0
    took_part: bool = True
    first: bool = False

    def transition(self) -> tuple[np.ndarray, np.ndarray]:
        """How (W, m) moves: (W, m)' = A (W, m) + B E, in torch.optim.SGD's order of operations.

        Returns:
            A, float64 [2, 2], and B, float64 [2].
        """
        if not self.took_part:
            return np.eye(2), np.zeros(2)
        # The gradient that SGD works with: d = -sign*scale*E + weight_decay*W, as (W, m | E).
        d = np.array([self.weight_decay, 0.0, self.scale if self.maximize else -self.scale])
        m = np.array([0.0, 1.0, 0.0])
        update = d
        if self.momentum != 0:
            m = d if self.first else self.momentum * m + (1 - self.dampening) * d
            update = d + self.momentum * m if self.nesterov else m
        w = np.array([1.0, 0.0, 0.0]) - self.lr * update
        return np.stack([w[:2], m[:2]]), np.array([w[2], m[2]])


@dataclass(frozen=True)
class InexactMark:
    """From `from_step` on the ledger does not explain a layer's training, because of `reason`."""

    from_step: int
    reason: str


@dataclass(frozen=True)
class Coefficients:
    """W_s as a combination of an earlier pair (W_j, m_j) and what the steps between added.

    Attributes:
        p: Factor of W_j.
        r: Factor of m_j.
        c: float64 [s - j], factor of E_t for t = j, ..., s - 1.
    """

    p: float
    r: float
    c: np.ndarray


class Ledger:
    """The ledger of a whole recording: `steps` steps of each parameter.

    Args:
        rows: One per (step, parameter), in any order.
        steps: Number of optimizer steps.

    Raises:
        ValueError: A parameter lacks a step, or has one twice.
    """

    def __init__(self, rows: Iterable[LedgerRow], steps: int) -> None:
        self.steps = steps
        self.parameters: dict[str, list[LedgerRow]] = {}
        self._cache: dict[str, list[tuple[list[list[float]], list[float]]]] = {}
        for row in rows:
            self.parameters.setdefault(row.parameter, []).append(row)
        for name, own in self.parameters.items():
            own.sort(key=lambda row: row.step)
            if [row.step for row in own] != list(range(steps)):
                raise ValueError(
                    f"the ledger of {name} has not one row for each of the {steps} steps"
                )

    def coefficients(self, parameter: str, at_step: int, start: int = 0) -> Coefficients:
        """The coefficients of `parameter` after `at_step` steps, from the pair at `start`.

        Raises:
            KeyError: The ledger has no such parameter.
            ValueError: Not 0 <= start <= at_step <= steps.
        """
        return self._recursion(parameter, at_step, start, 1.0, 0.0)

    def momentum_coefficients(self, parameter: str, at_step: int, start: int = 0) -> Coefficients:
        """The same for the parameter's momentum buffer: m_s = p W_j + r m_j + sum c E_t."""
        return self._recursion(parameter, at_step, start, 0.0, 1.0)

    def _recursion(
        self, parameter: str, at_step: int, start: int, p: float, r: float
    ) -> Coefficients:
        """Of p W_s + r m_s, for the pair (W_s, m_s) after `at_step` steps."""
        if not 0 <= start <= at_step <= self.steps:
            raise ValueError(f"need 0 <= {start} <= {at_step} <= {self.steps} steps")
        transitions = self._transitions(parameter)
        c = np.zeros(at_step - start)
        for t in range(at_step - 1, start - 1, -1):
            ((a, b), (e, f)), (g, h) = transitions[t]
            c[t - start] = p * g + r * h
            p, r = p * a + r * e, p * b + r * f
        return Coefficients(p, r, c)

    def _transitions(self, parameter: str) -> list[tuple[list[list[float]], list[float]]]:
        """Every step's (A, B) of a parameter, as plain floats: the recursion is scalar work."""
        if parameter not in self._cache:
            pairs = (row.transition() for row in self.parameters[parameter])
            self._cache[parameter] = [(a.tolist(), b.tolist()) for a, b in pairs]
        return self._cache[parameter]


def to_parquet(rows: Sequence[LedgerRow]) -> bytes:
    """Serialise ledger rows (docs/format.md, *Ledger*)."""
    columns = {name: [row[i] for row in rows] for i, name in enumerate(LedgerRow._fields)}
    return write_parquet(pa.table(columns, schema=SCHEMA))


def from_parquet(data: bytes) -> list[LedgerRow]:
    """Read what `to_parquet` wrote."""
    table = read_parquet(data, SCHEMA)
    return [LedgerRow(**row) for row in table.to_pylist()]
