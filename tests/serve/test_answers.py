"""What comes over the wire, held against the index's own files and against the engine."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualform.engine.api.index import Index
from dualform.store import IndexManifest
from dualform.v1 import attribution_pb2 as pb

from .serving import Served, array, column, tensor


@pytest.fixture(scope="module")
def keys(digits_index: Path) -> np.ndarray:
    """Layer "2"'s keys by row id, as FAISS reads them: float32 [rows, d_in]."""
    manifest = IndexManifest.load(digits_index)
    layer = manifest.layers["2"]
    shards = []
    for shard, place in zip(layer.shards, manifest.spaces[layer.space].shards, strict=True):
        index = faiss.read_index(str(digits_index / shard.keys.name))
        ids = pq.read_table(digits_index / place.sidecar.name)["row"].to_numpy()
        shards.append(index.reconstruct_n(0, index.ntotal)[np.argsort(ids)])
    return np.concatenate(shards)


@pytest.fixture(scope="module")
def metadata(digits_index: Path) -> pa.Table:
    """Layer "2"'s sidecars by row id."""
    manifest = IndexManifest.load(digits_index)
    space = manifest.spaces[manifest.layers["2"].space]
    tables = [pq.read_table(digits_index / shard.sidecar.name) for shard in space.shards]
    return pa.concat_tables(tables).sort_by("row")


@pytest.fixture(scope="module")
def queries(keys: np.ndarray) -> np.ndarray:
    generator = np.random.default_rng(0)
    return generator.standard_normal((5, keys.shape[1])).astype(np.float32)


def test_list_and_get(digits_server: Served, digits_index: Path) -> None:
    listed = digits_server.stub.ListIndexes(pb.ListIndexesRequest())
    assert [(i.name, i.health, i.health_reason) for i in listed.indexes] == [
        ("digits", pb.HEALTH_SERVING, "")
    ]
    assert (listed.limits.max_k, listed.limits.max_queries) == (16384, 4096)
    assert listed.limits.max_message_bytes == 64 << 20
    got = digits_server.stub.GetIndex(pb.GetIndexRequest())
    assert got.limits == listed.limits
    manifest = IndexManifest.load(digits_index)
    assert (got.index.steps, got.index.optimizer) == (manifest.steps, "SGD")
    for layer, each in zip(got.index.layers, manifest.layers.values(), strict=True):
        assert (layer.name, layer.d_in, layer.d_out) == (each.name, each.d_in, each.d_out)
        assert (layer.bias, layer.values) == (each.bias is not None, each.values)
        assert layer.rows == manifest.spaces[each.space].rows
        types = {info.name: info.type for info in layer.columns}
        assert types["step"] == types["label"] == pb.COLUMN_TYPE_INT64
        assert types["task"] == pb.COLUMN_TYPE_STRING


def test_top_k_against_the_files(
    digits_server: Served, keys: np.ndarray, metadata: pa.Table, queries: np.ndarray
) -> None:
    answer = digits_server.stub.TopK(
        pb.TopKRequest(index="digits", layer="2", queries=tensor(queries), k=7)
    )
    scores = (queries.astype(np.float64) @ keys.T.astype(np.float64)).astype(np.float32)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :7]
    rows = array(answer.rows)
    np.testing.assert_array_equal(rows, order)
    np.testing.assert_array_equal(array(answer.scores), np.take_along_axis(scores, order, axis=1))
    found = {each.name: column(each) for each in answer.columns}
    assert sorted([*found, "row"]) == sorted(metadata.column_names)
    for name, values in found.items():
        assert values == metadata[name].take(pa.array(rows.ravel())).to_pylist()
    assert (answer.coverage.rows, answer.coverage.total) == (len(keys), len(keys))
    assert not answer.HasField("groups")


def test_sums_against_the_files(
    digits_server: Served, keys: np.ndarray, metadata: pa.Table, queries: np.ndarray
) -> None:
    labels = metadata["label"].to_numpy()
    weights = queries.astype(np.float64) @ keys.T.astype(np.float64)
    terms = np.abs(queries).astype(np.float64) @ np.abs(keys).T.astype(np.float64)
    for absolute in (False, True):
        request = pb.SumsRequest(
            layer="2", queries=tensor(queries), group_by="label", absolute=absolute
        )
        answer = digits_server.stub.Sums(request)
        groups = column(answer.groups)
        assert groups == sorted(set(labels.tolist()))
        member = (labels[:, None] == groups).astype(np.float64)
        expected = (np.abs(weights) if absolute else weights) @ member
        assert (np.abs(array(answer.values) - expected) <= 1e-6 * (terms @ member)).all()
        assert array(answer.counts).tolist() == [int((labels == g).sum()) for g in groups]


