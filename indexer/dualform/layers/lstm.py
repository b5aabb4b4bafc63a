"""An LSTM whose gates can be recorded: `nn.LSTM` runs fused kernels, which no hook sees into.

`LSTM` is the module, `LSTMKind` how it is recorded: its two products as one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from dualform.layers.base import (
    FillKeys,
    Forward,
    JoinedKind,
    PassRows,
    Product,
)
from dualform.layers.recurrent import check_input, check_single, give_weights, start, take_weights

State = tuple[torch.Tensor, torch.Tensor]


class LSTM(nn.Module):
    """One LSTM layer over [batch, time, input_size], equal to `nn.LSTM` within float32 rounding.

    Recorded as one layer of kind "lstm". Its key is [h_{t-1}; x_t], its value the negative gradient
    at the 4 hidden_size pre-activations of the gates i, f, g, o. A row per example and time step.

    Args:
        input_size: Length of x_t.
        hidden_size: Length of h_t and c_t.
        bias: Whether the gates have the two biases of `nn.LSTM`, which get the same gradient.

    Attributes:
        ih: The gates' product with x_t.
        hh: The gates' product with h_{t-1}.

    Example:
        >>> lstm = LSTM.from_torch(nn.LSTM(64, 128, batch_first=True))
        >>> output, (h, c) = lstm(torch.zeros(2, 10, 64))
    """

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.ih = nn.Linear(input_size, 4 * hidden_size, bias)
        self.hh = nn.Linear(hidden_size, 4 * hidden_size, bias)
        start(self, hidden_size)

    def forward(self, x: torch.Tensor, state: State | None = None) -> tuple[torch.Tensor, State]:
        """Run over all time steps.

        Args:
            x: [batch, time, input_size].
            state: h and c before the first step, [batch, hidden_size] each; None for zeros.

        Returns:
            h after every step, [batch, time, hidden_size], and (h, c) after the last.

        Raises:
            ShapeError: `x` has another shape, or no time step; a ValueError.
        """
        check_input(x, self.input_size, "LSTM")
        h, c = state if state is not None else (x.new_zeros(len(x), self.hidden_size),) * 2
        steps = []
        for from_x in self.ih(x).unbind(1):
            h, c = _cell(from_x + self.hh(h), c)
            steps.append(h)
        # Stacked, so that every step has a gradient, if only zeros, as soon as one has.
        output = torch.stack(steps, 1)
        return output, (output[:, -1], c)

    @torch.no_grad()
    def gate_keys(self, x: torch.Tensor, state: State | None = None) -> torch.Tensor:
        """What the gates see: the keys, or queries, [h_{t-1}; x_t].

        Args:
            x: [batch, time, input_size].
            state: As for the forward pass.

        Returns:
            [batch, time, hidden_size + input_size].
        """
        return self.joined_keys(x, state, output=self(x, state)[0])

    def joined_keys(
        self, x: torch.Tensor, state: State | None = None, *, output: torch.Tensor
    ) -> torch.Tensor:
        """The same, of a forward pass that gave this output [batch, time, hidden_size]."""
        first = x.new_zeros(len(x), self.hidden_size) if state is None else state[0]
        return torch.cat([torch.cat([first[:, None], output[:, :-1]], 1), x], 2)

    @classmethod
    def from_torch(cls, lstm: nn.LSTM) -> LSTM:
        """The same layer with the weights of an `nn.LSTM`, copied.

        Raises:
            UnsupportedModuleError: It has several layers, two directions, a projection, dropout, or
                takes [time, batch]; a ValueError.
        """
        check_single(lstm, "LSTM")
        copied = cls(lstm.input_size, lstm.hidden_size, lstm.bias).to(next(lstm.parameters()))
        take_weights(copied, lstm)
        return copied

    def to_torch(self) -> nn.LSTM:
        """An `nn.LSTM` (batch_first) with the same weights, copied."""
        biased = self.ih.bias is not None
        lstm = nn.LSTM(self.input_size, self.hidden_size, bias=biased, batch_first=True)
        lstm = lstm.to(self.ih.weight)
        give_weights(self, lstm)
        return lstm


def _cell(gates: torch.Tensor, c: torch.Tensor) -> State:
    """h and c after a step, from the pre-activations [batch, 4 hidden_size] of i, f, g, o."""
    i, f, g, o = gates.chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


class LSTMKind(JoinedKind):
    """`LSTM`: its products with h and with x as one layer. Key [h; x], W = [W_hh, W_ih]."""

    kind = "lstm"
    example = "dualform.record.LSTM"
    parts = ("hh", "ih")

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return isinstance(module, LSTM)

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        for name in ("LSTM", "GRU"):
            if isinstance(module, getattr(nn, name)):
                return (
                    f"nn.{name} runs a fused kernel that no hook sees into; put dualform.record."
                    f"{name}.from_torch({name.lower()}) in its place, which gives the same output"
                )
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            return (
                f"{type(module).__name__} runs a fused kernel that no hook sees into; "
                "dualform.record.LSTM and dualform.record.GRU are recorded"
            )
        return None

    def shape(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, LSTM)
        return module.hidden_size + module.input_size, 4 * module.hidden_size

    def matrix(self, module: nn.Module) -> torch.Tensor:
        assert isinstance(module, LSTM)
        return torch.cat([module.hh.weight, module.ih.weight], 1)

    def bias(self, module: nn.Module) -> torch.Tensor | None:
        assert isinstance(module, LSTM)
        return None if module.ih.bias is None else module.hh.bias + module.ih.bias

    def queries(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> torch.Tensor:
        assert isinstance(module, LSTM)
        return module.joined_keys(*args, **kwargs, output=output[0])

    def dual_forward(self, module: nn.Module, product: Product) -> Forward:
        """One product per time step: h of the step before is part of the query."""
        assert isinstance(module, LSTM)

        def forward(x: torch.Tensor, state: State | None = None) -> tuple[torch.Tensor, State]:
            check_input(x, module.input_size, "LSTM")
            x = x.detach()
            h, c = state if state is not None else (x.new_zeros(len(x), module.hidden_size),) * 2
            steps = []
            for at in x.unbind(1):
                h, c = _cell(product(torch.cat([h, at], 1)), c)
                steps.append(h)
            return torch.stack(steps, 1), (h, c)

        return forward

    def join(self, passes: Sequence[Sequence[PassRows]]) -> list[tuple[PassRows, FillKeys]] | None:
        """Each call's product with x, and its products with h, one per time step."""
        products, calls = passes
        numbers = [item.number for item in products]
        starts = [*np.searchsorted(numbers, [call.number for call in calls]), len(products)]
        if starts[0] != 0:
            return None
        whole: list[tuple[PassRows, FillKeys]] = []
        for i, call in enumerate(calls):
            steps = products[starts[i] : starts[i + 1]]
            if len(call.leading) != 2:
                return None
            if [item.leading for item in steps] != [call.leading[:1]] * call.leading[1]:
                return None
            if steps:
                whole.append((call, _filler(call, steps)))
        return whole


def _filler(call: PassRows, steps: Sequence[PassRows]) -> FillKeys:
    """Keys [h; x] of one call, a row per example and time step."""

    def fill(keys: np.ndarray) -> None:
        x = call.keys
        hidden = keys.shape[1] - x.shape[1]
        keys[:, hidden:] = x
        by_time = keys.reshape(*call.leading, -1)
        for t, item in enumerate(steps):
            by_time[:, t, :hidden] = item.keys

    return fill
