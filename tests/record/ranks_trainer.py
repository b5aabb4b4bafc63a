"""One rank of real data-parallel trainings: `ranks_trainer.py RANK WORLD FOLDER`.

Every scenario trains twice from the same weights, recorded and not, and leaves the trained weights
of both, and the inputs that this rank saw, in FOLDER/<scenario>.rank-<r>.pt.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dualform.record import Recorder, RecordError
from dualform.store.ranks import Rank
from dualform.store.recording_format import RecordingManifest

STEPS = 12
WIDTH = 6
IDS = 40_000
"""So many that a gradient of the table is zero wherever it is sampled, most of the time."""


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))


class Branches(nn.Module):
    """The second rank leaves out a layer at every other step; the third is trained by one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.often = nn.Linear(WIDTH, WIDTH)
        self.seldom = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        rank, odd = dist.get_rank(), self.calls % 2
        self.calls += 1
        if not (rank == 1 and odd):
            x = self.often(x).tanh()
        if rank == 0:
            x = self.seldom(x).tanh()
        return self.last(x)


class Words(nn.Module):
    """Rows of a large table, of which few have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(IDS, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.abs() * 1e4).long() % IDS
        return self.last(self.table(ids).mean(1))


class Twice(nn.Module):
    """Multiplies by a layer's weight without calling the layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.linear(self.first(x).tanh(), self.first.weight).tanh())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)


@dataclass(frozen=True)
class Scenario:
    """A training.

    Attributes:
        micro: Batches whose gradients a step accumulates.
        no_sync: All but the last of them are not averaged.
        clip: The norm that gradients are clipped to.
        clip_value: The largest element of a gradient.
        rows: Of a batch; where they are many, all are all but equal.
        last: Rows of each rank's last batch.
        prepare: Called with the parallel model.
        data: Chooses the batches.
        resume: The step at which the recorded training stops and begins anew.
    """

    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    model: Callable[[], nn.Module] = network
    micro: int = 1
    no_sync: bool = False
    clip: float | None = None
    clip_value: float | None = None
    rows: int = 4
    last: tuple[int, ...] = (4, 4)
    parallel: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[DistributedDataParallel], None] = lambda _: None
    data: int = 0
    resume: int | None = None


SCENARIOS = {
    "SGD": Scenario(),
    "AdamW": Scenario(adamw),
    "other batches": Scenario(data=1),
    "not averaged in between": Scenario(adamw, micro=3, no_sync=True, clip=0.05),
    "averaged each time": Scenario(micro=3, clip=0.05),
    "buckets": Scenario(
        clip=0.05, micro=2, parallel={"gradient_as_bucket_view": True, "static_graph": True}
    ),
    "unequal": Scenario(last=(5, 1)),
    "branches": Scenario(adamw, Branches, clip=0.05, parallel={"find_unused_parameters": True}),
    "words": Scenario(model=Words, clip=0.05),
    "hook": Scenario(prepare=lambda m: m.register_comm_hook(None, fp16_compress_hook)),
    "another use": Scenario(adamw, Twice),
    "clipped by value": Scenario(clip_value=0.002),
    "alike": Scenario(rows=4_000),
    "resumed": Scenario(adamw, resume=7),
}


def batches(scenario: Scenario, rank: int) -> Iterator[list[torch.Tensor]]:
    stream = torch.Generator().manual_seed(100 * scenario.data + rank)
    for step in range(STEPS):
        rows = scenario.last[rank] if step == STEPS - 1 else scenario.rows
        found = [torch.randn(rows, WIDTH, generator=stream) for _ in range(scenario.micro)]
        yield found if scenario.rows < 100 else [0.3 + 1e-6 * x for x in found]


def train(scenario: Scenario, rank: int, path: Path | None) -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(rank)  # DistributedDataParallel gives all the first one's weights
    model = DistributedDataParallel(scenario.model(), **scenario.parallel)
    scenario.prepare(model)
    optimizer = scenario.optimizer(model)
    recorder = None if path is None else Recorder(model, optimizer, path)
    seen: list[torch.Tensor] = []
    for step, batch in enumerate(batches(scenario, rank)):
        if recorder is not None and path is not None and step == scenario.resume:
            recorder.close()
            recorder = Recorder(model, optimizer, path, resume_at_step=step)
        optimizer.zero_grad()
        for number, x in enumerate(batch):
            if recorder is not None:
                recorder.annotate(example=torch.arange(len(x)) + 100 * step, number=number)
            last = number == scenario.micro - 1
            with model.no_sync() if scenario.no_sync and not last else contextlib.nullcontext():
                (model(x).tanh() - x.mean()).square().mean().backward()
            seen.append(x)
        if scenario.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), scenario.clip)
        if scenario.clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), scenario.clip_value)
        optimizer.step()
    if recorder is not None:
        recorder.close()
    return model.module, seen


def refused(make: Callable[[], Any]) -> str:
    try:
        make()
    except RecordError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    for name, scenario in SCENARIOS.items():
        model, seen = train(scenario, rank, folder / name)
        plain, _ = train(scenario, rank, None)
        found = {"state": model.state_dict(), "plain": plain.state_dict(), "seen": seen}
        torch.save(found, folder / f"{name}.rank-{rank}.pt")
    sharded = network()
    fully_shard(sharded)
    model = DistributedDataParallel(network())
    alone = folder / f"alone-{rank}"
    Recorder(model.module, sgd(model.module), alone).close()
    more = folder / "three"
    shutil.copytree(folder / "SGD" / f"rank-{rank}", more / f"rank-{rank}")
    manifest = RecordingManifest.load(more / f"rank-{rank}")
    replace(manifest, ranks=Rank(rank, 3)).save(more / f"rank-{rank}")
    dist.barrier()  # each looks at all folders
    messages = {
        "sharded": refused(lambda: Recorder(sharded, sgd(sharded), folder / "sharded")),
        "again": refused(lambda: Recorder(model, sgd(model), folder / "SGD")),
        "one": refused(lambda: Recorder(model, sgd(model), alone)),
        "fewer": refused(lambda: Recorder(model, sgd(model), more, resume_at_step=0)),
    }
    (folder / f"refused-{rank}.json").write_text(json.dumps(messages))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
