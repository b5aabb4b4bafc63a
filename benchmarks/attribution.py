"""Examples behind a prediction, beside what the machine must do at least, and rankings by
contribution beside those by weight.

    python -m benchmarks attribution --index INDEX [--rounds 5] [--json FILE]
    python -m benchmarks attribution --data MNIST_DIR [--steps 1600] [--scratch DIR]

INDEX holds three linear layers and a column `example`, as `python -m benchmarks answers` records
them from MNIST. The inputs are rows of the first layer; the model is made of the index's own final
weights. Ratios are of processor time, which is that of both cores where they are used, in turn.
With --data a network is trained, and its last layer asked beside captum's TracInCPFast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.tracin import beside_captum
from dualform.client._gradients import gradients_of
from dualform.client._targets import target_of
from dualform.engine import Index
from dualform.engine.memory.shards import ShardFile
from dualform.engine.memory.weights import weights_by_row
from dualform.layers import layers_of
from dualform.questions import AttributeQuestion

K, UNIT = 10, 3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks attribution", allow_abbrev=False)
    parser.add_argument("--index", type=Path)
    parser.add_argument("--data", type=Path, help="folder that holds MNIST's files, for captum")
    parser.add_argument("--steps", type=int, default=1600, help="of training beside captum")
    parser.add_argument("--examples", type=int, default=60_000, help="of training beside captum")
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    if arguments.index is not None:
        with Index.open(arguments.index) as index:
            results += compare(index, arguments.rounds)
    if arguments.data is not None:
        asked = (arguments.data, arguments.scratch, arguments.steps, arguments.examples)
        results += beside_captum(*asked, arguments.rounds)
    if not results:
        parser.error("say --index INDEX, --data MNIST_DIR, or both")
    print("| what | beside | seconds | beside | ratio |")
    print("|---|---|---:|---:|---:|")
    for line in results:
        seconds = f"{line['seconds']:.3f} | {line['least']:.3f} | {line['ratio']:.2f}"
        print(f"| {line['what']} | {line['beside']} | {seconds} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def compare(index: Index, rounds: int) -> list[dict[str, Any]]:
    """Processor seconds, medians, and ratios in one run."""
    model = network(index)
    first = next(iter(index.layers))
    images = index.layers[first].keys_at(np.arange(64))
    asked = {n: question(model, images[:n]) for n in (1, 64)}
    last = list(index.layers)[-1]
    queries = {n: asked[n].layers[-1].queries for n in (1, 64)}
    by_unit: dict[str, Any] = {"rank_by": "contribution", "unit": UNIT}
    found = []
    for n in (1, 64):
        images_named = "one image" if n == 1 else f"{n} images"
        found += lines(
            f"{K} best examples for the margin of {images_named}, whole model",
            partial(index.attribute, asked[n]),
            {
                "one read of all keys and values": partial(read_all, index),
                "the products alone": partial(products, index, asked[n]),
            },
            rounds,
        )
        found += lines(
            f"{K} best rows by contribution to a unit, {n} queries",
            partial(index.top_k, last, queries[n], K, **by_unit),
            {"the same by weight": partial(index.top_k, last, queries[n], K)},
            rounds,
        )
    return found


def lines(
    what: str,
    ours: Callable[[], object],
    others: Mapping[str, Callable[[], object]],
    rounds: int,
) -> list[dict[str, Any]]:
    """Ours in turn with each of the others, after a round that does not count."""
    contestants = {"ours": ours, **others}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            start = time.process_time()
            run()
            if number:
                seconds[name].append(time.process_time() - start)
    taken = {name: statistics.median(of_name) for name, of_name in seconds.items()}
    return [
        {
            "what": what,
            "beside": name,
            "seconds": taken["ours"],
            "least": taken[name],
            "ratio": taken["ours"] / taken[name],
        }
        for name in others
    ]


def network(index: Index) -> nn.Sequential:
    """The trained model: linear layers with ReLU between."""
    modules: list[nn.Module] = []
    for name, layer in index.layers.items():
        state = index.state(name, "final")
        assert state is not None
        linear = nn.Linear(layer.d_in, layer.d_out)
        linear.weight.data = torch.from_numpy(state[layer.manifest.weight])
        linear.bias.data = torch.from_numpy(state[str(layer.manifest.bias)])
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def question(model: nn.Sequential, images: torch.Tensor) -> AttributeQuestion:
    """As the client makes it."""
    number = partial(target_of, target="margin", labels=None, token=None)
    found = gradients_of(model, images, number, layers_of(model))
    return AttributeQuestion(layers=found.layers, inputs=len(images), by="example", k=K)


def read_all(index: Index) -> float:
    """Every byte of keys and values once, in the fastest way there is: one sum of each shard."""
    total = 0.0
    for layer in index.layers.values():
        for shard in layer.shards:
            for file in (shard.keys, shard.values):
                assert isinstance(file, ShardFile)
                total += float(file.rows().sum())
    return total


def products(index: Index, asked: AttributeQuestion) -> None:
    """What any answer has to multiply: queries with keys, directions with values."""
    for each in asked.layers:
        queries, directions = map(torch.from_numpy, each.matrices)
        for shard in index.layers[each.layer].shards:
            everything = np.ones(shard.rows, bool)
            for tile in shard.tiles(everything, len(queries), values=True, once=True):
                assert tile.values is not None
                weights_by_row(queries, tile.keys, wide=False, faiss=tile.faiss)
                weights_by_row(directions, tile.values, wide=False, faiss=tile.faiss)
