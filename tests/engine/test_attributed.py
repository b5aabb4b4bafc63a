"""The engine's attribution over layers: merging, what is not finite, places folded to units."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from synthetic import make_index

from dualform.engine import Index
from dualform.engine.groups import attributed
from dualform.engine.groups.attributed import AttributedSum
from dualform.engine.groups.pairs import Pairs
from dualform.engine.memory.fold import fold
from dualform.engine.memory.weights import weights_by_row
from dualform.engine.rows.groups import Groups, in_line
from dualform.questions import AttributedLayer, AttributeQuestion, QuestionError
from dualform.store.grouping import group

ROWS, D_IN, D_OUT, LR = 300, 9, 4, 0.1


def memory(
    directory: Path, values: np.ndarray | None = None
) -> tuple[Path, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((ROWS, D_IN)).astype(np.float32)
    if values is None:
        values = rng.standard_normal((ROWS, D_OUT)).astype(np.float32)
    codes = rng.integers(0, 40, ROWS)
    path = make_index(directory, keys, values, lr=LR, shard_rows=70, example=codes.tolist())
    return path, keys, values, codes


def ask(path: Path, layer: AttributedLayer, inputs: int, k: int | None) -> np.ndarray:
    question = AttributeQuestion((layer,), inputs, k=k, max_residual=1e9)
    with Index.open(path, use_faiss=False) as index:
        return index.attribute(question).scores


@pytest.mark.parametrize("places", [2, 50])
def test_places_are_added_up(tmp_path: Path, places: int) -> None:
    """Few as they are, many by output unit; the same numbers as one by one in float64."""
    path, keys, values, codes = memory(tmp_path)
    rng = np.random.default_rng(1)
    queries = rng.standard_normal((3 * places, D_IN)).astype(np.float32)
    directions = rng.standard_normal((3 * places, D_OUT)).astype(np.float32)
    inputs = np.repeat([0, 1, 2], places)
    found = ask(path, AttributedLayer("fc", queries, directions, inputs), 3, None)
    wide = [array.astype(np.float64) for array in (queries, keys, directions, values)]
    terms = LR * (wide[0] @ wide[1].T) * (wide[2] @ wide[3].T)
    of_inputs = terms.reshape(3, places, ROWS).sum(1)
    expected = np.stack([np.bincount(codes, one, 40) for one in of_inputs])
    np.testing.assert_allclose(found, expected[:, np.unique(codes)], atol=1e-6 * abs(terms).sum())


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("inputs", [1, 3, 40])
def test_inputs_by_themselves(
    tmp_path: Path, inputs: int, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, a few and many are multiplied each in its way; where torch may multiply directions and
    values in less than float32, as in float64."""
    monkeypatch.setattr(attributed, "multiplies_in_float32", lambda: not reduced)
    path, keys, values, codes = memory(tmp_path)
    rng = np.random.default_rng(2)
    queries = rng.standard_normal((inputs, D_IN)).astype(np.float32)
    directions = rng.standard_normal((inputs, D_OUT)).astype(np.float32)
    wide = []

    def watched(left: torch.Tensor, right: torch.Tensor, **how: bool) -> torch.Tensor:
        wide.append(how["wide"])
        return weights_by_row(left, right, **how)

    monkeypatch.setattr(attributed, "weights_by_row", watched)
    found = ask(path, AttributedLayer("fc", queries, directions), inputs, None)
    assert set(wide) == {reduced}
    exact = [array.astype(np.float64) for array in (queries, keys, directions, values)]
    terms = LR * (exact[0] @ exact[1].T) * (exact[2] @ exact[3].T)
    expected = np.stack([np.bincount(codes, one, 40) for one in terms])
    size = np.abs(terms).sum(axis=1, keepdims=True)
    assert (np.abs(found - expected[:, np.unique(codes)]) <= 1e-6 * size).all()


def test_what_is_too_large_on_the_way_is_no_infinity(tmp_path: Path) -> None:
    """Products beyond float32 that cancel in float64."""
    values = np.ones((ROWS, D_OUT), np.float32) * np.float32(2e19)
    values[:, 1] *= -1
    values[:, 2:] = 1
    path, keys, _, codes = memory(tmp_path, values)
    direction = np.array([[2e19, 2e19, 1, 1]], np.float32)
    found = ask(path, AttributedLayer("fc", keys[:1], direction), 1, None)
    terms = LR * 2 * (keys[:1].astype(np.float64) @ keys.astype(np.float64).T)[0]
    np.testing.assert_allclose(
        found[0], np.bincount(codes, terms, 40)[np.unique(codes)], rtol=1e-5, atol=1e-5
    )


