"""A recorded layer of several products, each watched as a layer of its own, joined into one.

Joined, W = [W_1, W_2, ...] and b is the sum of the biases: of an LSTM [W_hh, W_ih], b_hh + b_ih.
Where all products are trained by the same settings, W moves as each of them does, and b as one bias
whose gradient counts for all: the sum of their scales. So the joined parameters have ledger rows of
their own, beside those of their parts (docs/decisions/0012-lstm.md). Under Adam and its kin W still
moves so; b does not, as each bias takes a normalised step of its own: such layers are marked,
unless they have no bias. How the rows are joined is the kind's to say.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from dualform.layers import JoinedKind
from dualform.record.elements import SampledElements
from dualform.record.errors import CaptureError
from dualform.record.optimizer import OptimizerView
from dualform.record.passes import Pass
from dualform.record.recorded import ParameterState, RecordedLayer
from dualform.record.selection import SelectedLayer
from dualform.record.tape import Tape
from dualform.store.ledger import InexactMark, LedgerRow

_Join = Callable[[list[torch.Tensor]], torch.Tensor]

_SCALE_TOLERANCE = 1e-6
"""Relative difference of the products' scales that measuring them explains."""


class JoinedLayer:
    """What `RecordedLayer` is for one product; the same attributes and methods.

    Args:
        selected: With its parts, in the order of their columns.
    """

    check_every = RecordedLayer.check_every

    def __init__(
        self,
        selected: SelectedLayer,
        optimizer: OptimizerView,
        tape: Tape,
        random: np.random.Generator,
        sampled: SampledElements,
    ) -> None:
        assert isinstance(selected.kind, JoinedKind)
        self.spec = selected.spec
        self._kind = selected.kind
        self._parts = [
            RecordedLayer(part, optimizer, tape, random, sampled) for part in selected.parts
        ]
        self._tape = tape
        self._apart = _apart(optimizer, len(self._parts), self.spec.bias is not None)
        self._alike = self._apart is None
        self.kept: list[Pass] = []

    @property
    def exact(self) -> bool:
        """Nothing was found so far that the joined ledger does not explain."""
        return self._alike and all(part.exact for part in self._parts)

    def attach(self) -> None:
        """Hook all products."""
        for part in self._parts:
            part.attach()

    def detach(self) -> None:
        """Remove every hook, and let go of all rows."""
        for part in self._parts:
            part.detach()

    def averaged(self) -> None:
        """A backward has ended, and gradients were averaged over ranks."""
        for part in self._parts:
            part.averaged()

    def states(self) -> dict[str, ParameterState]:
        """The joined weight and bias by name, with the optimizer's buffers."""
        weights, *biases = zip(*(part.states().values() for part in self._parts), strict=True)
        joined = {self.spec.weight: _together(weights, lambda tensors: torch.cat(tensors, 1))}
        if self.spec.bias is not None:
            joined[self.spec.bias] = _together(biases[0], lambda t: functools.reduce(torch.add, t))
        return joined

    def counts(self) -> dict[str, int]:
        """How many steps the optimizer says that the products' weights and biases took."""
        return {name: count for part in self._parts for name, count in part.counts().items()}

    def state_bytes(self) -> int:
        """What a stored state of this layer takes."""
        return sum(part.state_bytes() for part in self._parts)

    def look_ahead(self) -> None:
        """Send for what the products' checks read of a device."""
        for part in self._parts:
            part.look_ahead()

    def judge(self, step: int) -> tuple[list[LedgerRow], InexactMark | None]:
        """Judge all products, and join their rows.

        Raises:
            CaptureError: They did not see the same passes.
        """
        judged = [part.judge(step) for part in self._parts]
        rows = [ledger_rows for ledger_rows, _ in judged]
        weights = self._one_scale([ledger_rows[0] for ledger_rows in rows])
        rows = [
            [weight, *ledger_rows[1:]] for weight, ledger_rows in zip(weights, rows, strict=True)
        ]
        joined = [_join(self.spec.weight, weights)]
        if self.spec.bias is not None:
            biases = [ledger_rows[1] for ledger_rows in rows]
            scale = sum(bias.scale for bias in biases)
            joined.append(_join(self.spec.bias, biases)._replace(scale=scale))
        mark = next((mark for _, mark in judged if mark is not None), None)
        if step == 0 and self._apart is not None:
            mark = InexactMark(0, self._apart)
        if self._alike and not _all_alike(rows):
            self._alike = False
            mark = mark or InexactMark(
                step,
                f"{self._named()} are trained by different settings, so their rows share no "
                "coefficient; give all the same learning rate, momentum, decay and clipping",
            )
        self.kept = self._joined(step)
        return [*joined, *itertools.chain(*rows)], mark

    def check_parameters(self, step: int) -> InexactMark | None:
        """Look at what the weights and biases of all products are."""
        marks = [part.check_parameters(step) for part in self._parts]
        return next((mark for mark in marks if mark is not None), None)

    def check_weights(self, step: int) -> InexactMark | None:
        """Compare the weights of all products with their prediction."""
        marks = [part.check_weights(step) for part in self._parts]
        return next((mark for mark in marks if mark is not None), None)

    def check_still(self, step: int) -> InexactMark | None:
        """See that no product's weights moved since the last step."""
        marks = [part.check_still(step) for part in self._parts]
        return next((mark for mark in marks if mark is not None), None)

    def advance(self) -> None:
        """The step has run."""
        for item in self.kept:
            item.release()
        self.kept = []
        for part in self._parts:
            part.advance()

    def _one_scale(self, rows: list[LedgerRow]) -> list[LedgerRow]:
        """A gradient of zeros, as of W_hh while h is zero, has no scale of its own: any will do."""
        took_part = [row for row in rows if row.took_part]
        if all(_close(row.scale, took_part[0].scale) for row in took_part):
            return rows
        zero = [_is_zero(part.capture.weight.grad) for part in self._parts]
        told = [row for row, none in zip(rows, zero, strict=True) if row.took_part and not none]
        scale = (told or took_part)[-1].scale
        return [
            row._replace(scale=scale) if row.took_part and none else row
            for row, none in zip(rows, zero, strict=True)
        ]

    def _joined(self, step: int) -> list[Pass]:
        """The passes of the whole: joined keys, and the values that its parts share."""
        calls = self._kind.join([part.kept for part in self._parts])
        if calls is None:
            raise CaptureError(
                f"{self.spec.kind} layer {self.spec.name!r} at step {step}: rows reached only one "
                f"of its products, {self._named()}. Call the layer itself, not its parts; freeze "
                "or zero all or none; or leave it out with Recorder(..., layers=[...])"
            )
        whole = []
        dtypes = {
            item.key.dtype for part in self._parts for item in part.kept if item.key is not None
        }
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        for call, fill in calls:
            key = self._tape.pool.take(call.rows, self.spec.d_in, dtype)
            key.fill(fill)
            joined = Pass(call.number, call.annotation, call.leading, key)
            joined.value = call.value
            whole.append(joined)
        return whole

    def _named(self) -> str:
        return " and ".join(self._kind.parts)


