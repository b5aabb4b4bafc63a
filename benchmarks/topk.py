"""Exact top-k beside its peers, on recorded keys and on isotropic random ones.

    python benchmarks/topk.py INDEX --data MNIST_DIR [--rows 200000] [--json OUT] [--plot OUT.png]

INDEX is that of `experiments/run.py experiments/mnist_single.yaml --keep`; queries are activations
of MNIST test images in its trained network. Isotropic keys come from recording a layer that sees
nothing but noise. All contestants run interleaved in one process with passive OpenMP waits, which
favours FAISS; every answer is checked against float64. Peers that are not installed are left out:
usearch and lancedb come from PyPI. Times are medians in milliseconds; read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import faiss
import numpy as np
import torch
from torch import nn

from dualform.engine import Index
from dualform.index import build_index
from dualform.record import Recorder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

Search = Callable[[np.ndarray, int], np.ndarray]
CASES = ((1, 10), (1, 500), (8, 10), (8, 500), (64, 10), (64, 500), (1024, 10))
STRATEGIES = ("auto", "certified", "flat", "scan")
FAISS_DEFAULT = faiss.cvar.distance_compute_blas_threshold
SLOW = {"usearch": 8, "lancedb": 8}  # peers are asked for no larger batches than this


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("index", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds MNIST/")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--isotropic-rows", type=int, default=128_000)
    parser.add_argument("--layers", nargs="*", help="default: all, and the isotropic one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(dir=arguments.index.parent) as scratch:
        memories = list(recorded(arguments.index, arguments.data, Path(scratch)))
        memories.append(isotropic(Path(scratch), arguments.isotropic_rows))
        for title, index, layer, queries in memories:
            if arguments.layers and title not in arguments.layers:
                continue
            results += compare(title, index, layer, queries, arguments.repeat, Path(scratch))
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.plot:
        plot(results, arguments.plot)


def recorded(path: Path, data: Path, scratch: Path) -> Iterator[tuple[str, Index, str, np.ndarray]]:
    """The layers of the MNIST index, each with the activations of 1,024 test images."""
    from runner.images import load

    index = Index.open(path, device="cpu")
    _, test = load(data, scratch / "mnist")
    x = test.inputs[:1024]
    for name, layer in index.layers.items():
        yield f"layer {name}", index, name, x.numpy()
        state = index.state(name, "final")
        assert state is not None
        weight = torch.from_numpy(state[layer.manifest.weight])
        x = torch.relu(x @ weight.T + torch.from_numpy(state[str(layer.manifest.bias)]))


def isotropic(scratch: Path, rows: int) -> tuple[str, Index, str, np.ndarray]:
    """A layer of 800 inputs that saw nothing but noise: what sketches can't help with."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(800, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Recorder(model, optimizer, scratch / "recording", values=False) as recorder:
        for _ in range(rows // 1000):
            recorder.annotate(label=0)
            optimizer.zero_grad()
            model(torch.randn(1000, 800, generator=generator)).mean().backward()
            optimizer.step()
    build_index(scratch / "recording", scratch / "isotropic")
    queries = torch.randn(1024, 800, generator=generator).numpy()
    return "isotropic", Index.open(scratch / "isotropic", device="cpu"), "0", queries


def compare(
    title: str, index: Index, layer: str, queries: np.ndarray, repeat: int, scratch: Path
) -> list[dict[str, object]]:
    """Every case, every contestant, interleaved."""
    own = index.layers[layer]
    keys = torch.cat([shard.keys.rows().clone() for shard in own.shards])
    print(f"{title}: {len(keys):,} rows of {keys.shape[1]}", file=sys.stderr, flush=True)
    contestants = peers(keys, scratch / title.replace(" ", "-"))
    for strategy in STRATEGIES:
        contestants[f"dualform {strategy}"] = dualform(index, layer, strategy)
    limits = machine(keys)
    results = []
    for n, k in CASES:
        asked = np.ascontiguousarray(queries[:n])
        seconds: dict[str, list[float]] = {}
        for round_number in range(repeat + 1):  # the first one warms up, and is checked
            for name, search in contestants.items():
                if n > SLOW.get(name, n):
                    continue
                start = time.perf_counter()
                found = search(asked, k)
                elapsed = time.perf_counter() - start
                if round_number == 0:
                    check(name, found, asked, keys)
                else:
                    seconds.setdefault(name, []).append(elapsed)
        medians = {name: 1e3 * statistics.median(own) for name, own in seconds.items()}
        spread = {name: 1e3 * (max(own) - min(own)) for name, own in seconds.items()}
        results.append(
            {
                "memory": title,
                "rows": len(keys),
                "d": keys.shape[1],
                "n": n,
                "k": k,
                "ms": medians,
                "spread_ms": spread,
                "machine": limits,
            }
        )
        print(
            f"  n={n} k={k} " + ", ".join(f"{a} {b:.1f}" for a, b in medians.items()),
            file=sys.stderr,
            flush=True,
        )
    return results


def dualform(index: Index, layer: str, strategy: str) -> Search:
    def search(queries: np.ndarray, k: int) -> np.ndarray:
        hits = index.top_k(layer, queries, k, strategy=strategy)  # type: ignore[arg-type]
        return hits.scores

    return search


def peers(keys: torch.Tensor, scratch: Path) -> dict[str, Search]:
    """Scores [n, k] by other means, float32."""
    matrix = keys.numpy()
    flat = faiss.IndexFlatIP(keys.shape[1])
    flat.add(matrix)

    def with_threshold(threshold: int) -> Search:
        def search(queries: np.ndarray, k: int) -> np.ndarray:
            faiss.cvar.distance_compute_blas_threshold = threshold
            return np.asarray(flat.search(queries, k)[0])

        return search

    def gemm(queries: np.ndarray, k: int) -> np.ndarray:
        return (torch.from_numpy(queries) @ keys.T).topk(k, dim=1).values.numpy()

    found: dict[str, Search] = {
        "faiss default": with_threshold(FAISS_DEFAULT),
        "faiss tuned": with_threshold(1),
        "torch": gemm,
    }
    try:
        from usearch.index import MetricKind
        from usearch.index import search as usearch_search
    except ImportError:
        pass
    else:

        def usearch(queries: np.ndarray, k: int) -> np.ndarray:
            hits = usearch_search(matrix, queries, k, MetricKind.IP, exact=True)
            return 1 - np.asarray(hits.distances).reshape(len(queries), k)

        found["usearch"] = usearch
    try:
        import lancedb
        import pyarrow as pa
    except ImportError:
        pass
    else:
        vectors = pa.FixedSizeListArray.from_arrays(matrix.reshape(-1), matrix.shape[1])
        data = pa.table({"vector": vectors})
        lance = lancedb.connect(scratch).create_table("keys", data)

        def lancedb_search(queries: np.ndarray, k: int) -> np.ndarray:
            scores = []
            for query in queries:
                answer = lance.search(query).distance_type("dot").bypass_vector_index().limit(k)
                distances = answer.select(["_distance"]).to_arrow()["_distance"]
                scores.append(1 - distances.to_numpy())
            return np.stack(scores)

        found["lancedb"] = lancedb_search
    return found


def check(name: str, scores: np.ndarray, queries: np.ndarray, keys: torch.Tensor) -> None:
    """Scores must be the float64 ones, up to the rounding that the contestant allows itself."""
    for i in range(0, len(queries), max(1, len(queries) // 8)):
        exact = torch.zeros(len(keys), dtype=torch.float64)
        query = torch.from_numpy(queries[i]).double()
        for start in range(0, len(keys), 1 << 16):
            exact[start : start + (1 << 16)] = keys[start : start + (1 << 16)].double() @ query
        best = exact.topk(scores.shape[1]).values.numpy()
        size = float(query.norm()) * float(torch.linalg.vector_norm(keys, dim=1).max())
        if not np.allclose(np.sort(scores[i])[::-1], best, rtol=0, atol=2e-6 * size):
            raise SystemExit(f"{name} is wrong for query {i}")


def machine(keys: torch.Tensor) -> dict[str, float]:
    """What the machine can do, in this process: GB/s read, and GFLOP/s of a float32 product."""
    small, wide = keys[:100_000], torch.randn(64, keys.shape[1])

    def best(run: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    product = best(lambda: wide @ small.T)
    return {
        "read_gb_s": keys.numel() * 4 / best(lambda: keys.sum()) / 1e9,
        "gemm_gflop_s": 2 * 64 * small.numel() / product / 1e9,
        "gemv_ms": 1e3 * best(lambda: keys @ wide[0]),
    }


def table(results: list[dict[str, object]]) -> str:
    """Markdown: milliseconds, and how much faster `auto` is than FAISS."""
    names = list(dict.fromkeys(name for row in results for name in row["ms"]))  # type: ignore
    lines = ["| memory | n | k | " + " | ".join(names) + " | auto to default | auto to tuned |"]
    lines.append("|---|" + "---:|" * (len(names) + 4))
    for row in results:
        ms: dict[str, float] = row["ms"]  # type: ignore[assignment]
        cells = [f"{ms[name]:.1f}" if name in ms else "" for name in names]
        auto = ms["dualform auto"]
        gains = [f"{ms[f'faiss {kind}'] / auto:.1f}x" for kind in ("default", "tuned")]
        lines.append(
            f"| {row['memory']} | {row['n']} | {row['k']} | " + " | ".join(cells + gains) + " |"
        )
    return "\n".join(lines)


def plot(results: list[dict[str, object]], path: Path) -> None:
    """Milliseconds per case, one panel per memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    memories = list(dict.fromkeys(row["memory"] for row in results))
    figure, axes = plt.subplots(1, len(memories), figsize=(4 * len(memories), 4), sharey=True)
    shown = ["faiss default", "faiss tuned", "torch", "usearch", "lancedb", "dualform auto"]
    colours = ["#999999", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#000000"]
    for axis, memory in zip(np.atleast_1d(axes), memories, strict=True):
        rows = [row for row in results if row["memory"] == memory]
        for name, colour in zip(shown, colours, strict=True):
            points = [row["ms"].get(name) for row in rows]  # type: ignore[attr-defined]
            axis.plot(range(len(rows)), points, "o-", color=colour, label=name, markersize=4)
        axis.set_xticks(range(len(rows)), [f"{row['n']}/{row['k']}" for row in rows], rotation=45)
        axis.set_yscale("log")
        axis.set_title(f"{memory}, {rows[0]['rows']:,} x {rows[0]['d']}", fontsize=10)
        axis.set_xlabel("queries / k")
        axis.grid(alpha=0.3)
    np.atleast_1d(axes)[0].set_ylabel("milliseconds")
    np.atleast_1d(axes)[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
