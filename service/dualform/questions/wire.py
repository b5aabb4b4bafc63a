"""Questions to request messages and back, field by field; nobody else knows both.

A tensor's shape and bytes come from whoever sent the request, so every size is checked as a Python
integer before anything is allocated from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dualform.questions.attributed import AttributedLayer
from dualform.questions.checks import MATRICES, finite, matrix_error
from dualform.questions.errors import QuestionError
from dualform.questions.question import Field, Question, fields_of
from dualform.questions.questions import QUESTIONS
from dualform.v1 import attribution_pb2 as pb

_LARGE = ("tensor", "layers", "attributed")
_QUESTIONS = {kind.message: kind for kind in QUESTIONS}


def message_of(question: Question) -> Any:
    """The request message that carries a question."""
    message = question.message()
    for field in fields_of(type(question)):
        value = getattr(question, field.name)
        if value is None:
            continue
        if field.kind == "choice":
            setattr(message, field.name, field.choices[value])
        elif field.kind == "tensor":
            getattr(message, field.name).CopyFrom(tensor_of(value))
        elif field.kind == "filter":
            getattr(message, field.name).CopyFrom(value)
        elif field.kind == "layers":
            for layer, queries in value:
                message.layers.add(layer=layer, queries=tensor_of(queries))
        elif field.kind == "attributed":
            for layer in value:
                queries, direction = map(tensor_of, layer.matrices)
                inputs = None if layer.inputs is None else layer.inputs.tolist()
                message.layers.add(
                    layer=layer.layer, queries=queries, direction=direction, inputs=inputs
                )
        elif field.kind == "values":
            message.ids.extend(
                pb.Value(string_value=item) if isinstance(item, str) else pb.Value(int64_value=item)
                for item in value
            )
        elif field.kind == "numbers":
            getattr(message, field.name).extend(value)
        else:
            setattr(message, field.name, value)
    return message


def question_of(message: Any) -> Any:
    """The question that a request message carries.

    Raises:
        QuestionError: A field is wrong.
        TypeError: Not a request of AttributionService.
    """
    kind = _QUESTIONS.get(type(message))
    if kind is None:
        raise TypeError(f"{type(message).__name__} is no request of AttributionService")
    # What is large comes last: whatever else is wrong is said before it is unpacked.
    fields = sorted(fields_of(kind), key=lambda field: field.kind in _LARGE)
    return kind(**{field.name: _value(message, field) for field in fields})


def tensor_of(array: npt.NDArray[np.float32]) -> pb.Tensor:
    """A float32 array as a message."""
    data = array.astype("<f4", copy=False).tobytes()
    return pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=array.shape, data=data)


def _value(message: Any, field: Field) -> Any:
    sent = getattr(message, field.name)
    if field.kind == "choice":
        return _word(sent, field)
    if field.kind == "tensor":
        absent = field.optional and not message.HasField(field.name)
        return None if absent else _matrix(sent, field.name)
    if field.kind in _UNPACKED:
        return _UNPACKED[field.kind](sent)
    if field.kind == "filter" or field.present:
        return sent if message.HasField(field.name) else None
    return sent or None if field.optional else sent


def _word(number: int, field: Field) -> str:
    """A choice's word; the first stands for the protocol's zero where none does."""
    words = {value: word for word, value in field.choices.items()}
    if number in words:
        return words[number]
    if number == 0:
        return next(iter(field.choices))
    raise QuestionError(
        f"{field.name} {number} is unknown; allowed are {', '.join(field.choices)}",
        field=field.name,
    )


def _attributed(layer: pb.AttributedLayer) -> AttributedLayer:
    inputs = np.array(layer.inputs, np.int64) if layer.inputs else None
    direction = _of_layer(layer, "direction")
    return AttributedLayer(layer.layer, _of_layer(layer, "queries"), direction, inputs)


def _of_layer(layer: pb.ExplainLayer | pb.AttributedLayer, field: str) -> npt.NDArray[np.float32]:
    try:
        return _matrix(getattr(layer, field), field)
    except QuestionError as error:
        raise QuestionError(
            f"layer {layer.layer!r}: {error}", field=error.field, reason=error.reason
        ) from None


def _matrix(tensor: pb.Tensor, field: str) -> npt.NDArray[np.float32]:
    """The queries or directions of a request, float32 [n, d], contiguous and writable."""
    words = MATRICES[field]
    if tensor.dtype != pb.DATA_TYPE_FLOAT32:
        raise matrix_error(f"are {_dtype_name(tensor.dtype)}; send float32", field)
    shape = tuple(tensor.shape)
    if len(shape) != 2:
        given = list(shape) if len(shape) <= 8 else f"{len(shape)} dimensions"
        raise matrix_error(f"have shape {given}; {words.send}", field)
    n, d = shape
    if n < 0 or d < 1:
        raise matrix_error(
            f"have shape [{n}, {d}]; send [n, {words.width}] with n and {words.width} at least 1",
            field,
        )
    data = tensor.data
    if len(data) != n * d * 4:
        raise matrix_error(
            f"of shape [{n}, {d}] need {n * d * 4:,} bytes, not {len(data):,}; "
            "send float32 little-endian, row-major",
            field,
        )
    sent = np.frombuffer(data, dtype="<f4").reshape(n, d)
    finite(sent, field)  # before it is copied
    return sent.astype(np.float32)


def _id(value: pb.Value) -> int | str | None:
    kind = value.WhichOneof("kind")
    return None if kind is None else getattr(value, kind)


_UNPACKED: dict[str, Callable[[Any], Any]] = {
    "layers": lambda sent: [(layer.layer, _of_layer(layer, "queries")) for layer in sent],
    "attributed": lambda sent: [_attributed(layer) for layer in sent],
    "values": lambda sent: [_id(value) for value in sent],
    "numbers": lambda sent: list(sent) or None,
}
"""What a question holds of a field, by the field's kind, where nothing else of it matters."""


def _dtype_name(dtype: int) -> str:
    try:
        return pb.DataType.Name(dtype).removeprefix("DATA_TYPE_").lower()
    except ValueError:
        return f"of unknown data type {dtype}"
