"""Hostile recordings: a typed refusal that names the file, or the same index.

Made by mutation of a real small recording: every field of its JSON files, sealed again, and every
file replaced by what is no file, or by other bytes.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from itertools import islice
from pathlib import Path

import hostile
import numpy as np
import pytest
import torch

from dualform.engine import Index
from dualform.index import build_index
from dualform.record import Recorder
from dualform.record.disk import DiskSink
from dualform.store import DamagedError, StoreError
from dualform.store.files import write_sealed

QUERY = np.random.default_rng(1).random((2, 4)).astype(np.float32)
MOST_SECONDS = 5.0
MOST_BYTES = 256 << 20
# All mutations take minutes; a sample is always another in its kinds and places.
SHARE = 1 if os.environ.get("DUALFORM_SOAK") else 23


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    path = tmp_path_factory.mktemp("hostile") / "recording"
    with Recorder(model, optimizer, DiskSink(path, segment_bytes=1 << 15)) as recorder:
        for _ in range(6):
            recorder.annotate(label=[0, 1, 2], task="t")
            optimizer.zero_grad()
            model(torch.rand(3, 4)).square().mean().backward()
            optimizer.step()
        recorder.add_examples([1, 2], [b"one", "two"])
    assert len(list((path / "segments").glob("*.json"))) >= 2
    return path


def ask(index: Path) -> list[np.ndarray]:
    with Index.open(index, device="cpu") as opened:
        (name,) = opened.layers
        return [
            opened.top_k(name, QUERY, 5).scores,
            opened.sums(name, QUERY, "label").values,
            opened.dual_output(name, QUERY).values,
            opened.dual_output(name, QUERY, at_step=3).values,
            np.concatenate([chunk.weights for chunk in opened.stream_weights(name, QUERY)], axis=1),
        ]


def outcome(path: Path, index: Path, expected: list[np.ndarray] | None, what: str) -> str:
    """Whether the index answered rightly (where it is known what is), or the file was named."""
    before = time.monotonic()
    try:
        build_index(path, index)
        found = ask(index)
        for each, other in zip(found, expected or found, strict=True):
            np.testing.assert_allclose(each, other, rtol=1e-5, atol=1e-6)
        return "answered"
    except (StoreError, ValueError) as error:
        named = str(path) in str(error) and type(error) is not AssertionError
        return "refused" if named else f"{what}: {error!r}"
    except (Exception, AssertionError) as error:
        return f"{what}: {error!r}"
    finally:
        assert time.monotonic() - before < MOST_SECONDS, what
        shutil.rmtree(index, ignore_errors=True)


def test_every_field(path: Path, tmp_path: Path) -> None:
    build_index(path, tmp_path / "index")
    expected = ask(tmp_path / "index")
    shutil.rmtree(tmp_path / "index")
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = []
    for file in sorted(copy.rglob("*.json")):
        content = file.read_bytes()
        for what, write in islice(hostile.mutated(file), 0, None, SHARE):
            write()
            outcomes.append(outcome(copy, tmp_path / "index", expected, f"{file.name} {what}"))
        file.write_bytes(content)
    assert outcome(copy, tmp_path / "index", expected, "restored") == "answered"
    assert {*outcomes} == {"answered", "refused"}
    assert len(outcomes) > 3000 / SHARE
    assert outcomes.count("refused") > 0.85 * len(outcomes)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 < MOST_BYTES


def test_what_is_no_file(path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    for file in [each for each in copy.rglob("*") if each.is_file()]:
        content = file.read_bytes()
        for what, put in hostile.odd_files(file, tmp_path / "outside"):
            file.unlink()
            put()
            before = time.monotonic()
            with pytest.raises(DamagedError, match=file.name):
                build_index(copy, tmp_path / "index")
            assert time.monotonic() - before < MOST_SECONDS, (file, what)
            file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
            file.write_bytes(content)


def test_nonsense_in_every_file(path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    for file in [each for each in copy.rglob("*") if each.is_file()]:
        content = file.read_bytes()
        for wrong in (b"", b"\0" * len(content), content[:-1], content + b"\0"):
            file.write_bytes(wrong)
            found = outcome(copy, tmp_path / "index", None, f"{file.name}: {wrong[:9]!r}")
            assert found in ("answered", "refused"), found
        file.write_bytes(content)


@pytest.mark.parametrize("escaped", [True, False])
def test_half_a_character_in_a_name(path: Path, tmp_path: Path, escaped: bool) -> None:
    """JSON can say it, the file system and messages cannot."""
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    segments = [(file, json.loads(file.read_bytes())) for file in copy.glob("segments/*.json")]
    file, fields = next(each for each in segments if each[1]["examples"])
    fields.pop("xxh3")
    fields["examples"][0]["name"] = "\ud800"
    write_sealed(file, fields)
    if not escaped:
        file.write_bytes(file.read_bytes().replace(b"\\ud800", b"\xed\xa0\x80"))
    with pytest.raises(DamagedError, match=file.name):
        build_index(copy, tmp_path / "index")


def test_a_later_segment_with_another_initial_state(path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    file = sorted(copy.glob("segments/*.json"))[1]
    fields = json.loads(file.read_bytes())
    fields.pop("xxh3")
    fields["initial"]["xxh3"] = "0" * 16
    write_sealed(file, fields)
    with pytest.raises(DamagedError, match=f"{file.name}: initial is not"):
        build_index(copy, tmp_path / "index")
