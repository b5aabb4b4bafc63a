"""Stage "train and record": the study's training loop, with the recorder watching.

Run as a process of its own: python -m runner.record STUDY VARIANT DATA SCRATCH FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from dualform.record import Recorder
from runner import config, mnist


def main(study_file: str, variant_name: str, data: str, scratch: str, folder: str) -> None:
    """Train, record, and leave model.safetensors, recording/ and record.json in `folder`."""
    study = config.load(Path(study_file))
    variant = study.variants[variant_name]
    training, test = mnist.load(Path(data), Path(scratch))
    torch.manual_seed(study.seed)
    model = mnist.network(study.hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=variant.lr, momentum=variant.momentum)
    plan = mnist.batches(len(training.ids), study.batch_size, study.steps, study.seed)

    recorder = Recorder(model, optimizer, str(Path(folder) / "recording"))
    payloads = [mnist.png(pixels) for pixels in training.pixels]
    recorder.add_examples(training.ids.numpy(), payloads)
    start = time.perf_counter()
    for batch in torch.from_numpy(plan):
        recorder.annotate(label=training.labels[batch], example=training.ids[batch], task="mnist")
        loss = nn.functional.cross_entropy(model(training.inputs[batch]), training.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), variant.clip)
        optimizer.step()
    trained = time.perf_counter()
    recorder.close()
    closed = time.perf_counter()

    with torch.no_grad():
        accuracy = (model(test.inputs).argmax(1) == test.labels).double().mean().item()
    save_file(model.state_dict(), str(Path(folder) / "model.safetensors"))
    facts = {
        "loop_seconds": trained - start,
        "close_seconds": closed - trained,
        "test_accuracy": accuracy,
        "final_loss": loss.item(),
    }
    (Path(folder) / "record.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
