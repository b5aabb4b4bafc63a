"""Layers that see one input: their keys lie in the recording once, and are read as ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import Recorder
from dualform.store.recording import Recording
from dualform.store.recording_bin import BinFile, Record, Written
from dualform.store.recording_packer import Column
from dualform.store.segment_table import Span, padded

from .reading import keys, values

ROWS, WIDTH, INNER, STEPS = 64, 48, 32, 6


class Block(nn.Module):
    """Three projections of one input, then two of another, as in a layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate, self.up = (nn.Linear(WIDTH, INNER) for _ in range(2))
        self.down = nn.Linear(INNER, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.q(x)) * self.k(x) + self.v(x)
        found: torch.Tensor = self.down(torch.sigmoid(self.gate(x)) * self.up(x))
        return found


def test_one_input_is_written_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen: dict[str, list[torch.Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda _, args, output, name=name: seen.setdefault(name, []).append(args[0].clone())
        )
        for name, module in model.named_children()
    ]
    with Recorder(model, optimizer, tmp_path / "recording"):
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(ROWS, WIDTH)).square().sum().backward()
            optimizer.step()
    for handle in handles:
        handle.remove()
    with Recording.open(tmp_path / "recording") as recording:
        for name in ("q", "k", "v", "gate", "up", "down"):
            for record in recording.passes(name):
                found = keys(recording, name, record)
                np.testing.assert_array_equal(found, seen[name][record.step].detach().numpy())
        for together in (("q", "k", "v"), ("gate", "up")):
            spans = [[r.keys for r in recording.passes(name)] for name in together]
            assert all(of_layer == spans[0] for of_layer in spans)
        assert recording.passes("q")[0].keys != recording.passes("gate")[0].keys
        of_keys = 2 * padded(ROWS * WIDTH * 4) + padded(ROWS * INNER * 4)
        of_values = 3 * padded(ROWS * WIDTH * 4) + 2 * padded(ROWS * INNER * 4) + padded(ROWS * 12)
        assert sum(s.bin_bytes for s in recording.segments) == STEPS * (of_keys + of_values)
        assert values(recording, "q", recording.passes("q")[0]).any()
    build_index(tmp_path / "recording", tmp_path / "index")
    assert verify_index(tmp_path / "index").ok


def test_equal_digests_are_no_proof(tmp_path: Path) -> None:
    """Two records that claim one digest, of different bytes, are both written."""
    placed = []

    class Counting(BinFile):
        def place(self, column: Column, record: Record) -> Span:
            placed.append(record)
            return Span(len(placed), record.nbytes, "same")

    file = Counting(tmp_path / "never.bin")
    one, other = (memoryview(bytes([byte]) * 4096) for byte in (1, 2))
    written: Written = {}
    records = [Record(memory, 4096, "same") for memory in (one, other, one)]
    spans = [file.place_once(("q", False), record, written) for record in records]
    assert [span.offset for span in spans] == [1, 2, 3]
    assert file.place_once(("q", False), Record(one, 4096, "same"), written).offset == 3
