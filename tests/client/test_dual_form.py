"""dual_form: whole forward passes from memory, against trained networks and float64 references."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import digits
import numpy as np
import pytest
import torch
from record.reading import step_sums
from torch import nn

from dualform.client import Client, dual_form
from dualform.index import build_index
from dualform.record import Recorder
from dualform.store.recording import Recording

from .serving import serving

LAYERS = ["0", "2", "4"]
LR, MOMENTUM = 0.05, 0.9  # of tests/digits.py
# Per layer at most 1e-4 with momentum (design, rule 5); three layers and ReLU between.
WHOLE_PASS = 1e-4


@dataclass(frozen=True)
class Trained:
    """The recorded digits network, its recording, and a client of its served memory."""

    model: nn.Sequential
    recording: Path
    client: Client
    images: torch.Tensor


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("dual")
    model = digits.record(folder / "recording")
    build_index(folder / "recording", folder / "index", shard_rows=700)
    with serving({"digits": folder / "index"}) as address, Client(address) as client:
        yield Trained(model, folder / "recording", client, digits.load().images)


@pytest.fixture(scope="module")
def plain() -> dict[int, nn.Sequential]:
    """The network after some steps of ordinary training: no recorder anywhere near."""
    data, model = digits.load(), digits.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    order = np.random.default_rng(0).permutation(len(data.labels))
    kept = {0: copy_of(model)}
    for step in range(digits.STEPS):
        batch = np.arange(step * digits.BATCH, (step + 1) * digits.BATCH) % len(order)
        ids = torch.from_numpy(order[batch])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.images[ids]), data.labels[ids]).backward()
        optimizer.step()
        if step + 1 in (1, 17, digits.STEPS):
            kept[step + 1] = copy_of(model)
    return kept


def test_every_image_gets_the_trained_networks_prediction(trained: Trained) -> None:
    with torch.no_grad():
        primal = trained.model(trained.images)
    # A network that never saw training: what it says comes from the memory alone.
    model = digits.network()
    with dual_form(model, trained.client, layers=LAYERS):
        dual = model(trained.images)
    assert len(dual) == 1797
    assert dual.argmax(-1).tolist() == primal.argmax(-1).tolist()
    assert relative(dual, primal) <= WHOLE_PASS
    labels = digits.load().labels
    right = int((dual.argmax(-1) == labels).sum())
    assert right == int((primal.argmax(-1) == labels).sum()) > 1200


@pytest.mark.parametrize("step", [0, 1, 17, digits.STEPS])
def test_at_a_step_it_is_the_checkpoint_of_that_step(
    trained: Trained, plain: dict[int, nn.Sequential], step: int
) -> None:
    with torch.no_grad():
        primal = plain[step](trained.images)
    with dual_form(trained.model, trained.client, at_step=step):
        dual = trained.model(trained.images)
    assert relative(dual, primal) <= WHOLE_PASS
    assert dual.argmax(-1).tolist() == primal.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("where", "keeps", "at_step"),
    [
        ("task = 'even'", lambda step: step % 2 == 0, None),
        ("task != 'even'", lambda step: step % 2 == 1, 31),
        ("step < 20", lambda step: step < 20, None),
        ("step < 0", lambda step: False, None),
    ],
)
def test_masked_it_is_the_float64_reference_of_the_recorded_rows(
    trained: Trained, where: str, keeps: object, at_step: int | None
) -> None:
    end = digits.STEPS if at_step is None else at_step
    taken = np.array([step < end and keeps(step) for step in range(digits.STEPS)])  # type: ignore[operator]
    # SGD with momentum, no decay: a row of step t is in every later update, 0.9 times smaller each.
    ages = end - np.arange(digits.STEPS)
    c = np.where(taken, LR * (1 - MOMENTUM ** np.maximum(ages, 0)) / (1 - MOMENTUM), 0)
    recording, reference = Recording.open(trained.recording), digits.network().double()
    with torch.no_grad():
        for name in LAYERS:
            layer = reference.get_submodule(name)
            weight, bias = step_sums(recording, name)
            layer.weight += torch.from_numpy(np.tensordot(c, weight, 1))
            layer.bias += torch.from_numpy(np.tensordot(c, bias, 1))
        expected = reference(trained.images.double())
    with dual_form(trained.model, trained.client, where=where, at_step=at_step):
        masked = trained.model(trained.images)
    # No training in float32 stands between the two: only queries and answers are rounded.
    assert relative(masked, expected) <= 1e-6
    if not taken.any():
        with torch.no_grad():
            assert relative(masked, digits.network()(trained.images)) <= 1e-6


def test_without_rows_the_decayed_initial_network_is_left(tmp_path: Path) -> None:
    lr, decay, steps = 0.1, 0.5, 8
    model = small()
    start = copy_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        for _ in range(steps):
            recorder.annotate(task="all")
            optimizer.zero_grad()
            model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    x = torch.randn(6, 5)
    with torch.no_grad():
        for parameter in start.parameters():
            parameter *= (1 - lr * decay) ** steps
        expected = start.double()(x.double())
    with (
        Client.local(tmp_path / "index") as client,
        dual_form(model, client, where="task != 'all'"),
    ):
        assert relative(model(x), expected) <= 1e-6


def test_only_the_layers_named_are_replaced(trained: Trained) -> None:
    model, images = copy_of(trained.model), trained.images[:40]
    with torch.no_grad():
        hidden = model[:2](images)
        masked = torch.from_numpy(
            trained.client.dual_output("2", hidden, where="label < 5").values
        ).relu()
        expected = model[4](masked)
    with dual_form(model, trained.client, layers="2", where="label < 5"):
        torch.testing.assert_close(model(images), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:layer .* of the model holds other weights")
def test_any_leading_shape(trained: Trained) -> None:
    x, model = trained.images[:12], digits.network()
    with dual_form(model, trained.client, layers=["0"]):
        flat = model[0](x)
        assert flat.shape == (12, 48)
        assert torch.equal(model[0](x.reshape(3, 2, 2, 64)), flat.reshape(3, 2, 2, 48))
        one = model[0](input=x[0])
        assert one.shape == (48,)
        torch.testing.assert_close(one, flat[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(model[0](x.T.contiguous().T), flat)
        assert model[0](x[:0]).shape == (0, 48)
        assert model[0](x.reshape(3, 4, 64)[:, :0]).shape == (3, 0, 48)
        # bfloat16 fits into float32, which is what comes back.
        half = model[0](x.bfloat16())
        assert torch.equal(half, model[0](x.bfloat16().float()))
        assert half.dtype == torch.float32
        with pytest.raises(Exception, match=r"\[12, 63\]; it takes \[\.\.\., 64\]"):
            model[0](x[:, 1:])


class Twice(nn.Module):
    """One layer, called twice, and one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.inner(x).relu()))


