"""Packed recordings: fewer bytes, and the same index, bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
from torch import nn

from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import DiskSink, OptionError, Recorder
from dualform.store import DamagedError
from dualform.store.files import write_sealed
from dualform.store.packing import PLAIN, PLANES, ZSTD
from dualform.store.recording import Recording
from dualform.store.recording_again import AGAIN
from dualform.store.recording_format import read_sealed
from dualform.store.recording_masks import MASKED

STEPS, ROWS, WIDTH, INNER = 6, 128, 100, 96


def network() -> tuple[nn.Sequential, torch.optim.SGD]:
    """With ReLU, whose keys and values are zeros in part."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, INNER), nn.ReLU(), nn.Linear(INNER, 3)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def inputs(step: int) -> torch.Tensor:
    """Rows of stretches that come again, each of them noise."""
    random = torch.Generator().manual_seed(step)
    parts = torch.randn(10, WIDTH // 5, generator=random)
    return parts[torch.randint(10, (ROWS, 5), generator=random)].reshape(ROWS, WIDTH)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Recorder, at: int, dtype: Any
) -> None:
    recorder.annotate(label=np.arange(ROWS) % 3)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        loss = model(inputs(at)).float().square().mean()
    loss.backward()
    optimizer.step()


def record(path: Path, pack: bool, dtype: Any = torch.float32) -> Path:
    model, optimizer = network()
    with Recorder(model, optimizer, DiskSink(path, segment_bytes=400_000), pack=pack) as recorder:
        for at in range(STEPS):
            step(model, optimizer, recorder, at, dtype)
    return path


def files(index: Path) -> dict[str, bytes]:
    """All that an index holds."""
    return {
        f.relative_to(index).as_posix(): f.read_bytes() for f in index.rglob("*") if f.is_file()
    }


def same_indexes(one: Path, other: Path) -> None:
    """Bit for bit, the manifest's own words on where it is from apart."""
    a, b = files(one), files(other)
    manifests = [json.loads(found.pop("manifest.json")) for found in (a, b)]
    assert a == b
    for manifest in manifests:
        for name in ("xxh3", "source", "id", "created"):
            manifest.pop(name, None)
    assert manifests[0] == manifests[1]


def packings(path: Path) -> dict[tuple[str, str], set[str]]:
    with Recording.open(path) as recording:
        return {
            (layer, side): {getattr(item, side).packing for item in recording.passes(layer)}
            for layer in recording.manifest.layers
            for side in ("keys", "values")
        }


def bin_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("segments/*.bin"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("plain") / "r", pack=False)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("packed") / "r", pack=True)


def test_each_column_goes_its_own_way(plain: Path, packed: Path) -> None:
    assert set().union(*packings(plain).values()) == {PLAIN}
    found = packings(packed)
    assert found["0", "keys"] == {ZSTD}  # stretches that come again
    for before, behind in (("0", "2"), ("2", "4")):
        assert found[before, "values"] == {PLANES}  # a share of zeros
        assert found[behind, "keys"] == {MASKED}  # the same
    assert found["4", "values"] == {PLAIN}  # 1,536 bytes
    assert bin_bytes(packed) < 0.55 * bin_bytes(plain)
    assert len(list(packed.glob("segments/*.bin"))) > 1


def test_the_version_says_that_records_are_packed(plain: Path, packed: Path) -> None:
    """An older dualform goes on reading what is not."""
    versions = [json.loads((p / "manifest.json").read_text())["version"] for p in (plain, packed)]
    assert versions == [2, 4]
    table = read_sealed(plain / "segments" / "000000.json")
    assert not [name for name in table["passes"] if "packing" in name or name.endswith("_bytes")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_index_is_the_same_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    one, other = (record(tmp_path / str(pack), pack, dtype) for pack in (False, True))
    assert bin_bytes(other) < 0.6 * bin_bytes(one)
    for path in (one, other):
        build_index(path, path.with_name(f"{path.name}-index"), parts=("label",))
    same_indexes(tmp_path / "False-index", tmp_path / "True-index")
    if dtype is torch.float32:
        assert verify_index(tmp_path / "True-index").ok


def test_places_of_an_embedding(tmp_path: Path) -> None:
    """Keys with a single 1, and values of a row each: packed like others."""
    sizes = []
    for pack in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = tmp_path / str(pack)
        with Recorder(model, optimizer, path, pack=pack):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randint(0, 50, (5000,))).square().mean().backward()
                optimizer.step()
        sizes.append(bin_bytes(path))
        build_index(path, tmp_path / f"{pack}-index")
    assert packings(tmp_path / "True")["0", "keys"] == {PLANES}
    assert sizes[1] < sizes[0]
    same_indexes(tmp_path / "False-index", tmp_path / "True-index")


