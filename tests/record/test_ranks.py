"""Data-parallel training in two real processes: their recordings become one exact index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
from torch import nn

from dualform.cli.main import main
from dualform.client import Client, capture_queries, dual_form
from dualform.engine import verify_index
from dualform.index import BuildError, build_index
from dualform.record import Recorder, ResumeError
from dualform.replay import FirstRun, ReplayError
from dualform.store import NotFoundError, RanksError
from dualform.store.recording import Recording
from dualform.store.recording_cut import cut_recording
from dualform.store.recording_format import RecordingManifest
from dualform.store.recording_ranks import open_recordings

from . import ranks_trainer as trainer

WORLD = 2
EXACT = [
    name
    for name in trainer.SCENARIOS
    if name not in ("hook", "another use", "clipped by value", "alike")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both ranks trained all scenarios."""
    path = tmp_path_factory.mktemp("ranks")
    program = ["-m", "tests.record.ranks_trainer"]
    ranks = [warm.start("python", *program, rank, WORLD, path) for rank in range(WORLD)]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * WORLD, said
    (path / "said").write_text(said[0] + "\n--\n" + said[1])
    return path


def trained(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}.rank-{rank}.pt") for rank in range(WORLD)]


@pytest.fixture
def index(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[Client]:
    build_index(folder / request.param, tmp_path / "index")
    with Client.local(tmp_path / "index") as client:
        yield client


@pytest.mark.parametrize("name", trainer.SCENARIOS)
def test_training_is_what_it_was(folder: Path, name: str) -> None:
    for rank in trained(folder, name):
        for parameter, plain in rank["plain"].items():
            assert torch.equal(rank["state"][parameter], plain), parameter  # bit for bit


@pytest.mark.parametrize("name", EXACT)
def test_outputs_are_the_trained_layers(folder: Path, tmp_path: Path, name: str) -> None:
    build_index(folder / name, tmp_path / "index")
    report = verify_index(tmp_path / "index")
    assert report.ok, report
    state = trained(folder, name)[0]["state"]
    stream = torch.Generator().manual_seed(7)
    with Client.local(tmp_path / "index") as client:
        for layer, info in client.index().layers.items():
            assert not info.inexact
            weight, bias = state[f"{layer}.weight"], state.get(f"{layer}.bias")
            if info.kind == "embedding":
                continue  # verify compared its table
            queries = torch.randn(5, info.d_in, generator=stream)
            found = client.dual_output(layer, queries, max_residual=1e-5)
            expected = nn.functional.linear(queries, weight, bias)
            np.testing.assert_allclose(found.values, expected.numpy(), atol=2e-6)


def test_rows_that_are_much_alike_are_no_fault(folder: Path, tmp_path: Path) -> None:
    """Though float32 loses more of their sum than of others'."""
    build_index(folder / "alike", tmp_path / "index")
    report = verify_index(tmp_path / "index")
    assert report.ok, report
    with Client.local(tmp_path / "index") as client:
        marks = [mark for info in client.index().layers.values() for mark in info.inexact]
    # Each rank sees its own sum by a private random probe: now and then more than is let pass.
    assert all(mark.reason.startswith("float32 lost too much") for mark in marks), marks


@pytest.mark.parametrize("index", ["not averaged in between"], indirect=True)
def test_rows_are_those_of_all_ranks(folder: Path, index: Client) -> None:
    """Keys of the first layer are the inputs; parts by rank and example add up."""
    seen = [rank["seen"] for rank in trained(folder, "not averaged in between")]
    query = torch.randn(1, trainer.WIDTH)
    hits = index.top_k("0", query, k=10_000)
    rows = sum(len(x) for rank in seen for x in rank)
    assert (hits.rows[0] >= 0).sum() == rows
    for rank in range(WORLD):
        x = torch.cat(seen[rank]).double().numpy()
        weights = np.sort(x @ query[0].double().numpy())
        found = index.top_k("0", query, k=len(x), where=f"rank = {rank}", order="smallest")
        np.testing.assert_allclose(found.scores[0], weights, atol=1e-6)
    parts = index.dual_output("0", query, group_by="rank")
    whole = index.dual_output("0", query)
    assert parts.groups == [0, 1]
    total = parts.values.sum(1) + parts.initial + whole.residual
    np.testing.assert_allclose(total, whole.values, atol=1e-6)


@pytest.mark.parametrize("index", ["AdamW"], indirect=True)
def test_a_parallel_model_may_be_asked_as_it_is(
    folder: Path, index: Client, tmp_path: Path
) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(trainer.network())
        model.module.load_state_dict(trained(folder, "AdamW")[0]["state"])
        x = torch.randn(3, trainer.WIDTH)
        assert list(capture_queries(model, x)) == ["0", "2"]
        expected = model(x)
        with dual_form(model, index):
            torch.testing.assert_close(model(x), expected, atol=2e-6, rtol=0)
        # One process has one recording, as without the wrapper.
        with Recorder(model, trainer.sgd(model), tmp_path / "one"):
            pass
        assert RecordingManifest.load(tmp_path / "one").ranks is None
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("hook", "0", "communication hook (fp16_compress_hook)"),
        ("another use", "first", "the weight used elsewhere"),
        ("clipped by value", "0", "clipped by value"),
    ],
)
def test_what_rows_do_not_explain_is_marked(
    folder: Path, name: str, layer: str, reason: str
) -> None:
    recording = open_recordings([folder / name])
    assert any(reason in mark.reason for mark in recording.marks[layer]), recording.marks
    if name == "another use":
        assert not recording.marks["last"]


