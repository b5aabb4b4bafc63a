"""Every kind of layer, proven the same way: from hooks to answers, under SGD and under AdamW."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dualform.client import Client, InvalidArgumentError, capture_queries, dual_form
from dualform.engine import verify_index
from dualform.index import build_index
from dualform.record import GRU, LSTM, LayerSelectionError, Recorder
from dualform.store.recording import Recording

from .reading import keys, relative, values

STEPS = 24
IDS = 9


class Conv1D(nn.Module):
    """The names and shapes of transformers' class of this name, written from its description."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], self.nf)


class MixtralTopKRouter(nn.Module):
    """As transformers routes tokens to experts, written from its description."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(hidden_states.reshape(-1, 5), self.weight)
        scores, _ = logits.float().softmax(-1).topk(3)
        scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores


class Routed(nn.Module):
    """What a router chose."""

    def __init__(self) -> None:
        super().__init__()
        self.router = MixtralTopKRouter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(x)[1].view(*x.shape[:-1], 3)  # type: ignore[no-any-return]


class Last(nn.Module):
    """h after every step, of a layer that gives more."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = LSTM(5, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class Gated(nn.Module):
    """h after every step of a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = GRU(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class Tokens(nn.Module):
    """A language model of one hidden layer; its head may share the embedding's table."""

    def __init__(self, tied: bool = False, **settings: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(IDS, 6, **settings)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, IDS, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(ids))))


class Attention(nn.Module):
    """Attention of a sequence to itself, or to one or two others that are made from it."""

    def __init__(self, others: int = 0, batch_first: bool = True, **settings: bool) -> None:
        super().__init__()
        self.others = others
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.attention.batch_first and x.dim() == 3:
            x = x.transpose(0, 1)
        short = x[1:] * 2 if x.dim() == 2 or not self.attention.batch_first else x[:, 1:] * 2
        given = [(x, x, x), (x, short, short), (x, short, short.tanh())][self.others]
        return self.attention(*given)[0]


@dataclass(frozen=True)
class Case:
    """A network, what it sees, and its layers with their kinds and rows per example.

    Attributes:
        ids: It sees integers.
        noise: Output units whose bias's gradient is the rounding of a zero, by layer: Adam steps by
            it all the same, and no row explains that.
    """

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    layers: dict[str, tuple[str, int]]
    ids: bool = False
    noise: dict[str, slice] = field(default_factory=dict)

    def input(self, count: int, stream: torch.Generator | None = None) -> torch.Tensor:
        if self.ids:
            return torch.randint(0, IDS, (count, *self.shape), generator=stream)
        return torch.randn(count, *self.shape, generator=stream)


def convolutions(*layers: nn.Module) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        stack: list[nn.Module] = []
        for layer in layers:
            fresh = copy.deepcopy(layer)
            fresh.reset_parameters()  # type: ignore[operator]
            stack += [fresh, nn.Tanh()]
        return nn.Sequential(*stack)

    return made


