"""What questions cost, by experience: the seconds that those of the same kind took."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

_MOST_KINDS = 4096
_REMEMBERED = 3


class Experience:
    """Remembers for each kind of question what the last ones took; belongs to one event loop.

    The least of them is what it takes: what a busy machine adds differs from one to the next and
    never takes anything off, so one that was held up says nothing of those after it.
    """

    def __init__(self) -> None:
        self._seconds: OrderedDict[tuple[Any, ...], deque[float]] = OrderedDict()

    def seconds(self, kind: tuple[Any, ...]) -> float | None:
        """What a question of this kind takes, or None where there was none yet."""
        return min(self._seconds[kind]) if kind in self._seconds else None

    def learn(self, kind: tuple[Any, ...], seconds: float) -> None:
        """A question of this kind took so long."""
        self._seconds.setdefault(kind, deque(maxlen=_REMEMBERED)).append(seconds)
        self._seconds.move_to_end(kind)
        if len(self._seconds) > _MOST_KINDS:
            self._seconds.popitem(last=False)


def kind_of(method: str, request: Any) -> tuple[Any, ...]:
    """The same for requests that cost about the same; sizes count by powers of two.

    Args:
        method: The rpc's name.
        request: Its message.
    """
    sizes: list[int] = []
    words: list[Any] = [method]
    for field, value in request.ListFields():
        if field.name in ("queries", "direction", "where"):
            sizes.append(value.ByteSize().bit_length())
        elif field.name in ("layers", "bins", "ids"):
            sizes.append(sum(_size(entry) for entry in value).bit_length())
        elif field.name in ("k", "inputs"):
            sizes.append(int(value).bit_length())
        elif field.name != "at_step":
            words.append((field.name, value))
    return (*words, *sizes)


def _size(value: Any) -> int:
    return int(value.ByteSize()) if hasattr(value, "ByteSize") else 8
