"""Other versions of an index, taken over while questions are answered."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import warm
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.messages.catalog import Catalog
from dualform.v1 import attribution_pb2 as pb
from dualform.v1 import attribution_pb2_grpc

from .serving import SERVING, Served, array, refusal, serving, tensor

ROWS = (30, 50)


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    """Two indexes whose rows are told apart by their number and their scores."""
    rng = np.random.default_rng(3)
    return [
        make_index(tmp_path / name, rng.standard_normal((rows, 6)).astype(np.float32), None)
        for name, rows in zip(("first", "second"), ROWS, strict=True)
    ]


QUERIES = np.ones((1, 6), np.float32)


def rows(served: Any, index: str = "i") -> int:
    request = pb.TopKRequest(index=index, layer="fc", k=1, queries=tensor(QUERIES))
    return int(served.stub.TopK(request, timeout=10).coverage.total)


def damage(index: Path) -> None:
    file = next(index.glob("layers/*/*.faiss"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)


def paths_of(served: Served, **paths: Path) -> Any:
    return replace(served.config, indexes=paths)


def test_a_new_path_is_served_from_then_on(versions: list[Path]) -> None:
    with serving({"i": versions[0]}) as served:
        before = served.catalog.version("i")
        assert rows(served) == 30
        served.reload(paths_of(served, i=versions[1]))
        assert rows(served) == 50
        assert served.catalog.version("i") not in ("", before)
        assert served.health("dualform.index.i") == SERVING


def test_indexes_are_added_and_removed(versions: list[Path]) -> None:
    with serving({"i": versions[0]}) as served:
        served.reload(paths_of(served, i=versions[0], other=versions[1]))
        assert (rows(served), rows(served, "other")) == (30, 50)
        assert served.health("dualform.index.other") == SERVING
        served.reload(paths_of(served, other=versions[1]))
        assert refusal(lambda: rows(served, "i")).reason == "UNKNOWN_INDEX"
        with pytest.raises(grpc.RpcError) as gone:
            served.health("dualform.index.i")
        error: Any = gone.value
        assert error.code() == grpc.StatusCode.NOT_FOUND
        assert rows(served, "") == 50


def test_a_bad_version_leaves_the_old_one(
    versions: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dualform")
    damage(versions[1])
    with serving({"i": versions[0]}) as served:
        for bad in (versions[1], tmp_path / "nowhere"):
            served.reload(paths_of(served, i=bad))
            assert rows(served) == 30
            assert served.health("dualform.index.i") == SERVING
        served.reload(replace(served.config, indexes={}))
        assert rows(served) == 30
    assert caplog.text.count("index i stays at version") == 2
    assert "the indexes stay as they were: no index to serve" in caplog.text


@pytest.mark.parametrize("met", [False, True], ids=["damage not met", "damage met"])
def test_a_file_restored_from_a_copy_is_served_after_a_reload(
    versions: list[Path], tmp_path: Path, met: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The open index knows the file that was there before: it is opened anew, kept otherwise."""
    caplog.set_level("DEBUG", "dualform")
    copy = shutil.copytree(versions[0], tmp_path / "copy")
    with serving({"i": versions[0]}) as served:
        assert rows(served) == 30
        damage(versions[0])
        if met:
            assert refusal(lambda: rows(served)).code == grpc.StatusCode.DATA_LOSS
        shutil.rmtree(versions[0])
        shutil.copytree(copy, versions[0])
        served.reload()
        assert rows(served) == 30
        assert served.health("dualform.index.i") == SERVING
        assert "index i is now version" in caplog.text
        served.reload()
        assert "still" in caplog.messages[-1]
        assert rows(served) == 30