def test_the_first_rank_speaks_for_all(folder: Path) -> None:
    first, second = (folder / "said").read_text().split("\n--\n")
    assert first.count("on each of 2 ranks, 16.38 kB per step") >= len(EXACT) // 2
    assert "dualform: recording" not in second


def test_the_command_takes_the_run_or_its_ranks(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [str(folder / "SGD" / f"rank-{rank}") for rank in (1, 0)]
    assert main(["index", "build", *ranks, str(tmp_path / "a")]) == 0
    assert main(["index", "build", str(folder / "SGD"), str(tmp_path / "b")]) == 0
    for file in (tmp_path / "a").rglob("*.faiss"):
        other = tmp_path / "b" / file.relative_to(tmp_path / "a")
        assert file.read_bytes() == other.read_bytes()
    assert main(["index", "build", ranks[0], str(tmp_path / "c")]) == 2
    assert "rank-0 is not given" in capsys.readouterr().err


def test_what_is_not_one_run_is_refused(folder: Path, tmp_path: Path) -> None:
    def refuse(words: str, *names: str) -> None:
        with pytest.raises(RanksError, match=words):
            build_index([folder / name for name in names], tmp_path / "index")

    refuse("differ in optimizer", "SGD/rank-0", "AdamW/rank-1")
    refuse("both of rank 0 of 2", "SGD/rank-0", "other batches/rank-0")
    refuse(
        r"0\.(weight|bias) after \d+ steps is not the same", "SGD/rank-0", "other batches/rank-1"
    )
    refuse("moved by .* times", "SGD/rank-0", "averaged each time/rank-1")
    refuse("rank-1 is not given", "SGD/rank-0")
    with pytest.raises(NotFoundError):
        build_index(folder, tmp_path / "index")
    one = tmp_path / "one"
    model = trainer.network()
    with Recorder(model, trainer.sgd(model), one):
        pass
    with pytest.raises(RanksError, match="whole recording of a run in one process"):
        build_index([folder / "SGD/rank-0", one], tmp_path / "index")


def test_ranks_that_began_elsewhere_are_refused(folder: Path, tmp_path: Path) -> None:
    """Of weights that another seed gave, as of a model that no wrapper made the same."""
    run = Path(shutil.copytree(folder / "SGD", tmp_path / "run"))
    model = trainer.network()
    manifest = RecordingManifest.load(run / "rank-1")
    shutil.rmtree(run / "rank-1")
    optimizer = trainer.sgd(model)
    with Recorder(model, optimizer, run / "rank-1"):
        model(torch.randn(4, trainer.WIDTH)).sum().backward()
        optimizer.step()
    manifest.save(run / "rank-1")
    with pytest.raises(RanksError, match="before the first step is not the same"):
        build_index(run, tmp_path / "index")


def test_the_index_ends_with_the_last_step_that_all_have(folder: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(folder / "AdamW", tmp_path / "run"))
    cut_recording(Recording.open(run / "rank-1"), 5)
    said: list[str] = []
    build_index(run, tmp_path / "cut", announce=said.append)
    assert "rank-1 was cut off after 5 steps" in said[0]
    build_index(folder / "AdamW", tmp_path / "whole")
    query = np.ones((1, trainer.WIDTH), np.float32)
    with Client.local(tmp_path / "cut") as cut, Client.local(tmp_path / "whole") as whole:
        assert cut.index().steps == 5
        expected = whole.dual_output("0", query, at_step=5, max_residual=np.inf)
        found = cut.dual_output("0", query, max_residual=np.inf)
        np.testing.assert_allclose(found.values, expected.values, atol=1e-6)


def test_nothing_that_all_have(folder: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(folder / "SGD", tmp_path / "run"))
    cut_recording(Recording.open(run / "rank-1"), 0)
    with pytest.raises(BuildError, match="no committed step"):
        build_index(run, tmp_path / "index")


def test_a_run_goes_on_in_as_many_processes(folder: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(folder / "SGD", tmp_path / "run"))
    model = trainer.network()
    with pytest.raises(ResumeError, match="recorded by 2 processes, and now there is one"):
        Recorder(model, trainer.sgd(model), run, resume_at_step=5)
    for rank in range(WORLD):
        assert Recording.open(run / f"rank-{rank}").complete  # nothing was dropped


def test_refusals_in_the_training_itself(folder: Path) -> None:
    for rank in range(WORLD):
        said = json.loads((folder / f"refused-{rank}.json").read_text())
        assert said["sharded"].startswith("LayerSelectionError")
        assert "FSDP" in said["sharded"]
        assert "replay" in said["sharded"]
        assert f"rank-{rank} exists" in said["again"]
        assert "in one process; choose another path" in said["one"]
        assert "recorded by 3 processes, and now there are 2" in said["fewer"]


def test_a_replay_is_of_one_process(folder: Path) -> None:
    manifest = RecordingManifest.load(folder / "SGD" / "rank-1")
    with pytest.raises(ReplayError, match="rank 1 of 2"):
        FirstRun().open(manifest)
