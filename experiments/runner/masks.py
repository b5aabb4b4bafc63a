"""Stage "masks": the network in dual form with one task's rows masked, as the paper proposes.

Run as a process of its own: python -m runner.masks STUDY DATA SCRATCH FOLDER HOST:PORT
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from dualform.client import Client, capture_queries, dual_form
from runner import config, images


def main(study_file: str, data: str, scratch: str, folder: str, address: str) -> None:
    """Leave masks.json in `folder`: accuracies with rows masked, and an image led astray."""
    study = config.load(Path(study_file))
    masks = study.masks
    assert masks is not None
    tests = {
        task: images.held_out(Path(data), Path(scratch), task) for task in (masks.kept, masks.task)
    }
    model = images.network(study.hidden).eval()
    model.load_state_dict(load_file(str(Path(folder) / "model.safetensors")))
    layers = images.linear_layers(model)
    # Both tasks' images in one batch: a masked pass adds up the rows once, however many ask.
    inputs = torch.cat([test.inputs[: masks.images] for test in tests.values()])
    labels = torch.cat([test.labels[: masks.images] for test in tests.values()])

    def shares(predictions: torch.Tensor) -> dict[str, float]:
        right = (predictions == labels).double().view(2, -1).mean(1).tolist()
        return dict(zip(tests, right, strict=True))

    with torch.no_grad():
        by_model = model(inputs)
    passes: list[dict[str, Any]] = []
    with Client(address, timeout=3600) as client:
        start = time.perf_counter()
        parts = {
            name: Parts.of(client, name, masks.edges(study.steps), (masks.kept, masks.task))
            for name in layers
        }
        parts_seconds = time.perf_counter() - start

        def note(title: str, logits: torch.Tensor, **more: object) -> None:
            passes.append({"title": title, "accuracy": shares(logits.argmax(1)), **more})
            print(passes[-1], flush=True)

        def by_dual_form(title: str, expected: torch.Tensor | None, **options: Any) -> None:
            start = time.perf_counter()
            with torch.no_grad(), dual_form(model, client, **options):
                logits = model(inputs)
            differ = None if expected is None else _differ(logits, expected)
            seconds = time.perf_counter() - start
            note(f"{title}, by dual_form", logits, differ=differ, seconds=seconds, **options)

        def add_up(ends: Sequence[Mapping[str, int]]) -> torch.Tensor:
            """Logits by the rows of each task before a step, layer by layer."""
            pairs = zip(layers, ends, strict=True)
            return _forward([parts[name].weights(end) for name, end in pairs], inputs)

        every = {masks.kept: study.steps, masks.task: study.steps}
        hidden, alone = {**every, masks.task: 0}, {**every, masks.kept: 0}
        whole, masked = add_up([every] * len(layers)), add_up([hidden] * len(layers))
        note("nothing masked", whole)
        note(f"{masks.task} masked", masked)
        note(f"{masks.kept} masked", add_up([alone] * len(layers)))
        for number in range(len(layers)):
            only = [hidden if number == other else every for other in range(len(layers))]
            note(f"{masks.task} masked in layer {number} only", add_up(only))
        sweep = {step: add_up([{**every, masks.task: step}] * len(layers)) for step in masks.sweep}

        # The same as a user would ask, and the layers that training had before the task came.
        where = f"task != '{masks.task}'"
        by_dual_form(f"{masks.task} masked", masked, where=where)
        if sweep:
            middle = masks.sweep[len(masks.sweep) // 2]
            title = f"{masks.task} masked from step {middle:,} on"
            by_dual_form(title, sweep[middle], where=f"{where} or step < {middle}")
        before = _steps_before(study, masks.task)
        if before:
            by_dual_form(f"the layers after {before:,} steps", None, at_step=before)
        test = tests[masks.kept]
        half = slice(0, masks.images)
        astray = _astray(client, model, test, masks, by_model[half].double(), masked[half])
    facts = {
        "images": masks.images,
        "accuracy": shares(by_model.argmax(1)),
        "differ_from_model": _differ(whole, by_model),
        "parts_seconds": parts_seconds,
        "passes": passes,
        "sweep": [
            {"step": step, "accuracy": shares(each.argmax(1))} for step, each in sweep.items()
        ],
        "astray": astray,
    }
    (Path(folder) / "masks.json").write_text(json.dumps(facts, indent=1))


@dataclass(frozen=True)
class Parts:
    """What the rows of each task, in each range of steps, add to a layer's weight and bias.

    A masked layer is its initial part plus some of these: `W x + b` is linear in the rows, so all
    masks along a sweep cost one pass over the rows together.

    Attributes:
        edges: The ranges' borders, steps.
        initial: float64 [d_out, d_in + 1], what the initial weight and bias left behind; the bias
            is the last column.
        added: By task, float64 [ranges, d_out, d_in + 1].
    """

    edges: list[int]
    initial: np.ndarray
    added: dict[str, np.ndarray]

    @classmethod
    def of(cls, client: Client, layer: str, edges: list[int], tasks: tuple[str, ...]) -> Parts:
        """Ask for a layer's parts: its dual outputs for unit vectors are its columns."""
        d_in = client.index().layers[layer].d_in
        units = np.eye(d_in + 1, d_in, dtype=np.float32)  # the last one is zero: the bias alone
        added: dict[str, list[np.ndarray]] = {task: [] for task in tasks}
        for first, end in itertools.pairwise(edges):
            out = client.dual_output(
                layer, units, where=f"step >= {first} and step < {end}", group_by="task"
            )
            assert out.groups is not None
            for task in tasks:
                added[task].append(_columns(out.values[:, out.groups.index(task)]))
        return cls(edges, _columns(out.initial), {key: np.stack(added[key]) for key in added})

    def weights(self, ends: Mapping[str, int]) -> np.ndarray:
        """The layer of each task's rows before a step, one of the edges: [d_out, d_in + 1]."""
        total: np.ndarray = self.initial.copy()
        for task, end in ends.items():
            total += self.added[task][: self.edges.index(end)].sum(0)
        return total