@pytest.mark.parametrize("way", ["damaged", "removed", "another version over it, damaged"])
def test_a_reload_meets_damage_to_what_is_served(
    versions: list[Path], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no old version to stay at: health says so before a question has to."""
    with serving({"i": versions[0]}) as served:
        assert rows(served) == 30
        if way == "removed":
            next(versions[0].glob("layers/*/*.faiss")).unlink()
        elif way == "damaged":
            damage(versions[0])
        else:
            damage(versions[1])
            shutil.copytree(versions[1], versions[0], dirs_exist_ok=True)
        served.reload()
        assert "index i cannot be served" in caplog.text
        assert served.health("dualform.index.i") != SERVING
        assert refusal(lambda: rows(served)).code == grpc.StatusCode.DATA_LOSS


def test_an_index_that_has_gone_is_damaged_until_it_is_back(versions: list[Path]) -> None:
    """A reload while its disk is away said that there was no index of that name."""
    first, second = versions
    with serving({"a": first, "b": second}) as served:
        away = first.rename(first.with_name("away"))
        for _ in range(2):
            served.reload(paths_of(served, a=first, b=second))
            found = refusal(lambda: rows(served, "a"))
            assert (found.code, found.reason) == (grpc.StatusCode.DATA_LOSS, "DAMAGED")
            assert "is its disk mounted?" in found.message
        assert rows(served, "b") == ROWS[1]
        away.rename(first)
        served.reload(paths_of(served, a=first, b=second))
        assert rows(served, "a") == ROWS[0]


def test_a_change_to_any_file_is_seen(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    keys = rng.standard_normal((40, 6)).astype(np.float32)
    path = make_index(tmp_path, keys, keys[:, :2], shard_rows=15, label=[t % 3 for t in range(40)])
    with Index.open(path) as index:
        files = {str(file) for file in path.rglob("*") if file.is_file()}
        assert set(index.identities()) == files - {str(path / "manifest.json")}
        for file in sorted(index.identities()):
            before = index.identities()
            os.utime(file, ns=(0, 0))
            assert [name for name, at in index.identities().items() if before[name] != at] == [file]


def test_of_a_folder_the_newest_complete_one_is_served(
    versions: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "versions"
    shutil.copytree(versions[0], folder / "b")
    (folder / "c").mkdir()  # a build that has begun
    with serving({"i": folder}) as served:
        assert rows(served) == 30
        shutil.copytree(versions[1], folder / ".new")
        (folder / ".new").rename(folder / "a")
        os.utime(folder / "a" / "manifest.json")
        served.reload()
        assert rows(served) == 50
        shutil.rmtree(folder / "a")
        served.reload()
        assert rows(served) == 30


class HoldingCatalog(Catalog):
    """Holds questions back once they have found their index."""

    gate = threading.Event()
    inside = threading.Event()

    def _open_index(self, name: str) -> Any:
        index = super()._open_index(name)
        self.inside.set()
        self.gate.wait(20)
        return index


def test_running_questions_end_on_the_version_they_began_with(versions: list[Path]) -> None:
    HoldingCatalog.gate.clear()
    with serving({"i": versions[0]}, catalog_type=HoldingCatalog) as served:
        request = pb.TopKRequest(layer="fc", k=30, queries=tensor(QUERIES))
        call = served.stub.TopK.future(request)
        assert HoldingCatalog.inside.wait(20)
        served.reload(paths_of(served, i=versions[1]))
        HoldingCatalog.gate.set()
        old = call.result(timeout=10)
        assert sorted(array(old.rows)[0].tolist()) == list(range(30))
        assert rows(served) == 50


def test_streams_end_on_the_version_they_began_with(versions: list[Path], tmp_path: Path) -> None:
    keys = np.random.default_rng(1).standard_normal((60_000, 6)).astype(np.float32)
    long = make_index(tmp_path / "long", keys, None, rows_per_step=10_000)
    with serving({"i": long}) as served:
        request = pb.StreamWeightsRequest(layer="fc", queries=tensor(keys[:200]))
        call = served.stub.StreamWeights(request, timeout=60)
        seen = next(call).weights.shape[1]
        served.reload(paths_of(served, i=versions[1]))
        assert rows(served) == 50
        assert seen + sum(part.weights.shape[1] for part in call) == 60_000


def test_what_is_served_no_more_is_released(versions: list[Path]) -> None:
    catalog = Catalog({"i": versions[0]})
    request = pb.TopKRequest(layer="fc", k=1, queries=tensor(QUERIES))
    catalog.answer(request)
    assert str(versions[0]) in Path("/proc/self/maps").read_text()
    old = weakref.ref(catalog._open_index("i"))
    gc.disable()
    try:
        catalog.reload({"i": versions[1]})
        assert old() is None
        catalog.answer(request)
        maps = Path("/proc/self/maps").read_text()
        assert str(versions[1]) in maps
        assert str(versions[0]) not in maps
    finally:
        gc.enable()


def test_answers_are_right_while_versions_change(versions: list[Path]) -> None:
    expected = set(ROWS)
    with serving({"i": versions[0]}) as served:
        stop, seen, wrong = threading.Event(), set(), []

        def ask() -> None:
            while not stop.is_set():
                try:
                    seen.add(rows(served))
                except grpc.RpcError as error:
                    wrong.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(20):
            served.reload(paths_of(served, i=versions[number % 2]))
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert seen == expected


@pytest.fixture
def command(versions: list[Path], tmp_path: Path) -> Iterator[tuple[Any, Path, str]]:
    """`dualform serve --config`, the file, and the address."""
    config = tmp_path / "server.yaml"
    config.write_text(f"listen: 127.0.0.1:0\nindexes: {{i: {versions[0]}}}\n")
    errors = (tmp_path / "log").open("w+")
    server = warm.start("dualform", "serve", "--config", config, errors=errors)
    try:
        yield server, config, server.stdout.readline().removeprefix("listening on ").strip()
    finally:
        server.kill()
        server.communicate()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_sighup_reads_the_file_again_and_never_kills(
    command: tuple[Any, Path, str], versions: list[Path]
) -> None:
    server, config, address = command
    log = config.parent / "log"
    with grpc.insecure_channel(address) as channel:
        stub = attribution_pb2_grpc.AttributionServiceStub(channel)
        request = pb.TopKRequest(layer="fc", k=1, queries=tensor(QUERIES))
        assert stub.TopK(request, timeout=60).coverage.total == 30
        good = config.read_text()
        config.write_text("nonsense: [")
        server.send_signal(signal.SIGHUP)
        until(lambda: "nothing was changed" in log.read_text())
        config.write_text(good.replace(str(versions[0]), str(versions[1])))
        server.send_signal(signal.SIGHUP)
        until(lambda: "index i is now version" in log.read_text())
        assert stub.TopK(request, timeout=10).coverage.total == 50
        for _ in range(20):
            server.send_signal(signal.SIGHUP)
        assert stub.TopK(request, timeout=10).coverage.total == 50
    server.terminate()
    assert server.wait(30) == 0
    assert "Traceback" not in log.read_text()


def test_a_hangup_before_the_server_is_up_does_not_kill_it(versions: list[Path]) -> None:
    script = (
        "import os, signal, sys; from dualform.serve import ServerConfig, run\n"
        "from dualform.serve import command\n"
        "real = command._report\n"
        "command._report = lambda catalog: (os.kill(os.getpid(), signal.SIGHUP), real(catalog))\n"
        "sys.exit(run(ServerConfig({'i': sys.argv[1]}, listen='127.0.0.1:0')))"
    )
    server = warm.start(script, versions[0])
    try:
        assert server.stdout.readline().startswith("listening on ")
    finally:
        server.kill()
        server.communicate()
