"""Swin: windows, merged patches and a pooled head, annotated by example."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from record import reading

from dualform.record import Recorder
from dualform.store.recording import Recording

transformers = pytest.importorskip("transformers")


@pytest.mark.filterwarnings("ignore")  # of the framework's own
@pytest.mark.parametrize("batch", [3, 4])
def test_every_row_is_its_example_s(tmp_path: Path, batch: int) -> None:
    """The loss is of one example at a step: rows whose value is not zero are that example's. A
    window has 4 places: of 4 examples it can't be told from a sequence, and there is null."""
    torch.manual_seed(0)
    model = transformers.SwinForImageClassification(
        transformers.SwinConfig(
            image_size=16,
            patch_size=2,
            num_channels=1,
            embed_dim=8,
            depths=[2, 1],
            num_heads=[1, 2],
            window_size=2,
            drop_path_rate=0.0,
            num_labels=3,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pixels, labels = torch.randn(batch, 1, 16, 16), torch.arange(batch) % 3
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        for one in range(batch):
            recorder.annotate(example=torch.arange(batch), label=labels)
            optimizer.zero_grad()
            logits = model(pixel_values=pixels).logits
            torch.nn.functional.cross_entropy(logits[one], labels[one]).backward()
            optimizer.step()
    recording = Recording.open(tmp_path / "r")
    shapes = set()
    for layer in recording.manifest.layers:
        for record in recording.passes(layer):
            rows = recording.read_rows([record.block])
            slots = max(rows["slot"].to_pylist()) + 1
            shapes.add((slots, record.rows // slots))
            moved = reading.values(recording, layer, record).any(1)
            assert moved.any()
            found = set(rows.filter(moved)["example"].to_pylist())
            windows_of_4 = batch == 4 and record.rows // slots == 4
            assert found == ({None} if windows_of_4 else {record.step})
            label = None if windows_of_4 else int(labels[record.step])
            assert set(rows.filter(moved)["label"].to_pylist()) == {label}
    assert {(batch, 64), (batch * 16, 4), (batch, 16), (batch, 1)} <= shapes