CASES = {
    "linear": Case(lambda: nn.Sequential(nn.Linear(5, 4)), (3, 5), {"0": ("linear", 3)}),
    "router": Case(Routed, (3, 5), {"router": ("linear", 3)}),
    "lstm": Case(Last, (4, 5), {"rnn": ("lstm", 4)}),
    "gru": Case(Gated, (4, 5), {"rnn.ih": ("linear", 4), "rnn.hh": ("linear", 4)}),
    "transposed": Case(
        lambda: nn.Sequential(Conv1D(7, 5), nn.Tanh(), Conv1D(4, 7)),
        (3, 5),
        {"0": ("transposed_linear", 3), "2": ("transposed_linear", 3)},
    ),
    "conv2d": Case(
        convolutions(
            nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
            nn.Conv2d(5, 3, 1, bias=False),
        ),
        (2, 6, 7),
        {"0": ("convolution", 15), "2": ("convolution", 15)},
    ),
    "same": Case(
        convolutions(
            nn.Conv2d(2, 3, (2, 4), padding="same"),
            nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"),
        ),
        (2, 5, 4),
        {"0": ("convolution", 20), "2": ("convolution", 20)},
    ),
    "conv1d": Case(
        convolutions(nn.Conv1d(3, 4, 3, stride=2, padding=2, dilation=2), nn.Conv1d(4, 2, 2)),
        (3, 9),
        {"0": ("convolution", 5), "2": ("convolution", 4)},
    ),
    "conv3d": Case(
        convolutions(nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=(0, 1, 0))),
        (2, 3, 4, 3),
        {"0": ("convolution", 12)},
    ),
    "groups": Case(
        convolutions(
            nn.Conv2d(6, 9, (3, 2), stride=(2, 1), padding=1, groups=3),
            nn.Conv2d(9, 9, 1, groups=9, bias=False),
        ),
        (6, 5, 4),
        {"0": ("convolution", 45), "2": ("convolution", 135)},
    ),
    "attention": Case(
        Attention,
        (4, 6),
        {"attention": ("attention_in", 4), "attention.out_proj": ("attention_out", 4)},
        noise={"attention": slice(6, 12)},  # of k: it adds the same to all that softmax compares
    ),
    "attention to another": Case(
        lambda: Attention(1, batch_first=False),
        (4, 6),
        {"attention": ("attention_in", 7), "attention.out_proj": ("attention_out", 4)},
        noise={"attention": slice(6, 12)},
    ),
    "attention to two others": Case(
        lambda: Attention(2, bias=False),
        (4, 6),
        {"attention": ("attention_in", 10), "attention.out_proj": ("attention_out", 4)},
    ),
    "embedding": Case(
        lambda: Tokens(padding_idx=2),
        (5,),
        {"embedding": ("embedding", 5), "hidden": ("linear", 5), "head": ("linear", 5)},
        ids=True,
    ),
    "tied": Case(
        lambda: Tokens(tied=True),
        (5,),
        {"hidden": ("linear", 5), "head": ("linear", 10)},
        ids=True,
    ),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.05),
}


def train(case: Case, optimizer: str, path: Path | None) -> nn.Module:
    torch.manual_seed(0)
    model = case.model()
    made = OPTIMIZERS[optimizer](model)
    stream = torch.Generator().manual_seed(1)
    recorder = None if path is None else Recorder(model, made, path)
    for step in range(STEPS):
        x = case.input(4, stream)
        if recorder is not None:
            recorder.annotate(part=torch.arange(4) + step)
        made.zero_grad()
        (model(x) - x.float().mean()).square().mean().backward()
        made.step()
    if recorder is not None:
        recorder.close()
    return model


def expected(layer: nn.Module, output: torch.Tensor | None, queries: np.ndarray) -> np.ndarray:
    """What a layer gave, [n, d_out], a row per place: channels are a convolution's second axis."""
    if isinstance(layer, MixtralTopKRouter):
        return product(queries, layer.weight, None)
    if isinstance(layer, nn.MultiheadAttention):
        return product(queries, layer.in_proj_weight, layer.in_proj_bias)
    if output is None:  # of an attention's, which does not call it
        assert isinstance(layer, nn.Linear)
        return product(queries, layer.weight, layer.bias)
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        if layer.groups > 1:  # a row has the units of its group alone
            return product(queries, layer.weight.flatten(1), layer.bias)
        output = output.movedim(1, -1)
    return output.detach().reshape(-1, output.shape[-1]).numpy()


def product(x: np.ndarray, weight: torch.Tensor, bias: torch.Tensor | None) -> np.ndarray:
    return nn.functional.linear(torch.from_numpy(x), weight, bias).detach().numpy()


