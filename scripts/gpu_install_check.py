"""Is `pip install '.[gpu]'` sound here? FAISS beside torch, and the engine answering on the CPU.

Run by `make gpu-install-check` in an environment of its own; needs no GPU and tests none. Prints
what it found, one line each, and ends with status 1 where something is wrong.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dualform.serve import policy

policy.apply()  # before torch and FAISS are imported: it sets their threads

import faiss  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from dualform.engine import Index  # noqa: E402
from dualform.index import build_index  # noqa: E402
from dualform.record import Recorder  # noqa: E402

ROWS, WIDTH, STEPS, K = 64, 16, 10, 5


def main() -> None:
    """Check the packages, FAISS's GPU part and one answer."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    print(f"faiss-gpu {version('faiss-gpu')} beside torch {torch.__version__}")
    with contextlib.suppress(PackageNotFoundError):
        sys.exit(f"faiss-cpu {version('faiss-cpu')} is installed too: both own the module faiss")
    if not hasattr(faiss, "GpuIndexFlatIP"):
        sys.exit(f"the FAISS in {faiss.__file__} was built without GPUs")
    resources = faiss.StandardGpuResources()
    gpus = faiss.get_num_gpus()
    print(f"faiss.get_num_gpus() is {gpus}; torch sees {torch.cuda.device_count()}")
    if gpus == 0:
        try:
            faiss.GpuIndexFlatIP(resources, WIDTH)
        except RuntimeError:
            print("without a GPU GpuIndexFlatIP is refused, with a RuntimeError")
        else:
            sys.exit("no GPU, and yet GpuIndexFlatIP could be made")
    with tempfile.TemporaryDirectory() as folder:
        answers_as_float64(Path(folder))
    print(f"the engine answered with {gpus} GPUs: the {K} best rows are float64's")


def answers_as_float64(folder: Path) -> None:
    """Record and index a small training, and compare its top-k by FAISS with NumPy's in float64."""
    generator = torch.Generator().manual_seed(0)
    batches = torch.randn(STEPS, ROWS, WIDTH, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, folder / "run"):
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    build_index(folder / "run", folder / "index")
    query = torch.randn(1, WIDTH, generator=generator).numpy()
    with Index.open(folder / "index", device="auto") as index:  # the CPU, where there is no GPU
        hits = index.top_k("0", query, K)
    scores = batches.reshape(-1, WIDTH).double().numpy() @ query[0].astype(np.float64)
    best = np.argsort(-scores)[:K]
    if hits.rows[0].tolist() != best.tolist():
        sys.exit(f"the engine's rows {hits.rows[0].tolist()} are not float64's {best.tolist()}")
    np.testing.assert_array_equal(hits.scores[0], scores[best].astype(np.float32))


if __name__ == "__main__":
    main()
