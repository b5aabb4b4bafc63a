"""The LSTM: equal to nn.LSTM, recorded as one layer, exact from its recording to its answers."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import capture_queries
from dualform.engine import Index, verify_index
from dualform.index import build_index
from dualform.optimizers import Trajectory
from dualform.record import LSTM, CaptureError, LayerSelectionError, Recorder
from dualform.store.recording import Recording

from .reading import assert_rebuilds, keys, step_sums, values

STEPS, BATCH, TIME, VOCABULARY = 25, 4, 6, 11


class LanguageModel(nn.Module):
    """Predicts the next token."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.rnn = LSTM(5, 7, bias)
        self.decoder = nn.Linear(7, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output, _ = self.rnn(self.embedding(tokens))
        return self.decoder(output)


def train(
    model: LanguageModel,
    path: Path | None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    clip: float = 0.1,
    time: int = TIME,
) -> LanguageModel:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    recorder = None if path is None else Recorder(model, optimizer, path)
    stream = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, time + 1), generator=stream)
        if recorder is not None:
            recorder.annotate(label=tokens[:, 1:], offset=torch.arange(BATCH) + step * BATCH)
        logits = model(tokens[:, :-1])
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    if recorder is not None:
        recorder.close()
    return model


def fresh(bias: bool = True) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(bias)


@pytest.mark.parametrize("bias", [True, False])
def test_equals_nn_lstm(bias: bool) -> None:
    torch.manual_seed(0)
    fused = nn.LSTM(5, 7, bias=bias, batch_first=True)
    module = LSTM.from_torch(fused)
    x = torch.randn(3, 20, 5)
    state = torch.randn(1, 3, 7), torch.randn(1, 3, 7)
    expected, (h, c) = fused(x, state)
    output, (own_h, own_c) = module(x, (state[0][0], state[1][0]))
    for ours, theirs in ((output, expected), (own_h, h[0]), (own_c, c[0])):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    output.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in ((module.ih, "ih_l0"), (module.hh, "hh_l0")):
        for name, parameter in ours.named_parameters():
            grad = getattr(fused, f"{name}_{theirs}").grad
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-5)
    back = module.to_torch()
    for name, tensor in fused.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name]), name


def test_what_cannot_be_taken_over_is_refused() -> None:
    with pytest.raises(ValueError, match="stack several LSTM"):
        LSTM.from_torch(nn.LSTM(5, 7, num_layers=2, batch_first=True))
    with pytest.raises(ValueError, match="batch_first=True"):
        LSTM.from_torch(nn.LSTM(5, 7))
    with pytest.raises(ValueError, match=r"\[batch, time, 5\]"):
        LSTM(5, 7)(torch.zeros(3, 5))


def test_training_is_the_same_with_and_without_the_recorder(tmp_path: Path) -> None:
    plain, recorded = train(fresh(), None), train(fresh(), tmp_path / "recording")
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, recorded.state_dict()[name]), name


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("time", [1, TIME])
def test_rows_and_ledger_rebuild_the_weights(tmp_path: Path, bias: bool, time: int) -> None:
    train(fresh(bias), tmp_path / "recording", time=time)
    recording = Recording.open(tmp_path / "recording")
    spec = recording.manifest.layers["rnn"]
    assert (spec.kind, spec.d_in, spec.d_out) == ("lstm", 12, 28)
    assert list(recording.manifest.layers) == ["embedding", "rnn", "decoder"]
    assert not any(recording.marks.values())
    assert_rebuilds(tmp_path / "recording")


def test_joined_weights_follow_their_parts(tmp_path: Path) -> None:
    model = train(fresh(), tmp_path / "recording")
    recording = Recording.open(tmp_path / "recording")
    final, rnn = recording.final(), model.rnn
    assert final is not None
    weight = torch.cat([rnn.hh.weight, rnn.ih.weight], 1).detach().numpy()
    np.testing.assert_array_equal(final["rnn.weight"], weight)
    np.testing.assert_array_equal(final["rnn.bias"], (rnn.hh.bias + rnn.ih.bias).detach().numpy())
    parameters = recording.ledger().parameters
    assert {"rnn.ih.weight", "rnn.ih.bias", "rnn.hh.weight", "rnn.hh.bias"} < set(parameters)
    for joined, part in zip(parameters["rnn.bias"], parameters["rnn.ih.bias"], strict=True):
        assert joined.scale == pytest.approx(2 * part.scale, rel=1e-6)
        assert part.scale < 1


