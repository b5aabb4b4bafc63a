"""Random training runs: networks, optimizer settings and loops as people write them.

Nothing here knows of dualform, but for a call-back before every pass: weights after every step and
the factors of gradients are the loop's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

EXAMPLES, CLASSES, BATCH = 24, 3, 4

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "relu_": torch.relu_,
    "leaky_relu_": lambda x: nn.functional.leaky_relu(x, 0.3, inplace=True),
    "add_": lambda x: x.add_(0.25),
}

_EVENTS = ("nothing",) * 8 + (
    "settings",
    "momentum off",
    "momentum on",
    "discarded",
    "frozen",
    "frozen weight",
    "without a layer",
    "without a weight",
    "without a bias",
    "zero",
)


@dataclass(frozen=True)
class Settings:
    """A parameter group's, as torch.optim.SGD names them."""

    lr: float
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float
    maximize: bool


@dataclass(frozen=True)
class Step:
    """What the loop does at one step.

    Attributes:
        batches: Examples of each backward pass; several accumulate.
        settings: Of the weights' and of the biases' group.
        event: "discarded": another pass, whose gradients are zeroed. "frozen": the layer does not
            require gradients; "frozen weight": its weight does not. "without a layer", "without a
            weight", "without a bias": its gradient is set to None.
            "zero": all gradients are set to zero. Else nothing.
        layer: The event's.
    """

    batches: tuple[tuple[int, ...], ...]
    settings: tuple[Settings, Settings]
    event: str
    layer: int


@dataclass(frozen=True)
class Scenario:
    """A network and its training.

    Attributes:
        widths: Of the input, the hidden layers and the output.
        bias: Per layer.
        activation: Between layers, a name in ACTIVATIONS.
        twice: A square layer that each pass runs twice; or None.
        time: Length of the second axis of the input; None for 2-D inputs.
        loaded: Momentum buffers are there before the first step.
        clip: Largest norm of the whole gradient; None for no clipping.
        loss_scale: The loss is multiplied by it, the gradients divided by it.
    """

    seed: int
    widths: tuple[int, ...]
    bias: tuple[bool, ...]
    activation: str
    twice: int | None
    time: int | None
    loaded: bool
    clip: float | None
    loss_scale: float
    steps: tuple[Step, ...]


class Network(nn.Module):
    """Linear layers with an activation between them."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        pairs = zip(scenario.widths, scenario.widths[1:], scenario.bias, strict=False)
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=bias) for i, o, bias in pairs)
        self.activation = ACTIVATIONS[scenario.activation]
        self.twice = scenario.twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number:
                x = self.activation(x)
            x = layer(x)
            if number == self.twice:
                x = layer(self.activation(x))
        return x


@st.composite
def settings(draw: st.DrawFn, lr: Sequence[float] = (0.003, 0.03, 0.1)) -> Settings:
    """Any settings that torch.optim.SGD allows, of sizes that training uses."""
    momentum = draw(st.sampled_from([0.0, 0.0, 0.3, 0.9, 0.99]))
    nesterov = momentum > 0 and draw(st.booleans())
    dampening = 0.0 if nesterov else draw(st.sampled_from([0.0, 0.1, 0.7, 1.0]))
    decay = draw(st.sampled_from([0.0, 0.0, 1e-4, 0.05]))
    return Settings(
        draw(st.sampled_from(lr)), momentum, dampening, nesterov, decay, draw(st.booleans())
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Any network and loop that this module can run."""
    depth = draw(st.integers(1, 3))
    hidden = draw(st.integers(2, 7))
    twice = draw(st.sampled_from([None, *range(depth - 1)]))
    widths = [draw(st.integers(2, 7)), *[hidden] * (depth - 1), CLASSES]
    if twice is not None:
        widths[twice] = widths[twice + 1]
    seed = draw(st.integers(0, 2**31))
    random = np.random.default_rng(seed)
    of_groups = draw(settings()), draw(settings())
    schedule = draw(st.sampled_from([1.0, 0.95, 1.02]))
    accumulate = draw(st.sampled_from([1, 1, 2, 3]))
    count = draw(st.integers(1, 30))
    events = draw(st.lists(st.sampled_from(_EVENTS), min_size=count, max_size=count))
    events[0] = "nothing"  # every layer has rows
    steps = []
    for event in events:
        if event == "settings":
            of_groups = draw(settings()), draw(settings())
        elif event == "momentum off":
            of_groups = _each(of_groups, momentum=0.0, nesterov=False)
        elif event == "momentum on":
            of_groups = _each(of_groups, momentum=0.8)
        of_groups = _each(of_groups, schedule)
        batches = random.integers(0, EXAMPLES, (accumulate, BATCH)).tolist()
        steps.append(
            Step(tuple(map(tuple, batches)), of_groups, event, draw(st.integers(0, depth - 1)))
        )
    return Scenario(
        seed,
        tuple(widths),
        tuple(draw(st.booleans()) for _ in range(depth)),
        draw(st.sampled_from(sorted(ACTIVATIONS))),
        twice,
        draw(st.sampled_from([None, None, 1, 3])),
        draw(st.booleans()),
        draw(st.sampled_from([None, 0.05, 0.5])),
        draw(st.sampled_from([1.0, 1.0, 1000.0])),
        tuple(steps),
    )


