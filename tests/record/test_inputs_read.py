"""Who reads recorded inputs: ranks, followers, replays, builds; and tables that lie about them."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.engine import Index
from dualform.index import build_index
from dualform.index.follow import Follower
from dualform.index.layer import LayerSource
from dualform.index.plan import Options
from dualform.index.row_spaces import Space
from dualform.record import Recorder
from dualform.replay import FirstRun, Replay, ReplayError
from dualform.store import DamagedError
from dualform.store.files import write_sealed
from dualform.store.patches import Patches
from dualform.store.ranks import Rank
from dualform.store.recording import Recording
from dualform.store.recording_format import RecordingManifest, read_sealed
from dualform.store.recording_ranks import open_recordings

from .test_inputs import BATCH, MODELS, OPTIMIZERS, STEPS, inputs, record, unfolded
from .test_packed import same_indexes


def test_ranks(tmp_path: Path) -> None:
    """Two processes' recordings, as two of one that saw the same batches."""
    for name in ("once", "patches"):
        for rank in range(2):
            with pytest.MonkeyPatch.context() as patch:
                if name == "patches":
                    patch.setattr(Patches, "pays", False)
                path = record(tmp_path / name / f"rank-{rank}")
            manifest = RecordingManifest.load(path)
            replace(manifest, ranks=Rank(rank, 2)).save(path)
        build_index([tmp_path / name / f"rank-{rank}" for rank in range(2)], tmp_path / f"{name}-i")
    same_indexes(tmp_path / "once-i", tmp_path / "patches-i")


def test_followed(tmp_path: Path) -> None:
    """The version that is published at the end is the index that a build gives."""
    path = record(tmp_path / "r", segment_bytes=200_000)
    follower = Follower(tmp_path / "versions", Options(shard_rows=700))
    with follower, open_recordings([path]) as source:
        assert len(source.segments) > 1
        found = follower.publish(source)
    assert found is not None
    with unfolded():
        patches = record(tmp_path / "patches")
    build_index(patches, tmp_path / "index", shard_rows=700)
    same_indexes(found.path, tmp_path / "index")


def test_replayed(tmp_path: Path) -> None:
    make, size = MODELS["2d"]

    def train(sink: Any) -> None:
        torch.manual_seed(0)
        model = make()
        optimizer = OPTIMIZERS["sgd"](model)
        with Recorder(model, optimizer, sink) as recorder:
            for step in range(STEPS):
                recorder.annotate(label=np.arange(BATCH) % 3)
                optimizer.zero_grad()
                model(inputs(size, step)).square().mean().backward()
                optimizer.step()

    first = FirstRun()
    train(first)
    first.save(tmp_path / "first")
    query = np.random.default_rng(0).standard_normal((2, 45)).astype(np.float32)
    replay = Replay(FirstRun.load(tmp_path / "first"))
    asked = replay.top_k("2", query, 9)
    train(replay)
    with unfolded():
        build_index(record(tmp_path / "patches"), tmp_path / "index")
    with Index.open(tmp_path / "index", device="cpu") as index:
        expected = index.top_k("2", query, 9)
    assert asked.result().scores.tobytes() == expected.scores.tobytes()
    assert asked.result().rows.tobytes() == expected.rows.tobytes()


def test_a_first_run_of_an_earlier_dualform(tmp_path: Path, monkeypatch: Any) -> None:
    """Its digests are of patches: it is refused, and not called another training."""
    make, size = MODELS["1d"]
    model, first = make(), FirstRun()
    optimizer = OPTIMIZERS["sgd"](model)
    with Recorder(model, optimizer, first):
        model(inputs(size, 0)).sum().backward()
        optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr("dualform.replay.first_run._OF_INPUTS", "dualform-first-run-1")
        first.save(tmp_path / "first")
    with pytest.raises(ReplayError, match="saved by an earlier dualform"):
        FirstRun.load(tmp_path / "first")


