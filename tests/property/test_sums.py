"""Sums by every strategy, over random keys that come again, groups, filters and shards."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st
from soak.counts import count
from synthetic import make_index

from dualform.client import parse_filter
from dualform.engine import Index
from dualform.engine.errors import InvalidArgumentError


@settings(max_examples=count(15, 1000), deadline=None)
@given(st.data())
def test_strategies_agree_with_float64(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 120), "rows")
    distinct = data.draw(st.integers(1, rows), "distinct")
    d = data.draw(st.integers(1, 9), "d")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31), "seed"))
    base = rng.standard_normal((distinct, d)).astype(np.float32)
    if data.draw(st.booleans(), "no sign"):
        base = np.abs(base)
    keys = base[rng.integers(0, distinct, rows)]
    label = rng.integers(0, data.draw(st.integers(1, 9), "labels"), rows)
    noise = rng.integers(0, 40, rows)
    rows_per_step = data.draw(st.integers(1, 30), "rows per step")
    columns = {"label": label, "noise": noise, "step": np.arange(rows) // rows_per_step}
    queries = rng.standard_normal((data.draw(st.integers(1, 20), "queries"), d))
    queries = queries.astype(np.float32)
    column = data.draw(st.sampled_from(sorted(columns)), "group_by")
    selecting = data.draw(st.sampled_from(sorted(columns)), "filter by")
    least = data.draw(st.integers(0, int(columns[selecting].max()) + 1), "least")
    selected = columns[selecting] >= least
    absolute = data.draw(st.booleans(), "absolute")
    edges = data.draw(st.sampled_from([None, [0, 3, 5], [1, 2]]), "bins")
    weights = queries.astype(np.float64) @ keys.T.astype(np.float64)
    weights = np.abs(weights) if absolute else weights
    terms = np.abs(queries).astype(np.float64) @ np.abs(keys).T
    if edges is None:
        groups = [columns[column] == value for value in np.unique(columns[column])]
    else:
        inside = [
            (columns[column] >= low) & (columns[column] < high) for low, high in pairwise(edges)
        ]
        inside[-1] |= columns[column] == edges[-1]
        groups = inside
    with tempfile.TemporaryDirectory() as folder:
        path = make_index(
            Path(folder),
            keys,
            None,
            rows_per_step=rows_per_step,
            shard_rows=data.draw(st.integers(1, 130), "shard rows"),
            label=label.tolist(),
            noise=noise.tolist(),
        )
        with Index.open(path, device="cpu") as index:
            refused = set()
            for strategy in ("auto", "scan", "distinct_keys", "key_sums"):
                try:
                    sums = index.sums(
                        "fc",
                        queries,
                        column,
                        absolute=absolute,
                        where=parse_filter(f"{selecting} >= {least}"),
                        bins=edges,
                        strategy=strategy,  # type: ignore[arg-type]
                    )
                except InvalidArgumentError:
                    refused.add(strategy)
                    continue
                event(f"{strategy}: {sums.plan.strategy}")
                for number, group in enumerate(groups):
                    members = group & selected
                    error = np.abs(sums.values[:, number] - weights[:, members].sum(1))
                    assert (error <= 1e-6 * terms[:, members].sum(1)).all(), strategy
                    assert sums.counts[number] == members.sum()
            assert refused <= {"distinct_keys", "key_sums"}
            assert ("distinct_keys" in refused) == (len(np.unique(keys, axis=0)) > rows // 2)
