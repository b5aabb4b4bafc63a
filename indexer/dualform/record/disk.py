"""The sink that writes a recording to disk, in a background thread with a bounded queue."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from dualform.record.buffers import Buffer
from dualform.record.coverage import size_text
from dualform.record.errors import OptionError, RecordingExistsError, RecordingFailedError
from dualform.record.sink import CapturedPass, State, StepBatch
from dualform.store.errors import BusyError, ExistsError
from dualform.store.files import FULL, why_full
from dualform.store.ledger import InexactMark
from dualform.store.lock import WriterLock
from dualform.store.recording import Recording
from dualform.store.recording_cut import cut_recording
from dualform.store.recording_format import MANIFEST, RecordingManifest
from dualform.store.recording_writer import Examples, Record, RecordingWriter, StepPass

_MIB = 1 << 20
_WRITE_BYTES = 16 * _MIB
_SEGMENT_ROWS = 1 << 20
"""Rows of metadata at which a segment is committed: their table is made in memory."""

_LOGGER = logging.getLogger("dualform.record")

Job = Callable[[RecordingWriter], None]


class DiskSink:
    """Writes to a directory. Training waits only where the queue is full, and at the end.

    Args:
        path: Must not exist.
        queue_bytes: How much may wait to be written before `append` waits.
        segment_bytes: Size at which a segment is committed, or earlier where its rows are many.
        commit_seconds: Age at which it is committed, at the next step.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        queue_bytes: int = 256 * _MIB,
        segment_bytes: int = 1024 * _MIB,
        commit_seconds: float = 10.0,
    ) -> None:
        self.path = Path(path)
        self._queue_bytes = queue_bytes
        self._segment_bytes = segment_bytes
        self._commit_seconds = commit_seconds
        self._batches: list[StepBatch] = []
        self._batch_bytes = 0
        self._handed_over = self._committed = time.monotonic()
        self._jobs: deque[tuple[Job, int]] = deque()
        self._waiting_bytes = 0
        self._condition = threading.Condition()
        self._error: BaseException | None = None
        self._steps = self._committed_steps = 0
        self._thread: threading.Thread | None = None
        self._writer: RecordingWriter | None = None
        self._lock: WriterLock | None = None

    def open(self, manifest: RecordingManifest) -> None:
        """Claim the path, write the manifest, start the thread. Where it fails, nothing is left.

        Raises:
            RecordingExistsError: The path is there already, or another process records there.
            RecordingFailedError: It can't be made, such as on a full disk.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.claim()
            writer = RecordingWriter(self.path, manifest)
            try:
                self._start(writer)
            except BaseException:
                shutil.rmtree(self.path)
                raise
        except BusyError as error:
            raise RecordingExistsError(
                f"{self.path} is being recorded by {error.holder}; choose another path, or end "
                "that process first"
            ) from None
        except ExistsError as error:
            self.release()
            raise RecordingExistsError(str(error)) from None
        except OSError as error:
            self.release()
            raise RecordingFailedError(
                f"{self.path}: {_what(error)}, so no recording was started and nothing of it is "
                f"left; {_START_REMEDY[_is_full(error)]}"
            ) from error
        except BaseException:
            self.release()
            raise

    def claim(self) -> None:
        """Lock the path for this sink alone.

        Raises:
            BusyError: Another process records there.
            OSError: The lock can't be made beside the path.
        """
        self._lock = WriterLock(self.path)

    def release(self) -> None:
        """Undo `claim`."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def resume(self, recording: Recording, step: int, packed: bool = False) -> None:
        """Instead of `open`, after `claim`: drop everything after `step` steps, and go on.

        Args:
            recording: Of this path; not to be used afterwards.
            step: At most as many as it has.
            packed: Whether records are packed from now on.
        """
        segments = cut_recording(recording, step)
        self._steps = self._committed_steps = step
        self._start(RecordingWriter.resume(self.path, recording.manifest, segments, packed))

    def _start(self, writer: RecordingWriter) -> None:
        self._writer = writer
        self._thread = threading.Thread(target=self._run, name="dualform-record", daemon=True)
        self._thread.start()

    def begin(self, initial: State, step_bytes: int, planned_steps: int | None) -> None:
        """Warn where the planned run does not fit, keep the state."""
        free = shutil.disk_usage(self.path).free
        if planned_steps is not None and planned_steps * step_bytes > free:
            warnings.warn(
                f"{self.path}: {planned_steps:,} steps of {step_bytes / 1e6:.2f} MB need "
                f"{planned_steps * step_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; "
                "record fewer layers (layers=[...]), keys alone (values=False), packed (pack=True; "
                "of networks with ReLU half is left), or to another disk",
                stacklevel=2,
            )
        if self._writer is not None and not self._writer.has_initial:  # resumed ones have it
            self._put(lambda writer: writer.write_initial(initial))

    def room(self, step_bytes: int, planned_steps: int | None) -> str:
        """Where it goes, and what is needed of what is free."""
        free = shutil.disk_usage(self.path).free
        if planned_steps is None:
            need = f"enough for {free // max(1, step_bytes):,} steps"
        else:
            need = f"{size_text(planned_steps * step_bytes)} needed for {planned_steps:,} steps"
        return f"{self.path} ({size_text(free)} free, {need})"

    def check(self) -> None:
        """Raise what went wrong in the background.

        Raises:
            RecordingFailedError: Such as a full disk.
        """
        if self._error is not None:
            raise RecordingFailedError(self._failure()) from self._error

    def append(self, batch: StepBatch) -> None:
        """Queue one step; waits where the queue is full."""
        self.check()
        self._batches.append(batch)
        self._batch_bytes += batch.nbytes
        self._steps += 1
        # Handing over wakes the thread, so it is done for many small steps at once.
        due = time.monotonic() - self._handed_over >= self._commit_seconds
        if due or self._batch_bytes >= min(_WRITE_BYTES, self._segment_bytes):
            self._hand_over()
            with self._condition:
                while self._waiting_bytes > self._queue_bytes and self._error is None:
                    self._condition.wait()

    def add_examples(
        self, ids: Sequence[int] | Sequence[str], kinds: Sequence[str], data: Sequence[bytes]
    ) -> None:
        """Queue payloads; they are part of the recording with the next commit."""
        self.check()
        examples = Examples(ids, kinds, data)
        self._put(lambda writer: writer.add_examples(examples), sum(map(len, data)))

    def commit(self) -> None:
        """Wait until everything is on disk and committed."""
        self._hand_over()
        self._put(self._commit)
        with self._condition:
            while self._jobs and self._error is None:
                self._condition.wait()
        self.check()

    def close(self, final: State, marks: Sequence[tuple[str, InexactMark]]) -> None:
        """Write everything, then the final state; ends the thread whatever happens."""
        try:
            self._hand_over()
            self._put(lambda writer: writer.mark(marks))
            self._put(lambda writer: writer.close(final))
            self._put(None)
            if self._thread is not None:
                self._thread.join()
        finally:
            self.release()
        self.check()

    def _hand_over(self) -> None:
        self._handed_over = time.monotonic()
        if self._batches:
            batches, self._batches = self._batches, []
            size, self._batch_bytes = self._batch_bytes, 0
            self._put(lambda writer: self._write(writer, batches), size)

    def _put(self, job: Job | None, size: int = 0) -> None:
        with self._condition:
            self._jobs.append((job or _stop, size))
            self._waiting_bytes += size
            self._condition.notify_all()

    def _run(self) -> None:
        writer = self._writer
        assert writer is not None
        while True:
            with self._condition:
                while not self._jobs:
                    self._condition.wait()
                job, size = self._jobs[0]
            if job is _stop:
                return
            try:
                if self._error is None:
                    job(writer)
            except BaseException as error:
                self._error = error
                writer.abandon()
            del job
            with self._condition:
                self._jobs.popleft()
                self._waiting_bytes -= size
                self._condition.notify_all()

    def _write(self, writer: RecordingWriter, batches: list[StepBatch]) -> None:
        for batch in batches:
            passes = [_step_pass(item) for item in batch.passes]
            writer.append(passes, batch.blocks, batch.ledger, batch.marks, batch.dropped)
            if batch.state is not None:
                writer.write_state(batch.state)
            if writer.segment_bytes >= self._segment_bytes or writer.segment_rows >= _SEGMENT_ROWS:
                self._commit(writer)
        writer.flush()
        batches.clear()
        if time.monotonic() - self._committed >= self._commit_seconds:
            self._commit(writer)

    def _commit(self, writer: RecordingWriter) -> None:
        writer.commit()
        self._committed = time.monotonic()
        self._committed_steps = writer.steps

    def _failure(self) -> str:
        error = self._error
        if not (self.path / MANIFEST).exists():
            return (
                f"{self.path} has gone, or its disk has: {self._committed_steps:,} of "
                f"{self._steps:,} steps were committed there, and nothing more is recorded; bring "
                "it back, or record again from the start at another path"
            )
        full = _is_full(error)
        remedy = (
            "free some space or choose another disk, then record again; recording fewer layers "
            "(layers=[...]) or keys alone (values=False) needs less"
            if full
            else "mend the cause, then record again"
        )
        return (
            f"{self.path}: {_what(error)}; {self._committed_steps:,} of {self._steps:,} steps are "
            f"committed and stay readable; {remedy}"
        )


def check_pack(pack: object, on_disk: bool) -> None:
    """Refuse a `pack` that is neither true nor false, or of what does not go to disk.

    Raises:
        OptionError: It is.
    """
    if not isinstance(pack, bool):
        raise OptionError(f"pack={pack!r}: True packs keys and values on disk, False does not")
    if pack and not on_disk:
        raise OptionError("pack=True is for a recording on disk: give its path, or leave pack out")


_START_REMEDY = {
    True: "free some space or choose another disk, then record again",
    False: "choose a path that this process may write to",
}


def _is_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


def _what(error: BaseException | None) -> str:
    if isinstance(error, OSError) and _is_full(error):
        return why_full(error)
    return f"writing failed ({error!r})"


def _stop(writer: RecordingWriter) -> None:
    """The job that ends the thread."""


def _step_pass(item: CapturedPass) -> StepPass:
    values = None if item.values is None else _record(item.values)
    rows = len(item.keys.stored) if item.keys.given else 0
    return StepPass(item.layer, item.rows, item.block, _record(item.keys, rows), values)


def _record(buffer: Buffer, rows: int = 0) -> Record:
    return Record(
        buffer.memory, buffer.stored.nbytes, buffer.xxh3, buffer.encoding, rows, buffer.patches
    )
