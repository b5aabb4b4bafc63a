"""What a GPU adds: search against its memory's bandwidth and FAISS alone, answers against the CPU.

    python -m benchmarks gpu [--device cuda:0] [--rows 1000000] [--json OUT]
    python -m benchmarks gpu --stand-in --rows 20000

A memory of random rows is made in a scratch folder (rows * 4 * (d_in + d_out) bytes). Then, on one
device: the bandwidth of its memory by a copy; a flat search by one query as a share of that (aim
0.8); searches per second beside FAISS's own index on the device (aim 1.0); top-k, sums and outputs
beside the CPU's cheapest way; and all of them with room for half of the keys. Answers are compared
before anything is timed. --stand-in takes host memory in the device's place: what it writes then is
no figure of a GPU. Times are medians of rounds in alternation, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.timing import interleaved
from dualform.client import parse_filter
from dualform.engine import Index
from dualform.engine.devices.device import Device
from dualform.engine.devices.devices import Devices
from dualform.engine.devices.gpu import Gpu
from dualform.engine.devices.stand_in import StandIn
from dualform.engine.memory.layer import Layer
from dualform.index import build_index
from dualform.record import Recorder

BATCH, GROUPS, LAYER = 1000, 10, "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="one GPU")
    parser.add_argument("--stand-in", action="store_true", help="host memory in its place")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--d-in", type=int, default=800)
    parser.add_argument("--d-out", type=int, default=100)
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    number = int(options.device.partition(":")[2] or 0)
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        path = memory(Path(folder), options.rows, options.d_in, options.d_out)

        def make() -> Device:
            if options.stand_in:
                return StandIn(number, memory=16 << 30)
            return Gpu(number)

        found = compare(path, make, options.rounds)
    found["stand_in"] = options.stand_in
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def memory(folder: Path, rows: int, d_in: int, d_out: int) -> Path:
    """An index of one layer that saw noise, its rows in groups."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(d_in, d_out))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Recorder(model, optimizer, folder / "recording") as recorder:
        for step in range(-(-rows // BATCH)):
            size = min(BATCH, rows - step * BATCH)
            recorder.annotate(label=torch.arange(size) % GROUPS)
            optimizer.zero_grad()
            model(torch.randn(size, d_in, generator=generator)).square().mean().backward()
            optimizer.step()
    shard_rows = min(1 << 16, max(1000, rows // 16))
    build_index(folder / "recording", folder / "index", shard_rows=shard_rows)
    return folder / "index"


def compare(path: Path, make: Callable[[], Device], rounds: int) -> dict[str, Any]:
    """Everything that is measured, with a device that holds all rows, and one that holds half."""
    with Index.open(path, device="cpu") as cpu:
        layer = layer_of(cpu)
        rng = np.random.default_rng(1)
        queries = rng.standard_normal((1024, layer.d_in)).astype(np.float32)
        device = make()
        found: dict[str, Any] = {
            "device": f"{device.name}: {device.title}",
            "rows": layer.rows,
            "d_in": layer.d_in,
            "d_out": layer.d_out,
            "memory_gb_s": bandwidth(device, layer.rows * layer.d_in, rounds),
        }
        whole = Devices([device], device.memory // 5 * 4)
        with Index.open(path, devices=whole) as index:
            wait(whole, layer_of(index))
            found["all rows there"] = against_cpu(index, cpu, queries, rounds)
            found["flat scan, of the memory's bandwidth"] = flat(
                whole, layer_of(index), queries, rounds, found["memory_gb_s"]
            )
            found["search"] = search(index, device, queries, rounds)
        whole.close()
        half = Devices([make()], device.memory // 5 * 4)
        if half.places:
            half.places[0].budget = layer.rows * layer.d_in * 2
        with Index.open(path, devices=half) as index:
            wait(half, layer_of(index))
            there = sum(each.rows for each in half.residences(layer_of(index)))
            found["a memory twice the device's"] = {
                "rows there": there,
                **against_cpu(index, cpu, queries, rounds),
            }
        half.close()
    return found


def wait(devices: Devices, layer: Layer) -> None:
    """Until rows lie where they are to lie."""
    if not devices.places:
        raise SystemExit(f"the device is refused: {devices.states()[0].refused}")
    devices.settle()
    if not devices.residences(layer):
        raise SystemExit("no row of the layer fits on the device")


def bandwidth(device: Device, numbers: int, rounds: int) -> float:
    """GB/s that a copy reads and writes, of as many numbers as the keys have, 1 GiB at most."""
    source = device.empty(1, min(numbers, 1 << 28))
    target = device.empty(1, min(numbers, 1 << 28))

    def copy() -> None:
        target.copy_(source)
        target[:, :1].cpu()  # a transfer waits for what came before

    with device.current():
        taken = interleaved({"copy": copy}, rounds)["copy"].low
    return 2 * source.nbytes / taken / 1e6


def layer_of(index: Index) -> Layer:
    return index.layers[LAYER]


def flat(
    devices: Devices, layer: Layer, queries: np.ndarray, rounds: int, memory_gb_s: float
) -> float:
    """Bytes of keys per second that a search by one query passes, as a share of a copy's."""
    (held,) = devices.held(layer)
    device = held.place.device
    with held.place.used():
        asked = torch.from_numpy(queries[:1]).to(device.where)

        def once() -> None:
            device.nearest(held.block.keys, asked, 42)[0].cpu()

        taken = interleaved({"flat": once}, rounds)["flat"].low
    return held.key_bytes / taken / 1e6 / memory_gb_s


def search(index: Index, device: Device, queries: np.ndarray, rounds: int) -> list[dict[str, Any]]:
    """Searches per second beside FAISS's own index of the same keys, which proves nothing."""
    layer = layer_of(index)
    alone = faiss_alone(device, layer)
    rows = []
    for n in (1, 64, 1024):
        asked = queries[:n]
        times = interleaved(
            {
                "dualform": partial(index.top_k, LAYER, asked, 10, strategy="device"),
                "faiss": partial(alone, asked, 10),
            },
            rounds,
        )
        rows.append(
            {
                "queries": n,
                **{f"{name}_ms": each.median for name, each in times.items()},
                "of_faiss": times["faiss"].median / times["dualform"].median,
            }
        )
    return rows


def faiss_alone(device: Device, layer: Layer) -> Callable[[np.ndarray, int], object]:
    """FAISS's flat index of the layer's keys: on the GPU, or on the host for a stand-in."""
    import faiss

    flat: Any
    if isinstance(device, Gpu):
        config = faiss.GpuIndexFlatConfig()
        config.device, config.use_cuvs = device.where.index, False
        flat = faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), layer.d_in, config)
    else:
        flat = faiss.IndexFlatIP(layer.d_in)
    for shard in layer.shards:
        flat.add(shard.mapped_keys().clone().numpy())
    return lambda asked, k: flat.search(asked, k)


def against_cpu(
    index: Index, cpu: Index, queries: np.ndarray, rounds: int
) -> dict[str, dict[str, Any]]:
    """The device's answers and the planner's beside the CPU's cheapest."""
    where = parse_filter("label < 5 and step > 0")
    found = {}
    questions: dict[str, Callable[[Index, np.ndarray, Literal["auto", "device"]], Any]] = {
        "top-k": lambda of, asked, way: of.top_k(LAYER, asked, 10, strategy=way),
        "top-k, absolute": lambda of, asked, way: of.top_k(
            LAYER, asked, 10, order="absolute", strategy=way
        ),
        "top-k, half the rows": lambda of, asked, way: of.top_k(
            LAYER, asked, 10, where=where, strategy=way
        ),
        "absolute sums": lambda of, asked, way: of.sums(
            LAYER, asked, "label", absolute=True, strategy=way
        ),
        "output, half the rows": lambda of, asked, way: of.dual_output(
            LAYER, asked, where=where, strategy=way
        ),
    }
    for n in (1, 64):
        asked = queries[:n]
        for name, ask in questions.items():
            same(name, ask(index, asked, "device"), ask(cpu, asked, "auto"))
            times = interleaved(
                {
                    "device": partial(ask, index, asked, "device"),
                    "auto": partial(ask, index, asked, "auto"),
                    "cpu": partial(ask, cpu, asked, "auto"),
                },
                rounds,
            )
            found[f"{name}, {n} queries"] = {
                **{f"{each}_ms": taken.median for each, taken in times.items()},
                "auto_is": ask(index, asked, "auto").plan.strategy,
            }
    return found


def same(name: str, ours: Any, theirs: Any) -> None:
    """Top-k is the CPU's bit for bit, totals are up to the rounding of float32 weights."""
    if hasattr(ours, "scores"):
        if not (
            np.array_equal(ours.rows, theirs.rows) and np.array_equal(ours.scores, theirs.scores)
        ):
            raise SystemExit(f"{name}: the device's rows are not the CPU's")
    elif not np.allclose(ours.values, theirs.values, rtol=1e-4, atol=1e-3):
        raise SystemExit(f"{name}: the device's numbers are not the CPU's")


if __name__ == "__main__":
    main()
