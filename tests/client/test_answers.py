"""Answers against a float64 reference, over a real socket, and the same without one."""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from dualform.client import (
    AsyncClient,
    Client,
    Coverage,
    FailedPreconditionError,
    InvalidArgumentError,
    parse_filter,
)

from .memory import D_IN, D_OUT, LR, ROWS, Memory


def test_what_is_served(remote: Client) -> None:
    (summary,) = remote.indexes()
    assert (summary.name, summary.health, summary.health_reason) == ("memory", "serving", "")
    info = remote.index()
    assert info == remote.index("memory")
    assert info.optimizer == "SGD"
    layer = info.layers["fc"]
    assert (layer.d_in, layer.d_out, layer.rows, layer.values) == (D_IN, D_OUT, ROWS, True)
    assert not layer.bias
    assert layer.exactness == "exact"
    columns = dict(layer.columns)
    assert columns["step"] == columns["slot"] == columns["label"] == "int64"
    assert (columns["task"], columns["noise"], columns["seen"]) == ("str", "float64", "bool")


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
def test_top_k_is_the_reference_sorted(
    remote: Client, memory: Memory, queries: np.ndarray, order: str
) -> None:
    hits = remote.top_k("fc", queries, k=7, order=order)
    weights = memory.weights(queries)
    rank = {"largest": -weights, "smallest": weights, "absolute": -np.abs(weights)}[order]
    expected = np.argsort(rank, axis=1, kind="stable")[:, :7]
    assert hits.rows.dtype == np.int64
    assert hits.scores.dtype == np.float32
    np.testing.assert_array_equal(hits.rows, expected)
    np.testing.assert_array_equal(
        hits.scores, np.take_along_axis(weights, expected, axis=1).astype(np.float32)
    )
    assert hits.groups is None
    assert hits.coverage == Coverage(ROWS, ROWS, 0)
    picked = expected.ravel().tolist()
    assert hits["label"].ravel().tolist() == [memory.label[t] for t in picked]
    assert hits["task"].ravel().tolist() == [memory.task[t] for t in picked]
    assert hits["step"].ravel().tolist() == [t // 7 for t in picked]
    assert hits["step"].dtype == np.int64
    assert hits["seen"].dtype == np.bool_
    assert hits["noise"].dtype == np.float64
    with pytest.raises(KeyError, match="no metadata column 'lable'"):
        hits["lable"]


def test_fewer_rows_than_k_are_padded(remote: Client, memory: Memory, queries: np.ndarray) -> None:
    hits = remote.top_k("fc", queries, k=5, where="step = 3 and label = 1")
    matching = [t for t in range(21, 28) if memory.label[t] == 1]
    assert 0 < len(matching) < 5
    assert hits.coverage.rows == len(matching)
    for query in range(len(queries)):
        assert sorted(hits.rows[query, : len(matching)].tolist()) == matching
    assert (hits.rows[:, len(matching) :] == -1).all()
    assert np.isnan(hits.scores[:, len(matching) :]).all()
    assert not np.isnan(hits.scores[:, : len(matching)]).any()
    for column in ("label", "task", "noise", "seen", "step"):
        assert hits[column].shape == (len(queries), 5)
        assert all(value is None for value in hits[column][:, len(matching) :].ravel())
    nothing = remote.top_k("fc", queries, k=2, where="label = 99")
    assert (nothing.rows == -1).all()
    assert nothing.coverage.rows == 0


def test_groups_ascend_and_end_with_none(
    remote: Client, memory: Memory, queries: np.ndarray
) -> None:
    hits = remote.top_k("fc", queries, k=3, group_by="label")
    assert hits.groups == [0, 1, 2, 3, None]
    assert hits.rows.shape == (len(queries), 5, 3)
    weights = memory.weights(queries)
    for place, group in enumerate(hits.groups):
        members = np.array([t for t in range(ROWS) if memory.label[t] == group])
        best = members[np.argsort(-weights[:, members], axis=1, kind="stable")[:, :3]]
        np.testing.assert_array_equal(hits.rows[:, place], best)
    assert remote.top_k("fc", queries, k=1, group_by="task").groups == ["fashion", "mnist", None]


@pytest.mark.parametrize("absolute", [False, True])
def test_sums_are_the_references(
    remote: Client, memory: Memory, queries: np.ndarray, absolute: bool
) -> None:
    sums = remote.sums("fc", queries, group_by="task", absolute=absolute, where="step < 60")
    assert sums.groups == ["fashion", "mnist", None]
    weights = memory.weights(queries)[:, :420]
    terms = np.abs(weights) if absolute else weights
    slack = np.abs(queries.astype(np.float64)) @ np.abs(memory.keys[:420].astype(np.float64)).T
    for place, group in enumerate(sums.groups):
        members = [t for t in range(420) if memory.task[t] == group]
        assert sums.counts[place] == len(members)
        error = np.abs(sums.values[:, place] - terms[:, members].sum(axis=1))
        assert (error <= 1e-6 * slack[:, members].sum(axis=1)).all()
    assert sums.values.dtype == np.float64
    assert sums.coverage == Coverage(420, ROWS, 0)


def test_each_label_once_with_how_often_it_came(
    remote: Client, memory: Memory, queries: np.ndarray
) -> None:
    hits = remote.top_k("fc", queries, k=200, distinct="label", where="step < 60")
    weights = memory.weights(queries)
    label = [memory.label[t] for t in range(420)]
    assert hits.counts is not None
    for query in range(len(queries)):
        ranked = np.argsort(-weights[query, :420], kind="stable").tolist()
        seen: set[int] = set()
        best = []
        for t in ranked:
            if label[t] is None or label[t] not in seen:
                best.append(t)
                seen.add(label[t])
        best = best[:200]
        assert hits.rows[query, : len(best)].tolist() == best
        assert (hits.rows[query, len(best) :] == -1).all()
        counts = [1 if label[t] is None else label.count(label[t]) for t in best]
        assert hits.counts[query, : len(best)].tolist() == counts
        assert not hits.counts[query, len(best) :].any()
    table = hits.to_pandas()
    assert list(table.columns[:5]) == ["query", "rank", "row", "score", "count"]
    assert table["count"].tolist() == hits.counts[hits.rows >= 0].tolist()
    with pytest.raises(InvalidArgumentError) as caught:
        remote.top_k("fc", queries, distinct="exampel")
    assert caught.value.field == "distinct"


def test_sums_over_bins_and_a_profile_are_numpys(
    remote: Client, memory: Memory, queries: np.ndarray
) -> None:
    weights = memory.weights(queries)
    step = np.arange(ROWS) // 7
    steps = remote.index().steps
    profile = remote.profile("fc", queries, bins=9)
    edges = np.linspace(0, steps, 10)
    assert profile.groups == edges[:-1].tolist()
    assert profile.counts.tolist() == np.histogram(step, edges)[0].tolist()
    some = remote.sums("fc", queries, group_by="step", bins=(3, 10.5, 40))
    assert some.groups == [3.0, 10.5]
    assert some.coverage.rows == some.counts.sum() == 7 * 38
    for query in range(len(queries)):
        for got, each in ((profile, edges), (some, np.array([3, 10.5, 40]))):
            expected = np.histogram(step, each, weights=weights[query])[0]
            np.testing.assert_allclose(got.values[query], expected, atol=1e-3)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("sums", {"group_by": "step", "bins": [1]}, "at least two"),
        ("sums", {"group_by": "step", "bins": "0,1"}, "list of ascending edges"),
        ("sums", {"group_by": "step", "bins": 5}, "list of ascending edges"),
        ("sums", {"group_by": "step", "bins": [0, None]}, "no number"),
        ("sums", {"group_by": "step", "bins": [2, 1]}, "must ascend"),
        ("sums", {"group_by": "task", "bins": [0, 1]}, "not numeric"),
        ("profile", {"bins": 0}, "from 1 to"),
        ("profile", {"bins": 2.5}, "an int is needed"),
    ],
)
def test_what_makes_no_bins_is_refused(
    remote: Client, queries: np.ndarray, method: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        getattr(remote, method)("fc", queries, **arguments)
    assert caught.value.field == "bins"


@pytest.mark.parametrize("share", [-1, -1e-300, float("-inf"), float("nan")])
def test_a_remainder_below_nothing_is_refused(
    remote: Client, local: Client, queries: np.ndarray, share: float
) -> None:
    """By every question that takes one, whoever answers it."""
    says = "a number is needed" if share != share else r"0 or more: 0\.0001 unless"
    of_unit = {"rank_by": "contribution", "unit": 0, "max_residual": share}
    for client in (remote, local):
        for ask in (
            lambda client: client.dual_output("fc", queries, max_residual=share),
            lambda client: client.top_k("fc", queries, **of_unit),
            lambda client: client.explain({"fc": queries}, output=True, max_residual=share),
        ):
            with pytest.raises(InvalidArgumentError, match=says) as caught:
                ask(client)
            assert caught.value.field == "max_residual"


def test_plans_are_told_and_strategies_overruled(remote: Client, queries: np.ndarray) -> None:
    for ask, expected, other in (
        (lambda **more: remote.top_k("fc", queries, k=3, **more), "scan", "flat"),
        (lambda **more: remote.sums("fc", queries, group_by="label", **more), "key_sums", "scan"),
        (
            lambda **more: remote.dual_output("fc", queries, group_by="label", **more),
            "scan",
            "scan",
        ),
    ):
        assert ask().plan is None
        plan = ask(explain_plan=True).plan
        assert plan.strategy == expected
        assert plan.reason
        assert plan.costs[expected] > 0
        forced = ask(strategy=other, explain_plan=True)
        assert (forced.plan.strategy, other in forced.plan.costs) == (other, True)
        with pytest.raises(InvalidArgumentError, match="fast") as caught:
            ask(strategy="fast")
        assert caught.value.field == "strategy"
    for strategy, message in (("certified", "no sketches"), ("rebuilt", "none of 'auto'")):
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            remote.top_k("fc", queries, strategy=strategy)
        assert caught.value.field == "strategy"


def test_the_dual_output_is_the_references(
    remote: Client, memory: Memory, queries: np.ndarray
) -> None:
    weights = memory.weights(queries)
    values = memory.values.astype(np.float64)
    output = remote.dual_output("fc", queries)
    assert output.groups is None
    assert output.counts is None
    assert output.trained is not None
    assert output.values.dtype == output.initial.dtype == output.trained.dtype == np.float32
    np.testing.assert_allclose(
        output.values, output.initial + LR * weights @ values, rtol=1e-5, atol=1e-4
    )
    early = remote.dual_output("fc", queries, at_step=10)
    assert early.trained is None
    np.testing.assert_allclose(
        early.values, early.initial + LR * weights[:, :70] @ values[:70], rtol=1e-5, atol=1e-4
    )
    parts = remote.dual_output("fc", queries, group_by="label")
    assert parts.groups == [0, 1, 2, 3, None]
    assert parts.values.shape == (len(queries), 5, D_OUT)
    assert parts.counts is not None
    assert parts.counts.tolist() == [memory.label.count(group) for group in parts.groups]
    np.testing.assert_allclose(
        parts.initial + parts.values.sum(axis=1), output.values, rtol=1e-5, atol=1e-4
    )


QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("top_k", {"k": 4}),
    ("top_k", {"k": 700, "where": "label is not null and seen = true"}),
    ("top_k", {"k": 2, "group_by": "task", "order": "absolute"}),
    ("top_k", {"k": 3, "where": parse_filter("noise < 0.5 or task in ('mnist')")}),
    ("top_k", {"k": 5, "rank_by": "contribution", "unit": 4, "at_step": 60, "order": "smallest"}),
    ("top_k", {"k": 2, "rank_by": "contribution", "unit": 0, "group_by": "label"}),
    ("top_k", {"k": 3, "distinct": "label"}),
    ("top_k", {"k": 2, "distinct": "step", "group_by": "task", "where": "step < 30"}),
    ("sums", {"group_by": "label", "absolute": True}),
    ("sums", {"group_by": "noise", "bins": [-1, 0.0, 2.5]}),
    ("profile", {"bins": 7, "absolute": True, "where": "label = 1"}),
    ("sums", {"group_by": "step", "where": "task = 'mnist'"}),
    ("dual_output", {}),
    ("dual_output", {"at_step": 0}),
    ("dual_output", {"group_by": "task", "where": "not (label = 2)"}),
]