def _columns(outputs: np.ndarray) -> np.ndarray:
    """Outputs for the unit vectors and zero, [d_in + 1, d_out], as weight and bias."""
    found: np.ndarray = outputs.astype(np.float64)
    found[:-1] -= found[-1]
    return np.ascontiguousarray(found.T)


def _forward(weights: list[np.ndarray], inputs: torch.Tensor) -> torch.Tensor:
    """Logits of the network with these layers, in float64."""
    x = inputs.double()
    for number, weight in enumerate(weights):
        matrix = torch.from_numpy(weight)
        x = torch.addmm(matrix[:, -1], torch.relu(x) if number else x, matrix[:, :-1].T)
    return x


def _differ(logits: torch.Tensor, others: torch.Tensor) -> int:
    """How many predictions are not the same."""
    return int((logits.argmax(1) != others.argmax(1)).sum())


def _steps_before(study: config.Study, task: str) -> int:
    """Steps of the phases before the first that has this task."""
    steps = 0
    for phase in study.phases:
        if task in phase.tasks:
            break
        steps += phase.steps
    return steps


def _astray(
    client: Client,
    model: nn.Module,
    test: images.Images,
    masks: config.Masks,
    unmasked: torch.Tensor,
    masked: torch.Tensor,
) -> dict[str, Any]:
    """A test image that the rows of `masks.task` send wrong, found by asking.

    Candidates have the label asked for; the model takes them for another label p, and with these
    rows masked in every layer it is right. Preferred, as in the paper's example, are those where
    of all (task, label) groups the rows of (`masks.task`, p) have the largest sum of weights in the
    last layer, and of these those where p is `masks.taken_for`; of what is left, the one whose
    logits the rows push furthest from its label to p.

    Args:
        unmasked, masked: Logits with no row masked and with the task's rows masked, [images, 10].
    """
    places = torch.nonzero(test.labels[: masks.images] == masks.misled).flatten()
    queries = capture_queries(model, test.inputs[places])
    last = images.linear_layers(model)[-1]
    with_rows, without = unmasked[places].numpy(), masked[places].numpy()
    wrong = with_rows.argmax(1)
    every = np.arange(len(places))
    pushed = with_rows - without
    push = pushed[every, wrong] - pushed[:, masks.misled]
    astray = (wrong != masks.misled) & (without.argmax(1) == masks.misled)
    # Kept's ten labels come first, so that 10 + p is the masked task's label p.
    leads = astray & (_sums_by_task(client, last, queries[last], masks).argmax(1) == 10 + wrong)
    found: dict[str, Any] = {
        "label": masks.misled,
        "images": len(places),
        "wrong": int((wrong != masks.misled).sum()),
        "predictions": np.bincount(wrong, minlength=10).tolist(),
        "right_masked": int(astray.sum()),
        "led_by_largest_sum": int(leads.sum()),
    }
    candidates = leads & (wrong == masks.taken_for)
    for wider in (leads, astray):
        candidates = candidates if candidates.any() else wider
    candidates = np.flatnonzero(candidates)
    if candidates.size:
        best = candidates[push[candidates].argmax()]
        found["example"] = {
            "place": int(places[best]),
            "prediction": int(wrong[best]),
            "logits": with_rows[best].tolist(),
            "logits_masked": without[best].tolist(),
            "sums": {
                name: _sums_by_task(client, name, queries[name][best : best + 1], masks)
                .reshape(2, 10)
                .tolist()
                for name in queries
            },
        }
    return found


def _sums_by_task(
    client: Client, layer: str, queries: np.ndarray, masks: config.Masks
) -> np.ndarray:
    """Absolute sums per task, `kept` first, and label: float64 [n, 20]."""
    parts = []
    for task in (masks.kept, masks.task):
        sums = client.sums(
            layer, queries, group_by="label", absolute=True, where=f"task = '{task}'"
        )
        part = np.zeros((len(queries), 10))
        part[:, list(sums.groups)] = sums.values
        parts.append(part)
    return np.concatenate(parts, axis=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
