"""Experts in one tensor: each is a layer of its own, with the rows of the tokens sent to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dualform.client import Client, capture_queries, dual_form
from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import LayerSelectionError, Recorder
from dualform.store.recording import Recording

from .reading import keys, step_sums

WIDTH, INNER, EXPERTS, TIME, STEPS = 6, 5, 4, 3, 20
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.05),
}


class Experts(nn.Module):
    """The names and shapes of transformers' classes of this kind, written from their description.

    Attributes:
        calls: What it was called with, and how its inputs were sent on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / 2)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 2)
        self.act_fn = nn.SiLU()
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        self.calls.append((hidden_states.detach().clone(), top_k_index.clone()))
        found = torch.zeros_like(hidden_states)
        for expert in range(EXPERTS):
            places, tokens = torch.where((top_k_index == expert).T)
            if len(tokens):
                x = F.linear(hidden_states[tokens], self.gate_up_proj[expert])
                gate, up = x.chunk(2, -1)
                x = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
                found.index_add_(0, tokens, x * top_k_weights[tokens, places, None])
        return found


class Routed(nn.Module):
    """Tokens, their routes, the experts, and a head. Of the last expert, hardly any."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.first(x).reshape(-1, WIDTH)
        routes = self.router(flat) - torch.tensor([0.0, 0.0, 0.0, 0.5])
        weights, index = torch.softmax(routes, -1).topk(2, -1)
        found: torch.Tensor = self.head(flat + self.experts(flat, index, weights))
        return found.reshape(*x.shape[:-1], 2)


def train(
    optimizer: str, path: Path | None, **annotate: Any
) -> tuple[Routed, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    model = Routed()
    opt = OPTIMIZERS[optimizer](model)
    recorder = None if path is None else Recorder(model, opt, path)
    stream = torch.Generator().manual_seed(1)
    gradients = []
    for step in range(STEPS):
        x = torch.randn(2, TIME, WIDTH, generator=stream)
        if recorder is not None:
            recorder.annotate(example=torch.arange(2) + 10 * step, **annotate)
        opt.zero_grad()
        model(x).square().mean().backward()
        gradients.append(
            {
                name: getattr(model.experts, name).grad.clone()
                for name in ("gate_up_proj", "down_proj")
            }
        )
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    if recorder is not None:
        recorder.close()
    return model, gradients


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_from_the_hooks_to_the_answers(tmp_path: Path, optimizer: str) -> None:
    model, gradients = train(optimizer, tmp_path / "recording")
    plain, _ = train(optimizer, None)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name  # bit for bit
    names = [f"experts.{w}.{e}" for w in ("gate_up_proj", "down_proj") for e in range(EXPERTS)]
    sent = [len(set(map(int, index.flatten()))) for _, index in model.experts.calls]
    assert min(sent) < EXPERTS  # some expert gets no token at some step
    with Recording.open(tmp_path / "recording") as recording:
        assert [n for n, s in recording.manifest.layers.items() if s.kind == "expert"] == names
        assert not any(recording.marks.values()), recording.marks
        for name in names:
            _, weight, expert = name.split(".")
            sums, _ = step_sums(recording, name)
            for step, brought in enumerate(gradients):
                torch.testing.assert_close(
                    torch.from_numpy(-sums[step]).float(), brought[weight][int(expert)]
                )
            spaces = [recording.passes(f"experts.{w}.{expert}") for w in ("gate_up_proj", weight)]
            assert [r.block for r in spaces[0]] == [r.block for r in spaces[1]]
    build_index(tmp_path / "recording", tmp_path / "index")
    report = verify_index(tmp_path / "index")
    assert report.ok, report

    x = torch.randn(4, TIME, WIDTH)
    primal = model(x).detach()
    queries = capture_queries(model, x)
    with Client.local(tmp_path / "index") as client:
        for name in names:
            _, weight, expert = name.split(".")
            matrix = getattr(model.experts, weight)[int(expert)].detach()
            answer = client.dual_output(name, queries[name], max_residual=1e-5).values
            right = torch.from_numpy(queries[name]) @ matrix.T
            np.testing.assert_allclose(answer, right.numpy(), rtol=0, atol=1e-5)
        fresh = Routed()
        with dual_form(fresh, client, max_residual=1e-5):
            dual = fresh(x)
        torch.testing.assert_close(dual, primal, rtol=0, atol=1e-5)
        assert sum(len(queries[f"experts.down_proj.{e}"]) for e in range(EXPERTS)) == 2 * 4 * TIME
    assert list(vars(fresh.experts)) == list(vars(model.experts))  # nothing is left behind


def test_rows_are_the_tokens_that_were_sent(tmp_path: Path) -> None:
    """Keys, examples and places against the calls; top-k against all products."""
    model, _ = train("SGD", tmp_path / "recording")
    with Recording.open(tmp_path / "recording") as recording:
        for expert in range(EXPERTS):
            name = f"experts.gate_up_proj.{expert}"
            passes = {record.step: record for record in recording.passes(name)}
            for step, (hidden, index) in enumerate(model.experts.calls):
                tokens = torch.where((index == expert).any(1))[0]
                assert (step in passes) == bool(len(tokens))
                if len(tokens):
                    found = keys(recording, name, passes[step])
                    np.testing.assert_array_equal(found, hidden[tokens].numpy())
                    rows = recording.read_rows([passes[step].block])
                    assert rows["slot"].to_pylist() == tokens.tolist()
                    examples = (tokens // TIME + 10 * step).tolist()
                    assert rows["example"].to_pylist() == examples
    build_index(tmp_path / "recording", tmp_path / "index")
    sent = torch.cat([h[(i == 1).any(1)] for h, i in model.experts.calls]).double()
    query = torch.randn(1, WIDTH)
    with Client.local(tmp_path / "index") as client:
        found = client.top_k("experts.gate_up_proj.1", query, k=5)
        best = (sent @ query[0].double()).topk(5)
        assert found.rows[0].tolist() == best.indices.tolist()
        np.testing.assert_allclose(found.scores[0], best.values, rtol=1e-6)


def test_rows_that_are_left_out(tmp_path: Path) -> None:
    """A mask [batch, time] goes with the tokens."""
    mask = torch.tensor([[True, False, True], [False, False, True]])
    model, _ = train("SGD", tmp_path / "recording", rows=mask)
    with Recording.open(tmp_path / "recording") as recording:
        for expert in range(EXPERTS):
            kept = []
            for hidden, index in model.experts.calls:
                chosen = (index == expert).any(1) & mask.flatten()
                kept.append(hidden[chosen])
            name = f"experts.gate_up_proj.{expert}"
            found = [keys(recording, name, record) for record in recording.passes(name)]
            np.testing.assert_array_equal(np.concatenate(found), torch.cat(kept).numpy())
            dropped = recording.dropped(name)["rows"]
            sent = sum(int((index == expert).any(1).sum()) for _, index in model.experts.calls)
            assert dropped + len(torch.cat(kept)) == sent


def test_what_is_not_seen_is_named(tmp_path: Path) -> None:
    class Biased(Experts):
        has_bias = True

    class Otherwise(Experts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x

    for kind, words in ((Biased, "experts with biases"), (Otherwise, "called otherwise")):
        model = Routed()
        model.experts = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(LayerSelectionError, match=words):
            Recorder(model, optimizer, tmp_path / "r", layers=["experts"])
    model = Routed()
    optimizer = torch.optim.SGD([*model.head.parameters(), model.experts.down_proj], lr=0.1)
    with Recorder(model, optimizer, tmp_path / "one"):
        model(torch.randn(2, TIME, WIDTH)).sum().backward()
        optimizer.step()
    with Recording.open(tmp_path / "one") as recording:
        found = list(recording.manifest.layers)
    assert found == [*(f"experts.down_proj.{e}" for e in range(EXPERTS)), "head"]
