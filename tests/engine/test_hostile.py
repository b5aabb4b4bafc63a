"""Hostile indexes: a typed refusal that names the file, or the right answer, in little memory.

Made by mutation of a real small index: every field of its manifest, sealed again, and every file
replaced by what is no file.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from itertools import islice
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dualform.engine import Index
from dualform.engine.errors import EngineError
from dualform.index import build_index
from dualform.record import Recorder
from dualform.store import DamagedError, IndexManifest, StoreError
from dualform.store.files import FileEntry, digest, read_json, write_sealed

D_IN = 260
QUERY = np.random.default_rng(1).random((2, D_IN)).astype(np.float32)
MOST_SECONDS = 3.0
MOST_BYTES = 256 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("hostile")
    model = torch.nn.Linear(D_IN, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with Recorder(model, optimizer, directory / "recording") as recorder:
        keys = torch.rand(8, D_IN)
        for _ in range(5):
            recorder.annotate(label=[0, 1] * 4, task="t", example=list(range(8)))
            optimizer.zero_grad()
            model(keys).square().mean().backward()
            optimizer.step()
        recorder.add_examples([1, 2], [b"one", "two"])
    build_index(directory / "recording", directory / "index", shard_rows=12)
    return directory / "index"


def ask(path: Path) -> dict[str, Any]:
    """All kinds of answers, after the sweep that a server does; plain data."""
    with Index.open(path, device="cpu") as index:
        index.verify_files()
        (name,) = index.layers
        hits = index.top_k(name, QUERY, 5)
        best = index.top_k(name, QUERY, 3, rank_by="contribution", unit=1)
        found = {
            "rows": hits.rows,
            "scores": hits.scores,
            "contributions": best.scores,
            "signed": index.sums(name, QUERY, "label").values,
            "absolute": index.sums(name, QUERY, "label", absolute=True).values,
            "output": index.dual_output(name, QUERY).values,
            "earlier": index.dual_output(name, QUERY, at_step=2).values,
            "weights": np.concatenate([c.weights for c in index.stream_weights(name, QUERY)], 1),
        }
        index.examples([1, 2])
        return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, each in expected.items():
        assert found[name].shape == each.shape, name
        np.testing.assert_allclose(found[name], each, rtol=1e-5, atol=1e-5, err_msg=name)


def outcome(path: Path, expected: dict[str, Any] | None, what: str) -> str:
    """Whether answers were right (where it is known what is), or a typed error named the file."""
    before = time.monotonic()
    try:
        found = ask(path)
        if expected is not None:
            same(found, expected)
        return "answered"
    except (StoreError, EngineError) as error:
        named = str(path) in str(error) or "layer" in str(error)
        return "refused" if named else f"{what}: {error!r}"
    except (Exception, AssertionError) as error:
        return f"{what}: {error!r}"
    finally:
        assert time.monotonic() - before < MOST_SECONDS, what


def test_every_field_of_the_manifest(path: Path, tmp_path: Path) -> None:
    expected = ask(path)
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    manifest = (copy / "manifest.json").read_bytes()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = []
    # All of them take a minute; a sample is always another in its kinds and places.
    share = 1 if os.environ.get("DUALFORM_SOAK") else 7
    for what, write in islice(hostile.mutated(copy / "manifest.json"), 0, None, share):
        write()
        outcomes.append(outcome(copy, expected, what))
    (copy / "manifest.json").write_bytes(manifest)
    assert outcome(copy, expected, "restored") == "answered"
    assert {*outcomes} == {"answered", "refused"}
    assert len(outcomes) > 2000 / share
    assert outcomes.count("refused") > 0.9 * len(outcomes)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 < MOST_BYTES


def test_what_is_no_file(path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    for file in [each for each in copy.rglob("*") if each.is_file()]:
        content = file.read_bytes()
        for what, put in hostile.odd_files(file, tmp_path / "outside"):
            file.unlink()
            put()
            before = time.monotonic()
            with pytest.raises((DamagedError, EngineError), match=file.name):
                ask(copy)
            assert time.monotonic() - before < MOST_SECONDS, (file, what)
            file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
            file.write_bytes(content)
    for folder in ("layers", "rows"):
        shutil.move(copy / folder, tmp_path / "elsewhere")
        (copy / folder).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(DamagedError, match="folder"):
            Index.open(copy, device="cpu")
        (copy / folder).unlink()
        shutil.move(tmp_path / "elsewhere", copy / folder)


def reseal(path: Path, name: str, data: bytes) -> None:
    """Put a file in the place of one of the index, and make the manifest name it."""
    (path / name).write_bytes(data)
    manifest = read_json(path / "manifest.json", "")
    manifest.pop("xxh3")

    def replace(value: Any) -> Any:
        if isinstance(value, dict) and value.get("name") == name:
            return FileEntry(name, len(data), digest(data)).to_json()
        if isinstance(value, dict):
            return {key: replace(each) for key, each in value.items()}
        return [replace(each) for each in value] if isinstance(value, list) else value

    write_sealed(path / "manifest.json", replace(manifest))


@pytest.mark.parametrize("kind", [pytest.param("rows", marks=pytest.mark.slow), "text"])
def test_a_small_sidecar_does_not_become_a_large_one(path: Path, tmp_path: Path, kind: str) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    shard = IndexManifest.load(copy).spaces[0].shards[0]
    table = pq.read_table(copy / shard.sidecar.name)
    if kind == "rows":
        table = pa.table({name: pa.nulls(10**7, pa.int64()) for name in ("row", "step")})
    else:
        long = pa.array(["x" * (1 << 26)]).dictionary_encode()
        codes = pa.array(np.zeros(len(table), np.int32))
        column = pa.DictionaryArray.from_arrays(codes, long.dictionary)
        place = table.column_names.index("task")
        table = table.set_column(place, "task", column)
    sink = pa.BufferOutputStream()
    options = {"compression": "zstd", "store_schema": False, "use_dictionary": kind == "text"}
    parts = 100 if kind == "rows" else 1
    with pq.ParquetWriter(sink, table.schema, data_page_size=1 << 30, **options) as writer:
        for _ in range(parts):
            writer.write_table(table, row_group_size=10**7)
    data = sink.getvalue().to_pybytes()
    assert pq.read_metadata(pa.BufferReader(data)).num_rows == len(table) * parts
    assert len(data) < 5 << 20
    reseal(copy, shard.sidecar.name, data)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "rows":
        with pytest.raises(DamagedError, match=shard.sidecar.name):
            Index.open(copy, device="cpu")
    else:  # it says nothing that may not be said: it is read, and no row has a copy of its own
        Index.open(copy, device="cpu").close()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 < MOST_BYTES


def files_of(path: Path) -> list[str]:
    found = [each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()]
    return sorted(name for name in found if name != "manifest.json")


def test_sealed_nonsense_in_every_file(path: Path, tmp_path: Path) -> None:
    """Of the right size and with the right digest, and yet not what belongs there."""
    expected = ask(path)
    rng = np.random.default_rng(0)
    for name in files_of(path):
        copy = Path(shutil.copytree(path, tmp_path / "copy"))
        data = (copy / name).read_bytes()
        for wrong in (
            b"\0" * len(data),
            rng.bytes(len(data)),
            data[:64] + b"\xff" * (len(data) - 64),
            b"",
        ):
            reseal(copy, name, wrong)
            assert outcome(copy, None, name) in ("answered", "refused")
        shutil.rmtree(copy)
    same(ask(path), expected)


@pytest.mark.parametrize("number", [10**400, 2**1024, -1e-9])
def test_a_number_that_no_float_holds(path: Path, tmp_path: Path, number: float) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_bytes())
    manifest.pop("xxh3")
    manifest["layers"][0]["shards"][0]["max_norm"] = number
    write_sealed(copy / "manifest.json", manifest)
    with pytest.raises(DamagedError, match=r"shards\[0\]\.max_norm"):
        Index.open(copy, device="cpu")