class Run:
    """A scenario, ready to train.

    Attributes:
        model, optimizer: Weights in the first parameter group, biases, if any, in the second.
        labels: int64 [EXAMPLES].
        initial_momentum: Copies of the loaded buffers by name; empty without.
        states: Copies of all parameters after 0, 1, ... steps, float32 by name.
        buffers: Copies of their momentum buffers, likewise, as far as there are any.
        factors: Per step, what accumulated gradients were multiplied with, float64.
        took_part: Per step, the parameters that had a gradient.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        torch.manual_seed(scenario.seed)
        self.model = Network(scenario)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.5)  # training soon outweighs what was there before
        named = dict(self.model.named_parameters())
        kinds = [[p for n, p in named.items() if n.endswith(kind)] for kind in ("weight", "bias")]
        self.optimizer = torch.optim.SGD(
            [{"params": parameters} for parameters in kinds if parameters], lr=0.1
        )
        self.initial_momentum: dict[str, torch.Tensor] = {}
        if scenario.loaded:
            for name, parameter in named.items():
                buffer = 0.1 * torch.randn_like(parameter)
                self.initial_momentum[name] = buffer.clone()
                self.optimizer.state[parameter]["momentum_buffer"] = buffer
        middle = () if scenario.time is None else (scenario.time,)
        self.inputs = torch.randn(EXAMPLES, *middle, scenario.widths[0]) + 0.5
        self.labels = torch.randint(0, CLASSES, (EXAMPLES,))
        self.states = [self._state()]
        self.buffers = [self._buffers()]
        self.factors: list[float] = []
        self.took_part: list[frozenset[str]] = []

    def train(self, before_pass: Callable[[int, torch.Tensor], None]) -> None:
        """Run the loop; `before_pass` is called with the step and the examples, int64 [batch]."""
        for number, step in enumerate(self.scenario.steps):
            layer = self.model.layers[step.layer]
            for group, each in zip(self.optimizer.param_groups, step.settings, strict=False):
                group.update(vars(each))
            layer.requires_grad_(step.event != "frozen")
            layer.weight.requires_grad_(step.event not in ("frozen", "frozen weight"))
            self.optimizer.zero_grad()
            if step.event == "discarded":
                before_pass(number, torch.tensor(step.batches[0]))
                self._backward(step.batches[0], 1)
                self.optimizer.zero_grad()
            for batch in step.batches:
                before_pass(number, torch.tensor(batch))
                self._backward(batch, len(step.batches))
            self.factors.append(self._scaled())
            if step.event == "without a layer":
                layer.zero_grad(set_to_none=True)
            elif step.event == "without a weight":
                layer.weight.grad = None
            elif step.event == "without a bias" and layer.bias is not None:
                layer.bias.grad = None
            elif step.event == "zero":
                self.optimizer.zero_grad(set_to_none=False)
            named = self.model.named_parameters()
            self.took_part.append(frozenset(n for n, p in named if p.grad is not None))
            self.optimizer.step()
            layer.requires_grad_(True)
            self.states.append(self._state())
            self.buffers.append(self._buffers())

    def _backward(self, batch: tuple[int, ...], of: int) -> None:
        examples = torch.tensor(batch)
        output = self.model(self.inputs[examples])
        labels = self.labels[examples]
        if self.scenario.time is not None:
            labels = labels[:, None].expand(output.shape[:-1])
        loss = nn.functional.cross_entropy(output.reshape(-1, CLASSES), labels.reshape(-1))
        if loss.requires_grad:
            (loss * self.scenario.loss_scale / of).backward()

    def _scaled(self) -> float:
        """Undo the loss's scale, then clip; the factor of both together."""
        factor = 1 / self.scenario.loss_scale
        parameters = list(self.model.parameters())
        if factor != 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if self.scenario.clip is not None:
            norm = float(nn.utils.clip_grad_norm_(parameters, self.scenario.clip))
            factor *= min(1.0, self.scenario.clip / (norm + 1e-6))
        return factor

    def _state(self) -> dict[str, np.ndarray]:
        return {name: p.detach().numpy().copy() for name, p in self.model.named_parameters()}

    def _buffers(self) -> dict[str, np.ndarray]:
        found_state = {n: self.optimizer.state[p] for n, p in self.model.named_parameters()}
        found = {name: state.get("momentum_buffer") for name, state in found_state.items()}
        return {n: buffer.numpy().copy() for n, buffer in found.items() if buffer is not None}


def _each(
    pair: tuple[Settings, Settings], schedule: float = 1.0, **changes: float
) -> tuple[Settings, Settings]:
    first, second = (replace(each, lr=each.lr * schedule, **changes) for each in pair)
    return first, second
