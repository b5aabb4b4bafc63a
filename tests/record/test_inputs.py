"""Convolutions whose input is recorded once: fewer bytes, and the same index, bit for bit."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.engine import Index, verify_index
from dualform.index import build_index
from dualform.record import DiskSink, Recorder
from dualform.record.buffers import Pool
from dualform.record.inputs import InputBuffer
from dualform.store import VersionError
from dualform.store.patches import Patches
from dualform.store.recording import Recording
from dualform.store.recording_format import read_sealed
from dualform.store.recording_pack import pack_recording

from .test_packed import bin_bytes, files, same_indexes

STEPS, BATCH = 6, 8

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 5, stride=2, padding=3, dilation=2, padding_mode="replicate"),
            nn.ReLU(),
            nn.Conv1d(4, 2, 3, padding="same"),
        ),
        (3, 20),
    ),
    "2d": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
            nn.Tanh(),
            nn.Conv2d(5, 6, 3, padding=1, padding_mode="reflect", bias=False),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=(1, 2), padding_mode="circular", groups=3),
            nn.Conv2d(6, 4, 1),
        ),
        (2, 9, 8),
    ),
    "3d": (
        lambda: nn.Sequential(
            nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=(0, 1, 0)),
            nn.Tanh(),
            nn.Conv3d(3, 3, 3, padding=1, padding_mode="circular"),
        ),
        (2, 4, 5, 3),
    ),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}


def inputs(size: tuple[int, ...], step: int, batch: int = BATCH) -> torch.Tensor:
    return torch.randn(batch, *size, generator=torch.Generator().manual_seed(step))


def record(
    path: Path,
    which: str = "2d",
    optimizer: str = "sgd",
    annotate: Callable[[int], dict[str, Any]] = lambda step: {"label": np.arange(BATCH) % 3},
    dtype: torch.dtype = torch.float32,
    batch_of: Callable[[int], int] = lambda step: step,
    start: int = 0,
    **options: Any,
) -> Path:
    torch.manual_seed(0)
    make, size = MODELS[which]
    model = make()
    stepper = OPTIMIZERS[optimizer](model)
    checkpoint = path.with_suffix(".pt")
    if start:
        for part, state in zip((model, stepper), torch.load(checkpoint), strict=True):
            part.load_state_dict(state)
    sink = DiskSink(path, segment_bytes=options.pop("segment_bytes", 1 << 30))
    with Recorder(model, stepper, sink, **options) as recorder:
        for step in range(start, STEPS):
            if step == 3:
                torch.save([model.state_dict(), stepper.state_dict()], checkpoint)
            recorder.annotate(**annotate(step))
            stepper.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                out = model(inputs(size, batch_of(step)))
            out.float().square().mean().backward()
            stepper.step()
    return path


@contextmanager
def unfolded() -> Iterator[None]:
    """Patches are recorded, as before inputs were."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Patches, "pays", False)
        yield


def cut(path: Path) -> dict[str, bool]:
    """Which layers' keys are cut from inputs."""
    with Recording.open(path) as recording:
        found = {
            name: {item.keys.patches is not None for item in recording.passes(name)}
            for name in recording.manifest.layers
        }
    return {name: kinds == {True} for name, kinds in found.items()}


def key_bytes(path: Path) -> int:
    """What keys take, without the padding to whole pages."""
    with Recording.open(path) as recording:
        layers = recording.manifest.layers
        return sum(item.keys.stored for name in layers for item in recording.passes(name))


def both(folder: Path, **options: Any) -> tuple[Path, Path]:
    """A recording of inputs and one of patches, and their indexes beside them."""
    once = record(folder / "once", **options)
    with unfolded():
        patches = record(folder / "patches", **options)
    for path in (once, patches):
        build_index(path, path.with_name(f"{path.name}-index"), parts=("label",))
    return once, patches


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("which", MODELS)
def test_the_index_is_the_same_bit_for_bit(tmp_path: Path, which: str, optimizer: str) -> None:
    once, patches = both(tmp_path, which=which, optimizer=optimizer)
    assert cut(once) == {name: name != "5" for name in cut(once)}  # which is 1 by 1
    assert not any(cut(patches).values())
    assert bin_bytes(once) < bin_bytes(patches)
    assert key_bytes(once) < 0.6 * key_bytes(patches)
    same_indexes(tmp_path / "once-index", tmp_path / "patches-index")
    assert verify_index(tmp_path / "once-index").ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    once, _ = both(tmp_path, dtype=dtype)
    with Recording.open(once) as recording:
        assert {item.keys.encoding for item in recording.passes("2")} == {str(dtype)[6:]}
    found = [files(tmp_path / f"{name}-index") for name in ("once", "patches")]
    for each in found:  # which says at what step rounding was noticed, by random directions
        del each["manifest.json"]
    assert found[0] == found[1]


