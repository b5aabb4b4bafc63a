"""`dualform record pack`: a recording is packed where it is, and loses nothing."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pytest
import torch
from torch import nn

from dualform.cli.main import main
from dualform.index import build_index
from dualform.record import DiskSink, Recorder
from dualform.store import (
    BusyError,
    DamagedError,
    NoSpaceError,
    NotFoundError,
    WriteError,
    direct,
    recording_pack,
)
from dualform.store.files import write_sealed
from dualform.store.packing import PLAIN, PLANES
from dualform.store.recording import Recording
from dualform.store.recording_again import AGAIN
from dualform.store.recording_masks import MASKED
from dualform.store.recording_pack import pack_recording
from dualform.store.segment_table import SegmentTable

from .test_packed import bin_bytes, epochs, files, packings, same_indexes

STEPS = range(20)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recording of several segments, and its index."""
    folder = tmp_path_factory.mktemp("plain")
    epochs(folder / "r", False, STEPS)
    build_index(folder / "r", folder / "index", parts=("label",))
    return folder / "r", folder / "index"


def same(path: Path, index: Path) -> None:
    build_index(path, path.with_name("packed-index"), parts=("label",))
    same_indexes(index, path.with_name("packed-index"))


def test_packed_in_its_place(
    tmp_path: Path, plain: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(plain[0], tmp_path / "r"))
    before = bin_bytes(path)
    (path / "segments" / "000001.packed.bin").write_bytes(b"what a kill left")
    assert main(["record", "pack", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"path": str(path), "bytes_before": before, "bytes": bin_bytes(path)}
    assert told["bytes"] < 0.6 * before
    assert AGAIN in packings(path)["0", "keys"]
    assert packings(path)["2", "values"] == {PLANES}
    names = sorted(file.name for file in path.glob("segments/*.bin"))
    assert names == [f"{number:06d}.packed.bin" for number in range(len(names))]
    assert len(names) > 2
    same(path, plain[1])
    held = files(path)
    assert main(["record", "pack", str(path)]) == 0  # there is no more to do
    assert files(path) == held
    assert "1.00 of before" in capsys.readouterr().out


def test_resumed_after_it(tmp_path: Path, plain: tuple[Path, Path]) -> None:
    """Cut in a packed segment, gone on plain, and packed again."""
    path = Path(shutil.copytree(plain[0], tmp_path / "r"))
    shutil.copy(plain[0].with_suffix(".pt"), tmp_path / "r.pt")
    pack_recording(path)
    epochs(path, False, range(7, STEPS.stop), resume_at_step=7)
    assert packings(path)["2", "keys"] == {PLAIN, MASKED}
    pack_recording(path)
    assert packings(path)["2", "keys"] == {MASKED}
    same(path, plain[1])


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("moment", ["write", "table", "unlink"])
def test_a_kill_at_any_moment(tmp_path: Path, plain: tuple[Path, Path], moment: str) -> None:
    """What is there is valid, whichever segments are packed, and packing goes on."""
    segment = 2
    path = Path(shutil.copytree(plain[0], tmp_path / "r"))
    with pytest.MonkeyPatch.context() as patch:
        # A killed process tidies nothing up.
        unlink = Path.unlink

        def leave(file: Path, missing_ok: bool = False) -> None:
            if moment == "unlink" and file.name == f"{segment:06d}.bin":
                raise Killed
            if not file.name.endswith("packed.bin"):
                unlink(file, missing_ok=missing_ok)

        patch.setattr(Path, "unlink", leave)
        if moment == "write":
            finish = recording_pack.BinFile.finish

            def finished(file: Any) -> int:
                if f"{segment:06d}" in file._path.name:
                    file.flush()
                    raise Killed
                return finish(file)

            patch.setattr(recording_pack.BinFile, "finish", finished)
        if moment == "table":
            save = SegmentTable.save

            def saved(table: SegmentTable, *rest: Any) -> None:
                if table.number == segment:
                    raise Killed
                save(table, *rest)

            patch.setattr(SegmentTable, "save", saved)
        with pytest.raises(Killed):
            pack_recording(path)
    copied = Path(shutil.copytree(path, tmp_path / "copy" / "r"))
    same(copied, plain[1])
    pack_recording(path)
    same(path, plain[1])
    assert all(file.name.endswith("packed.bin") for file in path.glob("segments/*.bin"))


def test_a_damaged_record_is_left_as_it_is(tmp_path: Path, plain: tuple[Path, Path]) -> None:
    path = Path(shutil.copytree(plain[0], tmp_path / "r"))
    file = path / "segments" / "000001.bin"
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(DamagedError, match=r"000001\.bin: the record at byte 0"):
        pack_recording(path)
    assert file.read_bytes() == bytes(content)
    assert (path / "segments" / "000000.packed.bin").exists()
    assert not (path / "segments" / "000001.packed.bin").exists()
    content[10] ^= 1
    file.write_bytes(bytes(content))
    same(path, plain[1])


@pytest.mark.parametrize(
    ("code", "kind", "word"),
    [
        (errno.ENOSPC, NoSpaceError, r"000000\.bin.*free some space and pack again"),
        (errno.EIO, WriteError, r"000000\.bin.*Input/output error.*mend the disk and pack again"),
    ],
)
def test_a_disk_that_is_full_or_fails(
    tmp_path: Path,
    plain: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    kind: type[WriteError],
    word: str,
) -> None:
    path = Path(shutil.copytree(plain[0], tmp_path / "r"))

    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(direct.os, "pwritev", fails)
        with pytest.raises(kind, match=word):
            pack_recording(path)
    assert not list(path.glob("segments/*packed*"))
    same(path, plain[1])


def test_what_is_written_or_not_there_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, DiskSink(tmp_path / "r")), pytest.raises(BusyError):
        pack_recording(tmp_path / "r")
    with pytest.raises(NotFoundError):
        pack_recording(tmp_path / "none")
    assert sorted(os.listdir(tmp_path)) == ["r"]


