"""One rank of a real data-parallel training: `ranks_loop.py RANK WORLD FOLDER FIRST LAST`.

Trains steps FIRST to LAST of 30 and records them in FOLDER/run, from the checkpoint after FIRST
steps where that is not 0. Up to the end of training it closes the recording; otherwise it says so
in FOLDER/stopped-RANK, and waits to be killed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dualform.record import Recorder

WORLD, STEPS, CHECKPOINT, WIDTH, ROWS = 2, 30, 12, 6, 4


def main(rank: int, world: int, folder: Path, first: int, last: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{first}"
    dist.init_process_group("gloo", store, rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)
    if first:
        saved = torch.load(folder / f"checkpoint-{first}.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    recorder = Recorder(model, optimizer, folder / "run", resume_at_step=first or None)
    for step in range(first, last):
        stream = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(ROWS, WIDTH, generator=stream)
        recorder.annotate(label=torch.arange(ROWS) % 3, example=torch.arange(ROWS) + 10 * step)
        optimizer.zero_grad()
        (model(x).tanh() - x.mean()).square().mean().backward()
        optimizer.step()
        if step % (3 + rank) == 0:  # ranks do not commit the same steps
            recorder._sink.commit()
        if step + 1 == CHECKPOINT and rank == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, folder / f"checkpoint-{CHECKPOINT}.pt")
    if last == STEPS:
        recorder.close()
        dist.destroy_process_group()
        return
    (folder / f"stopped-{rank}").touch()
    time.sleep(600)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
