"""Memories that nobody splits well, and indexes that change under machines which serve them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.errors import CancelledError, EngineError
from dualform.engine.messages.versions import version_at
from dualform.machines.spread import Machines, SpreadIndex
from dualform.questions import (
    OutputQuestion,
    SelfInfluenceQuestion,
    StreamWeightsQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
)

from .near import NearFleet
from .test_answers import same_rows, spread


def memory(folder: Path, rows: int, seed: int = 0, **options: object) -> tuple[Path, np.ndarray]:
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((rows, 4)).astype(np.float32)
    values = rng.standard_normal((rows, 3)).astype(np.float32)
    label = np.arange(rows) % 3
    return make_index(folder, keys, values, label=label, **options), keys  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "shard_rows"), [(1, 5), (2, 1), (13, 12), (40, 39)])
def test_a_row_alone_and_shards_of_unlike_size(tmp_path: Path, rows: int, shard_rows: int) -> None:
    """Of more machines than rows most have nothing, and are asked nothing."""
    path, keys = memory(tmp_path, rows, shard_rows=shard_rows)
    queries = np.concatenate([keys[:1], np.zeros((1, 4), np.float32)])
    with Index.open(path, device="cpu") as one, spread(path, 4) as several:
        for k in (1, rows, 10 * rows):
            top = TopKQuestion("fc", queries, k=k)
            same_rows(several.ask(top), one.ask(top))
        sums = SumsQuestion("fc", queries, "label")
        np.testing.assert_allclose(several.ask(sums).values, one.ask(sums).values, atol=1e-6)
        output = OutputQuestion("fc", queries, group_by="label")
        np.testing.assert_allclose(several.ask(output).values, one.ask(output).values, atol=1e-5)
        groups = TopGroupsQuestion("fc", queries, by="label", k=99)
        assert several.ask(groups).groups.equals(one.ask(groups).groups)
        own = SelfInfluenceQuestion("fc", by="label")
        np.testing.assert_allclose(
            several.self_influence(own).scores, one.self_influence(own).scores, rtol=1e-12
        )
        stream = StreamWeightsQuestion("fc", queries)
        whole = np.concatenate([chunk.weights for chunk in several.chunks(stream)], axis=1)
        assert whole.shape == (2, rows)


def test_an_index_that_is_replaced_under_machines_that_serve_it(tmp_path: Path) -> None:
    """Another one of the same shape: its rows are in no answer, and the version is told."""
    path, keys = memory(tmp_path / "old", 30, shard_rows=7)
    other, _ = memory(tmp_path / "new", 30, seed=1, shard_rows=7)
    question = TopKQuestion("fc", keys[:2], k=5)
    with spread(path, 3) as several:
        expected = several.ask(question)
        path.rename(tmp_path / "away")
        other.rename(path)
        for _ in range(2):  # machines that had it open, and then have not
            with pytest.raises(EngineError) as refused:
                several.ask(question)
            assert refused.value.reason in ("OTHER_VERSION", "DAMAGED")
        assert refused.value.reason == "OTHER_VERSION"
        path.rename(other)
        (tmp_path / "away").rename(path)
        same_rows(several.ask(question), expected)


def test_two_indexes_of_one_version_do_not_close_each_others_shards(tmp_path: Path) -> None:
    """As a catalog has them that serves one folder by two names."""
    path, keys = memory(tmp_path, 30, shard_rows=7)
    fleet = NearFleet(3)
    machines = Machines(fleet, "cpu")
    first, second = (machines.open(version_at(path)) for _ in range(2))
    question = TopKQuestion("fc", keys[:2], k=5)
    expected = first.ask(question)
    first.close()
    same_rows(second.ask(question), expected)
    with pytest.raises(EngineError):
        first.ask(question)
    second.close()


@pytest.mark.parametrize("after", [0, 1])
def test_a_caller_who_gives_up_between_machines(tmp_path: Path, after: int) -> None:
    """Each machine asks now and then; what was found so far is nobody's answer."""
    path, keys = memory(tmp_path, 30, shard_rows=7)

    class Leaving(NearFleet):
        def ask(self, parts, function, *arguments, stop=None):  # type: ignore[no-untyped-def]
            found = []
            for part in parts:
                if stop is not None and stop():
                    raise CancelledError("the caller gave up")
                found += super().ask([part], function, *arguments)
            return found

    index: SpreadIndex = Machines(Leaving(3), "cpu").open(version_at(path))
    asked = itertools.count()
    question = TopKQuestion("fc", keys[:2], k=5)
    with index:
        expected = index.ask(question)
        with pytest.raises(CancelledError):
            index.ask(question, stop=lambda: next(asked) >= after)
        same_rows(index.ask(question), expected)
