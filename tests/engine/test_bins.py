"""Sums over bins of a numeric column, held against numpy.histogram."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak.counts import count
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.errors import InvalidArgumentError
from dualform.engine.rows.bins import binned
from dualform.v1 import attribution_pb2 as pb

numbers = st.one_of(
    st.integers(-3, 12).map(float), st.floats(allow_nan=False, allow_infinity=False, width=32)
)


@settings(max_examples=count(80, 10_000), deadline=None)
@given(
    st.lists(st.one_of(numbers, st.just(math.nan), st.none()), min_size=1, max_size=30),
    st.lists(numbers, min_size=2, max_size=6, unique=True),
)
def test_floats_fall_where_numpy_puts_them(values: list[float | None], edges: list[float]) -> None:
    edges.sort()
    got = binned("x", pa.array(values, pa.float64()), edges)
    counted = np.array([v for v in values if v is not None and not math.isnan(v)])
    expected, _ = np.histogram(counted, edges)
    codes = got.codes[got.codes >= 0]
    assert np.bincount(codes, minlength=len(edges) - 1).tolist() == expected.tolist()
    assert got.values.to_pylist() == edges[:-1]
    for value, code in zip(values, got.codes, strict=True):
        if code >= 0:
            assert value is not None
            assert edges[code] <= value
            assert value < edges[code + 1] or value == edges[-1]


@settings(max_examples=count(80, 10_000), deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(-5, 12), st.integers(-(2**63), 2**63 - 1), st.none()),
        min_size=1,
        max_size=30,
    ),
    st.lists(
        st.one_of(numbers, st.sampled_from([-math.inf, math.inf, 2.0**63, -(2.0**63), 2.0**53])),
        min_size=2,
        max_size=6,
        unique=True,
    ),
)
def test_integers_are_compared_exactly(values: list[int | None], edges: list[float]) -> None:
    edges.sort()
    got = binned("x", pa.array(values, pa.int64()), edges)
    for value, code in zip(values, got.codes, strict=True):
        inside = [
            place
            for place in range(len(edges) - 1)
            # Python compares int and float exactly.
            if value is not None
            and edges[place] <= value
            and (value < edges[place + 1] or (place == len(edges) - 2 and value == edges[-1]))
        ]
        assert inside == ([] if code < 0 else [code])


ROWS = 4000


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((ROWS, 20)).astype(np.float32)
    noise = rng.standard_normal(ROWS)
    label = rng.integers(0, 5, ROWS)
    path = make_index(
        tmp_path_factory.mktemp("bins"),
        keys,
        None,
        rows_per_step=16,
        shard_rows=900,
        noise=noise.tolist(),
        label=label.tolist(),
        word=["a"] * ROWS,
    )
    return path, keys, noise


@pytest.mark.parametrize("absolute", [False, True])
def test_binned_sums_are_numpys(
    memory: tuple[Path, np.ndarray, np.ndarray], absolute: bool
) -> None:
    path, keys, noise = memory
    queries = np.random.default_rng(9).standard_normal((3, 20)).astype(np.float32)
    weights = queries.astype(np.float64) @ keys.T.astype(np.float64)
    terms = np.abs(queries).astype(np.float64) @ np.abs(keys).T
    weights = np.abs(weights) if absolute else weights
    step = np.arange(ROWS) // 16
    with Index.open(path, device="cpu") as index:
        for column, values, edges in (
            ("step", step, [0, 10, 11, 200]),
            ("noise", noise, [-1.0, -0.5, 0.0, 2.0]),
            ("step", step, np.linspace(0, 250, 101).tolist()),
        ):
            got = index.sums("fc", queries, column, absolute=absolute, bins=edges)
            assert got.counts.tolist() == np.histogram(values, edges)[0].tolist()
            assert got.coverage.rows == got.counts.sum()
            for i in range(3):
                expected = np.histogram(values, edges, weights=weights[i])[0]
                slack = np.histogram(values, edges, weights=terms[i])[0]
                assert (np.abs(got.values[i] - expected) <= 1e-6 * slack + 1e-12).all()


def test_bins_beside_a_filter_and_over_labels(
    memory: tuple[Path, np.ndarray, np.ndarray],
) -> None:
    path, keys, _ = memory
    queries = keys[:2]
    late = pb.Filter(
        comparison=pb.Comparison(
            column="step", operator=pb.OPERATOR_GE, values=[pb.Value(int64_value=100)]
        )
    )
    with Index.open(path, device="cpu") as index:
        got = index.sums("fc", queries, "step", where=late, bins=[0, 50, 120, 125])
        assert got.counts.tolist() == [0, 20 * 16, 6 * 16]
        assert not got.values[:, 0].any()
        # Whole labels: their stored key sums will do, no tile is read.
        by_label = index.sums("fc", queries, "label")
        two = index.sums("fc", queries, "label", bins=[0, 2, 4], stop=lambda: True)
        np.testing.assert_allclose(
            two.values,
            np.stack([by_label.values[:, :2].sum(1), by_label.values[:, 2:].sum(1)], 1),
            rtol=1e-12,
        )
        assert two.groups.to_pylist() == [0.0, 2.0]


@pytest.mark.parametrize(
    ("column", "bins", "message"),
    [
        ("word", [0, 1], "is not numeric"),
        ("step", [1], "at least two"),
        ("step", [0, 5, 5], "must ascend"),
        ("step", [0, math.nan, 5], "must ascend"),
        ("step", [5, 0], "must ascend"),
    ],
)
def test_what_is_no_bin_is_refused(
    memory: tuple[Path, np.ndarray, np.ndarray], column: str, bins: list[float], message: str
) -> None:
    path, keys, _ = memory
    with (
        Index.open(path, device="cpu") as index,
        pytest.raises(InvalidArgumentError, match=message) as caught,
    ):
        index.sums("fc", keys[:1], column, bins=bins)
    assert caught.value.field == "bins"
