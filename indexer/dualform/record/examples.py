"""Payloads of examples: checked, told apart, and kept once per id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dualform.record.annotations import is_text
from dualform.record.errors import AnnotationError

_PNG = b"\x89PNG\r\n\x1a\n"


class ExampleIntake:
    """Checks payloads and remembers which ids had one.

    Args:
        seen: Ids that a resumed recording has already.
    """

    def __init__(self, seen: Sequence[int] | Sequence[str] = ()) -> None:
        self._seen: set[int | str] = set(seen)
        self._type: type | None = type(seen[0]) if len(seen) else None

    def take(
        self, ids: Sequence[int] | Sequence[str] | np.ndarray, payloads: Sequence[bytes | str]
    ) -> tuple[list[int] | list[str], list[str], list[bytes]] | None:
        """What is new among them: ids, kinds ("png", "bytes", "text") and bytes; None if nothing.

        Raises:
            AnnotationError: Lengths or types do not fit.
        """
        given = _ids(ids)
        if len(given) != len(payloads):
            raise AnnotationError(
                f"add_examples: {len(given)} ids for {len(payloads)} payloads; give one each"
            )
        new_ids: list[int | str] = []
        kinds: list[str] = []
        data: list[bytes] = []
        for example, payload in zip(given, payloads, strict=True):
            if self._type is None:
                self._type = type(example)
            if type(example) is not self._type:
                raise AnnotationError(
                    f"add_examples: id {example!r} is {type(example).__name__} where earlier ids "
                    f"were {self._type.__name__}; use one type for all"
                )
            kind, content = _payload(example, payload)
            if example in self._seen:
                continue
            self._seen.add(example)
            new_ids.append(example)
            kinds.append(kind)
            data.append(content)
        return (new_ids, kinds, data) if new_ids else None  # type: ignore[return-value]


def _ids(ids: Sequence[int] | Sequence[str] | np.ndarray) -> list[int | str]:
    if isinstance(ids, (torch.Tensor, np.ndarray)):
        ids = ids.tolist()
    out: list[int | str] = []
    for example in ids:
        if isinstance(example, (bool, np.bool_)) or not isinstance(example, (int, str, np.integer)):
            raise AnnotationError(
                f"add_examples: an example id is an integer or a string, not {example!r}"
            )
        fits = is_text(example) if isinstance(example, str) else -(2**63) <= example < 2**63
        if not fits:
            raise AnnotationError(
                f"add_examples: id {example!r} can't be kept; ids are integers of 64 bits or "
                "Unicode text"
            )
        out.append(example if isinstance(example, str) else int(example))
    return out


def _payload(example: int | str, payload: bytes | str) -> tuple[str, bytes]:
    if isinstance(payload, str):
        if not is_text(payload):
            raise AnnotationError(
                f"add_examples: the text of {example!r} is not valid Unicode; give it as bytes, or "
                "text.encode('utf-8', 'backslashreplace').decode()"
            )
        return "text", payload.encode()
    if isinstance(payload, (bytes, bytearray, memoryview)):
        content = bytes(payload)
        return ("png" if content.startswith(_PNG) else "bytes"), content
    raise AnnotationError(
        f"add_examples: the payload of {example!r} is {type(payload).__name__}; give bytes "
        "(such as a PNG file's) or text"
    )