def _apart(optimizer: OptimizerView, parts: int, biased: bool) -> str | None:
    """Why the joined parameters don't move as one, by the optimizer; None where they do."""
    family, name = optimizer.family, optimizer.name
    count = {2: "two", 3: "three"}.get(parts, str(parts))
    if family.scalar or optimizer.why_not is not None:
        return None
    if not family.elementwise:
        return (
            f"{name} sets the step of each of its {count} weights by its own size, so they do not "
            "move as one; weights stay exact"
        )
    if biased:
        return (
            f"under {name} each of its {count} biases moves by a normalised step of its own, so "
            "their sum does not move as one bias (without biases, as LSTM(..., bias=False), it is "
            "exact); weights stay exact"
        )
    return None


def _together(states: Sequence[ParameterState], join: _Join) -> ParameterState:
    def buffer(of: ParameterState, name: str) -> torch.Tensor:
        return of[1].get(name, torch.zeros_like(of[0]))

    names = dict.fromkeys(name for state in states for name in state[1])
    with torch.no_grad():
        return join([state[0] for state in states]), {
            name: join([buffer(state, name) for state in states]) for name in names
        }


def _join(name: str, rows: Sequence[LedgerRow]) -> LedgerRow:
    """The whole's ledger row: any part's that took part, as they are alike."""
    took_part = [row for row in rows if row.took_part]
    return (took_part or rows)[-1]._replace(parameter=name, took_part=bool(took_part))


def _all_alike(rows: Sequence[Sequence[LedgerRow]]) -> bool:
    """Whether weights, and biases, of all parts are trained by the same settings."""
    return all(
        _alike(column[0], other) for column in zip(*rows, strict=True) for other in column[1:]
    )


def _alike(one: LedgerRow, other: LedgerRow) -> bool:
    same = one._replace(parameter="", scale=0.0) == other._replace(parameter="", scale=0.0)
    return same and _close(one.scale, other.scale)


def _is_zero(grad: torch.Tensor | None) -> bool:
    return grad is not None and not bool(grad.any())


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_SCALE_TOLERANCE)