@pytest.mark.parametrize(("before", "after"), [(True, True), (False, True), (True, False)])
def test_resumed(tmp_path: Path, plain: Path, before: bool, after: bool) -> None:
    """Packed before, after, or both; cut in the middle of a segment."""
    model, optimizer = network()
    path = tmp_path / "r"
    with Recorder(model, optimizer, path, pack=before) as recorder:
        for at in range(STEPS):
            if at == 3:
                saved = [
                    torch.save(part.state_dict(), tmp_path / f"{i}.pt")
                    for i, part in enumerate((model, optimizer))
                ]
                assert saved
            step(model, optimizer, recorder, at, torch.float32)
    model, optimizer = network()
    for i, part in enumerate((model, optimizer)):
        part.load_state_dict(torch.load(tmp_path / f"{i}.pt"))
    with Recorder(model, optimizer, path, resume_at_step=3, pack=after) as recorder:
        for at in range(3, STEPS):
            step(model, optimizer, recorder, at, torch.float32)
    assert Recording.open(path).manifest.packed
    of_segments = [
        {item.keys.packing for item in recording.passes("2") if item.segment == number}
        for recording in [Recording.open(path)]
        for number in range(len(recording.segments))
    ]
    assert of_segments == [{MASKED} if pack else {PLAIN} for pack in (before, after)]
    build_index(path, tmp_path / "index")
    build_index(plain, tmp_path / "plain-index")
    same_indexes(tmp_path / "index", tmp_path / "plain-index")


EXAMPLES, EPOCHS = 300, 4


