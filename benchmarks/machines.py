"""An index's shards with 1, 2 and 4 actors of a local Ray, at two sizes of the memory.

    python -m benchmarks machines --data MNIST_DIR [--index INDEX] [--only TEXT] [--json OUT]

Two memories by SGD with momentum, and two of the same training by AdamW, whose layers are followed
from machine to machine: of a unit or a filter that was not asked about before, and of one again.

For each question: seconds; bytes of the requests and replies, which must not grow with the memory;
processor seconds of the server, and of the actor that spent most. Each actor has one thread, so
that processor time is what the question would take were each on a machine of its own.

The cost model: an actor spends p + q (rows it has), the server u + v (actors) + w (seconds that it
waits: it looks now and then whether its caller gave up), and b + c (actors) bytes move. It is
fitted to all measurements but that of 4 actors at the larger size, which it then has to foretell;
and it says what 10^10 rows on 100 machines come to, with keys of this width.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from benchmarks.memories import Memory, recorded, trained
from dualform.client import parse_filter
from dualform.engine.messages.versions import version_at
from dualform.machines.fleet import LOCAL, Fleet
from dualform.machines.machine import Settings
from dualform.machines.spread import Machines, SpreadIndex
from dualform.questions import (
    AttributedLayer,
    AttributeQuestion,
    OutputQuestion,
    RowsQuestion,
    SumsQuestion,
    TopGroupsQuestion,
    TopKQuestion,
)
from dualform.serve.actors import prepare

Asked = Callable[[int], "RowsQuestion | AttributeQuestion"]
"""What is asked in a turn."""

ACTORS = (1, 2, 4)
_LAYER = 1  # of three: 800 inputs, 800 outputs
_ROWS, _MACHINES, _CORES = 10**10, 100, 32
_NOWHERE = Memory("", Path(), "0", np.zeros((64, 800), np.float32))


@dataclass(frozen=True)
class Measured:
    """One question to one memory, with so many actors.

    Attributes:
        rows: Of the memory.
        actors: How many.
        seconds: Median.
        server, actor: Processor seconds of the server, and of the actor that spent most.
        moved: Bytes of requests and replies together.
        requests: How many.
    """

    rows: int
    actors: int
    seconds: float
    server: float
    actor: float
    moved: int
    requests: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds MNIST's files")
    parser.add_argument("--index", type=Path, help="the larger memory, in 4 equal shards or more")
    parser.add_argument("--steps", type=int, default=200, help="of the smaller; 4 times without")
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="", help="questions whose name holds this")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    data, steps = arguments.data, arguments.steps
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        scratch = Path(folder)
        fleet = Fleet(LOCAL, max(ACTORS), Settings(prepare), threads=1)
        result: dict[str, Any] = {}
        try:
            for adamw, asked in ((False, questions), (True, followed)):

                def of(memory: Memory, asked: Any = asked) -> dict[str, Asked]:
                    found: dict[str, Asked] = asked(memory)
                    return {name: ask for name, ask in found.items() if arguments.only in name}

                if not of(_NOWHERE):
                    continue
                small = trained(data, scratch, steps, 8, adamw=adamw)
                large = None if adamw else arguments.index
                large = large or trained(data, scratch, 4 * steps, 8, adamw=adamw)
                memories = [recorded(path, data)[_LAYER] for path in (small, large)]
                result |= compare(fleet, memories, of, arguments.rounds)
        finally:
            fleet.close()
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


def questions(memory: Memory) -> dict[str, Asked]:
    """What is asked, in each turn."""
    layer, some = memory.layer, parse_filter("label != 3")
    eight = memory.queries[:8]
    always: dict[str, RowsQuestion] = {
        "top-k, 1 query": TopKQuestion(layer, memory.queries[:1]),
        "top-k, 64 queries": TopKQuestion(layer, memory.queries[:64]),
        "absolute sums by label, 8": SumsQuestion(
            layer, eight, "label", absolute=True, strategy="scan"
        ),
        "filtered output, 8": OutputQuestion(layer, eight, where=some),
        "best labels by contribution, 8": TopGroupsQuestion(
            layer, eight, by="label", rank_by="contribution", unit=5
        ),
        "best examples by weight, 8": TopGroupsQuestion(layer, eight, by="example"),
    }

    def again(question: RowsQuestion) -> Asked:
        return lambda _: question

    return {name: again(question) for name, question in always.items()}


def followed(memory: Memory) -> dict[str, Asked]:
    """What is asked of a layer that AdamW trained."""
    layer, eight = memory.layer, memory.queries[:8]
    toward = np.zeros((8, 800), np.float32)
    toward[:, 5] = 1.0
    attributed = (AttributedLayer(layer, eight, toward),)

    def of_unit(unit: int) -> TopKQuestion:
        return TopKQuestion(layer, eight, rank_by="contribution", unit=unit)

    return {
        "AdamW: top-k by contribution, 8, of another unit": lambda turn: of_unit(100 + turn),
        "AdamW: top-k by contribution, 8, of a unit again": lambda _: of_unit(5),
        "AdamW: best labels by attribution, 8, to a unit again": lambda _: AttributeQuestion(
            attributed, 8, by="label"
        ),
        "AdamW: filtered output, 8, of another filter": lambda turn: OutputQuestion(
            layer, eight, where=parse_filter(f"label != 3 and step != {turn}")
        ),
        "AdamW: filtered output, 8, of a filter again": lambda _: OutputQuestion(
            layer, eight, where=parse_filter("label != 3")
        ),
    }


def compare(
    fleet: Fleet, memories: list[Memory], asked: Callable[[Memory], dict[str, Asked]], rounds: int
) -> dict[str, Any]:
    """Every question to every memory with every number of actors, and the model of each."""
    found: dict[str, list[Measured]] = {}
    for memory in memories:
        opened = {
            count: Machines(fleet, "cpu", count).open(version_at(memory.path)) for count in ACTORS
        }
        for name, question in asked(memory).items():
            rows = opened[1].layer(memory.layer).rows
            for count, one in measured(fleet, opened, question, rounds).items():
                found.setdefault(name, []).append(Measured(rows, count, *one))
        for index in opened.values():
            index.close()
    return {
        name: {
            "measured": [vars(one) for one in all_of],
            "bytes_grow_with_rows": _growth(all_of),
            # Of examples there are more in the larger memory, and each one's sum moves.
            **({} if "examples" in name else modelled(all_of)),
        }
        for name, all_of in found.items()
    }


def measured(
    fleet: Fleet, opened: dict[int, SpreadIndex], question: Asked, rounds: int
) -> dict[int, tuple[float, float, float, int, int]]:
    """One question by so many actors each, in turns."""
    seconds: dict[int, list[float]] = {count: [] for count in opened}
    server, actors = dict.fromkeys(opened, 0.0), {count: np.zeros(fleet.count) for count in opened}
    moved, requests = {}, {}
    for index in opened.values():
        ask(index, question(0))  # opens, maps and checks what it needs
    for turn in range(1, rounds + 1):
        for count, index in opened.items():
            before = _spent(fleet)
            mine, traffic, asked = time.process_time(), _moved(fleet), fleet.traffic.requests
            begin = time.perf_counter()
            ask(index, question(turn))
            seconds[count].append(time.perf_counter() - begin)
            server[count] += time.process_time() - mine
            moved[count] = _moved(fleet) - traffic
            requests[count] = fleet.traffic.requests - asked
            actors[count] += _spent(fleet) - before
    return {
        count: (
            median(seconds[count]),
            server[count] / rounds,
            float(actors[count].max()) / rounds,
            moved[count],
            requests[count],
        )
        for count in opened
    }


def ask(index: SpreadIndex, question: RowsQuestion | AttributeQuestion) -> None:
    """Have it answered."""
    if isinstance(question, AttributeQuestion):
        index.attribute(question)
    else:
        index.ask(question)


def modelled(found: list[Measured]) -> dict[str, Any]:
    """The cost model, held against the measurement that it has not seen; and 10^10 rows."""
    rows, most = max(one.rows for one in found), max(ACTORS)
    hidden = next(one for one in found if (one.rows, one.actors) == (rows, most))
    seen = [one for one in found if one is not hidden]
    actor = _line(seen, lambda one: one.rows / one.actors, lambda one: one.actor)
    server = _server(seen)
    moved = _line(seen, lambda one: one.actors, lambda one: one.moved)
    return {
        "model": {
            "actor_s": actor[0],
            "actor_s_per_million_rows": 1e6 * actor[1],
            "server_s": server[0],
            "server_s_per_actor": server[1],
            "server_s_per_second": server[2],
            "bytes": moved[0],
            "bytes_per_actor": moved[1],
        },
        "foretold": {
            "actor_s": actor[0] + actor[1] * rows / most,
            "actor_s_measured": hidden.actor,
            "server_s": server[0] + server[1] * most + server[2] * hidden.seconds,
            "server_s_measured": hidden.server,
            "bytes": moved[0] + moved[1] * most,
            "bytes_measured": hidden.moved,
        },
        f"{_ROWS:.0e} rows on {_MACHINES} machines": {
            "actor_s_one_thread": actor[0] + actor[1] * _ROWS / _MACHINES,
            f"actor_s_{_CORES}_threads_if_they_scale": (
                actor[0] + actor[1] * _ROWS / _MACHINES / _CORES
            ),
            "server_s_beside_waiting": server[0] + server[1] * _MACHINES,
            "bytes": moved[0] + moved[1] * _MACHINES,
        },
    }


def _line(
    found: list[Measured], x: Callable[[Measured], float], y: Callable[[Measured], float]
) -> tuple[float, float]:
    """The line through measurements by least squares: where it begins, at least 0, and its
    slope."""
    xs, ys = np.array([x(one) for one in found]), np.array([y(one) for one in found])
    slope, begin = np.polyfit(xs, ys, 1)
    if begin < 0:
        return 0.0, float((xs @ ys) / (xs @ xs))
    return float(begin), float(slope)


def _server(found: list[Measured]) -> tuple[float, float, float]:
    """What the server spends once, for each actor, and for each second: at least 0 each."""
    wanted = np.array([one.server for one in found])
    terms = np.array([(1.0, one.actors, one.seconds) for one in found])
    kept = [0, 1, 2]
    while True:
        factors = np.linalg.lstsq(terms[:, kept], wanted, rcond=None)[0]
        if (factors >= 0).all():
            whole = np.zeros(3)
            whole[kept] = factors
            return float(whole[0]), float(whole[1]), float(whole[2])
        kept.pop(int(factors.argmin()))


def _growth(found: list[Measured]) -> dict[str, float]:
    """By number of actors: bytes at the larger memory, per byte at the smaller."""
    by_rows = sorted(found, key=lambda one: one.rows)
    half = len(by_rows) // 2
    return {
        str(count): next(one.moved for one in by_rows[half:] if one.actors == count)
        / next(one.moved for one in by_rows[:half] if one.actors == count)
        for count in ACTORS
    }


def _moved(fleet: Fleet) -> int:
    return fleet.traffic.sent + fleet.traffic.received


def _spent(fleet: Fleet) -> np.ndarray:
    """Processor seconds of each machine so far."""
    spent = []
    for machine in fleet.machines():
        assert machine is not None, "a machine was lost"
        times = psutil.Process(machine.process).cpu_times()
        spent.append(times.user + times.system)
    return np.array(spent)


if __name__ == "__main__":
    main()
