"""Every question that must be refused, over a real socket: code, reason and field at fault."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from dualform.engine.api.index import Index
from dualform.questions import checks
from dualform.serve import ServerLimits
from dualform.serve.reading import compression
from dualform.v1 import attribution_pb2 as pb

from .raw import call, connect
from .serving import Served, refusal, serving, tensor

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
TOO_MUCH = grpc.StatusCode.RESOURCE_EXHAUSTED


def good(served: Served, n: int = 2) -> np.ndarray:
    layers = {
        layer.name: layer for layer in served.stub.GetIndex(pb.GetIndexRequest()).index.layers
    }
    return np.ones((n, layers["2"].d_in), np.float32)


def where(column: str, value: pb.Value, operator: int = pb.OPERATOR_EQ) -> pb.Filter:
    return pb.Filter(comparison=pb.Comparison(column=column, operator=operator, values=[value]))


def with_value(array: np.ndarray, value: float) -> np.ndarray:
    array[1, 3] = value
    return array


BAD_QUERIES: dict[str, tuple[Any, str]] = {
    "wrong d": (lambda q: tensor(q[:, 1:]), "takes [n, "),
    "float64": (lambda q: tensor(q.astype(np.float64)), "float64"),
    "int32": (lambda q: tensor(q.astype(np.int32)), "int32"),
    "no dtype": (lambda q: pb.Tensor(shape=q.shape, data=q.tobytes()), "unspecified"),
    "unknown dtype": (lambda q: pb.Tensor(dtype=99, shape=q.shape, data=q.tobytes()), "99"),
    "NaN": (lambda q: tensor(with_value(q, np.nan)), "finite"),
    "Inf": (lambda q: tensor(with_value(q, np.inf)), "finite"),
    "minus Inf": (lambda q: tensor(with_value(q, -np.inf)), "finite"),
    "Inf and minus Inf": (lambda q: tensor(with_value(-q * np.inf, np.inf)), "finite"),
    "empty batch": (lambda q: tensor(q[:0]), "empty batch"),
    "missing": (lambda q: None, "float32"),
    "1-D": (lambda q: tensor(q[0]), "[1, d_in]"),
    "3-D": (lambda q: tensor(q[None]), "[n, d_in]"),
    "no width": (lambda q: tensor(q[:, :0]), "at least 1"),
    "negative": (lambda q: pb.Tensor(dtype=1, shape=[-1, -8], data=b"\0" * 32), "[-1, -8]"),
    "overflowing": (lambda q: pb.Tensor(dtype=1, shape=[2**62, 4], data=b""), "bytes"),
    "huge": (lambda q: pb.Tensor(dtype=1, shape=[2**40, q.shape[1]], data=b"\0" * 64), "bytes"),
    "many axes": (lambda q: pb.Tensor(dtype=1, shape=[1] * 10_000, data=b"\0" * 4), "10000"),
    "too short": (lambda q: pb.Tensor(dtype=1, shape=q.shape, data=q.tobytes()[:-4]), "bytes"),
    "too long": (lambda q: pb.Tensor(dtype=1, shape=q.shape, data=q.tobytes() * 2), "bytes"),
}


@pytest.mark.parametrize("case", BAD_QUERIES)
def test_bad_queries(digits_server: Served, case: str) -> None:
    make, words = BAD_QUERIES[case]
    queries = make(good(digits_server))
    stub = digits_server.stub
    for refused in (
        refusal(lambda: stub.TopK(pb.TopKRequest(layer="2", k=3, queries=queries))),
        refusal(lambda: stub.Sums(pb.SumsRequest(layer="2", group_by="label", queries=queries))),
        refusal(lambda: stub.DualOutput(pb.DualOutputRequest(layer="2", queries=queries))),
    ):
        assert (refused.code, refused.fields) == (INVALID, ["queries"])
        assert words in refused.message


def test_numbers_whose_sum_overflows_are_finite() -> None:
    queries = np.full((2, 3), 3e38, np.float32)
    assert checks.queries(queries) is queries


def top_k(**changes: Any) -> Any:
    return lambda stub, q: stub.TopK(
        pb.TopKRequest(**{"layer": "2", "k": 3, "queries": tensor(q), **changes})
    )


def sums(**changes: Any) -> Any:
    return lambda stub, q: stub.Sums(
        pb.SumsRequest(**{"layer": "2", "group_by": "label", "queries": tensor(q), **changes})
    )


def output(**changes: Any) -> Any:
    return lambda stub, q: stub.DualOutput(
        pb.DualOutputRequest(**{"layer": "2", "queries": tensor(q), **changes})
    )


def example(*ids: pb.Value) -> Any:
    return lambda stub, q: stub.GetExamples(pb.GetExamplesRequest(ids=ids))


SIX = pb.Value(int64_value=6)
REFUSED: dict[str, tuple[Any, grpc.StatusCode, str, list[str]]] = {
    "k = 0": (top_k(k=0), INVALID, "at least 1", ["k"]),
    "k < 0": (top_k(k=-5), INVALID, "-5", ["k"]),
    "k = 10^9": (top_k(k=10**9), TOO_MUCH, "16,384", ["k"]),
    "order": (top_k(order=17), INVALID, "largest, smallest, absolute", ["order"]),
    "no layer": (top_k(layer=""), NOT_FOUND, "'0', '2', '4'", ["layer"]),
    "unknown layer": (top_k(layer="1"), NOT_FOUND, "'0', '2', '4'", ["layer"]),
    "unknown layer, sums": (sums(layer="1"), NOT_FOUND, "'0', '2', '4'", ["layer"]),
    "unknown layer, output": (output(layer="1"), NOT_FOUND, "'0', '2', '4'", ["layer"]),
    "unknown index": (top_k(index="mnist"), NOT_FOUND, "there are: digits", ["index"]),
    "unknown index, wrong queries": (
        top_k(index="mnist", queries=pb.Tensor(shape=[1, 1])),
        NOT_FOUND,
        "there are: digits",
        ["index"],
    ),
    "unknown column": (top_k(where=where("colour", SIX)), INVALID, "colour", ["where"]),
    "unknown group": (top_k(group_by="colour"), INVALID, "colour", ["group_by"]),
    "unknown group, sums": (sums(group_by="colour"), INVALID, "colour", ["group_by"]),
    "unknown group, output": (output(group_by="colour"), INVALID, "colour", ["group_by"]),
    "sums of nothing": (sums(group_by=""), INVALID, "group_by", ["group_by"]),
    "string for int": (
        top_k(where=where("label", pb.Value(string_value="six"))),
        INVALID,
        "label",
        ["where"],
    ),
    "int for string": (top_k(where=where("task", SIX)), INVALID, "task", ["where"]),
    "unknown operator": (top_k(where=where("label", SIX, 42)), INVALID, "42", ["where"]),
    "no values": (
        top_k(where=pb.Filter(comparison=pb.Comparison(column="label", operator=1))),
        INVALID,
        "",
        ["where"],
    ),
    "at_step < 0": (output(at_step=-1), INVALID, "-1", ["at_step"]),
    "at_step > steps": (output(at_step=10**15), INVALID, "steps", ["at_step"]),
    "max_residual < 0": (output(max_residual=-1e-9), INVALID, "0 or more", ["max_residual"]),
    "max_residual NaN": (
        output(max_residual=float("nan")),
        INVALID,
        "a number is",
        ["max_residual"],
    ),
    "max_residual < 0, contribution": (
        top_k(rank_by=pb.RANK_BY_CONTRIBUTION, unit=0, max_residual=-1.0),
        INVALID,
        "max_residual is -1.0",
        ["max_residual"],
    ),
    "max_residual < 0, explain": (
        lambda stub, q: stub.Explain(
            pb.ExplainRequest(
                layers=[pb.ExplainLayer(layer="2", queries=tensor(q))],
                output=True,
                max_residual=-1.0,
            )
        ),
        INVALID,
        "max_residual is -1.0",
        ["max_residual"],
    ),
    "no ids": (example(), INVALID, "at least one", ["ids"]),
    "bool id": (example(pb.Value(bool_value=True)), INVALID, "bool", ["ids"]),
    "null id": (example(pb.Value()), INVALID, "null", ["ids"]),
    "too many ids": (example(*[SIX] * 4097), TOO_MUCH, "4,096", ["ids"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(digits_server: Served, case: str) -> None:
    call, code, words, fields = REFUSED[case]
    refused = refusal(lambda: call(digits_server.stub, good(digits_server)))
    assert (refused.code, refused.fields) == (code, fields)
    assert words in refused.message
    assert refused.reason
    # Whatever was asked, the next question is answered.
    assert digits_server.stub.TopK(
        pb.TopKRequest(layer="2", k=1, queries=tensor(good(digits_server)))
    ).rows.shape == [2, 1]


def test_batches_up_to_the_limit(digits_server: Served) -> None:
    stub, queries = digits_server.stub, good(digits_server, 4097)
    answer = stub.TopK(pb.TopKRequest(layer="2", k=1, queries=tensor(queries[:4096])))
    assert list(answer.rows.shape) == [4096, 1]
    refused = refusal(lambda: stub.TopK(pb.TopKRequest(layer="2", k=1, queries=tensor(queries))))
    assert (refused.code, refused.fields) == (TOO_MUCH, ["queries"])
    assert "4,096" in refused.message


def test_answers_that_no_message_can_hold(digits_index: Path) -> None:
    with serving({"digits": digits_index}, ServerLimits(max_message_mib=1)) as served:
        stub, queries = served.stub, tensor(good(served, 1000))
        question = {"layer": "2", "queries": queries, "group_by": "example"}
        for refused in (
            refusal(lambda: stub.TopK(pb.TopKRequest(k=1000, layer="2", queries=queries))),
            refusal(lambda: stub.TopK(pb.TopKRequest(k=1, **question))),
            refusal(lambda: stub.Sums(pb.SumsRequest(**question))),
            refusal(lambda: stub.DualOutput(pb.DualOutputRequest(**question))),
        ):
            assert (refused.code, refused.reason) == (TOO_MUCH, "ANSWER_TOO_LARGE")
            assert "queries at a time" in refused.message


def test_as_many_queries_as_the_refusal_says_do_fit(digits_server: Served) -> None:
    stub, queries = digits_server.stub, good(digits_server, 4096)
    refused = refusal(
        lambda: stub.TopK(pb.TopKRequest(layer="2", k=16384, queries=tensor(queries)))
    )
    fits = int(refused.message.split("at most")[-1].split()[0])
    answer = stub.TopK(pb.TopKRequest(layer="2", k=16384, queries=tensor(queries[:fits])))
    assert list(answer.rows.shape) == [fits, 16384]


def nested(depth: int, kind: str) -> pb.Filter:
    node = where("label", SIX)
    for _ in range(depth - 1):
        if kind == "negated":
            node = pb.Filter(negated=node)
        else:
            node = pb.Filter(**{kind: pb.FilterList(filters=[node])})
    return node


@pytest.mark.parametrize("kind", ["negated", "all_of", "any_of"])
def test_filters_up_to_their_depth(digits_server: Served, kind: str) -> None:
    stub, queries = digits_server.stub, tensor(good(digits_server))
    deep = nested(48, kind)
    assert stub.TopK(pb.TopKRequest(layer="2", k=1, queries=queries, where=deep)).rows.shape
    # Deeper than protobuf reads: built as bytes, so that it can be sent at all.
    call = digits_server.channel.unary_unary("/dualform.v1.AttributionService/TopK")
    rest = pb.TopKRequest(layer="2", k=1, queries=queries).SerializeToString()
    for depth in (49, 60, 5000):
        data = rest + wrapped(depth, kind)
        refused = refusal(lambda data=data: call(data))
        assert refused.code == INVALID
        assert "nested" in refused.message


def wrapped(depth: int, kind: str) -> bytes:
    """`TopKRequest.where` as bytes, nested at will."""
    number = {"all_of": 2, "any_of": 3, "negated": 4}[kind]
    data = where("label", SIX).SerializeToString()
    for _ in range(depth - 1):
        if kind != "negated":
            data = field(1, data)
        data = field(number, data)
    return field(5, data)


def field(number: int, data: bytes) -> bytes:
    size, varint = len(data), bytearray()
    while size >= 128:
        varint.append(size & 127 | 128)
        size >>= 7
    varint.append(size)
    return bytes([number << 3 | 2]) + bytes(varint) + data


def test_filters_up_to_their_size(digits_server: Served) -> None:
    stub, queries = digits_server.stub, tensor(good(digits_server))
    parts = [where("label", pb.Value(int64_value=v)) for v in range(1023)]
    wide = pb.Filter(any_of=pb.FilterList(filters=parts))
    assert stub.TopK(pb.TopKRequest(layer="2", k=1, queries=queries, where=wide)).rows.shape
    wide.any_of.filters.append(parts[0])
    refused = refusal(
        lambda: stub.TopK(pb.TopKRequest(layer="2", k=1, queries=queries, where=wide))
    )
    assert (refused.code, refused.fields) == (TOO_MUCH, ["where"])
    many = where("label", SIX, pb.OPERATOR_IN)
    many.comparison.values.extend([SIX] * 65535)
    assert stub.TopK(pb.TopKRequest(layer="2", k=1, queries=queries, where=many)).rows.shape
    many.comparison.values.append(SIX)
    refused = refusal(
        lambda: stub.TopK(pb.TopKRequest(layer="2", k=1, queries=queries, where=many))
    )
    assert (refused.code, refused.fields) == (TOO_MUCH, ["where"])


def test_long_names_do_not_break_the_refusal(digits_server: Served) -> None:
    for name in ("x" * 200_000, "ü" * 100_000, "\n" * 1000):
        refused = refusal(
            lambda name=name: digits_server.stub.TopK(
                pb.TopKRequest(layer=name, k=1, queries=tensor(good(digits_server)))
            )
        )
        assert (refused.code, refused.fields) == (NOT_FOUND, ["layer"])


def test_bytes_that_are_no_request(digits_server: Served) -> None:
    call = digits_server.channel.unary_unary("/dualform.v1.AttributionService/TopK")
    refused = refusal(lambda: call(b"\xff\xff\xff"))
    assert (refused.code, refused.reason) == (INVALID, "UNREADABLE")


def test_a_method_that_is_not_there(digits_server: Served) -> None:
    call = digits_server.channel.unary_unary("/dualform.v1.AttributionService/Predict")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_request_over_the_message_limit(digits_index: Path) -> None:
    limits = ServerLimits(max_message_mib=1)
    with serving({"digits": digits_index}, limits) as served:
        width = good(served).shape[1]
        n = (1 << 20) // (4 * width) + 1
        with pytest.raises(grpc.RpcError) as caught:
            served.stub.TopK(
                pb.TopKRequest(layer="2", k=1, queries=tensor(np.ones((n, width), np.float32)))
            )
        assert caught.value.code() == TOO_MUCH
        assert "larger than max" in caught.value.details()
        assert served.stub.ListIndexes(pb.ListIndexesRequest()).limits.max_message_bytes == 1 << 20


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_message_that_expands_beyond_the_limit_is_not_expanded(
    digits_index: Path, encoding: str
) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
    message = packer.compress(b"\0" * (50 << 20)) + packer.flush()
    with serving({"digits": digits_index}, ServerLimits(max_message_mib=1)) as served:
        good(served)
        before = peak_since_now()
        with connect(served.address) as connection:
            path = "/dualform.v1.AttributionService/TopK"
            headers = ("grpc-encoding", encoding)
            connection.sendall(call(1, path, message, headers, compressed=True))
            told = b""
            while b"grpc-status" not in told:
                part = connection.recv(1 << 16)
                assert part, "closed without a word"
                told += part
        assert peak() - before < 25 << 20
        assert good(served).size


def test_compressed_messages_are_taken_where_grpc_holds_them_to_the_limit(
    digits_index: Path,
) -> None:
    assert compression("1.62.0") == compression("1.83.1") != compression("1.84.0rc1") == []
    with serving({"digits": digits_index}) as served:
        request = pb.TopKRequest(layer="2", k=1, queries=tensor(good(served)))
        try:
            answer = served.stub.TopK(request, compression=grpc.Compression.Gzip)
        except grpc.RpcError as refused:
            error: Any = refused
            assert error.code() == grpc.StatusCode.UNIMPLEMENTED
            assert compression(grpc.__version__)
        else:
            assert answer == served.stub.TopK(request)
            assert not compression(grpc.__version__)


def peak_since_now() -> int:
    """Bytes; the highest that they are from here on is `peak`."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) << 10


def test_a_layer_named_twice_is_refused_before_anything_is_computed(digits_server: Served) -> None:
    request = pb.ExplainRequest(k=1)
    queries = tensor(good(digits_server, 1))
    for _ in range(2000):
        request.layers.add(layer="2", queries=queries)
    refused = refusal(lambda: digits_server.stub.Explain(request))
    assert (refused.code, refused.fields) == (INVALID, ["layers"])
    assert "twice" in refused.message


def test_groups_that_fit_no_answer_are_refused_before_anything_is_computed(
    digits_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("computed all the same")

    with serving({"i": digits_index}, ServerLimits(max_message_mib=1)) as served:
        queries = tensor(good(served, 1))
        monkeypatch.setattr(Index, "ask", never)
        # 8 bytes each as request and as sums fit 1 MiB; with counts and edges they do not.
        bins = np.arange(60_000, dtype=np.float64)
        request = pb.SumsRequest(layer="2", group_by="step", queries=queries, bins=bins)
        refused = refusal(lambda: served.stub.Sums(request))
        assert (refused.code, refused.reason) == (TOO_MUCH, "ANSWER_TOO_LARGE")
        assert "fewer bins" in refused.message
