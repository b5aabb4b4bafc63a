"""Answers written piece by piece: the very bytes that protobuf writes, and between two anybody can
give up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dualform.engine.errors import CancelledError
from dualform.engine.messages.wire import encode_tensor
from dualform.engine.messages.writing import size, write
from dualform.v1 import attribution_pb2 as pb

ANSWERS = {
    method.name: method.output_type
    for method in pb.DESCRIPTOR.services_by_name["AttributionService"].methods
}
DTYPES = (np.float32, np.float64, np.int32, np.int64)


def random(message: Any, rng: np.random.Generator) -> Any:
    """Each field set or not, lists of none to three; arrays of all kinds, empty ones too."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.3:
            continue
        place = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            place.update({f"w{n}": int(n) for n in range(rng.integers(4))})
        elif hasattr(place, "extend"):
            for _ in range(rng.integers(4)):
                if field.message_type is None:
                    place.append(value(field, rng))
                else:
                    random(place.add(), rng)
        elif field.message_type is None:
            setattr(message, field.name, value(field, rng))
        elif field.message_type is pb.Tensor.DESCRIPTOR:
            shape = rng.integers(0, 5, rng.integers(4))
            dtype = DTYPES[rng.integers(4)]
            place.CopyFrom(encode_tensor(rng.integers(-9, 9, shape).astype(dtype)))
        else:
            place.SetInParent()
            random(place, rng)
    return message


def value(field: Any, rng: np.random.Generator) -> Any:
    size = int(rng.integers(200))
    if field.enum_type is not None:
        return int(rng.integers(1, len(field.enum_type.values)))
    if field.type == field.TYPE_STRING:
        return "é" * size
    if field.type == field.TYPE_BYTES:
        return rng.bytes(size)
    if field.type == field.TYPE_BOOL:
        return bool(size % 2)
    return size if field.cpp_type != field.CPPTYPE_INT64 else size - 100


@pytest.mark.parametrize("method", ANSWERS)
def test_what_protobuf_writes(method: str) -> None:
    rng = np.random.default_rng(0)
    kind = getattr(pb, ANSWERS[method].name)
    written = set()
    for _ in range(200):
        answer = random(kind(), rng)
        assert write(answer) == answer.SerializeToString()
        assert size(answer) == answer.ByteSize()
        written.add(size(answer))
    assert len(written) > 20


def test_a_large_answer_is_given_up_between_two_pieces() -> None:
    values = encode_tensor(np.ones((300, 400), np.float64))
    answer = pb.SumsResponse(values=values, counts=encode_tensor(np.arange(400)))
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 4

    with pytest.raises(CancelledError):
        write(answer, stop)
    asked = 10
    assert write(answer, stop) == answer.SerializeToString()
    assert asked > 14