def test_rows_that_others_refer_to_stay_where_they_are(tmp_path: Path) -> None:
    """A segment that holds plain rows, named by packed ones behind it."""
    epochs(tmp_path / "r", True, STEPS)
    with Recording.open(tmp_path / "r") as recording:
        expected = [recording.stored_keys(item) for item in recording.passes("0")]
        assert recording_pack._referred_to(tmp_path / "r" / "segments", recording.segments)
    pack_recording(tmp_path / "r")
    with Recording.open(tmp_path / "r") as recording:
        for item, keys in zip(recording.passes("0"), expected, strict=True):
            assert np.array_equal(recording.stored_keys(item), keys)


def test_any_change_of_how_records_are_packed(tmp_path: Path, plain: tuple[Path, Path]) -> None:
    """Sealed again: what is read is right, or refused with the file's name."""
    path = Path(shutil.copytree(plain[0], tmp_path / "r"))
    pack_recording(path)
    expected = everything(path)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    file = sorted(path.glob("segments/*.json"))[-1]
    content = file.read_bytes()
    table = json.loads(content)
    table.pop("xxh3")
    assert AGAIN in table["passes"]["keys_packing"]
    assert MASKED in table["passes"]["keys_packing"]
    others = ["plain", "zstd", "planes", "masked", "again", 56, 2**28, "000000.packed.bin"]
    outcomes = []
    names = ["keys_packing", "keys_bytes", "values_packing", "values_bytes", "keys_offset"]
    for name in [*names, "bin"]:
        column = table["passes"].get(name)
        for place in (0, 4) if column else (0,):
            old = column[place] if column else table["bin"]
            for value in [*hostile.NASTY, *others]:
                (column if column else table)[place if column else "bin"] = value
                write_sealed(file, table)
                outcomes.append(outcome(path, expected))
            (column if column else table)[place if column else "bin"] = old
    file.write_bytes(content)
    assert outcome(path, expected) == "read"
    assert {*outcomes} == {"read", "refused"}
    assert outcomes.count("refused") > 0.8 * len(outcomes)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 < 64 << 20


def everything(path: Path) -> list[bytes]:
    with Recording.open(path) as recording:
        return [
            read(item).tobytes()
            for layer in recording.manifest.layers
            for item in recording.passes(layer)
            for read in (recording.stored_keys, recording.stored_values)
        ]


def outcome(path: Path, expected: list[bytes]) -> str:
    try:
        return "read" if everything(path) == expected else "other numbers"
    except DamagedError as error:
        return "refused" if str(path) in str(error) else str(error)
