"""An LSTM whose gates can be recorded: `nn.LSTM` runs fused kernels, which no hook sees into."""

from __future__ import annotations

import torch
from torch import nn

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
        for parameter in self.parameters():  # as nn.LSTM starts
            nn.init.uniform_(parameter, -(hidden_size**-0.5), hidden_size**-0.5)

    def forward(self, x: torch.Tensor, state: State | None = None) -> tuple[torch.Tensor, State]:
        """Run over all time steps.

        Args:
            x: [batch, time, input_size].
            state: h and c before the first step, [batch, hidden_size] each; None for zeros.

        Returns:
            h after every step, [batch, time, hidden_size], and (h, c) after the last.

        Raises:
            ValueError: `x` has another shape, or no time step.
        """
        if x.dim() != 3 or x.shape[2] != self.input_size or x.shape[1] == 0:
            raise ValueError(
                f"x has shape {list(x.shape)}; LSTM takes [batch, time, {self.input_size}] with at "
                "least one time step (as nn.LSTM with batch_first=True)"
            )
        h, c = state if state is not None else (x.new_zeros(len(x), self.hidden_size),) * 2
        steps = []
        for from_x in self.ih(x).unbind(1):
            i, f, g, o = (from_x + self.hh(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
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
            ValueError: It has several layers, two directions, a projection, dropout, or takes
                [time, batch].
        """
        if lstm.num_layers != 1 or lstm.bidirectional or lstm.proj_size or lstm.dropout:
            raise ValueError(
                f"{lstm} can't be taken over as a whole: only one layer, one direction, without "
                "projection and dropout; stack several LSTM, with nn.Dropout between them"
            )
        if not lstm.batch_first:
            raise ValueError(
                "this nn.LSTM takes [time, batch, input]; make it with batch_first=True, and "
                "transpose what it is given and gives"
            )
        own = cls(lstm.input_size, lstm.hidden_size, lstm.bias).to(next(lstm.parameters()))
        with torch.no_grad():
            for part, suffix in ((own.ih, "ih_l0"), (own.hh, "hh_l0")):
                part.weight.copy_(getattr(lstm, f"weight_{suffix}"))
                if part.bias is not None:
                    part.bias.copy_(getattr(lstm, f"bias_{suffix}"))
        return own

    def to_torch(self) -> nn.LSTM:
        """An `nn.LSTM` (batch_first) with the same weights, copied."""
        biased = self.ih.bias is not None
        lstm = nn.LSTM(self.input_size, self.hidden_size, bias=biased, batch_first=True)
        lstm = lstm.to(self.ih.weight)
        with torch.no_grad():
            for part, suffix in ((self.ih, "ih_l0"), (self.hh, "hh_l0")):
                getattr(lstm, f"weight_{suffix}").copy_(part.weight)
                if part.bias is not None:
                    getattr(lstm, f"bias_{suffix}").copy_(part.bias)
        return lstm
