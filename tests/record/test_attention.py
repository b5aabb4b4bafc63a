"""`nn.MultiheadAttention` against attention written with `nn.Linear`, whose passes are seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import Client, capture_queries, dual_form
from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import Recorder
from dualform.store.recording import Recording

from .reading import keys, relative, values

D, HEADS, BATCH, TIME = 8, 2, 3, 5


class Explicit(nn.Module):
    """Attention of a sequence to itself with the weights of an `nn.MultiheadAttention`."""

    def __init__(self, of: nn.MultiheadAttention) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.qkv.weight, self.qkv.bias = of.in_proj_weight, of.in_proj_bias
        self.out.weight, self.out.bias = of.out_proj.weight, of.out_proj.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        weights = (q @ k.transpose(-1, -2) / (D // HEADS) ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_rows_are_those_of_linear_layers(
    tmp_path: Path, batch_first: bool, need_weights: bool
) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(D, HEADS, batch_first=batch_first)
    plain = Explicit(attention)
    x, target = torch.randn(2, BATCH, TIME, D)
    seen: dict[str, torch.Tensor] = {}
    for name, layer in (("", plain.qkv), ("out_proj", plain.out)):

        def hook(_: object, args: tuple[torch.Tensor], y: torch.Tensor, name: str = name) -> None:
            seen[name] = args[0].detach()
            y.register_hook(lambda gradient: seen.update({f"{name} value": -gradient}))

        layer.register_forward_hook(hook)
    expected = plain(x)
    (expected - target).square().sum().backward()
    attention.zero_grad()

    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    with Recorder(attention, optimizer, tmp_path / "recording") as recorder:
        recorder.annotate(label=torch.arange(BATCH), place=torch.arange(BATCH * TIME).view(3, 5))
        given = x if batch_first else x.transpose(0, 1)
        output = attention(given, given, given, need_weights=need_weights)[0]
        output = output if batch_first else output.transpose(0, 1)
        torch.testing.assert_close(output, expected)
        (output - target).square().sum().backward()
        optimizer.step()
    with Recording.open(tmp_path / "recording") as recording:
        assert not any(recording.marks.values())
        for name in ("", "out_proj"):
            (record,) = recording.passes(name)
            np.testing.assert_allclose(
                keys(recording, name, record), seen[name].flatten(0, 1), rtol=1e-5, atol=1e-6
            )
            np.testing.assert_allclose(
                values(recording, name, record),
                seen[f"{name} value"].flatten(0, 1),
                rtol=1e-5,
                atol=1e-5,
            )
            rows = recording.read_rows([record.block])
            assert rows["slot"].to_pylist() == [i for i in range(BATCH) for _ in range(TIME)]
            assert rows["label"].to_pylist() == rows["slot"].to_pylist()
            assert rows["place"].to_pylist() == list(range(BATCH * TIME))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("family", [torch.optim.SGD, torch.optim.AdamW])
def test_an_encoder_with_its_fast_paths(
    tmp_path: Path, family: type[torch.optim.Optimizer]
) -> None:
    """In eval mode torch runs whole layers in one kernel, on nested tensors where some are short:
    not while queries are captured, nor in dual form."""

    def made() -> nn.TransformerEncoder:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(D, HEADS, 12, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    model = made()
    optimizer = family(model.parameters(), lr=0.01)
    padding = torch.arange(TIME) >= torch.tensor([[TIME], [3], [4]])
    stream = torch.Generator().manual_seed(1)
    with Recorder(model, optimizer, tmp_path / "recording"):
        for step in range(20):
            model.train(step % 2 == 0)  # with gradients no fast path is taken
            x = torch.randn(BATCH, TIME, D, generator=stream)
            optimizer.zero_grad()
            model(x, src_key_padding_mask=padding)[~padding].square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model.eval()(x, src_key_padding_mask=padding)
    names = [f"layers.{i}.{n}" for i in (0, 1) for n in ("self_attn", "self_attn.out_proj")]
    names += [f"layers.{i}.linear{n}" for i in (0, 1) for n in (1, 2)]
    with Recording.open(tmp_path / "recording") as recording:
        assert set(recording.manifest.layers) == set(names)
        assert not any(recording.marks.values()), recording.marks
        assert {recording.rows(name) for name in names} == {20 * BATCH * TIME}
    build_index(tmp_path / "recording", tmp_path / "index")
    assert verify_index(tmp_path / "index").ok
    x = torch.randn(BATCH, TIME, D)
    model.train()
    primal = model(x, src_key_padding_mask=padding)[~padding]
    model.eval()
    queries = capture_queries(model, x, kwargs={"src_key_padding_mask": padding})
    assert {name: len(rows) for name, rows in queries.items()} == dict.fromkeys(names, 15)
    assert torch.backends.mha.get_fastpath_enabled()
    fresh = made()
    fresh.load_state_dict(model.state_dict())  # the norms'
    for layers in (None, ["*.out_proj"], ["*.self_attn"]):
        with Client.local(tmp_path / "index") as client, dual_form(fresh, client, layers=layers):
            dual = fresh(x, src_key_padding_mask=padding)[~padding]
        assert relative(dual.detach().numpy(), primal.detach().numpy()) <= 1e-5
    assert torch.backends.mha.get_fastpath_enabled()