@pytest.mark.parametrize(("method", "arguments"), QUESTIONS)
def test_local_remote_and_asyncio_agree_bit_for_bit(
    remote: Client,
    local: Client,
    server: str,
    queries: np.ndarray,
    memory: Memory,
    method: str,
    arguments: dict[str, Any],
) -> None:
    async def ask() -> list[Any]:
        answers = []
        for client in (AsyncClient(server), AsyncClient.local(memory.path)):
            async with client:
                answers.append(await getattr(client, method)("fc", queries, **arguments))
        return answers

    first = getattr(remote, method)("fc", queries, **arguments)
    for other in [getattr(local, method)("fc", queries, **arguments), *asyncio.run(ask())]:
        assert_same(first, other)


def test_local_mode_calls_the_index_by_its_directory(local: Client, memory: Memory) -> None:
    assert [index.name for index in local.indexes()] == [memory.path.name]
    assert local.index().layers["fc"].rows == ROWS


def test_many_asyncio_questions_at_once(remote: Client, server: str, queries: np.ndarray) -> None:
    async def ask() -> list[Any]:
        async with AsyncClient(server) as client:
            return await asyncio.gather(
                *(client.top_k("fc", queries[i : i + 1], k=3) for i in range(len(queries)))
            )

    together = remote.top_k("fc", queries, k=3)
    for i, alone in enumerate(asyncio.run(ask())):
        np.testing.assert_array_equal(alone.rows[0], together.rows[i])
        np.testing.assert_array_equal(alone.scores[0], together.scores[i])


