"""Recording a loop that runs on a GPU. Skipped where there is none."""

from __future__ import annotations

import inspect
from pathlib import Path

import digits
import pytest
import torch
from torch import nn

from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import Recorder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_a_recording_from_the_gpu_rebuilds_the_weights(tmp_path: Path) -> None:
    data, model = digits.load(), digits.network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        for step in range(50):
            ids = torch.arange(step * 32, (step + 1) * 32) % len(data.labels)
            recorder.annotate(label=data.labels[ids].cuda(), example=ids)
            output = model(data.images[ids].cuda())
            loss = nn.functional.cross_entropy(output, data.labels[ids].cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    report = verify_index(tmp_path / "index")
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
    data, model = digits.load(), digits.network().cuda()
    optimizer = kind(model.parameters(), lr=1e-3, **{option: True})
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        for step in range(50):
            ids = torch.arange(step * 32, (step + 1) * 32) % len(data.labels)
            recorder.annotate(label=data.labels[ids].cuda(), example=ids)
            output = model(data.images[ids].cuda())
            loss = nn.functional.cross_entropy(output, data.labels[ids].cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    report = verify_index(tmp_path / "index")
    assert report.ok
    assert all(layer.exact_steps == 50 for layer in report.layers)
