"""The number that is attributed: of logits, of sequences, of what Hugging Face's models give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dualform.client import FailedPreconditionError, InvalidArgumentError
from dualform.client._gradients import gradients_of
from dualform.client._targets import target_of
from dualform.layers import layers_of

LOGITS = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)


@pytest.mark.parametrize(
    "outputs", [LOGITS, {"logits": LOGITS}, SimpleNamespace(logits=LOGITS, loss=None)]
)
def test_a_tokens_logits(outputs: Any) -> None:
    found = target_of(outputs, 2, None, [-1, 0, 2])
    assert torch.equal(found, torch.stack([LOGITS[0, 3, 2], LOGITS[1, 0, 2], LOGITS[2, 2, 2]]))
    margin = target_of(outputs, "margin", [4, 0, 1], -1)
    for number, label in enumerate([4, 0, 1]):
        others = torch.cat([LOGITS[number, -1, :label], LOGITS[number, -1, label + 1 :]])
        expected = LOGITS[number, -1, label] - others.logsumexp(0)
        torch.testing.assert_close(margin[number], expected)


def test_a_sequences_loss_adds_up_its_labelled_tokens() -> None:
    labels = torch.tensor([[0, 1, 2, 3], [-100, -100, 4, 4], [-100, 0, -100, 1]])
    found = target_of(LOGITS, "loss", labels, None)
    for number in range(3):
        terms = [
            F.cross_entropy(LOGITS[number, place], labels[number, place])
            for place in range(4)
            if labels[number, place] >= 0
        ]
        torch.testing.assert_close(found[number], torch.stack(terms).sum())
    last = target_of(LOGITS, "loss", labels[:, -1], -1)
    torch.testing.assert_close(
        last, F.cross_entropy(LOGITS[:, -1], labels[:, -1], reduction="none")
    )


def test_one_number_for_each_input() -> None:
    assert torch.equal(target_of(LOGITS[:, 0, 0], 0, None, None), LOGITS[:, 0, 0])
    with pytest.raises(InvalidArgumentError, match="pass target=0"):
        target_of(LOGITS[:, 0, 0], "margin", None, None)


@pytest.mark.parametrize(
    ("ask", "field", "says"),
    [
        ((LOGITS, 1, None, None), "token", "a row for each of 4 tokens"),
        ((LOGITS, 1, None, 4), "token", "-4 to 3"),
        ((LOGITS, 1, None, "last"), "token", "no integer"),
        ((LOGITS, "loss", [0, 1, 2], None), "labels", r"\[n, tokens\] is needed"),
        ((LOGITS, "loss", [[0, 1, 2, 99]] * 3, None), "labels", "holds 99; .* or -100"),
        ((LOGITS, "loss", [[0, 1, 2, -5]] * 3, None), "labels", "holds -5; .* or -100"),
        ((LOGITS[None], 1, None, None), "target", r"the model gives \[1, 3, 4, 5\]"),
        (({"hidden": LOGITS}, 1, None, None), "target", "the model gives NoneType"),
        ((LOGITS, lambda found: found[:, 0, 0], [1], None), "labels", "knows them itself"),
        ((LOGITS, lambda found: 3.0, None, None), "target", r"gave 3\.0"),
    ],
)
def test_what_does_not_fit(ask: tuple[Any, Any, Any, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        target_of(*ask)
    assert caught.value.field == field


class _Once(torch.autograd.Function):
    """Can be differentiated once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class _Scaled(nn.Module):
    """A layer, and parameters beside it; called with two named arguments."""

    def __init__(self, once: bool) -> None:
        super().__init__()
        self.once = once
        self.layer = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        found = self.layer(x) * self.scale.exp() + shift
        return _Once.apply(found) if self.once else found * 2  # type: ignore[no-any-return]


@pytest.mark.parametrize("once", [False, True])
def test_parameters_in_no_layer(once: bool) -> None:
    """Also where something in the model can't be differentiated twice."""
    torch.manual_seed(0)
    model, x, shift = _Scaled(once), torch.randn(5, 4), torch.randn(5, 3)

    def number(outputs: torch.Tensor) -> torch.Tensor:
        return target_of(outputs, "margin", None, None)

    found = gradients_of(model, {"x": x, "shift": shift}, number, layers_of(model))
    again = gradients_of(model, (x, shift), number, layers_of(model))
    for place in range(5):
        value = number(model(x[[place]], shift[[place]]))[0]
        (gradient,) = torch.autograd.grad(value, [model.scale])
        inner = float((gradient * model.scale.detach()).sum())
        assert found.unrecorded[place] == again.unrecorded[place]
        assert found.unrecorded[place] == pytest.approx(inner, rel=1e-5)
    (layer,) = found.layers
    assert layer.inputs is None
    torch.testing.assert_close(torch.from_numpy(layer.queries), x)


def test_a_model_in_float64_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3)).double()
    with pytest.raises(FailedPreconditionError, match=r"model\.float\(\)"):
        gradients_of(model, torch.randn(2, 4).double(), lambda y: y[:, 0], layers_of(model))
