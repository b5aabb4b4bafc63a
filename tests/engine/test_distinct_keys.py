"""Sums over distinct keys: held against float64, chosen where cheaper, refused where unknown."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rows_read import rows_read
from synthetic import make_index

from dualform.engine import Index, verify_index
from dualform.engine.errors import DataLossError, InvalidArgumentError
from dualform.store import IndexManifest
from dualform.store.files import write_atomic, write_sealed
from dualform.v1 import attribution_pb2 as pb

ROWS, DISTINCT, D = 6000, 300, 200
EQUAL = "layers/fc/equal.npy"


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    """Ten epochs: every key comes in each of them, with its label."""
    rng = np.random.default_rng(0)
    which = np.concatenate([rng.permutation(DISTINCT) for _ in range(ROWS // DISTINCT)])
    return {
        "keys": rng.standard_normal((DISTINCT, D)).astype(np.float32)[which],
        "queries": rng.standard_normal((6, D)).astype(np.float32),
        "label": rng.integers(0, 4, DISTINCT)[which],
        "user": rng.integers(0, 500, ROWS),
        "step": np.arange(ROWS) // 60,
    }


@pytest.fixture(scope="module", params=[700, 1 << 16])
def path(
    arrays: dict[str, np.ndarray],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    return make_index(
        tmp_path_factory.mktemp("index"),
        arrays["keys"],
        np.ones((ROWS, 16), np.float32),
        rows_per_step=60,
        shard_rows=request.param,
        **{name: arrays[name].tolist() for name in ("label", "user")},
    )


@pytest.fixture
def index(path: Path) -> Any:
    with Index.open(path, device="cpu") as opened:
        yield opened


def at_least(column: str, number: int) -> pb.Filter:
    value = pb.Value(int64_value=number)
    return pb.Filter(
        comparison=pb.Comparison(column=column, operator=pb.OPERATOR_GE, values=[value])
    )


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("column", ["label", "user", "step"])
@pytest.mark.parametrize("start", [0, 37])
def test_sums_match_float64(
    index: Index, arrays: dict[str, np.ndarray], column: str, absolute: bool, start: int
) -> None:
    where = at_least("step", start) if start else None
    selected, groups = arrays["step"] >= start, arrays[column]
    weights = arrays["queries"].astype(np.float64) @ arrays["keys"].T.astype(np.float64)
    terms = np.abs(arrays["queries"]).astype(np.float64) @ np.abs(arrays["keys"]).T
    answers = [
        index.sums(
            "fc", arrays["queries"], column, absolute=absolute, where=where, strategy=strategy
        )
        for strategy in ("auto", "scan", "distinct_keys")
    ]
    for sums in answers:
        assert sums.counts.sum() == selected.sum() == sums.coverage.rows
        for g, value in enumerate(np.unique(groups)):
            members = (groups == value) & selected
            expected = (np.abs(weights) if absolute else weights)[:, members].sum(1)
            assert (np.abs(sums.values[:, g] - expected) <= 1e-6 * terms[:, members].sum(1)).all()


def test_bins(index: Index, arrays: dict[str, np.ndarray]) -> None:
    edges = [0, 13, 50, 77]
    weights = arrays["queries"].astype(np.float64) @ arrays["keys"].T.astype(np.float64)
    got = index.sums("fc", arrays["queries"], "step", bins=edges, strategy="distinct_keys")
    for query, each in zip(got.values, weights, strict=True):
        expected = np.histogram(arrays["step"], edges, weights=each)[0]
        np.testing.assert_allclose(query, expected, atol=1e-3)
    assert got.plan.strategy == "distinct_keys"


def test_one_row_is_multiplied_for_each_key(
    index: Index, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    for where in (None, at_least("step", 20)):
        ask = lambda where=where, **more: index.sums(  # noqa: E731
            "fc", arrays["queries"], "label", absolute=True, where=where, **more
        )
        assert rows_read(monkeypatch, ask) == DISTINCT
        assert rows_read(monkeypatch, lambda ask=ask: ask(strategy="scan")) >= ROWS - 1200
        plan = ask().plan
        assert plan.strategy == "distinct_keys"
        assert set(plan.costs) == {"scan", "distinct_keys"}
        assert (
            f"300 distinct keys stand for {ROWS if where is None else 4800:,} rows" in plan.reason
        )
        forced = ask(strategy="distinct_keys").plan
        assert (forced.strategy, forced.reason) == ("distinct_keys", "it was asked for")


def test_key_sums_come_first(
    index: Index, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = lambda **more: index.sums("fc", arrays["queries"], "label", **more)  # noqa: E731
    assert rows_read(monkeypatch, ask) == 0
    assert ask().plan.strategy == "key_sums"
    assert rows_read(monkeypatch, lambda: ask(strategy="distinct_keys")) == DISTINCT
    # Steps from 3 on: where shards are small the later ones' runs are whole, and left alone.
    plan = ask(where=at_least("step", 3)).plan
    if len(index.layers["fc"].shards) > 1:
        assert plan.reason.startswith("key sums stand for ")
    else:
        assert plan.strategy == "distinct_keys"


def test_few_rows_with_many_keys_are_scanned(
    index: Index, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last four steps no key comes twice: as many would be read, and counted besides."""
    found = index.sums("fc", arrays["queries"], "label", absolute=True, where=at_least("step", 96))
    assert found.plan.strategy == "scan"
    assert "absolute weights are no product with a key sum" in found.plan.reason
    assert found.plan.costs["scan"] < found.plan.costs["distinct_keys"]


