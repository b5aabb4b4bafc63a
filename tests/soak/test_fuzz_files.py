"""Every file at random: manifests, ledgers, sidecars, headers, states, recordings.

Whoever changes bytes by accident does not seal them again: that is refused, or what is read, built
and answered is, bit for bit, what it was. Whoever does it on purpose does, and is answered with
what the file now says, in which nothing contradicts anything else, or with a typed refusal: no
crash, no hang, no other exception, no memory beyond what little files may need.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dualform.engine import Index
from dualform.engine.errors import DataLossError, EngineError
from dualform.index import build_index
from dualform.record import DiskSink, Recorder
from dualform.store import DamagedError, IndexManifest, StoreError
from dualform.store.files import FileEntry, digest, read_checked, write_sealed
from dualform.store.ledger import from_parquet, to_parquet
from dualform.store.recording import Recording

from .counts import count, seeds, tell
from .training import D_IN, batch, queries
from .workers import trained

LAYER = "0"
STEPS = 6
ASKED = queries(1, 2)
MOST_SECONDS = 5.0
MOST_BYTES = 512 << 20
TYPED = (StoreError, EngineError)
Alike = Callable[[list[np.ndarray], list[np.ndarray]], bool]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """In memory where there is a place for that: this writes very many small files."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def recording(folder: Path) -> Path:
    trainer = trained(3, 0)
    path = folder / "recording"
    sink = DiskSink(path, segment_bytes=1 << 14)
    with Recorder(trainer.model, trainer.optimizer, sink) as recorder:
        for step in range(STEPS):
            trainer.step(batch(step), recorder.annotate)
            recorder.add_examples([step], ["payload"])
            sink.commit() if step == 2 else None
    assert len(list(path.glob("segments/*.json"))) > 1
    return path


@pytest.fixture(scope="module")
def index(folder: Path, recording: Path) -> Path:
    build_index(recording, folder / "index", shard_rows=9, parts=("label",))
    return folder / "index"


def ask(path: Path) -> list[np.ndarray]:
    """Most kinds of answers."""
    with Index.open(path, device="cpu") as index:
        hits = index.top_k(LAYER, ASKED, 4)
        return [
            hits.rows,
            hits.scores,
            index.top_k(LAYER, ASKED, 2, rank_by="contribution", unit=1).scores,
            index.sums(LAYER, ASKED, "label").values,
            index.dual_output(LAYER, ASKED, group_by="label").values,
            index.dual_output(LAYER, ASKED, at_step=3).values,
            *(chunk.weights for chunk in index.stream_weights(LAYER, ASKED)),
            np.array([str(index.examples([1, 5]))]),
        ]


def exactly(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    """Bit for bit, as what nobody sealed again must be."""
    return [(each.dtype, each.shape, each.tobytes()) for each in found] == [
        (each.dtype, each.shape, each.tobytes()) for each in expected
    ]


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(
        one.shape == other.shape
        and (np.array_equal(one, other) if one.dtype.kind in "iU" else np.allclose(one, other))
        for one, other in zip(found, expected, strict=True)
    )


class Watch:
    """Time of the slowest, and memory that was needed in all."""

    def __init__(self) -> None:
        self._before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.slowest = 0.0
        self.outcomes: Counter[str] = Counter()

    def outcome(self, what: str, work: Callable[[], str]) -> str:
        """What `work` says, or "refused" where it raises what it may; all else is a fault."""
        began = time.process_time()
        try:
            outcome = work()
        except TYPED:
            outcome = "refused"
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
        seconds = time.process_time() - began
        self.slowest = max(self.slowest, seconds)
        assert seconds < MOST_SECONDS, what
        self.outcomes[outcome] += 1
        return outcome

    def end(self, what: str) -> None:
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._before) * 1024
        assert grown < MOST_BYTES, f"{what}: {grown >> 20} MiB"
        # Where all were refused, nothing would show that what is right is taken.
        assert {"refused"} < set(self.outcomes), f"{what}: {dict(self.outcomes)}"
        tell(
            f"fuzz: {self.outcomes.total():,} {what}, slowest {self.slowest:.2f} s, "
            f"{grown >> 20} MiB more: {dict(self.outcomes)}"
        )


