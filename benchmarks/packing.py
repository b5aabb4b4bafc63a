"""What packing leaves of recordings, and what it costs, column by column.

    python -m benchmarks packing [--data MNIST_DIR] [--epochs 10] [--examples 60000]

Trains the paper's network on MNIST (784-800-800-10, batch 128, SGD), and a small transformer with
GELU on this repository's own text (two blocks of width 128, AdamW), each recorded with `pack=True`.
Of every layer's keys and values: bytes in the file and unpacked, and how much a core packs and
unpacks in a second (processor time of single records, unpacked bytes). Then what the same records
would take unpacked, to whole pages as they are written.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.memories import BATCH, images, network
from dualform.record import Recorder
from dualform.store.packing import measured, packed, unpack
from dualform.store.recording import PassRecord, Recording
from dualform.store.segment_table import padded

_TIMED = 5
"""So many records of a column are packed and unpacked once more, by the clock."""


def record_mnist(data: Path, path: Path, epochs: int, examples: int) -> None:
    """Every example once an epoch, in a new order each."""
    inputs, labels = (part[:examples] for part in images(data, "train"))
    model, order = network(), np.random.default_rng(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Recorder(model, optimizer, path, pack=True) as recorder:
        for _ in range(epochs):
            for ids in torch.from_numpy(order.permutation(len(labels))).split(BATCH):
                recorder.annotate(label=labels[ids], example=ids)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs[ids]), labels[ids]).backward()
                optimizer.step()


class Transformer(nn.Module):
    """Reads bytes and says the next one."""

    def __init__(self, width: int = 128, time: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(time, width)
        blocks = (
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        time = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time)
        x = self.tokens(ids) + self.places(torch.arange(time))
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        found: torch.Tensor = self.head(x)
        return found


def record_transformer(path: Path, steps: int) -> None:
    """Batches of 16 stretches of 64 bytes of the documentation."""
    pages = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    text = b"".join(page.read_bytes() for page in pages)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Recorder(model, optimizer, path, pack=True):
        for _ in range(steps):
            starts = torch.randint(0, len(tokens) - 65, (16,))
            stretch = torch.stack([tokens[start : start + 65] for start in starts])
            optimizer.zero_grad()
            logits = model(stretch[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), stretch[:, 1:].flatten()).backward()
            optimizer.step()


def tell(path: Path) -> None:
    """Print a line for each column, and one for all."""
    total, plain = 0, 0
    met: set[tuple[int, int]] = set()
    print("layer  column  packings  ratio  pack MB/s  unpack MB/s")
    with Recording.open(path) as recording:
        for layer in recording.manifest.layers:
            for side, read in (
                ("keys", recording.stored_keys),
                ("values", recording.stored_values),
            ):
                passes = recording.passes(layer)
                spans = {(item.segment, getattr(item, side)) for item in passes}
                stored = sum(span.stored for _, span in spans)
                whole = sum(span.nbytes for _, span in spans)
                packings = Counter(span.packing for _, span in spans)
                ways = ", ".join(f"{name} {count}" for name, count in packings.items())
                rates = _rates(passes, read)
                print(f"{layer}  {side}  {ways}  {stored / whole:.3f}  {rates}")
                for segment, span in spans:
                    if (segment, span.offset) not in met:
                        met.add((segment, span.offset))
                        plain += padded(span.nbytes)
    total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    in_bin = sum(file.stat().st_size for file in path.rglob("*.bin"))
    unpacked = total - in_bin + plain
    print(f"{total:,} bytes on disk, {unpacked:,} unpacked: {total / unpacked:.3f}")


def _rates(passes: Sequence[PassRecord], read: Callable[[PassRecord], np.ndarray]) -> str:
    """How fast some records of a column are packed, and unpacked: MB of numbers a second."""
    packing = unpacking = 0.0
    size = 0
    for item in passes[:: max(1, len(passes) // _TIMED)][:_TIMED]:
        numbers = read(item)
        way = measured(numbers)
        data = packed(numbers, way)
        if data is None:
            continue
        out = np.empty_like(numbers)
        packing += _seconds(packed, numbers, way)
        unpacking += _seconds(unpack, data, way.packing, out)
        size += numbers.nbytes
    if not size:
        return "-  -"
    return f"{size / packing / 1e6:,.0f}  {size / unpacking / 1e6:,.0f}"


def _seconds(work: Callable[..., object], *arguments: object, times: int = 10) -> float:
    work(*arguments)
    start = time.process_time()
    for _ in range(times):
        work(*arguments)
    return (time.process_time() - start) / times


def main() -> None:
    """Parse the command line, record, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with MNIST's .gz files; none: left out")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--examples", type=int, default=60_000, help="so many of MNIST's")
    parser.add_argument("--steps", type=int, default=100, help="of the transformer; 0: left out")
    parser.add_argument("--out", type=Path, help="where to record (default: a temporary folder)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="dualform-benchmark-", dir=arguments.out))
    try:
        if arguments.data is not None:
            record_mnist(arguments.data, folder / "mnist", arguments.epochs, arguments.examples)
            tell(folder / "mnist")
            shutil.rmtree(folder / "mnist")
        if arguments.steps:
            record_transformer(folder / "transformer", arguments.steps)
            tell(folder / "transformer")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
