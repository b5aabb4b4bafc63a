"""What a device must show before it is used: products as precise as bounds assume; and its pace.

Bounds assume float32 products added up in float32, in any order (`memory.exact.error_bound`). TF32
rounds factors to 11 bits, and a driver or a setting may turn it on: vectors whose rounding adds up
show it at any length, random ones show the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from dualform.engine.devices.device import MAX_K, Device
from dualform.engine.devices.place import FEW, Pace, Paces
from dualform.engine.devices.work import Block, Nearest, Part, Totals
from dualform.engine.memory.exact import error_bound
from dualform.engine.memory.weights import tile_weights
from dualform.engine.plan.costs import scan_seconds

_ROWS, _QUERIES, _K = 2048, 16, 64
_LENGTHS = (3, 64, 1000)
_TIMED_BYTES, _UPLOADED_BYTES = 512 << 20, 32 << 20
_SCRATCH = 16 << 20


def wrong(device: Device) -> str | None:
    """What the device computes otherwise than bounds assume; None where it does not."""
    rng = np.random.default_rng(20)
    for d in _LENGTHS:
        keys = rng.standard_normal((_ROWS, d)).astype(np.float32)
        keys[::3] = 1 + 0.9 * 2.0**-11  # what 11 bits make too small, all of it
        keys[1::31] *= np.float32(1e30)
        keys[2::31] *= np.float32(1e-42)  # not normal any more
        queries = rng.standard_normal((_QUERIES, d)).astype(np.float32)
        queries[::4] = 1 + 0.9 * 2.0**-11
        what = _nearest_wrong(device, keys, queries) or _sums_wrong(device, keys, queries)
        if what is not None:
            return f"{what}, for vectors of {d} numbers"
    return None


def _bounds(keys: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Exact weights, float64 [n, rows], and how far float32 may be from each."""
    exact = queries.astype(np.float64) @ keys.astype(np.float64).T
    norms = torch.from_numpy(np.linalg.norm(queries.astype(np.float64), axis=1))
    longest = np.linalg.norm(keys.astype(np.float64), axis=1)
    bound = np.stack(
        [error_bound(keys.shape[1], norms, float(norm)).numpy() for norm in longest], axis=1
    )
    return exact, bound


def _nearest_wrong(device: Device, keys: np.ndarray, queries: np.ndarray) -> str | None:
    exact, bound = _bounds(keys, queries)
    with device.current():
        work = Nearest(device, torch.from_numpy(queries), _K, _SCRATCH)
        for _ in work.take(Part(_block(device, keys, None))):
            pass
        scores, places, _ = work.result()
    if places.shape != (len(queries), _K) or places.min() < 0 or places.max() >= len(keys):
        return "FAISS returned no rows of the memory"
    off = np.abs(scores - np.take_along_axis(exact, places, 1))
    allowed = np.take_along_axis(bound, places, 1)
    if not (off <= allowed).all():
        worst = float(np.nanmax(off / allowed))
        return f"FAISS's scores are up to {worst:.3g} times further from float64's than allowed"
    left = exact - bound
    np.put_along_axis(left, places, -np.inf, axis=1)
    if (left.max(axis=1) > scores.min(axis=1)).any():
        return "FAISS left out a row that is surely better than one that it found"
    return None


def _sums_wrong(device: Device, keys: np.ndarray, queries: np.ndarray) -> str | None:
    """Each row is a group of its own: a sum is a weight."""
    exact, bound = _bounds(keys, queries)
    codes = np.arange(len(keys), dtype=np.int32)
    with device.current():
        work = Totals(device, torch.from_numpy(queries), len(keys), 0, False, _SCRATCH)
        for _ in work.take(Part(_block(device, keys, None), codes=codes)):
            pass
        weights = work.result().T
    if not (np.abs(weights - exact) <= bound).all():
        worst = float(np.nanmax(np.abs(weights - exact) / bound))
        return f"torch's products are up to {worst:.3g} times further from float64's than allowed"
    return None


def measured(device: Device, budget: int, scratch: int) -> Paces:
    """How fast the device is, by the work that questions do there.

    Of rows beyond what it may keep in a cache, and of which any may be the best: a GPU finds equal
    ones sooner.
    """
    d = 256
    rows = max(256, min(_TIMED_BYTES, budget // 4) // (8 * d))
    random = torch.Generator(device.where).manual_seed(0)
    with device.current():
        block = Block(*[device.empty(rows, d).uniform_(generator=random) for _ in range(2)])
    few = Block(block.keys[:64], block.values)
    factors = np.ones((rows, 2))

    def finding(k: int, part: Block, n: int) -> None:
        work = Nearest(device, torch.ones((n, d)), k, scratch)
        for _ in work.take(Part(part)):
            pass
        work.result()

    def sums(part: Block, n: int) -> None:
        work = Totals(device, torch.ones((n, d)), 1, 0, False, scratch)
        for _ in work.take(Part(part)):
            pass
        work.result()

    def outputs(part: Block, n: int) -> None:
        work = Totals(device, torch.ones((n, d)), 1, d, False, scratch)
        for _ in work.take(Part(part, factors=factors[: len(part.keys)])):
            pass
        work.result()

    size = min(rows, _UPLOADED_BYTES // (4 * d))
    host = torch.ones((size, d), dtype=torch.float32, device="cpu")
    room = block.keys[:size]

    def upload() -> None:
        room.copy_(host)
        room[:1].cpu()

    with device.current():
        return Paces(
            _pace(partial(finding, FEW), few, block, block.keys.nbytes),
            _pace(partial(finding, MAX_K), few, block, block.keys.nbytes),
            _pace(sums, few, block, block.keys.nbytes),
            _pace(outputs, few, block, 2 * block.keys.nbytes),
            _seconds(upload) / room.nbytes,
        )


def cpu_pace() -> float:
    """How many times as long as the planner's model says a scan takes on the CPU."""
    keys, queries = torch.ones((1 << 14, 256), device="cpu"), torch.ones((8, 256), device="cpu")

    def scan() -> None:
        tile_weights(queries, keys, wide=False)

    return _seconds(scan) / scan_seconds(keys.nbytes, len(queries))


def _pace(work: Callable[[Block, int], None], few: Block, block: Block, size: int) -> Pace:
    call = _seconds(lambda: work(few, 1))
    one = max(0.0, _seconds(lambda: work(block, 1)) - call)
    many = max(one, _seconds(lambda: work(block, 32)) - call)
    pair = (many - one) / 31 / size
    return Pace(call, max(0.0, one / size - pair), pair)


def _seconds(work: Callable[[], None]) -> float:
    """The least of three, after one that does not count."""
    work()
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _block(device: Device, keys: np.ndarray, values: np.ndarray | None) -> Block:
    room = device.empty(*keys.shape)
    room.copy_(torch.from_numpy(keys))
    of_values = None
    if values is not None:
        of_values = device.empty(*values.shape)
        of_values.copy_(torch.from_numpy(values))
    return Block(room, of_values)
