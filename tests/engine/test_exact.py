"""Rule 1: a score is the float32 nearest to the exact dot product."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from soak.counts import count

from dualform.engine.errors import CancelledError
from dualform.engine.memory.exact import ExactDots, ExactWeights, error_bound

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def longest(keys: np.ndarray) -> float:
    return float(np.linalg.norm(keys.astype(np.float64), axis=1).max())


@st.composite
def keys_and_query(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    d = draw(st.integers(1, 6))
    n = draw(st.integers(1, 8))
    keys = draw(hnp.arrays(np.float32, (n, d), elements=floats))
    return keys, draw(hnp.arrays(np.float32, d, elements=floats))


@settings(max_examples=count(100, 10_000), deadline=None)
@given(keys_and_query())
def test_any_floats(case: tuple[np.ndarray, np.ndarray]) -> None:
    keys, query = case
    scores = ExactDots(torch.from_numpy(keys), torch.from_numpy(query), longest(keys)).rounded()
    expected = reference.exact_scores(keys, query[None])[0]
    np.testing.assert_array_equal(scores.view(np.uint32), expected.view(np.uint32))
    queries = torch.from_numpy(query).expand(len(keys), -1).contiguous()
    pairs = ExactDots(torch.from_numpy(keys), queries, longest(keys)).rounded()
    np.testing.assert_array_equal(pairs.view(np.uint32), expected.view(np.uint32))


def test_sums_beside_a_rounding_boundary() -> None:
    # 1 + 2^-24 is the middle between two float32; what is added decides, far below float64's ulp.
    for rest in (2.0**-90, 0.0, -(2.0**-90)):
        keys = np.array([[1, 2.0**-24, rest]], np.float32)
        query = np.ones(3, np.float32)
        scores = ExactDots(torch.from_numpy(keys), torch.from_numpy(query), longest(keys)).rounded()
        assert scores[0] == (np.float32(1 + 2.0**-23) if rest > 0 else np.float32(1))
        assert scores[0] == reference.exact_scores(keys, query[None])[0, 0]


def test_who_gives_up_waits_for_no_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of a few simple numbers often lie on a boundary: each is then added up exactly."""
    keys = torch.from_numpy(np.tile(np.array([1, 2.0**-24], np.float32), (500, 1)))
    queries = torch.ones((40, 2))
    added = 0
    fsum = math.fsum

    def counted(terms: list[float]) -> float:
        nonlocal added
        added += 1
        return fsum(terms)

    monkeypatch.setattr("dualform.engine.memory.exact.math.fsum", counted)
    exact, finite = ExactWeights(queries), np.ones(500, bool)
    assert (exact.of(keys, finite) == 1).all()
    assert added >= 40 * 500
    added = 0
    with pytest.raises(CancelledError):
        exact.of(keys, finite, lambda: added >= 700)
    assert added <= 703
    added = 0
    with pytest.raises(CancelledError):
        ExactDots(keys, queries[0], 2.0, lambda: added >= 30).rounded()
    assert added <= 33


def test_cancellation() -> None:
    keys = np.array([[1e20, 1.0, -1e20], [3e38, 3e38, -3e38]], np.float32)
    query = np.ones(3, np.float32)
    scores = ExactDots(torch.from_numpy(keys), torch.from_numpy(query), longest(keys)).rounded()
    np.testing.assert_array_equal(scores, np.array([1.0, 3e38], np.float32))


def test_one_large_key_beside_many_small_ones() -> None:
    # The bound that needs no pass over the rows decides nothing here: the second one must.
    rng = np.random.default_rng(0)
    keys = (rng.standard_normal((400, 300)) * 1e-9).astype(np.float32)
    keys[7] *= 1e20
    keys[::3] = 0.0
    query = rng.standard_normal(300).astype(np.float32)
    scores = ExactDots(torch.from_numpy(keys), torch.from_numpy(query), longest(keys)).rounded()
    expected = reference.exact_scores(keys, query[None])[0]
    np.testing.assert_array_equal(scores.view(np.uint32), expected.view(np.uint32))


def test_the_error_bound_holds_for_float32_products() -> None:
    rng = np.random.default_rng(0)
    for d in (3, 64, 800, 5000):
        keys = torch.from_numpy(rng.standard_normal((200, d)).astype(np.float32))
        queries = torch.from_numpy(rng.standard_normal((20, d)).astype(np.float32))
        norms = torch.linalg.vector_norm(queries.double(), dim=1)
        longest = float(torch.linalg.vector_norm(keys.double(), dim=1).max())
        error = ((queries @ keys.T).double() - queries.double() @ keys.double().T).abs()
        assert bool((error.amax(1) <= error_bound(d, norms, longest)).all())
