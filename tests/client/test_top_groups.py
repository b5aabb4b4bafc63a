"""The best groups through the real clients: a float64 reference, parts of a batch, tables."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dualform.client import (
    AsyncClient,
    Client,
    Coverage,
    InvalidArgumentError,
    ResourceExhaustedError,
    TopGroupsResult,
)
from dualform.serve import ServerLimits

from .memory import D_OUT, LR, ROWS, Memory
from .serving import serving


def best(
    terms: np.ndarray, column: list[Any], k: int, order: str
) -> tuple[list[list[Any]], np.ndarray, list[list[int]]]:
    """Groups, sums and counts by sorting every group: None last among equal sums."""
    names = sorted(set(column), key=lambda value: (value is None, value or type(value)()))
    places = np.array([names.index(value) for value in column])
    groups, scores, counts = [], [], []
    for row in terms:
        sums = np.bincount(places, row)
        merits = {"largest": sums, "smallest": -sums, "absolute": np.abs(sums)}[order]
        chosen = np.argsort(-merits, kind="stable")[:k]
        groups.append([names[place] for place in chosen])
        scores.append(sums[chosen])
        counts.append([column.count(names[place]) for place in chosen])
    return groups, np.array(scores), counts


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
@pytest.mark.parametrize("by", ["label", "task", "step"])
def test_sums_are_the_references_sorted(
    remote: Client, memory: Memory, queries: np.ndarray, by: str, order: str
) -> None:
    steps = (np.arange(ROWS) // 7).tolist()
    column = {"label": memory.label, "task": memory.task, "step": steps}[by]
    direction = np.random.default_rng(0).standard_normal((9, D_OUT)).astype(np.float32)
    weights = memory.weights(queries)
    along = direction.astype(np.float64) @ memory.values.T.astype(np.float64)
    ways: list[tuple[dict[str, Any], np.ndarray]] = [
        ({}, weights),
        ({"rank_by": "contribution", "unit": 3}, LR * weights * memory.values[:, 3]),
        ({"rank_by": "contribution", "direction": direction}, LR * weights * along),
    ]
    for ask, terms in ways:
        found = remote.top_groups("fc", queries, by=by, k=3, order=order, **ask)
        groups, scores, counts = best(terms, column, 3, order)
        assert found.groups.tolist() == groups
        assert (found.scores.dtype, found.counts.dtype) == (np.float64, np.int64)
        np.testing.assert_allclose(found.scores, scores, rtol=0, atol=1e-5)
        assert found.counts.tolist() == counts
        assert found.coverage == Coverage(ROWS, ROWS, 0)


def test_at_a_step_and_filtered(remote: Client, memory: Memory, queries: np.ndarray) -> None:
    terms = (LR * memory.weights(queries) * memory.values[:, 1])[:, :140]
    ask: dict[str, Any] = {"rank_by": "contribution", "unit": 1, "at_step": 20}
    found = remote.top_groups("fc", queries, by="label", where="label is not null", k=9, **ask)
    known = [t for t in range(140) if memory.label[t] is not None]
    column = [memory.label[t] for t in known]
    groups, scores, counts = best(terms[:, known], column, 4, "largest")
    assert found.groups[:, :4].tolist() == groups
    np.testing.assert_allclose(found.scores[:, :4], scores, rtol=0, atol=1e-5)
    assert found.counts[:, :4].tolist() == counts
    assert found.groups[:, 4:].tolist() == [[None] * 5] * 9
    assert np.isnan(found.scores[:, 4:]).all()
    assert not found.counts[:, 4:].any()


def test_local_remote_and_asyncio_agree(
    server: str, remote: Client, local: Client, queries: np.ndarray
) -> None:
    direction = np.ones((9, D_OUT), np.float32)
    along = {"rank_by": "contribution", "direction": direction, "where": "step > 3"}

    async def asked(ask: dict[str, Any]) -> TopGroupsResult:
        async with AsyncClient(server) as client:
            return await client.top_groups("fc", queries, by="task", k=2, **ask)

    ways: list[dict[str, Any]] = [{}, along]
    for ask in ways:
        ours = remote.top_groups("fc", queries, by="task", k=2, **ask)
        other = local.top_groups("fc", queries, by="task", k=2, **ask)
        for theirs in (other, asyncio.run(asked(ask))):
            assert ours.groups.tolist() == theirs.groups.tolist()
            np.testing.assert_array_equal(ours.scores, theirs.scores)
            np.testing.assert_array_equal(ours.counts, theirs.counts)
            assert (ours.coverage, ours.index_version) == (theirs.coverage, theirs.index_version)


def test_parts_of_a_batch_are_joined(memory: Memory, remote: Client, queries: np.ndarray) -> None:
    """Some parts have the group without a value where others have none."""
    direction = np.random.default_rng(1).standard_normal((9, D_OUT)).astype(np.float32)
    ask: dict[str, Any] = {"rank_by": "contribution", "direction": direction, "by": "label", "k": 1}
    whole = remote.top_groups("fc", queries, **ask)
    assert 0 < sum(group is None for group in whole.groups.ravel()) < 9
    with (
        serving({"memory": memory.path}, limits=ServerLimits(max_queries=2)) as address,
        Client(address) as client,
    ):
        found = client.top_groups("fc", queries, **ask)
    assert found.groups.tolist() == whole.groups.tolist()
    np.testing.assert_allclose(found.scores, whole.scores, rtol=1e-5)
    np.testing.assert_array_equal(found.counts, whole.counts)


def test_as_a_table(remote: Client, queries: np.ndarray) -> None:
    found = remote.top_groups("fc", queries[:2], by="label", where="label < 2", k=3)
    table = found.to_pandas()
    assert table.columns.tolist() == ["query", "rank", "group", "score", "count"]
    assert table["query"].tolist() == [0, 0, 1, 1]
    assert table["rank"].tolist() == [0, 1, 0, 1]
    assert table["group"].dtype == np.int64
    assert table["group"].tolist() == found.groups[:, :2].ravel().tolist()
    assert table["count"].tolist() == found.counts[:, :2].ravel().tolist()


def test_plans(remote: Client, queries: np.ndarray) -> None:
    found = remote.top_groups("fc", queries, by="step", explain_plan=True, strategy="scan")
    assert found.plan is not None
    assert found.plan.strategy == "scan"
    assert remote.top_groups("fc", queries, by="step").plan is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"by": "lable"}, "by"),
        ({"by": "position"}, "by"),
        ({"by": None}, "by"),
        ({"k": 0}, "k"),
        ({"k": 2.5}, "k"),
        ({"unit": 1}, "unit"),
        ({"where": "lable = 1"}, "where"),
        ({"direction": np.ones(D_OUT, np.float32)}, "direction"),
        ({"direction": np.ones((9, D_OUT))}, "direction"),
        ({"direction": np.full((9, D_OUT), np.inf, np.float32)}, "direction"),
        ({"direction": np.ones((8, D_OUT), np.float32)}, "direction"),
        ({"direction": np.ones((9, 1), np.float32)}, "direction"),
    ],
)
def test_bad_input_is_refused_alike(
    remote: Client, local: Client, queries: np.ndarray, change: dict[str, Any], field: str
) -> None:
    rank_by = "contribution" if "direction" in change else "weight"
    ask: dict[str, Any] = {"by": "label", "rank_by": rank_by, **change}
    said = []
    for client in (remote, local):
        with pytest.raises(InvalidArgumentError) as caught:
            client.top_groups("fc", queries, **ask)
        assert caught.value.field == field
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_k_over_the_limit(remote: Client, queries: np.ndarray) -> None:
    with pytest.raises(ResourceExhaustedError, match="at most 16,384") as caught:
        remote.top_groups("fc", queries, by="label", k=20_000)
    assert caught.value.field == "k"
