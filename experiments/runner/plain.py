"""Stage "plain": the study's training as anyone would write it, saving checkpoints.

It knows nothing of dualform: what the dual output is compared with comes from here.
Run as a process of its own: python -m runner.plain STUDY VARIANT DATA SCRATCH FOLDER STEP...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from runner import config, images
from runner.descent import Descent


def main(
    study_file: str, variant_name: str, data: str, scratch: str, folder: str, *steps: str
) -> None:
    """Train without a recorder; leave checkpoint-<s>.safetensors after s steps in `folder`."""
    study = config.load(Path(study_file))
    variant, seed = study.variants[variant_name], study.seeds[0]
    sets = {task: images.load(Path(data), Path(scratch), task)[0] for task in study.tasks}
    for done, model in training(study, variant, seed, sets):
        if str(done) in steps:
            save_file(model.state_dict(), str(Path(folder) / f"checkpoint-{done}.safetensors"))
    if "dualform" in sys.modules:
        raise SystemExit("dualform was imported: this run is no independent one")


def training(
    study: config.Study, variant: config.Variant, seed: int, sets: Mapping[str, images.Images]
) -> Iterator[tuple[int, nn.Module]]:
    """Train on the images of each task; yields how many steps are done, from 0 on, and the model,
    which goes on changing."""
    torch.manual_seed(seed)
    model = images.network(study.hidden)
    descent = Descent(variant, model, study.steps)
    done = 0
    yield done, model
    for seen, plan in images.phases(study, sets, seed):
        for batch in plan:
            loss = nn.functional.cross_entropy(model(seen.inputs[batch]), seen.labels[batch])
            descent.optimizer.zero_grad()
            loss.backward()
            descent.step()
            done += 1
            yield done, model


if __name__ == "__main__":
    main(*sys.argv[1:])