def test_a_group_with_a_row_that_is_not_finite_is_never_ranked(tmp_path: Path) -> None:
    values = np.ones((ROWS, D_OUT), np.float32)
    values[7, 2] = np.nan
    path, keys, _, codes = memory(tmp_path, values)
    layer = AttributedLayer("fc", keys[:2], np.ones((2, D_OUT), np.float32))
    with Index.open(path, use_faiss=False) as index:
        found = index.attribute(AttributeQuestion((layer,), 2, k=40))
    others = sorted(set(codes.tolist()) - {int(codes[7])})
    assert [sorted(g for g in found.groups.to_pylist()[start:][:40] if g is not None)
            for start in (0, 40)] == [others, others]  # fmt: skip
    assert np.isnan(found.scores[:, len(others) :]).all()


def test_any_split_of_the_rows_adds_up_to_the_whole(tmp_path: Path) -> None:
    path, keys, values, _ = memory(tmp_path)
    directions = torch.randn(5, D_OUT, generator=torch.Generator().manual_seed(0))
    terms = np.abs(keys[:5]) @ np.abs(keys).T * (directions.abs().numpy() @ np.abs(values).T)
    size = LR * float(terms.sum(axis=1).max())
    pairs = Pairs(5, torch.from_numpy(keys[:5]), directions, np.arange(5))
    with Index.open(path, use_faiss=False) as index:
        layer, coefficients = index.layers["fc"], index.ledger_coefficients("fc", index.steps)

        def taken(selected: np.ndarray, by: str) -> AttributedSum:
            groups = Groups(by if by == "example" else layer.space.grouping("example"))
            total = AttributedSum(pairs, coefficients, groups)
            fold(layer, pairs.queries, selected, [total], None)
            return total

        whole = taken(layer.space.everything, "known").result()
        for by in ("known", "example"):
            first = np.arange(ROWS) % 3 == 0
            total, rest = taken(first, by), taken(~first, by)
            total.merge(rest)
            np.testing.assert_allclose(total.result(), whole, rtol=0, atol=1e-6 * size)
        other = AttributedSum(pairs.part(0, 4), coefficients, Groups("example"))
        with pytest.raises(ValueError, match="same question"):
            total.merge(other)


def test_groups_of_several_row_spaces_are_brought_in_line() -> None:

    first, second = group(pa.array([3, 1, None])), group(pa.array([2, 3, 3]))
    none = group(pa.nulls(2))
    lined = in_line([first, second, none])
    assert all(each.values.to_pylist() == [1, 2, 3, None] for each in lined)
    assert [each.codes.tolist() for each in lined] == [[2, 0, 3], [1, 2, 2], [3, 3]]
    with pytest.raises(ValueError, match="int64 and string"):
        in_line([first, group(pa.array(["a"]))])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"inputs": np.array([1, 0, 2])}, "must ascend"),
        ({"inputs": np.array([0.0, 1, 2])}, "int64"),
        ({"inputs": np.array([0, 1])}, r"int64 \[3\] is needed"),
        ({"direction": np.ones((2, D_OUT), np.float32)}, "one direction for each query"),
        ({"direction": np.full((3, D_OUT), np.nan, np.float32)}, "must be finite"),
        ({"queries": np.ones((3, D_IN))}, "must be float32"),
    ],
)
def test_bad_layers(change: dict[str, np.ndarray], says: str) -> None:
    given = {
        "queries": np.ones((3, D_IN), np.float32),
        "direction": np.ones((3, D_OUT), np.float32),
        **change,
    }
    with pytest.raises(QuestionError, match=f"layer 'fc': .*{says}"):
        AttributedLayer("fc", **given)


def test_bad_questions() -> None:
    layer = AttributedLayer("fc", np.ones((3, D_IN), np.float32), np.ones((3, D_OUT), np.float32))
    with pytest.raises(QuestionError, match="there twice"):
        AttributeQuestion((layer, layer), 3)
    with pytest.raises(QuestionError, match="up to input 2, and there are 2"):
        AttributeQuestion((layer,), 2)
    with pytest.raises(QuestionError, match="no layers"):
        AttributeQuestion((), 1)
