"""Attribution through every kind of layer, against TracIn with a checkpoint at each step, by hand.

Under plain SGD an example's part of a parameter is minus the learning rate times its own loss's
gradients, one for each step that it was in: their product with the target's gradient, of all
parameters of the recorded layers, is its score.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dualform.client import Client, ResourceExhaustedError
from dualform.index import build_index
from dualform.record import GRU, LSTM, Recorder

EXAMPLES, STEPS, BATCH, LR, TIME, IDS = 10, 6, 4, 0.1, 5, 11


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 6, 3, stride=2, groups=2)
        self.head = nn.Linear(6 * 2 * 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x.reshape(-1, 1, 5, 6)))
        found: torch.Tensor = self.head(torch.relu_(self.second(x)).flatten(1))
        return found


class Recurrent(nn.Module):
    def __init__(self, kind: type[LSTM] | type[GRU]) -> None:
        super().__init__()
        self.look = nn.Embedding(IDS, 4)
        self.run = kind(4, 5, bias=kind is GRU)
        self.head = nn.Linear(5, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.run(self.look(ids))[0][:, -1])
        return found


class Attention(nn.Module):
    """A language model with a tied head, which runs with the tokens first."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Embedding(IDS, 4)
        self.norm = nn.LayerNorm(4)
        self.attend = nn.MultiheadAttention(4, 2)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, IDS, bias=False)
        self.head.weight = self.look.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.look(ids).transpose(0, 1)
        seen = self.norm(x)
        x = x + self.attend(seen, seen, seen, need_weights=False)[0]
        x = x + torch.tanh(self.mix(x))
        found: torch.Tensor = self.head(x).transpose(0, 1)
        return found


class Twice(nn.Module):
    """A layer that is called twice; where `flat`, on the rows of all inputs in one axis, the times
    first."""

    flat = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, 5, 6)
        if self.flat:
            x = x.transpose(0, 1).reshape(-1, 6)
        x = torch.tanh(self.inner(torch.tanh(self.inner(x))))
        if self.flat:
            x = x.reshape(5, -1, 6).transpose(0, 1)
        found: torch.Tensor = self.head(x.mean(1))
        return found


class Experts(nn.Module):
    """Two of three experts for each token, their weights in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 6) / 2)
        self.down_proj = nn.Parameter(torch.randn(3, 6, 4) / 2)
        self.act_fn = nn.SiLU()

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        found = torch.zeros_like(hidden_states)
        for expert in range(3):
            tokens, places = torch.where(top_k_index == expert)
            if len(tokens):
                gate, up = F.linear(hidden_states[tokens], self.gate_up_proj[expert]).chunk(2, -1)
                x = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
                found.index_add_(0, tokens, x * top_k_weights[tokens, places, None])
        return found


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.router = nn.Linear(6, 3)
        self.experts = Experts()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.first(x.reshape(-1, 5, 6)).reshape(-1, 6)
        weights, index = torch.softmax(self.router(flat), -1).topk(2, -1)
        x = (flat + self.experts(flat, index, weights)).reshape(-1, 5, 6)
        found: torch.Tensor = self.head(x.mean(1))
        return found


def images() -> torch.Tensor:
    return torch.randn(EXAMPLES, 30)


def tokens() -> torch.Tensor:
    return torch.randint(IDS, (EXAMPLES, TIME))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "convolutions": (Convolutions, images),
    "lstm": (lambda: Recurrent(LSTM), tokens),
    "gru": (lambda: Recurrent(GRU), tokens),
    "attention": (Attention, tokens),
    "twice": (Twice, images),
    "experts": (Routed, images),
}


def losses(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[n]; of a language model the mean over what comes next."""
    outputs = model(inputs)
    if outputs.dim() == 2:
        return F.cross_entropy(outputs, labels, reduction="none")
    rest = F.cross_entropy(outputs[:, :-1].flatten(0, 1), inputs[:, 1:].flatten(), reduction="none")
    return rest.reshape(len(inputs), -1).mean(1)


