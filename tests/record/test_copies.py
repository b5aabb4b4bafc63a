"""Copies from a device that a loop waits for once a step, with host memory in a GPU's place: what
is sent lies in a queue until somebody waits for it, as late as a GPU can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.record import Recorder, copies
from dualform.record.buffers import PLACES, Pool
from dualform.record.copies import Copies
from dualform.store.recording import Recording

from . import reading

CPU = torch.device("cpu")


@dataclass
class Late:
    """A stream of a device whose copies happen when they are waited for, or are said to be done.

    Attributes:
        waits: How often somebody waited.
        done: Whether a moment that is asked about has passed by itself.
    """

    waits: int = 0
    done: bool = False
    queue: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    ran: int = 0
    pinned_bytes: int = 0

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_bytes += nbytes
        return torch.full((nbytes,), 0x55, dtype=torch.uint8)

    def send(self, snapshot: torch.Tensor, host: torch.Tensor) -> None:
        assert snapshot.is_contiguous()
        assert not snapshot.requires_grad
        self.queue.append((snapshot, host))

    def sent(self) -> Moment:
        return Moment(self, len(self.queue))

    def run(self, count: int) -> None:
        for snapshot, host in self.queue[self.ran : count]:
            host.copy_(snapshot)
        self.ran = max(self.ran, count)


@dataclass
class Moment:
    """After so many of a stream's copies."""

    stream: Late
    count: int

    def query(self) -> bool:
        if self.stream.done:
            self.stream.run(self.count)
        return self.stream.done

    def synchronize(self) -> None:
        self.stream.waits += 1
        self.stream.run(self.count)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """The host's tensors are a device's from here on."""
    stream = Late()
    monkeypatch.setattr(copies, "stream_of", lambda device: stream)
    return stream


