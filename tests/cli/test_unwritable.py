"""What may not be read or written, and read-only file systems: recorder, builder, server."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import warm
from rights import as_anyone
from serve.serving import NOT_SERVING, SERVING, serving, tensor
from synthetic import make_index
from torch import nn

from dualform.engine import Index
from dualform.engine.errors import EngineError
from dualform.index import build_index, pack_index
from dualform.record import Recorder, RecordingFailedError
from dualform.store import StoreError, UnreadableError, WriteError
from dualform.v1 import attribution_pb2 as pb

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="capabilities")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recording and index."""
    keys = np.random.default_rng(1).standard_normal((60, 5)).astype(np.float32)
    return make_index(tmp_path_factory.mktemp("made"), keys, keys[:, :3].copy()).parent


@contextmanager
def rights(path: Path, mode: int) -> Iterator[None]:
    """While a path has these, for a process that they bind."""
    before = path.stat().st_mode
    path.chmod(mode)
    try:
        with as_anyone():
            yield
    finally:
        path.chmod(before)


@pytest.mark.parametrize("name", ["new", "below/new"])
def test_a_builder_that_may_not_write_says_so_and_leaves_nothing(
    made: Path, tmp_path: Path, name: str
) -> None:
    word = rf"{name}: writing failed \(.*Permission denied\).*may write to"
    with rights(tmp_path, 0o555):
        with pytest.raises(WriteError, match=word):
            build_index(made / "recording", tmp_path / name)
        with pytest.raises(WriteError, match=word):
            pack_index(made / "index", tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    build_index(made / "recording", tmp_path / name)


def test_rights_that_go_while_it_builds(made: Path, tmp_path: Path) -> None:
    def forbid(done: int, total: int) -> None:
        tmp_path.chmod(0o555)

    try:
        with as_anyone(), pytest.raises(WriteError, match="Permission denied"):
            build_index(made / "recording", tmp_path / "new", progress=forbid)
    finally:
        tmp_path.chmod(0o755)
    # What it may not remove any more is no index, and the next build takes its place.
    assert not (tmp_path / "new").exists()
    build_index(made / "recording", tmp_path / "new")
    assert [each.name for each in tmp_path.iterdir()] == ["new"]


def test_a_disk_that_fails_under_a_builder_is_told(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system names no file where what is open fails."""

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        word = r"new: its disk failed \(Input/output error\).*mend the disk or choose another"
        for make, source in ((build_index, "recording"), (pack_index, "index")):
            with pytest.raises(WriteError, match=word):
                make(made / source, tmp_path / "new")
            assert list(tmp_path.iterdir()) == []
    build_index(made / "recording", tmp_path / "new")


def test_a_recorder_that_may_not_write_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        rights(tmp_path, 0o555),
        pytest.raises(RecordingFailedError, match=r"Permission denied.*may write to"),
        Recorder(model, optimizer, tmp_path / "run"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_recording_that_may_not_be_read_is_named(made: Path, tmp_path: Path, what: str) -> None:
    recording = made / "recording"
    files = [each for each in recording.rglob("*") if each.is_file()]
    for path in [recording] if what == "folder" else files:
        with (
            rights(path, 0),
            pytest.raises(UnreadableError, match=r"Permission denied.*let this process read") as no,
        ):
            build_index(recording, tmp_path / "new")
        assert no.value.path == path or path in no.value.path.parents
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_may_not_be_read_keeps_no_other_from_answering(
    made: Path, tmp_path: Path
) -> None:
    build_index(made / "recording", tmp_path / "other")
    request = pb.TopKRequest(layer="fc", k=2, queries=tensor(np.ones((1, 5), np.float32)))
    with (
        rights(tmp_path / "other", 0),
        serving({"i": made / "index", "o": tmp_path / "other"}) as s,
    ):
        assert (s.health("dualform.index.i"), s.health("dualform.index.o")) == (
            SERVING,
            NOT_SERVING,
        )
        request.index = "i"
        assert s.stub.TopK(request, timeout=60).rows.shape[0] == 1
        request.index = "o"
        with pytest.raises(grpc.RpcError) as caught:
            s.stub.TopK(request, timeout=60)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.DATA_LOSS
        assert "can't be read (Permission denied)" in error.details()


def test_a_newer_version_that_may_not_be_read_leaves_the_old_one(
    made: Path, tmp_path: Path
) -> None:
    """And the other index takes its own."""
    for name in ("a", "b"):
        build_index(made / "recording", tmp_path / name / "1")
    with as_anyone(), serving({"a": tmp_path / "a", "b": tmp_path / "b"}) as served:
        before = {name: served.catalog.version(name) for name in ("a", "b")}
        for name in ("a", "b"):
            build_index(made / "recording", tmp_path / name / "2", shard_rows=20)
        keys = sorted((tmp_path / "a" / "2").rglob("*.keys.faiss"))
        keys[-1].chmod(0)
        try:
            served.reload()
        finally:
            keys[-1].chmod(0o600)
        assert served.catalog.version("a") == before["a"]
        assert served.catalog.version("b") != before["b"]
        request = pb.TopKRequest(layer="fc", k=2, queries=tensor(np.ones((1, 5), np.float32)))
        for name in ("a", "b"):
            request.index = name
            assert served.stub.TopK(request, timeout=60).rows.shape[0] == 1
            assert served.health(f"dualform.index.{name}") == SERVING


def test_files_of_an_index_that_may_not_be_read_are_named(made: Path) -> None:
    files = [made / "index", *(made / "index").rglob("*")]
    assert len(files) > 12
    told: list[tuple[Path, str]] = []
    for path in files:
        with rights(path, 0):
            try:
                with Index.open(made / "index", device="cpu") as index:
                    index.top_k("fc", np.ones((1, 5), np.float32), k=2)
                    index.dual_output("fc", np.ones((1, 5), np.float32), max_residual=np.inf)
            except (StoreError, EngineError) as error:
                told.append((path, str(error)))
    assert len(told) > 10
    assert all(str(path) in text and "Permission denied" in text for path, text in told), told


SCRIPT = """
import sys, torch
from pathlib import Path
from torch import nn
from dualform.index import build_index
from dualform.record import Recorder, RecordingFailedError
from dualform.store import WriteError
made, model = Path(sys.argv[1]), nn.Linear(5, 3)
try:
    with Recorder(model, torch.optim.SGD(model.parameters(), lr=0.1), made / "run"):
        raise SystemExit("recorded")
except RecordingFailedError as error:
    assert "Read-only file system" in str(error), error
try:
    build_index(made / "recording", made / "new")
    raise SystemExit("built")
except WriteError as error:
    assert "Read-only file system" in str(error), error
"""


@pytest.mark.slow
def test_a_system_that_is_read_only(made: Path, tmp_path: Path) -> None:
    """All of it, as a container's root is: the server answers, recorder and builder are told."""
    steps = [
        "mount --make-rprivate /",
        "mount -o remount,bind,ro /",
        f"mount --bind {made} {made}",  # which may be in memory, another file system
        f"mount -o remount,bind,ro {made}",
        'exec "$@"',
    ]
    alone = ["unshare", "--mount", "sh", "-c", " && ".join(steps), "sh"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces take rights that this process has not")
    refused = subprocess.run([*alone, "touch", made / "x"], capture_output=True, text=True)
    assert "Read-only" in refused.stderr
    # torch's data sets want a folder for temporary files when they are imported.
    done = subprocess.run(
        [*alone, "env", "TMPDIR=/dev/shm", sys.executable, "-c", SCRIPT, made],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    config = tmp_path / "server.yaml"
    config.write_text(f"listen: 127.0.0.1:0\nindexes: {{i: {made / 'index'}}}\n")
    serve = [*alone, "env", "TMPDIR=/dev/shm", sys.executable, "-m", "dualform.cli", "serve"]
    serve += ["--config", config]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            address = server.stdout.readline().removeprefix("listening on ").strip()
            assert address, (tmp_path / "log").read_text()
            words = ["--layer", "fc", "--index", "i", "-k", "2", "--server", address]
            np.save(tmp_path / "q.npy", np.ones((1, 5), np.float32))
            asked = warm.run("dualform", "query", "top-k", *words, "--query", tmp_path / "q.npy")
            assert asked.returncode == 0, asked.stderr
        finally:
            server.terminate()
            assert server.wait(60) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
