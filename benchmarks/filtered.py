"""Top-k of the rows that a filter selects, beside other means that are told which rows they are.

    python -m benchmarks filtered --index INDEX --data MNIST_DIR [--layers 0] [--json OUT]

FAISS gets its selector, torch gathers the rows and multiplies them; both are given the rows, while
ours evaluates the filter each time. Aims: none; read how time follows the number of rows.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from benchmarks.memories import Memory, recorded
from benchmarks.timing import turns
from benchmarks.topk import check, references
from dualform.client import parse_filter
from dualform.engine import Index

FILTERS = ("example < 100", "step >= {late}", "label = 3", "label != 3")
K = 10
STRATEGIES = ("auto", "certified", "scan")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--index", type=Path, required=True, help="of the MNIST study")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds MNIST's files")
    parser.add_argument("--queries", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--layers", nargs="*", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for memory in recorded(arguments.index, arguments.data):
        if not arguments.layers or memory.layer in arguments.layers:
            with memory.open() as index:
                results += compare(index, memory, arguments.queries, arguments.rounds)
    names = list(results[0]["ms"])
    print("| layer | filter | rows | queries | " + " | ".join(names) + " |")
    print("|---|---|---:|---:|" + "---:|" * len(names))
    for result in results:
        cells = " | ".join(f"{result['ms'][name]:.1f}" for name in names)
        about = f"{result['memory']} | {result['filter']} | {result['rows']:,} | {result['n']}"
        print(f"| {about} | {cells} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def compare(index: Index, memory: Memory, batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """Every filter and number of queries: medians in milliseconds, all answers checked."""
    layer = index.layers[memory.layer]
    keys = torch.cat([shard.mapped_keys().clone() for shard in layer.shards])
    flat = faiss.IndexFlatIP(keys.shape[1])
    flat.add(keys.numpy())
    found = []
    for text in FILTERS:
        text = text.format(late=index.steps - 100)
        where = parse_filter(text)
        mask = layer.space.select(where)
        rows = np.flatnonzero(mask)
        parameters = _selecting(mask)
        for n in batches:
            queries = np.ascontiguousarray(memory.queries[:n])
            contestants = {
                "faiss, selector": partial(_faiss, flat, queries, parameters),
                "torch, gathered": partial(_torch, keys, queries, torch.from_numpy(rows)),
            }
            for strategy in STRATEGIES:
                contestants[f"dualform {strategy}"] = partial(
                    _dualform, index, memory.layer, queries, where, strategy
                )
            exact, allowed = references(queries, keys[torch.from_numpy(rows)], K)
            for name, search in contestants.items():
                check(name, search(), queries, exact, allowed)
            times = turns(contestants, rounds, 2)
            ms = {name: measured.median for name, measured in times.items()}
            found.append(
                {"memory": memory.title, "filter": text, "rows": len(rows), "n": n, "ms": ms}
            )
    return found


def _selecting(mask: np.ndarray) -> Any:
    kinds: Any = faiss  # whose stubs know the C++ constructors alone
    selector = kinds.IDSelectorBitmap(np.packbits(mask, bitorder="little"))
    return kinds.SearchParameters(sel=selector)


def _faiss(flat: Any, queries: np.ndarray, parameters: Any) -> np.ndarray:
    return np.asarray(flat.search(queries, K, params=parameters)[0])


def _torch(keys: torch.Tensor, queries: np.ndarray, rows: torch.Tensor) -> np.ndarray:
    return (torch.from_numpy(queries) @ keys[rows].T).topk(K, dim=1).values.numpy()


def _dualform(
    index: Index, layer: str, queries: np.ndarray, where: Any, strategy: Any
) -> np.ndarray:
    return index.top_k(layer, queries, K, where=where, strategy=strategy).scores


if __name__ == "__main__":
    main()
