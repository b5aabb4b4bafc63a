"""A packed index beside the plain one it was made of: bytes, and what each kind of question takes.

    python -m benchmarks packed-index --data MNIST_DIR [--index INDEX] [--steps 320] [--folder F]

Trains the paper's network (784-800-800-10, batch 128) where no index is named, packs its index
(`dualform index pack`), and asks both the same questions in turn: every answer is compared bit for
bit before it is timed. Times are processor time of the whole process, which counts where others use
the machine too, and the clock's. `first` is a question to an index that was just opened: all that
it reads is checked, and keys that are packed are unpacked once for that.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memories import Memory, recorded, trained
from benchmarks.timing import Times, interleaved
from dualform.engine import Index
from dualform.index import pack_index
from dualform.store import IndexManifest
from dualform.v1 import attribution_pb2 as pb

Question = Callable[[Index], Any]


def questions(memory: Memory) -> dict[str, Question]:
    """What is asked of a layer; each gives arrays that say whether two answers are the same."""
    name, one, many = memory.layer, memory.queries[:1], memory.queries[:64]
    late = pb.Filter(
        comparison=pb.Comparison(
            column="step", operator=pb.OPERATOR_LT, values=[pb.Value(int64_value=100)]
        )
    )

    def top_k(queries: np.ndarray, k: int, **more: Any) -> Question:
        def ask(index: Index) -> Any:
            hits = index.top_k(name, queries, k, **more)
            return hits.rows, hits.scores

        return ask

    def first(index: Index) -> Any:
        with Index.open(index.path, device="cpu") as again:
            hits = again.top_k(name, one, 10)
            return hits.rows, hits.scores

    return {
        "first": first,
        "top-k, 1 query, k 10": top_k(one, 10),
        "top-k, 1 query, k 500": top_k(one, 500),
        "top-k, 64 queries, k 10": top_k(many, 10),
        "top-k, 1 query, k 10, scan": top_k(one, 10, strategy="scan"),
        "sums by label": lambda index: (index.sums(name, one, "label").values,),
        "absolute sums by label": lambda index: (
            index.sums(name, one, "label", absolute=True).values,
        ),
        "output": lambda index: (index.dual_output(name, one).values,),
        "output of a filter": lambda index: (index.dual_output(name, one, where=late).values,),
        "all weights": lambda index: tuple(
            chunk.weights for chunk in index.stream_weights(name, one)
        ),
    }


def compare(plain: Index, packed: Index, ask: Question, rounds: int) -> dict[str, Times]:
    """Time a question to both, once their answers are known to be the same."""
    for expected, found in zip(ask(plain), ask(packed), strict=True):
        np.testing.assert_array_equal(found, expected)
    return interleaved({"plain": lambda: ask(plain), "packed": lambda: ask(packed)}, rounds)


def show_sizes(plain: Path, packed: Path) -> None:
    manifests = [IndexManifest.load(path) for path in (plain, packed)]
    for name in manifests[0].layers:
        shards = [manifest.layers[name].shards for manifest in manifests]
        for what in ("keys", "values"):
            before, after = (sum(getattr(shard, what).bytes for shard in each) for each in shards)
            print(f"layer {name} {what}: {before / 1e6:.1f} MB, packed {after / before:.3f}")
    whole = [
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for path in (plain, packed)
    ]
    rows = [sum(manifest.row_bytes(name)[0] for name in manifest.layers) for manifest in manifests]
    print(f"keys and values: {rows[0] / 1e6:.1f} MB, packed {rows[1] / rows[0]:.3f}")
    print(f"the whole index: {whole[0] / 1e6:.1f} MB, packed {whole[1] / whole[0]:.3f}")


def run(plain: Path, data: Path, folder: Path, rounds: int, layers: list[str]) -> None:
    """Pack, and ask both."""
    packed = folder / "packed"
    if not packed.exists():
        started = time.process_time()
        pack_index(plain, packed)
        size = sum(IndexManifest.load(plain).row_bytes(name)[0] for name in ("0", "2", "4"))
        spent = time.process_time() - started
        print(f"packed at {size / spent / 1e6:.0f} MB/s of a core ({spent:.1f} s)")
    show_sizes(plain, packed)
    with Index.open(plain, device="cpu") as one, Index.open(packed, device="cpu") as other:
        for memory in recorded(plain, data):
            if layers and memory.layer not in layers:
                continue
            rows = one.layers[memory.layer].rows
            print(f"\n{memory.title}: {rows:,} rows; ms of processors (of the clock)")
            for what, ask in questions(memory).items():
                times = compare(one, other, ask, rounds)
                a, b = times["plain"], times["packed"]
                print(
                    f"| {what} | {a.cpu:.1f} ({a.median:.1f}) | {b.cpu:.1f} ({b.median:.1f}) | "
                    f"{b.cpu / a.cpu:.1f} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks packed-index")
    parser.add_argument("--data", type=Path, required=True, help="a folder with MNIST's .gz files")
    parser.add_argument("--index", type=Path, help="a plain index of the paper's network on MNIST")
    parser.add_argument("--steps", type=int, default=320, help="without --index: of the training")
    parser.add_argument("--folder", type=Path, help="where what is made stays (default: nowhere)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", nargs="*", default=[], help="of 0, 2 and 4 (default: all)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as nowhere:
        folder = options.folder or Path(nowhere)
        folder.mkdir(parents=True, exist_ok=True)
        plain = options.index or trained(options.data, folder, options.steps)
        run(plain, options.data, folder, options.rounds, options.layers)


if __name__ == "__main__":
    main()
