"""Self-influence: against every example's own gradient in every step, by autograd in float64."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import (
    AsyncClient,
    Client,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from dualform.index import build_index
from dualform.record import Recorder
from dualform.serve import ServerLimits

from .serving import serving

EXAMPLES, STEPS, BATCH, LR = 20, 12, 5, 0.1
VOCABULARY, TOKENS = 11, 4


class Words(nn.Module):
    """Several places of each example, a table, a layer with a bias and one without."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 5)
        self.hidden = nn.Linear(5, wide)
        self.out = nn.Linear(wide, 3, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(self.table(tokens))).mean(dim=1))


@dataclass(frozen=True)
class Trained:
    """An index, and float64 [examples, layers] of what each example's steps lowered its loss by."""

    path: Path
    layers: tuple[str, ...]
    expected: np.ndarray
    counts: np.ndarray


def lowered(
    model: Words, optimizer: torch.optim.SGD, batch: list[dict[str, torch.Tensor]]
) -> list[dict[str, float]]:
    """By how much each example's part of one step's update lowers its part of the step's loss.

    In float64, by torch's own step with the whole batch's gradient and with all but the example's:
    minus the product of the difference with the example's gradient, for each parameter.

    Args:
        model: In float64, as it is before the step.
        optimizer: The run's, as it is before the step.
        batch: Each example's gradient at every parameter.
    """
    total = {name: torch.stack([one[name] for one in batch]).sum(dim=0) for name in batch[0]}

    def after(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        moved = copy.deepcopy(model)
        again = torch.optim.SGD(moved.parameters(), lr=1.0)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for name, parameter in moved.named_parameters():
            parameter.grad = gradients[name]
        again.step()
        return {name: parameter.detach() for name, parameter in moved.named_parameters()}

    whole = after(dict(total))
    found = []
    for one in batch:
        rest = after({name: total[name] - one[name] for name in total})
        found.append({n: -float(((whole[n] - rest[n]) * one[n]).sum()) for n in one})
    return found


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "narrow": (2, {"momentum": 0.9, "weight_decay": 0.5}),
    "wide, nesterov": (40, {"momentum": 0.8, "weight_decay": 0.5, "nesterov": True}),
    "dampening": (2, {"momentum": 0.9, "dampening": 0.6, "weight_decay": 0.5}),
}


