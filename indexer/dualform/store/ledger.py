"""What the optimizer did at each step to each parameter, and what follows for every row.

The settings are the optimizer family's (`dualform.optimizers`). Where a family's transitions are
plain numbers, as SGD's are, a parameter W and its momentum buffer m are a linear system in what the
rows added (docs/dual-form.md). With E_t the sum over step t's rows of e (x) x (of e alone for a
bias, e being the value, -dL/dy):

    W_s = p W_j + r m_j + sum_{j <= t < s} c_{s,t} E_t

`Ledger.coefficients` computes p, r and c in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import pyarrow as pa

from dualform.optimizers import FAMILIES, SGD, STILL, Family, SGDSettings, Transition, adjoint
from dualform.store.parquet import read_parquet, write_parquet

_TYPES = {float: pa.float64(), bool: pa.bool_(), int: pa.int64()}
_BEFORE = (("step", pa.int64()), ("parameter", pa.string()))
_AFTER = (("scale", pa.float64()), ("took_part", pa.bool_()), ("first", pa.bool_()))
_FAMILY = b"dualform.family"


class LedgerRow(NamedTuple):
    """One parameter at one step.

    Attributes:
        step: Number of the optimizer step, from 0.
        parameter: Name as in `model.named_parameters()`.
        settings: The optimizer family's, such as `SGDSettings`.
        scale: The gradient at the step, as a multiple of what backward accumulated.
        took_part: False where the gradient was None: nothing moves.
        first: The momentum buffer was created at this step (SGD's dampening does not apply).
    """

    step: int
    parameter: str
    settings: Any
    scale: float = 1.0
    took_part: bool = True
    first: bool = False


@cache
def schema(family: Family, usual: bool = False) -> pa.Schema:
    """The ledger's columns for a family: its settings between what every ledger has.

    Args:
        family: The optimizer's.
        usual: Without the settings that have a default; a ledger in which all have theirs is
            written so, and read by versions that did not know them.
    """
    kinds = get_type_hints(family.settings_type)
    left_out = family.settings_type._field_defaults if usual else ()
    names = [name for name in family.settings_type._fields if name not in left_out]
    settings = [(name, _TYPES[kinds[name]]) for name in names]
    fields = [pa.field(name, kind, nullable=False) for name, kind in (*_BEFORE, *settings, *_AFTER)]
    return pa.schema(fields, metadata={_FAMILY: family.name.encode()})


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

    Attributes:
        family: The optimizer's.

    Raises:
        ValueError: A parameter lacks a step, or has one twice.
    """

    def __init__(self, rows: Iterable[LedgerRow], steps: int) -> None:
        self.steps = steps
        self.parameters: dict[str, list[LedgerRow]] = {}
        self._cache: dict[str, list[Transition]] = {}
        for row in rows:
            self.parameters.setdefault(row.parameter, []).append(row)
        for name, ledger_rows in self.parameters.items():
            ledger_rows.sort(key=lambda row: row.step)
            if [row.step for row in ledger_rows] != list(range(steps)):
                raise ValueError(
                    f"the ledger of {name} has not one row for each of the {steps} steps"
                )
        rows_of_one = next(iter(self.parameters.values()), [])
        self.family = family_of_rows(rows_of_one)

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

    def step_sizes(self, parameter: str) -> np.ndarray:
        """Of each step's E_t what that step itself adds to `parameter`, before any later step
        decays it or adds it again by momentum: float64 [steps]. For SGD lr, by Nesterov's momentum
        lr (1 + momentum), each times the step's scale and, after the first, 1 - dampening.

        Raises:
            KeyError: The ledger has no such parameter.
            ValueError: The family's steps have no numbers.
        """
        # A value is minus the gradient, before it was scaled.
        return np.array(
            [
                -row.scale * float(step.wg + step.wm * step.mg)
                for row, step in zip(
                    self.parameters[parameter], self._transitions(parameter), strict=True
                )
            ],
            np.float64,
        )

    def _recursion(
        self, parameter: str, at_step: int, start: int, p: float, r: float
    ) -> Coefficients:
        """Of p W_s + r m_s, for the pair (W_s, m_s) after `at_step` steps."""
        if not 0 <= start <= at_step <= self.steps:
            raise ValueError(f"need 0 <= {start} <= {at_step} <= {self.steps} steps")
        if parameter not in self.parameters:
            raise KeyError(parameter)
        if start == at_step:
            return Coefficients(p, r, np.zeros(0))
        transitions = self._transitions(parameter)
        factors, p_left, r_left = adjoint(reversed(transitions[start:at_step]), p, r)
        rows = self.parameters[parameter][start:at_step]
        # A value is minus the gradient, before it was scaled.
        c = [
            -row.scale * float(factor) for row, factor in zip(rows, reversed(factors), strict=True)
        ]
        return Coefficients(float(p_left), float(r_left), np.array(c, np.float64))

    def _transitions(self, parameter: str) -> list[Transition]:
        """Every step's transition of a parameter, where these are numbers."""
        if parameter not in self._cache:
            family = self.family
            rows = self.parameters[parameter]
            if not isinstance(family, SGD):
                raise ValueError(f"{family.name} has no single coefficient for a step")
            self._cache[parameter] = [
                Transition(*family.numbers(row.settings, row.first)) if row.took_part else STILL
                for row in rows
            ]
        return self._cache[parameter]


def family_of_rows(rows: Sequence[LedgerRow]) -> Family:
    """The family whose settings the rows have; SGD's where there are none."""
    kind = type(rows[0].settings) if rows else SGDSettings
    return next(family for family in FAMILIES.values() if family.settings_type is kind)


def to_parquet(rows: Sequence[LedgerRow]) -> bytes:
    """Serialise ledger rows of one family (docs/format.md, *Ledger*)."""
    family = family_of_rows(rows)
    columns: dict[str, list[Any]] = {
        "step": [row.step for row in rows],
        "parameter": [row.parameter for row in rows],
    }
    defaults = family.settings_type._field_defaults
    usual = all(
        getattr(row.settings, name) == value for name, value in defaults.items() for row in rows
    )
    expected = schema(family, usual)
    for name in expected.names[len(_BEFORE) : -len(_AFTER)]:
        columns[name] = [getattr(row.settings, name) for row in rows]
    for name, _ in _AFTER:
        columns[name] = [getattr(row, name) for row in rows]
    return write_parquet(pa.table(columns, schema=expected))


def from_parquet(data: bytes) -> list[LedgerRow]:
    """Read what `to_parquet` wrote.

    Raises:
        pyarrow.ArrowException: Not a ledger.
    """
    table = read_parquet(data)
    name = (table.schema.metadata or {}).get(_FAMILY, b"sgd").decode(errors="replace")
    if name not in FAMILIES:
        raise pa.ArrowInvalid(
            f"a ledger of the optimizer family {name!r}, which this dualform does not know"
        )
    family = FAMILIES[name]
    usual = table.column_names == schema(family, usual=True).names
    expected = schema(family, usual)
    if table.column_names != expected.names:
        raise pa.ArrowInvalid(f"columns {table.column_names} where {expected.names} belong")
    columns = [column.to_pylist() for column in table.cast(expected).columns]
    kind, width = family.settings_type, len(expected) - len(_BEFORE) - len(_AFTER)
    return [
        LedgerRow(row[0], row[1], kind(*row[2 : 2 + width]), *row[2 + width :])
        for row in zip(*columns, strict=True)
    ]