def test_keys_values_and_positions(tmp_path: Path) -> None:
    """Against a second forward pass, and autograd's gradients at the pre-activations."""
    model = fresh()
    first = copy.deepcopy(model)
    train(model, tmp_path / "recording", torch.optim.SGD(model.parameters(), lr=0.5))
    recording = Recording.open(tmp_path / "recording")
    record = recording.passes("rnn")[0]
    tokens = torch.randint(
        VOCABULARY, (BATCH, TIME + 1), generator=torch.Generator().manual_seed(1)
    )
    x = first.embedding(tokens[:, :-1])
    expected = first.rnn.gate_keys(x).reshape(BATCH * TIME, 12)
    np.testing.assert_allclose(keys(recording, "rnn", record), expected, atol=1e-6)

    fused = first.rnn.to_torch()
    weight = torch.cat([fused.weight_hh_l0, fused.weight_ih_l0], 1).detach()
    bias = (fused.bias_hh_l0 + fused.bias_ih_l0).detach()
    h = c = torch.zeros(BATCH, 7)
    gates, outputs = [], []
    for t in range(TIME):
        gate = (torch.cat([h, x[:, t].detach()], 1) @ weight.T + bias).requires_grad_()
        gate.retain_grad()
        gates.append(gate)
        i, f, g, o = gate.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    logits = first.decoder(torch.stack(outputs, 1))
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    value = -torch.stack([gate.grad for gate in gates if gate.grad is not None], 1)
    np.testing.assert_allclose(
        values(recording, "rnn", record), value.reshape(-1, 28), atol=1e-6, rtol=1e-4
    )


def test_answers_from_the_index(tmp_path: Path) -> None:
    model = train(fresh(), tmp_path / "recording")
    build_index(tmp_path / "recording", tmp_path / "index", shard_rows=200)
    report = verify_index(tmp_path / "index")
    assert report.ok
    x = model.embedding(torch.randint(VOCABULARY, (3, 5))).detach()
    queries = model.rnn.gate_keys(x).reshape(15, 12)
    with torch.no_grad():
        gates = model.rnn.ih(queries[:, 7:]) + model.rnn.hh(queries[:, :7])
    with Index.open(tmp_path / "index") as index:
        whole = index.dual_output("rnn", queries.numpy(), strategy="scan").values
        scale = gates.norm(dim=1)
        error = (torch.from_numpy(whole) - gates).norm(dim=1) / scale
        assert float(error.max()) < 1e-4
        top = index.top_k("rnn", queries.numpy(), 5)
        rows = STEPS * BATCH * TIME
        assert top.coverage.total == rows
        columns = {name: column.to_pylist() for name, column in top.columns.items()}
        for row, step, slot, position, offset in zip(
            top.rows.ravel().tolist(),
            *(columns[name] for name in ("step", "slot", "position", "offset")),
            strict=True,
        ):
            assert row == (step * BATCH + slot) * TIME + position
            assert offset == step * BATCH + slot
        sums = index.sums("rnn", queries.numpy(), "label")
        assert sums.counts.sum() == rows
        recording = Recording.open(tmp_path / "recording")
        memory = np.concatenate([keys(recording, "rnn", r) for r in recording.passes("rnn")])
        weights = queries.numpy().astype(np.float64) @ memory.T.astype(np.float64)
        np.testing.assert_allclose(sums.values.sum(1), weights.sum(1), rtol=1e-6)
        np.testing.assert_allclose(top.scores[:, 0], weights.max(1), rtol=1e-6)


def test_capture_gives_the_keys_of_the_gates() -> None:
    model = fresh()
    tokens = torch.randint(VOCABULARY, (3, 5))
    queries = capture_queries(model, tokens)
    assert set(queries) == {"rnn", "decoder"}
    expected = model.rnn.gate_keys(model.embedding(tokens).detach()).reshape(15, 12)
    np.testing.assert_array_equal(queries["rnn"], expected.numpy())