def changed(data: bytes, chance: random.Random, within: int | None = None) -> bytes:
    """Other bytes, the first `within` of them at most."""
    out = bytearray(data)
    most = min(len(data), within or len(data))
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(most)
        match chance.randrange(6):
            case 0 | 1 if at < len(out):
                out[at] ^= 1 << chance.randrange(8)
            case 2 if at < len(out):
                out[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 3:
                out[at : at + 8] = chance.choice((b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f"))
            case 4 if within is None:
                del out[at : at + chance.choice((1, 4, 100))]
            case _:
                out[at:at] = chance.randbytes(chance.choice((1, 4))) if within is None else b""
    return bytes(out)


ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    1,
    -1,
    3,
    10**9,
    2**53,
    2**63,
    10**400,
    -1.5,
    1e308,
    "",
    "x",
    "../x",
    "/dev/zero",
    "a\0b",
    "\ud800",
    [],
    {},
    [[]],
    [[0, 1]],
)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in JSON."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in inside:
        yield (*above, key)
        if isinstance(below, (dict, list)):
            yield from places(below, (*above, key))


def other_json(data: Any, chance: random.Random) -> None:
    """Change some fields in place."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        all_places = list(places(data))
        if not all_places:
            return
        *above, last = chance.choice(all_places)
        holder = data
        for part in above:
            holder = holder[part]
        old = holder[last]
        match chance.randrange(5):
            case 0:
                del holder[last]
            case 1 if isinstance(old, list) and old:
                old.append(deepcopy(old[chance.randrange(len(old))]))
            case 2 if isinstance(old, (int, float)) and not isinstance(old, bool):
                holder[last] = chance.choice((old + 1, old - 1, old * 2, -old, old * 10**6))
            case 3:
                holder[last] = json.loads(json.dumps(chance.choice(leaves(data))))
            case _:
                holder[last] = deepcopy(chance.choice(ODD))  # it may be changed in its turn


def leaves(data: Any) -> list[Any]:
    """All values in JSON: what stands in one place may be put in another."""
    found = []
    for place in places(data):
        value = data
        for part in place:
            value = value[part]
        found.append(value)
    return found


def put(path: Path, data: dict[str, Any]) -> None:
    data.pop("xxh3", None)
    try:
        write_sealed(path, data)
    except (UnicodeEncodeError, ValueError):
        path.write_text(json.dumps(data))


def test_manifests_of_indexes(index: Path, folder: Path) -> None:
    """Whatever it says: it is answered as before, or refused; never otherwise."""
    wanted, watch = count(400, 60_000), Watch()
    expected = ask(index)
    copy = Path(shutil.copytree(index, folder / "manifest"))
    original = (index / "manifest.json").read_bytes()

    for seed in seeds(wanted):
        chance = random.Random(seed)
        alike = same
        if chance.random() < 0.2:
            (copy / "manifest.json").write_bytes(changed(original, chance))
            alike = exactly
        else:
            data = json.loads(original)
            other_json(data, chance)
            put(copy / "manifest.json", data)

        def work(alike: Alike = alike) -> str:
            return "answered" if alike(ask(copy), expected) else "other answer"

        assert watch.outcome(f"seed {seed}", work) != "other answer", seed
    watch.end("manifests of indexes")


def test_files_of_indexes(index: Path, folder: Path) -> None:
    """Sidecars, headers of FAISS and npy, states, parts, payloads, sealed again after a change."""
    wanted, watch = count(60, 25_000), Watch()
    expected = ask(index)
    copy = Path(shutil.copytree(index, folder / "files"))
    original = (index / "manifest.json").read_bytes()
    names = sorted(
        each.relative_to(index).as_posix() for each in index.rglob("*") if each.is_file()
    )
    names.remove("manifest.json")
    for seed in seeds(wanted):
        chance = random.Random(seed)
        name = names[seed % len(names)]
        data = (index / name).read_bytes()
        if not data:
            continue
        other = changed(data, chance, within=chance.choice((None, 64, 160)))
        (copy / name).write_bytes(other)
        sealed = chance.random() < 0.9
        if sealed:
            manifest = json.loads(original)
            manifest.pop("xxh3")
            reseal(manifest, FileEntry(name, len(other), digest(other)))
            put(copy / "manifest.json", manifest)

        def work(what: str = f"seed {seed}: {name}", sealed: bool = sealed) -> str:
            found = ask(copy)
            if sealed:
                agrees(copy, what)
            else:
                assert exactly(found, expected), what
            return "answered"

        outcome = watch.outcome(f"seed {seed}: {name}", work)
        if not sealed and other != data and outcome == "answered":
            # No question here needed it: the sweep finds it, and only logs what answers can spare.
            assert swept(copy, name), f"seed {seed}: {name} was changed and believed"
        (copy / name).write_bytes(data)
        (copy / "manifest.json").write_bytes(original)
    watch.end("files of indexes")


def agrees(path: Path, what: str) -> None:
    """Fails where answers that read the rows themselves contradict one another.

    What is stored to make answers cheaper says the same once more; who seals a change in that is
    answered with it, and it is left out here.
    """
    with Index.open(path, device="cpu") as index:
        weights = np.concatenate([c.weights for c in index.stream_weights(LAYER, ASKED)], 1)
        hits = index.top_k(LAYER, ASKED, 4)
        sums = index.sums(LAYER, ASKED, "step", strategy="scan")
        whole = index.dual_output(LAYER, ASKED, strategy="scan", max_residual=np.inf)
        parts = index.dual_output(
            LAYER, ASKED, group_by="label", strategy="scan", max_residual=np.inf
        )
    finite = np.isfinite(weights).all(0)
    taken = hits.coverage.rows - hits.coverage.nonfinite
    assert hits.coverage.total == weights.shape[1], what
    assert taken == finite.sum() == sums.counts.sum(), what
    # By score, then by row; rows that take no part come last.
    order = np.argsort(np.where(finite, -weights, np.inf), axis=1, kind="stable")[:, :4]
    assert np.array_equal(hits.rows, order), what
    assert np.array_equal(hits.scores, np.take_along_axis(weights, order, 1)), what
    of_rows = weights[:, finite].astype(np.float64)
    off = np.abs(sums.values.sum(1) - of_rows.sum(1))
    assert (off <= 1e-6 * np.abs(of_rows).sum(1)).all(), what
    added = parts.values.sum(1) + parts.initial
    # A huge value may overflow in one order of adding, and not in another.
    known = np.isfinite(added) & np.isfinite(whole.values)
    off = np.abs(added - whole.values)[known]
    assert (off <= 1e-5 * (np.abs(parts.values).sum(1) + np.abs(parts.initial))[known]).all(), what


def swept(path: Path, name: str) -> bool:
    """Whether the sweep refuses the index, or answers may do without the file."""
    with Index.open(path, device="cpu") as index:
        spared = {entry.name for entry in index._spared() if entry is not None}
        try:
            index.verify_files()
        except DataLossError:
            return True
        return name in spared


def reseal(value: Any, entry: FileEntry) -> None:
    if isinstance(value, dict) and value.get("name") == entry.name:
        value.update(entry.to_json())
    for below in value.values() if isinstance(value, dict) else value:
        if isinstance(below, (dict, list)):
            reseal(below, entry)


def test_ledgers(index: Path, folder: Path) -> None:
    """As Parquet alone, in which anything may stand; below a digest, nothing else."""
    wanted, watch = count(1000, 120_000), Watch()
    entry = IndexManifest.load(index).ledger
    data = (index / entry.name).read_bytes()
    place = folder / "ledger"
    place.mkdir()

    def alone(other: bytes) -> str:
        try:
            rows = from_parquet(other)
        except (pa.ArrowException, OSError, TypeError, ValueError) as error:
            raise StoreError(str(error)) from None
        # What it says can be said: no null, nothing of another type. NaN is itself in this.
        assert repr(from_parquet(to_parquet(rows))) == repr(rows)
        return "read"

    def below_its_digest() -> str:
        assert read_checked(place, entry, "restore it") == data
        return "read"

    for seed in seeds(wanted):
        other = changed(data, random.Random(seed))
        watch.outcome(f"seed {seed}", lambda other=other: alone(other))
        (place / entry.name).write_bytes(other)
        watch.outcome(f"seed {seed}, checked", below_its_digest)
    watch.end("ledgers")


def test_recordings(recording: Path, folder: Path) -> None:
    """JSON files sealed again, all others with changed bytes: opened and built, or refused."""
    wanted, watch = count(60, 25_000), Watch()
    copy = Path(shutil.copytree(recording, folder / "copy"))
    files = sorted(each.relative_to(recording) for each in recording.rglob("*") if each.is_file())
    target = folder / "built"
    build_index(recording, target)
    expected = ask(target)
    shutil.rmtree(target)

    def work(what: str, sealed: bool) -> str:
        try:
            build_index(copy, target)
            with Index.open(target, device="cpu") as opened:
                opened.verify_files()
                opened.sums(LAYER, ASKED, "label")
            if sealed:
                as_recorded(copy, target, what)
            else:
                assert exactly(ask(target), expected), what
            return "built"
        except ValueError as error:
            if "no committed step" not in str(error) and not isinstance(error, DamagedError):
                raise
            return "refused"
        finally:
            shutil.rmtree(target, ignore_errors=True)

    each_changed(recording, copy, files, wanted, 0.9, work, watch)
    watch.end("recordings")
    with Recording.open(copy) as whole:
        assert whole.steps == STEPS


def each_changed(
    recording: Path,
    copy: Path,
    files: Sequence[Path],
    wanted: int,
    share: float,
    work: Callable[[str, bool], str],
    watch: Watch,
    first: int = 0,
) -> None:
    """Change one file of the copy after the other, and see what `work` makes of it.

    Args:
        recording: What the files were before, and are again.
        share: Of the changes to JSON that are sealed again.
        work: Called with what was changed, and whether it was sealed.
        first: The first seed of all changes.
    """
    for seed in seeds(wanted):
        chance = random.Random(first + seed)
        file = files[seed % len(files)]
        data = (recording / file).read_bytes()
        sealed = file.suffix == ".json" and chance.random() < share
        if sealed:
            fields = json.loads(data)
            other_json(fields, chance)
            put(copy / file, fields)
        else:
            (copy / file).write_bytes(changed(data, chance))
        what = f"seed {seed}: {file}"
        watch.outcome(what, lambda what=what, sealed=sealed: work(what, sealed))
        (copy / file).write_bytes(data)


def as_recorded(recording: Path, index: Path, what: str) -> None:
    """Fails where an index does not say what the recording does that it was built from."""
    with Recording.open(recording) as opened:
        passes = opened.passes(LAYER)
        keys = [np.empty((each.rows, D_IN), np.float32) for each in passes]
        for each, into in zip(passes, keys, strict=True):
            opened.read_keys(each, into)
        labels = opened.read_rows([each.block for each in passes])["label"].to_pylist()
    expected = ASKED.astype(np.float64) @ np.concatenate(keys).T
    with Index.open(index, device="cpu") as built:
        weights = np.concatenate([c.weights for c in built.stream_weights(LAYER, ASKED)], 1)
        sums = built.sums(LAYER, ASKED, "label")
    assert np.array_equal(weights, expected.astype(np.float32)), what
    of_groups = [[label == each for label in labels] for each in sums.groups.to_pylist()]
    assert sums.counts.tolist() == [sum(each) for each in of_groups], what
    assert np.allclose(sums.values, expected @ np.transpose(of_groups)), what


def test_json_of_recordings(recording: Path, folder: Path) -> None:
    """The same files once more, read alone: many more of them."""
    wanted, watch = count(1000, 120_000), Watch()
    copy = Path(shutil.copytree(recording, folder / "json"))
    files = sorted(each.relative_to(recording) for each in recording.rglob("*.json"))
    with Recording.open(recording) as opened:
        expected = said(opened)

    def work(what: str, sealed: bool) -> str:
        with Recording.open(copy) as opened:
            assert sealed or said(opened) == expected, what
            for name in opened.manifest.layers:
                for each in opened.passes(name):
                    assert opened.block_rows(each.block) == each.rows, what
                    assert 0 <= each.step < opened.steps, what
            return f"opened {min(opened.steps, STEPS + 1)}"

    each_changed(recording, copy, files, wanted, 0.8, work, watch, first=10**6)
    watch.end("JSON files of recordings")


def said(recording: Recording) -> str:
    """All that its JSON files say of it."""
    return repr(
        (
            recording.manifest,
            recording.segments,
            recording.steps,
            recording.complete,
            recording.marks,
            recording.schema,
            recording._final,
        )
    )