class Words(nn.Module):
    """A table, a layer that is called twice, one without a bias, and keys that change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 5)
        self.twice = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids).mean(dim=1)
        x = self.twice(torch.tanh(self.twice(x)))
        return self.last(torch.relu_(x))


Train = Callable[[Path, dict[str, Any]], list[int]]


def train(path: Path, options: dict[str, Any], late: Late | None = None) -> list[int]:
    """Ten steps, recorded; how often each waited."""
    torch.manual_seed(0)
    model = Words()
    make = options.get("make", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    optimizer = make(model.parameters())
    waited: list[int] = []
    with Recorder(model, optimizer, path) as recorder:
        for step in range(10):
            ids = torch.randint(0, 11, (6, 4))
            recorder.annotate(label=ids[:, 0])
            before = 0 if late is None else late.waits
            loss = model(ids).square().mean()
            if options.get("twice"):
                loss.backward(retain_graph=True)
            if options.get("zeroed") and step % 2:
                optimizer.zero_grad()
                loss = model(ids).sin().sum()
            loss.backward()
            if options.get("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            ids.zero_()  # the loop does with its memory what it likes
            optimizer.zero_grad()
            waited.append(0 if late is None else late.waits - before)
    return waited


def everything(path: Path) -> Iterator[tuple[str, bytes, bytes]]:
    """Rows and ledger of a recording."""
    with Recording.open(path) as recording:
        assert recording.complete
        for layer in recording.manifest.layers:
            assert not recording.marks[layer]
            for record in recording.passes(layer):
                keys = reading.keys(recording, layer, record)
                yield layer, keys.tobytes(), reading.values(recording, layer, record).tobytes()
        for name, rows in recording.ledger().parameters.items():
            yield (
                name,
                repr([(r.step, r.settings, r.took_part, r.first) for r in rows]).encode(),
                b"",
            )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"make": lambda p: torch.optim.AdamW(p, lr=0.01)},
        {"clip": True},
        {"zeroed": True},
    ],
    ids=["SGD", "AdamW", "clipped", "zeroed"],
)
def test_a_recording_is_what_it_is_without_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    train(tmp_path / "plain", options)
    stream = Late()
    monkeypatch.setattr(copies, "stream_of", lambda device: stream)
    waited = train(tmp_path / "late", options, stream)
    assert list(everything(tmp_path / "late")) == list(everything(tmp_path / "plain"))
    # Once, before the weights move; where a zeroed gradient is looked for, for its sample too.
    assert waited == [1] * 10 if "zeroed" not in options else max(waited) < 10


def test_rows_that_several_backwards_brought(tmp_path: Path, late: Late) -> None:
    """Values are added up, so those that are on their way are waited for."""
    train(tmp_path / "late", {"twice": True}, late)
    with Recording.open(tmp_path / "late") as recording:
        assert not any(recording.marks.values())
    reading.assert_rebuilds(tmp_path / "late")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_what_a_plain_copy_gives(late: Late, dtype: torch.dtype) -> None:
    source = torch.randn(7, 3, 5, dtype=torch.float64)
    source[0, 0, 0], source[1, 0, 0], source[2, 0, 0] = torch.nan, torch.inf, -0.0
    plain, sent = Pool(1 << 20), Pool(1 << 20, Copies([CPU]))
    for tensor in (source, source.to(dtype), source.to(dtype).mT):
        rows, width = tensor.numel() // tensor.shape[-1], tensor.shape[-1]
        pairs = [(pool.take(rows, width, dtype), pool) for pool in (plain, sent)]
        pairs += [(pool.take(rows, width, dtype), pool) for pool in (plain, sent)]
        pairs += [(pool.take(rows, width + 4, dtype), pool) for pool in (plain, sent)]
        for number, (buffer, _) in enumerate(pairs):
            given = tensor.clone()
            if number < 2:
                buffer.copy(given)
            elif number < 4:
                buffer.copy_negated(given)
            else:
                buffer.copy_negated(given, slice(3, 3 + width))
            given.zero_()
        sent.copies.wait()
        found = [buffer.stored.tobytes() for buffer, _ in pairs]
        assert found[::2] == found[1::2]
    ids = torch.tensor([3, 0, 10])
    buffer = sent.take(3, 11, PLACES)
    buffer.copy(ids[:, None])
    ids.zero_()
    sent.copies.wait()
    assert buffer.stored[:, 0].tolist() == [3, 0, 10]


def test_a_buffer_that_nobody_holds_is_not_given_to_another_before_its_copy_came(
    late: Late,
) -> None:
    pool = Pool(1 << 20, Copies([CPU]))
    pool.take(4, 2).copy(torch.ones(4, 2))
    other = pool.take(4, 2)
    other.stored[...] = 7
    pool.copies.wait()
    assert (other.stored == 7).all()


def test_pinned_memory_goes_round(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came is taken without waiting; what has not is waited for at the limit alone."""
    monkeypatch.setattr(copies, "SLAB_BYTES", 1024)
    monkeypatch.setattr(copies, "MOST_BYTES", 4096)
    found: dict[int, np.ndarray] = {}

    def send(sender: Copies, number: int, numbers: int = 100) -> None:
        def keep(host: torch.Tensor) -> None:
            found[number] = host.numpy().copy()

        sender.send(torch.full((numbers,), float(number)), torch.float32, keep)

    sender = Copies([CPU])
    for number in range(8):  # two to a slab
        send(sender, number)
    assert (late.waits, late.pinned_bytes, found) == (0, 4096, {})
    for number in range(8, 10):
        send(sender, number)
    assert (late.waits, late.pinned_bytes, sorted(found)) == (1, 4096, [0, 1])
    late.done = True
    for number in range(10, 40):
        send(sender, number)
    assert (late.waits, late.pinned_bytes) == (1, 4096)
    late.done = False
    send(sender, 40, 2000)  # larger than all that there may be
    sender.wait()
    sender.wait()
    assert sorted(found) == list(range(41))
    for number, array in found.items():
        assert (array == number).all()
    assert len(found[40]) == 2000


def test_what_is_read_ahead_is_what_it_was_unless_it_changed(late: Late) -> None:
    sender = Copies([CPU])
    same, changed = torch.arange(3.0), torch.arange(3.0)
    for tensor in (same, changed, torch.ones(2, dtype=torch.bfloat16)):
        sender.look_ahead(tensor)
    changed += 1
    assert np.array_equal(sender.read(same), [0, 1, 2])  # nothing was waited for: a plain copy
    sender.wait()
    same.data += 5  # uncounted, so what is read shows where it came from
    assert np.array_equal(sender.read(same), [0, 1, 2])
    assert np.array_equal(sender.read(changed), [1, 2, 3])
    sender.forget()
    assert np.array_equal(sender.read(same), [5, 6, 7])


def test_a_model_on_the_host_sends_nothing() -> None:
    sender = Copies([CPU])
    assert not sender.sending
    assert not sender.takes(torch.ones(1))
    sender.look_ahead(torch.ones(1))
    sender.wait()
