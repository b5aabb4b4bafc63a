"""Self-influence: against every example's own gradient in every step, by autograd in float64."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

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

EXAMPLES, STEPS, BATCH, LR, MOMENTUM, DECAY = 20, 12, 5, 0.1, 0.9, 0.02
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


def kept() -> np.ndarray:
    """How much of a step's gradient the weight has in the end, by recursion, float64 [steps]."""
    found = []
    for step in range(STEPS):
        weight = momentum = 0.0
        for later in range(step, STEPS):
            gradient = (1.0 if later == step else 0.0) + DECAY * weight
            momentum = gradient if later == step else MOMENTUM * momentum + gradient
            weight -= LR * momentum
        found.append(-weight)
    return np.array(found)


@pytest.fixture(scope="module", params=[2, 40], ids=["narrow", "wide"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    path = tmp_path_factory.mktemp("self")
    torch.manual_seed(0)
    model = Words(request.param)
    tokens = torch.randint(VOCABULARY, (EXAMPLES, TOKENS))
    labels = torch.randint(3, (EXAMPLES,))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    layers, c = ("table", "hidden", "out"), kept()
    expected = np.zeros((EXAMPLES, len(layers)))
    counts = np.zeros(EXAMPLES, np.int64)
    with Recorder(model, optimizer, path / "recording") as recorder:
        for step in range(STEPS):
            batch = torch.randperm(EXAMPLES)[:BATCH]
            wide = Words(request.param).double()
            wide.load_state_dict({name: p.double() for name, p in model.state_dict().items()})
            for example in batch.tolist():
                loss = nn.functional.cross_entropy(wide(tokens[[example]]), labels[[example]])
                wide.zero_grad()
                (loss / BATCH).backward()
                counts[example] += 2 * TOKENS + 1
                for place, name in enumerate(layers):
                    squares = sum(
                        float(parameter.grad.square().sum())
                        for parameter in wide.get_submodule(name).parameters()
                        if parameter.grad is not None
                    )
                    expected[example, place] += c[step] * squares
            recorder.annotate(example=batch, label=labels[batch])
            loss = nn.functional.cross_entropy(model(tokens[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
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
