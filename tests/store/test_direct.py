"""Direct I/O on file systems that have it, and on those that take the file and then refuse."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import make_index

from dualform.engine import Index
from dualform.store.direct import create_direct, write_at

DIRECT = getattr(os, "O_DIRECT", 0)
PAGE = mmap.PAGESIZE


def content(pages: int) -> mmap.mmap:
    memory = mmap.mmap(-1, pages * PAGE)
    memory[:] = np.random.default_rng(0).bytes(pages * PAGE)
    return memory


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """On a disk, whose pages and offsets must be whole, also where other tests write in memory."""
    on_disk = Path("/var/tmp")
    with tempfile.TemporaryDirectory(dir=on_disk if on_disk.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def created_and_refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A file system that creates a file before it refuses O_DIRECT; no machine here has one."""
    refused: list[str] = []
    real = os.open

    def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if DIRECT and flags & DIRECT:
            os.close(real(path, flags & ~DIRECT, *rest, **named))
            refused.append(os.fspath(path))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), os.fspath(path))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", opened)
    return refused


def test_what_is_written_is_there(tmp_path: Path) -> None:
    memory = content(3)
    view = memoryview(memory)
    fd = create_direct(tmp_path / "file")
    write_at(fd, [view[2 * PAGE :], view[:PAGE]], 0)
    write_at(fd, [view[PAGE : 2 * PAGE]], 2 * PAGE)
    os.close(fd)
    whole = bytes(memory)
    parts = [whole[2 * PAGE :], whole[:PAGE], whole[PAGE : 2 * PAGE]]
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        create_direct(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.skipif(not DIRECT, reason="no direct I/O on this system")
def test_recording_and_building_where_a_file_is_created_and_then_refused(
    tmp_path: Path, created_and_refused: list[str]
) -> None:
    keys = np.random.default_rng(1).standard_normal((300, 8)).astype(np.float32)
    path = make_index(tmp_path, keys, keys[:, :3], shard_rows=100)
    endings = {Path(name).suffix for name in created_and_refused}
    assert {".bin", ".faiss", ".npy"} <= endings  # the recorder's files and the builder's
    with Index.open(path, device="cpu") as index:
        index.verify_files()
        hits = index.top_k("fc", keys[:1], 1)
    best = (keys.astype(np.float64) @ keys[0].astype(np.float64)).argmax()
    assert hits.rows[0, 0] == best
