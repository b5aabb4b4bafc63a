"""Explain beside the single questions that it answers: aims at 1.3 times the most expensive one.

    python -m benchmarks explain --index INDEX --data MNIST_DIR [--rounds 3] [--json OUT]

Per layer and number of queries: the ten best rows, sums of |weight| per class and the output split
by class (three answers, the last two need a scan); then the same with a filter, and signed sums.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.memories import Memory, recorded
from benchmarks.timing import interleaved
from dualform.client import parse_filter
from dualform.engine import Index

CASES: dict[str, dict[str, Any]] = {
    "all rows, absolute": {"absolute": True, "where": None},
    "step >= 1000, signed": {"absolute": False, "where": parse_filter("step >= 1000")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--index", type=Path, required=True, help="of the MNIST study")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds MNIST's files")
    parser.add_argument("--queries", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--layers", nargs="*", help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    memories = recorded(arguments.index, arguments.data)
    with memories[0].open() as index:
        for memory in memories:
            if arguments.layers and memory.layer not in arguments.layers:
                continue
            for title in CASES:
                for n in arguments.queries:
                    results.append(compare(index, memory, title, n, arguments.rounds))
                    print(results[-1], file=sys.stderr, flush=True)
    print("| layer | rows | queries | top-k | sums | output | explain | to the largest |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for result in results:
        cells = " | ".join(f"{result[name]:.0f}" for name in ("top_k", "sums", "output", "explain"))
        about = " | ".join(f"{result[name]}" for name in ("layer", "case", "n"))
        print(f"| {about} | {cells} | {result['ratio']:.2f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def compare(index: Index, memory: Memory, title: str, n: int, rounds: int) -> dict[str, Any]:
    """Medians in milliseconds, and the ratio."""
    layer, queries = memory.layer, memory.queries[:n]
    absolute, where = CASES[title]["absolute"], CASES[title]["where"]
    sums = partial(index.sums, layer, queries, "label", absolute=absolute, where=where)
    output = partial(index.dual_output, layer, queries, where=where, group_by="label")
    explain = partial(index.explain, layer, queries, k=10, group_by="label", where=where)
    times = interleaved(
        {
            "top_k": partial(index.top_k, layer, queries, 10, where=where),
            "sums": sums,
            "output": output,
            "explain": partial(explain, absolute=absolute, dual_output=True),
        },
        rounds,
    )
    found: dict[str, Any] = {name: measured.median for name, measured in times.items()}
    ratio = found["explain"] / max(found["top_k"], found["sums"], found["output"])
    return {"layer": memory.title, "case": title, "n": n, **found, "ratio": ratio}
