"""Explain: the answers that single questions give, from at most one scan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rows_read import rows_read
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.errors import FailedPreconditionError, InvalidArgumentError
from dualform.v1 import attribution_pb2 as pb

ROWS, D = 5000, 17


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((ROWS, D)).astype(np.float32)
    keys[777, 3] = np.inf
    return {
        "keys": keys,
        "values": rng.standard_normal((ROWS, 4)).astype(np.float32),
        "queries": rng.standard_normal((5, D)).astype(np.float32),
        "many": rng.standard_normal((300, D)).astype(np.float32),
        "label": rng.integers(0, 4, ROWS),
    }


@pytest.fixture(scope="module")
def index(arrays: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = make_index(
        tmp_path_factory.mktemp("index"),
        arrays["keys"],
        arrays["values"],
        rows_per_step=50,
        shard_rows=1500,
        label=arrays["label"].tolist(),
        momentum=0.5,
    )
    with Index.open(path, device="cpu") as opened:
        yield opened


LATE = pb.Filter(
    comparison=pb.Comparison(
        column="step", operator=pb.OPERATOR_GE, values=[pb.Value(int64_value=20)]
    )
)
ASKED = [
    {"k": 3},
    {"k": 3, "group_by": "label"},
    {"k": 3, "group_by": "label", "where": LATE},
    {"k": 7, "group_by": "label", "absolute": True, "order": "absolute"},
    {"k": 7, "group_by": "label", "dual_output": True},
    {"k": 7, "dual_output": True, "where": LATE, "order": "smallest"},
    {"dual_output": True},
    {"group_by": "step", "absolute": True, "dual_output": True, "where": LATE, "k": 6000},
]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("which", ["queries", "many"])
def test_the_answers_are_those_of_single_questions(
    index: Index, arrays: dict[str, np.ndarray], asked: dict[str, Any], which: str
) -> None:
    queries = arrays[which]
    where, group_by = asked.get("where"), asked.get("group_by")
    found = index.explain("fc", queries, **asked)
    if "k" in asked:
        hits = index.top_k(
            "fc", queries, asked["k"], where=where, order=asked.get("order", "largest")
        )
        assert found.top_k is not None
        np.testing.assert_array_equal(found.top_k.rows, hits.rows)
        np.testing.assert_array_equal(found.top_k.scores, hits.scores)
        assert found.top_k.columns == hits.columns
        assert found.top_k.coverage == hits.coverage
    else:
        assert found.top_k is None
    if group_by:
        sums = index.sums(
            "fc", queries, group_by, absolute=asked.get("absolute", False), where=where
        )
        assert found.sums is not None
        assert found.sums.groups == sums.groups
        np.testing.assert_array_equal(found.sums.counts, sums.counts)
        slack = np.abs(queries).astype(np.float64).sum() * 100
        np.testing.assert_allclose(found.sums.values, sums.values, atol=1e-6 * slack)
    else:
        assert found.sums is None
    if asked.get("dual_output"):
        out = index.dual_output("fc", queries, where=where, group_by=group_by)
        assert found.output is not None
        np.testing.assert_allclose(found.output.values, out.values, rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(found.output.initial, out.initial)
        assert found.output.coverage == out.coverage
    else:
        assert found.output is None


def test_output_and_sums_read_every_row_once_at_most(
    index: Index, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = arrays["queries"][:3]  # for more, outer products are added up instead
    everything = {"group_by": "label", "absolute": True, "dual_output": True}
    read = rows_read(monkeypatch, lambda: index.explain("fc", queries, **everything))
    assert read == ROWS
    some = {**everything, "where": LATE}
    read = rows_read(monkeypatch, lambda: index.explain("fc", queries, **some))
    assert read == ROWS - 1000
    # Key sums need none.
    signed = lambda: index.explain("fc", queries, group_by="label")  # noqa: E731
    assert rows_read(monkeypatch, signed) == 0


def test_refusals(index: Index, arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="k is 0"):
        index.explain("fc", arrays["queries"], k=0)
    with pytest.raises(InvalidArgumentError, match="order='best' is none of"):
        index.explain("fc", arrays["queries"], k=1, order="best")  # type: ignore[arg-type]
    with Index.open(make_index(tmp_path, arrays["keys"], None), device="cpu") as bare:
        assert bare.explain("fc", arrays["queries"], k=1).top_k is not None
        with pytest.raises(FailedPreconditionError, match="without values"):
            bare.explain("fc", arrays["queries"], k=1, dual_output=True)
