"""Small files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from dualform.store.files import write_atomic


@pytest.mark.parametrize("raised", [OSError, KeyboardInterrupt])
def test_nothing_half_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    path = tmp_path / "manifest.json"
    write_atomic(path, b"before")

    def fsync(descriptor: int) -> NoReturn:
        raise raised

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(raised):
            write_atomic(path, b"after")
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]
    assert path.read_bytes() == b"before"
