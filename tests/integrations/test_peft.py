"""LoRA adapters as PEFT puts them into a tiny Llama: two layers each, beside one that is frozen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualform.client import Client, capture_queries, dual_form
from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import Recorder
from dualform.store.recording import Recording

from .training import VOCABULARY, llama

peft = pytest.importorskip("peft")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}
TARGETS = ["q_proj", "v_proj", "down_proj"]


def adapted(**settings: Any) -> Any:
    model = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS, **settings)
    )


@pytest.mark.filterwarnings("ignore")  # of the framework's own
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_adapters_are_layers(tmp_path: Path, kind: str, settings: dict[str, bool]) -> None:
    model = adapted(**settings)
    optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])
    stream = torch.Generator().manual_seed(2)
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        for _ in range(20):
            tokens = torch.randint(0, VOCABULARY, (3, 7), generator=stream)
            recorder.annotate(label=tokens, example=torch.arange(3))
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
    with Recording.open(tmp_path / "recording") as recording:
        layers = list(recording.manifest.layers)
        assert sorted(name.split(".")[-3] for name in layers) == sorted(TARGETS * 2)
        assert {tuple(name.split(".")[-2:]) for name in layers} == {
            ("lora_A", "default"),
            ("lora_B", "default"),
        }
        assert not any(recording.marks.values()), recording.marks
        for name in layers:
            assert [record.rows for record in recording.passes(name)] == [21] * 20
    build_index(tmp_path / "recording", tmp_path / "index")
    report = verify_index(tmp_path / "index")
    assert report.ok, report

    tokens = torch.randint(0, VOCABULARY, (2, 6), generator=stream)
    model.eval()
    with torch.no_grad():
        primal = model(input_ids=tokens).logits
    modules = dict(model.named_modules())
    queries = capture_queries(model, tokens, layers=layers)
    with Client.local(tmp_path / "index") as client:
        for name in layers:
            x = queries[name]
            answer = client.dual_output(name, x).values
            expected = x @ modules[name].weight.detach().numpy().T
            assert np.linalg.norm(answer - expected) <= 1e-5 * np.linalg.norm(expected), name
            top = client.top_k(name, x[:2], k=5)
            assert set(top.columns) >= {"label", "example", "slot", "position"}
        fresh = adapted(**settings).eval()
        if settings:  # whose magnitudes are no layer's
            fresh.load_state_dict(model.state_dict())
        with dual_form(fresh, client):
            dual = fresh(input_ids=tokens).logits
    assert float((dual - primal).norm() / primal.norm()) <= 1e-5
