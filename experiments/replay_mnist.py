"""What a replay costs: MNIST single, trained plainly and replayed with questions, side by side.

    python experiments/replay_mnist.py experiments/mnist_single.yaml --data DIR --out DIR

The first training runs with `FirstRun` as its sink. Then a plain training and the replay run in
turns of 25 steps in one process, so that a busy machine slows both alike. The replay answers 100
queries to every layer: top 10 rows, absolute sums per class, the dual output. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from dualform.client import capture_queries
from dualform.record import Recorder, Sink
from dualform.replay import FirstRun, Replay
from runner import config, images

TURN = 25


class Training:
    """The study's training, in turns.

    Args:
        sink: Where its rows go; None to train without a recorder.
        steps: At most as many as the study has.
    """

    def __init__(
        self,
        study: config.Study,
        variant: config.Variant,
        sets: dict[str, images.Images],
        sink: Sink | None,
        steps: int,
    ) -> None:
        torch.manual_seed(study.seeds[0])
        self.seconds = 0.0
        self.model = images.network(study.hidden)
        self._optimizer = torch.optim.SGD(
            self.model.parameters(), lr=variant.lr, momentum=variant.momentum
        )
        self._clip = variant.clip
        self._recorder = None if sink is None else Recorder(self.model, self._optimizer, sink)
        self._batches = self._plan(study, sets, steps)

    def turn(self, steps: int) -> bool:
        """Train for so many steps; False once there are no more."""
        start = time.perf_counter()
        more = all(self._step() for _ in range(steps))
        if not more and self._recorder is not None:
            self._recorder.close()
        self.seconds += time.perf_counter() - start
        return more

    def _step(self) -> bool:
        batch = next(self._batches, None)
        if batch is None:
            return False
        inputs, labels, ids = batch
        if self._recorder is not None:
            self._recorder.annotate(label=labels, example=ids)
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        return True

    def _plan(
        self, study: config.Study, sets: dict[str, images.Images], steps: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        done = 0
        for seen, plan in images.phases(study, sets, study.seeds[0]):
            for batch in plan[: steps - done]:
                yield seen.inputs[batch], seen.labels[batch], seen.ids[batch]
            done += len(plan)
            if done >= steps:
                return


def main() -> int:
    arguments = _arguments()
    study = config.load(arguments.study)
    variant = study.variants[arguments.variant]
    pairs = {
        task: images.load(arguments.data, arguments.out / "data", task) for task in study.tasks
    }
    sets = {task: training for task, (training, _) in pairs.items()}
    steps = min(arguments.steps or study.steps, study.steps)

    first = FirstRun()
    run = Training(study, variant, sets, first, steps)
    while run.turn(TURN):
        pass
    queries = capture_queries(run.model, pairs[study.tasks[0]][1].inputs[: arguments.queries])

    replay = Replay(first)
    outputs = {}
    for layer, asked in queries.items():
        replay.top_k(layer, asked, arguments.k)
        replay.sums(layer, asked, "label", absolute=True)
        outputs[layer] = replay.dual_output(layer, asked)
    plain = Training(study, variant, sets, None, steps)
    again = Training(study, variant, sets, replay, steps)
    loads = []
    while plain.turn(TURN) | again.turn(TURN):
        loads.append(os.getloadavg()[0])

    errors = {}
    for layer, asked in queries.items():
        with torch.no_grad():
            real = plain.model.get_submodule(layer)(torch.from_numpy(asked))
        off = torch.from_numpy(outputs[layer].result()) - real
        errors[layer] = float((off.norm(dim=1) / real.norm(dim=1)).max())
    facts = {
        "steps": steps,
        "queries": arguments.queries,
        "k": arguments.k,
        "threads": torch.get_num_threads(),
        "load_average": sum(loads) / max(1, len(loads)),
        "first_seconds": run.seconds,
        "plain_seconds": plain.seconds,
        "replay_seconds": again.seconds,
        "replay_over_plain": again.seconds / plain.seconds,
        "output_error": errors,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(facts, indent=1))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path, help="a study of images, a YAML file")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds MNIST/")
    parser.add_argument("--out", type=Path, required=True, help="scratch folder")
    parser.add_argument("--variant", default="code", help="of the study (default: code)")
    parser.add_argument("--steps", type=int, help="fewer than the study has")
    parser.add_argument("--queries", type=int, default=100, help="test images asked about")
    parser.add_argument("--k", type=int, default=10, help="rows per query")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
