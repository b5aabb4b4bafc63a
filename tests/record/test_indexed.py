"""Batches that carry the ids of their examples: what an id names is what the data set has there."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

from dualform.record import AnnotationError, Recorder, indexed
from dualform.store.recording import Recording

SIZE = 23
WORKERS = [0, 2]


def content(place: int) -> float:
    """Of the example at a place: no other has the same."""
    return (place * 7919 % 1000) / 8


class Numbers(Dataset[Any]):
    """A map-style data set of tuples, mappings, or bare tensors."""

    def __init__(self, kind: str = "tuple") -> None:
        self.kind = kind
        self.split = "train"

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, place: int) -> Any:
        if not -SIZE <= place < SIZE:
            raise IndexError(place)
        x = torch.tensor(content(int(place) % SIZE))
        return {"tuple": (x, place % 3), "mapping": {"x": x, "y": place % 3}, "bare": x}[self.kind]


class Several(Numbers):
    """One that fetches a batch at once."""

    def __getitems__(self, places: list[int]) -> list[Any]:
        return [self[place] for place in places]


class Stream(IterableDataset[Any]):
    """Its examples shared among workers as torch's documentation does it."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for place in range(start, SIZE, step):
            yield torch.tensor(content(place)), place % 3


class Everywhere(Stream):
    """Each worker gives all of it, and there is a length."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for place in range(SIZE):
            yield torch.tensor(content(place)), place % 3


def check(batches: Any, epochs: int = 2, size: int = SIZE) -> None:
    """In every epoch every id once, with the content of its place."""
    for _ in range(epochs):
        seen = []
        for x, _, ids in batches:
            assert ids.dtype == torch.int64
            assert x.tolist() == [content(place) for place in ids.tolist()]
            seen += ids.tolist()
        assert len(seen) == len(set(seen)) == size


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("data", [Numbers(), Several()], ids=["one", "several"])
def test_map_style(data: Any, workers: int) -> None:
    """Shuffled, in batches, by workers."""
    check(DataLoader(indexed(data), 4, shuffle=True, num_workers=workers))


def test_subsets_and_splits_of_it() -> None:
    data = indexed(Numbers())
    assert len(data) == SIZE
    check(DataLoader(Subset(data, [5, 3, 11]), 2, shuffle=True), size=3)
    one, two = random_split(data, [10, 13])
    check(DataLoader(one, 4, shuffle=True), size=10)
    check(DataLoader(ConcatDataset([one, two]), 4, shuffle=True))


def test_mappings_bare_examples_and_named_tuples() -> None:
    (batch,) = DataLoader(indexed(Numbers("mapping")), SIZE)
    assert batch["example"].tolist() == list(range(SIZE))
    assert set(batch) == {"x", "y", "example"}
    (batch,) = DataLoader(indexed(Numbers("mapping"), name="id"), SIZE)
    assert batch["id"].tolist() == list(range(SIZE))
    x, ids = next(iter(DataLoader(indexed(Numbers("bare")), 5)))
    assert x.tolist() == [content(place) for place in ids.tolist()]
    _, _, ids = next(iter(DataLoader(indexed(TensorDataset(torch.rand(9, 2), torch.ones(9))), 9)))
    assert ids.tolist() == list(range(9))
    x, ids = next(iter(DataLoader(indexed(torch.rand(6, 3)), 6)))  # a tensor is a sequence too
    assert ids.tolist() == list(range(6))
    x, ids = next(iter(DataLoader(indexed([1.0, 2.0]), 2)))
    assert (x.tolist(), ids.tolist()) == ([1.0, 2.0], [0, 1])


def test_places_from_the_end() -> None:
    data = indexed(Numbers())
    assert data[-1][2] == SIZE - 1
    assert data[np.int64(3)][2] == 3
    assert data[torch.tensor(4)][2] == 4
    with pytest.raises(IndexError):
        data[SIZE]
    with pytest.raises(AnnotationError, match="no place of one example"):
        indexed(torch.rand(6, 3))[1:3]


def test_keys_that_are_text_are_ids() -> None:
    class Named(Dataset[Any]):
        def __getitem__(self, key: str) -> Any:
            return len(key)

        def __len__(self) -> int:
            return 2

    loader = DataLoader(indexed(Named()), 2, sampler=["a", "bb"])
    (batch,) = loader
    assert batch[0].tolist() == [1, 2]
    assert list(batch[1]) == ["a", "bb"]


@pytest.mark.parametrize("workers", WORKERS)
def test_iterable(workers: int) -> None:
    """Ids are the same in every epoch, and told apart between workers."""
    loader = DataLoader(indexed(Stream()), 4, num_workers=workers)
    epochs = [
        {int(i): float(x) for xs, _, ids in loader for x, i in zip(xs, ids, strict=True)}
        for _ in range(2)
    ]
    assert epochs[0] == epochs[1]
    assert sorted(epochs[0].values()) == sorted(content(place) for place in range(SIZE))
    check(loader)  # this stream's places are counted so, too


def test_iterable_with_a_length_given_by_each_worker() -> None:
    data = indexed(Everywhere())
    assert len(data) == SIZE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of a length that workers exceed
        ids = [int(place) for _, _, place in DataLoader(data, None, num_workers=2)]
    assert len(set(ids)) == len(ids) == 2 * SIZE
    with pytest.raises(TypeError):
        len(indexed(Stream()))


def test_what_else_it_has_is_the_wrapped_one_s() -> None:
    data = Numbers()
    wrapped = indexed(data)
    assert wrapped.split == "train"
    wrapped.split = "test"  # as a worker_init_fn may
    assert data.split == "test"
    assert isinstance(wrapped, Dataset)
    assert isinstance(indexed(Stream()), IterableDataset)
    again = pickle.loads(pickle.dumps(wrapped))
    assert again.split == "test"
    assert again[2][2] == 2
    with pytest.raises(AttributeError, match="colour"):
        wrapped.colour  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn"])
def test_spawned_workers(context: str) -> None:
    check(DataLoader(indexed(Numbers()), 8, num_workers=1, multiprocessing_context=context), 1)


class Pair(NamedTuple):
    x: float
    y: int


def test_what_is_refused() -> None:
    with pytest.raises(AnnotationError, match=r"column 'example' of their own.*name="):
        indexed([{"example": 1}])[0]
    with pytest.raises(AnnotationError, match="not DataLoader; wrap the data set"):
        indexed(DataLoader(Numbers()))
    with pytest.raises(AnnotationError, match="not int"):
        indexed(3)
    with pytest.raises(AnnotationError, match="name"):
        indexed([1], name="")
    assert indexed([Pair(1.0, 2)])[0] == (1.0, 2, 0)


@pytest.mark.parametrize(
    ("steps", "given", "said"), [(49, False, 0), (60, False, 1), (60, True, 0)]
)
def test_a_run_without_ids_is_told(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, steps: int, given: bool, said: int
) -> None:
    caplog.set_level(logging.WARNING, "dualform.record")
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        for _ in range(steps):
            recorder.annotate(label=1, **({"example": [1, 2]} if given else {}))
            optimizer.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    found = [entry.getMessage() for entry in caplog.records]
    assert len(found) == said
    assert all("50 steps" in text and "indexed(dataset)" in text for text in found)


def test_recorded(tmp_path: Any) -> None:
    """A row's id names the example that its key is."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SIZE, 4))
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        for x, ids in DataLoader(indexed(data), 5, shuffle=True, num_workers=2):
            recorder.annotate(example=ids)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    recording = Recording.open(tmp_path / "r")
    for record in recording.passes(""):
        keys = np.empty((record.rows, 4), np.float32)
        recording.read_keys(record, keys)
        ids = recording.read_rows([record.block])["example"].to_pylist()
        assert np.array_equal(keys, data.tensors[0].numpy()[ids])