def epochs(path: Path, pack: bool, steps: range, resume_at_step: int | None = None) -> None:
    """Every example once an epoch, shuffled; the checkpoint of step 7 beside the recording."""
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(EXAMPLES) for _ in range(EPOCHS)]).reshape(-1, 60)
    examples = torch.randn(EXAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    model, optimizer = network()
    saved = path.with_suffix(".pt")
    if resume_at_step is not None:
        for part, state in zip((model, optimizer), torch.load(saved), strict=True):
            part.load_state_dict(state)
    sink = DiskSink(path, segment_bytes=200_000)
    with Recorder(model, optimizer, sink, pack=pack, resume_at_step=resume_at_step) as recorder:
        for at in steps:
            if at == 7:
                torch.save([model.state_dict(), optimizer.state_dict()], saved)
            recorder.annotate(example=order[at], label=order[at] % 3)
            optimizer.zero_grad()
            model(examples[torch.from_numpy(order[at])]).square().mean().backward()
            optimizer.step()


def test_keys_that_come_again_every_epoch_are_stored_once(tmp_path: Path) -> None:
    """Those of the first layer: the others' depend on trained weights, and are not looked for."""
    steps = range(EPOCHS * EXAMPLES // 60)
    for pack in (False, True):
        epochs(tmp_path / str(pack), pack, steps)
        build_index(tmp_path / str(pack), tmp_path / f"{pack}-index", parts=("label",))
    found = packings(tmp_path / "True")
    assert found["0", "keys"] == {AGAIN, PLANES}
    assert AGAIN not in found["2", "keys"] | found["4", "keys"]
    with Recording.open(tmp_path / "True") as recording:
        assert len(recording.segments) > 2
        stored = sum(item.keys.stored for item in recording.passes("0"))
        numbers = EXAMPLES * WIDTH * 4
        assert stored < 0.9 * numbers + 16 * EXAMPLES * EPOCHS
    same_indexes(tmp_path / "False-index", tmp_path / "True-index")
    # Cut in the second epoch, and on from there: what was kept is referred to by none that is not.
    epochs(tmp_path / "True", True, range(7, steps.stop), resume_at_step=7)
    build_index(tmp_path / "True", tmp_path / "resumed", parts=("label",))
    same_indexes(tmp_path / "False-index", tmp_path / "resumed")


TRAINER = """
import sys, time
from pathlib import Path
import numpy as np, torch
from torch import nn
from dualform.record import DiskSink, Recorder
path, steps = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(100, 96), nn.ReLU(), nn.Linear(96, 90))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sink = DiskSink(path, segment_bytes=100_000)
with Recorder(model, optimizer, sink, pack=True) as recorder:
    for step in range(steps):
        x = torch.relu(torch.randn(64, 100, generator=torch.Generator().manual_seed(step)))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        print(step, flush=True)
        time.sleep(0.01)
"""


def test_after_kill_9_what_was_committed_is_whole(tmp_path: Path) -> None:
    process = warm.start(TRAINER, tmp_path / "r", 200)
    for _ in process.stdout:
        if len(list((tmp_path / "r" / "segments").glob("*.json"))) >= 3:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    recording = Recording.open(tmp_path / "r")
    assert not recording.complete
    assert 0 < recording.steps < 200
    for item in recording.passes("0"):
        assert item.keys.packing == PLANES
        keys = np.empty((64, 100), np.float32)
        recording.read_keys(item, keys)
        x = torch.relu(torch.randn(64, 100, generator=torch.Generator().manual_seed(item.step)))
        assert np.array_equal(keys, x.numpy())
    build_index(tmp_path / "r", tmp_path / "index")


def read_all(path: Path) -> None:
    with Recording.open(path) as recording:
        for name in recording.manifest.layers:
            for item in recording.passes(name):
                recording.stored_keys(item)
                recording.stored_values(item)


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, packed: Path) -> None:
    """Bytes of packed records are all under the digest of what they hold, one way or the other."""
    path = Path(shutil.copytree(packed, tmp_path / "r"))
    file = path / "segments" / "000000.bin"
    original = file.read_bytes()
    with Recording.open(path) as recording:
        spans = [span for item in recording.passes("2")[:1] for span in (item.keys, item.values)]
        spans.append(recording.passes("0")[0].keys)
    rng = np.random.default_rng(0)
    for span in spans:
        assert span is not None
        for place in [0, 9, 57, span.packed - 1, *rng.integers(0, span.packed, 8).tolist()]:
            damaged = bytearray(original)
            damaged[span.offset + place] ^= 1 << int(rng.integers(8))
            file.write_bytes(bytes(damaged))
            with pytest.raises(
                DamagedError, match=rf"000000\.bin: the record at byte {span.offset:,}"
            ):
                read_all(path)
    file.write_bytes(original[:-4096])
    with pytest.raises(DamagedError, match=r"000000\.bin"):
        read_all(path)


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(table: dict[str, Any]) -> None:
        table["passes"][name][0] = value

    return change


def more_rows(table: dict[str, Any]) -> None:
    """A table that makes a few kB into terabytes."""
    rows = table["blocks"]["rows"]
    rows[0] = table["passes"]["rows"][0] = 2**40
    for at, block in enumerate(table["passes"]["block"]):
        if block == table["blocks"]["first"]:
            table["passes"]["rows"][at] = 2**40


LIES = {
    "an unknown packing": (_set("keys_packing", "lz4"), "keys_packing"),
    "no packing": (_set("keys_packing", None), "keys_packing"),
    "plain, of fewer bytes": (_set("keys_packing", "plain"), "keys_bytes"),
    "more bytes than unpacked": (_set("keys_bytes", 10**9), "keys_bytes"),
    "behind the end": (_set("keys_offset", 2**40), "keys_offset"),
    "too many rows": (more_rows, "too many to be packed"),
    "a column less": (lambda table: table["passes"].pop("values_bytes"), "values_bytes"),
    "a shorter column": (lambda table: table["passes"]["values_packing"].pop(), "values_packing"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_table_that_lies(tmp_path: Path, packed: Path, lie: str) -> None:
    path = Path(shutil.copytree(packed, tmp_path / "r"))
    table = read_sealed(path / "segments" / "000000.json")
    table.pop("xxh3")
    change, field = LIES[lie]
    change(table)
    write_sealed(path / "segments" / "000000.json", table)
    with pytest.raises(DamagedError, match=rf"000000\.json.*{field}"):
        Recording.open(path)


def test_bytes_that_are_not_the_records(tmp_path: Path, packed: Path) -> None:
    """A size or a packing that could be, and is not."""
    path = Path(shutil.copytree(packed, tmp_path / "r"))
    original = read_sealed(path / "segments" / "000000.json")
    original.pop("xxh3")
    for change in (_set("keys_bytes", 60), _set("keys_packing", PLANES), _set("keys_offset", 1)):
        table = json.loads(json.dumps(original))
        change(table)
        write_sealed(path / "segments" / "000000.json", table)
        with pytest.raises(DamagedError, match=r"000000\.bin: the record at byte"):
            read_all(path)


class Nowhere:
    """A sink that keeps nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def test_what_pack_may_be(tmp_path: Path) -> None:
    model, optimizer = network()
    with pytest.raises(OptionError, match="pack='zstd': True packs"):
        Recorder(model, optimizer, tmp_path / "r", pack="zstd")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="on disk"):
        Recorder(model, optimizer, Nowhere(), pack=True)  # type: ignore[arg-type]
    assert not (tmp_path / "r").exists()