def test_dual_output_is_the_trained_layer(digits_server: Served, queries: np.ndarray) -> None:
    answer = digits_server.stub.DualOutput(pb.DualOutputRequest(layer="2", queries=tensor(queries)))
    values, trained = array(answer.values), array(answer.trained)
    error = np.linalg.norm(values - trained, axis=1) / np.linalg.norm(trained, axis=1)
    assert error.max() <= 1e-5
    at_start = digits_server.stub.DualOutput(
        pb.DualOutputRequest(layer="2", queries=tensor(queries), at_step=0)
    )
    np.testing.assert_array_equal(array(at_start.values), array(at_start.initial))
    assert at_start.coverage.rows == 0
    assert not at_start.HasField("trained")


def test_same_bytes_as_the_engine(
    digits_server: Served, digits_index: Path, queries: np.ndarray
) -> None:
    where = pb.Filter(
        comparison=pb.Comparison(
            column="label", operator=pb.OPERATOR_LT, values=[pb.Value(int64_value=6)]
        )
    )
    with Index.open(digits_index) as index:
        grouped = digits_server.stub.TopK(
            pb.TopKRequest(
                layer="2",
                queries=tensor(queries),
                k=3,
                where=where,
                group_by="label",
                order=pb.ORDER_ABSOLUTE,
            )
        )
        expected = index.top_k("2", queries, 3, where=where, group_by="label", order="absolute")
        np.testing.assert_array_equal(array(grouped.rows), expected.rows)
        np.testing.assert_array_equal(array(grouped.scores), expected.scores)
        assert expected.groups is not None
        assert column(grouped.groups) == expected.groups.to_pylist()
        for each in grouped.columns:
            assert column(each) == expected.columns[each.name].to_pylist()
        split = digits_server.stub.DualOutput(
            pb.DualOutputRequest(
                layer="2", queries=tensor(queries), where=where, group_by="label", at_step=9
            )
        )
        output = index.dual_output("2", queries, where=where, group_by="label", at_step=9)
        np.testing.assert_array_equal(array(split.values), output.values)
        np.testing.assert_array_equal(array(split.initial), output.initial)
        np.testing.assert_array_equal(array(split.counts), output.counts)
        assert split.coverage.rows == output.coverage.rows


def test_a_filter_that_matches_nothing(digits_server: Served, queries: np.ndarray) -> None:
    nothing = pb.Filter(
        comparison=pb.Comparison(
            column="step", operator=pb.OPERATOR_LT, values=[pb.Value(int64_value=0)]
        )
    )
    question = {"layer": "2", "queries": tensor(queries), "where": nothing}
    top = digits_server.stub.TopK(pb.TopKRequest(k=4, **question))
    assert (array(top.rows) == -1).all()
    assert array(top.rows).shape == (5, 4)
    assert np.isnan(array(top.scores)).all()
    assert all(column(each) == [None] * 20 for each in top.columns)
    assert top.coverage.rows == 0
    assert top.coverage.total > 0
    sums = digits_server.stub.Sums(pb.SumsRequest(group_by="label", **question))
    assert not array(sums.values).any()
    assert not array(sums.counts).any()
    output = digits_server.stub.DualOutput(pb.DualOutputRequest(**question))
    np.testing.assert_array_equal(array(output.values), array(output.initial))


def test_examples_in_the_order_of_the_ids(digits_server: Served, digits_index: Path) -> None:
    ids = [3, 0, 10**12, 3]
    answer = digits_server.stub.GetExamples(
        pb.GetExamplesRequest(ids=[pb.Value(int64_value=each) for each in ids])
    )
    assert [example.id.int64_value for example in answer.examples] == ids
    with Index.open(digits_index) as index:
        for example, payload in zip(answer.examples, index.examples(ids), strict=True):
            kind = example.WhichOneof("payload")
            assert (None if kind is None else getattr(example, kind)) == payload
    assert answer.examples[2].WhichOneof("payload") is None
