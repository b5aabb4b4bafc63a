"""Batches over the server's limits are sent in parts, and come back whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import make_index

from dualform.client import Client, ResourceExhaustedError
from dualform.client._answers import sums_of
from dualform.client._asking import Asking, Send, Steps
from dualform.questions import SumsQuestion
from dualform.serve import ServerLimits
from dualform.v1 import attribution_pb2 as pb

from .memory import D_IN, Memory
from .serving import serving


@pytest.fixture(scope="module")
def narrow(memory: Memory) -> Iterator[str]:
    """A server that takes four queries, and a MiB, at a time."""
    with serving(
        {"memory": memory.path}, limits=ServerLimits(max_queries=4, max_message_mib=1, max_k=600)
    ) as address:
        yield address


def test_more_queries_than_the_server_takes(
    narrow: str, local: Client, memory: Memory, queries: np.ndarray
) -> None:
    with Client(narrow) as client:
        hits = client.top_k("fc", queries, k=5, group_by="label")
        sums = client.sums("fc", queries, group_by="task")
        once = client.top_k("fc", queries, k=5, distinct="label")
        output = client.dual_output("fc", queries)
    whole = local.top_k("fc", queries, k=5, group_by="label")
    assert hits.rows.tobytes() == whole.rows.tobytes()
    assert hits.scores.tobytes() == whole.scores.tobytes()
    assert hits.groups == whole.groups
    assert hits.coverage == whole.coverage
    distinct = local.top_k("fc", queries, k=5, distinct="label")
    assert once.counts is not None
    assert distinct.counts is not None
    assert once.counts.tobytes() == distinct.counts.tobytes()
    for name in whole.columns:
        assert hits[name].tolist() == whole[name].tolist()
    expected = local.sums("fc", queries, group_by="task")
    # Parts may differ from the whole within the bound that each keeps (design, rule 4).
    slack = (np.abs(queries).astype(np.float64) @ np.abs(memory.keys).T).sum(axis=1)
    assert (np.abs(sums.values - expected.values) <= 2e-6 * slack[:, None]).all()
    assert sums.counts.tolist() == expected.counts.tolist()
    trained = local.dual_output("fc", queries)
    np.testing.assert_allclose(output.values, trained.values, rtol=1e-5, atol=1e-5)
    assert output.trained is not None
    assert output.trained.shape == output.values.shape == (len(queries), 5)


def test_a_part_may_have_padding_where_another_has_none(narrow: str, memory: Memory) -> None:
    # Object columns of one part and int columns of another make one column.
    queries = np.random.default_rng(1).standard_normal((6, D_IN)).astype(np.float32)
    with Client(narrow) as client:
        hits = client.top_k("fc", queries, k=600)
    assert hits.rows.shape == (6, 600)
    expected = [memory.label[row] for row in hits.rows.ravel().tolist()]
    assert hits["label"].ravel().tolist() == expected


def test_answers_too_large_for_one_message_are_asked_in_smaller_parts(
    narrow: str, local: Client, queries: np.ndarray
) -> None:
    # 86 steps of 80 places at over 50 bytes each: 0.3 MiB per query at least.
    with Client(narrow) as client:
        hits = client.top_k("fc", queries, k=80, group_by="step")
    whole = local.top_k("fc", queries, k=80, group_by="step")
    assert hits.rows.tobytes() == whole.rows.tobytes()


def test_one_query_that_does_not_fit_is_refused_with_the_way_out(
    narrow: str, queries: np.ndarray
) -> None:
    with Client(narrow) as client, pytest.raises(ResourceExhaustedError) as caught:
        client.top_k("fc", queries, k=600, group_by="noise")
    assert caught.value.reason == "ANSWER_TOO_LARGE"
    assert "smaller k" in str(caught.value)


def test_requests_too_large_for_one_message(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((20, 2048)).astype(np.float32)
    queries = rng.standard_normal((300, 2048)).astype(np.float32)
    assert queries.nbytes > 2 << 20
    path = make_index(tmp_path, keys, None, label=list(range(20)))
    limits = ServerLimits(max_message_mib=1)
    with serving({"wide": path}, limits=limits) as address, Client(address) as client:
        hits = client.top_k("fc", queries, k=1)
    reference = queries.astype(np.float64) @ keys.astype(np.float64).T
    np.testing.assert_array_equal(hits.rows[:, 0], reference.argmax(axis=1))


def test_many_example_ids(narrow: str) -> None:
    with Client(narrow) as client:
        assert client.examples(range(11)) == [None] * 11


def test_the_limits_are_asked_for_once() -> None:
    asking = Asking(None, None)
    limits = pb.Limits(max_k=9, max_queries=2, max_message_bytes=1 << 20)
    asked: list[str] = []

    def answer(step: Send) -> Any:
        asked.append(type(step.request).__name__)
        if isinstance(step.request, pb.ListIndexesRequest):
            return pb.ListIndexesResponse(limits=limits)
        return sums_response(step.request.queries.shape[0])

    for _ in range(2):
        question = SumsQuestion("fc", np.ones((5, 3), np.float32), "label")
        steps = asking.rows(question, None, None, sums_of)
        assert drive(steps, answer).values.shape == (5, 1)
    assert asked == ["ListIndexesRequest"] + ["SumsRequest"] * 6


def drive(steps: Steps[Any], answer: Callable[[Send], Any]) -> Any:
    step = next(steps)
    while True:
        assert isinstance(step, Send)
        try:
            step = steps.send(answer(step))
        except StopIteration as done:
            return done.value


def sums_response(queries: int) -> pb.SumsResponse:
    return pb.SumsResponse(
        groups=pb.Column(name="label", type=pb.COLUMN_TYPE_INT64, data=bytes(8)),
        values=pb.Tensor(dtype=pb.DATA_TYPE_FLOAT64, shape=[queries, 1], data=bytes(8 * queries)),
        counts=pb.Tensor(dtype=pb.DATA_TYPE_INT64, shape=[1], data=bytes(8)),
    )
