"""Did the weights move as the ledger says, where no one coefficient tells? A sample of elements.

Families whose transitions are elementwise are followed on a few elements of each parameter, drawn
by the recorder's own generator: their gradients are kept at every step, and now and then all
parameters are followed at once, in float64, from what they last were.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from dualform.optimizers import Family, moved
from dualform.record.buffers import host_array
from dualform.store.ledger import LedgerRow

SAMPLE = 64
"""Elements of a parameter that are followed."""

TOLERANCE = 1e-3
"""Largest difference from the prediction, relative to the way since the last look."""

_ROUNDING = 64 * 2.0**-23
_SMALLEST = 1e-37
"""Below it float32 loses digits, and in the end flushes to zero."""


class _Entry(NamedTuple):
    """One parameter's part in one step; the gradient's elements as the optimizer found them."""

    probe: int
    row: LedgerRow
    gradient: np.ndarray | torch.Tensor
    factor: float


class SampledElements:
    """Predicts the sampled elements of all parameters of an optimizer.

    Args:
        family: The optimizer's, elementwise.
        random: The recorder's own generator.
    """

    def __init__(self, family: Family, random: np.random.Generator) -> None:
        self.family = family
        self._random = random
        self._probes = 0
        self._waiting: list[_Entry] = []
        self._state: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, torch.Tensor] = {}
        self._missing: list[set[str]] = []

    def probe(self, parameter: torch.Tensor) -> ElementProbe:
        """Follow one more parameter."""
        number, self._probes = self._probes, self._probes + 1
        zeros = torch.from_numpy(np.zeros((self._probes, SAMPLE)))
        for name in ("weight", *self.family.buffers):
            self._state[name], self._sizes[name] = zeros.clone(), zeros.clone()
        self._missing.append(set())
        return ElementProbe(self, number, self._random.integers(0, parameter.numel(), SAMPLE))

    def wait(self, entry: _Entry) -> None:
        """A step has run: it is followed when somebody asks."""
        self._waiting.append(entry)

    def reset(self, number: int, real: Mapping[str, np.ndarray]) -> None:
        """Take what a parameter and its buffers are, without those that are not there."""
        for name, state in self._state.items():
            found = real.get(name)
            state[number] = 0.0 if found is None else torch.from_numpy(found)
            self._sizes[name][number] = 0.0 if name == "weight" else state[number].abs()
        self._missing[number] = self._state.keys() - real.keys()

    def agrees(self, number: int, real: Mapping[str, np.ndarray]) -> bool:
        """Whether a parameter and its buffers are as predicted, within float32's rounding."""
        for name, found in real.items():
            predicted, size = self._state[name][number].numpy(), self._sizes[name][number].numpy()
            largest = np.maximum(np.abs(found), np.abs(predicted))
            allowed = TOLERANCE * size + _ROUNDING * largest + _SMALLEST
            if not bool((np.abs(found - predicted) <= allowed).all()):
                return False
        return True

    def follow(self) -> None:
        """Take all steps that wait."""
        waiting, self._waiting = self._waiting, []
        gradients = _host(waiting)
        of_step = itertools.groupby(range(len(waiting)), lambda i: waiting[i].row.step)
        for _, entries_of_step in of_step:
            alike: dict[tuple[Any, bool], list[int]] = {}
            for i in entries_of_step:
                alike.setdefault((waiting[i].row.settings, waiting[i].row.first), []).append(i)
            for (settings, first), entries in alike.items():
                probes = [waiting[i].probe for i in entries]
                self._begin(settings, probes)
                self._take(settings, first, probes, torch.from_numpy(gradients[entries]))

    def _begin(self, settings: Any, probes: list[int]) -> None:
        """Buffers that are created by this step."""
        for probe in probes:
            if self._missing[probe]:
                fresh = self.family.fresh(settings)
                for name in self._missing[probe] & fresh.keys():
                    self._state[name][probe] = fresh[name]
                self._missing[probe] = set()

    def _take(self, settings: Any, first: bool, probes: list[int], gradient: torch.Tensor) -> None:
        every = probes == list(range(self._probes))
        which = torch.from_numpy(np.array(probes))
        whole = self._state if every else {n: t[which] for n, t in self._state.items()}
        sizes = self._sizes if every else {n: t[which] for n, t in self._sizes.items()}
        weight = whole["weight"]
        momentum = None if self.family.momentum is None else whole[self.family.momentum]
        before = weight.clone()
        transition = self.family.transition(settings, first, whole, gradient)
        moved(transition, weight, momentum, gradient)
        sizes["weight"].add_(before.sub_(weight).abs_())
        for name, tensor in whole.items():
            if name != "weight":
                torch.maximum(sizes[name], tensor.abs(), out=sizes[name])
        if not every:
            for name, tensor in whole.items():
                self._state[name][which] = tensor
                self._sizes[name][which] = sizes[name]


