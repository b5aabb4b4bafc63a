"""Which rows lie on which device: keys before values, what is used most first, as much as fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wish:
    """A layer that would be held.

    Attributes:
        keys: Bytes that each of its shards' keys take there; 0 for one that can't be held.
        values: Likewise of values; zeros without any.
        use: How many seconds holding it has saved, or would have, lately.
        held: Where its shards lie now: for each place their numbers.
    """

    keys: Sequence[int]
    values: Sequence[int]
    use: float = 0.0
    held: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """Use per byte."""
        return self.use / max(1, sum(self.keys))


@dataclass(frozen=True)
class Lot:
    """What of a layer is to lie on a place.

    Attributes:
        shards: Numbers of its shards, ascending.
        values: Whether their values do too.
    """

    shards: tuple[int, ...]
    values: bool


def placed(wishes: Sequence[Wish], budgets: Sequence[int]) -> list[dict[int, Lot]]:
    """What of each layer lies where.

    Layers come by use per byte, those alike in the order given. A layer's shards are dealt out to
    the places with most room, so that they share its questions; what fits nowhere is left out. A
    layer that lies somewhere as a whole stays there. Values follow, to where their keys are, while
    all of a place's fit.

    Args:
        wishes: The layers.
        budgets: Bytes that each place may hold.

    Returns:
        For each layer, by place.
    """
    room = list(budgets)
    order = sorted(range(len(wishes)), key=lambda i: -wishes[i].density)
    shards: dict[int, dict[int, tuple[int, ...]]] = {}
    for i in order:
        shards[i] = _kept(wishes[i], room) or _dealt(wishes[i], room)
        for place, numbers in shards[i].items():
            room[place] -= sum(wishes[i].keys[number] for number in numbers)
    lots: list[dict[int, Lot]] = [{} for _ in wishes]
    for i in order:
        for place, numbers in shards[i].items():
            size = sum(wishes[i].values[number] for number in numbers)
            fits = 0 < size <= room[place]
            room[place] -= size if fits else 0
            lots[i][place] = Lot(numbers, fits)
    return lots


def _kept(wish: Wish, room: Sequence[int]) -> dict[int, tuple[int, ...]] | None:
    """Where a layer lies now, if that is all of it and still fits."""
    everything = {number for number, size in enumerate(wish.keys) if size}
    if {number for numbers in wish.held.values() for number in numbers} != everything:
        return None
    for place, numbers in wish.held.items():
        if sum(wish.keys[number] for number in numbers) > room[place]:
            return None
    return wish.held


def _dealt(wish: Wish, room: Sequence[int]) -> dict[int, tuple[int, ...]]:
    left = list(room)
    found: dict[int, list[int]] = {}
    for number, size in enumerate(wish.keys):
        place = max(range(len(left)), key=lambda p: left[p], default=None)
        if size == 0 or place is None or size > left[place]:
            continue
        left[place] -= size
        found.setdefault(place, []).append(number)
    return {place: tuple(numbers) for place, numbers in found.items()}
