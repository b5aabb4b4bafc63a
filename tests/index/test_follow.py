"""Versions that are published while training runs, against builds of the same committed steps."""

from __future__ import annotations

import copy
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import Client
from dualform.engine import Index, verify_index
from dualform.index import BuildError, build_index
from dualform.index.follow import Follower, Published
from dualform.index.plan import Options
from dualform.record import DiskSink, Recorder
from dualform.store import ExistsError, NoSpaceError
from dualform.store.recording_ranks import open_recordings
from dualform.store.versions import newest, versions

SHARD = 100
ROWS = 32
SKETCHED = ("directions.npy", ".sketch.npy")


class Training:
    """A network of three layers, the first with sketches, trained a few steps at a time.

    Args:
        path: Of the recording.
        make: Makes the optimizer.
        seed: Of the first weights.
        data: The seed of what it is trained on.
    """

    def __init__(
        self,
        path: Path,
        make: Callable[[Any], torch.optim.Optimizer],
        seed: int = 0,
        data: int = 1,
    ) -> None:
        self._path = path
        self._random = torch.Generator().manual_seed(data)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = nn.Sequential(
                nn.Linear(300, 20), nn.ReLU(), nn.Linear(20, 9, bias=False), nn.Linear(9, 4)
            )
        self.optimizer = make(self.model.parameters())
        self.resume(None)
        self.images = torch.rand((40, 300), generator=self._random)
        self.steps = 0

    def resume(self, step: int | None) -> None:
        """Go on recording after so many steps."""
        self._sink = DiskSink(self._path)
        self._recorder = Recorder(self.model, self.optimizer, self._sink, resume_at_step=step)

    def state(self) -> tuple[Any, Any]:
        """Weights and the optimizer's state, as a checkpoint has them."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def train(self, steps: int, commit: bool = True, **columns: Any) -> None:
        """Take steps and commit them."""
        for _ in range(steps):
            ids = torch.randint(0, 40, (ROWS,), generator=self._random)
            labels = ids % 4
            self._recorder.annotate(label=labels, example=ids, **columns)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(self.images[ids]), labels).backward()
            self.optimizer.step()
            self.steps += 1
        self._recorder.add_examples([self.steps], [f"after {self.steps}"])
        if commit:
            self._sink.commit()

    def close(self) -> None:
        self._recorder.close()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


def files(index: Path) -> dict[str, bytes]:
    return {
        path.relative_to(index).as_posix(): path.read_bytes()
        for path in index.rglob("*")
        if path.is_file()
    }


def published(follower: Follower, path: Path) -> Published | None:
    with open_recordings([path]) as source:
        return follower.publish(source)


def same_answers(ours: Path, theirs: Path) -> None:
    """Bit for bit: top-k, sums, outputs; by every way that there is."""
    queries = {"0": 300, "2": 20, "3": 9}
    with Index.open(ours, device="cpu") as a, Index.open(theirs, device="cpu") as b:
        a.verify_files()
        assert a.damage is None
        for layer, d in queries.items():
            asked = np.random.default_rng(3).standard_normal((3, d)).astype(np.float32)
            for index_question in (
                lambda index, layer=layer, asked=asked: index.top_k(layer, asked, 12),
                lambda index, layer=layer, asked=asked: index.top_k(
                    layer, asked, 5, order="absolute", group_by="label"
                ),
            ):
                one, other = index_question(a), index_question(b)
                assert one.scores.tobytes() == other.scores.tobytes()
                assert one.rows.tobytes() == other.rows.tobytes()
            one, other = (i.sums(layer, asked, "label", absolute=True) for i in (a, b))
            assert one.values.tobytes() == other.values.tobytes()
            for options in ({}, {"group_by": "label"}):
                one, other = (i.dual_output(layer, asked, **options) for i in (a, b))
                assert one.values.tobytes() == other.values.tobytes()
                assert np.array_equal(one.initial, other.initial)


@pytest.mark.parametrize(
    ("make", "parts"),
    [(plain, ()), (momentum, ("label",)), (adamw, ("label",))],
    ids=["plain", "momentum", "adamw"],
)
def test_every_version_is_what_a_build_gives(
    tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer], parts: tuple[str, ...]
) -> None:
    training = Training(tmp_path / "run", make)
    options = Options(shard_rows=SHARD, parts=parts)
    with Follower(tmp_path / "versions", options) as follower:
        for number, steps in enumerate((2, 9, 13)):
            training.train(steps)
            if number == 2:
                training.close()
            found = published(follower, tmp_path / "run")
            assert found is not None
            assert found.steps == training.steps
            assert published(follower, tmp_path / "run") is None
            build_index(
                tmp_path / "run", tmp_path / f"{number}", shard_rows=SHARD, parts=list(parts)
            )
            ours, theirs = files(found.path), files(tmp_path / f"{number}")
            assert ours.keys() == theirs.keys()
            differ = [name for name, data in theirs.items() if ours[name] != data]
            if found.complete:
                assert differ == []
            assert all(name.endswith((*SKETCHED, "manifest.json")) for name in differ)
            same_answers(found.path, tmp_path / f"{number}")
        assert found.complete
        assert verify_index(found.path).ok
        assert found.shared


def test_packed_versions_are_what_a_packed_build_gives(tmp_path: Path) -> None:
    """The first version's sketches are made of packed keys, once there are other directions."""
    training = Training(tmp_path / "run", momentum)
    with Follower(tmp_path / "versions", Options(shard_rows=SHARD, pack=True)) as follower:
        for steps in (9, 20):
            training.train(steps)
            found = published(follower, tmp_path / "run")
            assert found is not None
        training.close()
        found = published(follower, tmp_path / "run")
    assert found is not None
    build_index(tmp_path / "run", tmp_path / "packed", shard_rows=SHARD, pack=True)
    assert files(found.path) == files(tmp_path / "packed")
    assert (found.path / "layers/2/000000.keys.packed").exists()
    build_index(tmp_path / "run", tmp_path / "plain", shard_rows=SHARD)
    same_answers(found.path, tmp_path / "plain")


