"""Stage "train and record": the study's training loop, with the recorder watching.

Run as a process of its own: python -m runner.record STUDY VARIANT SEED DATA SCRATCH FOLDER
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
from runner import config, images
from runner.descent import Descent


def main(
    study_file: str, variant_name: str, seed: str, data: str, scratch: str, folder: str
) -> None:
    """Train, record, and leave model.safetensors, recording/ and record.json in `folder`."""
    study = config.load(Path(study_file))
    variant = study.variants[variant_name]
    sets = {task: images.load(Path(data), Path(scratch), task) for task in study.tasks}
    torch.manual_seed(int(seed))
    model = images.network(study.hidden)
    descent = Descent(variant, model, study.steps)

    recorder = Recorder(model, descent.optimizer, str(Path(folder) / "recording"))
    accuracy: list[dict[str, float]] = []  # after each phase, by task
    loop_seconds = 0.0
    training_sets = {task: training for task, (training, _) in sets.items()}
    shown: set[int] = set()
    for seen, plan in images.phases(study, training_sets, int(seed)):
        new = [place for place in plan.unique().tolist() if int(seen.ids[place]) not in shown]
        recorder.add_examples(
            seen.ids[new].numpy(), [images.png(seen.pixels[place]) for place in new]
        )
        shown.update(seen.ids[new].tolist())
        start = time.perf_counter()
        for batch in plan:
            recorder.annotate(
                label=seen.labels[batch], example=seen.ids[batch], task=seen.tasks[batch]
            )
            loss = nn.functional.cross_entropy(model(seen.inputs[batch]), seen.labels[batch])
            descent.optimizer.zero_grad()
            loss.backward()
            descent.step()
        loop_seconds += time.perf_counter() - start
        accuracy.append({task: images.accuracy(model, test) for task, (_, test) in sets.items()})
    trained = time.perf_counter()
    recorder.close()
    close_seconds = time.perf_counter() - trained

    save_file(model.state_dict(), str(Path(folder) / "model.safetensors"))
    facts = {
        "loop_seconds": loop_seconds,
        "close_seconds": close_seconds,
        "test_accuracy": accuracy[-1],
        "test_accuracy_by_phase": accuracy,
        "final_loss": loss.item(),
    }
    (Path(folder) / "record.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
