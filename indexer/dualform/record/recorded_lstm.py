"""A recorded LSTM: its two products, each watched as a linear layer, joined into one layer.

Joined, W = [W_hh, W_ih] and b = b_hh + b_ih. Where both products are trained by the same settings,
W moves as either of them does, and b as one bias whose gradient counts for both: the sum of their
scales. So the joined parameters have ledger rows of their own, beside those of their parts
(docs/decisions/0012-lstm.md). Under Adam and its kin W still moves so; b does not, as each bias
takes a normalised step of its own: such layers are marked, unless they have no bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from dualform.record.capture import Pass, Tape
from dualform.record.elements import SampledElements
from dualform.record.errors import CaptureError
from dualform.record.optimizer import OptimizerView
from dualform.record.recorded import ParameterState, RecordedLayer
from dualform.record.selection import SelectedLayer
from dualform.store.ledger import InexactMark, LedgerRow

_Join = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_SCALE_TOLERANCE = 1e-6
"""Relative difference of the two products' scales that measuring them explains."""


class RecordedLSTM:
    """What `RecordedLayer` is for a linear layer; the same attributes and methods.

    Args:
        selected: With its parts: the products with x and with h.
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
        self.spec = selected.spec
        self._ih, self._hh = (
            RecordedLayer(part, optimizer, tape, random, sampled) for part in selected.parts
        )
        self._tape = tape
        self._apart = _apart(optimizer, self.spec.bias is not None)
        self._alike = self._apart is None
        self.kept: list[Pass] = []

    @property
    def exact(self) -> bool:
        """Nothing was found so far that the joined ledger does not explain."""
        return self._alike and self._ih.exact and self._hh.exact

    def attach(self) -> None:
        """Hook both products."""
        self._ih.attach()
        self._hh.attach()

    def detach(self) -> None:
        """Remove every hook, and let go of all rows."""
        self._ih.detach()
        self._hh.detach()

    def states(self) -> dict[str, ParameterState]:
        """The joined weight and bias by name, with the optimizer's buffers."""
        (ih, *ih_bias), (hh, *hh_bias) = self._ih.states().values(), self._hh.states().values()
        joined = {self.spec.weight: _both(hh, ih, lambda a, b: torch.cat([a, b], 1))}
        if self.spec.bias is not None:
            joined[self.spec.bias] = _both(hh_bias[0], ih_bias[0], torch.add)
        return joined

    def counts(self) -> dict[str, int]:
        """How many steps the optimizer says that the products' weights and biases took."""
        return {**self._ih.counts(), **self._hh.counts()}

    def state_bytes(self) -> int:
        """What a stored state of this layer takes."""
        return self._ih.state_bytes() + self._hh.state_bytes()

    def judge(self, step: int) -> tuple[list[LedgerRow], InexactMark | None]:
        """Judge both products, and join their rows.

        Raises:
            CaptureError: They did not see the same passes.
        """
        ih, mark = self._ih.judge(step)
        hh, other = self._hh.judge(step)
        hh[0], ih[0] = self._one_scale(hh[0], ih[0])
        weight = self._join(self.spec.weight, hh[0], ih[0])
        joined = [weight]
        if self.spec.bias is not None:
            bias = self._join(self.spec.bias, hh[1], ih[1])
            joined.append(bias._replace(scale=hh[1].scale + ih[1].scale))
        mark = mark or other
        if step == 0 and self._apart is not None:
            mark = InexactMark(0, self._apart)
        if self._alike and not all(map(_alike, hh, ih)):
            self._alike = False
            mark = mark or InexactMark(
                step,
                "ih and hh are trained by different settings, so their rows share no coefficient; "
                "give both the same learning rate, momentum, decay and clipping",
            )
        self.kept = [self._joined_pass(item, steps) for item, steps in self._grouped(step) if steps]
        return [*joined, *ih, *hh], mark

    def check_parameters(self, step: int) -> InexactMark | None:
        """Look at what the weights and biases of both products are."""
        marks = [self._ih.check_parameters(step), self._hh.check_parameters(step)]
        return marks[0] or marks[1]

    def check_weights(self, step: int) -> InexactMark | None:
        """Compare the weights of both products with their prediction."""
        marks = [self._ih.check_weights(step), self._hh.check_weights(step)]
        return marks[0] or marks[1]

    def advance(self) -> None:
        """The step has run."""
        for item in self.kept:
            item.key = item.value = None
        self.kept = []
        self._ih.advance()
        self._hh.advance()

    def _one_scale(self, hh: LedgerRow, ih: LedgerRow) -> tuple[LedgerRow, LedgerRow]:
        """A gradient of zeros, as while h is zero, has no scale of its own: any will do."""
        if hh.took_part and ih.took_part and not _close(hh.scale, ih.scale):
            if _is_zero(self._hh.capture.weight.grad):
                return hh._replace(scale=ih.scale), ih
            if _is_zero(self._ih.capture.weight.grad):
                return hh, ih._replace(scale=hh.scale)
        return hh, ih

    def _join(self, name: str, hh: LedgerRow, ih: LedgerRow) -> LedgerRow:
        took_part = hh.took_part or ih.took_part
        return (ih if ih.took_part else hh)._replace(parameter=name, took_part=took_part)

    def _grouped(self, step: int) -> list[tuple[Pass, Sequence[Pass]]]:
        """Each call's product with x, and its products with h, one per time step."""
        calls, products = self._ih.kept, self._hh.kept
        numbers = [item.number for item in products]
        starts = [*np.searchsorted(numbers, [call.number for call in calls]), len(products)]
        groups: list[tuple[Pass, Sequence[Pass]]] = [
            (call, products[starts[i] : starts[i + 1]]) for i, call in enumerate(calls)
        ]
        complete = all(
            len(call.leading) == 2
            and [item.leading for item in own] == [call.leading[:1]] * call.leading[1]
            for call, own in groups
        )
        if not complete or starts[0] != 0:
            raise CaptureError(
                f"LSTM {self.spec.name!r} at step {step}: rows reached only one of its products, "
                "ih and hh. Call the LSTM itself, not its parts; freeze or zero both or neither; "
                "or leave it out with Recorder(..., layers=[...])"
            )
        return groups

    def _joined_pass(self, call: Pass, steps: Sequence[Pass]) -> Pass:
        """One pass [batch, time] of the whole: keys [h; x], values as x's product has them."""
        assert call.key is not None
        batch, time = call.leading
        hidden = self.spec.d_out // 4
        key = self._tape.pool.take(call.rows, self.spec.d_in)
        key.array[:, hidden:] = call.key.array
        by_time = key.array.reshape(batch, time, self.spec.d_in)
        for t, item in enumerate(steps):
            assert item.key is not None
            by_time[:, t, :hidden] = item.key.array
        joined = Pass(call.number, call.annotation, call.leading, key)
        joined.value = call.value
        return joined


