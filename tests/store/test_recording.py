"""The recording on disk: what the reader accepts, and what it says of everything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dualform.optimizers import SGDSettings
from dualform.store import DamagedError, ExistsError, NotFoundError, VersionError
from dualform.store.ledger import InexactMark, LedgerRow
from dualform.store.recording import LayerSpec, Recording, RecordingManifest
from dualform.store.recording_format import read_sealed, write_sealed
from dualform.store.recording_writer import Examples, Record, RecordingWriter, StepPass
from dualform.store.row_metadata import Block
from dualform.store.segment_table import ALIGNMENT

LAYERS = {
    "a": LayerSpec("a", "linear", 3, 2, "a.weight", "a.bias", "float32"),
    "b": LayerSpec("b", "linear", 1100, 1, "b.weight", None, "float32"),
}


def record(array: np.ndarray) -> Record:
    size = -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    aligned = memory[start : start + size]
    aligned[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    return Record(memoryview(aligned), array.nbytes)


def data(layer: str, step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, len(layer), LAYERS[layer].d_in])
    spec = LAYERS[layer]
    return (
        rng.standard_normal((rows, spec.d_in), np.float32),
        rng.standard_normal((rows, spec.d_out), np.float32),
    )


def write(path: Path, steps: int = 5, close: bool = True, every: int = 2) -> None:
    """Two layers in the same passes of step + 1 rows; commits every two steps."""
    writer = RecordingWriter(path, RecordingManifest("SGD", LAYERS, True, "test"))
    writer.write_initial({"a.weight": np.ones((2, 3), np.float32)})
    for step in range(steps):
        rows = step + 1
        passes = []
        for name in LAYERS:
            keys, values = data(name, step, rows)
            passes.append(StepPass(name, rows, 0, record(keys), record(values)))
        columns = {"label": np.arange(rows)} if step else {}
        if step >= 3:
            columns["task"] = np.array(["late"], object)
        ledger = [LedgerRow(step, p, SGDSettings(0.1)) for p in ("a.weight", "a.bias", "b.weight")]
        marks = [("b", InexactMark(step, "why"))] if step == 3 else []
        writer.append(passes, [Block(step, (rows,), columns)], ledger, marks)
        if step == 1:
            writer.add_examples(Examples(["x"], ["text"], [b"hello"]))
        writer.flush()
        if step % every == every - 1:
            writer.commit()
    if close:
        writer.close({"a.weight": np.zeros((2, 3), np.float32)})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "r")
    return tmp_path / "r"


def read_all(path: Path) -> None:
    recording = Recording.open(path)
    recording.ledger()
    recording.initial()
    recording.final()
    list(recording.example_tables())
    for name, spec in recording.manifest.layers.items():
        for item in recording.passes(name):
            recording.read_keys(item, np.empty((item.rows, spec.d_in), np.float32))
            recording.read_values(item, np.empty((item.rows, spec.d_out), np.float32))
            recording.read_rows([item.block])


def test_reads_what_was_written(path: Path) -> None:
    with Recording.open(str(path)) as recording:
        assert (recording.steps, recording.complete) == (5, True)
        assert recording.manifest == RecordingManifest("SGD", LAYERS, True, "test")
        assert recording.marks == {"a": [], "b": [InexactMark(3, "why")]}
        assert recording.schema.names == ["step", "slot", "position", "label", "task"]
        for name in LAYERS:
            assert recording.rows(name) == 15
            for step, item in enumerate(recording.passes(name)):
                keys, values = data(name, step, step + 1)
                assert (item.step, item.rows, item.block) == (step, step + 1, step)
                assert item.keys.offset % ALIGNMENT == 0
                out = np.empty_like(keys)
                recording.read_keys(item, out)
                assert np.array_equal(out, keys)
                raw = bytearray(values.nbytes)
                recording.read_values(item, memoryview(raw))
                assert bytes(raw) == values.tobytes()
        assert [recording.block_rows(block) for block in range(5)] == [1, 2, 3, 4, 5]
        table = recording.read_rows([4, 0, 3])
        assert table.schema == recording.schema
        assert table.to_pydict() == {
            "step": [4] * 5 + [0] + [3] * 4,
            "slot": [0, 1, 2, 3, 4, 0, 0, 1, 2, 3],
            "position": [None] * 10,
            "label": [0, 1, 2, 3, 4, None, 0, 1, 2, 3],
            "task": ["late"] * 5 + [None] + ["late"] * 4,
        }
        assert recording.read_rows([]).num_rows == 0
        assert (recording.initial()["a.weight"] == 1).all()
        final = recording.final()
        assert final is not None
        assert (final["a.weight"] == 0).all()
        assert [t.to_pylist() for t in recording.example_tables()] == [
            [{"id": "x", "kind": "text", "data": b"hello"}]
        ]
        assert recording.ledger().parameters["b.weight"][4] == LedgerRow(
            4, "b.weight", SGDSettings(0.1)
        )


def test_without_an_orderly_end(tmp_path: Path) -> None:
    """Two segments are committed, the fifth step is not; its files are there and ignored."""
    write(tmp_path / "r", close=False)
    assert (tmp_path / "r/segments/000002.bin").exists()
    recording = Recording.open(tmp_path / "r")
    assert (recording.steps, recording.complete, recording.final()) == (4, False, None)
    read_all(tmp_path / "r")


def test_nothing_committed(tmp_path: Path) -> None:
    write(tmp_path / "r", steps=1, close=False)
    recording = Recording.open(tmp_path / "r")
    assert (recording.steps, recording.complete) == (0, False)
    with pytest.raises(NotFoundError, match="nothing was committed"):
        recording.initial()


def test_closed_without_a_step(tmp_path: Path) -> None:
    write(tmp_path / "r", steps=0)
    recording = Recording.open(tmp_path / "r")
    assert (recording.steps, recording.complete) == (0, True)
    assert recording.ledger().steps == 0
    assert (recording.initial()["a.weight"] == 1).all()


def test_out_of_another_size(path: Path) -> None:
    recording = Recording.open(path)
    with pytest.raises(ValueError, match="12 bytes"):
        recording.read_keys(recording.passes("a")[0], np.empty(4, np.float32))


def test_never_overwrites(path: Path) -> None:
    with pytest.raises(ExistsError, match="another path"):
        RecordingWriter(path, RecordingManifest("SGD", LAYERS, True, "test"))


def test_not_a_recording(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="Recorder"):
        Recording.open(tmp_path)
    with pytest.raises(NotFoundError, match="Recorder"):
        Recording.open(tmp_path / "absent")
    write_sealed(tmp_path / "manifest.json", {"format": "dualform-index", "version": 1})
    with pytest.raises(NotFoundError, match="dualform-index"):
        Recording.open(tmp_path)


def test_a_newer_version(path: Path) -> None:
    manifest = read_sealed(path / "manifest.json")
    manifest.pop("xxh3")
    write_sealed(path / "manifest.json", {**manifest, "version": 6, "layers": "unknown"})
    with pytest.raises(VersionError, match=r"version 6.*up to version 5: upgrade"):
        Recording.open(path)


FILES = [
    "manifest.json",
    "initial.safetensors",
    "final.safetensors",
    "closed.json",
    "examples/000000.parquet",
    "segments/000000.bin",
    "segments/000001.rows.parquet",
    "segments/000001.ledger.parquet",
    "segments/000001.json",
]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere_is_found(path: Path, name: str) -> None:
    """Every byte that counts is under a digest; padding between records is not looked at."""
    original = (path / name).read_bytes()
    size = 12 if name.endswith(".bin") else len(original)  # the first record, 3 float32
    for position in {0, 1, size // 3, size // 2, size - 2, size - 1}:
        damaged = bytearray(original)
        damaged[position] ^= 0x10
        (path / name).write_bytes(bytes(damaged))
        if bytes(damaged).strip() == original.strip():
            continue
        with pytest.raises((DamagedError, NotFoundError)) as caught:
            read_all(path)
        assert name.split("/")[-1] in str(caught.value) or "not a recording" in str(caught.value)


@pytest.mark.parametrize("damage", ["truncated", "longer", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_truncated_longer_or_missing_files(path: Path, name: str, damage: str) -> None:
    file = path / name
    if damage == "missing":
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(content[:-2] if damage == "truncated" else content + b"xx")
    if (name, damage) == ("closed.json", "missing"):
        assert not Recording.open(path).complete  # as after a crash at the very end
        return
    with pytest.raises(
        NotFoundError if name == "manifest.json" and damage == "missing" else DamagedError
    ) as caught:
        read_all(path)
    assert file.name in str(caught.value)


def edit_passes(segment: dict[str, dict[str, list[int]]]) -> None:
    segment["passes"]["block"] = segment["passes"]["block"][:-1]


def edit_layer(segment: dict[str, dict[str, list[int]]]) -> None:
    segment["passes"]["layer"][0] = 7


def edit_blocks(segment: dict[str, dict[str, int]]) -> None:
    segment["blocks"]["first"] = 9


def drop_columns(segment: dict[str, object]) -> None:
    del segment["columns"]


@pytest.mark.parametrize("edit", [edit_passes, edit_layer, edit_blocks, drop_columns])
def test_a_segment_that_contradicts_itself(
    path: Path, edit: Callable[[dict[str, object]], None]
) -> None:
    """Sealed again after the edit, so that only its content is wrong."""
    file = path / "segments/000001.json"
    segment = read_sealed(file)
    segment.pop("xxh3")
    edit(segment)
    write_sealed(file, segment)
    with pytest.raises(DamagedError, match=r"000001\.json"):
        Recording.open(path)


def test_a_segment_that_is_missing_in_the_middle(path: Path) -> None:
    (path / "segments/000001.json").unlink()
    with pytest.raises(DamagedError, match=r"000001\.json: missing"):
        Recording.open(path)


def test_manifest_is_plain_json(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == "dualform-recording"
    assert manifest["layers"][0]["name"] == "a"
