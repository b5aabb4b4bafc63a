"""The GRU: equal to nn.GRU, recorded as its two products. Their answers: test_kinds.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dualform.record import GRU, LayerSelectionError, Recorder
from dualform.store.recording import Recording

from .reading import keys, values


@pytest.mark.parametrize("bias", [True, False])
def test_equals_nn_gru(bias: bool) -> None:
    torch.manual_seed(0)
    fused = nn.GRU(5, 7, bias=bias, batch_first=True)
    gru = GRU.from_torch(fused)
    x, state = torch.randn(3, 20, 5), torch.randn(1, 3, 7)
    expected, h = fused(x, state)
    output, last = gru(x, state[0])
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(last, h[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(gru(x)[0], fused(x)[0], rtol=0, atol=1e-6)
    output.square().sum().backward()
    expected.square().sum().backward()
    for part, suffix in ((gru.ih, "ih_l0"), (gru.hh, "hh_l0")):
        for name, parameter in part.named_parameters():
            grad = getattr(fused, f"{name}_{suffix}").grad
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-5)
    back = gru.to_torch().state_dict()
    assert list(back) == list(fused.state_dict())
    for name, tensor in fused.state_dict().items():
        assert torch.equal(tensor, back[name]), name


def test_what_cannot_be_taken_over_is_refused() -> None:
    with pytest.raises(ValueError, match="stack several GRU"):
        GRU.from_torch(nn.GRU(5, 7, num_layers=2, batch_first=True))
    with pytest.raises(ValueError, match=r"nn\.GRU takes \[time, batch, input\]"):
        GRU.from_torch(nn.GRU(5, 7))
    with pytest.raises(ValueError, match=r"GRU takes \[batch, time, 5\]"):
        GRU(5, 7)(torch.zeros(3, 5))


def test_keys_and_values_of_both_products(tmp_path: Path) -> None:
    """Against autograd's gradients at both sides of the reset gate, written out in float64."""
    torch.manual_seed(0)
    gru = GRU(3, 4)
    x = torch.randn(2, 5, 3)
    weights = [p.detach().double() for p in (gru.ih.weight, gru.ih.bias)]
    weights += [p.detach().double() for p in (gru.hh.weight, gru.hh.bias)]
    h = torch.zeros(2, 4, dtype=torch.float64)
    inputs, hidden, from_x, from_h = [], [], [], []
    for t in range(5):
        inputs.append(x[:, t].double())
        hidden.append(h.detach())
        from_x.append((inputs[-1] @ weights[0].T + weights[1]).requires_grad_())
        from_h.append(h @ weights[2].T + weights[3])
        (from_h[-1] if from_h[-1].requires_grad else from_h[-1].requires_grad_()).retain_grad()
        gates = torch.sigmoid((from_x[-1] + from_h[-1])[:, :8])
        new = torch.tanh(from_x[-1][:, 8:] + gates[:, :4] * from_h[-1][:, 8:])
        h = (1 - gates[:, 4:]) * new + gates[:, 4:] * h
    h.square().sum().backward()

    optimizer = torch.optim.SGD(gru.parameters(), lr=0.1)
    with Recorder(gru, optimizer, tmp_path / "recording") as recorder:
        recorder.annotate(label=[3, 4])
        gru(x)[1].square().sum().backward()
        optimizer.step()
    with Recording.open(tmp_path / "recording") as recording:
        assert not any(recording.marks.values())
        (whole,) = recording.passes("ih")
        gradient = torch.stack([g.grad for g in from_x if g.grad is not None], 1).flatten(0, 1)
        np.testing.assert_array_equal(keys(recording, "ih", whole), x.flatten(0, 1).numpy())
        np.testing.assert_allclose(values(recording, "ih", whole), -gradient.numpy(), atol=1e-6)
        for t, record in enumerate(recording.passes("hh")):
            grad = from_h[t].grad
            assert grad is not None
            np.testing.assert_allclose(keys(recording, "hh", record), hidden[t], atol=1e-6)
            np.testing.assert_allclose(values(recording, "hh", record), -grad, atol=1e-6)
            assert recording.read_rows([record.block])["label"].to_pylist() == [3, 4]
        assert t == 4


def test_the_fused_one_is_named_with_the_remedy(tmp_path: Path) -> None:
    model = nn.ModuleDict({"rnn": nn.GRU(4, 5), "head": nn.Linear(5, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LayerSelectionError, match=r"dualform\.record\.GRU\.from_torch\(gru\)"):
        Recorder(model, optimizer, tmp_path / "recording", layers=["rnn"])
