"""`dualform query`: what it prints, and how bad input ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client.memory import LR, Memory

from .conftest import COMMAND, Done, dualform


def ask(kind: str, server: str, query_file: Path, *more: object) -> Done:
    return dualform(
        "query", kind, "--server", server, "--layer", "fc", "--query", query_file, *more
    )


def answer(done: Done) -> Any:
    assert (done.status, done.err) == (0, ""), done
    return json.loads(done.out)


def test_top_k_as_json_and_locally_the_same(memory: Memory, server: str, query_file: Path) -> None:
    more = ("-k", 4, "--where", "label = 1 and step < 5", "--order", "smallest", "--json")
    remote = ask("top-k", server, query_file, *more)
    local = dualform(
        "query", "top-k", "--local", memory.path, "--layer", "fc", "--query", query_file, *more
    )
    assert local == remote
    data = answer(remote)
    weights = memory.weights(np.load(query_file))
    matching = [t for t in range(35) if memory.label[t] == 1]
    assert data["coverage"] == {
        "rows": len(matching),
        "total": 600,
        "nonfinite": 0,
        "dropped": 0,
        "missing": 0,
    }
    for query, (rows, scores) in enumerate(zip(data["rows"], data["scores"], strict=True)):
        expected = sorted(matching, key=lambda t: weights[query, t])[:4]
        assert rows == expected
        assert scores == np.float32(weights[query, expected]).tolist()
    assert data["columns"]["label"] == [[1] * 4] * 2
    assert data["groups"] is None


def test_top_k_by_contribution(memory: Memory, server: str, query_file: Path) -> None:
    more = ("-k", 3, "--rank-by", "contribution", "--unit", 2, "--at-step", 50)
    data = answer(ask("top-k", server, query_file, *more, "--json"))
    parts = LR * memory.weights(np.load(query_file)) * memory.values[:, 2].astype(np.float64)
    for query, (rows, scores) in enumerate(zip(data["rows"], data["scores"], strict=True)):
        expected = np.argsort(-parts[query, :350], kind="stable")[:3]
        assert rows == expected.tolist()
        np.testing.assert_allclose(scores, parts[query, expected], rtol=1e-6)
    table = ask("top-k", server, query_file, *more)
    assert table.status == 0
    assert table.out.endswith("covers 350 of 600 rows\n")


def test_top_groups(memory: Memory, server: str, query_file: Path, tmp_path: Path) -> None:
    more = ("--by", "label", "-k", 3, "--where", "step < 50", "--order", "smallest")
    remote = ask("top-groups", server, query_file, *more, "--json")
    local = dualform(
        "query", "top-groups", "--local", memory.path, "--layer", "fc", "--query", query_file,
        *more, "--json",
    )  # fmt: skip
    assert local == remote
    data = answer(remote)
    queries = np.load(query_file)
    weights, labels = memory.weights(queries), memory.label[:350]
    totals = {
        label: [sum(row[t] for t in range(350) if labels[t] == label) for row in weights]
        for label in set(labels)
    }
    for query in range(len(queries)):
        expected = sorted(totals, key=lambda label: totals[label][query])[:3]
        assert data["groups"][query] == expected
        wanted = [totals[label][query] for label in expected]
        np.testing.assert_allclose(data["scores"][query], wanted, rtol=1e-5)
        assert data["counts"][query] == [labels.count(label) for label in expected]
    counts = {"rows": 350, "total": 600, "nonfinite": 0, "dropped": 0, "missing": 0}
    assert data["coverage"] == counts
    table = ask("top-groups", server, query_file, *more)
    assert table.out.splitlines()[1].split() == ["rank", "label", "rows", "sum"]
    assert table.out.endswith("covers 350 of 600 rows\n")

    g = tmp_path / "g.npy"
    np.save(g, np.eye(5, dtype=np.float32)[[2] * len(queries)])
    more = ("--by", "label", "--rank-by", "contribution", "--at-step", 50, "--json")
    along = answer(ask("top-groups", server, query_file, *more, "--direction", g))
    assert along == answer(ask("top-groups", server, query_file, *more, "--unit", 2))
    assert along["scores"][0][5:] == [None] * 5
    np.save(g, np.ones((len(queries), 4), np.float32))
    wrong = ask("top-groups", server, query_file, *more, "--direction", g)
    assert (wrong.status, "gives outputs [n, 5]" in wrong.err) == (2, True)


def test_distinct_values_bins_and_a_profile(memory: Memory, server: str, query_file: Path) -> None:
    data = answer(ask("top-k", server, query_file, "-k", 3, "--distinct", "task", "--json"))
    assert data["counts"][0][:2] == [memory.task.count(t) for t in data["columns"]["task"][0][:2]]
    table = ask("top-k", server, query_file, "-k", 3, "--distinct", "task").out.splitlines()
    assert table[1].split()[:4] == ["rank", "row", "score", "count"]
    weights, step = memory.weights(np.load(query_file)), np.arange(600) // 7
    binned = answer(
        ask("sums", server, query_file, "--group-by", "step", "--bins", "0,10,30.5", "--json")
    )
    assert binned["groups"] == [0, 10]
    profile = answer(ask("profile", server, query_file, "--bins", 4, "--json"))
    for got, edges in ((binned, [0, 10, 30.5]), (profile, np.linspace(0, 86, 5))):
        assert got["counts"] == np.histogram(step, edges)[0].tolist()
        expected = np.histogram(step, edges, weights=weights[1])[0]
        np.testing.assert_allclose(got["values"][1], expected, atol=1e-3)
    wrong = ask("sums", server, query_file, "--group-by", "step", "--bins", "0,x")
    assert wrong.status == 2
    assert "ascending edges such as 0,1000,3000" in wrong.err
    assert "from step" in ask("profile", server, query_file).out


def test_every_weight_goes_to_a_file(
    memory: Memory, server: str, query_file: Path, tmp_path: Path
) -> None:
    expected = memory.weights(np.load(query_file)).astype(np.float32)
    done = ask("weights", server, query_file, "--out", tmp_path / "w.npy")
    assert (done.status, done.out) == (0, f"{tmp_path / 'w.npy'}: float32 [2, 600]\n")
    np.testing.assert_array_equal(np.load(tmp_path / "w.npy"), expected)
    local = ("--local", memory.path, "--layer", "fc", "--query", query_file)
    done = dualform("query", "weights", *local, "--out", tmp_path / "v.npy", "--json")
    assert json.loads(done.out) == {"file": str(tmp_path / "v.npy"), "shape": [2, 600]}
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), expected)
    again = ask("weights", server, query_file, "--out", tmp_path / "w.npy")
    assert again.status == 2
    assert "is there already" in again.err
    late = ("--timeout", 1e-6, "--out", tmp_path / "late.npy")
    assert ask("weights", server, query_file, *late).status == 2
    nowhere = ask("weights", server, query_file, "--out", tmp_path / "no" / "w.npy")
    assert (nowhere.status, "can't be written" in nowhere.err) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.npy", "w.npy"]


def test_padding_is_null_in_json(server: str, query_file: Path) -> None:
    data = answer(ask("top-k", server, query_file, "--where", "label = 99", "-k", 2, "--json"))
    assert data["rows"] == [[-1, -1]] * 2
    assert data["scores"] == data["columns"]["task"] == [[None, None]] * 2


def test_top_k_as_a_table(memory: Memory, server: str, query_file: Path) -> None:
    done = ask("top-k", server, query_file, "-k", 2, "--group-by", "task", "--index", "memory")
    assert (done.status, done.err) == (0, "")
    titles = [line for line in done.out.splitlines() if line.startswith("query")]
    groups = ["task fashion", "task mnist", "task without a value"]
    assert titles == [f"query {q}, {group}" for q in (0, 1) for group in groups]
    assert done.out.endswith("covers 600 of 600 rows\n")
    weights = memory.weights(np.load(query_file))
    mnist = [t for t in range(600) if memory.task[t] == "mnist"]
    best = max(mnist, key=lambda t: weights[0, t])
    header, first = done.out.split("query 0, task mnist\n")[1].splitlines()[:2]
    row = dict(zip(re.split("  +", header.strip()), re.split("  +", first.strip()), strict=True))
    assert (row["rank"], row["row"], row["task"]) == ("0", str(best), "mnist")
    assert row["score"] == f"{np.float32(weights[0, best]):.6g}"


@pytest.mark.parametrize("absolute", [False, True])
def test_sums(memory: Memory, server: str, query_file: Path, absolute: bool) -> None:
    more = ["--group-by", "label", *(["--absolute"] if absolute else [])]
    data = answer(ask("sums", server, query_file, *more, "--json"))
    assert data["groups"] == [0, 1, 2, 3, None]
    weights = memory.weights(np.load(query_file))
    terms = np.abs(weights) if absolute else weights
    for place, group in enumerate(data["groups"]):
        members = [t for t in range(600) if memory.label[t] == group]
        assert data["counts"][place] == len(members)
        expected = terms[:, members].sum(axis=1)
        np.testing.assert_allclose([v[place] for v in data["values"]], expected, atol=1e-3)
    table = ask("sums", server, query_file, *more)
    assert table.status == 0
    assert re.search(rf"query 1\nlabel +rows +sum\n +0 +{memory.label.count(0)} ", table.out)
    assert re.search(rf"\n +- +{memory.label.count(None)} ", table.out)


def test_output(memory: Memory, server: str, query_file: Path) -> None:
    weights = memory.weights(np.load(query_file))
    data = answer(ask("output", server, query_file, "--at-step", 10, "--json"))
    expected = data["initial"] + LR * weights[:, :70] @ memory.values[:70].astype(np.float64)
    np.testing.assert_allclose(data["values"], expected, rtol=1e-5, atol=1e-4)
    assert data["trained"] is None
    table = ask("output", server, query_file)
    assert re.search(r"query 0\nunit +initial +output +trained layer\n +0 ", table.out)
    asked = ask("output", server, query_file, "--max-residual", 1)
    assert re.search(r"query 0\nunit +initial +output +trained layer +residual\n", asked.out)
    grouped = ask("output", server, query_file, "--group-by", "task", "--where", "label = 1")
    assert re.search(
        r"unit +initial +task fashion +task mnist +task without a value +residual\n", grouped.out
    )


def bad(path: Path, array: Any, **named: Any) -> Path:
    np.save(path / "bad.npy", array, **named)
    return path / "bad.npy"


def test_query_files_that_can_not_be_asked(server: str, tmp_path: Path) -> None:
    cases: list[tuple[Path, str]] = [
        (tmp_path / "missing.npy", "No such file"),
        (tmp_path, "Is a directory"),
        (bad(tmp_path, np.ones((2, 12))), "holds float64; float32 is needed"),
    ]
    for path, says in cases:
        refused(ask("top-k", server, path), says)
    refused(ask("top-k", server, bad(tmp_path, np.ones(12, np.float32))), "reshape(1, -1)")
    refused(ask("top-k", server, bad(tmp_path, np.ones((1, 1, 12), np.float32))), "[1, 1, 12]")
    refused(ask("top-k", server, bad(tmp_path, np.ones((1, 9), np.float32))), "12")
    refused(ask("top-k", server, bad(tmp_path, np.full((1, 12), np.nan, np.float32))), "finite")
    refused(ask("top-k", server, bad(tmp_path, np.ones((0, 12), np.float32))), "empty")
    pickled = bad(tmp_path, np.array([{}], dtype=object), allow_pickle=True)
    refused(ask("top-k", server, pickled), "is no .npy file of numbers")
    pickled.write_bytes(b"not numpy at all")
    refused(ask("top-k", server, pickled), "np.save")
    pickled.write_bytes(b"")
    refused(ask("top-k", server, pickled), "is no .npy file of numbers")
    whole = bad(tmp_path, np.ones((2, 12), np.float32))
    whole.write_bytes(whole.read_bytes()[:-8])
    refused(ask("top-k", server, whole), "is no .npy file of numbers")
    header = whole.read_bytes().replace(b"(2, 12), }        ", b"(99999999999, 999), }")
    whole.write_bytes(header)
    refused(ask("top-k", server, whole), "bad.npy")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["-k", "0"], "at least 1"),
        (["-k", "1000000000"], "16,384"),
        (["--where", "label = "], "position 9"),
        (["--where", "nope = 1"], "position 1: unknown column 'nope'"),
        (["--group-by", "nope"], "nope"),
        (["--index", "nope"], "nope"),
        (["--timeout", "-1"], "timeout"),
        (["--rank-by", "contribution"], "units 0 to 4"),
        (["--rank-by", "contribution", "--unit", "5"], "units 0 to 4"),
        (["--rank-by", "contribution", "--unit", "0", "--at-step", "87"], "0 to 86"),
        (["--unit", "0"], "rank_by='contribution'"),
        (["--max-residual", "1"], "rank_by='contribution'"),
        (["--rank-by", "contribution", "--unit", "0", "--max-residual", "-1"], "0 or more: 0.0001"),
    ],
)
def test_refusals(server: str, query_file: Path, more: list[str], says: str) -> None:
    refused(ask("top-k", server, query_file, *more), says)


@pytest.mark.parametrize("share", ["-1", "-1e-9", "-inf"])
def test_a_remainder_below_nothing_is_refused(server: str, query_file: Path, share: str) -> None:
    refused(
        ask("output", server, query_file, f"--max-residual={share}"), "0 or more: 0.0001 unless"
    )


WHOLE = ["top-k", "--layer", "fc", "--query", "q.npy", "--server", "a:1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["top-k", "--query", "q.npy", "--server", "a:1"], "required: --layer"),
        (["top-k", "--layer", "fc", "--query", "q.npy"], "--server --local"),
        ([*WHOLE, "--local", "b"], "not allowed with"),
        ([*WHOLE, "-k", "x"], "invalid int"),
        ([*WHOLE, "--rank-by", "best"], "'contribution'"),
        ([*WHOLE, "--rank-by", "contribution", "--unit", "x"], "invalid int"),
        ([*WHOLE, "--metric", "cosine"], "unrecognized arguments: --metric"),
        ([*WHOLE, "--lay", "fc"], "unrecognized arguments: --lay"),
        (["sums", *WHOLE[1:]], "--group-by"),
        (["explain"], "invalid choice"),
    ],
)
def test_usage(arguments: list[str], says: str) -> None:
    done = dualform("query", *arguments)
    assert done.status == 2
    assert says in done.err
    assert "usage: dualform query" in done.err


def test_servers_that_are_not_there(query_file: Path, tmp_path: Path) -> None:
    refused(ask("top-k", "127.0.0.1:1", query_file), "dualform serve")
    refused(ask("top-k", "nonsense", query_file), "HOST:PORT")
    local = ["--layer", "fc", "--query", query_file]
    refused(dualform("query", "top-k", "--local", tmp_path / "no", *local), "dualform index build")
    refused(dualform("query", "top-k", "--local", tmp_path, *local), "not an index")


def test_an_interrupt_ends_it_without_a_traceback(query_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        question = ["query", "top-k", "--server", address, "--layer", "fc"]
        process = subprocess.Popen(
            [*COMMAND, *question, "--query", str(query_file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, "", "dualform: interrupted\n")


def test_a_reader_that_goes_away_is_no_error(server: str, query_file: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [*COMMAND, "query", "top-k", "--server", server, "--layer", "fc", "-k", "600"]
    done = subprocess.run(
        [*command, "--query", str(query_file), "--json"],
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_start_is_light() -> None:
    program = (
        "import sys\n"
        "from dualform.cli import main\n"
        "try:\n    main(['query', 'top-k', '--help'])\n"
        "except SystemExit as done:\n    assert done.code == 0\n"
        "heavy = {'torch', 'faiss', 'pyarrow', 'numpy', 'grpc', 'pandas', 'yaml'}\n"
        "print('loaded', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith("loaded []\n"), done.stderr


def test_asking_a_server_loads_no_engine(server: str, query_file: Path) -> None:
    program = (
        "import sys\n"
        "from dualform.cli import main\n"
        "status = main(sys.argv[1:])\n"
        "heavy = {'torch', 'faiss', 'pyarrow', 'dualform.engine'}\n"
        "print('loaded', status, sorted(heavy & set(sys.modules)))\n"
    )
    arguments = ["query", "sums", "--server", server, "--layer", "fc", "--group-by", "label"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--query", str(query_file)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert done.stdout.endswith("loaded 0 []\n"), done.stderr


def refused(done: Done, says: str) -> None:
    """Exit status 2, nothing on standard output, one message that says so."""
    assert (done.status, done.out) == (2, ""), done
    assert done.err.startswith("dualform: ")
    assert says in done.err, done.err
