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
        task: images.load(Path(data), Path(scratch), task)[1] for task in (masks.kept, masks.task)
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
        own = model(inputs).argmax(1)
    passes: list[dict[str, Any]] = []
    with Client(address, timeout=3600) as client:
        start = time.perf_counter()
        parts = {
            name: Parts.of(client, name, edges(study), (masks.kept, masks.task)) for name in layers
        }
        parts_seconds = time.perf_counter() - start

        def note(title: str, predictions: torch.Tensor, **more: object) -> None:
            passes.append({"title": title, "accuracy": shares(predictions), **more})
            print(passes[-1], flush=True)

        def by_dual_form(title: str, expected: torch.Tensor | None, **options: Any) -> None:
            start = time.perf_counter()
            with torch.no_grad(), dual_form(model, client, **options):
                predictions: torch.Tensor = model(inputs).argmax(1)
            differ = None if expected is None else int((predictions != expected).sum())
            seconds = time.perf_counter() - start
            note(f"{title}, by dual_form", predictions, differ=differ, seconds=seconds, **options)

        def add_up(ends: Sequence[Mapping[str, int]]) -> torch.Tensor:
            """Predictions by the rows of each task before a step, layer by layer."""
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
        astray = _astray(client, model, tests[masks.kept], masks, masked[: masks.images])
    facts = {
        "images": masks.images,
        "accuracy": shares(own),
        "differ_from_model": int((whole != own).sum()),
        "parts_seconds": parts_seconds,
        "passes": passes,
        "sweep": [{"step": step, "accuracy": shares(each)} for step, each in sweep.items()],
        "astray": astray,
    }
    (Path(folder) / "masks.json").write_text(json.dumps(facts, indent=1))


def edges(study: config.Study) -> list[int]:
    """Steps between which the mask can be lifted, from 0 to the last."""
    assert study.masks is not None
    return sorted({0, *study.masks.sweep, study.steps})


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
    """Predictions of the network with these layers, in float64."""
    x = inputs.double()
    for number, weight in enumerate(weights):
        own = torch.from_numpy(weight)
        x = torch.addmm(own[:, -1], torch.relu(x) if number else x, own[:, :-1].T)
    return x.argmax(1)


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
    masked: torch.Tensor,
) -> dict[str, Any]:
    """An image that the last layer's rows of `masks.task` send wrong, found by its dual output.

    Candidates have the label asked for and a wrong prediction p, and without what these rows add
    to the logits, `sum c_t (x_t.x) e_t`, the label would win. Preferred, as in the paper's
    example, are those where of all (task, label) groups the rows of (`masks.task`, p) have the
    largest sum of weights in the last layer; of these the one that the rows push furthest from
    its label to p.
    """
    places = torch.nonzero(test.labels[: masks.images] == masks.misled).flatten()
    queries = capture_queries(model, test.inputs[places])
    last = images.linear_layers(model)[-1]
    out = client.dual_output(last, queries[last], group_by="task")
    assert out.groups is not None
    pushed = out.values[:, out.groups.index(masks.task)]
    total = out.initial + out.values.sum(1)
    wrong, without = total.argmax(1), (total - pushed).argmax(1)
    sums = {name: _sums_by_task(client, name, queries[name], masks) for name in queries}
    every = np.arange(len(places))
    push = pushed[every, wrong] - pushed[:, masks.misled]
    astray = (wrong != masks.misled) & (without == masks.misled)
    # Kept's ten labels come first, so that 10 + p is the masked task's label p.
    leads = sums[last].argmax(1) == 10 + wrong
    found: dict[str, Any] = {
        "label": masks.misled,
        "images": len(places),
        "wrong": int((wrong != masks.misled).sum()),
        "predictions": np.bincount(wrong, minlength=10).tolist(),
        "right_without_in_last_layer": int(astray.sum()),
        "right_masked_in_every_layer": int(
            ((masked[places].numpy() == masks.misled) & (wrong != masks.misled)).sum()
        ),
        "led_by_largest_sum": int((astray & leads).sum()),
    }
    candidates = np.flatnonzero(astray & leads if (astray & leads).any() else astray)
    if candidates.size:
        best = candidates[push[candidates].argmax()]
        found["example"] = {
            "place": int(places[best]),
            "prediction": int(wrong[best]),
            "logits": total[best].tolist(),
            "logits_without": (total - pushed)[best].tolist(),
            "push": float(push[best]),
            "sums": {name: own[best].reshape(2, 10).tolist() for name, own in sums.items()},
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
