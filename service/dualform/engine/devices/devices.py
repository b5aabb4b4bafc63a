"""The devices of a process: found, tested, filled in the background with what is asked for most."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dualform.engine.context import own_settings
from dualform.engine.devices import gpu, self_test
from dualform.engine.devices.device import Device, OnDeviceError
from dualform.engine.devices.held import Held, load
from dualform.engine.devices.place import LOG, MOST_SCRATCH, Paces, Place
from dualform.engine.devices.placement import Lot, Wish, placed
from dualform.engine.devices.work import Block
from dualform.engine.errors import CancelledError, ResourceExhaustedError
from dualform.engine.memory.layer import Layer
from dualform.questions.placement import DEVICE_WORDS, GPU_MEMORY, device_names, gpu_memory
from dualform.store.encoding import FLOAT32

_FORGETS = 0.98
_WORTH = 2.0
"""A layer takes another's place once it is used so many times as much, byte for byte."""


@dataclass(frozen=True)
class Residence:
    """What of a layer lies on a device.

    Attributes:
        device: Its name.
        rows: How many of the layer's.
        key_bytes, value_bytes: What they take there.
    """

    device: str
    rows: int
    key_bytes: int
    value_bytes: int


@dataclass(frozen=True)
class DeviceState:
    """A device as it is now.

    Attributes:
        name: Such as "cuda:0".
        title: What it is.
        memory: Bytes in all.
        budget: Bytes that rows may take.
        used: Bytes that they do take.
        refused: Why it is not used; None where it is.
    """

    name: str
    title: str
    memory: int
    budget: int
    used: int
    refused: str | None


@dataclass
class _Known:
    """A layer that questions are asked about."""

    layer: Layer
    title: str
    held: list[Held] = field(default_factory=list)
    use: float = 0.0
    spoiled: bool = False

    def __post_init__(self) -> None:
        """What of it can be held: shards whose keys are all finite."""
        layer = self.layer
        keys, values = FLOAT32.row_bytes(layer.d_in), FLOAT32.row_bytes(layer.d_out)
        rows = [shard.rows if shard.finite.all() else 0 for shard in layer.shards]
        self._keys = [keys * n for n in rows]
        self._values = [values * n if layer.values else 0 for n in rows]

    def wish(self, places: Sequence[Place]) -> Wish:
        held = {places.index(each.place): each.shards for each in self.held}
        if self.spoiled:
            return Wish([0] * len(self._keys), [0] * len(self._keys), self.use, held)
        return Wish(self._keys, self._values, self.use, held)

    def lacks(self, place: Place, lot: Lot, values: bool) -> bool:
        """Whether its keys are to be brought there, or its values, once its keys are there."""
        held = next((each for each in self.held if each.place is place), None)
        if not values or held is None:
            return not values and held is None
        return lot.values and held.block.values is None


