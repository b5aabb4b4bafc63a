"""Mixtral as transformers builds it: experts in one tensor, by each way in which it multiplies."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from record import reading

from dualform.client import Client, capture_queries, dual_form
from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import LayerSelectionError, Recorder
from dualform.store.recording import Recording

transformers = pytest.importorskip("transformers")
moe = pytest.importorskip("transformers.integrations.moe")

EXPERTS, ROUTER = "model.layers.0.mlp.experts", "model.layers.0.mlp.gate"
WAYS = ("eager", "grouped_mm", "grouped_mm in parts")


def mixtral(way: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=30,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )
    model.set_experts_implementation(way.split()[0])
    return model


@pytest.mark.filterwarnings("ignore")  # of the framework's own
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_the_trained_model_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, optimizer: str
) -> None:
    if way.endswith("in parts"):  # as where torch has no such product
        monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    model = mixtral(way)
    fresh = copy.deepcopy(model)
    settings = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 0.01}}[optimizer]
    optim = getattr(torch.optim, optimizer)(model.parameters(), **settings)
    experts = model.get_submodule(EXPERTS)
    seen = []
    handle = experts.register_forward_hook(lambda m, args, output: seen.append(args))
    stream = torch.Generator().manual_seed(1)
    with Recorder(model, optim, tmp_path / "recording") as recorder:
        for step in range(20):
            ids = torch.randint(0, 30, (2, 4), generator=stream)
            recorder.annotate(example=torch.arange(2) + 2 * step, token=ids)
            optim.zero_grad()
            model(ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
    handle.remove()

    with Recording.open(tmp_path / "recording") as recording:
        assert not any(recording.marks.values()), recording.marks
        for record in recording.passes(f"{EXPERTS}.gate_up_proj.1"):
            hidden, index, _ = seen[record.step]
            tokens = torch.where((index == 1).any(1))[0]
            found = reading.keys(recording, f"{EXPERTS}.gate_up_proj.1", record)
            np.testing.assert_array_equal(found, hidden[tokens].detach().numpy())
            rows = recording.read_rows([record.block])
            assert rows["example"].to_pylist() == (tokens // 4 + 2 * record.step).tolist()
    build_index(tmp_path / "recording", tmp_path / "index")
    assert verify_index(tmp_path / "index").ok

    ids = torch.randint(0, 30, (3, 4), generator=stream)
    with Client.local(tmp_path / "index") as client:
        queries = capture_queries(model, ids)
        assert sum(len(queries[f"{EXPERTS}.down_proj.{e}"]) for e in range(4)) == 2 * ids.numel()
        expected = model(ids).logits.detach()
        layers = [name for name in client.index().layers if "embed" not in name]
        fresh.load_state_dict(model.state_dict())  # norms are no layers
        assert ROUTER in layers
        fresh.get_submodule(ROUTER).weight.data.zero_()
        with dual_form(fresh, client, layers=layers):
            found = fresh(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_way_in_which_no_rows_are_seen_is_named(tmp_path: Path) -> None:
    model = mixtral("batched_mm")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(LayerSelectionError, match=r"run by 'batched_mm', .*set_experts_impl"):
        Recorder(model, optimizer, tmp_path / "r", layers=[EXPERTS])