def test_a_layer_that_is_called_twice(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    with Recorder(model, optimizer, tmp_path / "recording"):
        for _ in range(9):
            optimizer.zero_grad()
            model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    x = torch.randn(7, 5)
    with torch.no_grad():
        expected = model(x)
    other = Twice()
    with Client.local(tmp_path / "index") as client, dual_form(other, client):
        assert relative(other(x), expected) <= 1e-5


def test_gradients_stop_at_a_replaced_layer(trained: Trained) -> None:
    model = copy_of(trained.model)
    with dual_form(model, trained.client, layers=["2"]):
        out = model(trained.images[:4])
        assert out.requires_grad  # layer "4" is an ordinary one
        out.sum().backward()
    assert model[4].weight.grad is not None
    assert all(p.grad is None for place in (0, 2) for p in model[place].parameters())
    with dual_form(model, trained.client):
        out = model(trained.images[:4].clone().requires_grad_())
        assert not out.requires_grad
        with pytest.raises(RuntimeError, match="does not require grad"):
            out.sum().backward()
    with torch.inference_mode(), dual_form(model, trained.client):
        assert torch.equal(model(trained.images[:4]), out)


def state_of(model: nn.Module) -> list[tuple[object, ...]]:
    """What a block may have left behind in each module."""
    return [
        (
            sorted(vars(module)),
            vars(module).get("forward"),
            list(module._forward_hooks.items()),
            list(module._forward_pre_hooks.items()),
            module.training,
        )
        for module in model.modules()
    ]


def test_behind_the_block_all_is_as_before(trained: Trained) -> None:
    model, images = copy_of(trained.model), trained.images[:5]
    seen: list[torch.Tensor] = []
    model[2].register_forward_hook(lambda layer, given, out: seen.append(out.detach()))
    forward = model[4].forward
    model[4].forward = lambda x: forward(x) + 1  # a user's own patch stays
    before, primal = state_of(model), model(images)
    with pytest.raises(ZeroDivisionError), dual_form(model, trained.client, at_step=0):
        fail_after(model, images)
    assert state_of(model) == before
    assert torch.equal(model(images), primal)
    # The user's hook has seen what the layer gave: trained, initial, trained.
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    with pytest.raises(Exception, match="finite"), dual_form(model, trained.client):
        model(torch.full((1, 64), torch.nan))
    assert state_of(model) == before


def test_a_block_inside_a_block_takes_over_its_layers(trained: Trained) -> None:
    model, images, client = copy_of(trained.model), trained.images[:5], trained.client
    before = state_of(model)
    with dual_form(model, client, at_step=0):
        initial = model(images)
        with dual_form(model, client, layers=["0", "2", "4"], at_step=17):
            at_17 = model(images)
            with dual_form(model, client, layers=["4"], at_step=0):
                mixed = model(images)
        assert torch.equal(model(images), initial)
    assert state_of(model) == before
    step = np.array(17)  # whatever is an index
    with dual_form(model, client, layers=["0", "2"], at_step=step):  # type: ignore[arg-type]
        assert relative(mixed, digits.network()[4](model[:4](images))) <= 1e-6
    assert not torch.equal(mixed, at_17)
    # All of the outer block's layers answered, though through the inner ones.
    with dual_form(model, client, layers=["4"]), dual_form(model, client, layers=["4"]):
        model(images)


def fail_after(model: nn.Module, images: torch.Tensor) -> None:
    model(images)
    raise ZeroDivisionError


def small() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def copy_of(model: nn.Sequential) -> nn.Sequential:
    copied = nn.Sequential(*(copied_layer(layer) for layer in model))
    copied.load_state_dict(model.state_dict())
    return copied


def copied_layer(layer: nn.Module) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, layer.out_features)
    return type(layer)()


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest |actual - expected|_2 / |expected|_2 over the rows."""
    one, other = actual.detach().double(), expected.detach().double()
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1)).max())
