"""Did the weights move as the ledger says? A sample of elements.

Between two steps weights stand still, so a sample has to be bit for bit what the last step left.
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
from dualform.record.copies import NONE, Copies
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


class Sample:
    """Some of a parameter's elements, drawn once: all different, and all of a small parameter.

    Args:
        random: The recorder's own generator.
        parameter: Whose.
        copies: Bring them from a device.
    """

    def __init__(
        self, random: np.random.Generator, parameter: torch.Tensor, copies: Copies = NONE
    ) -> None:
        self._copies = copies
        numel = parameter.numel()
        if numel > SAMPLE:
            self._elements = random.choice(numel, SAMPLE, replace=False, shuffle=False)
        else:
            self._elements = np.resize(np.arange(numel), SAMPLE)
        self._at: dict[torch.device, torch.Tensor] = {}
        self._left: np.ndarray | torch.Tensor | None = None
        self._now: tuple[torch.Tensor, int] | None = None

    def copy(self, tensor: torch.Tensor) -> np.ndarray | torch.Tensor:
        """The elements, [SAMPLE], where the tensor lies: nothing waits for a device."""
        sent = self._copies.sending and self._copies.takes(tensor)
        host = None if sent else host_array(tensor)
        if host is not None and host.flags.c_contiguous:
            taken: np.ndarray = host.reshape(-1)[self._elements]
            return taken
        return self.take(tensor)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same as a tensor."""
        device = tensor.device
        if device not in self._at:
            self._at[device] = torch.from_numpy(self._elements).to(device)
        return torch.take(tensor.detach(), self._at[device])

    def leave(self, parameter: torch.Tensor) -> None:
        """A step has run: this is what it left."""
        self._left = left = self.copy(parameter)
        if isinstance(left, torch.Tensor):
            self._copies.look_ahead(left)

    def look_ahead(self, parameter: torch.Tensor) -> None:
        """It is about to be asked whether the parameter stood still."""
        if self._left is not None and self._copies.takes(parameter):
            self._now = self.take(parameter), parameter._version
            self._copies.look_ahead(self._now[0])

    def stood_still(self, parameter: torch.Tensor) -> bool:
        """Whether the elements are, bit for bit, what the last step left; True before the first."""
        left = self._left
        if left is None:
            return True
        ahead, self._now = self._now, None
        seen = ahead is not None and ahead[1] == parameter._version
        now = ahead[0] if seen and ahead is not None else self.copy(parameter)
        if isinstance(left, np.ndarray) and isinstance(now, np.ndarray):
            return left.tobytes() == now.tobytes()
        left, now = (self._copies.read(torch.as_tensor(x)) for x in (left, now))
        return left.tobytes() == now.tobytes()


class SampledElements:
    """Predicts the sampled elements of all parameters of an optimizer.

    Args:
        family: The optimizer's, elementwise.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self._probes = 0
        self._waiting: list[_Entry] = []
        self._state: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, torch.Tensor] = {}
        self._missing: list[set[str]] = []

    def probe(self, sample: Sample) -> ElementProbe:
        """Follow one more parameter, at some of its elements."""
        number, self._probes = self._probes, self._probes + 1
        zeros = torch.from_numpy(np.zeros((self._probes, SAMPLE)))
        for name in ("weight", *self.family.buffers):
            self._state[name], self._sizes[name] = zeros.clone(), zeros.clone()
        self._missing.append(set())
        return ElementProbe(self, number, sample)

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
        sample: Its elements.

    Attributes:
        since: The step at which they were last looked at; -1 before the first time.
    """

    def __init__(self, sampled: SampledElements, number: int, sample: Sample) -> None:
        self.since = -1
        self._sampled = sampled
        self._number = number
        self._sample = sample

    def gradient(self, tensor: torch.Tensor) -> np.ndarray | torch.Tensor:
        """The gradient's elements, where it lies: nothing waits for a device."""
        return self._sample.copy(tensor)

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
        taken = {"weight": self._sample.take(parameter)}
        for name, buffer in buffers.items():
            if buffer.shape == parameter.shape:
                taken[name] = self._sample.take(buffer)
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
