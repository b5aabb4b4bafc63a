"""`dualform index build|inspect|verify`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import faiss
import numpy as np
import pytest
from client.memory import D_IN, D_OUT, Memory
from synthetic import make_recording

from .conftest import COMMAND, dualform


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((70, D_IN)).astype(np.float32)
    values = rng.standard_normal((70, D_OUT)).astype(np.float32)
    path = tmp_path_factory.mktemp("recording") / "run"
    labels: list[object] = [t % 3 for t in range(70)]
    return make_recording(path, keys, values, 7, 0.1, 0.0, {"label": labels}, trained=False)


def test_build_then_inspect(recording: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    built = dualform("index", "build", recording, index)
    assert built.status == 0, built.err
    assert f"next: dualform index verify {index}" in built.out
    # No terminal: plain lines, the last of which says that all is done.
    lines = built.err.splitlines()
    assert 1 <= len(lines) <= 10
    assert re.fullmatch(r"building: 100 % \(.* of .*\)", lines[-1]), lines
    (shard,) = index.glob("layers/*/*.keys.faiss")
    assert faiss.read_index(str(shard)).ntotal == 70

    shown = dualform("index", "inspect", index, "--json")
    assert (shown.status, shown.err) == (0, "")
    data = json.loads(shown.out)
    assert (data["steps"], data["optimizer"]) == (10, "SGD")
    (layer,) = data["layers"]
    assert (layer["name"], layer["rows"], layer["values"]) == ("fc", 70, True)
    assert (layer["d_in"], layer["d_out"]) == (D_IN, D_OUT)
    assert layer["distinct_keys"] is None
    assert layer["encodings"] == {"keys": "float32", "values": "float32"}
    assert layer["columns"]["label"] == "int64"
    assert data["bytes"] == sum(f.stat().st_size for f in index.rglob("*") if f.is_file())
    table = dualform("index", "inspect", index)
    # The recording was made by hand: its rows do not add up to its trained weights.
    unexplained = r"weights exact; no row explains [\d.]+ of its outputs"
    line = rf"\nfc +linear +12 +5 +false +true +float32 +70 +0 +- +- +0 +{unexplained}"
    assert re.search(line, table.out)
    assert layer["output_error"] > 1e-4
    assert re.search(r"\nlabel +int64\n", table.out)


def test_build_without_values_and_over_something(recording: Path, tmp_path: Path) -> None:
    index = tmp_path / "keys"
    assert dualform("index", "build", recording, index, "--no-values").status == 0
    assert not list(index.glob("layers/*/*.values.npy"))
    again = dualform("index", "build", recording, index)
    assert (again.status, again.out) == (2, "")
    assert str(index) in again.err
    missing = dualform("index", "build", tmp_path / "no", tmp_path / "out")
    assert (missing.status, missing.out) == (2, "")
    assert not (tmp_path / "out").exists()


def test_build_with_rounded_keys(recording: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    built = dualform("index", "build", recording, index, "--round-keys", "bfloat16")
    assert built.status == 0, built.err
    table = dualform("index", "inspect", index)
    assert re.search(r"\nfc .* true +bfloat16, float32 +70 .*rounded: keys are kept as", table.out)
    refused = dualform("index", "build", recording, tmp_path / "no", "--round-keys", "int8")
    assert refused.status == 2
    assert "bfloat16" in refused.err


def test_build_packed_and_unpack(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    keys = np.maximum(rng.standard_normal((900, 100)), 0).astype(np.float32)
    values = rng.standard_normal((900, 1)).astype(np.float32)
    recording = make_recording(tmp_path / "run", keys, values, 90, 0.1, 0.0, {})
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    built = dualform("index", "build", recording, packed, "--pack")
    assert built.status == 0, built.err
    before, after, _ = built.out.splitlines()
    expected = re.match(
        r"keys and values take 0\.3 MiB, packed about 0\.\d MiB \((0\.\d+)\), .*docs/packed-index",
        before,
    )
    came = re.match(r"keys and values: .* packed, (0\.\d+) of the .* that they take", after)
    assert expected is not None
    assert came is not None
    (shard,) = packed.glob("layers/fc/*.keys.packed")
    (of_values,) = packed.glob("layers/fc/*.values.packed")
    share = (shard.stat().st_size + of_values.stat().st_size) / (900 * 404 + 45 + 128)
    assert float(came[1]) == pytest.approx(share, abs=0.006)
    assert float(expected[1]) == pytest.approx(share, abs=0.03)
    (layer,) = json.loads(dualform("index", "inspect", packed, "--json").out)["layers"]
    assert layer["row_bytes"] == {
        "stored": shard.stat().st_size + of_values.stat().st_size,
        "unpacked": 900 * 404 + 45 + 128,
    }
    assert f" {round(share, 3)} " in dualform("index", "inspect", packed).out
    assert dualform("index", "verify", packed).status == 0
    made = dualform("index", "unpack", packed, plain)
    assert made.status == 0, made.err
    (keys_file,) = plain.glob("layers/fc/*.keys.faiss")
    np.testing.assert_array_equal(faiss.read_index(str(keys_file)).reconstruct_n(0, 900), keys)
    for action, of, what in (("unpack", plain, "not packed"), ("pack", packed, "packed already")):
        refused = dualform("index", action, of, tmp_path / "no")
        assert (refused.status, refused.out) == (2, "")
        assert what in refused.err
        assert not (tmp_path / "no").exists()
    again = dualform("index", "pack", plain, packed)
    assert again.status == 2
    assert "never overwritten" in again.err


def test_build_with_parts(recording: Path, tmp_path: Path) -> None:
    index, query = tmp_path / "index", tmp_path / "q.npy"
    built = dualform("index", "build", recording, index, "--parts", "label,step")
    assert built.status == 0, built.err
    size = f"{(3 + 10) * D_IN * D_OUT * 4 / 1e6:.1f} MB"
    assert built.out.splitlines()[0] == f"parts of label (3 groups), step (10 groups): {size}"
    np.save(query, np.ones((1, D_IN), np.float32))
    asked = ("query", "output", "--local", index, "--layer", "fc", "--query", query, "--json")
    answers = [
        json.loads(
            dualform(*asked, "--group-by", "step", "--max-residual", "inf", "--strategy", way).out
        )
        for way in ("parts", "scan")
    ]
    np.testing.assert_allclose(*(each["values"] for each in answers), rtol=1e-5, atol=1e-6)
    for column, message in (("labels", "no column 'labels'"), ("position", "no row has a value")):
        wrong = dualform("index", "build", recording, tmp_path / "no", "--parts", column)
        assert (wrong.status, wrong.out) == (2, "")
        assert message in wrong.err
        assert not (tmp_path / "no").exists()
    bare = dualform("index", "build", recording, tmp_path / "no", "--no-values", "--parts", "label")
    assert (bare.status, bare.out) == (2, "")
    assert "leave out --parts" in bare.err


def test_parts_by_a_column_of_a_million_values(tmp_path: Path) -> None:
    """By name and number, with nothing written."""
    rows = 10**6
    ones = np.ones((rows, 1), np.float32)
    examples: list[object] = list(range(rows))
    run = tmp_path / "run"
    make_recording(run, ones, ones, 10**5, 0.1, 0.0, {"example": examples}, trained=False)
    done = dualform("index", "build", run, tmp_path / "index", "--parts", "example")
    assert (done.status, done.out) == (2, "")
    assert "'example' has more than 1,000 values" in done.err
    assert list(tmp_path.iterdir()) == [run]


@pytest.mark.parametrize("option", ["--append", "--sum-by=label", "--val"])
def test_options_of_later_are_refused(recording: Path, tmp_path: Path, option: str) -> None:
    done = dualform("index", "build", recording, tmp_path / "index", option)
    assert done.status == 2
    assert "unrecognized arguments" in done.err
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--every", "2"], "--every goes with --follow"),
        (["--keep", "3"], "--keep goes with --follow"),
        (["--follow", "--every", "nan"], "--every is nan; it must be a number of seconds above 0"),
        (["--follow", "--keep", "0"], "keep is 0; it must be at least 1"),
        (["--shard-rows", "0"], "shard_rows is 0; it must be at least 1"),
    ],
)
def test_following_has_options_of_its_own(
    recording: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    done = dualform("index", "build", recording, tmp_path / "index", *options)
    assert done.status == 2
    assert message in done.err
    assert not (tmp_path / "index").exists()


def test_verify_says_no_with_status_1(recording: Path, tmp_path: Path) -> None:
    # The rows of this recording were made up: they never moved its weights.
    index = tmp_path / "index"
    assert dualform("index", "build", recording, index).status == 0
    done = dualform("index", "verify", index, "--json")
    report = json.loads(done.out)
    assert done.status == 1
    assert not report["ok"]
    assert not report["layers"][0]["ok"]
    assert "does not hold what it claims" in done.err
    table = dualform("index", "verify", index)
    assert table.status == 1
    assert re.search(r"\nfc +false ", table.out)


def test_verify_says_yes_with_status_0(digits_index: Path) -> None:
    done = dualform("index", "verify", digits_index)
    assert done.status == 0, done
    assert re.search(r"\nlayer +ok +weight error +bias error +output error ", done.out)
    report = json.loads(dualform("index", "verify", digits_index, "--json").out)
    assert report["ok"]
    assert [layer["layer"] for layer in report["layers"]] == ["0", "2", "4"]
    assert all(layer["weight_error"] <= 1e-4 for layer in report["layers"])
    assert all(0 < layer["output_error"] <= 1e-5 for layer in report["layers"])


def test_verify_finds_one_flipped_bit(memory: Memory, tmp_path: Path) -> None:
    hurt = tmp_path / "hurt"
    shutil.copytree(memory.path, hurt)
    file = min(hurt.glob("layers/*/*.keys.faiss"))
    content = bytearray(file.read_bytes())
    content[-10] ^= 4
    file.write_bytes(content)
    done = dualform("index", "verify", hurt)
    assert done.status == 1
    assert file.name in done.out


@pytest.mark.parametrize(
    ("action", "manifest", "says"),
    [
        ("inspect", None, "dualform index build"),
        ("verify", None, "dualform index build"),
        ("inspect", '{"format": "dualform-index", "version": 99}', "upgrade"),
        ("verify", '{"format": "dualform-index", "version": 99}', "upgrade"),
        ("inspect", "{", "manifest.json"),
        ("verify", "{", "manifest.json"),
    ],
)
def test_what_is_no_index(tmp_path: Path, action: str, manifest: str | None, says: str) -> None:
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    done = dualform("index", action, tmp_path)
    assert (done.status, done.out) == (2, ""), done
    assert says in done.err


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    done = dualform("index", "inspect", tmp_path / "no")
    assert (done.status, done.out) == (2, "")
    assert "dualform index build" in done.err


def test_a_terminal_gets_a_bar(recording: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, "index", "build", str(recording), str(tmp_path / "index")],
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    # Linux answers a closed terminal with an error, not with an end.
    with contextlib.suppress(OSError):
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"\rbuilding: 100%" in shown


def test_following_refuses_what_is_no_recording_and_no_folder_of_its_own(
    recording: Path, tmp_path: Path
) -> None:
    """At once: nothing of it becomes right by waiting."""
    index, file, run = tmp_path / "index", tmp_path / "file", tmp_path / "run"
    assert dualform("index", "build", recording, index).status == 0
    file.write_text("words")
    shutil.copytree(recording, run)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("words")
    ranks = tmp_path / "ranks"
    shutil.copytree(index, ranks / "rank-0")
    before = sorted(tmp_path.rglob("*"))
    for source, target, said in (
        (index, "f", f"{index} is an index; --follow takes what a Recorder writes"),
        (file, "f", f"{file} is a file; --follow takes"),
        (tmp_path / "other", "f", "other is no recording, and has other things in it"),
        (ranks, "f", "rank-0 is an index; --follow takes"),
        (run, "run", f"{run} is {run}, the recording that is followed"),
        (run, "run/sub", f"{run / 'sub'} lies in {run}, the recording that is followed"),
        (tmp_path / "later", "later/sub", "lies in"),
        (run, "file", f"{file} is a file; versions are published into a folder"),
        (run, "index", f"{index} is an index; versions are published into a folder"),
    ):
        done = dualform("index", "build", "--follow", source, tmp_path / target)
        assert (done.status, done.out) == (2, ""), (source, target)
        assert said in done.err
        assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_of_versions_is_verified_and_inspected_by_its_newest(
    recording: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "versions"
    done = dualform("index", "build", "--follow", "--every", "0.1", recording, folder)
    assert done.status in (0, 130), done.err
    (version,) = folder.glob("0*")
    assert f"{version}: 10 steps" in done.out
    shown = dualform("index", "inspect", folder, "--json")
    assert shown.status == 0, shown.err
    assert json.loads(shown.out) == json.loads(dualform("index", "inspect", version, "--json").out)
    checked, expected = (dualform("index", "verify", each) for each in (folder, version))
    assert (checked.status, checked.out) == (expected.status, expected.out)
    assert str(version) in checked.out
    followed = dualform("index", "build", "--follow", folder, tmp_path / "f")
    assert followed.status == 2
    assert f"{folder} is a folder of an index's versions" in followed.err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
def test_too_little_memory_to_load_torch(tmp_path: Path) -> None:
    command = shlex.join([str(Path(sys.executable).with_name("dualform")), "index", "build"])
    limited = f"ulimit -v 1500000; exec {command} {tmp_path} {tmp_path / 'index'}"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "there is not enough memory" in done.stderr
    assert "report it" not in done.stderr
