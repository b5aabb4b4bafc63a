"""Stage "compare": dual outputs at a step against the layers of a checkpoint, on all test images.

Run as a process of its own:
python -m runner.compare STUDY DATA SCRATCH INDEX RECORDED_MODEL FOLDER STEP...
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from dualform.client import Client, capture_queries, dual_form
from dualform.engine import Index
from runner import config, images


def main(
    study_file: str,
    data: str,
    scratch: str,
    index_path: str,
    recorded_model: str,
    folder: str,
    *steps: str,
) -> None:
    """Leave compare.json in `folder`, which holds the checkpoints of the plain run."""
    study = config.load(Path(study_file))
    test = images.held_out(Path(data), Path(scratch))
    model = images.network(study.hidden).eval()

    errors: list[dict[str, Any]] = []
    with Index.open(index_path, device="cpu") as index:
        for step in map(int, steps):
            model.load_state_dict(load_file(_checkpoint(folder, step)))
            queries = capture_queries(model, test.inputs)
            for name, layer in model.named_modules():
                if isinstance(layer, nn.Linear):
                    start = time.perf_counter()
                    out = index.dual_output(name, queries[name], at_step=step)
                    with torch.no_grad():
                        expected = layer(torch.from_numpy(queries[name])).double().numpy()
                    dual = out.values.astype(np.float64)
                    length = np.linalg.norm(expected, axis=1)
                    error = np.linalg.norm(dual - expected, axis=1) / length
                    errors.append(
                        {
                            "step": step,
                            "layer": name,
                            "rows": out.coverage.rows,
                            "error": float(error.max()),
                            "median": float(np.median(error)),
                            "seconds": time.perf_counter() - start,
                        }
                    )
                    print(errors[-1], flush=True)

    plain = load_file(_checkpoint(folder, study.steps))
    recorded = load_file(recorded_model)
    model.load_state_dict(plain)
    with torch.no_grad():
        primal = model(test.inputs)
        with Client.local(index_path, device="cpu") as client, dual_form(model, client):
            dual_logits = model(test.inputs)
    facts = {
        "images": len(test.labels),
        "errors": errors,
        "same_bits": sorted(plain) == sorted(recorded)
        and all(torch.equal(plain[name], recorded[name]) for name in plain),
        "accuracy": _share(primal.argmax(1) == test.labels),
        "accuracy_dual": _share(dual_logits.argmax(1) == test.labels),
        "predictions_equal": int((primal.argmax(1) == dual_logits.argmax(1)).sum()),
        "largest_logit_difference": (primal - dual_logits).abs().max().item(),
        "smallest_margin": _margin(primal),
    }
    (Path(folder) / "compare.json").write_text(json.dumps(facts, indent=1))


def _checkpoint(folder: str, step: int) -> str:
    return str(Path(folder) / f"checkpoint-{step}.safetensors")


def _share(right: torch.Tensor) -> float:
    return right.double().mean().item()


def _margin(logits: torch.Tensor) -> float:
    """The smallest distance between the largest and the second largest logit of an image."""
    best = logits.topk(2, dim=1).values
    return (best[:, 0] - best[:, 1]).min().item()


if __name__ == "__main__":
    main(*sys.argv[1:])
