"""Building an index: what FAISS and NumPy read of it, its memory, and its interruptions."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from pathlib import Path

import faiss
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import warm
from synthetic import make_index, make_recording

from dualform.client import Client
from dualform.engine import verify_index
from dualform.index import BuildError, build_index
from dualform.record import Recorder
from dualform.store import ExistsError, IndexManifest, NoSpaceError, NotFoundError
from dualform.store.index import layer_directory
from dualform.store.versions import newest, remove_old, versions

ROWS, D_IN, D_OUT = 1000, 24, 5


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "keys": rng.standard_normal((ROWS, D_IN)).astype(np.float32),
        "values": rng.standard_normal((ROWS, D_OUT)).astype(np.float32),
        "label": rng.integers(0, 4, ROWS),
        "task": rng.integers(0, 2, ROWS),
    }


def build(directory: Path, arrays: dict[str, np.ndarray], shard_rows: int) -> Path:
    columns = {name: arrays[name].tolist() for name in ("label", "task")}
    return make_index(
        directory,
        arrays["keys"],
        arrays["values"],
        shard_rows=shard_rows,
        rows_per_step=64,
        **columns,
    )


@pytest.mark.parametrize("shard_rows", [1, 100, 300, 5000])
def test_faiss_and_numpy_read_the_shards(
    tmp_path: Path, arrays: dict[str, np.ndarray], shard_rows: int
) -> None:
    if shard_rows == 1:
        arrays = {name: array[:20] for name, array in arrays.items()}
    path = build(tmp_path, arrays, shard_rows)
    manifest = IndexManifest.load(path)
    layer, space = manifest.layers["fc"], manifest.spaces[0]
    seen = []
    for shard, each in zip(space.shards, layer.shards, strict=True):
        sidecar = pq.read_table(path / shard.sidecar.name).to_pydict()
        rows = np.array(sidecar["row"])
        assert len(rows) <= shard_rows
        index = faiss.read_index(str(path / each.keys.name))
        assert isinstance(index, faiss.IndexFlatIP)
        np.testing.assert_array_equal(index.reconstruct_n(0, index.ntotal), arrays["keys"][rows])
        assert each.values is not None
        np.testing.assert_array_equal(np.load(path / each.values.name), arrays["values"][rows])
        for name in ("label", "task"):
            np.testing.assert_array_equal(sidecar[name], arrays[name][rows])
        np.testing.assert_array_equal(sidecar["step"], rows // 64)
        np.testing.assert_array_equal(sidecar["slot"], rows % 64)
        # Grouped by (task, label), in row-id order inside a group.
        order = list(zip(sidecar["task"], sidecar["label"], sidecar["row"], strict=True))
        assert order == sorted(order)
        norms = np.linalg.norm(arrays["keys"][rows].astype(np.float64), axis=1)
        assert norms.max() <= each.max_norm <= norms.max() * 1.001
        seen.extend(rows)
    np.testing.assert_array_equal(np.sort(seen), np.arange(len(arrays["keys"])))


def test_rows_that_are_not_finite_are_named(tmp_path: Path) -> None:
    keys = np.ones((50, 3), np.float32)
    keys[[4, 5, 6, 20, 49], [0, 1, 2, 0, 1]] = [np.nan, np.inf, -np.inf, np.nan, np.inf]
    keys[30] = 3e38  # finite, though its square is not a float32
    path = make_index(tmp_path, keys, None, shard_rows=40)
    first, second = IndexManifest.load(path).layers["fc"].shards
    assert first.nonfinite == ((4, 7), (20, 21))
    assert second.nonfinite == ((9, 10),)
    assert np.sqrt(3) * 3e38 <= first.max_norm < np.inf


def test_an_index_is_never_overwritten(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    path = build(tmp_path, arrays, 300)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(ExistsError, match="never overwritten"):
        build_index(tmp_path / "recording", path)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_clock_that_was_set_back_hides_no_new_version(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    first = build(tmp_path / "first", arrays, 300)
    folder = tmp_path / "versions"
    folder.mkdir()
    first.rename(folder / "b")
    tomorrow = time.time_ns() + 86_400 * 10**9  # by the clock before it was set back
    os.utime(folder / "b" / "manifest.json", ns=(tomorrow, tomorrow))
    build_index(tmp_path / "first" / "recording", folder / "a", shard_rows=100)
    assert newest(folder) == folder / "a"
    assert remove_old(folder, keep=1) == []  # nobody published them as they came
    assert versions(folder) == [folder / "b", folder / "a"]
    assert verify_index(folder / "a").ok


def test_what_is_no_recording_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="not a recording"):
        build_index(tmp_path / "nothing", tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


def test_options_are_checked_before_anything_is_written(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    build(tmp_path, arrays, 300)
    for wrong, message in (
        ({"shard_rows": 2.5}, "a whole number"),
        ({"shard_rows": True}, "a whole number"),
        ({"values": "no"}, "values is 'no'; it is True or False"),
        ({"pack": 1}, "pack is 1"),
        ({"parts": "nope"}, "no column 'nope'"),
    ):
        with pytest.raises(BuildError, match=message):
            build_index(tmp_path / "recording", tmp_path / "other", **wrong)  # type: ignore[arg-type]
        assert not (tmp_path / "other").exists()
    build_index(tmp_path / "recording", tmp_path / "other", shard_rows=np.int64(77))  # type: ignore[arg-type]
    shards = IndexManifest.load(tmp_path / "other").spaces[0].shards
    assert {shard.rows for shard in shards[:-1]} == {77}


def test_without_values(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    build(tmp_path, arrays, 300)
    build_index(tmp_path / "recording", tmp_path / "bare", values=False)
    assert list((tmp_path / "bare").rglob("*.values.npy")) == []
    assert not IndexManifest.load(tmp_path / "bare").layers["fc"].values


def test_progress_reaches_the_end(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    build(tmp_path, arrays, 300)
    seen: list[tuple[int, int]] = []
    build_index(
        tmp_path / "recording", tmp_path / "again", progress=lambda *told: seen.append(told)
    )
    total = ROWS * (D_IN + D_OUT) * 4
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


SLOW_BUILD = """
import sys, time
from dualform.index import build_index
def progress(done, total):
    print(done, flush=True)
    time.sleep(0.01)