@pytest.fixture(scope="module", params=list(RUNS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    path = tmp_path_factory.mktemp("self")
    wide, settings = RUNS[request.param]
    torch.manual_seed(0)
    model = Words(wide)
    tokens = torch.randint(VOCABULARY, (EXAMPLES, TOKENS))
    labels = torch.randint(3, (EXAMPLES,))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, **settings)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    layers = ("table", "hidden", "out")
    expected = np.zeros((EXAMPLES, len(layers)))
    counts = np.zeros(EXAMPLES, np.int64)
    with Recorder(model, optimizer, path / "recording") as recorder:
        for _ in range(STEPS):
            batch = torch.randperm(EXAMPLES)[:BATCH]
            reference = copy.deepcopy(model).double()
            gradients = []
            for example in batch.tolist():
                loss = nn.functional.cross_entropy(reference(tokens[[example]]), labels[[example]])
                parts = torch.autograd.grad(loss / BATCH, list(reference.parameters()))
                names = [name for name, _ in reference.named_parameters()]
                gradients.append(dict(zip(names, parts, strict=True)))
                counts[example] += 2 * TOKENS + 1
            found = lowered(reference, optimizer, gradients)
            for example, by_parameter in zip(batch.tolist(), found, strict=True):
                for name, amount in by_parameter.items():
                    expected[example, layers.index(name.split(".")[0])] += amount
            recorder.annotate(example=batch, label=labels[batch])
            loss = nn.functional.cross_entropy(model(tokens[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    build_index(path / "recording", path / "index", shard_rows=64)
    return Trained(path / "index", layers, expected, counts)


def test_against_every_steps_gradients(trained: Trained) -> None:
    with Client.local(trained.path) as client:
        found = client.self_influence()
        seen = np.flatnonzero(trained.counts)
        order = [found.layers.index(name) for name in trained.layers]
        assert found.groups == seen.tolist()
        np.testing.assert_array_equal(found.counts, trained.counts[seen])
        np.testing.assert_allclose(
            found.by_layer[:, order], trained.expected[seen], rtol=2e-5, atol=1e-9
        )
        np.testing.assert_allclose(found.scores, found.by_layer.sum(axis=1))
        one = client.self_influence(layers="o*")
        np.testing.assert_array_equal(one.scores, found.by_layer[:, found.layers.index("out")])
        # Of a filter, some of the rows; the steps apart add up.
        early, late = (client.self_influence(where=where) for where in ("step < 5", "step >= 5"))
        np.testing.assert_allclose(early.scores + late.scores, found.scores, rtol=1e-12)
        assert found.coverage["out"].rows == STEPS * BATCH
        table = found.to_pandas()
        assert table["group"][0] == found.groups[int(found.scores.argmax())]


def test_later_decay_is_not_in_it(tmp_path: Path) -> None:
    """Every step's gradient is 1, and lr |G|^2 0.1, whatever becomes of the weight."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=5)
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        for step in range(6):
            recorder.annotate(example=torch.tensor([step]))
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    with Client.local(tmp_path / "index") as client:
        np.testing.assert_allclose(client.self_influence().scores, [0.1] * 6, rtol=1e-12)


def test_remote_and_asyncio_in_parts(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualform.client._self_influence._GROUP_BYTES", (1 << 20) // 6)
    with Client.local(trained.path) as client:
        whole = client.self_influence(by="label")
    with serving({"i": trained.path}, limits=ServerLimits(max_message_mib=1)) as address:
        with Client(address) as client:
            parts, labels = client.self_influence(), client.self_influence(by="label")

        async def asked() -> np.ndarray:
            async with AsyncClient(address) as client:
                return (await client.self_influence()).scores

        np.testing.assert_array_equal(asyncio.run(asked()), parts.scores)
    with Client.local(trained.path) as client:
        np.testing.assert_array_equal(parts.scores, client.self_influence().scores)
    np.testing.assert_array_equal(labels.scores, whole.scores)


def test_bad_input(trained: Trained, tmp_path: Path) -> None:
    with Client.local(trained.path) as client:
        for asked, field in (
            ({"by": "lable"}, "by"),
            ({"layers": "nine"}, "layers"),
            ({"layers": []}, "layers"),
            ({"where": "lable = 1"}, "where"),
        ):
            with pytest.raises(InvalidArgumentError) as caught:
                client.self_influence(**asked)  # type: ignore[arg-type]
            assert caught.value.field == field
        with pytest.raises(NotFoundError):
            client.self_influence(index="other")


def test_layers_whose_names_are_patterns(tmp_path: Path) -> None:
    """`[a]` is a pattern that does not match itself, and `*` one that matches all."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for name in ("[a]", "a", "*"):
        model.add_module(name, nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    inputs = torch.randn(4, 3)
    with Recorder(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(3):
            recorder.annotate(example=[0, 1, 2, 3])
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    build_index(tmp_path / "run", tmp_path / "index", values=True)
    with serving({"index": tmp_path / "index"}) as address, Client(address) as client:
        for layers in ("[a]", "*"):
            assert client.self_influence(layers=layers).layers == (layers,)
            found = client.attribute(model, inputs, target=0, layers=[layers])
            assert found.layers == (layers,)
        assert client.self_influence(layers=["?", "[a]"]).layers == ("[a]", "a", "*")


def test_where_steps_have_metrics_it_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        for _ in range(3):
            recorder.annotate(example=torch.arange(4))
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    with (
        Client.local(tmp_path / "index") as client,
        pytest.raises(FailedPreconditionError, match="own metric") as caught,
    ):
        client.self_influence()
    assert caught.value.reason == "NO_COEFFICIENTS"
