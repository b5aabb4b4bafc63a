"""What callbacks take from a training framework's batches: columns by name, as the recorder has
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dualform.record.annotations import ROWS
from dualform.record.errors import AnnotationError
from dualform.record.recorder import Recorder

EXAMPLE = "example"
"""The column of ids: taken wherever a batch has it."""

IGNORED = -100
"""A label that the loss leaves out (torch's ignore_index): annotated as null."""

DEFAULT = ("labels",)
"""What is annotated unless the user says otherwise: taken where it is there and fits the rows."""

Wanted = Sequence[str] | Mapping[str, str | int]
"""Columns of a batch by name; or by the name that they get, what they are called in the batch (of a
batch that is a tuple: their place)."""

Rows = Callable[[Any], Any]
"""Given a batch, which of its rows are recorded: what `Recorder.annotate` takes as `rows`."""

_LABELS = ("label", "labels", "label_ids")


class BatchColumns:
    """Annotates a recorder with a batch's columns.

    Args:
        annotate: What is wanted.
        rows: Which rows are recorded; None for all.

    Attributes:
        places: What every wanted column is called in a batch, by the name that it gets.

    Raises:
        AnnotationError: A name that no column can have.
    """

    def __init__(self, annotate: Wanted, rows: Rows | None = None) -> None:
        self._rows = rows
        if isinstance(annotate, str):
            annotate = (annotate,)
        self._asked = isinstance(annotate, Mapping) or tuple(annotate) != DEFAULT
        self.places: dict[str, str | int] = (
            dict(annotate)
            if isinstance(annotate, Mapping)
            else dict(zip(annotate, annotate, strict=True))
        )
        for name in self.places:
            if not isinstance(name, str) or name == ROWS:
                raise AnnotationError(
                    f"annotate: {name!r} is no name for a column"
                    + (", it is which rows are recorded" if name == ROWS else "")
                    + f"; give it another, as in annotate={{'my_{name}': {name!r}}}"
                )

    @property
    def needed(self) -> set[str]:
        """Names of batch columns that are asked for, the examples' included."""
        return {EXAMPLE, *(place for place in self.places.values() if isinstance(place, str))}

    def annotate(self, recorder: Recorder, batch: Any, extra: Mapping[str, Any] = {}) -> None:
        """Annotate the passes that are to come with a batch.

        Args:
            recorder: Whose.
            batch: A mapping by name, or a sequence.
            extra: What belongs to the batch, and is no longer in it.

        Raises:
            AnnotationError: A column is not there, or does not fit.
        """
        given: dict[str, Any] = {}
        for name, place in self.places.items():
            value = self._found(batch, extra, name, place)
            if value is not None:
                given[name] = _without_ignored(str(place), value)
        if EXAMPLE not in given and (found := _get(batch, extra, EXAMPLE)) is not None:
            given[EXAMPLE] = found
        rows = None if self._rows is None else self._rows(batch)
        recorder.annotate(rows=rows, **given)

    def _found(self, batch: Any, extra: Mapping[str, Any], name: str, place: str | int) -> Any:
        value = _get(batch, extra, place)
        if not self._asked:
            return value if value is not None and _is_plain(value, batch) else None
        if value is None:
            what = list(batch) if isinstance(batch, Mapping) else f"of type {type(batch).__name__}"
            if isinstance(batch, Sequence):
                what = f"of type {type(batch).__name__} and length {len(batch)}"
            raise AnnotationError(
                f"annotate: the batch has no {place!r} for column {name!r}; it is {what}. Give "
                "names of its columns, or {name: place} where it is a tuple"
            )
        return value


def per_row(values: Sequence[Any], attention: Any) -> Any:
    """A column of examples as one array: what has a value per token is padded as the tokens are.

    Args:
        values: One per example: a number, text, or a list of them, of different lengths.
        attention: [batch, time], 1 where a token is; None where there is none.

    Returns:
        The values; a masked array [batch, time], or None for padding, where they are lists.
    """
    arrays = [_array(value) for value in values]
    if all(array.ndim == 0 for array in arrays):
        return [array.item() for array in arrays]
    if attention is None:
        return arrays if len({array.shape for array in arrays}) > 1 else np.stack(arrays)
    mask = _array(attention) != 0
    lengths = [len(array) for array in arrays]
    if any(array.ndim != 1 for array in arrays) or lengths != mask.sum(1).tolist():
        return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays
    tokens = np.concatenate(arrays)
    found = np.zeros(mask.shape, tokens.dtype)
    found[mask] = tokens
    return np.ma.MaskedArray(found, ~mask)


def _get(batch: Any, extra: Mapping[str, Any], place: str | int) -> Any:
    if place in extra:
        return extra[str(place)]
    if isinstance(batch, Mapping):
        return batch.get(place)
    if isinstance(place, int) and isinstance(batch, Sequence) and -len(batch) <= place < len(batch):
        return batch[place]
    return None


def _is_plain(value: Any, batch: Any) -> bool:
    """Whether a column has one value per example, or one per token; scores of many classes, masks
    of pictures and the like say nothing of rows."""
    shape = np.shape(value)
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return len(shape) <= 1 or (tokens is not None and shape == tuple(tokens.shape[:2]))


def _without_ignored(place: str, value: Any) -> Any:
    if place not in _LABELS:
        return value
    array = _array(value)
    return np.ma.masked_equal(array, IGNORED) if array.dtype.kind == "i" else value


def _array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return np.asarray(value.float() if value.dtype == torch.bfloat16 else value)
    return np.asarray(value)
