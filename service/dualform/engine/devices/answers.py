"""Questions on devices: each place computes with what it holds, or is brought; what comes back is
merged on the CPU, one transfer from each place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from dualform.engine.context import own_settings
from dualform.engine.devices.device import MAX_K, OnDeviceError
from dualform.engine.devices.devices import Devices
from dualform.engine.devices.held import Held, Span, streamed
from dualform.engine.devices.place import Pace, Paces, Place
from dualform.engine.devices.work import Block, Nearest, Part, Totals, by_group
from dualform.engine.errors import ResourceExhaustedError
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop, check_stop
from dualform.engine.memory.weights import needs_float64
from dualform.engine.plan.costs import disk_seconds, unpack_seconds
from dualform.engine.plan.offer import Offer
from dualform.store.encoding import FLOAT32

Found = TypeVar("Found")

MOST_RESULT_BYTES = 1 << 30
"""Totals of all groups that a device holds for a question, at most."""

_GATHERED = 3.0
"""Rows that are gathered are read, written and read again."""


@dataclass(frozen=True)
class Proposals:
    """Rows that devices found.

    Attributes:
        merits: float32 [n, m], weights of queries as given.
        positions: int64 [n, m].
        last: float64 [n]: the weights of rows that were searched and not found are at most so
            large, as float32 goes.
        searched: bool [shards].
    """

    merits: np.ndarray
    positions: np.ndarray
    last: np.ndarray
    searched: np.ndarray


@dataclass(frozen=True)
class _Job:
    """What one place does: what of it lies there, and the shards to be brought."""

    place: Place
    held: tuple[Held, ...]
    brought: tuple[int, ...]


class DeviceAnswers:
    """Answers of one layer's questions by devices.

    Args:
        devices: Which.
        layer: Whose memory.
        queries: float32 [n, d_in], finite, on the CPU.
        selected: bool [total], the rows that take part; their keys are finite.
        values: Whether values are needed.
        stop: Asked between tiles.
    """

    def __init__(
        self,
        devices: Devices,
        layer: Layer,
        queries: torch.Tensor,
        selected: np.ndarray,
        *,
        values: bool,
        stop: Stop | None,
    ) -> None:
        self._devices, self._layer, self._queries = devices, layer, queries
        self._selected, self._values, self._stop = selected, values, stop
        longest = float(torch.linalg.vector_norm(queries.double(), dim=1).max())
        self._fit = [
            (not layer.nonfinite or bool(shard.finite.all()))
            and not needs_float64(longest, shard.max_norm)
            for shard in layer.shards
        ]
        self._counts = [
            int(np.count_nonzero(selected[shard.start : shard.start + shard.rows]))
            for shard in layer.shards
        ]

    def offer(self, kind: Callable[[Paces], Pace]) -> Offer | None:
        """What devices would do, and how long it takes them; None where they can't do anything.

        Args:
            kind: What is done.
        """
        width = FLOAT32.row_bytes(self._layer.d_in)
        width += FLOAT32.row_bytes(self._layer.d_out) if self._values else 0
        n, there = len(self._queries), np.zeros(len(self._counts), bool)
        slowest = 0.0
        for held in self._held():
            there[list(held.shards)] = True
            mine = [number for number in held.shards if self._fit[number]]
            size = sum(self._counts[number] for number in mine) * width
            gathers = size < width * len(held.block.keys)
            pace = kind(held.place.paces)
            slowest = max(slowest, pace.seconds(size * (_GATHERED if gathers else 1), n))
        fit = np.array(self._fit, bool)
        left = np.array(self._counts, np.int64) * ~(there & fit)
        rows = int(left.sum())
        streamed = self._streaming(rows, width, kind) if fit[left > 0].all() else None
        if not self._devices.working() or (rows and slowest == 0.0 and streamed is None):
            return None
        return Offer(slowest, rows, streamed)

    def _streaming(self, rows: int, width: int, kind: Callable[[Paces], Pace]) -> float | None:
        """Seconds to bring so many rows of so many bytes to devices and compute with them there."""
        working = self._devices.working()
        if not working or not rows:
            return None
        share = rows * width / len(working)
        seconds = [
            share * place.paces.upload + kind(place.paces).seconds(share, len(self._queries))
            for place in working
        ]
        stored = self._layer.key_bytes + (self._layer.value_bytes if self._values else 0)
        unpacked = unpack_seconds(self._layer, rows, rows, values=self._values)
        return max(seconds) + disk_seconds(self._layer, rows * stored) + unpacked

    def nearest(self, k: int, stream: bool) -> Proposals:
        """The k rows with the largest weights of every place.

        Args:
            k: At most `MAX_K`.
            stream: Bring rows that lie on no place to one.

        Raises:
            OnDeviceError: A place is out of memory, or has failed.
        """

        def find(job: _Job) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            work = Nearest(job.place.device, self._queries, min(k, MAX_K), job.place.scratch)
            bases, starts, base = [], [], 0
            for spans, block in self._blocks(job):
                part = self._part(spans, block)
                if len(part):
                    self._take(work.take(part))
                    for span in spans:
                        bases.append(base)
                        starts.append(self._rows(span).start)
                        base += span.rows
            scores, places, left_out = work.result()
            shard = np.searchsorted(np.array(bases or [0]), places, side="right") - 1
            moved = np.array(starts or [0]) - np.array(bases or [0])
            last = np.full(len(scores), -np.inf)
            if left_out:
                last = scores.min(axis=1).astype(np.float64)
            return scores, places + moved[shard], last

        jobs = self._jobs(stream)
        found = self._run(find, jobs)
        n = len(self._queries)
        none = (np.zeros((n, 0), np.float32), np.zeros((n, 0), np.int64), np.full(n, -np.inf))
        scores, positions, lasts = zip(none, *found, strict=True)
        return Proposals(
            np.concatenate(scores, axis=1),
            np.concatenate(positions, axis=1),
            np.max(lasts, axis=0),
            self._searched(jobs),
        )

    def totals(
        self,
        groups: int,
        codes: np.ndarray | None,
        *,
        absolute: bool = False,
        factors: np.ndarray | None = None,
        stream: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Weights, or weighted values, added up per group.

        Args:
            groups: How many.
            codes: int32 [total], the group of each row; None where there is one group.
            absolute: Add |weight|.
            factors: What a row's weight counts for its value, and what is added to that, float64
                [total, 2]; None to add weights.
            stream: As for `nearest`.

        Returns:
            float64 [groups, n], or [groups, n, d_out]; and of which shards, bool [shards].

        Raises:
            OnDeviceError: As `nearest`; there are too many groups, too.
        """
        d_out = 0 if factors is None else self._layer.d_out
        shape = (groups, len(self._queries), d_out) if d_out else (groups, len(self._queries))
        if 8 * np.prod(shape, dtype=np.int64) > MOST_RESULT_BYTES:
            raise OnDeviceError(
                ResourceExhaustedError(
                    f"a device holds sums of at most {MOST_RESULT_BYTES:,} bytes for a question; "
                    "leave strategy= out, and the CPU answers, or ask for fewer groups",
                    reason="OUT_OF_MEMORY",
                )
            )

        def add(job: _Job) -> np.ndarray:
            device, scratch = job.place.device, job.place.scratch
            work = Totals(device, self._queries, groups, d_out, absolute, scratch)
            for spans, block in self._blocks(job):
                part = self._part(spans, block, codes, factors)
                if len(part):
                    self._take(work.take(part))
            return work.result()

        jobs = self._jobs(stream)
        total = np.zeros(shape)
        for found in self._run(add, jobs):
            total += found
        return total, self._searched(jobs)

    def _held(self) -> list[Held]:
        """What lies on devices and can be used here."""
        return [
            held
            for held in self._devices.held(self._layer)
            if any(self._fit[number] for number in held.shards)
            and (held.block.values is not None or not self._values)
        ]

    def _jobs(self, stream: bool) -> list[_Job]:
        held = self._held()
        there = {number for each in held for number in each.shards}
        left = [
            number
            for number, count in enumerate(self._counts)
            if stream and count and self._fit[number] and number not in there
        ]
        working = self._devices.working()
        jobs = []
        for turn, place in enumerate(working):
            mine = tuple(each for each in held if each.place is place)
            brought = tuple(left[turn :: len(working)])
            if mine or brought:
                jobs.append(_Job(place, mine, brought))
        return jobs

    def _searched(self, jobs: Sequence[_Job]) -> np.ndarray:
        found = np.zeros(len(self._counts), bool)
        for job in jobs:
            for each in job.held:
                found[list(each.shards)] = True
            found[list(job.brought)] = True
        return np.asarray(found & np.array(self._fit, bool))

    def _blocks(self, job: _Job) -> Iterator[tuple[list[Span], Block]]:
        for held in job.held:
            yield held.spans(self._layer), held.block
        if job.brought:
            for span, block in streamed(
                job.place, self._layer, job.brought, values=self._values, stop=self._stop
            ):
                yield [span], block

    def _rows(self, span: Span) -> slice:
        """Where these rows are in the layer."""
        first = self._layer.shards[span.shard].start + span.first
        return slice(first, first + span.rows)

    def _part(
        self,
        spans: Sequence[Span],
        block: Block,
        codes: np.ndarray | None = None,
        factors: np.ndarray | None = None,
    ) -> Part:
        """What of a block takes part, with what is known of these rows."""
        rows = [self._rows(span) for span in spans]
        inside = np.concatenate(
            [self._selected[self._rows(span)] & self._fit[span.shard] for span in spans]
        )
        chosen = None if inside.all() else np.flatnonzero(inside)
        mine = None if codes is None else np.concatenate([codes[each] for each in rows])
        counts = None if factors is None else np.concatenate([factors[each] for each in rows])
        if chosen is not None:
            mine = None if mine is None else mine[chosen]
            counts = None if counts is None else counts[chosen]
        if mine is not None and counts is not None:
            order = by_group(mine)
            if order is not None:
                chosen = order if chosen is None else chosen[order]
                mine, counts = mine[order], counts[order]
        return Part(block, chosen, mine, counts)

    def _take(self, steps: Iterator[None]) -> None:
        for _ in steps:
            check_stop(self._stop)

    def _run(self, work: Callable[[_Job], Found], jobs: Sequence[_Job]) -> list[Found]:
        """What each place finds, side by side; where one fails, no device is asked."""

        def guarded(job: _Job) -> Found:
            try:
                with own_settings(), job.place.used():
                    return work(job)
            except OnDeviceError as error:
                if isinstance(error.refusal, ResourceExhaustedError):
                    self._devices.ran_out(job.place)
                raise

        if len(jobs) < 2:
            return [guarded(job) for job in jobs]
        with ThreadPoolExecutor(len(jobs), "dualform-devices") as pool:
            return list(pool.map(guarded, jobs))