MASKS: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, Any]], bool]] = {
    "rows= of examples": ({}, lambda step: {"rows": np.arange(BATCH) % 3 > 0}, True),
    "rows= of one layer's places": (
        {"layers": ["4"]},
        lambda step: {"rows": np.arange(BATCH * 3 * 40).reshape(BATCH, -1) % 5 == step % 5},
        False,
    ),
    "sample=": ({"sample": 0.5}, lambda step: {}, True),
    "every=": ({"every": 2}, lambda step: {}, True),
    "zero_rows=": ({"zero_rows": False}, lambda step: {}, True),
}


@pytest.mark.parametrize("mask", MASKS)
def test_rows_that_are_left_out(tmp_path: Path, mask: str) -> None:
    options, annotate, whole = MASKS[mask]

    def said(step: int) -> dict[str, Any]:
        return {"label": np.arange(BATCH) % 3, "example": np.arange(BATCH), **annotate(step)}

    once, _ = both(tmp_path, annotate=said, **options)
    assert cut(once)["4"] == whole
    same_indexes(tmp_path / "once-index", tmp_path / "patches-index")
    with Recording.open(once) as recording:
        item = recording.passes("4")[0]
        keys = np.empty((item.rows, 18), np.float32)
        recording.read_keys(item, keys)
        assert np.array_equal(keys, recording.stored_keys(item))
        assert np.array_equal(keys[3:40], recording.stored_keys(item, slice(3, 40)))


def test_without_a_batch(tmp_path: Path) -> None:
    """An input of one example has rows of one axis."""
    for path in (tmp_path / "once", tmp_path / "patches"):
        torch.manual_seed(0)
        model = nn.Conv1d(2, 3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.MonkeyPatch.context() as patch:
            if path.name == "patches":
                patch.setattr(Patches, "pays", False)
            with Recorder(model, optimizer, path) as recorder:
                recorder.annotate(label=3)
                model(inputs((2, 30), 0)[0]).square().sum().backward()
                optimizer.step()
        build_index(path, path.with_name(f"{path.name}-index"))
    assert cut(tmp_path / "once") == {"": True}
    same_indexes(tmp_path / "once-index", tmp_path / "patches-index")


@pytest.mark.parametrize(("before", "after"), [(True, True), (False, True), (True, False)])
def test_resumed(tmp_path: Path, before: bool, after: bool) -> None:
    """Within a segment, from a recording of patches and to one."""
    path = tmp_path / "r"
    for start, once in ((0, before), (3, after)):
        with pytest.MonkeyPatch.context() as patch:
            if not once:
                patch.setattr(Patches, "pays", False)
            record(path, start=start, **({"resume_at_step": start} if start else {}))
    with Recording.open(path) as recording:
        kinds = [item.keys.patches is not None for item in recording.passes("2")]
        assert kinds == [before] * 3 + [after] * 3
        assert recording.manifest.patches
    build_index(path, tmp_path / "index")
    build_index(record(tmp_path / "plain"), tmp_path / "plain-index")
    same_indexes(tmp_path / "index", tmp_path / "plain-index")


def test_packed(tmp_path: Path) -> None:
    """Inputs are packed as rows are; those of the first layer come again, as its examples do."""
    options: dict[str, Any] = {"batch_of": lambda step: step % 2, "which": "wide"}
    MODELS["wide"] = (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3)),
        (3, 24, 24),
    )
    try:
        once = record(tmp_path / "once", segment_bytes=300_000, **options)
        packed = record(tmp_path / "packed", pack=True, segment_bytes=200_000, **options)
    finally:
        del MODELS["wide"]
    later = Path(shutil.copytree(once, tmp_path / "later"))
    pack_recording(later)
    with Recording.open(packed) as recording:
        assert {item.keys.packing for item in recording.passes("0")} >= {"again"}
        assert {item.keys.packing for item in recording.passes("2")} <= {"planes", "masked"}
        assert len(recording.segments) > 1
    assert all(cut(packed).values())
    assert all(cut(later).values())
    assert bin_bytes(packed) < 0.8 * bin_bytes(once)
    for path in (once, packed, later):
        build_index(path, path.with_name(f"{path.name}-index"))
    same_indexes(tmp_path / "once-index", tmp_path / "packed-index")
    same_indexes(tmp_path / "once-index", tmp_path / "later-index")