def test_no_row_at_all(index: Index, arrays: dict[str, np.ndarray]) -> None:
    found = index.sums(
        "fc",
        arrays["queries"],
        "label",
        absolute=True,
        where=at_least("step", 1000),
        strategy="distinct_keys",
    )
    assert not found.values.any()
    assert found.coverage.rows == 0


def test_explain_scans_only_where_another_answer_does(
    index: Index, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = arrays["queries"][:3]
    alone = lambda: index.explain("fc", queries, group_by="label", absolute=True)  # noqa: E731
    assert rows_read(monkeypatch, alone) == DISTINCT
    sums = alone().sums
    assert sums is not None
    assert sums.plan.strategy == "distinct_keys"
    both = lambda: index.explain(  # noqa: E731
        "fc", queries, group_by="label", absolute=True, dual_output=True
    )
    assert rows_read(monkeypatch, both) == ROWS
    other = both().sums
    assert other is not None
    assert other.plan.strategy == "scan"
    np.testing.assert_allclose(other.values, sums.values, rtol=1e-6)


def test_keys_that_are_not_finite_poison_only_their_groups(tmp_path: Path) -> None:
    keys = np.ones((12, 2), np.float32)
    keys[3::6] = [np.nan, 1]
    keys[4::6] = [np.inf, 1]
    keys[5::6] = [-0.0, 1]
    path = make_index(tmp_path, keys, None, label=[0, 0, 0, 1, 2, 3] * 2)
    with Index.open(path, device="cpu") as index:
        for queries in (np.ones((1, 2), np.float32), np.ones((9, 2), np.float32)):
            sums = index.sums("fc", queries, "label", strategy="distinct_keys", absolute=True)
            for query in sums.values:
                np.testing.assert_array_equal(query, [12, np.nan, np.inf, 2])
        assert sums.coverage.nonfinite == 4


def test_long_keys_do_not_overflow(tmp_path: Path) -> None:
    keys = np.array([[2e38, 2e38], [-1e38, 1]] * 5, np.float32)
    with Index.open(make_index(tmp_path, keys, None, label=[0, 1] * 5), device="cpu") as index:
        query = np.full((1, 2), 4, np.float32)
        sums = index.sums("fc", query, "label", strategy="distinct_keys", absolute=True)
        np.testing.assert_allclose(sums.values, [[8e39, 2e39]], rtol=1e-6)


def test_keys_that_never_repeat_are_refused_by_name(tmp_path: Path) -> None:
    keys = np.random.default_rng(2).standard_normal((50, 4)).astype(np.float32)
    with Index.open(make_index(tmp_path, keys, None), device="cpu") as index:
        with pytest.raises(InvalidArgumentError, match=r"keys of layer 'fc' are equal") as caught:
            index.sums("fc", keys[:1], "step", strategy="distinct_keys")
        assert caught.value.field == "strategy"
        assert index.sums("fc", keys[:1], "step", absolute=True).plan.strategy == "scan"


def test_an_index_from_before_opens_and_scans(
    path: Path, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    with Index.open(path, device="cpu") as index:
        expected = index.sums("fc", arrays["queries"], "label", absolute=True).values
    older = _copy(path, tmp_path)
    data = json.loads((older / "manifest.json").read_bytes())
    del data["xxh3"]
    for layer in data["layers"]:
        (older / layer.pop("equal_keys")["first"]["name"]).unlink()
    write_sealed(older / "manifest.json", data)
    with Index.open(older, device="cpu") as index:
        index.verify_files()
        found = index.sums("fc", arrays["queries"], "label", absolute=True)
        assert found.plan.strategy == "scan"
        np.testing.assert_allclose(found.values, expected, rtol=1e-6)
        with pytest.raises(InvalidArgumentError, match="built before this was looked for"):
            index.sums("fc", arrays["queries"], "label", strategy="distinct_keys")


@pytest.mark.parametrize("offset", [0, 100, 127, 128, 1234, -1])
def test_a_flipped_byte_is_found_before_it_is_used(
    path: Path, tmp_path: Path, arrays: dict[str, np.ndarray], offset: int
) -> None:
    """What needs the file is refused, or answered without it; nothing else is."""
    damaged = _copy(path, tmp_path)
    data = bytearray((damaged / EQUAL).read_bytes())
    data[offset] ^= 1
    (damaged / EQUAL).write_bytes(data)
    queries = arrays["queries"]
    with Index.open(path, device="cpu") as index:
        expected = index.sums("fc", queries, "label", absolute=True, strategy="scan").values
        rows = index.top_k("fc", queries, 3).rows
    with Index.open(damaged, device="cpu") as index:
        np.testing.assert_array_equal(index.top_k("fc", queries, 3).rows, rows)
        found = index.sums("fc", queries, "label", absolute=True)
        assert found.plan.strategy == "scan"
        np.testing.assert_array_equal(found.values, expected)
        what = r"equal\.npy.*digest.*index build"
        with pytest.raises(InvalidArgumentError, match=what):
            index.sums("fc", queries, "label", strategy="distinct_keys")
        with pytest.raises(DataLossError, match=what):
            index.verify_files()
        assert index.damage is None
    (damage,) = verify_index(damaged).damage
    assert (damage.file, damage.layer) == (EQUAL, "fc")


def test_verify_compares_the_keys(path: Path, tmp_path: Path) -> None:
    """Whole, sealed and wrong: a key that is said to be another's."""
    assert "has not the key" not in verify_index(path).layers[0].note
    wrong = _copy(path, tmp_path)
    manifest = IndexManifest.load(wrong)
    layer = manifest.layers["fc"]
    assert layer.equal_keys is not None
    first = np.load(wrong / EQUAL)
    place = int(np.flatnonzero(first != np.arange(ROWS))[1234])
    first[place] = 0 if first[place] else 1
    np.save(wrong / EQUAL, first)
    entry = replace(write_atomic(wrong / EQUAL, (wrong / EQUAL).read_bytes()), name=EQUAL)
    layer = replace(layer, equal_keys=replace(layer.equal_keys, first=entry))
    replace(manifest, layers={"fc": layer}).save(wrong)
    with Index.open(wrong, device="cpu") as index:
        row = index.layers["fc"].space.ids[place]
    report = verify_index(wrong)
    assert not report.ok
    assert f"row {row} has not the key of the row that stands for it" in report.layers[0].note


def _copy(path: Path, directory: Path) -> Path:
    return Path(shutil.copytree(path, directory / "copy"))
