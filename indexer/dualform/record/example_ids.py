"""Data sets whose batches carry ids of their examples, through shuffling, subsets and workers.

What an example is called is its place in the data set that was wrapped, so that the same example
has the same id in every epoch and every run.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from dualform.record.errors import AnnotationError


def indexed(dataset: Any, name: str = "example") -> Any:
    """The data set, with an id for each example.

        loader = DataLoader(indexed(dataset), batch_size=32, shuffle=True, num_workers=4)
        for images, labels, ids in loader:
            recorder.annotate(label=labels, example=ids)

    Of examples that are mappings, `name` is added; to tuples the id is appended, and anything else
    becomes a pair with its id. Wrap first and shuffle, split or take subsets afterwards: ids are
    places in what was wrapped.

    Args:
        dataset: Map-style, iterable, or Hugging Face's of either kind. Of an iterable one the ids
            count what it gives, from 0 in each pass over it; where workers share it, worker w of n
            counts w, w + n, w + 2 n. They stay the same while the number of workers and the order
            of the examples, such as that of shuffled shards, do: data that has names of its own
            keeps them better.
        name: Of the column.

    Raises:
        AnnotationError: The examples have such a column, it is no data set, or `name` is none.
    """
    if not isinstance(name, str) or not name:
        raise AnnotationError(f"indexed(): name={name!r} is no name for a column")
    library = sys.modules.get("datasets")  # whoever gives one of theirs has imported it
    if library is not None and isinstance(dataset, library.Dataset):
        return _with_column(dataset, name)
    if library is not None and isinstance(dataset, library.IterableDataset):
        _check_new(name, dataset.column_names or ())
        return dataset.map(_Numbered(name), with_indices=True)
    if isinstance(dataset, IterableDataset):
        sized = hasattr(type(dataset), "__len__")
        return (_SizedIterable if sized else _IndexedIterable)(dataset, name)
    if hasattr(dataset, "__getitem__"):
        return _IndexedMap(dataset, name)
    raise AnnotationError(
        f"indexed() takes a data set, map-style or iterable, not {type(dataset).__name__}; wrap "
        "the data set, not the loader"
    )


class _Wrapper:
    """Around a data set: whatever else is asked or set is the wrapped one's, as a worker's
    `worker_init_fn` does."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset = dataset
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute in _OF_THE_WRAPPER:  # not there yet, while it is unpickled
            raise AttributeError(attribute)
        return getattr(self.dataset, attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        target = self if attribute in _OF_THE_WRAPPER else self.dataset
        (object.__setattr__ if target is self else setattr)(target, attribute, value)


_OF_THE_WRAPPER = ("dataset", "_name", "__getstate__", "__setstate__")


class _IndexedMap(_Wrapper, Dataset[Any]):
    """A map-style data set."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return _with_id(self.dataset[index], self._id(index), self._name)

    def __getattr__(self, attribute: str) -> Any:
        found = super().__getattr__(attribute)
        return self._several(found) if attribute == "__getitems__" else found

    def _several(self, items: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        """The wrapped one's way to fetch a batch at once."""

        def with_ids(indices: Sequence[Any]) -> list[Any]:
            ids = map(self._id, indices)
            found = zip(items(indices), ids, strict=True)
            return [_with_id(example, number, self._name) for example, number in found]

        return with_ids

    def _id(self, index: Any) -> int | str:
        if isinstance(index, str):
            return index
        try:
            place = operator.index(index)
        except TypeError:
            raise AnnotationError(
                f"indexed(): {index!r} is no place of one example, so there is no id for it"
            ) from None
        return place if place >= 0 else place + len(self.dataset)


class _IndexedIterable(_Wrapper, IterableDataset[Any]):
    """An iterable data set."""

    def __iter__(self) -> Iterator[Any]:
        for place, example in enumerate(self.dataset):
            yield _with_id(example, _spread(place), self._name)


class _SizedIterable(_IndexedIterable):
    """One that knows its length."""

    def __len__(self) -> int:
        return len(self.dataset)


class _Numbered:
    """What Hugging Face's `map` calls with an example and its place."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, example: Mapping[str, Any], place: int) -> dict[str, Any]:
        # Each worker counts the shards that it has from 0.
        return {**example, self._name: _spread(place)}


def _spread(place: int) -> int:
    """A worker's own count, as a number that no other worker has."""
    worker = get_worker_info()
    return place if worker is None else place * worker.num_workers + worker.id


def _with_column(dataset: Any, name: str) -> Any:
    """A Hugging Face data set with its places as a column, in the format that it had."""
    _check_new(name, dataset.column_names)
    wanted = dataset.format
    added = dataset.add_column(name, range(len(dataset)))
    if wanted["type"] is not None or set(wanted["columns"]) != set(dataset.column_names):
        added.set_format(
            wanted["type"], [*wanted["columns"], name], **(wanted["format_kwargs"] or {})
        )
    return added


def _with_id(example: Any, number: int | str, name: str) -> Any:
    if isinstance(example, Mapping):
        _check_new(name, example)
        return {**example, name: number}
    if isinstance(example, (tuple, list)):
        return (*example, number)
    return example, number


def _check_new(name: str, columns: Iterable[str]) -> None:
    if name in columns:
        raise AnnotationError(
            f"indexed(): the examples have a column {name!r} of their own; annotate with that, or "
            "choose another name: indexed(dataset, name=...)"
        )