# torch's own, of even kernels.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_from_the_hooks_to_the_answers(tmp_path: Path, case: Case, optimizer: str) -> None:
    model = train(case, optimizer, tmp_path / "recording")
    plain = train(case, optimizer, None)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name  # bit for bit

    with Recording.open(tmp_path / "recording") as recording:
        found = {
            name: (spec.kind, sum(r.rows for r in recording.passes(name)) // (4 * STEPS))
            for name, spec in recording.manifest.layers.items()
        }
        assert found == case.layers
        assert not any(recording.marks.values()), recording.marks
    build_index(tmp_path / "recording", tmp_path / "index")
    assert verify_index(tmp_path / "index").ok

    x = case.input(3)
    with torch.no_grad():
        primal = model(x)
    outputs: dict[str, list[torch.Tensor]] = {}
    for name in case.layers:
        model.get_submodule(name).register_forward_hook(
            lambda layer, args, output, name=name: outputs.setdefault(name, []).append(output)
        )
    queries = capture_queries(model, x, layers=list(case.layers))
    assert set(queries) == set(case.layers)
    with Client.local(tmp_path / "index") as client:
        for name, (kind, _) in case.layers.items():
            if kind == "lstm":  # its output is no product; see test_lstm.py
                continue
            layer = model.get_submodule(name)
            noise = case.noise.get(name, slice(0))
            most = 1e-4 if noise == slice(0) else 1.0
            answer = client.dual_output(name, queries[name], max_residual=most).values
            calls: list[torch.Tensor | None] = [*outputs.get(name, [None])]
            right = np.concatenate([expected(layer, call, queries[name]) for call in calls])
            answer, right = (np.delete(each, noise, axis=1) for each in (answer, right))
            assert relative(answer, right) <= 1e-5
        fresh = case.model()
        if case.ids and "embedding" not in case.layers:  # which is the head's table
            fresh.load_state_dict(model.state_dict())
        with dual_form(fresh, client, max_residual=1.0 if case.noise else 1e-4):
            dual = fresh(x)
        assert dual.shape == primal.shape
        assert relative(dual.numpy(), primal.numpy()) <= 1e-5
        if "conv" in next(iter(case.layers.values()))[0]:
            with dual_form(fresh, client):
                torch.testing.assert_close(fresh(x[0]), dual[0], rtol=1e-5, atol=1e-6)
                with pytest.raises(InvalidArgumentError, match="the input has shape"):
                    fresh(x[:, :1])


def test_patches_and_their_values(tmp_path: Path) -> None:
    """Keys against `F.unfold`, values against autograd's gradient at the output."""
    torch.manual_seed(3)
    settings = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}
    layer = nn.Conv2d(3, 4, (3, 2), **settings)  # type: ignore[arg-type]
    model = nn.Sequential(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3, 6, 5)
    with Recorder(model, optimizer, tmp_path / "recording") as recorder:
        recorder.annotate(label=[7, 8])
        output = model(x)
        output.retain_grad()
        output.square().sum().backward()
        optimizer.step()
    patches = nn.functional.unfold(x, (3, 2), **settings).transpose(1, 2)  # type: ignore[arg-type]
    assert output.grad is not None
    gradient = output.grad.flatten(2).transpose(1, 2)
    with Recording.open(tmp_path / "recording") as recording:
        (record,) = recording.passes("0")
        np.testing.assert_array_equal(keys(recording, "0", record), patches.reshape(-1, 18).numpy())
        np.testing.assert_array_equal(
            values(recording, "0", record), -gradient.reshape(-1, 4).numpy()
        )
    build_index(tmp_path / "recording", tmp_path / "index")
    with Client.local(tmp_path / "index") as client:
        places = output.shape[2] * output.shape[3]
        top = client.top_k("0", patches[1, 4:5].numpy(), k=2 * places)
        row = top.rows[0].tolist().index(places + 4)
        assert top.columns["slot"][0][row] == 1
        assert top.columns["position"][0][row] == 4
        assert top.columns["label"][0][row] == 8


def test_rows_of_groups(tmp_path: Path) -> None:
    """Each group's patches, and values of its own units alone, against a convolution per group."""
    torch.manual_seed(3)
    layer = nn.Conv2d(4, 6, (3, 2), padding=1, groups=2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(2, 4, 5, 4)
    with Recorder(nn.Sequential(layer), optimizer, tmp_path / "recording"):
        output = layer(x)
        output.retain_grad()
        output.square().sum().backward()
        optimizer.step()
    patches = nn.functional.unfold(x, (3, 2), padding=1).transpose(1, 2)
    assert output.grad is not None
    gradient = output.grad.flatten(2).transpose(1, 2)
    right = torch.zeros(2, 2, *gradient.shape[1:])  # example, group, place, unit
    for group in range(2):
        units = slice(3 * group, 3 * group + 3)
        right[:, group, :, units] = -gradient[..., units]
    with Recording.open(tmp_path / "recording") as recording:
        (record,) = recording.passes("0")
        there = torch.stack([patches[..., :12], patches[..., 12:]], 1)
        np.testing.assert_array_equal(keys(recording, "0", record), there.reshape(-1, 12).numpy())
        np.testing.assert_array_equal(values(recording, "0", record), right.reshape(-1, 6).numpy())
        rows = recording.read_rows([record.block])
        assert rows["slot"].to_pylist() == [i for i in range(2) for _ in range(2 * 25)]
        assert rows["position"].to_pylist() == [*range(50)] * 2


def test_channels_last_and_a_frozen_weight(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 2))
    model = model.to(memory_format=torch.channels_last)
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with Recorder(model, optimizer, tmp_path / "recording", layers=["2"]):
        for _ in range(20):
            optimizer.zero_grad()
            x = torch.randn(3, 4, 6, 6).to(memory_format=torch.channels_last)
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    with Recording.open(tmp_path / "recording") as recording:
        assert not any(recording.marks.values()), recording.marks
    build_index(tmp_path / "recording", tmp_path / "index")
    assert verify_index(tmp_path / "index").ok


