"""Resumed runs: the memory is that of a run that never stopped, or nothing was touched."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import warm
from torch import nn

from dualform.engine import Index, verify_index
from dualform.index import build_index
from dualform.record import DiskSink, Recorder, ResumeError, recorder
from dualform.store import DamagedError, ExistsError, recording_cut
from dualform.store.files import write_atomic
from dualform.store.parquet import write_parquet
from dualform.store.recording import Recording

from . import reading, resumer

RESUMER = Path(resumer.__file__)
STEPS, EVERY = 60, 10
SEGMENT_BYTES = 60_000


def start(path: Path, folder: Path, pause: float, at: int | None = None) -> warm.Process:
    words = [path, folder, STEPS, EVERY, SEGMENT_BYTES, pause, *([] if at is None else [at])]
    return warm.start(RESUMER.read_text(), *words)


@pytest.fixture(autouse=True)
def _many_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "STATE_RATIO", 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The run that nothing interrupts, and its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    process = start(folder / "r", folder, 0)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert len(Recording.open(folder / "r").states()) > 5
    assert len(Recording.open(folder / "r").segments) > 5
    return folder / "r", folder


def run(path: Path, folder: Path, at: int | None, steps: int) -> None:
    """Train in this process, from a checkpoint."""
    model, optimizer = resumer.network() if at is None else resumer.load(folder, at)
    sink = DiskSink(path, segment_bytes=SEGMENT_BYTES)
    with Recorder(model, optimizer, sink, resume_at_step=at) as watching:
        for step in range(at or 0, steps):
            resumer.train(model, optimizer, watching, step)


def assert_same(path: Path, other: Path) -> None:
    """Row for row, in the ledger, states, marks, payloads and weights."""
    with Recording.open(path) as mine, Recording.open(other) as theirs:
        assert (mine.steps, mine.complete, mine.marks) == (
            theirs.steps,
            theirs.complete,
            theirs.marks,
        )
        assert mine.ledger().parameters == theirs.ledger().parameters
        for layer in theirs.manifest.layers:
            pairs = list(zip(mine.passes(layer), theirs.passes(layer), strict=True))
            for a, b in pairs:
                assert (a.step, a.rows) == (b.step, b.rows)
                for read in (reading.keys, reading.values):
                    assert np.array_equal(read(mine, layer, a), read(theirs, layer, b))
            rows = mine.read_rows([a.block for a, _ in pairs])
            assert rows.equals(theirs.read_rows([b.block for _, b in pairs]))
        assert [step for step, _ in mine.states()] == [step for step, _ in theirs.states()]
        kept = [(mine.initial(), theirs.initial()), (mine.final() or {}, theirs.final() or {})]
        kept += [(a(), b()) for (_, a), (_, b) in zip(mine.states(), theirs.states(), strict=True)]
        for a, b in kept:
            assert a.keys() == b.keys()
            assert all(np.array_equal(a[name], b[name]) for name in b)
        assert payloads(mine) == payloads(theirs)


def payloads(recording: Recording) -> list[tuple[int, bytes]]:
    """Sorted, each as often as it is there."""
    tables = [table.to_pylist() for table in recording.example_tables()]
    return sorted((row["id"], row["data"]) for table in tables for row in table)


@pytest.mark.parametrize("segments", [4, 9])
def test_killed_and_resumed_is_as_never_stopped(
    tmp_path: Path, whole: tuple[Path, Path], segments: int
) -> None:
    path = tmp_path / "r"
    process = start(path, tmp_path, 0.02)
    for _ in process.stdout:
        if len(list((path / "segments").glob("*.json"))) >= segments:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    saved = {int(file.stem) for file in tmp_path.glob("*.pt")}
    at = max(step for step in saved if step <= Recording.open(path).steps)
    assert 0 < at < STEPS
    process = start(path, tmp_path, 0, at)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert_same(path, whole[0])
    build_index(path, tmp_path / "index")
    report = verify_index(tmp_path / "index")
    assert report.ok, report
    assert report.layers[0].states > 5


@pytest.mark.parametrize("at", [10, 30, 50, 60])
def test_a_closed_recording_goes_on(tmp_path: Path, whole: tuple[Path, Path], at: int) -> None:
    path = tmp_path / "r"
    shutil.copytree(whole[0], path)
    run(path, whole[1], at, STEPS)
    assert_same(path, whole[0])


def test_from_the_start(tmp_path: Path, whole: tuple[Path, Path]) -> None:
    path = tmp_path / "r"
    shutil.copytree(whole[0], path)
    model, optimizer = resumer.network()
    with Recorder(model, optimizer, path, resume_at_step=0) as watching:
        assert Recording.open(path).steps == 0
        for step in range(STEPS):
            resumer.train(model, optimizer, watching, step)
    assert_same(path, whole[0])


def test_resumed_twice(tmp_path: Path, whole: tuple[Path, Path]) -> None:
    path = tmp_path / "r"
    shutil.copytree(whole[0], path)
    for at, steps in ((40, 47), (40, 43), (30, 50), (50, 60)):
        run(path, whole[1], at, steps)
        assert Recording.open(path).steps == steps
    assert_same(path, whole[0])
    named = {file.name for file in (path / "segments").iterdir()}
    assert not [name for name in named if "cut-40" in name]


class _Killed(BaseException):
    pass


@pytest.mark.slow
def test_a_kill_while_cutting_leaves_a_recording(
    tmp_path: Path, whole: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before every single change of the disk, read, and resumed."""
    real = {"unlink": Path.unlink, "write": recording_cut.write_atomic}
    save = recording_cut.SegmentTable.save
    left = 0

    def once(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise _Killed(name)
            return call(*args, **kwargs)

        return wrapped

    for number in range(200):
        path = tmp_path / str(number)
        shutil.copytree(whole[0], path)
        left = number
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", once("unlink", real["unlink"]))
            patch.setattr(recording_cut, "write_atomic", once("write", real["write"]))
            patch.setattr(recording_cut.SegmentTable, "save", once("save", save))
            try:
                recording_cut.cut_recording(Recording.open(path), 30)
            except _Killed:
                killed = True
            else:
                killed = False
        recording = Recording.open(path)
        assert 30 <= recording.steps <= STEPS
        assert recording.complete == (recording.final() is not None)
        assert not recording.complete or recording.steps == STEPS
        for layer in recording.manifest.layers:
            for each in recording.passes(layer):
                reading.keys(recording, layer, each)
        if not killed:
            assert recording.steps == 30
            break
        if number % 7 == 3:
            run(path, whole[1], 30, STEPS)
            assert_same(path, whole[0])
        shutil.rmtree(path)
    assert number > 20


def untouched(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def wrong_weight(model: nn.Module, optimizer: torch.optim.SGD) -> None:
    with torch.no_grad():
        next(model.parameters())[3, 4] += 0.01


def wrong_bias(model: nn.Module, optimizer: torch.optim.SGD) -> None:
    with torch.no_grad():
        list(model.parameters())[3][1] += 0.01


def no_momentum(model: nn.Module, optimizer: torch.optim.SGD) -> None:
    optimizer.state.clear()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (wrong_weight, r"parameter '0\.weight' is not .* after 30 steps \(relative difference"),
        (wrong_bias, r"parameter '2\.bias' is not"),
        (no_momentum, r"the momentum buffer of '0\.weight' is not .* difference 1\)"),
    ],
)
def test_another_checkpoint_is_refused(
    tmp_path: Path,
    whole: tuple[Path, Path],
    change: Callable[[nn.Module, torch.optim.SGD], None],
    what: str,
) -> None:
    path = tmp_path / "r"
    shutil.copytree(whole[0], path)
    before = untouched(path)
    model, optimizer = resumer.load(whole[1], 30)
    change(model, optimizer)
    with pytest.raises(ResumeError, match=what):
        Recorder(model, optimizer, path, resume_at_step=30)
    model, optimizer = resumer.load(whole[1], 30)
    for step in (29, 31):  # one step off
        with pytest.raises(ResumeError, match=r"checkpoint of that step.*Nothing was dropped"):
            Recorder(model, optimizer, path, resume_at_step=step)
    assert untouched(path) == before


