"""Which layers are taken, and what is said where a pattern takes none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from dualform.record import LayerSelectionError, Recorder
from dualform.store import ExistsError
from dualform.store.recording import Recording


class Changed(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x @ self.in_proj_weight.T


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)
        )
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.conv = nn.ConvTranspose2d(1, 1, 1)
        self.attention = nn.MultiheadAttention(4, 2)
        self.other = Changed(4, 2)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def test_no_layer_is_no_choice(tmp_path: Path) -> None:
    """It recorded steps without a layer, which building called damaged."""
    with pytest.raises(LayerSelectionError, match=r"layers=\[\] names none"):
        chosen(Model(), tmp_path / "r", [])
    assert not (tmp_path / "r").exists()


def chosen(model: nn.Module, path: Path, layers: Sequence[str] | None) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, path, layers=layers):
        pass
    return list(Recording.open(path).manifest.layers)


def test_by_default_what_is_not_parametrised_and_a_tied_table_once(tmp_path: Path) -> None:
    assert chosen(Model(), tmp_path / "r", None) == [
        "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "attention", "attention.out_proj",
        "head",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["blocks.1.0"], ["blocks.1.0"]),
        (["blocks.*.1", "blocks.0.*"], ["blocks.0.0", "blocks.0.1", "blocks.1.1"]),
        (["head"], ["head"]),
        (["embedding", "head"], ["head"]),
        (["emb*"], ["head"]),
        (["*.0"], ["blocks.0.0", "blocks.1.0"]),
    ],
)
def test_patterns(tmp_path: Path, layers: list[str], expected: list[str]) -> None:
    assert chosen(Model(), tmp_path / "r", layers) == expected


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(["[a]"], ["[a]"]), (["*"], ["*"]), (["?"], ["a", "*"]), (["*", "[[]*"], ["[a]", "*"])],
)
def test_what_is_a_name_means_it_alone(
    tmp_path: Path, layers: list[str], expected: list[str]
) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("[a]", "a", "*")})
    assert set(chosen(model, tmp_path / "r", layers)) == set(expected)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["nope"], "'nope' matches nothing.*blocks.0.0"),
        (["conv"], "'conv' matches only unsupported modules"),
        (["blocks.0.0", "nope*"], "'nope\\*' matches nothing"),
        (["normed"], "parametrised"),
        (["other.out_proj"], "MultiheadAttention multiplies by its weight without calling it"),
        (["other"], "has a forward of its own"),
    ],
)
def test_what_cannot_be_recorded(tmp_path: Path, layers: list[str], message: str) -> None:
    with pytest.raises(LayerSelectionError, match=message):
        chosen(Model(), tmp_path / "r", layers)
    assert not (tmp_path / "r").exists()


def test_only_what_this_optimizer_holds(tmp_path: Path) -> None:
    model = nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model["critic"].parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "a"):
        pass
    assert list(Recording.open(tmp_path / "a").manifest.layers) == ["critic"]
    with pytest.raises(LayerSelectionError, match="not among the optimizer's parameters"):
        Recorder(model, optimizer, tmp_path / "b", layers=["generator"])


def test_a_model_without_linear_layers(tmp_path: Path) -> None:
    model = nn.ConvTranspose2d(1, 1, 1)
    with pytest.raises(LayerSelectionError, match=r"has no .* or Linear or"):
        Recorder(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "r")


def test_two_optimizers_two_recorders(tmp_path: Path) -> None:
    """A GAN's loop: each network is recorded at its own optimizer's steps."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 1)})
    optimizers = {n: torch.optim.SGD(m.parameters(), lr=0.1) for n, m in model.items()}
    with (
        Recorder(model, optimizers["generator"], tmp_path / "generator"),
        Recorder(model, optimizers["critic"], tmp_path / "critic"),
    ):
        for _ in range(3):
            optimizers["critic"].zero_grad()
            model["critic"](model["generator"](torch.randn(4, 2)).detach()).sum().backward()
            optimizers["critic"].step()
            optimizers["generator"].zero_grad()
            model["critic"](model["generator"](torch.randn(5, 2))).sum().backward()
            optimizers["generator"].step()
    for name, rows in (("generator", 5), ("critic", 4)):
        recording = Recording.open(tmp_path / name)
        assert [record.rows for record in recording.passes(name)] == [rows] * 3
        assert recording.marks == {name: []}


def test_a_path_that_exists(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ExistsError, match="never overwrites"):
        Recorder(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    assert not model._forward_hooks


def test_options_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="compression"):
        Recorder(model, optimizer, tmp_path / "r", compression=9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Optimizer"):
        Recorder(model, model.parameters(), tmp_path / "r")  # type: ignore[arg-type]


def test_a_compiled_models_layers_keep_their_names(tmp_path: Path) -> None:
    model = torch.compile(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    assert chosen(model, tmp_path / "r", None) == ["0", "2"]
    assert chosen(model, tmp_path / "s", ["2"]) == ["2"]


def test_a_tied_layer_is_told_the_other_owner_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(LayerSelectionError, match=r"'0': tied: its weight is also 1.weight;"):
        chosen(model, tmp_path / "r", None)


def test_complex_layers_are_left_out_or_refused(tmp_path: Path) -> None:
    """Recorded as real numbers, their imaginary parts would be lost without a word."""
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 4))
    assert chosen(model, tmp_path / "r", None) == ["1"]
    with pytest.raises(LayerSelectionError, match=r"'0' cannot be recorded: .*complex64"):
        chosen(model, tmp_path / "s", ["0"])


def test_empty_layers_are_left_out_or_refused(tmp_path: Path) -> None:
    """torch allows them, with a warning when it fills their weights."""
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 0), nn.Linear(0, 2))
    assert chosen(model, tmp_path / "r", None) == ["0"]
    with pytest.raises(LayerSelectionError, match=r"its weight is empty, \[0, 2\]"):
        chosen(model, tmp_path / "s", ["1"])
