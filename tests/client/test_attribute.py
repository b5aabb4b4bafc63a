"""Examples behind a prediction, over all layers: against every term in float64, by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from dualform.client import (
    AsyncClient,
    AttributionResult,
    Client,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from dualform.index import build_index
from dualform.record import Recorder
from dualform.serve import ServerLimits

from .serving import serving

EXAMPLES, STEPS, BATCH, LR, MOMENTUM, DECAY = 40, 25, 8, 0.1, 0.9, 0.01
LAYERS = ("0", "2", "4")


@dataclass(frozen=True)
class Trained:
    """A small MLP, its index, and every row's key and value by layer, with the row's coefficient.

    `terms[name]` is (keys [rows, d_in], values [rows, d_out], c [rows]) in float64.
    """

    path: Path
    model: nn.Sequential
    inputs: torch.Tensor
    labels: torch.Tensor
    ids: np.ndarray
    start: dict[str, torch.Tensor]
    terms: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]

    def contributions(self, x: torch.Tensor, target: Any) -> np.ndarray:
        """What each example's rows added, float64 [n, examples, layers], by autograd in float64."""
        model = network().double()
        model.load_state_dict({k: v.double() for k, v in self.model.state_dict().items()})
        found = np.zeros((len(x), EXAMPLES, len(LAYERS)))
        for number, one in enumerate(x.double()):
            seen, value = one[None], None
            outputs = []
            for layer in model:
                before, seen = seen, layer(seen)
                if isinstance(layer, nn.Linear):
                    seen.retain_grad()
                    outputs.append((before.detach(), seen))
            value = target(seen)
            value.sum().backward()
            for place, (name, (query, output)) in enumerate(zip(LAYERS, outputs, strict=True)):
                keys, values, c = self.terms[name]
                g = output.grad[0].numpy()
                each = c * (keys @ query[0].numpy() + 1) * (values @ g)
                np.add.at(found[number, :, place], self.ids, each)
        return found


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def margin(logits: torch.Tensor) -> torch.Tensor:
    best = logits[0].argmax()
    others = torch.cat([logits[:, :best], logits[:, best + 1 :]], 1)
    return logits[:, best] - others.logsumexp(1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """SGD with momentum and decay, whose coefficients are followed here row by row, as scalars."""
    path = tmp_path_factory.mktemp("attribute")
    torch.manual_seed(0)
    model = network()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.randn(EXAMPLES, 6)
    labels = torch.randint(3, (EXAMPLES,))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    rows: dict[str, tuple[list[Any], list[Any]]] = {name: ([], []) for name in LAYERS}
    order = []
    with Recorder(model, optimizer, path / "recording") as recorder:
        for _ in range(STEPS):
            batch = torch.randint(EXAMPLES, (BATCH,))
            order.append(batch.numpy())
            recorder.annotate(example=batch, label=labels[batch])
            seen, kept = inputs[batch], []
            for name, layer in model.named_children():
                before, seen = seen, layer(seen)
                if isinstance(layer, nn.Linear):
                    seen.retain_grad()
                    kept.append((name, before, seen))
            loss = nn.functional.cross_entropy(seen, labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for name, before, output in kept:
                rows[name][0].append(before.detach().double().numpy())
                rows[name][1].append(-output.grad.double().numpy())
    build_index(path / "recording", path / "index", shard_rows=64)
    # How far a step's gradient has moved a parameter in the end: the recursion, with 1 for it.
    c = []
    for step in range(STEPS):
        weight = momentum = 0.0
        for later in range(step, STEPS):
            momentum = MOMENTUM * momentum + DECAY * weight - (later == step)
            weight -= LR * momentum
        c += [weight] * BATCH
    terms = {
        name: (np.concatenate(keys), np.concatenate(values), np.array(c))
        for name, (keys, values) in rows.items()
    }
    ids = np.concatenate(order)
    return Trained(path / "index", model.eval(), inputs, labels, ids, start, terms)


@pytest.fixture(scope="module")
def client(trained: Trained) -> Iterator[Client]:
    with Client.local(trained.path) as client:
        yield client


@pytest.fixture(scope="module")
def served(trained: Trained) -> Iterator[str]:
    with serving({"mlp": trained.path}) as address:
        yield address


def check_best(found: AttributionResult, terms: np.ndarray, ids: np.ndarray, order: str) -> None:
    """The best groups, scores, layers and counts are those of every term's float64 sum."""
    whole = terms.sum(axis=2)
    present = np.bincount(ids, minlength=EXAMPLES) > 0
    merits = {"largest": whole, "smallest": -whole, "absolute": np.abs(whole)}[order]
    merits = np.where(present, merits, -np.inf)
    best = np.argsort(-merits, axis=1, kind="stable")[:, : found.groups.shape[1]]
    np.testing.assert_array_equal(found.groups, best)
    scale = np.abs(terms).max()
    np.testing.assert_allclose(
        found.scores, np.take_along_axis(whole, best, 1), rtol=0, atol=2e-5 * scale
    )
    by_layer = np.take_along_axis(terms, best[:, :, None], 1)
    np.testing.assert_allclose(found.by_layer, by_layer, rtol=0, atol=2e-5 * scale)
    np.testing.assert_array_equal(found.counts, len(LAYERS) * np.bincount(ids)[best])


@pytest.mark.parametrize("many_bytes", [0, 1 << 20])
@pytest.mark.parametrize("order", ["largest", "smallest"])
def test_a_validation_set_together(
    trained: Trained, client: Client, order: Any, many_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What harmed it most, or helped: more inputs than the widest layer has units, and few."""
    monkeypatch.setattr("dualform.client._watch._MANY_BYTES", many_bytes)
    generator = torch.Generator().manual_seed(5)
    for n in (3, 50):
        x, labels = torch.randn(n, 6, generator=generator), torch.arange(n) % 3
        found = client.attribute(
            trained.model, x, target="loss", labels=labels, together=True, k=6, order=order
        )
        parts = np.zeros((EXAMPLES, len(LAYERS)))
        loss = 0.0
        for one, label in zip(x, labels, strict=True):
            wrong = label[None]

            def target(logits: torch.Tensor, label: torch.Tensor = wrong) -> torch.Tensor:
                return nn.functional.cross_entropy(logits, label)[None]

            parts += trained.contributions(one[None], target)[0]
            loss += float(target(trained.model(one[None])).detach())
        whole = parts.sum(axis=1)
        expected = np.argsort(whole if order == "smallest" else -whole, kind="stable")[:6]
        assert found.groups.tolist() == [expected.tolist()]
        size = np.abs(parts).sum()
        np.testing.assert_allclose(found.scores[0], whole[expected], atol=1e-6 * size)
        np.testing.assert_allclose(found.by_layer[0], parts[expected], atol=1e-6 * size)
        np.testing.assert_allclose(found.targets, [loss], rtol=1e-5)
        beside = found.initial + found.rows + found.residual
        np.testing.assert_allclose(beside, found.outputs, atol=1e-5 * size)
        scores = client.scores(trained.model, x, target="loss", labels=labels, together=True)
        assert scores.values is not None
        np.testing.assert_allclose(scores.values, whole[None], atol=1e-6 * size)


def test_together_inputs_may_have_an_influence(trained: Trained, client: Client) -> None:
    found = client.attribute(
        trained.model, trained.inputs[:4], target=lambda o: o[:, 0] - o[:, 1].mean(), together=True
    )
    apart = client.scores(trained.model, trained.inputs[:4], target=lambda o: o[:, 0] - o[:, 1])
    assert apart.values is not None
    np.testing.assert_allclose(found.scores[0], np.sort(apart.values.sum(axis=0))[::-1][:10])


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
def test_the_sum_over_layers_is_ranked(trained: Trained, client: Client, order: Any) -> None:
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    found = client.attribute(trained.model, x, target="margin", k=6, order=order)
    check_best(found, trained.contributions(x, margin), trained.ids, order)
    assert found.layers == LAYERS
    assert found.scores.dtype == found.by_layer.dtype == np.float64
    np.testing.assert_allclose(found.scores, found.by_layer.sum(-1), rtol=1e-12)
    with torch.no_grad():
        targets = torch.cat([margin(one[None]) for one in trained.model(x)])
    np.testing.assert_allclose(found.targets, targets, rtol=1e-5)


TARGETS: list[tuple[dict[str, Any], Any]] = [
    ({"target": 2}, lambda logits: logits[:, 2]),
    ({"target": "loss", "labels": 1}, lambda logits: -logits.log_softmax(1)[:, 1]),
    (
        {"target": "margin", "labels": [0] * 4},
        lambda logits: logits[:, 0] - logits[:, 1:].logsumexp(1),
    ),
    ({"target": lambda logits: logits.square().sum(1)}, lambda logits: logits.square().sum(1)),
]


@pytest.mark.parametrize("which", range(len(TARGETS)))
def test_targets(trained: Trained, client: Client, which: int) -> None:
    x, (ask, target) = trained.inputs[:4], TARGETS[which]
    found = client.attribute(trained.model, x, k=4, **ask)
    check_best(found, trained.contributions(x, target), trained.ids, "largest")


def test_a_class_for_each_input(trained: Trained, client: Client) -> None:
    x = trained.inputs[:3]
    found = client.attribute(trained.model, x, target=[2, 0, 1], k=2)
    for number, unit in enumerate([2, 0, 1]):
        one = client.attribute(trained.model, x[number][None], target=unit, k=2)
        np.testing.assert_array_equal(found.groups[number], one.groups[0])
        np.testing.assert_allclose(found.scores[number], one.scores[0], rtol=1e-6)


def test_everything_adds_up_to_the_linearised_outputs(trained: Trained, client: Client) -> None:
    """Of each layer: initial, all rows and the residual are g times what the layer gives."""
    x = trained.inputs[:5]
    found = client.attribute(trained.model, x, target=0, k=EXAMPLES)
    np.testing.assert_allclose(
        found.initial + found.rows + found.residual, found.outputs, rtol=0, atol=1e-6
    )
    every = np.nansum(found.by_layer, axis=1)  # k holds all examples
    np.testing.assert_allclose(every, found.rows, rtol=0, atol=1e-6)
    logits = trained.model(x)[:, 0].detach().numpy()
    np.testing.assert_allclose(found.outputs[:, -1], logits, atol=1e-5)  # the last is linear
    assert np.abs(found.residual).max() < 1e-4
    assert not found.unrecorded.any()
    # The initial part is the start's weight, shrunk by decay and moved by momentum alone.
    weight, momentum = 1.0, 0.0
    for _ in range(STEPS):
        momentum = MOMENTUM * momentum + DECAY * weight
        weight -= LR * momentum
    hidden = trained.model[:4](x).detach().double().numpy()
    first = hidden @ trained.start["4.weight"][0].double().numpy() + float(
        trained.start["4.bias"][0]
    )
    np.testing.assert_allclose(found.initial[:, -1], weight * first, atol=1e-6)


def test_what_is_not_asked_about_is_unrecorded(trained: Trained, client: Client) -> None:
    """Without the first layer: its gradient times its parameters, by autograd."""
    x = trained.inputs[:3]
    found = client.attribute(trained.model, x, target=1, layers=["2", "4"], k=1)
    assert found.layers == ("2", "4")
    parameters = list(trained.model[0].parameters())
    for number in range(3):
        gradients = torch.autograd.grad(trained.model(x)[number, 1], parameters)
        inner = sum(
            float((g * p.detach()).sum()) for g, p in zip(gradients, parameters, strict=True)
        )
        assert found.unrecorded[number] == pytest.approx(inner, abs=1e-6)


def test_with_a_filter(trained: Trained, client: Client) -> None:
    x, rows = trained.inputs[:4], np.arange(len(trained.ids))
    found = client.attribute(trained.model, x, target=1, k=3, where="step >= 10")
    late = rows >= 10 * BATCH
    part = Trained(
        trained.path,
        trained.model,
        x,
        trained.labels,
        trained.ids[late],
        trained.start,
        {name: tuple(t[late] for t in terms) for name, terms in trained.terms.items()},  # type: ignore[misc]
    )
    terms = part.contributions(x, lambda logits: logits[:, 1])
    check_best(found, terms, part.ids, "largest")
    np.testing.assert_allclose(found.rows, terms.sum(1), atol=1e-5)
    assert found.coverage["0"].rows == late.sum()


def test_other_columns(trained: Trained, client: Client) -> None:
    x = trained.inputs[:2]
    terms = trained.contributions(x, margin).sum(2)
    found = client.attribute(trained.model, x, by="label", k=3)
    for number in range(2):
        sums = np.bincount(trained.labels.numpy(), terms[number], 3)
        np.testing.assert_allclose(found.scores[number], np.sort(sums)[::-1], atol=1e-5)
        np.testing.assert_array_equal(found.groups[number], np.argsort(-sums))


def test_remote_local_and_asyncio_agree(trained: Trained, served: str, client: Client) -> None:
    x = trained.inputs[:7]

    async def asked() -> AttributionResult:
        async with AsyncClient(served) as client:
            return await client.attribute(trained.model, x, target="margin", k=3)

    ours = client.attribute(trained.model, x, target="margin", k=3)
    with Client(served) as remote:
        others = [remote.attribute(trained.model, x, target="margin", k=3), asyncio.run(asked())]
    for theirs in others:
        np.testing.assert_array_equal(ours.groups, theirs.groups)
        for name in ("scores", "by_layer", "counts", "initial", "rows", "residual", "outputs"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        assert (ours.coverage, ours.index_version) == (theirs.coverage, theirs.index_version)


def test_parts_of_a_batch_are_joined(trained: Trained, client: Client) -> None:
    x = trained.inputs[:33]  # more than one more backward tells apart
    whole = client.attribute(trained.model, x, target=0, k=2)
    with (
        serving({"mlp": trained.path}, limits=ServerLimits(max_queries=4)) as address,
        Client(address) as remote,
    ):
        found = remote.attribute(trained.model, x, target=0, k=2)
    np.testing.assert_array_equal(found.groups, whole.groups)
    for name in ("scores", "by_layer", "rows", "initial", "targets"):
        np.testing.assert_allclose(getattr(found, name), getattr(whole, name), rtol=0, atol=1e-6)


def test_as_a_table(trained: Trained, client: Client) -> None:
    found = client.attribute(trained.model, trained.inputs[:2], k=3)
    table = found.to_pandas()
    assert table.columns.tolist() == ["query", "rank", "group", "score", "count", *LAYERS]
    np.testing.assert_allclose(table[list(LAYERS)].sum(axis=1), table["score"])


def test_the_model_is_left_as_it_was(trained: Trained, client: Client) -> None:
    model = network()
    model.load_state_dict(trained.model.state_dict())
    model.train()
    model[0].weight.requires_grad_(False)
    state = torch.get_rng_state()
    with torch.no_grad():
        found = client.attribute(model, trained.inputs[:2], k=2)
    assert all(module.training for module in model.modules())
    assert not model[0].weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(state, torch.get_rng_state())
    same = client.attribute(trained.model, trained.inputs[:2], k=2)
    np.testing.assert_array_equal(found.scores, same.scores)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"target": "margn"}, "target", "none of 'margin', 'loss'"),
    ({"target": 3}, "target", "0 to 2"),
    ({"target": True}, "target", "no integer"),
    ({"target": [0, 1, 2]}, "target", "one for each of the 2 inputs"),
    ({"target": "loss"}, "labels", "needs labels="),
    ({"target": "loss", "labels": [0, 5]}, "labels", "0 to 2"),
    ({"target": 1, "labels": 1}, "labels", "a class is a target itself"),
    ({"token": -1}, "token", "leave token out"),
    ({"target": lambda logits: logits}, "target", r"\[n\] is needed"),
    ({"target": lambda logits: logits.argmax(1).float()}, "target", "no gradient flows"),
    ({"target": lambda logits: logits[:, 0] / 0}, "target", "must be finite"),
    ({"target": lambda logits: logits[:, 0] * logits[:, 0].sum()}, "inputs", "influence"),
    (
        {"target": lambda o: o[:, 0] + 0.005 * torch.cat([o[1:, 0], torch.zeros(1)])},
        "inputs",
        "influence",
    ),
    ({"target": lambda logits: logits[:, 0] * 1j}, "target", "real numbers"),
    ({"target": [[0], [1, 2]]}, "target", "differ in length"),
    ({"k": None}, "k", "at least 1"),
    ({"k": True}, "k", "at least 1"),
    ({"k": 2.5}, "k", "at least 1"),
    ({"check_model": "no"}, "check_model", "True or False"),
    ({"together": 1}, "together", "True or False"),
    # Taken together these cancel: a row's gradient is zero, though it is of two inputs.
    ({"target": lambda logits: logits[:, 0] - logits[:, 0].mean()}, "inputs", "influence"),
    ({"target": lambda logits: (logits - logits.roll(1, 0))[:, 0]}, "inputs", "influence"),
    ({"target": lambda logits: logits[:, 0].softmax(0)}, "inputs", "influence"),
    ({"by": "lable"}, "by", "unknown column"),
    ({"by": "position"}, "by", "no row has a value"),
    ({"k": 0}, "k", "at least 1"),
    ({"layers": "9"}, "layers", "matches no layer"),
    ({"where": "lable = 1"}, "where", "lable"),
    ({"max_residual": -1.0}, "max_residual", "0 or more"),
]


@pytest.mark.parametrize("which", range(len(BAD)))
def test_bad_input(trained: Trained, client: Client, which: int) -> None:
    ask, field, says = BAD[which]
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        client.attribute(trained.model, trained.inputs[:2], **ask)
    assert caught.value.field == field


# Each cancels taken together, and again with 1, 2, 4, … for the inputs.
CANCELLING = [(2, -3, 1), (4, -4, -1, 1), (6, -5, -2, 1), (2, -3, 1, *[0] * 17), (8, -7, 0, -2, 1)]


@pytest.mark.parametrize("coefficients", CANCELLING)
def test_inputs_whose_influences_cancel(
    trained: Trained, client: Client, coefficients: tuple[int, ...]
) -> None:
    of_each = torch.tensor(coefficients, dtype=torch.float32)
    n = len(of_each)
    powers = 2.0 ** torch.arange(n)
    assert of_each.sum() == 0
    coupled = [
        lambda o: of_each * o[0, 0],
        lambda o: of_each * o[0, 0] + o[:, 1],
        lambda o: of_each.roll(1) * o[1, 0],
        lambda o: of_each * powers.flip(0) * o[0, 0],
    ]
    for target in coupled:
        with pytest.raises(InvalidArgumentError, match="influence on one another"):
            client.attribute(trained.model, trained.inputs[:n], target=target)
    found = client.attribute(trained.model, trained.inputs[:n], target=lambda o: o[:, 1], k=1)
    alone = [
        client.attribute(trained.model, trained.inputs[i : i + 1], target=1, k=1).scores[0]
        for i in range(n)
    ]
    np.testing.assert_allclose(found.scores, alone, rtol=1e-6)


def test_another_model(trained: Trained, client: Client) -> None:
    other = network()
    with pytest.raises(
        FailedPreconditionError, match="not what the index was trained to"
    ) as caught:
        client.attribute(other, trained.inputs[:2])
    assert (caught.value.field, caught.value.reason) == ("model", "ANOTHER_MODEL")
    assert client.attribute(other, trained.inputs[:2], check_model=False, k=1).scores.shape == (
        2,
        1,
    )
    wider = nn.Sequential(nn.Linear(6, 9))
    with pytest.raises(InvalidArgumentError, match="is it the one that was recorded"):
        client.attribute(wider, trained.inputs[:2])
    with pytest.raises(InvalidArgumentError, match=r"a torch\.nn\.Module is needed"):
        client.attribute(lambda x: x, trained.inputs)  # type: ignore[arg-type]


def test_threads_share_a_model(trained: Trained, client: Client) -> None:
    """Each sees its own pass alone, and the training flags are left as they were."""

    class Slow(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                time.sleep(0.002)  # the others' turn
                x = layer(x)
            return x

    model, parts = Slow(*network()).train(), [trained.inputs[i : i + 2] for i in range(8)]
    model.load_state_dict(trained.model.state_dict())
    expected = [client.attribute(trained.model, part, k=2).scores for part in parts]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda part: client.attribute(model, part, k=2).scores, parts))
    np.testing.assert_array_equal(found, expected)
    assert all(module.training for module in model.modules())


def test_a_data_parallel_model_is_unwrapped(
    trained: Trained, client: Client, tmp_path: Path
) -> None:
    expected = client.attribute(trained.model, trained.inputs[:3], k=2)
    copy = deepcopy(trained.model)  # which keeps DistributedDataParallel's hooks
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = [nn.DataParallel(trained.model), nn.parallel.DistributedDataParallel(copy)]
        for model in wrapped:
            found = client.attribute(model, trained.inputs[:3], k=2)
            assert found.layers == LAYERS
            np.testing.assert_array_equal(found.scores, expected.scores)
    finally:
        torch.distributed.destroy_process_group()


def test_inputs_that_take_no_gradient(trained: Trained, client: Client) -> None:
    with torch.inference_mode():
        x = trained.inputs[:2] * 1
    for inputs, says in ((x, "inference_mode"), (trained.inputs[:0], "no inputs")):
        with pytest.raises(InvalidArgumentError, match=says) as caught:
            client.attribute(trained.model, inputs, target=0)
        assert caught.value.field == "inputs"


def test_a_weight_that_is_used_outside_its_module(trained: Trained, client: Client) -> None:
    """Only half of its gradient is in the rows that its module sees."""

    class Again(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self[1](self[0](x))
            layer = self[2]
            h = layer(h) + nn.functional.linear(h, layer.weight, layer.bias)
            return self[4](self[3](h))  # type: ignore[no-any-return]

    again = Again(*trained.model)
    with pytest.raises(FailedPreconditionError, match=r"'2'.*outside its module's") as caught:
        client.attribute(again, trained.inputs[:2])
    assert caught.value.field == "layers"
    found = client.attribute(again, trained.inputs[:2], layers=["4"])
    assert found.layers == ("4",)


def test_a_forward_that_turns_gradients_off(trained: Trained, client: Client) -> None:
    class Silent(nn.Sequential):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = super().forward(x)  # type: ignore[no-untyped-call]
            return found

    silent = Silent(*trained.model)
    with pytest.raises(InvalidArgumentError, match="no gradient flows back"):
        client.attribute(silent, trained.inputs[:2])


def test_an_input_that_no_request_holds(trained: Trained) -> None:
    with (
        serving({"mlp": trained.path}, limits=ServerLimits(max_message_mib=1)) as address,
        Client(address) as remote,
        pytest.raises(ResourceExhaustedError, match="k is 20,000") as caught,
    ):
        remote.attribute(trained.model, trained.inputs[:2], k=20_000)
    assert caught.value.field == "k"


@pytest.mark.parametrize("kind", [None, ".npy", ".parquet"])
def test_scores_of_every_group(
    trained: Trained, client: Client, tmp_path: Path, kind: str | None
) -> None:
    """In parts of three inputs, as every group's sum in float64."""
    x = trained.inputs[:7]
    terms = trained.contributions(x, lambda logits: logits[:, 2]).sum(2)
    present = np.unique(trained.ids)
    out = None if kind is None else tmp_path / f"scores{kind}"
    with (
        serving({"mlp": trained.path}, limits=ServerLimits(max_queries=3)) as address,
        Client(address) as remote,
    ):
        found = remote.scores(trained.model, x, target=2, out=out)
    assert found.groups == present.tolist()
    np.testing.assert_array_equal(found.counts, len(LAYERS) * np.bincount(trained.ids)[present])
    best = client.attribute(trained.model, x, target=2, k=1)
    np.testing.assert_allclose(found.rows, best.rows, atol=1e-6)
    np.testing.assert_array_equal(found.targets, best.targets)
    if kind == ".parquet":
        table = pq.read_table(out).to_pandas()
        assert table["query"].tolist() == np.repeat(np.arange(7), len(present)).tolist()
        assert table["group"].tolist() == present.tolist() * 7
        values = table["score"].to_numpy().reshape(7, -1)
        assert found.values is None
    else:
        values = np.load(out) if out is not None else found.to_pandas().to_numpy()
        assert found.values is not None
        np.testing.assert_array_equal(found.values, values)
    np.testing.assert_allclose(values, terms[:, present], rtol=0, atol=2e-5 * np.abs(terms).max())
    assert found.path == out
    assert {path.name for path in tmp_path.iterdir()} == (set() if out is None else {out.name})


def test_scores_that_break_off_leave_no_file(
    trained: Trained, client: Client, tmp_path: Path
) -> None:
    ask: dict[str, Any] = {"target": 1, "out": tmp_path / "scores.npy"}
    with pytest.raises(InvalidArgumentError):
        client.scores(trained.model, trained.inputs[:2], by="lable", **ask)
    assert not list(tmp_path.iterdir())
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "kept.npy").write_bytes(b"kept")
    for out in (tmp_path / "folder.npy", tmp_path / "kept.npy"):
        with pytest.raises(InvalidArgumentError, match="is there already") as caught:
            client.scores(None, trained.inputs[:2], out=out)  # type: ignore[arg-type]
        assert caught.value.field == "out"
    assert (tmp_path / "kept.npy").read_bytes() == b"kept"
    for out in ("scores.csv", tmp_path / "nowhere" / "scores.npy", 7):
        with pytest.raises(InvalidArgumentError) as caught:
            client.scores(trained.model, trained.inputs[:2], out=out)  # type: ignore[arg-type]
        assert caught.value.field == "out"
