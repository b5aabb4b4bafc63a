"""Outputs from the parts of the weights that an index keeps: what the rows of each value of a
column became (`dualform index build --parts`), one small product per group.

They answer for the groups of such a column, and for every selection of rows that is made of whole
groups of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.memory.layer import Layer
from dualform.engine.memory.states import States, product
from dualform.store.errors import DamagedError
from dualform.store.grouping import Grouping
from dualform.store.index import REBUILD, IndexLayer, StoredParts

TOLERANCE = 1e-6
"""Of the sum of the parts' lengths, how far their sum may be off: they are kept in float32."""

SAMPLE = 4096
"""Rows that often tell that a filter takes part of a group, before all are counted."""


@dataclass(frozen=True)
class WholeGroups:
    """Selected rows as whole groups of a column whose parts are stored.

    Attributes:
        stored: The column's parts.
        taken: bool [groups], those that the selected rows are.
    """

    stored: StoredParts
    taken: np.ndarray


def whole_groups(
    layer: Layer, at_step: int | None, column: str | None, selected: np.ndarray
) -> WholeGroups | str:
    """The stored parts that selected rows are made of, or why they are made of none.

    Args:
        layer: Whose rows.
        at_step: After so many steps; None for the trained layer.
        column: What the output is grouped by; None for no groups.
        selected: bool [total], by position.
    """

    def counts(of: str) -> tuple[np.ndarray, np.ndarray] | None:
        grouping = layer.space.grouping(of)
        if _is_split(grouping, selected):
            return None
        return layer.space.count(of, selected), grouping.counts

    return made_of(layer.manifest, at_step, column, counts)


def made_of(
    layer: IndexLayer,
    at_step: int | None,
    column: str | None,
    counts: Callable[[str], tuple[np.ndarray, np.ndarray] | None],
) -> WholeGroups | str:
    """Likewise of rows that are counted, wherever they are.

    Args:
        layer: Whose rows.
        at_step, column: As for `whole_groups`.
        counts: Gives how many rows of each value of a column are selected, and how many there are,
            int64 [groups] both; None where a value's rows are selected in part.
    """
    if at_step is not None:
        return "they are the trained layer's, not those at a step"
    stored = layer.parts
    if column is not None:
        stored = tuple(parts for parts in stored if parts.column == column)
    if not stored:
        by = "" if column is None else f" by {column!r}"
        return f"the index has no parts of layer {layer.name!r}{by}: build it with --parts"
    found = []
    for parts in stored:
        counted = counts(parts.column)
        if counted is not None and _is_whole(*counted):
            found.append(WholeGroups(parts, counted[0] > 0))
    if not found:
        names = ", ".join(parts.column for parts in stored)
        return f"the filter takes more or less than whole groups of {names}"
    return min(found, key=lambda groups: int(np.count_nonzero(groups.taken)))


def _is_whole(counts: np.ndarray, of_all: np.ndarray) -> bool:
    return bool(((counts == 0) | (counts == of_all)).all())


def _is_split(grouping: Grouping, selected: np.ndarray) -> bool:
    """Whether a few of the rows show already that a group is taken in part."""
    some = slice(None, None, max(1, len(selected) // SAMPLE))
    codes, groups = grouping.codes[some], len(grouping.values)
    counts = np.bincount(codes[selected[some]], minlength=groups)
    return not _is_whole(counts, np.bincount(codes, minlength=groups))


def group_outputs(
    layer: Layer, states: States, whole: WholeGroups, queries: torch.Tensor
) -> np.ndarray:
    """What each group adds to outputs: float64 [n, groups, d_out], 0 where it is not taken.

    Args:
        layer: Whose.
        states: The index's stored weights.
        whole: Which parts.
        queries: float32 [n, d_in].

    Raises:
        DamagedError: The file does not hold such parts.
    """
    manifest, groups = layer.manifest, whole.stored.groups
    state = states.read(whole.stored.file)
    weight = state.get(manifest.weight)
    bias = None if manifest.bias is None else state.get(manifest.bias)
    shape = (len(whole.taken), manifest.d_out, manifest.d_in)
    if (
        groups != len(whole.taken)
        or weight is None
        or weight.shape != shape
        or (manifest.bias is not None and (bias is None or bias.shape != shape[:2]))
    ):
        raise DamagedError(
            states.path(whole.stored.file),
            f"it has not the parts of {len(whole.taken)} values of {whole.stored.column!r}",
            REBUILD,
        )
    wide = queries.double()
    if whole.taken.all():
        flat = product(wide, weight.reshape(-1, manifest.d_in)).reshape(len(wide), *shape[:2])
        return np.asarray((flat if bias is None else flat + bias.double()).numpy())
    out = np.zeros((len(wide), *shape[:2]))
    for number in np.flatnonzero(whole.taken):
        part = product(wide, weight[number])
        out[:, number] = (part if bias is None else part + bias[number].double()).numpy()
    return out


def parts_off(layer: IndexLayer, states: States) -> list[str]:
    """Which columns' parts do not add up to what all rows add up to, and in which parameter.

    With the initial part and the remainder the latter is the trained weight, and so are a column's
    parts where they add up to it.
    """
    rebuilt = {} if layer.rebuilt is None else states.read(layer.rebuilt)
    wrong = []
    for stored in layer.parts:
        parts = states.read(stored.file)
        for name in [layer.weight] + ([] if layer.bias is None else [layer.bias]):
            ours, whole = parts.get(name), rebuilt.get(name)
            if ours is None or whole is None or ours.shape != (stored.groups, *whole.shape):
                wrong.append(f"{stored.column!r}: {name} is not there, or has another shape")
                continue
            terms, total = 0.0, torch.zeros_like(whole)
            for part in ours:
                total += part
                terms += float(torch.linalg.vector_norm(part.double()))
            if not float(torch.linalg.vector_norm(total - whole)) <= TOLERANCE * terms:
                wrong.append(f"{stored.column!r}: {name} is off")
    return wrong
