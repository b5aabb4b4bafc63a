"""Run one benchmark by name.

    python -m benchmarks recorder    what the recorder adds to a training loop
    python -m benchmarks stacks      the same in the stacks that people train in; bytes; coverage
    python -m benchmarks fine-tune   bytes a token of a fine-tune, by what of it is recorded
    python -m benchmarks packing     what packing leaves of recordings, and how fast it is
    python -m benchmarks packed-index  a packed index beside the plain one: bytes, and questions
    python -m benchmarks inputs      resnet18 recorded by inputs and by patches: time and bytes
    python -m benchmarks adamw       AdamW: building, masked outputs, contributions; exactness
    python -m benchmarks build       index build beside cp and sync of the same recording
    python -m benchmarks topk        exact top-k beside FAISS, torch, usearch, LanceDB, milvus-lite
    python -m benchmarks filtered    top-k of what a filter selects, beside FAISS's selector
    python -m benchmarks explain     several answers from one scan beside each by itself
    python -m benchmarks load        a server that several clients ask at once
    python -m benchmarks busy        what a busy server stops, and how soon it says that it lives
    python -m benchmarks stops       how long an answer goes on between looks at who waits for it
    python -m benchmarks beside      what a cheap question waits for beside expensive ones
    python -m benchmarks memory      what the server holds at its peak, question by question
    python -m benchmarks refused     what the server keeps of requests that it refused
    python -m benchmarks answers     sums, outputs, gRPC on top, and how top-k grows with the memory
    python -m benchmarks gpu         a GPU beside its memory, FAISS alone and the CPU
    python -m benchmarks attribution  examples behind a prediction beside one read, beside products
    python -m benchmarks machines    shards with 1, 2 and 4 actors: bytes, seconds, a cost model
    python -m benchmarks ratios      what the above wrote beside the key ratios in ratios.json

Each says with --help what it takes. OpenMP's wait policy is set here, before torch is imported.
"""

from __future__ import annotations

import importlib
import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

NAMES = (
    "recorder",
    "stacks",
    "fine-tune",
    "packing",
    "packed-index",
    "inputs",
    "adamw",
    "build",
    "topk",
    "filtered",
    "answers",
    "attribution",
    "explain",
    "load",
    "busy",
    "stops",
    "beside",
    "memory",
    "refused",
    "gpu",
    "machines",
    "ratios",
)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(__doc__, file=sys.stderr)
        raise SystemExit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    name = sys.argv.pop(1)
    importlib.import_module(f"benchmarks.{name.replace('-', '_')}").main()


if __name__ == "__main__":
    main()