@pytest.mark.parametrize("file", ["rows", "ledger"])
@pytest.mark.parametrize("content", ["none", "text", "other columns"])
def test_a_segment_that_lies_is_not_cut(
    tmp_path: Path, whole: tuple[Path, Path], file: str, content: str
) -> None:
    """Its digests are right, as somebody who means harm would have them."""
    path = Path(shutil.copytree(whole[0], tmp_path / "r"))
    recording = Recording.open(path)
    (segment,) = (
        each for each in recording.segments if each.first_step < 30 < each.first_step + each.steps
    )
    entry = getattr(segment, file)
    data = {
        "none": b"",
        "text": (path / "segments" / entry.name).read_bytes().replace(b"step", b"st\xe1p"),
        "other columns": write_parquet(pa.table({"step": [1, 2]})),
    }[content]
    other = write_atomic(path / "segments" / entry.name, data)
    replace(segment, **{file: other}).save(path / "segments", recording.manifest.layers)
    before = untouched(path)
    model, optimizer = resumer.load(whole[1], 30)
    with pytest.raises((DamagedError, ResumeError), match=entry.name):
        Recorder(model, optimizer, path, resume_at_step=30)
    assert untouched(path) == before


@pytest.mark.parametrize("step", [-1, STEPS + 1, True, 1.5])
def test_steps_that_are_not_there(tmp_path: Path, whole: tuple[Path, Path], step: int) -> None:
    model, optimizer = resumer.load(whole[1], 60)
    with pytest.raises(ResumeError, match=r"from 0 to 60 steps, the last that was committed"):
        Recorder(model, optimizer, whole[0], resume_at_step=step)