def test_patches_are_never_there_all_at_once(tmp_path: Path) -> None:
    """A build reads a large pass in parts: memory is that of its inputs, and a few MB."""
    torch.manual_seed(0)
    model = nn.Conv2d(16, 2, 5, padding=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        recorder.annotate(label=0)
        model(inputs((16, 48, 48), 0)).square().mean().backward()
        optimizer.step()
    with Recording.open(tmp_path / "r") as recording:
        source = LayerSource(recording, recording.manifest.layers[""], values=True)
        (item,) = source.passes
        space = Space([""], [0], np.array([0, item.rows]))
        tracemalloc.start()
        for _ in source.pieces(space, 0, item.rows, values=False):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert item.keys.whole == 8 * 48 * 48 * 400 * 4  # 29 MB, of 1.2 MB of inputs
        assert most < item.keys.nbytes + (20 << 20)


def _table(path: Path) -> dict[str, Any]:
    table = read_sealed(path / "segments" / "000000.json")
    table.pop("xxh3")
    return table


def _way(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: table["patches"][0].update({name: value})


def _passes(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: table["passes"][name].__setitem__(0, value)


def more_inputs(table: dict[str, Any]) -> None:
    """A table that makes a few kB into petabytes."""
    rows = table["blocks"]["rows"][0]
    for column in (table["blocks"]["rows"], table["passes"]["rows"]):
        column[:] = [n * 2**30 if n == rows else n for n in column]


LIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another kernel": (_way("kernel", [2, 2]), r"passes\[0\]\.keys_patches"),
    "a larger input": (_way("size", [2**20, 2**20]), r"passes\[0\]\.keys_patches"),
    "more padding": (_way("padding", [[9, 9], [9, 9]]), r"passes\[0\]\.keys_patches"),
    "padding without end": (_way("padding", [[2**31, 2], [2, 2]]), r"patches\[0\]\.padding"),
    "channels that overflow": (_way("channels", 2**40), r"patches\[0\]\.channels"),
    "a mode that is none": (_way("mode", "mirror"), r"patches\[0\]\.mode"),
    "no groups": (_way("groups", 0), r"patches\[0\]\.groups"),
    "a way that is not there": (_passes("keys_patches", 99), r"passes\[0\]\.keys_patches"),
    "a way below none": (_passes("keys_patches", -1), r"passes\[0\]\.keys_patches"),
    "another layer's way": (_passes("keys_patches", 1), r"passes\[0\]\.keys_patches"),
    "more rows than fit": (more_inputs, r"passes\[0\]\.keys_offset"),
    "no ways": (lambda table: table.pop("patches"), "patches"),
    "no list": (lambda table: table.update(patches={}), "patches"),
    "a shorter column": (lambda table: table["passes"]["keys_patches"].pop(), "keys_patches"),
}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("once") / "r")


@pytest.mark.parametrize("lie", LIES)
def test_a_table_that_lies(tmp_path: Path, once: Path, lie: str) -> None:
    path = Path(shutil.copytree(once, tmp_path / "r"))
    table = _table(path)
    change, field = LIES[lie]
    change(table)
    write_sealed(path / "segments" / "000000.json", table)
    with pytest.raises(DamagedError, match=rf"000000\.json.*{field}"):
        Recording.open(path)


def test_bytes_that_are_not_the_inputs(tmp_path: Path, once: Path) -> None:
    path = Path(shutil.copytree(once, tmp_path / "r"))
    with Recording.open(path) as recording:
        span = recording.passes("2")[1].keys
    table = _table(path)
    _passes("keys_patches", None)(table)  # patches, said to be there
    other = Path(shutil.copytree(path, tmp_path / "other"))
    write_sealed(other / "segments" / "000000.json", table)
    file = path / "segments" / "000000.bin"
    data = bytearray(file.read_bytes())
    data[span.offset + span.nbytes - 1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match=rf"000000\.bin: the record at byte {span.offset:,}"):
        build_index(path, tmp_path / "index")
    with pytest.raises(DamagedError, match=r"000000\.bin: the record at byte 0"):
        build_index(other, tmp_path / "index")
