"""Two, three and five actors of a real Ray behind a real server, against one machine's answers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve.serving import Served, array, serving, tensor

from dualform.client import parse_filter
from dualform.engine import Index
from dualform.engine.messages.catalog import Catalog
from dualform.engine.messages.versions import version_at
from dualform.machines.fleet import Fleet
from dualform.machines.spread import Machines
from dualform.questions import OutputQuestion, TopKQuestion
from dualform.v1 import attribution_pb2 as pb

pytestmark = pytest.mark.slow
LAYER, D_IN = "2", 48


class Kept(Machines):
    """Machines that outlive the server: other tests use them too."""

    def close(self) -> None:
        """Leave them."""


@pytest.fixture(scope="module")
def one(sharded_index: Path) -> Iterator[Served]:
    """A server that has all shards itself."""
    with serving({"digits": sharded_index}) as served:
        yield served


@pytest.fixture(scope="module", params=[2, 3, 5])
def many(request: Any, fleet: Fleet, sharded_index: Path) -> Iterator[Served]:
    """A server whose shards are with so many actors."""
    opener = Kept(fleet, "cpu", request.param)
    with serving({"digits": sharded_index}, catalog_type=partial(Catalog, opener=opener)) as served:  # type: ignore[arg-type]
        yield served


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    generator = np.random.default_rng(0)
    return generator.standard_normal((5, D_IN)).astype(np.float32)


def test_what_is_served(one: Served, many: Served) -> None:
    assert many.stub.GetIndex(pb.GetIndexRequest()) == one.stub.GetIndex(pb.GetIndexRequest())
    assert many.stub.ListIndexes(pb.ListIndexesRequest()) == one.stub.ListIndexes(
        pb.ListIndexesRequest()
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"order": pb.ORDER_ABSOLUTE, "k": 300},
        {"order": pb.ORDER_SMALLEST, "group_by": "label"},
        {"distinct": "example", "k": 30},
        {"distinct": "task", "group_by": "label", "k": 3},
        {"rank_by": pb.RANK_BY_CONTRIBUTION, "unit": 3, "at_step": 40},
        {"rank_by": pb.RANK_BY_CONTRIBUTION, "unit": 7, "group_by": "task"},
    ],
    ids=str,
)
def test_top_k_is_bit_for_bit_one_machines(
    one: Served, many: Served, queries: np.ndarray, options: dict[str, Any]
) -> None:
    step = pb.Comparison(column="step", operator=pb.OPERATOR_GE, values=[pb.Value(int64_value=11)])
    for where in (None, pb.Filter(comparison=step)):
        request = pb.TopKRequest(
            layer=LAYER, queries=tensor(queries), where=where, **{"k": 9, **options}
        )
        assert many.stub.TopK(request) == one.stub.TopK(request)


def test_weights_come_in_row_order(one: Served, many: Served, queries: np.ndarray) -> None:
    request = pb.StreamWeightsRequest(layer=LAYER, queries=tensor(queries))
    assert list(many.stub.StreamWeights(request)) == list(one.stub.StreamWeights(request))


def test_payloads_are_the_servers_own(one: Served, many: Served) -> None:
    request = pb.GetExamplesRequest(ids=[pb.Value(int64_value=each) for each in (0, 1, 3)])
    answer = many.stub.GetExamples(request)
    assert [example.text for example in answer.examples] == ["digit 0", "", "digit 3"]
    assert answer == one.stub.GetExamples(request)


def test_sums_are_within_the_rule(one: Served, many: Served, queries: np.ndarray) -> None:
    request = pb.SumsRequest(layer=LAYER, queries=tensor(queries), group_by="label", absolute=True)
    ours, theirs = many.stub.Sums(request), one.stub.Sums(request)
    values = array(theirs.values)  # sums of absolute terms, so the rule's measure themselves
    assert np.abs(array(ours.values) - values).max() <= 1e-6 * values.max()
    for response in (ours, theirs):
        response.ClearField("values")
    assert ours == theirs


def test_under_adamw_also_after_an_actor_was_killed(
    fleet: Fleet, adamw_index: Path, queries: np.ndarray
) -> None:
    """Units and outputs that were followed over machines: whoever takes over has to know no more
    than the question says."""
    contribution = TopKQuestion(LAYER, queries, k=9, rank_by="contribution", unit=3)
    masked = OutputQuestion(LAYER, queries, where=parse_filter("label >= 4"))
    with (
        Index.open(adamw_index, device="cpu") as one,
        Machines(fleet, "cpu", 3).open(version_at(adamw_index)) as many,
    ):
        expected, output = one.ask(contribution), one.ask(masked)

        def same() -> None:
            found = many.ask(contribution)
            assert found.rows.tobytes() == expected.rows.tobytes()
            assert found.scores.tobytes() == expected.scores.tobytes()
            assert many.ask(masked).values.tobytes() == output.values.tobytes()

        same()
        there = fleet.machines()[many.seats()[1][0]]
        assert there is not None
        os.kill(there.process, signal.SIGKILL)
        same()
