"""Rows brought to a device: to stay, or a few shards at a time while a question is answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dualform.engine.devices.device import Moment
from dualform.engine.devices.place import Place
from dualform.engine.devices.work import Block
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import RowFile, Stop, check_stop
from dualform.store.encoding import FLOAT32

STAGING_BYTES = 32 << 20
"""Of each of the two buffers that rows go through, at most."""


@dataclass(frozen=True)
class Span:
    """Neighbouring rows of a shard.

    Attributes:
        shard: Its number.
        first: The first of them, in the shard.
        rows: How many.
    """

    shard: int
    first: int
    rows: int


@dataclass(frozen=True)
class Held:
    """Some shards of a layer on a device.

    Attributes:
        place: Where.
        shards: Their numbers, ascending: their rows follow each other in the block.
        block: Their rows.
    """

    place: Place
    shards: tuple[int, ...]
    block: Block

    def spans(self, layer: Layer) -> list[Span]:
        """Which rows of the layer these are, in order."""
        return [Span(number, 0, layer.shards[number].rows) for number in self.shards]

    @property
    def key_bytes(self) -> int:
        return self.block.keys.nbytes

    @property
    def value_bytes(self) -> int:
        return 0 if self.block.values is None else self.block.values.nbytes


def load(
    place: Place, layer: Layer, shards: Sequence[int], *, values: bool, stop: Stop | None = None
) -> torch.Tensor:
    """Bring shards' keys, or their values, to a place, from their mapped files.

    Returns:
        float32 [rows, d_in or d_out], on the device.

    Raises:
        DamagedError: A file does not hold what was written.
        OnDeviceError: The place has no room, or fails.
    """
    chosen = [layer.shards[number] for number in shards]
    rows = sum(shard.rows for shard in chosen)
    room: torch.Tensor
    with place.beside():
        room = place.device.empty(rows, layer.d_out if values else layer.d_in)
        with _Copies(place) as copies:
            # What was computed with this memory before.
            copies.stream.follow(copies.stream.computed())
            first = 0
            for shard in chosen:
                file = shard.values if values else shard.keys
                assert file is not None
                copies.bring(file, 0, room[first : first + shard.rows], stop)
                first += shard.rows
    return room


def streamed(
    place: Place, layer: Layer, shards: Sequence[int], *, values: bool, stop: Stop | None = None
) -> Iterator[tuple[Span, Block]]:
    """Bring shards to a place, a piece after the other: the next is copied while one is computed
    with. A block is valid until the next but one.

    Raises:
        DamagedError: As `load`.
    """
    width = FLOAT32.row_bytes(layer.d_in + (layer.d_out if values else 0))
    step = max(64, place.scratch // (2 * width))
    pieces = [
        Span(number, first, min(step, layer.shards[number].rows - first))
        for number in shards
        for first in range(0, layer.shards[number].rows, step)
    ]
    rows = max(piece.rows for piece in pieces)
    rooms = [
        (
            place.device.empty(rows, layer.d_in),
            place.device.empty(rows, layer.d_out) if values else None,
        )
        for _ in pieces[:2]
    ]
    with _Copies(place) as copies:

        def bring(turn: int) -> Block:
            piece, (keys, room) = pieces[turn], rooms[turn % 2]
            shard = layer.shards[piece.shard]
            copies.stream.follow(free[turn % 2])
            copies.bring(shard.keys, piece.first, keys[: piece.rows], stop)
            if room is None:
                return Block(keys[: piece.rows], None)
            assert shard.values is not None
            copies.bring(shard.values, piece.first, room[: piece.rows], stop)
            return Block(keys[: piece.rows], room[: piece.rows])

        # When each room's last use is over: copies into one go on while the other is computed with.
        free = [copies.stream.computed()] * 2
        ahead = bring(0)
        for turn, piece in enumerate(pieces):
            block = ahead
            copies.stream.lead()
            yield piece, block
            free[turn % 2] = copies.stream.computed()
            if turn + 1 < len(pieces):
                ahead = bring(turn + 1)


class _Copies:
    """Copies rows to a device through two pinned buffers, on a stream of their own."""

    def __init__(self, place: Place) -> None:
        self.stream = place.device.stream()
        numbers = min(STAGING_BYTES, max(1 << 16, place.scratch // 4)) // 4
        self._buffers = [self.stream.pinned(numbers) for _ in range(2)]
        self._copied: list[Moment | None] = [None, None]
        self._turn = 0

    def __enter__(self) -> _Copies:
        return self

    def __exit__(self, *_: object) -> None:
        """What comes after on the device comes after the copies; buffers are free then."""
        self.stream.lead()
        self.stream.synchronize()

    def bring(self, file: RowFile, start: int, out: torch.Tensor, stop: Stop | None) -> None:
        """Copy a file's rows from this one on to `out`, float32 [rows, d] on the device."""
        file.expect(scattered=False)
        step = max(1, len(self._buffers[0]) // file.d)
        for first in range(0, len(out), step):
            check_stop(stop)
            last = min(first + step, len(out))
            size = (last - first) * file.d
            copied = self._copied[self._turn]
            if copied is not None:
                copied.synchronize()
            if len(self._buffers[self._turn]) < size:  # a row is longer than the buffer
                self._buffers[self._turn] = self.stream.pinned(size)
            buffer = self._buffers[self._turn][:size].view(last - first, file.d)
            host = file.copy(slice(start + first, start + last), buffer)
            self._copied[self._turn] = self.stream.copy(host, out[first:last])
            self._turn = 1 - self._turn