def _apart(optimizer: OptimizerView, biased: bool) -> str | None:
    """Why the joined parameters don't move as one, by the optimizer; None where they do."""
    family, name = optimizer.family, optimizer.name
    if family.scalar or optimizer.why_not is not None:
        return None
    if not family.elementwise:
        return (
            f"{name} sets the step of each of an LSTM's two weights by its own size, so they do "
            "not move as one; weights stay exact"
        )
    if biased:
        return (
            f"under {name} each of an LSTM's two biases moves by a normalised step of its own, so "
            "their sum does not move as one bias (without biases, LSTM(..., bias=False), it is "
            "exact); weights stay exact"
        )
    return None


def _both(hh: ParameterState, ih: ParameterState, join: _Join) -> ParameterState:
    def buffer(of: ParameterState, name: str) -> torch.Tensor:
        return of[1].get(name, torch.zeros_like(of[0]))

    names = dict.fromkeys([*hh[1], *ih[1]])
    with torch.no_grad():
        return join(hh[0], ih[0]), {
            name: join(buffer(hh, name), buffer(ih, name)) for name in names
        }


def _alike(hh: LedgerRow, ih: LedgerRow) -> bool:
    same = hh._replace(parameter="", scale=0.0) == ih._replace(parameter="", scale=0.0)
    return same and _close(hh.scale, ih.scale)


def _is_zero(grad: torch.Tensor | None) -> bool:
    return grad is not None and not bool(grad.any())


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_SCALE_TOLERANCE)
