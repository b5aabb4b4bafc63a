"""The transport of local mode: the engine in this process, no server, no socket.

The engine is imported when the first index is opened; on the CPU it scans with torch, and for a
few queries with FAISS's loop over rows, which has no threads of its own; it leaves the process's
thread settings as they are.

A forked process opens the index anew, for locks and files are its parent's, where it may use torch.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import threading
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from dualform._install import pip_install
from dualform.client._fork import use_torch
from dualform.client._retry import WHEN_LATE, seconds
from dualform.client.errors import (
    DeadlineExceededError,
    DualformError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    error_from_code,
)
from dualform.questions.placement import device_names
from dualform.questions.placement import gpu_memory as memory_of_gpus

Device = str | Sequence[str]


class LocalTransport:
    """Answers from the index at `path`.

    Raises:
        NotFoundError: No such directory.
        InvalidArgumentError: An unknown device, or one that is not there.
        FailedPreconditionError: The engine's dependencies are not installed.
    """

    def __init__(self, path: str | Path, device: Device, gpu_memory: float | str) -> None:
        if not isinstance(path, (str, Path)):
            raise InvalidArgumentError(
                f"path={path!r} is of type {type(path).__name__}; an index's folder is needed",
                field="path",
            )
        where = Path(path)
        if not where.is_dir():
            raise NotFoundError(
                f"there is no index at {where}; `dualform index build RECORDING {where}` makes one",
                field="path",
            )
        for field, check, given in (
            ("device", device_names, device),
            ("gpu_memory", memory_of_gpus, gpu_memory),
        ):
            try:
                check(given)
            except ValueError as error:
                raise InvalidArgumentError(str(error), field=field) from None
        try:
            import dualform.engine.messages.catalog  # noqa: F401 (here, where it can be missing)
        except ImportError as error:
            raise FailedPreconditionError(
                f"a local index needs the engine ({error}): {pip_install('cpu')}, or ask a "
                'server with Client("HOST:PORT")',
                reason="NOT_INSTALLED",
            ) from error
        self._path, self._device, self._gpu_memory = where, device, gpu_memory
        self._open()

    def _open(self) -> None:
        from dualform.engine.messages.catalog import Catalog

        use_torch()
        path = self._path
        try:
            self._catalog: Any = Catalog(
                {_name_of(path): path},
                device=self._device,
                gpu_memory=self._gpu_memory,
                use_faiss=False,
            )
        except ValueError as error:
            raise InvalidArgumentError(str(error), field="device") from None
        except Exception as error:
            raise _error_of(error) from error
        self._process = os.getpid()
        self._answering = 0
        self._changed = threading.Condition()

    def call(self, request: Message, timeout: float | None, given_up: Any = None) -> Any:
        waiting = _Waiting(timeout, given_up)
        self._check_process()
        with self._working(waiting):
            return self._catalog.answer(request, stop=waiting.stop)

    def stream(
        self, request: Message, timeout: float | None, given_up: Any = None
    ) -> Generator[Any, None, None]:
        waiting = _Waiting(timeout, given_up)
        self._check_process()
        with self._working(waiting):
            parts = self._catalog.stream(request, stop=waiting.stop)
        while True:
            with self._working(waiting):
                part = next(parts, None)
            if part is None:
                return
            yield part

    @contextmanager
    def _working(self, waiting: _Waiting) -> Iterator[None]:
        with self._changed:
            self._answering += 1
        try:
            yield
        except Exception as error:
            ours = _error_of(error)
            if ours.code == "CANCELLED" and waiting.late:
                raise DeadlineExceededError(
                    f"no answer within {seconds(waiting.timeout or 0.0)} s; {WHEN_LATE}"
                ) from None
            raise ours from error
        finally:
            with self._changed:
                self._answering -= 1
                self._changed.notify_all()

    def _check_process(self) -> None:
        use_torch()
        if self._process != os.getpid():
            self._open()

    def close(self) -> None:
        if self._process != os.getpid():
            return  # its parent's
        # Files must not go away under a scan, such as one in another thread that was given up.
        with self._changed:
            self._changed.wait_for(lambda: self._answering == 0)
            self._catalog.close()


class AsyncLocalTransport:
    """LocalTransport in a thread; giving up stops the scan between two tiles."""

    def __init__(self, path: str | Path, device: Device, gpu_memory: float | str) -> None:
        self._local = LocalTransport(path, device, gpu_memory)

    async def call(self, request: Message, timeout: float | None) -> Any:
        given_up: list[bool] = []
        try:
            return await asyncio.to_thread(self._local.call, request, timeout, given_up)
        except asyncio.CancelledError:
            given_up.append(True)
            raise

    async def stream(self, request: Message, timeout: float | None) -> AsyncGenerator[Any, None]:
        given_up: list[bool] = []
        parts = self._local.stream(request, timeout, given_up)
        try:
            while True:
                part = await asyncio.to_thread(next, parts, None)
                if part is None:
                    return
                yield part
        finally:
            given_up.append(True)

    async def close(self) -> None:
        await asyncio.to_thread(self._local.close)


class _Waiting:
    """How long a caller waits."""

    def __init__(self, timeout: float | None, given_up: Any) -> None:
        self.timeout = timeout
        self._end = math.inf if timeout is None else time.monotonic() + timeout
        self._given_up = given_up

    @property
    def late(self) -> bool:
        return time.monotonic() >= self._end

    def stop(self) -> bool:
        return self.late or bool(self._given_up)


def _name_of(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", path.resolve().name).lstrip(".-")[:100] or "index"


def _error_of(error: Exception) -> DualformError:
    from dualform.engine.errors import EngineError

    if isinstance(error, EngineError):
        return error_from_code(error.code, str(error), reason=error.reason, field=error.field)
    return InternalError(f"{type(error).__name__}: {error}")
