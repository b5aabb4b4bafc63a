"""Answers stay exact whatever precision the process lets torch multiply in, by any of its settings.

In a process of its own: torch does not forget that its newer settings were used.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import warm
from synthetic import make_index

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np, torch
import digits
from dualform.client import Client
from dualform.engine import Index
from dualform.engine.context import multiplies_in_float32
from dualform.record import Recorder
from dualform.replay import FirstRun, Replay

random = np.random.default_rng(1).standard_normal((5, 256)).astype(np.float32)

def answers():
    found = []
    with Index.open(sys.argv[2], device="cpu") as index, Client.local(sys.argv[2]) as client:
        for queries in (random, random[:1]):
            for strategy in ("certified", "flat", "scan"):
                hits = index.top_k("fc", queries, 7, strategy=strategy)
                found += [(hits.rows, 0), (hits.scores, 0)]
            hits = client.top_k("fc", queries, k=7, rank_by="contribution", unit=2, at_step=9)
            found += [(hits.rows, 0), (hits.scores, 0)]
            size = client.sums("fc", queries, group_by="label", absolute=True).values
            found += [(size, size), (client.sums("fc", queries, group_by="label").values, size)]
            found += [(next(client.stream_weights("fc", queries)).weights, 0)]
            values = client.dual_output("fc", queries, where="label = 1").values
            found += [(values, np.abs(values).max())]
    return found

def replayed():
    def train(sink):
        data, model = digits.load(), digits.network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with Recorder(model, optimizer, sink) as recorder:
            for step in range(5):
                recorder.annotate(label=data.labels[step * 32 : step * 32 + 32])
                loss = torch.nn.functional.cross_entropy(
                    model(data.images[step * 32 : step * 32 + 32]),
                    data.labels[step * 32 : step * 32 + 32],
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    first = FirstRun()
    train(first)
    replay = Replay(first)
    asked = replay.top_k("0", digits.load().images[-9:].numpy(), k=5)
    train(replay)
    return asked.result().scores

class Fp32:
    def __init__(self, place, value):
        self.place, self.value = place, value
    def __enter__(self):
        self.place.fp32_precision = self.value
    def __exit__(self, *_):
        self.place.fp32_precision = "none"

class Legacy:
    def __enter__(self):
        torch.set_float32_matmul_precision("medium")
    def __exit__(self, *_):
        torch.set_float32_matmul_precision("highest")

backends = torch.backends
settings = [Legacy()]
if hasattr(backends, "fp32_precision"):
    settings += [
        Fp32(backends.cuda.matmul, "tf32"),
        Fp32(backends.cuda.matmul, "ieee"),
        Fp32(backends.mkldnn.matmul, "bf16"),
        Fp32(backends, "tf32"),
    ]
expected, repeated = answers(), replayed()
for setting in settings:
    with setting:
        assert multiplies_in_float32() == (getattr(setting, "value", "") == "ieee")
        for (ours, size), (other, _) in zip(answers(), expected, strict=True):
            assert (np.abs(ours - other) <= 1e-6 * size).all(), (ours, other)
        np.testing.assert_array_equal(replayed(), repeated)
assert multiplies_in_float32()
print("the same")
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((900, 5)) @ rng.standard_normal((5, 256))  # few directions: sketches
    keys += 0.01 * rng.standard_normal(keys.shape)
    values = rng.standard_normal((900, 4)).astype(np.float32)
    label: list[object] = (np.arange(900) % 3).tolist()
    folder = tmp_path_factory.mktemp("index")
    return make_index(folder, keys.astype(np.float32), values, rows_per_step=50, label=label)


def test_every_question_is_answered_and_the_answer_is_the_same(path: Path) -> None:
    done = warm.run(PROGRAM, TESTS, path)
    assert done.stdout == "the same\n", done.stderr