def test_two_calls_in_a_step_and_a_resumed_run(tmp_path: Path) -> None:
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)

    def steps(recorder: Recorder, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            for time in (3, 5):
                tokens = torch.randint(VOCABULARY, (2, time))
                model(tokens).square().sum().backward()
            optimizer.step()
        recorder.close()

    steps(Recorder(model, optimizer, tmp_path / "recording"), 4)
    steps(Recorder(model, optimizer, tmp_path / "recording", resume_at_step=4), 3)
    assert_rebuilds(tmp_path / "recording")
    recording = Recording.open(tmp_path / "recording")
    assert [record.rows for record in recording.passes("rnn")] == [6, 10] * 7


def test_different_settings_of_the_two_products_are_marked(tmp_path: Path) -> None:
    model = fresh()
    groups = [
        {"params": list(model.rnn.hh.parameters()), "lr": 0.1},
        {"params": [*model.rnn.ih.parameters(), *model.decoder.parameters()], "lr": 0.2},
    ]
    train(model, tmp_path / "recording", torch.optim.SGD(groups, lr=0.1))
    marks = Recording.open(tmp_path / "recording").marks
    assert "different settings" in marks["rnn"][0].reason
    assert not marks["decoder"]


def test_rows_of_one_product_alone_are_an_error(tmp_path: Path) -> None:
    model = fresh()
    model.rnn.ih.requires_grad_(False)
    with pytest.raises(CaptureError, match="only one of its products"):
        train(model, tmp_path / "recording")


@pytest.mark.parametrize(
    ("kind", "why"),
    [(torch.optim.Adam, "two biases"), (torch.optim.Adafactor, "two weights by its own size")],
)
def test_adaptive_optimizers_keep_attention_weights(
    tmp_path: Path, kind: type[torch.optim.Optimizer], why: str
) -> None:
    model = fresh()
    train(model, tmp_path / "recording", kind(model.parameters(), lr=0.01))  # type: ignore[call-arg]
    recording = Recording.open(tmp_path / "recording")
    (mark,) = recording.marks["rnn"]
    assert mark.from_step == 0
    assert kind.__name__ in mark.reason
    assert why in mark.reason
    assert sum(record.rows for record in recording.passes("rnn")) == STEPS * BATCH * TIME


def test_without_biases_the_joined_weight_moves_as_one_under_adam(tmp_path: Path) -> None:
    """Followed by its joined ledger rows alone, against what training made of both weights."""
    model = fresh(bias=False)
    train(model, tmp_path / "recording", torch.optim.AdamW(model.parameters(), lr=0.01))
    with Recording.open(tmp_path / "recording") as recording:
        assert all("biases" not in mark.reason for mark in recording.marks["rnn"])
        gradients, _ = step_sums(recording, "rnn")
        ledger = recording.ledger()
        state = {"weight": torch.from_numpy(recording.initial()["rnn.weight"])}
    trajectory = Trajectory(ledger.family, state, follow=False)
    whole = trajectory.start(state)
    for row, products in zip(ledger.parameters["rnn.weight"], gradients, strict=True):
        gradient = torch.from_numpy(-row.scale * products)
        trajectory.step(row.settings, row.first, gradient, [(whole, gradient)])
    trained = torch.cat([model.rnn.hh.weight, model.rnn.ih.weight], 1).detach().double()
    way = (trained - state["weight"]).norm()
    assert float((whole.weight - trained).norm()) <= 1e-3 * float(way)


def test_fused_lstm_is_left_out_with_a_word_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.ModuleDict(
        {"bag": nn.EmbeddingBag(3, 4), "rnn": nn.LSTM(4, 5), "head": nn.Linear(5, 3)}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "recording"):
        model["head"](torch.randn(2, 5)).sum().backward()
        optimizer.step()
    assert "'rnn' (nn.LSTM runs a fused kernel" in caplog.text
    assert "'bag' (an EmbeddingBag adds up" in caplog.text
    assert list(Recording.open(tmp_path / "recording").manifest.layers) == ["head"]
    with pytest.raises(LayerSelectionError, match=r"LSTM\.from_torch"):
        Recorder(model, optimizer, tmp_path / "other", layers=["rnn"])
    with pytest.raises(LayerSelectionError, match="EmbeddingBag adds up"):
        Recorder(model, optimizer, tmp_path / "other", layers=["bag"])