class Branches(nn.Module):
    """Two kernels see one input, as in an Inception block."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 5, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(x) + self.large(x)


def test_layers_that_see_one_input_share_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "r"
    with Recorder(model, optimizer, path) as recorder:
        recorder.annotate(label=1)
        x = inputs((3, 12, 12), 0)
        model(x).square().mean().backward()
        optimizer.step()

    def check() -> None:
        with Recording.open(path) as recording:
            small, large = (recording.passes(name)[0] for name in ("small", "large"))
            assert small.keys.offset == large.keys.offset
            for item, layer in ((small, model.small), (large, model.large)):
                rows = nn.functional.unfold(x, layer.kernel_size, 1, layer.padding).mT.flatten(0, 1)
                assert np.array_equal(recording.stored_keys(item), rows.numpy())

    check()
    pack_recording(path)
    check()


def test_the_version_says_that_keys_are_cut(tmp_path: Path, monkeypatch: Any) -> None:
    """An older dualform goes on reading what is not, and refuses the rest in words."""
    once = record(tmp_path / "once")
    with unfolded():
        patches = record(tmp_path / "patches")
    versions = [json.loads((p / "manifest.json").read_text())["version"] for p in (once, patches)]
    assert versions == [5, 2]
    assert "patches" not in read_sealed(patches / "segments" / "000000.json")
    monkeypatch.setattr("dualform.store.recording_format.VERSION", 4)
    with pytest.raises(VersionError, match="version 5; this dualform reads up to version 4"):
        Recording.open(once)
    Recording.open(patches)


def test_training_is_the_same(tmp_path: Path) -> None:
    make, size = MODELS["2d"]
    torch.manual_seed(0)
    plain = make()
    recorded = copy.deepcopy(plain)
    for model in (plain, recorded):
        optimizer = OPTIMIZERS["adamw"](model)
        recorder = Recorder(model, optimizer, tmp_path / "r") if model is recorded else None
        for step in range(3):
            optimizer.zero_grad()
            model(inputs(size, step)).square().mean().backward()
            optimizer.step()
        if recorder is not None:
            recorder.close()
    for one, other in zip(plain.parameters(), recorded.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("few", [True, False])
def test_a_wrong_gradient_is_found(tmp_path: Path, few: bool, monkeypatch: Any) -> None:
    """The check may multiply inputs, not patches; it must see as much."""
    monkeypatch.setattr("dualform.record.inputs._FEW_BYTES", 1 << 30 if few else 0)
    make, size = MODELS["2d"]
    torch.manual_seed(0)
    model = make()
    optimizer = OPTIMIZERS["sgd"](model)
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        for step in range(3):
            recorder.annotate(label=0)
            optimizer.zero_grad()
            model(inputs(size, step)).square().mean().backward()
            if step == 1:
                grad = model[2].weight.grad
                grad[1, 2, 1, 1] += 0.01 * grad.norm()
            optimizer.step()
    with Recording.open(tmp_path / "r") as recording:
        marked = {name: marks for name, marks in recording.marks.items() if marks}
    assert list(marked) == ["2"]
    assert marked["2"][0].from_step == 1


@pytest.mark.parametrize(
    "patches",
    [
        Patches(4, (9,), (3,), (2,), (3,), ((4, 1),), "zeros", 2),
        Patches(6, (7, 5), (3, 2), (2, 1), (1, 2), ((1, 2), (2, 0)), "reflect", 3),
        Patches(2, (4, 5, 3), (2, 2, 2), (2, 1, 1), (1, 1, 1), ((1, 1),) * 3, "circular", 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("few", [True, False])
def test_products_with_all_patches(patches: Patches, few: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr("dualform.record.inputs._FEW_BYTES", 1 << 30 if few else 0)
    buffer = InputBuffer(Pool(0), 3, patches, torch.float32)
    rng = np.random.default_rng(0)
    buffer.copy(torch.from_numpy(rng.standard_normal((3, patches.channels, *patches.size))).float())
    v = rng.standard_normal(patches.d_in).astype(np.float32)
    found = np.empty(buffer.rows)
    buffer.dots((v, slice(None), found))
    keys = buffer.array.astype(np.float64)
    scale = np.linalg.norm(keys) * np.linalg.norm(v)
    np.testing.assert_allclose(found, keys @ v, atol=1e-6 * scale)
    assert buffer.square() == pytest.approx((keys**2).sum())


def test_answers_are_the_layer_s(tmp_path: Path) -> None:
    """Outputs of an index made from inputs, against the trained layer."""
    make, size = MODELS["2d"]
    torch.manual_seed(0)
    model = make()
    optimizer = OPTIMIZERS["sgd"](model)
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        for step in range(4):
            recorder.annotate(label=np.arange(BATCH) % 3)
            optimizer.zero_grad()
            model(inputs(size, step)).square().mean().backward()
            optimizer.step()
    build_index(tmp_path / "r", tmp_path / "index")
    x = torch.tanh(model[0](inputs(size, 9))).detach()
    padded = nn.functional.pad(x, (1, 1, 1, 1), "reflect")
    queries = nn.functional.unfold(padded, 3).mT.flatten(0, 1)
    expected = model[2](x).detach().flatten(2).mT.flatten(0, 1).double()
    with Index.open(tmp_path / "index", device="cpu") as index:
        found = torch.from_numpy(index.dual_output("2", queries.numpy()).values).double()
    assert float((found - expected).norm() / expected.norm()) < 1e-5
