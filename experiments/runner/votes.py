"""Stage "votes": for every test image and layer, the label with the largest sum of |weight|.

Run as a process of its own: python -m runner.votes STUDY DATA SCRATCH FOLDER HOST:PORT
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

from dualform.client import Client, capture_queries
from runner import config, images


def main(study_file: str, data: str, scratch: str, folder: str, address: str) -> None:
    """Leave votes.json in `folder`: what one run adds to the paper's Table 1, in percent."""
    study = config.load(Path(study_file))
    assert study.votes is not None
    test = images.held_out(Path(data), Path(scratch))
    model = images.network(study.hidden)
    model.load_state_dict(load_file(str(Path(folder) / "model.safetensors")))
    inputs = test.inputs[: study.votes.images]
    target = test.labels[: study.votes.images].numpy()
    with torch.no_grad():
        output = model(inputs).argmax(1).numpy()
    queries = capture_queries(model, inputs)

    layers: list[dict[str, Any]] = []
    with Client(address, timeout=3600) as client:
        served = client.index()
        for name in images.linear_layers(model):
            start = time.perf_counter()
            sums = client.sums(name, queries[name], group_by="label", absolute=True)
            seconds = time.perf_counter() - start
            vote = np.array(sums.groups)[sums.values.argmax(1)]
            layers.append(
                {
                    "name": name,
                    "rows": sums.coverage.rows,
                    "inexact": [mark.reason for mark in served.layers[name].inexact],
                    "seconds": seconds,
                    **shares(vote, target, output),
                }
            )
            print(layers[-1], flush=True)
    facts = {
        "images": len(target),
        "wrong": int((output != target).sum()),
        "accuracy": 100 * float(np.mean(output == target)),
        "layers": layers,
    }
    (Path(folder) / "votes.json").write_text(json.dumps(facts, indent=1))


def shares(vote: np.ndarray, target: np.ndarray, output: np.ndarray) -> dict[str, float]:
    """How often the vote is the target, and the model's output, where the model is wrong or right.

    Args:
        vote, target, output: Labels, [n].

    Returns:
        In percent, by the names of table1.json: "no_target", "no_output", "yes"; NaN where no
        image is of that kind.
    """
    wrong = output != target

    def share(hit: np.ndarray) -> float:
        return 100 * float(hit.mean()) if hit.size else float("nan")

    return {
        "no_target": share(vote[wrong] == target[wrong]),
        "no_output": share(vote[wrong] == output[wrong]),
        "yes": share(vote[~wrong] == target[~wrong]),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
