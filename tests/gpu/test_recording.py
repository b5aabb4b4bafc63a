"""Recording a loop that runs on a GPU. Skipped where there is none."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import digits
import pytest
import torch
from torch import nn

from dualform.engine import VerifyReport, verify_index
from dualform.index import build_index
from dualform.record import Recorder, copies
from dualform.store.recording import Recording

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def verified(path: Path, kind: type[torch.optim.Optimizer], **settings: Any) -> VerifyReport:
    """What verify says of 50 steps on the GPU."""
    data, model = digits.load(), digits.network().cuda()
    optimizer = kind(model.parameters(), **settings)
    with Recorder(model, optimizer, path / "recording") as recorder:
        for step in range(50):
            ids = torch.arange(step * 32, (step + 1) * 32) % len(data.labels)
            recorder.annotate(label=data.labels[ids].cuda(), example=ids)
            output = model(data.images[ids].cuda())
            loss = nn.functional.cross_entropy(output, data.labels[ids].cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    build_index(path / "recording", path / "index")
    return verify_index(path / "index")


def test_a_recording_from_the_gpu_rebuilds_the_weights(tmp_path: Path) -> None:
    report = verified(tmp_path, torch.optim.SGD, lr=0.05, momentum=0.9)
    assert report.ok
    assert all(layer.exact_steps == 50 for layer in report.layers)
    assert max(layer.weight_error or 0 for layer in report.layers) < 1e-5


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax])
@pytest.mark.parametrize("option", ["foreach", "capturable", "fused"])
def test_kernels_of_the_gpu_are_followed(
    tmp_path: Path, kind: type[torch.optim.AdamW], option: str
) -> None:
    if option not in inspect.signature(kind).parameters:
        pytest.skip(f"{kind.__name__} has no {option}")
    report = verified(tmp_path, kind, lr=1e-3, **{option: True})
    assert report.ok
    assert all(layer.exact_steps == 50 for layer in report.layers)


def train(path: Path, steps: int, quiet: bool) -> None:
    """Train on batches that lie on the GPU; `quiet`, with every operation an error that waits for
    it, but in the first step, which keeps the initial weights."""
    torch.manual_seed(0)
    data, model = digits.load(), digits.network().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    images, labels = data.images.cuda(), data.labels.cuda()
    with Recorder(model, optimizer, path) as recorder:
        for step in range(steps):
            ids = slice(step * 32, (step + 1) * 32)
            recorder.annotate(example=list(range(ids.start, ids.stop)))
            torch.cuda.set_sync_debug_mode("error" if quiet and step else "default")
            try:
                loss = nn.functional.cross_entropy(model(images[ids]), labels[ids])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_the_loop_is_not_waited_for(tmp_path: Path) -> None:
    """Beside the one wait for the copies' own stream, which is no operation of the loop's. Fewer
    than 16 steps, the last of which weights are compared at."""
    train(tmp_path / "recording", 15, quiet=True)
    with Recording.open(tmp_path / "recording") as recording:
        assert recording.steps == 15
        assert not any(recording.marks.values())


def test_what_is_sent_is_what_plain_copies_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "sent", 8, quiet=False)
    monkeypatch.setattr(copies, "stream_of", lambda device: None)
    train(tmp_path / "plain", 8, quiet=False)
    rows = []
    for name in ("sent", "plain"):
        with Recording.open(tmp_path / name) as recording:
            kept = [
                (layer, r) for layer in recording.manifest.layers for r in recording.passes(layer)
            ]
            rows.append(
                [
                    (recording.stored_keys(r).tobytes(), recording.stored_values(r).tobytes())
                    for _, r in kept
                ]
            )
    assert rows[0] == rows[1]
