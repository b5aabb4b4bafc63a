"""Everything at once, against a model: record, crash, resume, build, serve, swap, damage, restart.

Hypothesis chooses what happens next; every answer, over the network, is compared with what
`training` computes by the definition. While a file of the served index is damaged a question may be
refused, as DATA_LOSS, and an answer that comes all the same must be right.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from serve.serving import SERVING, Served, serving

from dualform.client import Client
from dualform.client.errors import (
    DataLossError,
    DualformError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from dualform.index import build_index
from dualform.record import DiskSink, Recorder

from .counts import SEED, count, tell
from .training import D_OUT, FILTERS, Memory, Trainer, batch, queries

LAYER = "0"
done: Counter[str] = Counter()

SEEDS = st.integers(0, 10**6)
BATCHES = st.lists(SEEDS, max_size=4)
COLUMNS = st.sampled_from(["label", "task", "example", "step"])
FILTER = st.sampled_from(FILTERS)


@dataclass
class Recorded:
    """A recording: what is in it, and how many of the trainer's steps survived."""

    path: Path
    trainer: Trainer
    steps: int


@dataclass
class Published:
    """An index: what it must answer by."""

    path: Path
    memory: Memory
    values: bool
    complete: bool


class Machine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.number = 0
        self.recorded: list[Recorded] = []
        self.published: list[Published] = []
        self.now: Published | None = None
        self.served: Served | None = None
        self.server, self.client = ExitStack(), None
        self.whole: dict[Path, bytes] = {}

    def teardown(self) -> None:
        self.server.close()
        self.stack.close()

    def fresh(self, what: str) -> Path:
        self.number += 1
        return self.folder / f"{what}{self.number}"

    # -- recording ---------------------------------------------------------------------------

    @initialize(seeds=st.lists(SEEDS, min_size=1, max_size=4), seed=SEEDS)
    def begin(self, seeds: list[int], seed: int) -> None:
        self.record(seeds, seed, 0.1, 0.5)
        self.build(0, 3, True, False)
        self.swap(0)

    @rule(
        seeds=BATCHES,
        seed=SEEDS,
        lr=st.sampled_from([0.01, 0.1]),
        momentum=st.sampled_from([0.0, 0.5, 0.9]),
    )
    def record(self, seeds: list[int], seed: int, lr: float, momentum: float) -> None:
        done["record"] += 1
        trainer, path = Trainer(seed, lr, momentum), self.fresh("recording")
        with Recorder(trainer.model, trainer.optimizer, path) as recorder:
            for each in seeds:
                trainer.step(batch(each), recorder.annotate)
        self.recorded.append(Recorded(path, trainer, len(seeds)))

    @rule(
        seeds=st.lists(st.tuples(SEEDS, st.booleans()), max_size=5),
        seed=SEEDS,
        momentum=st.sampled_from([0.0, 0.9]),
    )
    def crash(self, seeds: list[tuple[int, bool]], seed: int, momentum: float) -> None:
        """What is on disk when a process is killed: its last commit."""
        done["crash"] += 1
        trainer, path = Trainer(seed, 0.1, momentum), self.fresh("crashed")
        sink, committed = DiskSink(path), 0
        with Recorder(trainer.model, trainer.optimizer, sink) as recorder:
            for number, (each, commit) in enumerate(seeds, 1):
                trainer.step(batch(each), recorder.annotate)
                if commit:
                    sink.commit()
                    committed = number
            end = time.monotonic() + 60
            while sink._jobs:  # a copy takes time, a kill does not
                assert time.monotonic() < end, "the sink's writer does not end"
                time.sleep(0.001)
            left = Path(shutil.copytree(path, self.fresh("left")))
        shutil.rmtree(path)
        self.recorded.append(Recorded(left, trainer, committed))

    @rule(which=st.integers(0, 99), at=st.integers(0, 99), seeds=BATCHES)
    def resume(self, which: int, at: int, seeds: list[int]) -> None:
        done["resume"] += 1
        old = self.recorded[which % len(self.recorded)]
        step = at % (old.steps + 1)
        trainer = old.trainer.back_to(step)
        with Recorder(trainer.model, trainer.optimizer, old.path, resume_at_step=step) as recorder:
            for each in seeds:
                trainer.step(batch(each), recorder.annotate)
        old.trainer, old.steps = trainer, step + len(seeds)

    # -- publishing --------------------------------------------------------------------------

    @rule(
        which=st.integers(0, 99),
        shard_rows=st.integers(1, 12),
        values=st.sampled_from([True, True, False]),
        parts=st.booleans(),
    )
    def build(self, which: int, shard_rows: int, values: bool, parts: bool) -> None:
        done["build"] += 1
        source, path = self.recorded[which % len(self.recorded)], self.fresh("index")

        def built() -> None:
            columns = ("label",) if parts and values else ()
            build_index(source.path, path, shard_rows=shard_rows, values=values, parts=columns)

        if source.steps == 0:
            with pytest.raises(ValueError, match="no committed step"):
                built()
            assert not path.exists()
            return
        built()
        complete = (source.path / "closed.json").exists()
        memory = source.trainer.memory(source.steps)
        self.published.append(Published(path, memory, values, complete))

    @rule(which=st.integers(0, 99))
    def swap(self, which: int) -> None:
        done["swap"] += 1
        self.mended()
        self.now = self.published[which % len(self.published)]
        if self.served is None:
            self.start()
        else:
            self.reload()

    @precondition(lambda self: self.served is not None)
    @rule()
    def restart(self) -> None:
        done["restart"] += 1
        self.mended()
        self.server.close()
        self.start()

    def reload(self) -> None:
        assert self.served is not None
        assert self.now is not None
        self.served.reload(replace(self.served.config, indexes={"i": self.now.path}))

    def start(self) -> None:
        assert self.now is not None
        self.server = ExitStack()
        self.served = self.server.enter_context(serving({"i": self.now.path}))
        self.client = self.server.enter_context(Client(self.served.address, retry=None))
        end = time.monotonic() + 60
        while not self.served.server._sweeping.done():
            assert time.monotonic() < end, "the sweep does not end"
            time.sleep(0.001)
        while True:
            with suppress(UnavailableError):  # a connection may take long on a busy machine
                self.client.indexes()
                return
            assert time.monotonic() < end, "no connection"

    # -- damage ------------------------------------------------------------------------------

    @precondition(lambda self: self.served is not None and not self.whole)
    @rule(
        which=st.integers(0, 999),
        place=st.integers(0, 10**6),
        how=st.sampled_from(["flip", "cut", "grow", "remove", "empty", "replace"]),
    )
    def damage(self, which: int, place: int, how: str) -> None:
        done["damage"] += 1
        files = sorted(file for file in self.now.path.rglob("*") if file.is_file())
        file = files[which % len(files)]
        data = file.read_bytes()
        self.whole[file] = data
        if not data:
            return
        at = place % len(data)
        if how == "remove":
            file.unlink()
        elif how == "replace":  # another file with the same content
            file.unlink()
            file.write_bytes(data)
        elif how == "cut":
            os.truncate(file, at)
        else:
            changed = {
                "flip": data[:at] + bytes([data[at] ^ (1 << place % 8)]) + data[at + 1 :],
                "grow": data + b"\0",
                "empty": b"",
            }[how]
            file.write_bytes(changed)

    @precondition(lambda self: bool(self.whole))
    @rule()
    def look(self) -> None:
        """A reload while a file is damaged: met or not, what is answered stays right."""
        done["look"] += 1
        self.reload()

    @precondition(lambda self: bool(self.whole))
    @rule()
    def mend(self) -> None:
        """Put the file back: once it was told to look, the server finds it good again."""
        done["mend"] += 1
        self.mended()
        self.asked_top_k(queries(1, 1), FILTERS[0], 2, "largest", None, None)

    def mended(self) -> None:
        if self.whole:
            for file, data in self.whole.items():
                file.unlink(missing_ok=True)
                file.write_bytes(data)
            self.whole.clear()
            self.reload()
            assert self.served is not None
            assert self.served.health("dualform.index.i") == SERVING

    @contextmanager
    def maybe_damaged(self) -> Iterator[None]:
        """A question: while a file is damaged it may be refused."""
        try:
            yield
        except DataLossError:
            done["refused: damaged"] += 1
            assert self.whole, "a sound index was called damaged"

    # -- questions ---------------------------------------------------------------------------

    @precondition(lambda self: self.served is not None)
    @rule(
        seed=SEEDS,
        n=st.integers(1, 4),
        where=FILTER,
        k=st.integers(1, 9),
        order=st.sampled_from(["largest", "smallest", "absolute"]),
        group_by=st.one_of(st.none(), COLUMNS),
        distinct=st.sampled_from([None, None, "example", "label"]),
    )
    def top_k(self, seed: int, n: int, where: Any, k: int, order: str, **options: Any) -> None:
        done["top_k"] += 1
        with self.maybe_damaged():
            self.asked_top_k(queries(seed, n), where, k, order, **options)

    def asked_top_k(
        self, asked: np.ndarray, where: Any, k: int, order: str, group_by: Any, distinct: Any
    ) -> None:
        memory = self.now.memory
        hits = self.client.top_k(
            LAYER,
            asked,
            k=k,
            where=where.text,
            order=order,
            group_by=group_by,
            distinct=distinct,
        )
        mask, scores = where.selects(memory.columns), memory.scores(asked)
        assert (hits.coverage.rows, hits.coverage.total) == (mask.sum(), memory.rows)
        groups = [(None, mask)] if group_by is None else memory.groups(group_by)
        assert hits.groups == (None if group_by is None else [value for value, _ in groups])
        found_rows = hits.rows.reshape(len(asked), len(groups), k)
        found_scores = hits.scores.reshape(len(asked), len(groups), k)
        for q in range(len(asked)):
            for g, (_, of_group) in enumerate(groups):
                best = memory.best(scores[q], mask & of_group, k, order, distinct)
                padding = k - len(best)
                assert found_rows[q, g].tolist() == best + [-1] * padding
                expected = [*scores[q, best], *[math.nan] * padding]
                np.testing.assert_array_equal(found_scores[q, g], np.float32(expected))
        hit = hits.rows >= 0
        for name, column in memory.columns.items():
            assert hits[name][hit].tolist() == column[hits.rows[hit]].tolist()

    @precondition(lambda self: self.served is not None)
    @rule(seed=SEEDS, where=FILTER, k=st.integers(1, 5), unit=st.integers(0, D_OUT - 1))
    def contributions(self, seed: int, where: Any, k: int, unit: int) -> None:
        done["contributions"] += 1
        memory, asked = self.now.memory, queries(seed, 1)

        def ask() -> Any:
            return self.client.top_k(
                LAYER,
                asked,
                k=k,
                where=where.text,
                rank_by="contribution",
                unit=unit,
                max_residual=math.inf,
            )

        with self.maybe_damaged():
            if not self.now.values:
                self.refused(ask, FailedPreconditionError)
                return
            hits = ask()
            mask = where.selects(memory.columns)
            alone = np.zeros(memory.rows)
            for row in np.flatnonzero(mask):
                weight, bias = memory.moved(np.arange(memory.rows) == row, None)
                alone[row] = (asked @ weight.T + bias)[0, unit]
            best = np.sort(alone[mask])[::-1][:k]
            rows = hits.rows[0, : len(best)]
            np.testing.assert_allclose(hits.scores[0, : len(best)], best, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(alone[rows], best, rtol=1e-5, atol=1e-6)
            assert len({*rows.tolist()}) == len(best)
            assert (hits.rows[0, len(best) :] == -1).all()

    @precondition(lambda self: self.served is not None)
    @rule(
        seed=SEEDS,
        n=st.integers(1, 4),
        where=FILTER,
        group_by=COLUMNS,
        absolute=st.booleans(),
        bins=st.booleans(),
    )
    def sums(
        self, seed: int, n: int, where: Any, group_by: str, absolute: bool, bins: bool
    ) -> None:
        done["sums"] += 1
        memory, asked = self.now.memory, queries(seed, n)
        edges = [0.0, 1.0, 2.5, 6.0] if bins and group_by != "task" else None
        with self.maybe_damaged():
            found = self.client.sums(
                LAYER, asked, group_by=group_by, absolute=absolute, where=where.text, bins=edges
            )
            mask, scores = where.selects(memory.columns), memory.scores(asked)
            terms = np.abs(scores) if absolute else scores
            if edges is None:
                groups = memory.groups(group_by)
            else:
                values = memory.columns[group_by]
                place = np.digitize(values, edges) - 1
                place[values == edges[-1]] = len(edges) - 2
                groups = [(edges[i], place == i) for i in range(len(edges) - 1)]
            assert found.groups == [value for value, _ in groups]
            for g, (_, of_group) in enumerate(groups):
                assert found.counts[g] == (mask & of_group).sum()
                expected = terms[:, mask & of_group].sum(1)
                np.testing.assert_allclose(found.values[:, g], expected, rtol=0, atol=1e-4)

    @precondition(lambda self: self.served is not None)
    @rule(
        seed=SEEDS,
        n=st.integers(1, 3),
        where=FILTER,
        group_by=st.sampled_from([None, "label", "task"]),
        at=st.one_of(st.none(), st.integers(0, 99)),
    )
    def output(self, seed: int, n: int, where: Any, group_by: str | None, at: int | None) -> None:
        done["output"] += 1
        memory, asked = self.now.memory, queries(seed, n)
        step = None if at is None else at % (memory.steps + 1)

        def ask() -> Any:
            return self.client.dual_output(
                LAYER,
                asked,
                where=where.text,
                group_by=group_by,
                at_step=step,
                max_residual=math.inf,
            )

        with self.maybe_damaged():
            if not self.now.values:
                self.refused(ask, FailedPreconditionError)
                return
            found = ask()
            mask = where.selects(memory.columns)
            if group_by is None:
                expected = memory.output(asked, mask, step)
                np.testing.assert_allclose(found.values, expected, rtol=1e-4, atol=1e-4)
            else:
                for g, (_, of_group) in enumerate(memory.groups(group_by)):
                    weight, bias = memory.moved(mask & of_group, step)
                    np.testing.assert_allclose(
                        found.values[:, g], asked @ weight.T + bias, rtol=1e-4, atol=1e-4
                    )
            if step is None and self.now.complete:
                weight, bias = memory.weights[-1]
                np.testing.assert_allclose(found.trained, asked @ weight.T + bias, atol=1e-4)

    @precondition(lambda self: self.served is not None)
    @rule(seed=SEEDS, n=st.integers(1, 4))
    def weights(self, seed: int, n: int) -> None:
        done["weights"] += 1
        asked = queries(seed, n)
        with self.maybe_damaged():
            chunks = list(self.client.stream_weights(LAYER, asked))
            found = np.concatenate([chunk.weights for chunk in chunks], 1)
            np.testing.assert_array_equal(found, np.float32(self.now.memory.scores(asked)))

    @precondition(lambda self: self.served is not None)
    @rule(seed=SEEDS, where=FILTER)
    def explain(self, seed: int, where: Any) -> None:
        done["explain"] += 1
        memory, asked = self.now.memory, queries(seed, 2)
        with self.maybe_damaged():
            found = self.client.explain({LAYER: asked}, k=3, where=where.text, group_by="label")
            mask, scores = where.selects(memory.columns), memory.scores(asked)
            for q in range(2):
                best = memory.best(scores[q], mask, 3, "largest", None)
                assert found[LAYER].top_k.rows[q, : len(best)].tolist() == best
            sums = [scores[:, mask & each].sum(1) for _, each in memory.groups("label")]
            np.testing.assert_allclose(found[LAYER].sums.values, np.transpose(sums), atol=1e-4)

    @precondition(lambda self: self.served is not None)
    @rule()
    def info(self) -> None:
        done["info"] += 1
        found = self.client.index()
        if found.health != "serving":
            assert self.whole, found.health_reason
        (listed,) = self.client.indexes()
        assert listed.name == "i"
        if not found.layers:  # it could not be opened, when it was looked at again
            assert self.whole, found.health_reason
            return
        layer = found.layers[LAYER]
        assert (layer.rows, found.steps) == (self.now.memory.rows, self.now.memory.steps)

    @precondition(lambda self: self.served is not None)
    @rule(
        wrong=st.sampled_from(
            [
                ({"layer": "1"}, NotFoundError),
                ({"where": "colour = 1"}, InvalidArgumentError),
                ({"where": "label = 'x'"}, InvalidArgumentError),
                ({"where": "label ="}, InvalidArgumentError),
                ({"group_by": "colour"}, InvalidArgumentError),
                ({"k": 10**9}, ResourceExhaustedError),
                ({"k": 0}, InvalidArgumentError),
                ({"unit": 1}, InvalidArgumentError),
                ({"queries": np.full((1, 5), np.nan, np.float32)}, InvalidArgumentError),
                ({"queries": np.ones((1, 4), np.float32)}, InvalidArgumentError),
                ({"index": "j"}, NotFoundError),
            ]
        )
    )
    def refusals(self, wrong: tuple[dict[str, Any], type[DualformError]]) -> None:
        done["refusals"] += 1
        options = {"layer": LAYER, "queries": queries(0, 1), "k": 2, **wrong[0]}
        with self.maybe_damaged():
            self.refused(lambda: self.client.top_k(**options), wrong[1])

    def refused(self, ask: Callable[[], Any], kind: type[DualformError]) -> None:
        try:
            ask()
        except kind:
            return
        raise AssertionError(f"it was answered; {kind.__name__} was due")


def test_everything_at_once() -> None:
    wanted, steps = count(100, 20_000), 50
    done.clear()
    for run in itertools.count():
        if done.total() >= wanted:
            break
        examples = max(1, min(200, (wanted - done.total()) // (steps // 2)))
        run_state_machine_as_test(
            seed(SEED + run)(Machine),
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    tell(f"model: {done.total():,} operations, 0 wrong: {dict(sorted(done.items()))}")