def test_what_was_resumed_earlier_is_made_again(tmp_path: Path) -> None:
    """Steps that were taken back, and other rows in their place."""
    run = tmp_path / "run"
    training = Training(run, momentum)
    with Follower(tmp_path / "versions", Options(shard_rows=SHARD)) as follower:
        training.train(8)
        weights = copy.deepcopy(training.model.state_dict())
        state = copy.deepcopy(training.optimizer.state_dict())
        training.train(7)
        found = published(follower, run)
        assert found is not None
        assert (found.made, found.shared) == (4, 0)
        training.close()
        training.model.load_state_dict(weights)
        training.optimizer.load_state_dict(state)
        training.resume(8)
        training.train(9)
        found = published(follower, run)
        assert found is not None
        assert (found.made, found.shared) == (3, 2)  # of 256 rows that stayed, two whole shards
        build_index(run, tmp_path / "plain", shard_rows=SHARD)
        same_answers(found.path, tmp_path / "plain")
        training.close()


def test_a_column_that_comes_later_is_in_every_shard(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", momentum)
    with Follower(tmp_path / "versions", Options(shard_rows=SHARD)) as follower:
        training.train(6)
        published(follower, tmp_path / "run")
        training.train(6, task="late")
        training.close()
        found = published(follower, tmp_path / "run")
        assert found is not None
        build_index(tmp_path / "run", tmp_path / "plain", shard_rows=SHARD)
        assert files(found.path) == files(tmp_path / "plain")


def test_a_restarted_follower_goes_on(tmp_path: Path) -> None:
    """Whole shards are shared with what the one before made; states are too."""
    training = Training(tmp_path / "run", adamw)
    options = Options(shard_rows=SHARD)
    with Follower(tmp_path / "versions", options) as follower:
        training.train(15)
        first = published(follower, tmp_path / "run")
    training.train(4)
    training.close()
    with Follower(tmp_path / "versions", options) as follower:
        second = published(follower, tmp_path / "run")
    assert first is not None
    assert second is not None
    assert (second.made, second.shared) == (2, 4)
    build_index(tmp_path / "run", tmp_path / "plain", shard_rows=SHARD)
    assert files(second.path) == files(tmp_path / "plain")
    for name in ("000000.keys.faiss", "initial.safetensors"):
        same = [found.path / "layers" / "0" / name for found in (first, second)]
        assert os.path.samefile(*same)


def test_old_versions_go_unless_somebody_uses_them(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", plain)
    folder = tmp_path / "versions"
    with Follower(folder, Options(shard_rows=SHARD), keep=2) as follower:
        training.train(4)
        first = published(follower, tmp_path / "run")
        assert first is not None
        with Client.local(folder) as client:
            for _ in range(4):
                training.train(1)
                found = published(follower, tmp_path / "run")
                assert found is not None
                os.utime(found.path / "manifest.json", ns=(0, 0))  # by a clock that was put back
            assert [path.name[:6] for path in versions(folder)] == ["000001", "000004", "000005"]
            ones = np.ones((1, 300), np.float32)
            assert client.sums("0", ones, group_by="label").counts.sum() == 4 * ROWS
        training.train(1)
        published(follower, tmp_path / "run")
        assert [path.name[:6] for path in versions(folder)] == ["000005", "000006"]
    training.close()


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    for name in ("run", "other"):
        training = Training(tmp_path / name, plain if name == "run" else momentum, seed=len(name))
        training.train(1)
        training.close()
    build_index(tmp_path / "run", tmp_path / "index")
    with pytest.raises(ExistsError, match="is an index; versions are published into a folder"):
        Follower(tmp_path / "index", Options())
    with pytest.raises(ExistsError, match="run is a recording; versions"):
        Follower(tmp_path / "run", Options())
    with pytest.raises(ExistsError, match=r"sub lies in .*index, which is an index"):
        Follower(tmp_path / "index" / "sub", Options())
    (tmp_path / "file").write_text("")
    with pytest.raises(ExistsError, match="file is a file; versions"):
        Follower(tmp_path / "file", Options())
    with pytest.raises(BuildError, match="keep is 0"):
        Follower(tmp_path / "versions", Options(), keep=0)
    with Follower(tmp_path / "versions", Options()) as follower:
        assert published(follower, tmp_path / "run") is not None
        with pytest.raises(ExistsError, match=r"another build \(this process"):
            Follower(tmp_path / "versions", Options())
        with pytest.raises(ExistsError, match="of another recording"):
            published(follower, tmp_path / "other")
        assert len(versions(tmp_path / "versions")) == 1


def test_another_recording_with_the_same_first_weights_is_refused(tmp_path: Path) -> None:
    """And one that was taken back into its first segment, or to step 0, is not another."""
    folder, options = tmp_path / "versions", Options(shard_rows=SHARD)
    training = Training(tmp_path / "run", momentum)
    states = {0: training.state()}
    training.train(2, commit=False)
    states[2] = training.state()
    training.train(2)
    with Follower(folder, options) as follower:
        assert published(follower, tmp_path / "run") is not None
    training.close()
    other = Training(tmp_path / "other", momentum, data=2)
    slower = Training(
        tmp_path / "slower", lambda p: torch.optim.SGD(p, lr=0.04, momentum=0.9, weight_decay=1e-3)
    )
    for each in (other, slower):
        each.train(6)
        each.close()
    before = files(folder)
    with Follower(folder, options) as follower:
        for name in ("other", "slower"):
            with pytest.raises(ExistsError, match=r"another recording.* took another first step"):
                published(follower, tmp_path / name)
        assert files(folder) == before

        for step in (2, 0):
            weights, state = states[step]
            training.model.load_state_dict(weights)
            training.optimizer.load_state_dict(state)
            training.images = torch.rand((40, 300), generator=training._random)  # others
            training.resume(step)
            training.train(5)
            training.close()
            found = published(follower, tmp_path / "run")
            assert found is not None
            assert found.steps == step + 5


def test_what_somebody_else_put_there_stays(tmp_path: Path) -> None:
    """Whatever it is called, and neither counted nor numbered with."""
    training = Training(tmp_path / "run", plain)
    training.train(2)
    mine = tmp_path / "mine"
    build_index(tmp_path / "run", mine)
    options = Options(shard_rows=SHARD)

    for number, names in enumerate((("0.01", "0.1"), ("000001-step-2",), (".next",))):
        folder = tmp_path / f"full-{number}"
        for name in names:
            shutil.copytree(mine, folder / name)
        before = files(folder)
        with pytest.raises(ExistsError, match=r"which --follow did not publish.*of their own"):
            Follower(folder, options)
        assert files(folder) == before

    folder = tmp_path / "versions"
    with Follower(folder, options, keep=1) as follower:
        first = published(follower, tmp_path / "run")
        assert first is not None
        others = ("0.1", "mine", "zzz", "999999-step-9", "000002-step-3", ".old-mine")
        for name in others:
            shutil.copytree(mine, folder / name)
        before = {name: files(folder / name) for name in others}
        training.train(1)
        second = published(follower, tmp_path / "run")
        assert second is not None
        assert second.path.name == "000003-step-3"  # 000002-step-3 is somebody else's
        assert versions(folder) == [second.path]
        assert newest(folder) == second.path
        with Client.local(folder) as client:
            assert client.index().steps == 3
    # An index of the user's own under the name of a version that was published.
    shutil.rmtree(second.path)
    shutil.copytree(mine, second.path)
    training.train(1)
    training.close()
    with Follower(folder, options, keep=1) as follower:
        third = published(follower, tmp_path / "run")
    assert third is not None
    assert third.complete
    assert newest(folder) == third.path
    before[second.path.name] = files(mine)
    assert {name: files(folder / name) for name in before} == before
    assert verify_index(third.path).ok


def test_a_round_that_fails_leaves_the_last_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path / "run", momentum)
    folder = tmp_path / "versions"
    with Follower(folder, Options(shard_rows=SHARD)) as follower:
        training.train(5)
        published(follower, tmp_path / "run")
        training.train(9)
        with monkeypatch.context() as patch:
            patch.setattr("dualform.index.follow.finish", full)
            with pytest.raises(NoSpaceError, match="no space left"):
                published(follower, tmp_path / "run")
        assert len(versions(folder)) == 1
        training.train(1)
        training.close()
        found = published(follower, tmp_path / "run")
    assert found is not None
    build_index(tmp_path / "run", tmp_path / "plain", shard_rows=SHARD)
    assert files(found.path) == files(tmp_path / "plain")


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
