"""One recorded layer at the step: which rows it keeps, its ledger rows, and its inexact marks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

from dualform.layers import ProductKind
from dualform.record.capture import LayerCapture
from dualform.record.check import GradientCheck, Sides, Verdict, bias_sum, weight_sum
from dualform.record.elements import ElementProbe, Sample, SampledElements
from dualform.record.errors import CaptureError
from dualform.record.optimizer import OptimizerView
from dualform.record.passes import Pass
from dualform.record.place import LayerPlace
from dualform.record.ranks import RankWatch, rank_verdict
from dualform.record.reasons import (
    FOREIGN_GRADIENT,
    WEIGHTS_CHANGED,
    axes_reason,
    fault_reason,
    optimizer_reason,
    rounded_reason,
)
from dualform.record.selection import SelectedLayer
from dualform.record.tape import Tape
from dualform.record.watch import GradientWatch
from dualform.record.weights import WeightProbe
from dualform.store.ledger import InexactMark, LedgerRow

ParameterState = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""A parameter, and the optimizer's buffers for it that are there, by the family's names."""


class RecordedLayer:
    """A layer with its hooks, its checks and what they found.

    Attributes:
        spec: As in the manifest.
        capture: Its hooks and committed passes.
        parameters: Weight and bias by name as in `model.named_parameters()`.
        kept: The passes that belong to the step being prepared.
        check_every: Every how many steps the weights are compared with their prediction.
    """

    check_every = 16

    def __init__(
        self,
        selected: SelectedLayer,
        optimizer: OptimizerView,
        tape: Tape,
        random: np.random.Generator,
        sampled: SampledElements,
    ) -> None:
        spec = self.spec = selected.spec
        kind = selected.kind
        assert isinstance(kind, ProductKind)
        weight, bias = kind.weight(selected.module), kind.bias(selected.module)
        self._weight_2d = kind.weight_2d
        self.parameters: dict[str, torch.Tensor] = {spec.weight: weight}
        if spec.bias is not None and bias is not None:
            self.parameters[spec.bias] = bias
        copies = self._copies = tape.pool.copies
        self._check = GradientCheck(spec.d_in, spec.d_out, random, kind.weight_2d, copies)
        self._share = tape.share
        part = kind.part if kind.part(weight) is not weight else None
        self._watch, self._bias_watch = self._watches(weight, bias, tape.ranked, part)
        self.capture = LayerCapture(
            spec,
            kind,
            selected.module,
            selected.tied,
            LayerPlace(selected.root, spec, kind, selected.module),
            tape,
            self._watch,
            self._bias_watch,
            self._held_now,
        )
        self.kept: list[Pass] = []
        self._optimizer = optimizer
        self._rows: list[tuple[LedgerRow, Verdict, float]] = []
        self._unfollowed: list[tuple[LedgerRow, Verdict, float]] = []
        self._changes: set[str] = set()
        self._kept_as = {name: (p.shape, p.dtype) for name, p in self.parameters.items()}
        self._probes = {name: WeightProbe() for name in self.parameters}
        self._samples = {name: Sample(random, p, copies) for name, p in self.parameters.items()}
        self._elements: dict[str, ElementProbe] = {}
        if _by_elements(optimizer, tape.ranked):
            self._elements = {name: sampled.probe(s) for name, s in self._samples.items()}
        self._gradients: dict[str, np.ndarray | torch.Tensor] = {}
        self._kernel = 1.0
        self._single = weight.dtype == torch.float32
        self._own_axes = kind.weight_2d(weight) is weight or optimizer.family.elementwise
        self._exact = self._single and optimizer.exact and self._own_axes
        self._follow_weights = self._single and optimizer.why_not is None
        self._follow_rows = self._single

    @property
    def exact(self) -> bool:
        """Nothing was found so far that the ledger does not explain."""
        return self._exact

    def attach(self) -> None:
        """Hook the module."""
        self.capture.attach()

    def detach(self) -> None:
        """Remove every hook, and let go of all rows."""
        self.capture.detach()

    def averaged(self) -> None:
        """A backward has ended, and gradients were averaged over ranks."""
        self.capture.averaged()

    def states(self) -> dict[str, ParameterState]:
        """Weight [d_out, d_in] and bias by name, with the optimizer's buffers."""
        found: dict[str, ParameterState] = {}
        for name, parameter in self.parameters.items():
            shape, dtype = self._kept_as[name]
            whole = {
                buffer: _as(tensor, shape, tensor.dtype)
                for buffer, tensor in self._optimizer.buffers(parameter).items()
                if tensor.shape == parameter.shape
            }
            tensor = _as(parameter, shape, dtype)
            if name == self.spec.weight:
                tensor = self._weight_2d(tensor)
                whole = {buffer: self._weight_2d(tensor) for buffer, tensor in whole.items()}
            found[name] = tensor, {**self._optimizer.buffers(parameter), **whole}
        return found

    def counts(self) -> dict[str, int]:
        """How many steps the optimizer says that weight and bias took, where it counts them."""
        found = {name: self._optimizer.taken(p) for name, p in self.parameters.items()}
        return {name: count for name, count in found.items() if count is not None}

    def state_bytes(self) -> int:
        """What a stored state of this layer takes."""
        return sum(
            (self._weight_2d(p) if name == self.spec.weight else p).nbytes
            * (1 + len(self._optimizer.buffers(p)))
            for name, p in self.parameters.items()
        )

    def check_parameters(self, step: int) -> InexactMark | None:
        """Look at what the layer's weight and bias are, and record those from now on.

        Returns:
            A mark from `step` on if one of them is not what it was at the last look.
        """
        reason = self.capture.follow()
        if reason is None:
            return None
        self._follow_rows = self._follow_weights = self._exact = False
        known = reason in self._changes
        self._changes.add(reason)
        self.parameters[self.spec.weight] = self.capture.weight
        if self.spec.bias is not None:
            bias = self.capture.bias
            if bias is None:
                bias = torch.zeros(self.spec.d_out, device="cpu")
            self.parameters[self.spec.bias] = bias
        return None if known else InexactMark(step, reason)

    def look_ahead(self) -> None:
        """Send for what the step's checks read of a device: it is there when it is asked for."""
        if not self._copies.sending:
            return
        weight, bias = self.capture.weight.grad, self.capture.bias
        self._check.look_ahead(weight, None if bias is None else bias.grad)
        self._watch.look_ahead(weight)
        for name, sample in self._samples.items():
            sample.look_ahead(self.parameters[name])

    def judge(self, step: int) -> tuple[list[LedgerRow], InexactMark | None]:
        """Decide which rows reach the step, and test them against the gradient.

        Returns:
            The ledger's rows of the weight and the bias, and a mark if the layer turns inexact.

        Raises:
            CaptureError: The weight has a gradient, and the layer never had a row.
        """
        passes = self.capture.committed()
        mark = self._first_mark() if step == 0 else None
        sides = self._check.sides(passes)
        kernel = self._kernel = self._optimizer.kernel_scale()
        weight = self._weight_verdict(sides)
        if weight.counts and not self.capture.ever:
            self._refuse_foreign_gradient()
        verdicts = [(weight, sides.weight_size)]
        bias = Verdict(False)
        if self.spec.bias is not None:
            bias = self._bias_verdict(weight, sides)
            verdicts.append((bias, sides.bias_size))
        self.kept = passes if _rows_count(weight, bias, sides) else []
        if kernel != 1 or self._share != 1:
            scale = kernel * self._share
            verdicts = [
                (
                    verdict._replace(scale=verdict.scale * scale, probe=verdict.probe * kernel),
                    size * kernel,
                )
                for verdict, size in verdicts
            ]
        self._rows = [
            (self._optimizer.row(step, name, p, verdict.scale, verdict.took_part), verdict, size)
            for (name, p), (verdict, size) in zip(self.parameters.items(), verdicts, strict=True)
        ]
        if mark is None:
            mark = self._fault_mark(step, weight.fault or bias.fault)
        if self._follow_weights and self._elements:
            self._gradients = self._element_gradients()
        return [row for row, _, _ in self._rows], mark

    def check_weights(self, step: int) -> InexactMark | None:
        """Compare weights and momentum buffers with what the steps so far should have made them.

        Args:
            step: How many steps there were.
        """
        if not self._follow_weights:
            return None
        moved = self.check_still(step)
        if moved is not None:
            return moved
        since, agree, finite = self._look(step)
        if agree and finite:
            return None
        return self._changed(since, step, finite)

    def check_still(self, step: int) -> InexactMark | None:
        """See that weights did not move since the last step: due at every step, as it costs little.

        Args:
            step: How many steps there were.
        """
        if not self._follow_weights:
            return None
        moved = [
            sample.copy(self.parameters[name])
            for name, sample in self._samples.items()
            if not sample.stood_still(self.parameters[name])
        ]
        if not moved:
            return None
        finite = all(bool(torch.as_tensor(elements).isfinite().all()) for elements in moved)
        return self._changed(step - 1, step, finite)

    def advance(self) -> None:
        """The step has run: follow it, and let go of its rows."""
        for item in self.kept:
            item.release()
        self.capture.begin_step()
        self.kept = []
        if not self._follow_weights:
            return
        for name, sample in self._samples.items():
            sample.leave(self.parameters[name])
        if not self._elements and self._optimizer.family.scalar:
            self._unfollowed += self._rows
        for row, _, _ in self._rows:
            gradient = self._gradients.get(row.parameter)
            if gradient is not None:
                self._elements[row.parameter].follow(row, gradient, self._kernel)
        self._gradients = {}

    def _changed(self, since: int, step: int, finite: bool) -> InexactMark:
        self._follow_weights = self._exact = False
        what = WEIGHTS_CHANGED if finite else "the weights are no longer finite"
        return InexactMark(since, f"{what} (between step {since} and step {step})")

    def _watches(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ranked: bool,
        part: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> tuple[GradientWatch, GradientWatch | None]:
        """Of the weight, and where gradients are averaged over ranks, of the bias."""
        shape = weight.shape if part is None else part(weight).shape
        if not ranked:
            return GradientWatch(shape, part, self._copies), None
        of_bias = None if bias is None else RankWatch(bias.shape, self._check.read)
        return RankWatch(shape, self._check.read, part), of_bias

    def _look(self, step: int) -> tuple[int, bool, bool]:
        """Compare, and begin anew: since when, whether all agrees, whether all is finite.

        Of a family that is followed neither as a whole nor by elements, only the latter is seen.
        """
        for row, verdict, size in self._unfollowed:
            self._probes[row.parameter].follow(row, verdict.probe, size)
        self._unfollowed.clear()
        since = step
        agree = finite = True
        for name, parameter in self.parameters.items():
            if name in self._elements:
                elements = self._elements[name]
                real = elements.look(parameter, self._optimizer.buffers(parameter))
                since = elements.since
                finite = finite and all(bool(np.isfinite(array).all()) for array in real.values())
                agree = elements.agrees(real) and agree
                elements.reset(step, real)
                continue
            state = self._probe_state(parameter)
            probe = self._probes[name]
            since = probe.since
            finite = finite and all(math.isfinite(real) for real, _ in state)
            if self._optimizer.family.scalar:
                agree = agree and (
                    probe.since < 0
                    or probe.agrees(state)
                    or probe.agrees(state, self._blindness(parameter))
                )
            probe.reset(step, state)
        return max(since, 0), agree, finite

    def _weight_verdict(self, sides: Sides) -> Verdict:
        grad, watch = self.capture.weight.grad, self._watch
        if self._skipped or grad is None or not self._optimizer.holds(self.capture.weight):
            return Verdict(False)
        if self._follow_rows and isinstance(watch, RankWatch):
            shape = torch.Size((self.spec.d_out, self.spec.d_in))
            rows = functools.partial(weight_sum, sides.passes, shape)
            return rank_verdict(grad, watch, sides.of_part, sides.part_size, rows)
        if self._follow_rows:
            return self._check.weight(grad, watch, sides)
        if sides.weight != 0.0 and watch.zeroed(grad):
            return Verdict(True, zeroed=True, scale=0.0)
        # Measured, as autograd's count misses what torch.amp.GradScaler does to a gradient.
        factor = watch.scale(grad).factor
        return Verdict(True, scale=factor if np.isfinite(factor) else 1.0)

    def _bias_verdict(self, weight: Verdict, sides: Sides) -> Verdict:
        bias = self.capture.bias
        if self._skipped or bias is None or bias.grad is None or not self._optimizer.holds(bias):
            return Verdict(False)
        if isinstance(self._bias_watch, RankWatch) and self._follow_rows:
            rows = functools.partial(bias_sum, sides.passes, bias.shape)
            return rank_verdict(bias.grad, self._bias_watch, sides.bias, sides.bias_size, rows)
        if self._follow_rows and weight.fault is None:
            return self._check.bias(bias.grad, sides, 1.0 if weight.zeroed else weight.scale)
        return Verdict(True, zeroed=weight.zeroed, scale=weight.scale)

    @property
    def _skipped(self) -> bool:
        """The kernel will not step, having found gradients that are not finite."""
        return self._kernel == 0.0

    def _refuse_foreign_gradient(self) -> None:
        """Raise CaptureError where the weight has a gradient, though no pass ever brought one."""
        grad = self.capture.weight.grad
        if isinstance(self._watch, RankWatch) and self._watch.brought == 0.0:
            return  # another rank's passes did
        if grad is not None and bool(self._weight_2d(grad).any()):
            raise CaptureError(FOREIGN_GRADIENT.format(name=self.spec.name))

    def _element_gradients(self) -> dict[str, np.ndarray | torch.Tensor]:
        """The gradients of the followed elements, by parameter; of those that take part."""
        return {
            row.parameter: self._elements[row.parameter].gradient(grad)
            for row, _, _ in self._rows
            if row.took_part and (grad := self.parameters[row.parameter].grad) is not None
        }

    def _held_now(self, parameter: torch.Tensor) -> bool:
        self._optimizer.refresh()
        return self._optimizer.holds(parameter)

    def _probe_state(self, parameter: torch.Tensor) -> list[tuple[float, float]]:
        momentum = self._optimizer.momentum(parameter)
        buffer = (0.0, 0.0) if momentum is None else self._check.probe(momentum)
        return [self._check.probe(parameter), buffer]

    def _blindness(self, parameter: torch.Tensor) -> float:
        momentum = self._optimizer.momentum(parameter)
        tensors = [parameter] if momentum is None else [parameter, momentum]
        return max(map(self._check.blindness, tensors))

    def _first_mark(self) -> InexactMark | None:
        if not self._single:
            return InexactMark(0, rounded_reason(self.spec.dtype, self.capture.weight.dtype))
        if not self._optimizer.exact:
            return InexactMark(0, optimizer_reason(self._optimizer.name, self._optimizer.why_not))
        if not self._own_axes:
            return InexactMark(0, axes_reason(self._optimizer.name))
        return None

    def _fault_mark(self, step: int, fault: str | None) -> InexactMark | None:
        """The mark for a gradient that is not the rows'; from then on it is not looked at."""
        if fault is None or not self._follow_rows:
            return None
        self._follow_rows = self._follow_weights = self._exact = False
        return InexactMark(step, fault_reason(fault, self.capture, bool(self.kept)))


def _by_elements(optimizer: OptimizerView, ranked: bool) -> bool:
    """Whether weights are followed by sampled elements: where rows have no coefficient, or where
    a rank does not know the probe of the other ranks' rows."""
    family = optimizer.family
    return family.elementwise and family.continuous and (ranked or not family.scalar)


def _rows_count(weight: Verdict, bias: Verdict, sides: Sides) -> bool:
    """Whether the rows reach the step, through the weight or the bias."""
    if not weight.counts:  # it is frozen, or its gradient None or zeroed; not the bias's
        return bias.counts
    # Where all keys are zero, only the bias can tell of zeroing.
    return sides.weight != 0.0 or not bias.zeroed


def _as(tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """What a layer holds, as its states are kept: NaN where its shape is another by now."""
    if tensor.shape != shape:
        return torch.full(shape, math.nan, dtype=dtype, device="cpu")
    return tensor if tensor.dtype is dtype else tensor.detach().to(dtype)
