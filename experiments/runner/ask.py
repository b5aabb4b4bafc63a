"""Stage "ask": questions to the running server, and how its answers compare with the layers.

Run as a process of its own: python -m runner.ask STUDY DATA SCRATCH FOLDER HOST:PORT SERVER_PID
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

from dualform.client import Client, capture_queries
from runner import config, images
from runner.measure import Sampler


def main(
    study_file: str, data: str, scratch: str, folder: str, address: str, server_pid: str
) -> None:
    """Ask for outputs, top-k and sums on every layer; leave ask.json in `folder`."""
    study = config.load(Path(study_file))
    test = images.held_out(Path(data), Path(scratch))
    model = images.network(study.hidden)
    model.load_state_dict(load_file(str(Path(folder) / "model.safetensors")))
    ask = study.ask
    assert ask is not None
    inputs = test.inputs[: ask.images]
    labels = test.labels[: ask.images].numpy()
    queries = capture_queries(model, inputs)

    layers: dict[str, Any] = {}
    with Client(address, timeout=1800) as client:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear):
                layers[name] = _ask(
                    client, name, layer, queries[name], labels, ask, int(server_pid)
                )
        # The last layer in dual form classifies the images.
        last = list(layers)[-1]
        votes = client.dual_output(last, queries[last]).values.argmax(1)
    facts = {
        "layers": layers,
        "images": len(inputs),
        "accuracy_dual": float(np.mean(votes == labels)),
        "accuracy_layer": float(np.mean(model(inputs).argmax(1).numpy() == labels)),
    }
    (Path(folder) / "ask.json").write_text(json.dumps(facts, indent=1))


def _ask(
    client: Client,
    name: str,
    layer: nn.Linear,
    queries: np.ndarray,
    labels: np.ndarray,
    ask: config.Ask,
    server_pid: int,
) -> dict[str, Any]:
    """One layer: seconds per question, the largest relative error, and the vote of its sums."""
    with torch.no_grad():
        expected = layer(torch.from_numpy(queries)).double().numpy()
    start = time.perf_counter()
    output = client.dual_output(name, queries)
    output_seconds = time.perf_counter() - start
    dual = output.values.astype(np.float64)
    error = np.linalg.norm(dual - expected, axis=1) / np.linalg.norm(expected, axis=1)

    with Sampler(server_pid) as sampler:
        hits = client.top_k(name, queries[: ask.top_k_queries], k=ask.k, order="absolute")
    scores = np.abs(hits.scores)
    if np.isnan(scores).any() or (np.diff(scores, axis=1) > 0).any():
        raise SystemExit(f"layer {name}: top-k is not full or not in descending order")

    start = time.perf_counter()
    sums = client.sums(name, queries[: ask.top_k_queries], group_by="label", absolute=True)
    sums_seconds = time.perf_counter() - start
    vote = np.array(sums.groups)[sums.values.argmax(1)]
    return {
        "rows": sums.coverage.rows,
        "output_seconds": output_seconds,
        "output_error": float(error.max()),
        "output_error_median": float(np.median(error)),
        "top_k_seconds": sampler.usage().seconds,
        "top_k_server_anonymous": sampler.usage().peak_anonymous,
        "sums_seconds": sums_seconds,
        "vote_is_label": float(np.mean(vote == labels[: ask.top_k_queries])),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
