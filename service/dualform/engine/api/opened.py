"""What the answers of an opened index share, and the checks that need a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.devices.devices import Devices
from dualform.engine.errors import (
    CancelledError,
    EngineError,
    FailedPreconditionError,
    InvalidArgumentError,
)
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.plan.planner import Planner
from dualform.engine.topk.contribution import Contribution
from dualform.engine.totals.coefficients import layer_coefficients
from dualform.engine.totals.metric import UnitMetric, UnitMetrics
from dualform.engine.totals.outputs import DualOutputs
from dualform.questions import MAX_RESIDUAL, QuestionError, TopGroupsQuestion, TopKQuestion
from dualform.store.ledger import Ledger


@dataclass(frozen=True)
class Opened:
    """What an opened index answers with, beside the layer that is asked about.

    Attributes:
        ledger: What the optimizer did.
        outputs: Gives dual outputs.
        metrics: Gives output units' metrics, where rows have no coefficients.
        planner: Chooses strategies, and remembers how they went.
        devices: Where rows lie beside the host's memory.
        use_faiss: Whether FAISS may propose rows.
    """

    ledger: Ledger
    outputs: DualOutputs
    metrics: UnitMetrics
    planner: Planner
    devices: Devices
    use_faiss: bool

    def metric_finder(
        self, layer: Layer, end: int, stop: Stop | None
    ) -> Callable[[int], UnitMetric]:
        """Gives the metric of a unit of the layer after so many steps."""
        return lambda unit: self.metrics.find(layer, unit, end, stop)


@contextmanager
def refusals() -> Iterator[None]:
    """Make the engine's error of what is wrong with a question; a decorator too."""
    try:
        yield
    except QuestionError as error:
        raise InvalidArgumentError(str(error), field=error.field, reason=error.reason) from None


@contextmanager
def layer_named(layer: str) -> Iterator[None]:
    """Say which of several layers is at fault."""
    try:
        yield
    except EngineError as error:
        if isinstance(error, CancelledError) or f"layer {layer!r}" in str(error):
            raise
        raise error.saying(f"layer {layer!r}: {error}") from error


def query_tensor(layer: Layer, queries: np.ndarray) -> torch.Tensor:
    """A question's queries as a tensor of their own, once the layer takes such."""
    if queries.shape[1] != layer.d_in:
        raise InvalidArgumentError(
            f"queries have shape {list(queries.shape)}; layer {layer.name!r} takes "
            f"[n, {layer.d_in}]",
            field="queries",
        )
    return torch.from_numpy(np.array(queries, dtype=np.float32, order="C"))


def check_target(layer: Layer, unit: int | None, directions: np.ndarray | None) -> None:
    """Refuse contributions to a unit that is none of the layer's, or along what is no direction of
    its outputs."""
    if directions is not None:
        if directions.shape[1] != layer.d_out:
            raise InvalidArgumentError(
                f"directions have shape {list(directions.shape)}; layer {layer.name!r} gives "
                f"outputs [n, {layer.d_out}], and so must they be",
                field="direction",
                reason="BAD_DIRECTIONS",
            )
    elif unit is None or not 0 <= unit < layer.d_out:
        raise InvalidArgumentError(
            f"unit is {unit}; rank_by='contribution' needs the unit= that rows contributed to: "
            f"one of layer {layer.name!r}'s output units 0 to {layer.d_out - 1}, or a direction=",
            field="unit",
        )


def last_step(layer: Layer, ledger: Ledger, at_step: int | None) -> int:
    """The number of steps that an output is about, once the layer is exact up to there.

    Of the trained layer what no row explains is known, and decides whether an answer is given; of
    earlier steps only the recorder's marks tell.
    """
    steps = ledger.steps
    end = steps if at_step is None else at_step
    if not 0 <= end <= steps:
        raise InvalidArgumentError(
            f"at_step is {at_step}; training had {steps} steps, so it is one of 0 to {steps}",
            field="at_step",
        )
    if not layer.manifest.values:
        raise FailedPreconditionError(
            f"layer {layer.name!r} was recorded or indexed without values, so it has "
            "no dual output; record with values=True and build with --values",
            field="layer",
            reason="NO_VALUES",
        )
    known = layer.manifest.rebuilt is not None or not ledger.family.explains
    if at_step is None and known and layer.manifest.final is not None:
        return end
    for mark in layer.manifest.inexact:
        if mark.from_step < end:
            raise FailedPreconditionError(
                f"the dual output of layer {layer.name!r} is not exact from step "
                f"{mark.from_step} on: {mark.reason}; ask with at_step <= {mark.from_step}, or "
                "for weights (top-k, sums), which stay exact",
                field="layer",
                reason="INEXACT",
            )
    return end


def asked_contribution(
    opened: Opened, layer: Layer, question: TopKQuestion | TopGroupsQuestion
) -> tuple[Contribution, int]:
    """What is ranked by contribution, and the step before which rows take part.

    Raises:
        InvalidArgumentError: No such unit or step, or directions that are none of the layer's.
        FailedPreconditionError: The layer is not exact there, or has no values.
    """
    check_target(layer, question.unit, question.direction)
    if not opened.ledger.family.explains:
        why = "; ".join(mark.reason for mark in layer.manifest.inexact)
        raise FailedPreconditionError(
            f"what rows added to the outputs of layer {layer.name!r} is not known"
            f"{f': {why}' if why else ''}; rank by weight, or ask for its output with max_residual",
            field="rank_by",
            reason="INEXACT",
        )
    end = last_step(layer, opened.ledger, question.at_step)
    if question.at_step is None:
        most = MAX_RESIDUAL if question.max_residual is None else question.max_residual
        opened.outputs.check(layer, query_tensor(layer, question.queries), most)
    coefficients = None
    if opened.ledger.family.scalar:
        coefficients = (
            opened.outputs.trained_coefficients(layer.manifest)
            if question.at_step is None
            else layer_coefficients(opened.ledger, layer.manifest, end)
        )
    if question.direction is not None:
        directions = torch.from_numpy(np.array(question.direction, np.float32, order="C"))
        return Contribution(coefficients, directions=directions), end
    assert question.unit is not None
    return Contribution(coefficients, question.unit), end
