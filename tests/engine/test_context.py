"""Answers do not depend on what the calling thread has in force in torch and NumPy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.api.verify import verify_index
from dualform.engine.errors import InvalidArgumentError

CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "another default device": lambda: torch.device("meta"),
    "errors of NumPy": lambda: np.errstate(all="raise"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((900, 5)) @ rng.standard_normal((5, 256))
    keys += 0.01 * rng.standard_normal(keys.shape)
    keys = np.tile(keys.astype(np.float32), (3, 1))
    values = rng.standard_normal((len(keys), 6)).astype(np.float32)
    return make_index(
        tmp_path_factory.mktemp("index"),
        keys,
        values,
        rows_per_step=100,
        shard_rows=700,
        label=(np.arange(len(keys)) % 3).tolist(),
    )


def answers(index: Index) -> list[np.ndarray]:
    """One of everything, of single queries and of several."""
    random = np.random.default_rng(1).standard_normal((5, 256)).astype(np.float32)
    found = []
    for queries in (random, random[:1]):
        for strategy in ("certified", "flat", "scan"):
            hits = index.top_k("fc", queries, 7, strategy=strategy)
            found += [hits.rows, hits.scores]
        hits = index.top_k("fc", queries, 7, rank_by="contribution", unit=2, at_step=9)
        found += [hits.rows, hits.scores]
        for strategy in ("scan", "distinct_keys"):
            found.append(
                index.sums("fc", queries, "label", absolute=True, strategy=strategy).values
            )
        found.append(index.dual_output("fc", queries).values)
        found.append(index.dual_output("fc", queries, strategy="scan").values)
        found.append(index.dual_output("fc", queries, at_step=9, group_by="label").values)
        told = index.explain("fc", queries, k=3, group_by="label", absolute=True, dual_output=True)
        assert told.top_k is not None
        assert told.sums is not None
        assert told.output is not None
        found += [told.top_k.rows, told.sums.values, told.output.values]
        found += [chunk.weights for chunk in index.stream_weights("fc", queries)]
    return found


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_callers_context_changes_nothing(path: Path, name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # single queries then go over shards in threads
    try:
        with Index.open(path, device="cpu") as index:
            expected = answers(index)
            with CONTEXTS[name]():
                inside = answers(index)
        with CONTEXTS[name](), Index.open(path, device="cpu") as index:
            opened_inside = answers(index)
            report = verify_index(path)
    finally:
        torch.set_num_threads(threads)
    # These rows were made up, and rebuild nothing: by the same figures.
    assert report == verify_index(path)
    for found in (inside, opened_inside):
        for each, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(each, other)


def test_a_question_while_python_shuts_down(path: Path) -> None:
    program = f"""
import atexit, numpy as np, torch
from dualform.engine import Index
torch.set_num_threads(2)
index = Index.open({str(path)!r}, device="cpu")
def ask():
    for strategy in ("certified", "flat"):
        print(index.top_k("fc", np.ones((1, 256), np.float32), 3, strategy=strategy).rows.shape)
atexit.register(ask)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "(1, 3)\n(1, 3)\n", done.stderr


@pytest.mark.parametrize("k", [0, -1, 2.0, "3", True, None])
def test_k_is_a_positive_integer(path: Path, k: object) -> None:
    queries = np.ones((1, 256), np.float32)
    with Index.open(path, device="cpu") as index:
        with pytest.raises(InvalidArgumentError, match=r"at least 1|an int is needed") as caught:
            index.top_k("fc", queries, k)  # type: ignore[arg-type]
        assert caught.value.field == "k"
        assert index.top_k("fc", queries, np.int64(3)).rows.shape == (1, 3)  # type: ignore[arg-type]
