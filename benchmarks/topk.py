"""Exact top-k beside its peers, on recorded keys and on isotropic random ones.

    python -m benchmarks topk --data MNIST_DIR [--index INDEX] [--json OUT] [--plot OUT.png]

Without --index the paper's network is trained on MNIST first (--steps, 5,000 for T = 640,000: 20 GB
of scratch space). All contestants run interleaved in one process with passive OpenMP waits, which
favours FAISS; every answer is checked against float64. Peers that are not installed are left out.
Times are medians in milliseconds, by the clock and of all processors; read the ratios.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.memories import Memory, isotropic, recorded, trained
from benchmarks.peers import LARGEST_BATCH, Search, peers
from benchmarks.timing import interleaved, machine
from dualform.engine import Index

CASES = ((1, 10), (1, 500), (8, 10), (8, 500), (64, 10), (64, 500), (1024, 10), (1024, 500))
STRATEGIES = ("auto", "certified", "flat", "scan")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds MNIST's files")
    parser.add_argument("--index", type=Path, help="of the MNIST study, with its trained weights")
    parser.add_argument("--steps", type=int, default=5000, help="to train without --index")
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest-batch", type=int, default=1024)
    parser.add_argument("--isotropic-rows", type=int, default=128_000)
    parser.add_argument("--layers", nargs="*", help='such as "layer 0" isotropic; default all')
    parser.add_argument("--peers", nargs="*", help="beside FAISS and torch; default all installed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    wanted = None if arguments.peers is None else set(arguments.peers)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        scratch = Path(folder)
        index = arguments.index or trained(arguments.data, scratch, arguments.steps)
        memories = recorded(index, arguments.data)
        memories.append(isotropic(scratch, arguments.isotropic_rows))
        for memory in memories:
            if arguments.layers and memory.title not in arguments.layers:
                continue
            memory_scratch = scratch / memory.title.replace(" ", "-")
            memory_scratch.mkdir()
            cases = [case for case in CASES if case[0] <= arguments.largest_batch]
            results += compare(memory, cases, arguments.rounds, memory_scratch, wanted)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results), "\n\nProcessor time:\n", table(results, "cpu_ms"), sep="")
    if arguments.plot:
        plot(results, arguments.plot)


def compare(
    memory: Memory,
    cases: list[tuple[int, int]],
    rounds: int,
    scratch: Path,
    wanted: set[str] | None = None,
) -> list[dict[str, Any]]:
    """Every case, every contestant, interleaved."""
    with memory.open() as index:
        layer = index.layers[memory.layer]
        keys = torch.cat([shard.mapped_keys().clone() for shard in layer.shards])
        note(f"{memory.title}: {len(keys):,} rows of {keys.shape[1]}")
        contestants = peers(keys, scratch, wanted)
        for strategy in STRATEGIES:
            contestants[f"dualform {strategy}"] = dualform(index, memory.layer, strategy)
        limits = machine(keys)
        results = []
        for n, k in cases:
            asked = np.ascontiguousarray(memory.queries[:n])
            chosen = {
                name: search
                for name, search in contestants.items()
                if n <= LARGEST_BATCH.get(name, n)
            }
            exact, allowed = references(asked, keys, k)
            for name, search in chosen.items():
                check(name, search(asked, k), asked, exact, allowed)
            few = rounds if n < 1024 else 1  # which takes minutes, and was warmed up by the check
            times = interleaved(
                {name: partial(search, asked, k) for name, search in chosen.items()},
                few,
                warm_up=n < 1024,
                pause=0.1,
            )
            results.append(
                {
                    "memory": memory.title,
                    "rows": len(keys),
                    "d": keys.shape[1],
                    "n": n,
                    "k": k,
                    "rounds": few,
                    "ms": {name: measured.median for name, measured in times.items()},
                    "cpu_ms": {name: measured.cpu for name, measured in times.items()},
                    "range_ms": {
                        name: [measured.low, measured.high] for name, measured in times.items()
                    },
                    "machine": limits,
                }
            )
            note(f"  n={n} k={k} " + ", ".join(f"{a} {b.median:.1f}" for a, b in times.items()))
    return results


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def dualform(index: Index, layer: str, strategy: str) -> Search:
    def search(queries: np.ndarray, k: int) -> np.ndarray:
        hits = index.top_k(layer, queries, k, strategy=strategy)  # type: ignore[arg-type]
        return hits.scores

    return search


def check(
    name: str, scores: np.ndarray, queries: np.ndarray, exact: np.ndarray, allowed: np.ndarray
) -> None:
    """Scores must be the float64 ones, up to the rounding that the contestant allows itself.

    Args:
        name: The contestant.
        scores: float32 [n, k], the contestant's.
        queries: float32 [n, d].
        exact, allowed: What `references` gave for these queries and k.
    """
    for place, i in enumerate(_checked(len(queries))):
        best = np.sort(scores[i])[::-1]
        if not np.allclose(best, exact[place], rtol=0, atol=allowed[place]):
            raise SystemExit(f"{name} is wrong for query {i}")


def references(queries: np.ndarray, keys: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """What some of the queries must get.

    Returns:
        Their k largest float64 scores, descending, [checked, k], and how far a float32 score may be
        from these, [checked].
    """
    checked = torch.from_numpy(queries[_checked(len(queries))]).double()
    parts = [checked @ part.double().T for part in keys.split(1 << 14)]
    best = torch.cat(parts, dim=1).topk(k, dim=1).values
    longest = float(torch.linalg.vector_norm(keys, dim=1).max())
    allowed = 2e-6 * longest * torch.linalg.vector_norm(checked, dim=1)
    return best.numpy(), allowed.numpy()


def _checked(queries: int) -> list[int]:
    """About eight of the queries, spread over the batch."""
    return list(range(0, queries, max(1, queries // 8)))


def table(results: list[dict[str, Any]], what: str = "ms") -> str:
    """Markdown: milliseconds, "ms" or "cpu_ms", and how much faster `auto` is than FAISS."""
    names = list(dict.fromkeys(name for row in results for name in row[what]))
    lines = ["| memory | n | k | " + " | ".join(names) + " | auto to default | auto to tuned |"]
    lines.append("|---|" + "---:|" * (len(names) + 4))
    for row in results:
        ms = row[what]
        cells = [f"{ms[name]:.1f}" if name in ms else "" for name in names]
        auto = ms["dualform auto"]
        gains = [f"{ms[f'faiss {kind}'] / auto:.1f}x" for kind in ("default", "tuned")]
        lines.append(
            f"| {row['memory']} | {row['n']} | {row['k']} | " + " | ".join(cells + gains) + " |"
        )
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds per case, one panel per memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    memories = list(dict.fromkeys(row["memory"] for row in results))
    figure, axes = plt.subplots(
        1, len(memories), figsize=(3.6 * len(memories), 4), sharey=True, squeeze=False
    )
    colours = {
        "faiss default": "#999999",
        "faiss tuned": "#E69F00",
        "torch": "#56B4E9",
        "usearch": "#009E73",
        "lancedb": "#CC79A7",
        "milvus-lite": "#D55E00",
        "dualform auto": "#000000",
    }
    for axis, memory in zip(axes[0], memories, strict=True):
        rows = [row for row in results if row["memory"] == memory]
        for name, colour in colours.items():
            points = [(i, row["ms"][name]) for i, row in enumerate(rows) if name in row["ms"]]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", color=colour, label=name, markersize=4)
        axis.set_xticks(range(len(rows)), [f"{row['n']} / {row['k']}" for row in rows], rotation=60)
        axis.set_yscale("log")
        axis.set_title(f"{memory}\n{rows[0]['rows']:,} x {rows[0]['d']}", fontsize=10)
        axis.set_xlabel("queries / k")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("milliseconds per call")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