def test_a_wrong_gradient_is_found(tmp_path: Path) -> None:
    """The check of the rows against the gradient can fail, for each kind that reshapes a weight."""
    model = nn.ModuleDict({"conv": nn.Conv1d(3, 4, 2), "wide": Conv1D(4, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3, 6)
    with Recorder(model, optimizer, tmp_path / "recording"):
        for step in range(3):
            optimizer.zero_grad()
            (model["conv"](x).sum() + model["wide"](x.mT.contiguous()).sum()).backward()
            if step == 2:  # beside the layer, as by a tied use
                nn.functional.conv1d(x, model["conv"].weight).square().sum().backward()
                (x.mT @ model["wide"].weight).square().sum().backward()
            optimizer.step()
    with Recording.open(tmp_path / "recording") as recording:
        for marks in recording.marks.values():
            assert [mark.from_step for mark in marks] == [2]
            assert "do not add up" in marks[0].reason


def test_adafactor_steps_by_other_axes(tmp_path: Path) -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(3, 4, 2), "plain": nn.Linear(3, 4)})
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    x = torch.randn(2, 3, 6)
    with Recorder(model, optimizer, tmp_path / "recording"):
        for _ in range(3):
            optimizer.zero_grad()
            (model["conv"](x).square().sum() + model["plain"](x.mT).square().sum()).backward()
            optimizer.step()
    with Recording.open(tmp_path / "recording") as recording:
        assert not recording.marks["plain"]
        (mark,) = recording.marks["conv"]
        assert "Adafactor steps by the axes of a weight" in mark.reason
    build_index(tmp_path / "recording", tmp_path / "index")
    assert verify_index(tmp_path / "index").ok


class Standardised(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


def test_what_no_kind_takes_is_named_and_trains_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(
        nn.Conv2d(66, 66, 1, groups=33),
        Standardised(66, 4, 1),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)),
        nn.ConvTranspose2d(4, 4, 1),
        nn.Conv2d(4, 3, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "recording"):
        model(torch.randn(2, 66, 4, 4)).sum().backward()  # reaches the step all the same
        optimizer.step()
    assert list(Recording.open(tmp_path / "recording").manifest.layers) == ["4"]
    assert "'0' (a convolution in 33 groups" in caplog.text
    assert "'1' (Standardised has a forward of its own" in caplog.text
    assert "'2.parametrizations.weight' (its weight is computed" in caplog.text
    assert "'3' (ConvTranspose2d is of no kind" in caplog.text
    for name, why in (("0", "up to 32 groups"), ("1", r"use nn\.Conv2d"), ("3", "unsupported")):
        with pytest.raises(LayerSelectionError, match=why):
            Recorder(model, optimizer, tmp_path / "other", layers=[name])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_transformers_own_class(tmp_path: Path, optimizer: str) -> None:
    library = pytest.importorskip("transformers.pytorch_utils")
    case = Case(
        lambda: nn.Sequential(library.Conv1D(7, 5)), (3, 5), {"0": ("transposed_linear", 3)}
    )
    test_from_the_hooks_to_the_answers(tmp_path, case, optimizer)


def test_a_router_that_multiplies_otherwise(tmp_path: Path) -> None:
    """In dual form its product must be there to be replaced: a copy of its weight is no reason to
    answer with the untrained one."""

    class Odd(MixtralTopKRouter):
        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = torch.mm(hidden_states.reshape(-1, 5), self.weight.t())
            return logits, logits.softmax(-1)[..., :3]

    model = Routed()
    model.router = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3, 5)
    with Recorder(model, optimizer, tmp_path / "recording"):
        model(x)[..., 0].sum().backward()
        optimizer.step()
    build_index(tmp_path / "recording", tmp_path / "index")
    with (
        Client.local(tmp_path / "index") as client,
        dual_form(model, client),
        pytest.raises(InvalidArgumentError, match="multiplied 0 times by its weight as it is"),
    ):
        model(x)