build_index(sys.argv[1], sys.argv[2], shard_rows=100, progress=progress)
"""


@pytest.mark.parametrize("distinct", [ROWS, 30])
def test_kill_9_leaves_no_index_and_the_next_build_is_the_same(
    tmp_path: Path, arrays: dict[str, np.ndarray], distinct: int
) -> None:
    arrays = {**arrays, "keys": arrays["keys"][np.arange(ROWS) % distinct]}
    reference = build(tmp_path, arrays, 100)
    target = tmp_path / "killed"
    for lines in (1, 9, 20):
        process = warm.start(SLOW_BUILD, tmp_path / "recording", target)
        for _ in range(lines):
            assert process.stdout.readline()
        with pytest.raises(ExistsError, match="another build"):
            build_index(tmp_path / "recording", target)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not target.exists()
    build_index(tmp_path / "recording", target, shard_rows=100)
    files = {file.relative_to(reference) for file in reference.rglob("*") if file.is_file()}
    assert (Path("layers/fc/equal.npy") in files) == (distinct < ROWS)
    assert files == {file.relative_to(target) for file in target.rglob("*") if file.is_file()}
    for file in files:
        assert (reference / file).read_bytes() == (target / file).read_bytes()
    assert not (tmp_path / ".killed.partial").exists()
    assert not (tmp_path / ".killed.lock").exists()


PEAK = """
import json, re, sys
from dualform.index import build_index
build_index(sys.argv[1], sys.argv[2], shard_rows=4096)
status = open("/proc/self/status").read()
print(json.dumps(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_memory_does_not_grow_with_the_recording(tmp_path: Path) -> None:
    peaks = []
    for rows in (10_000, 40_000):
        keys = np.random.default_rng(0).standard_normal((rows, 400)).astype(np.float32)
        directory = tmp_path / str(rows)
        directory.mkdir()
        recording = make_recording(
            directory / "recording", keys, keys[:, :100], 128, 0.1, 0.0, {"label": [1] * rows}
        )
        peaks.append(json.loads(warm.run(PEAK, recording, directory / "index").stdout))
    # Four times the rows are 60 MB more of keys and values; metadata and ledger are small.
    assert peaks[1] - peaks[0] < 16 << 20, peaks


def test_the_recording_is_left_alone(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    build(tmp_path, arrays, 300)
    recording = tmp_path / "recording"
    before = {file: file.stat().st_mtime_ns for file in recording.rglob("*")}
    time.sleep(0.01)
    build_index(recording, tmp_path / "again")
    assert {file: file.stat().st_mtime_ns for file in recording.rglob("*")} == before


def test_a_layer_that_never_ran_has_no_rows_and_keeps_no_other_from_answering(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)  # of other weights an output may be near zero, and rounded further off
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 2), "idle": torch.nn.Linear(3, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        recorder.annotate(label=[0, 1])
        model["used"](torch.ones(2, 3)).sum().backward()
        optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    assert verify_index(tmp_path / "index").ok
    query = np.ones((2, 3), np.float32)
    with Client.local(tmp_path / "index") as client:
        assert client.top_k("used", query, k=3).rows.tolist() == [[0, 1, -1]] * 2
        assert client.top_k("idle", query, k=3).rows.tolist() == [[-1] * 3] * 2
        assert client.top_k("idle", query, k=3, group_by="step").rows.shape == (2, 0, 3)
        contribution = client.top_k("idle", query, k=1, rank_by="contribution", unit=0)
        assert contribution.coverage.total == 0
        for absolute in (False, True):
            sums = client.sums("idle", query, group_by="step", absolute=absolute, where="step < 9")
            assert sums.groups == []
            assert sums.values.shape == (2, 0)
        expected = model["idle"](torch.from_numpy(query)).detach().numpy()
        np.testing.assert_allclose(client.dual_output("idle", query).values, expected, rtol=1e-6)
        parts = client.dual_output("idle", query, group_by="step")
        assert parts.values.shape == (2, 0, 2)
    said: list[str] = []
    build_index(tmp_path / "recording", tmp_path / "packed", pack=True, announce=said.append)
    assert said
    assert verify_index(tmp_path / "packed").ok


@pytest.mark.parametrize("name", ["x" * 300, "ü" * 100, "..", ".", "a/b", "%root", "a\\b", "A b"])
def test_any_layer_name_has_a_directory_inside_the_index(name: str) -> None:
    directory = layer_directory(name)
    assert directory.startswith("layers/")
    last = directory.removeprefix("layers/")
    assert len(last.encode()) <= 255
    assert "/" not in last
    assert last.strip(".")
    others = [name + "x", "x" + name, name * 2, ""]
    assert directory not in map(layer_directory, others)


def test_a_dangling_link_is_not_replaced(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    build(tmp_path / "one", arrays, 300)
    (tmp_path / "target").symlink_to("nowhere")
    with pytest.raises(ExistsError, match="target exists"):
        build_index(tmp_path / "one" / "recording", tmp_path / "target")


def test_a_disk_without_space_is_said_and_keeps_nothing(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    """The kernel refuses to let a file grow, as a full disk does."""
    build(tmp_path, arrays, 300)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(NoSpaceError, match=r"`ulimit -f`.*choose another disk"):
            build_index(tmp_path / "recording", tmp_path / "second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index", "recording"]
    build_index(tmp_path / "recording", tmp_path / "second")