def test_what_does_not_match_the_manifest(whole: tuple[Path, Path]) -> None:
    path, folder = whole
    before = untouched(path)
    model, optimizer = resumer.load(folder, 30)
    with pytest.raises(ResumeError, match=r"its layers are \['0', '2'\], not \['2'\]"):
        Recorder(model, optimizer, path, layers=["2"], resume_at_step=30)
    with pytest.raises(ResumeError, match=r"values=True, not values=False"):
        Recorder(model, optimizer, path, values=False, resume_at_step=30)
    with pytest.raises(ResumeError, match="its optimizer was SGD, not Adam"):
        Recorder(model, torch.optim.Adam(model.parameters()), path, resume_at_step=30)
    other = nn.Sequential(nn.Linear(20, 25), nn.ReLU(), nn.Linear(25, 5))
    with pytest.raises(ResumeError, match="d_out of layer '0' was 24, not 25"):
        Recorder(other, torch.optim.SGD(other.parameters(), lr=0.1), path, resume_at_step=30)
    assert untouched(path) == before


def test_without_a_recording_or_without_asking(tmp_path: Path, whole: tuple[Path, Path]) -> None:
    model, optimizer = resumer.network()
    with pytest.raises(ResumeError, match="without resume_at_step a new one is started"):
        Recorder(model, optimizer, tmp_path / "absent", resume_at_step=0)
    with pytest.raises(ExistsError, match="resume_at_step"):
        Recorder(model, optimizer, whole[0])


def test_marks_before_the_cut_stay_and_later_ones_go(tmp_path: Path) -> None:
    """Layer "0" is edited after 5 steps, layer "2" after 25: every element, since marks by a few of
    them may come steps later."""
    path = tmp_path / "r"
    model, optimizer = resumer.network()
    with Recorder(model, optimizer, DiskSink(path, segment_bytes=SEGMENT_BYTES)) as watching:
        for step in range(40):
            if step in (5, 25):
                with torch.no_grad():
                    list(model.parameters())[0 if step == 5 else 2].add_(1.0)
            if step == 20:
                resumer.save(tmp_path, 20, model, optimizer)
            resumer.train(model, optimizer, watching, step)
    marks = Recording.open(path).marks
    assert [mark.from_step for each in marks.values() for mark in each] == [4, 24]
    model, optimizer = resumer.load(tmp_path, 20)
    with Recorder(model, optimizer, path, resume_at_step=20) as watching:
        resumer.train(model, optimizer, watching, 20)
    assert Recording.open(path).marks == {"0": marks["0"], "2": []}
    model, optimizer = resumer.network()
    with Recorder(model, optimizer, path, resume_at_step=0) as watching:
        resumer.train(model, optimizer, watching, 0)
    assert Recording.open(path).marks == {"0": [], "2": []}


def test_types_of_columns_stay(tmp_path: Path, whole: tuple[Path, Path]) -> None:
    path = tmp_path / "r"
    shutil.copytree(whole[0], path)
    model, optimizer = resumer.load(whole[1], 30)
    with (
        Recorder(model, optimizer, path, resume_at_step=30) as watching,
        pytest.raises(Exception, match="earlier calls gave int64"),
    ):
        watching.annotate(label="seven")


def test_outputs_across_the_seam(tmp_path: Path, whole: tuple[Path, Path]) -> None:
    path = tmp_path / "r"
    shutil.copytree(whole[0], path)
    run(path, whole[1], 30, STEPS)
    build_index(path, tmp_path / "index", shard_rows=200)
    queries, _ = resumer.batch(1000)
    with Index.open(tmp_path / "index", device="cpu") as index:
        for at in range(EVERY, STEPS + 1, EVERY):
            model, _ = resumer.load(whole[1], at)
            out = index.dual_output("0", queries.numpy(), at_step=at)
            layer = model[0](queries).detach().numpy()  # type: ignore[index]
            assert reading.relative(out.values, layer) < 2e-6


def test_scales_of_clipped_gradients_are_those_of_a_run_that_never_stopped(tmp_path: Path) -> None:
    """To the last digit, from the first step after the resume on."""

    def train(model: nn.Module, optimizer: torch.optim.SGD, steps: range) -> None:
        for step in steps:
            random = torch.Generator().manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(16, 700, generator=random)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 60), nn.Tanh(), nn.Linear(60, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Recorder(model, optimizer, tmp_path / "r"):
        train(model, optimizer, range(4))
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        train(model, optimizer, range(4, 8))
    shutil.copytree(tmp_path / "r", tmp_path / "copy")
    model.load_state_dict(saved)
    with Recorder(model, optimizer, tmp_path / "copy", resume_at_step=4):
        train(model, optimizer, range(4, 8))
    assert_same(tmp_path / "copy", tmp_path / "r")
