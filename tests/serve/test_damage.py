"""Damaged indexes: refused with the file's name, shown by health, and no harm to the others."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from synthetic import make_index

from dualform.store import IndexManifest
from dualform.v1 import attribution_pb2 as pb

from .serving import NOT_SERVING, SERVING, Served, array, refusal, serving, tensor

QUERIES = np.eye(2, 6, dtype=np.float32)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = np.random.default_rng(1)
    keys = generator.standard_normal((300, 6)).astype(np.float32)
    values = generator.standard_normal((300, 4)).astype(np.float32)
    labels: list[object] = [row % 3 for row in range(300)]
    return make_index(tmp_path_factory.mktemp("whole"), keys, values, shard_rows=100, label=labels)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def shard_file(index: Path, kind: str, shard: int = 1) -> Path:
    entry = getattr(IndexManifest.load(index).layers["fc"].shards[shard], kind)
    return index / entry.name


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def change_manifest(index: Path, **changes: Any) -> None:
    path = index / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def top_k(served: Served, index: str, k: int = 3) -> pb.TopKResponse:
    return served.stub.TopK(
        pb.TopKRequest(index=index, layer="fc", queries=tensor(QUERIES), k=k), timeout=30
    )


def output(served: Served, index: str) -> pb.DualOutputResponse:
    return served.stub.DualOutput(
        pb.DualOutputRequest(index=index, layer="fc", queries=tensor(QUERIES)), timeout=30
    )


def until_health(served: Served, index: str, status: int) -> None:
    end = time.monotonic() + 20
    while served.health(f"dualform.index.{index}") != status:
        assert time.monotonic() < end
        time.sleep(0.02)


def check_that_the_other_serves(served: Served, whole: Path) -> None:
    assert served.health() == SERVING
    assert served.health("dualform.v1.AttributionService") == SERVING
    assert served.health("dualform.index.good") == SERVING
    rows = array(top_k(served, "good").rows)
    with serving({"good": whole}) as alone:
        np.testing.assert_array_equal(rows, array(top_k(alone, "good").rows))


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_a_truncated_shard(whole: Path, copy: Path, kind: str) -> None:
    path = shard_file(copy, kind)
    truncate(path)
    with serving({"bad": copy, "good": whole}) as served:
        assert served.health("dualform.index.bad") == NOT_SERVING
        refused = refusal(lambda: top_k(served, "bad"))
        assert (refused.code, refused.reason) == (grpc.StatusCode.DATA_LOSS, "DAMAGED")
        assert path.name in refused.message
        assert "dualform index build" in refused.message
        check_that_the_other_serves(served, whole)


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_a_flipped_byte_is_found_by_the_background_check(
    whole: Path, copy: Path, kind: str
) -> None:
    path = shard_file(copy, kind)
    flip(path)
    with serving({"bad": copy, "good": whole}) as served:
        until_health(served, "bad", NOT_SERVING)
        for call in (top_k, output):
            refused = refusal(lambda call=call: call(served, "bad"))
            assert (refused.code, refused.reason) == (grpc.StatusCode.DATA_LOSS, "DAMAGED")
            assert path.name in refused.message
        summary = {
            index.name: index for index in served.stub.ListIndexes(pb.ListIndexesRequest()).indexes
        }
        assert summary["bad"].health == pb.HEALTH_DAMAGED
        assert path.name in summary["bad"].health_reason
        assert (summary["good"].health, summary["good"].health_reason) == (pb.HEALTH_SERVING, "")
        info = served.stub.GetIndex(pb.GetIndexRequest(index="bad")).index
        assert info.health == pb.HEALTH_DAMAGED
        assert [layer.name for layer in info.layers] == ["fc"]
        check_that_the_other_serves(served, whole)


def test_a_flipped_byte_is_found_by_the_question_that_meets_it(whole: Path, copy: Path) -> None:
    """Without waiting for the background check: no answer is ever computed from damaged bytes."""
    flip(shard_file(copy, "keys"))
    with serving({"bad": copy, "good": whole}) as served:
        refused = refusal(lambda: top_k(served, "bad"))
        assert refused.code == grpc.StatusCode.DATA_LOSS
        # The refusal is sent after health was set.
        assert served.health("dualform.index.bad") == NOT_SERVING


@pytest.mark.parametrize(
    ("change", "code", "reason", "words"),
    [
        ({"version": 999}, grpc.StatusCode.FAILED_PRECONDITION, "NEWER_VERSION", "upgrade"),
        ({"layers": 5}, grpc.StatusCode.DATA_LOSS, "DAMAGED", "manifest.json"),
        ({"format": "other"}, grpc.StatusCode.NOT_FOUND, "UNKNOWN_INDEX", "not an index"),
    ],
)
def test_a_manifest_that_cannot_be_used(
    whole: Path, copy: Path, change: dict[str, Any], code: Any, reason: str, words: str
) -> None:
    change_manifest(copy, **change)
    with serving({"bad": copy, "good": whole}) as served:
        assert served.health("dualform.index.bad") == NOT_SERVING
        refused = refusal(lambda: top_k(served, "bad"))
        assert (refused.code, refused.reason) == (code, reason)
        assert words in refused.message
        info = served.stub.GetIndex(pb.GetIndexRequest(index="bad")).index
        assert (info.name, info.health) == ("bad", pb.HEALTH_DAMAGED)
        assert words in info.health_reason
        check_that_the_other_serves(served, whole)


@pytest.mark.parametrize("rubbish", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"{}"])
def test_a_manifest_of_rubbish(whole: Path, copy: Path, rubbish: bytes) -> None:
    (copy / "manifest.json").write_bytes(rubbish)
    with serving({"bad": copy, "good": whole}) as served:
        assert served.health("dualform.index.bad") == NOT_SERVING
        check_that_the_other_serves(served, whole)


def test_files_that_are_not_there(whole: Path, copy: Path, tmp_path: Path) -> None:
    shard_file(copy, "keys").unlink()
    indexes = {"bad": copy, "missing": tmp_path / "nowhere", "good": whole}
    with serving(indexes) as served:
        assert refusal(lambda: top_k(served, "bad")).code == grpc.StatusCode.DATA_LOSS
        assert refusal(lambda: top_k(served, "missing")).code == grpc.StatusCode.NOT_FOUND
        check_that_the_other_serves(served, whole)


def test_nothing_left_to_serve(copy: Path) -> None:
    flip(shard_file(copy, "values"))
    with serving({"bad": copy}) as served:
        until_health(served, "bad", NOT_SERVING)
        assert served.health() == NOT_SERVING
        assert served.health("dualform.v1.AttributionService") == NOT_SERVING


def test_an_index_without_values(tmp_path: Path) -> None:
    keys = np.random.default_rng(2).standard_normal((50, 6)).astype(np.float32)
    index = make_index(tmp_path, keys, None)
    with serving({"keys": index}) as served:
        assert not served.stub.GetIndex(pb.GetIndexRequest()).index.layers[0].values
        assert list(top_k(served, "keys").rows.shape) == [2, 3]
        refused = refusal(lambda: output(served, "keys"))
        assert (refused.code, refused.reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "NO_VALUES",
        )
        assert "values=True" in refused.message
        assert served.health("dualform.index.keys") == SERVING


def test_several_indexes_need_a_name(whole: Path) -> None:
    with serving({"one": whole, "two": whole}) as served:
        for call in (
            lambda: top_k(served, ""),
            lambda: served.stub.GetIndex(pb.GetIndexRequest()),
        ):
            refused = refusal(call)
            assert (refused.code, refused.fields) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                ["index"],
            )
            assert "one, two" in refused.message
        refused = refusal(lambda: top_k(served, "three"))
        assert refused.code == grpc.StatusCode.NOT_FOUND
        assert "one, two" in refused.message
        with pytest.raises(grpc.RpcError) as caught:
            served.health("dualform.index.three")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
