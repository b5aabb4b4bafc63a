"""The checks that a question's arguments pass before an index answers."""

from __future__ import annotations

import operator

import numpy as np
import torch

from dualform.engine.errors import FailedPreconditionError, InvalidArgumentError
from dualform.engine.memory.layer import Layer
from dualform.engine.topk.candidates import Ranking
from dualform.engine.topk.contribution import Contribution
from dualform.engine.topk.distinct import Distinct
from dualform.engine.totals.coefficients import layer_coefficients
from dualform.store.grouping import Grouping
from dualform.store.index import IndexLayer
from dualform.store.ledger import Ledger


def query_tensor(queries: np.ndarray, layer: IndexLayer) -> torch.Tensor:
    """The queries as a contiguous float32 tensor, once they are what they should be."""
    if queries.dtype != np.float32:
        raise InvalidArgumentError(
            f"queries are {queries.dtype}; they must be float32", field="queries"
        )
    if queries.ndim != 2 or queries.shape[1] != layer.d_in:
        raise InvalidArgumentError(
            f"queries have shape {list(queries.shape)}; layer {layer.name!r} takes "
            f"[n, {layer.d_in}]",
            field="queries",
        )
    if len(queries) == 0:
        raise InvalidArgumentError("queries hold no row; ask with at least one", field="queries")
    odd = np.flatnonzero(~np.isfinite(queries).all(axis=1))
    if odd.size:
        raise InvalidArgumentError(
            f"query {odd[0]} holds NaN or Inf; queries must be finite", field="queries"
        )
    return torch.from_numpy(np.array(queries, dtype=np.float32, order="C"))


def ranking(
    k: int,
    order: str,
    grouping: Grouping | None = None,
    contribution: Contribution | None = None,
    distinct: Distinct | None = None,
) -> Ranking:
    """What to rank by, once k and order are what they should be."""
    try:
        count = 0 if isinstance(k, bool) else operator.index(k)
    except TypeError:
        count = 0
    if count < 1:
        raise InvalidArgumentError(f"k is {k!r}; it must be an integer, at least 1", field="k")
    if order not in ("largest", "smallest", "absolute"):
        raise InvalidArgumentError(
            f"order is {order!r}; it is one of largest, smallest, absolute", field="order"
        )
    return Ranking(count, order, grouping, contribution, distinct)


def contribution(
    layer: Layer,
    ledger: Ledger,
    rank_by: str,
    unit: int | None,
    at_step: int | None,
) -> tuple[Contribution | None, int | None]:
    """What to rank by, and the step before which rows take part."""
    if rank_by == "weight":
        for name, value in (("unit", unit), ("at_step", at_step)):
            if value is not None:
                raise InvalidArgumentError(
                    f"{name} goes with rank_by='contribution', not with 'weight'", field=name
                )
        return None, None
    if rank_by != "contribution":
        raise InvalidArgumentError(
            f"rank_by is {rank_by!r}; it is one of weight, contribution", field="rank_by"
        )
    if unit is None or not 0 <= unit < layer.d_out:
        raise InvalidArgumentError(
            f"unit is {unit}; rank_by='contribution' needs one of layer {layer.name!r}'s output "
            f"units 0 to {layer.d_out - 1}",
            field="unit",
        )
    end = last_step(layer, ledger, at_step)
    return Contribution(layer_coefficients(ledger, layer.manifest, end), unit), end


def last_step(layer: Layer, ledger: Ledger, at_step: int | None) -> int:
    """The number of steps that an output is about, once the layer is exact up to there."""
    steps = ledger.steps
    end = steps if at_step is None else at_step
    if not 0 <= end <= steps:
        raise InvalidArgumentError(
            f"at_step is {at_step}; training had {steps} steps, so it is one of 0 to {steps}",
            field="at_step",
        )
    _check_output(layer, end)
    return end


def _check_output(layer: Layer, end: int) -> None:
    if not layer.manifest.values:
        raise FailedPreconditionError(
            f"layer {layer.manifest.name!r} was recorded or indexed without values, so it has "
            "no dual output; record with values=True and build with --values",
            field="layer",
            reason="NO_VALUES",
        )
    for mark in layer.manifest.inexact:
        if mark.from_step < end:
            raise FailedPreconditionError(
                f"the dual output of layer {layer.manifest.name!r} is not exact from step "
                f"{mark.from_step} on: {mark.reason}; ask with at_step <= {mark.from_step}, or "
                "for weights (top-k, sums), which stay exact",
                field="layer",
                reason="INEXACT",
            )


def device(name: str) -> torch.device:
    """The device of that name, or ValueError where it is none, or not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; it is one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no GPU; use auto or cpu")
    return torch.device(name)
