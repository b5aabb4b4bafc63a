"""Every rpc, asked by clients that dualform's authors did not write: `make interop`.

    python scripts/interop/run.py FOLDER

FOLDER/node_modules has what package.json names, FOLDER/venv grpc-requests and grpcurl. A small
index is served over TLS with a token; Node's @grpc/grpc-js reads the .proto, grpc-requests and
grpcurl know the service by reflection alone. Their answers must be those of an index that is asked
directly. Ends with status 1 where one differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dualform.serve import policy

policy.apply()  # before torch is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from google.protobuf.json_format import MessageToDict  # noqa: E402

from dualform.engine.messages.catalog import Catalog  # noqa: E402
from dualform.index import build_index  # noqa: E402
from dualform.record import Recorder  # noqa: E402
from dualform.v1 import attribution_pb2 as pb  # noqa: E402

HERE = Path(__file__).resolve().parent
PROTOS = HERE.parents[1] / "protos"
TOKEN = "an-interoperable-token"
UNAUTHENTICATED, NOT_FOUND, INVALID_ARGUMENT = 16, 5, 3


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        index = _publish(work)
        questions = _questions()
        asked = [
            {"method": method, "request": _plain(request), "wrong_token": wrong}
            for method, request, wrong, _ in questions
        ]
        (work / "questions.json").write_text(json.dumps(asked))
        expected = _expected(index, questions)
        bad = 0
        with _serving(index, work) as address:
            files = [str(work / "ca.pem"), TOKEN]
            commands: dict[str, list[str]] = {
                "@grpc/grpc-js": [
                    "node",
                    str(folder / "node_client.js"),
                    address,
                    *files,
                    str(PROTOS),
                ],
                "grpc-requests": [
                    str(folder / "venv/bin/python"),
                    str(HERE / "requests_client.py"),
                    address,
                    *files,
                ],
                "grpcurl": [
                    str(folder / "venv/bin/python"),
                    str(HERE / "grpcurl_client.py"),
                    address,
                    *files,
                ],
            }
            for client, command in commands.items():
                answers = work / "answers.json"
                arguments = [*command, str(work / "questions.json"), str(answers)]
                subprocess.run(arguments, check=True, timeout=300)
                bad += _compared(client, asked, json.loads(answers.read_text()), expected)
    sys.exit(1 if bad else 0)


def _publish(work: Path) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Recorder(model, optimizer, work / "recording") as recorder:
        for step in range(20):
            rows = torch.arange(8) + 8 * step
            recorder.annotate(label=rows % 3, example=rows, task="ab"[step % 2])
            recorder.add_examples(rows.tolist(), [f"row {row}" for row in rows.tolist()])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(torch.randn(8, 6)), rows % 3).backward()
            optimizer.step()
    build_index(work / "recording", work / "index", shard_rows=50)
    return work / "index"


def _questions() -> list[tuple[str, Any, bool, int]]:
    """Method, request, whether with a wrong token, and the code that it ends with."""
    rng = np.random.default_rng(0)

    def tensor(d: int) -> pb.Tensor:
        rows = rng.standard_normal((2, d)).astype("<f4")
        return pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=rows.shape, data=rows.tobytes())

    where = pb.Filter(
        all_of=pb.FilterList(
            filters=[
                pb.Filter(
                    comparison=pb.Comparison(
                        column="label",
                        operator=pb.OPERATOR_IN,
                        values=[pb.Value(int64_value=0), pb.Value(int64_value=2)],
                    )
                ),
                pb.Filter(
                    negated=pb.Filter(
                        comparison=pb.Comparison(
                            column="task",
                            operator=pb.OPERATOR_EQ,
                            values=[pb.Value(string_value="a")],
                        )
                    )
                ),
            ]
        )
    )
    ids = [pb.Value(int64_value=3), pb.Value(int64_value=10**6)]
    layers = [pb.ExplainLayer(layer=name, queries=tensor(d)) for name, d in (("0", 6), ("2", 4))]
    along = pb.AttributedLayer(layer="2", queries=tensor(4), direction=tensor(3))
    top_k = pb.TopKRequest(layer="0", queries=tensor(6), k=3, where=where, explain_plan=False)
    ranked = pb.TopKRequest(
        layer="2", queries=tensor(4), k=2, rank_by=pb.RANK_BY_CONTRIBUTION, unit=0, at_step=0
    )
    outputs = pb.DualOutputRequest(layer="2", queries=tensor(4), group_by="label", at_step=7)
    right: list[tuple[str, Any]] = [
        ("Check", None),
        ("ListIndexes", pb.ListIndexesRequest()),
        ("GetIndex", pb.GetIndexRequest(index="i")),
        ("TopK", top_k),
        ("TopK", ranked),
        ("TopGroups", pb.TopGroupsRequest(layer="2", queries=tensor(4), by="label", k=2)),
        ("Attribute", pb.AttributeRequest(layers=[along], inputs=2, by="label", k=2)),
        ("SelfInfluence", pb.SelfInfluenceRequest(layer="2", by="label", count=4)),
        ("Sums", pb.SumsRequest(layer="2", queries=tensor(4), group_by="task", absolute=True)),
        ("Sums", pb.SumsRequest(layer="0", queries=tensor(6), group_by="step", bins=[0, 5, 20])),
        ("DualOutput", pb.DualOutputRequest(layer="0", queries=tensor(6))),
        ("DualOutput", outputs),
        ("Explain", pb.ExplainRequest(layers=layers, k=2, group_by="label", output=True)),
        ("StreamWeights", pb.StreamWeightsRequest(layer="0", queries=tensor(6))),
        ("GetExamples", pb.GetExamplesRequest(ids=ids)),
    ]
    wrong = pb.SumsRequest(layer="0", queries=tensor(5), group_by="label")
    nowhere = pb.StreamWeightsRequest(layer="7", queries=tensor(5))
    return [
        *((method, request, False, 0) for method, request in right),
        *((method, request, True, UNAUTHENTICATED) for method, request in right),
        ("Sums", wrong, False, INVALID_ARGUMENT),
        ("StreamWeights", nowhere, False, NOT_FOUND),
    ]


def _plain(message: Any) -> Any:
    return {} if message is None else MessageToDict(message, preserving_proto_field_name=True)


def _expected(index: Path, questions: list[tuple[str, Any, bool, int]]) -> list[Any]:
    catalog = Catalog({"i": index}, device="cpu")
    found: list[Any] = []
    for method, request, _, code in questions:
        if code:
            found.append({"code": code})
        elif method == "Check":
            found.append({"response": {"status": "SERVING"}})
        elif method == "StreamWeights":
            found.append({"response": [_plain(part) for part in catalog.stream(request)]})
        else:
            found.append({"response": _plain(catalog.answer(request))})
    catalog.close()
    return found


@contextmanager
def _serving(index: Path, work: Path) -> Iterator[str]:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-subj", "/CN=localhost", "-days", "2"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(work / "ca.key"), "-out", str(work / "ca.pem")),
        ],
        check=True,
        capture_output=True,
    )
    (work / "tokens").write_text(f"interop:{TOKEN}\n")
    (work / "server.yaml").write_text(
        "listen: localhost:0\nindexes: {i: index}\ntokens: tokens\n"
        "tls: {certificate: ca.pem, key: ca.key}\n"
    )
    assert index == work / "index"
    command = [sys.executable, "-m", "dualform.cli", "serve", "--config"]
    command.append(str(work / "server.yaml"))
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().removeprefix("listening on ").strip()
    finally:
        server.terminate()
        server.communicate(timeout=60)


def _compared(client: str, asked: list[Any], answers: list[Any], expected: list[Any]) -> int:
    bad = 0
    for question, answer, wanted in zip(asked, answers, expected, strict=True):
        if _normal(answer) != _normal(wanted):
            bad += 1
            print(f"{client}: {question['method']}: {answer} where {wanted} is right")
    print(
        f"{client}: {len(asked)} calls of {len({q['method'] for q in asked})} methods, {bad} wrong"
    )
    return bad


def _normal(value: Any) -> Any:
    """Without what clients leave out or write in their own way: defaults, numbers as text."""
    if isinstance(value, dict):
        found = {key: _normal(below) for key, below in value.items()}
        return {key: below for key, below in found.items() if below not in ("", "0", [], {}, None)}
    if isinstance(value, list):
        return [_normal(below) for below in value]
    if isinstance(value, bool) or value is None:
        return str(value).lower() if value else ""
    if isinstance(value, (int, float)):
        return repr(float(value)).removesuffix(".0")
    return value


if __name__ == "__main__":
    main()
