"""What is killed: a recorder, a builder, a server. Each is a function in a process of its own."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

import torch

from dualform.engine.messages.catalog import Catalog
from dualform.index import build_index
from dualform.record import DiskSink, Recorder
from dualform.serve import ServerConfig, command
from dualform.serve.server import Server

from .training import Trainer, batch

assert Server  # loaded before the fork, with what it imports
MOMENTUM, LR = 0.5, 0.01
PAYLOADS = 3
"""Steps between payloads."""


def trained(seed: int, steps: int, *, copies: bool = False) -> Trainer:
    """The run of this seed, which always goes the same way, up to so many steps."""
    trainer = Trainer(seed, LR, MOMENTUM, copies=copies)
    for step in range(steps):
        trainer.step(batch(seed * 10_000 + step))
    return trainer


def record(path: str, seed: int, start: int | None, steps: int) -> None:
    """Train on and on, recording in segments of a few steps; PATH.started appears early."""
    torch.set_num_threads(1)
    trainer = trained(seed, start or 0)
    sink = DiskSink(path, segment_bytes=24 << 10, commit_seconds=0.01)
    with Recorder(trainer.model, trainer.optimizer, sink, resume_at_step=start) as recorder:
        Path(f"{path}.started").touch()
        for step in range(start or 0, steps):
            if step % PAYLOADS == 0:
                recorder.add_examples([step], [f"payload {step}"])
            trainer.step(batch(seed * 10_000 + step), recorder.annotate)


def build(recording: str, index: str) -> None:
    """Publish."""
    torch.set_num_threads(1)
    build_index(recording, index, shard_rows=64, parts=("label",))


def serve(index: str, address: str) -> None:
    """Serve until killed; SIGHUP looks for new versions. Where it listens goes to a file."""
    config = ServerConfig({"i": Path(index)}, listen="127.0.0.1:0")
    sys.stdout = _Address(Path(address))
    asyncio.run(command._serve(config, Catalog(config.indexes), None))


class _Address(io.StringIO):
    """Standard output of a server, in a file that appears whole."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def flush(self) -> None:
        if text := self.getvalue().removeprefix("listening on ").strip():
            part = self._path.with_suffix(".part")
            part.write_text(text)
            part.rename(self._path)
