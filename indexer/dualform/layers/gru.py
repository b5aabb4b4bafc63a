"""A GRU whose products can be recorded: `nn.GRU` runs fused kernels, which no hook sees into.

It needs no kind of its own: its two products are `nn.Linear`, and two layers. They can't be one, as
an LSTM's are: the reset gate stands between h's product and the candidate, so the two have
different values for the same gate, and no row has one value for both.
"""

from __future__ import annotations

import torch
from torch import nn

from dualform.layers.recurrent import check_input, check_single, give_weights, start, take_weights


class GRU(nn.Module):
    """One GRU layer over [batch, time, input_size], equal to `nn.GRU` within float32 rounding.

    Recorded as two layers of kind "linear": `<name>.ih`, whose key is x_t, a row per example and
    time step, and `<name>.hh`, whose key is h_{t-1}, a pass with a row per example for each time
    step. Their units are the gates r and z and the candidate n, hidden_size each.

    Args:
        input_size: Length of x_t.
        hidden_size: Length of h_t.
        bias: Whether both products have the biases of `nn.GRU`.

    Attributes:
        ih: The product with x_t.
        hh: The product with h_{t-1}.

    Example:
        >>> gru = GRU.from_torch(nn.GRU(64, 128, batch_first=True))
        >>> output, h = gru(torch.zeros(2, 10, 64))
    """

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.ih = nn.Linear(input_size, 3 * hidden_size, bias)
        self.hh = nn.Linear(hidden_size, 3 * hidden_size, bias)
        start(self, hidden_size)

    def forward(
        self, x: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run over all time steps.

        Args:
            x: [batch, time, input_size].
            state: h before the first step, [batch, hidden_size]; None for zeros.

        Returns:
            h after every step, [batch, time, hidden_size], and h after the last.

        Raises:
            ShapeError: `x` has another shape, or no time step; a ValueError.
        """
        check_input(x, self.input_size, "GRU")
        h = x.new_zeros(len(x), self.hidden_size) if state is None else state
        steps = []
        for from_x in self.ih(x).unbind(1):
            r_x, z_x, n_x = from_x.chunk(3, 1)
            r_h, z_h, n_h = self.hh(h).chunk(3, 1)
            z = torch.sigmoid(z_x + z_h)
            h = (1 - z) * torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h) + z * h
            steps.append(h)
        return torch.stack(steps, 1), h

    @classmethod
    def from_torch(cls, gru: nn.GRU) -> GRU:
        """The same layer with the weights of an `nn.GRU`, copied.

        Raises:
            UnsupportedModuleError: It has several layers, two directions, dropout, or takes
                [time, batch]; a ValueError.
        """
        check_single(gru, "GRU")
        copied = cls(gru.input_size, gru.hidden_size, gru.bias).to(next(gru.parameters()))
        take_weights(copied, gru)
        return copied

    def to_torch(self) -> nn.GRU:
        """An `nn.GRU` (batch_first) with the same weights, copied."""
        biased = self.ih.bias is not None
        gru = nn.GRU(self.input_size, self.hidden_size, bias=biased, batch_first=True)
        gru = gru.to(self.ih.weight)
        give_weights(self, gru)
        return gru