class ElementProbe:
    """One parameter's elements.

    Args:
        sampled: Where all are followed.
        number: Of this parameter there.
        elements: int64 [SAMPLE], places in the flattened parameter.

    Attributes:
        since: The step at which they were last looked at; -1 before the first time.
    """

    def __init__(self, sampled: SampledElements, number: int, elements: np.ndarray) -> None:
        self.since = -1
        self._sampled = sampled
        self._number = number
        self._elements = elements
        self._at: dict[torch.device, torch.Tensor] = {}

    def gradient(self, tensor: torch.Tensor) -> np.ndarray | torch.Tensor:
        """The gradient's elements, where it lies: nothing waits for a device."""
        host = host_array(tensor)
        if host is not None and host.flags.c_contiguous:
            taken: np.ndarray = host.reshape(-1)[self._elements]
            return taken
        return self._take(tensor)

    def follow(self, row: LedgerRow, gradient: np.ndarray | torch.Tensor, factor: float) -> None:
        """A step has run.

        Args:
            row: The parameter's in the ledger.
            gradient: As `gradient` gave it before the step.
            factor: What the step's kernel multiplied it by.
        """
        self._sampled.wait(_Entry(self._number, row, gradient, factor))

    def look(
        self, parameter: torch.Tensor, buffers: Mapping[str, torch.Tensor]
    ) -> dict[str, np.ndarray]:
        """The real elements, float64, of a parameter as "weight" and of its buffers."""
        taken = {"weight": self._take(parameter)}
        for name, buffer in buffers.items():
            if buffer.shape == parameter.shape:
                taken[name] = self._take(buffer)
        device = parameter.device
        together = (
            torch.stack([tensor.double().to(device) for tensor in taken.values()]).cpu().numpy()
        )
        return dict(zip(taken, together, strict=True))

    def agrees(self, real: Mapping[str, np.ndarray]) -> bool:
        """Whether the real elements are as predicted."""
        self._sampled.follow()
        return self.since < 0 or self._sampled.agrees(self._number, real)

    def reset(self, step: int, real: Mapping[str, np.ndarray]) -> None:
        """Take the real elements as they are."""
        self.since = step
        self._sampled.reset(self._number, real)

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        device = tensor.device
        if device not in self._at:
            self._at[device] = torch.from_numpy(self._elements).to(device)
        return torch.take(tensor.detach(), self._at[device])


def _host(entries: list[_Entry]) -> np.ndarray:
    """The entries' gradients, float64 [n, SAMPLE]; one transfer for each device."""
    found = np.empty((len(entries), SAMPLE))
    elsewhere: dict[torch.device, list[int]] = {}
    for i, entry in enumerate(entries):
        if isinstance(entry.gradient, np.ndarray):
            found[i] = entry.gradient
        else:
            elsewhere.setdefault(entry.gradient.device, []).append(i)
    for places in elsewhere.values():
        tensors = [entries[i].gradient for i in places]
        found[places] = (
            torch.stack([t for t in tensors if isinstance(t, torch.Tensor)]).double().cpu()
        )
    for i, entry in enumerate(entries):
        if entry.factor != 1.0:
            found[i] *= entry.factor
    return found
