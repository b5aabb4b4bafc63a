"""Stage "masks": forward passes in dual form with one task's rows masked, as the paper proposes.

Run as a process of its own: python -m runner.masks STUDY DATA SCRATCH FOLDER HOST:PORT
"""

from __future__ import annotations

import json
import sys
import time
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
    # Both tasks' images in one batch: a masked pass rebuilds weights once, however many ask.
    inputs = torch.cat([test.inputs[: masks.images] for test in tests.values()])
    labels = torch.cat([test.labels[: masks.images] for test in tests.values()])
    passes: list[dict[str, Any]] = []

    with Client(address, timeout=3600) as client:

        def forward(title: str, **options: Any) -> torch.Tensor:
            """Predictions of both tasks' images, int64 [2 images]."""
            start = time.perf_counter()
            with torch.no_grad(), dual_form(model, client, **options):
                predictions: torch.Tensor = model(inputs).argmax(1)
            right = (predictions == labels).double().view(2, -1).mean(1).tolist()
            passes.append(
                {
                    "title": title,
                    **options,
                    "accuracy": dict(zip(tests, right, strict=True)),
                    "seconds": time.perf_counter() - start,
                }
            )
            print(passes[-1], flush=True)
            return predictions

        with torch.no_grad():
            own = model(inputs).argmax(1)
        hidden = f"task != '{masks.task}'"
        whole = forward("nothing masked")
        masked = forward(f"{masks.task} masked", where=hidden)
        forward(f"{masks.kept} masked", where=f"task != '{masks.kept}'")
        for number, name in enumerate(layers):
            forward(f"{masks.task} masked in layer {number} only", where=hidden, layers=[name])
        before = _steps_before(study, masks.task)
        if before:
            forward(f"the layers after {before:,} steps", at_step=before)
        for step in masks.sweep:
            forward(
                f"{masks.task} masked from step {step:,} on", where=f"{hidden} or step < {step}"
            )
        astray = _astray(client, model, tests[masks.kept], masks, masked[: masks.images])
    facts = {
        "images": masks.images,
        "accuracy": {
            task: part.double().mean().item()
            for task, part in zip(tests, (own == labels).view(2, -1), strict=True)
        },
        "predictions_as_the_model": int((whole == own).sum()),
        "passes": passes,
        "astray": astray,
    }
    (Path(folder) / "masks.json").write_text(json.dumps(facts, indent=1))


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