class Devices:
    """Where rows may lie beside the host's memory. Thread-safe; one for all indexes of a process.

    Args:
        devices: Such as `Gpu`s; each is tested and measured first, and refused where it fails.
        memory: A share of each one's memory, or bytes, that rows and what is computed may take.
        paces: How fast they are, where that is known.
        why: Why there is none.

    Attributes:
        places: Those that passed.
        cpu_pace: How many times as long as the planner's model says the CPU takes, measured here;
            1 where there is nothing to compare with.
    """

    def __init__(
        self,
        devices: Sequence[Device] = (),
        memory: float | int = GPU_MEMORY,
        paces: Paces | None = None,
        why: str = "device is cpu",
    ) -> None:
        self.why_none = why
        self._refused: list[DeviceState] = []
        self.places: list[Place] = []
        for device in devices:
            self._add(device, memory, paces)
        self.cpu_pace = self_test.cpu_pace() if self.places else 1.0
        self._known: dict[int, _Known] = {}
        self._filled: dict[Place, int] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._dirty = self._closed = False
        self._worker: threading.Thread | None = None

    @classmethod
    @own_settings()
    def find(cls, device: Any = "auto", memory: Any = GPU_MEMORY) -> Devices:
        """The devices of that name.

        Args:
            device: "auto", "cpu", "cuda", "cuda:1" or a list of the last kind. "auto" takes all
                GPUs that there are, and the CPU alone where there is none.
            memory: As `gpu_memory` reads it.

        Raises:
            ValueError: No such device, or it is not there.
        """
        names, share = device_names(device), gpu_memory(memory)
        if names == "cpu":
            return cls()
        there = gpu.gpus()
        if names == "auto":
            why = gpu.without_faiss(there - 1) if there else "torch finds no GPU"
            if why is not None:
                LOG.log(
                    logging.WARNING if there else logging.INFO,
                    "no GPU is used, the CPU answers: %s",
                    why,
                )
                return cls(why=why)
            names = tuple(f"cuda:{number}" for number in range(there))
        for name in names:
            if int(name.partition(":")[2]) >= there:
                raise ValueError(
                    f"device is {name}, but torch finds {there or 'no'} GPU{'s' * (there > 1)}; "
                    f"allowed are {DEVICE_WORDS}"
                )
        numbers = [int(name.partition(":")[2]) for name in names]
        if (why := gpu.without_faiss(max(numbers))) is not None:
            raise ValueError(f"device is {', '.join(names)}, but {why}; or use device: cpu")
        try:
            found = [gpu.Gpu(number) for number in numbers]
        except RuntimeError as error:  # such as in a forked process
            LOG.warning("no GPU is used, the CPU answers: %s", error)
            return cls(why=f"{', '.join(names)} can't be used: {error}")
        return cls(found, share)

    def _add(self, device: Device, memory: float | int, paces: Paces | None) -> None:
        """Take a device in, or say why not."""
        whole = int(memory * device.memory) if isinstance(memory, float) else memory
        if whole > device.memory:
            raise ValueError(f"gpu_memory is {whole:,} bytes; {device.name} has {device.memory:,}")
        found, reason, budget, scratch = paces, None, 0, 0
        try:
            whole = min(whole, _free(device, whole))
            scratch = min(MOST_SCRATCH, whole // 8)
            budget = whole - 3 * scratch  # FAISS's, ours, and what is streamed
            device.prepare(scratch)
            reason = self_test.wrong(device)
            found = paces or self_test.measured(device, budget, scratch)
        except Exception as error:  # a driver's, or FAISS's: whatever it is, the CPU answers
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            LOG.warning(
                "%s (%s) is not used, the CPU answers: %s", device.name, device.title, reason
            )
            self._refused.append(
                DeviceState(device.name, device.title, device.memory, 0, 0, reason)
            )
            return
        LOG.info(
            "%s (%s) holds up to %.1f GiB of rows", device.name, device.title, budget / (1 << 30)
        )
        assert found is not None
        self.places.append(Place(device, budget, scratch, found))

    def add(self, title: str, layers: Iterable[Layer]) -> None:
        """Hold what fits of these layers from now on; they are loaded in the background."""
        if not self.places:
            return
        with self._lock:
            for layer in layers:
                self._known[id(layer)] = _Known(layer, f"index {title}, layer {layer.name}")
            self._wake()

    def remove(self, layers: Iterable[Layer]) -> None:
        """Hold nothing of these layers any more."""
        with self._lock:
            for layer in layers:
                self._known.pop(id(layer), None)
            self._wake()

    def held(self, layer: Layer) -> list[Held]:
        """What is held of a layer on devices that work."""
        with self._lock:
            known = self._known.get(id(layer))
            held = [] if known is None else list(known.held)
        return [each for each in held if each.place.refused is None]

    def residences(self, layer: Layer) -> list[Residence]:
        """What of a layer lies where."""
        return [
            Residence(each.place.name, len(each.block.keys), each.key_bytes, each.value_bytes)
            for each in self.held(layer)
        ]

    def states(self) -> list[DeviceState]:
        """All devices that were asked for."""
        used = self._used()
        return self._refused + [
            DeviceState(
                place.name,
                place.device.title,
                place.device.memory,
                place.budget,
                size,
                place.refused,
            )
            for place, size in zip(self.places, used, strict=True)
        ]

    def working(self) -> list[Place]:
        """Those that answer."""
        return [place for place in self.places if place.refused is None]

    def why_not(self) -> str | None:
        """Why no device answers anything; None where one does."""
        if self.working():
            return None
        reasons = [f"{state.name} is not used: {state.refused}" for state in self.states()]
        return "; ".join(reasons) or self.why_none

    def note(self, layer: Layer, seconds: float) -> None:
        """A question was asked that takes the CPU so many seconds."""
        with self._lock:
            known = self._known.get(id(layer))
            if known is None:
                return
            for other in self._known.values():
                other.use *= _FORGETS
            known.use += seconds
            if self._outgrown(known):
                self._wake()

    def _outgrown(self, known: _Known) -> bool:
        """Whether a layer that is not wholly held is used so much more than one that is."""
        wish = known.wish(self.places)
        there = {number for each in known.held for number in each.shards}
        missing = any(size and number not in there for number, size in enumerate(wish.keys))
        least = min(
            (
                other.wish(self.places).density
                for other in self._known.values()
                if other is not known and other.held
            ),
            default=None,
        )
        return missing and least is not None and wish.density > _WORTH * least

    def ran_out(self, place: Place) -> None:
        """A question found no memory: hold less there from now on."""
        with self._lock:
            used = sum(self._used_by(place))
            place.budget = int(0.9 * min(place.budget, used or place.budget))
            LOG.warning(
                "%s ran out of memory: it holds up to %.1f GiB of rows from now on",
                place.name,
                place.budget / (1 << 30),
            )
            self._wake()

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until all that is to be held is; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._dirty or self._closed, timeout)

    def close(self, *, wait: bool = True) -> None:
        """Hold nothing any more.

        Args:
            wait: Until what is being loaded has been given up.
        """
        with self._lock:
            self._closed = True
            self._known.clear()
            self._changed.notify_all()
            worker = self._worker
        if wait and worker is not None and worker is not threading.current_thread():
            worker.join()

    def _used_by(self, place: Place) -> list[int]:
        return [
            each.key_bytes + each.value_bytes
            for known in self._known.values()
            for each in known.held
            if each.place is place
        ]

    def _used(self) -> list[int]:
        with self._lock:
            return [sum(self._used_by(place)) for place in self.places]

    def _wake(self) -> None:
        self._dirty = True
        self._changed.notify_all()
        if self._worker is None and not self._closed:
            self._worker = threading.Thread(target=self._work, name="dualform-devices", daemon=True)
            self._worker.start()

    def _work(self) -> None:
        with own_settings():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._dirty or self._closed)
                    closed, todo = self._closed, None if self._closed else self._todo()
                    emptied = self._emptied()
                for place in emptied:
                    place.give_back()
                if closed:
                    return
                if todo is None:
                    self._settled()
                else:
                    self._bring(*todo)

    def _settled(self) -> None:
        """Nothing is left to do, unless something came meanwhile."""
        with self._lock:
            if self._todo() is None:
                self._dirty = False
                self._changed.notify_all()

    def _emptied(self) -> list[Place]:
        """The places that hold less than when this was last asked."""
        before, now = self._filled, dict(zip(self.places, self._used(), strict=True))
        self._filled = now
        return [place for place in self.places if now[place] < before.get(place, 0)]

    def _todo(self) -> tuple[_Known, Place, Lot, bool] | None:
        """Whose keys or values are to be loaded next; lets go of what is held no more."""
        budgets = [0 if place.refused else place.budget for place in self.places]
        known = list(self._known.values())
        wishes = [each.wish(self.places) for each in known]
        lots = [
            {self.places[number]: lot for number, lot in found.items()}
            for found in placed(wishes, budgets)
        ]
        for each, wanted in zip(known, lots, strict=True):
            each.held = _still(each, wanted)
        for values in (False, True):
            for each, wanted in zip(known, lots, strict=True):
                for place, lot in wanted.items():
                    if each.lacks(place, lot, values):
                        return each, place, lot, values
        return None

    def _bring(self, known: _Known, place: Place, lot: Lot, values: bool) -> None:
        start = time.perf_counter()

        def unwanted() -> bool:
            return self._closed or id(known.layer) not in self._known

        try:
            rows = load(place, known.layer, lot.shards, values=values, stop=unwanted)
        except OnDeviceError as error:
            if isinstance(error.refusal, ResourceExhaustedError):
                self.ran_out(place)
            return
        except CancelledError:
            return
        except Exception as error:  # damage, which whoever asks about the layer is told
            known.spoiled = True
            LOG.warning("%s stays in the host's memory: %s", known.title, error)
            return
        with self._lock:
            if unwanted():
                return
            there = next((each for each in known.held if each.place is place), None)
            if values:
                if there is None or there.shards != lot.shards:
                    return
                block = Block(there.block.keys, rows)
            else:
                block = Block(rows, None)
            known.held = [each for each in known.held if each is not there]
            known.held.append(Held(place, lot.shards, block))
        LOG.info(
            "%s: the %s of %d rows lie on %s, %.2f GiB, after %.1f s",
            known.title,
            "values" if values else "keys",
            len(rows),
            place.name,
            rows.nbytes / (1 << 30),
            time.perf_counter() - start,
        )


def _free(device: Device, wanted: int) -> int:
    """Bytes that nobody has taken; fewer than are wanted are worth a word."""
    free = device.free()
    if free < wanted:
        LOG.warning(
            "%s has %.1f GiB free, less than gpu_memory says: no more is taken",
            device.name,
            free / (1 << 30),
        )
    return free


def _still(known: _Known, wanted: Mapping[Place, Lot]) -> list[Held]:
    """What of a layer stays where it is."""
    staying = []
    for held in known.held:
        lot = wanted.get(held.place)
        if lot is None or lot.shards != held.shards:
            LOG.info("%s: its rows leave %s", known.title, held.place.name)
        elif held.block.values is not None and not lot.values:
            LOG.info("%s: its values leave %s", known.title, held.place.name)
            staying.append(Held(held.place, held.shards, Block(held.block.keys, None)))
        else:
            staying.append(held)
    return staying