@pytest.mark.parametrize("case", CASES)
def test_the_scores_are_tracins(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, data = CASES[case]
    model, inputs, labels = make(), data(), torch.randint(3, (EXAMPLES,))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    parts = [
        {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
        for _ in range(EXAMPLES)
    ]
    seen = np.zeros(EXAMPLES, int)
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        for _ in range(STEPS):
            batch = torch.randperm(EXAMPLES)[:BATCH]
            for example in batch.tolist():
                loss = losses(model, inputs[[example]], labels[[example]])[0] / BATCH
                brought = torch.autograd.grad(loss, list(model.parameters()))
                for part, gradient in zip(parts[example].values(), brought, strict=True):
                    part -= LR * gradient.double()
                seen[example] += 1
            recorder.annotate(example=batch)
            optimizer.zero_grad()
            losses(model, inputs[batch], labels[batch]).mean().backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    ask: dict[str, Any] = {"target": [1, 0, 2], "k": EXAMPLES}
    if case == "attention":
        ask["token"] = [-1, 2, 1]
    with Client.local(tmp_path / "index") as client:
        found = client.attribute(model.eval(), inputs[:3], max_residual=1e-2, **ask)
        layers = list(client.index().layers)
        if isinstance(model, Twice):
            model.flat = True
            flat = client.attribute(model, inputs[:3], max_residual=1e-2, **ask)
            np.testing.assert_allclose(flat.by_layer, found.by_layer, rtol=0, atol=1e-6)
            model.flat = False
    assert found.layers == tuple(layers)

    names = dict(model.named_parameters())
    covered = {name for name in names if name.rpartition(".")[0].startswith(tuple(layers))}
    if case == "experts":
        covered = set(names)
    if case == "attention":
        covered = {"look.weight", "mix.weight", "mix.bias", *(n for n in names if "attend" in n)}
    for number in range(3):
        outputs = model(inputs[[number]])
        logits = outputs[0] if outputs.dim() == 2 else outputs[0, ask["token"][number]]
        gradients = torch.autograd.grad(logits[ask["target"][number]], list(names.values()))
        g = dict(zip(names, (gradient.double() for gradient in gradients), strict=True))
        expected = np.array(
            [sum(float((g[name] * part[name]).sum()) for name in covered) for part in parts]
        )
        order = np.argsort(-expected)
        order = order[seen[order] > 0]
        assert found.groups[number, : len(order)].tolist() == order.tolist()
        np.testing.assert_allclose(
            found.scores[number, : len(order)], expected[order], atol=3e-6 * np.abs(expected).max()
        )
        whole = sum(float((g[n] * names[n].detach()).sum()) for n in covered)
        beside = found.initial + found.rows + found.residual
        assert beside[number].sum() == pytest.approx(whole, abs=1e-5)
        rest = sum(float((g[n] * names[n].detach()).sum()) for n in names if n not in covered)
        assert found.unrecorded[number] == pytest.approx(rest, abs=1e-5)


def test_adamw_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have no coefficients: an example's part follows the run's own preconditioner."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    inputs, labels = torch.randn(EXAMPLES, 6), torch.randint(3, (EXAMPLES,))
    lr, decay, (b1, b2), eps = 0.01, 0.1, (0.9, 0.99), 1e-8
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, weight_decay=decay, betas=(b1, b2), eps=eps
    )
    start = [p.detach().double().clone() for p in model.parameters()]
    v = [torch.zeros_like(p) for p in start]
    parts = [[(torch.zeros_like(p), torch.zeros_like(p)) for p in start] for _ in range(EXAMPLES)]
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        for step in range(1, STEPS + 1):
            batch = torch.randperm(EXAMPLES)[:BATCH]
            each = {}
            for example in batch.tolist():
                loss = F.cross_entropy(model(inputs[[example]]), labels[[example]]) / BATCH
                each[example] = torch.autograd.grad(loss, list(model.parameters()))
            for place in range(len(start)):
                whole = torch.stack([g[place].double() for g in each.values()]).sum(0)
                v[place] = b2 * v[place] + (1 - b2) * whole**2
                scale = lr / (1 - b1**step) / ((v[place] / (1 - b2**step)).sqrt() + eps)
                for example in range(EXAMPLES):
                    w, m = parts[example][place]
                    m = b1 * m
                    if example in each:
                        m += (1 - b1) * each[example][place].double()
                    parts[example][place] = ((1 - lr * decay) * w - scale * m, m)
            recorder.annotate(example=batch)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    with Client.local(tmp_path / "index") as client:
        found = client.attribute(model, inputs[:2], target=1, k=5, order="absolute")
        # Several places of one input: their products are those of the inputs one by one.
        apart = client.scores(model, inputs, target=1)
        whole = client.scores(model, inputs, target=1, together=True)
        assert apart.values is not None
        assert whole.values is not None
        np.testing.assert_allclose(whole.values[0], apart.values.sum(axis=0), atol=1e-5)
        monkeypatch.setattr("dualform.engine.groups.attributed.MOST_PRODUCTS", 1000)
        with pytest.raises(
            ResourceExhaustedError, match=r"the 2 layers here are .* about"
        ) as caught:
            client.attribute(model, inputs[:2], target=1)
        assert (caught.value.reason, caught.value.field) == ("TOO_COSTLY", "layers")
    for number in range(2):
        g = torch.autograd.grad(model(inputs[[number]])[0, 1], list(model.parameters()))
        expected = np.array(
            [
                sum(float((a.double() * w).sum()) for a, (w, _) in zip(g, part, strict=True))
                for part in parts
            ]
        )
        order = np.argsort(-np.abs(expected))[:5]
        assert found.groups[number].tolist() == order.tolist()
        np.testing.assert_allclose(
            found.scores[number], expected[order], atol=1e-5 * np.abs(expected).max()
        )