def test_many_threads_share_a_client(
    remote: Client, local: Client, queries: np.ndarray, memory: Memory
) -> None:
    expected = np.argsort(-memory.weights(queries), axis=1, kind="stable")[:, :3]
    for client in (remote, local):
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _, c=client: c.top_k("fc", queries, k=3), range(40)))
        assert all(np.array_equal(hits.rows, expected) for hits in answers)


def test_queries_may_be_tensors_views_and_lists_of_rows(
    remote: Client, queries: np.ndarray
) -> None:
    expected = remote.top_k("fc", queries, k=3)
    doubled = np.repeat(queries, 2, axis=1)
    for given in (
        torch.from_numpy(queries),
        torch.from_numpy(queries).requires_grad_(),
        np.asfortranarray(queries),
        doubled[:, ::2],
        queries.astype(">f4"),
        list(queries),
    ):
        assert_same(remote.top_k("fc", given, k=3), expected)


def test_unlabelled_payloads_are_none(remote: Client, queries: np.ndarray) -> None:
    assert remote.examples([1, 2, None]) == [None, None, None]
    assert remote.examples([]) == []
    hits = remote.top_k("fc", queries[:1], k=3, where="label = 99")
    assert remote.examples(hits["label"][0]) == [None] * 3


def test_answers_become_tables(remote: Client, memory: Memory, queries: np.ndarray) -> None:
    hits = remote.top_k("fc", queries, k=5, where="step = 3 and label = 1")
    table = hits.to_pandas()
    assert list(table.columns[:4]) == ["query", "rank", "row", "score"]
    assert len(table) == int((hits.rows >= 0).sum())
    assert table["label"].tolist() == [1] * len(table)
    assert str(table["label"].dtype) == "int64"
    assert (
        table.loc[table["query"] == 2, "row"].tolist() == hits.rows[2, hits.rows[2] >= 0].tolist()
    )
    grouped = remote.top_k("fc", queries, k=2, group_by="label").to_pandas()
    assert len(grouped) == len(queries) * 5 * 2
    assert grouped["rank"].tolist() == [0, 1] * (len(queries) * 5)
    assert not len(remote.top_k("fc", queries, k=2, where="label = 99").to_pandas())

    sums = remote.sums("fc", queries, group_by="label")
    wide = sums.to_pandas()
    assert wide.columns.tolist() == [0, 1, 2, 3, None]
    np.testing.assert_array_equal(wide.to_numpy(), sums.values)

    output = remote.dual_output("fc", queries)
    np.testing.assert_array_equal(output.to_pandas().to_numpy(), output.values)
    parts = remote.dual_output("fc", queries, group_by="task")
    by_group = parts.to_pandas()
    np.testing.assert_array_equal(by_group.loc[(3, "mnist")].to_numpy(), parts.values[3, 1])


def test_without_pandas_the_message_says_so(
    remote: Client, queries: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = remote.top_k("fc", queries, k=1)
    real = builtins.__import__

    def blocked(name: str, *rest: Any, **named: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(FailedPreconditionError, match="pip install pandas"):
        hits.to_pandas()


def assert_same(one: Any, other: Any) -> None:
    """Equal to the last bit, types included."""
    assert type(one) is type(other)
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "columns":
            assert list(a) == list(b)
            for name in a:
                assert a[name].dtype == b[name].dtype
                np.testing.assert_array_equal(a[name], b[name])
        elif isinstance(a, np.ndarray):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert a.tobytes() == b.tobytes()
        else:
            assert a == b
