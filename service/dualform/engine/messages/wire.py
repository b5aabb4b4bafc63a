"""Arrays, metadata columns and ids to the wire's messages; how large a filter may be.

Requests are read by `dualform.questions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualform.engine.errors import InvalidArgumentError, ResourceExhaustedError
from dualform.v1 import attribution_pb2 as pb

# Each level takes two of the 100 levels that protobuf reads.
MAX_FILTER_DEPTH = 48
MAX_FILTER_PARTS = 1024
MAX_FILTER_VALUES = 65536

_WORDS_AT_ONCE = 1 << 17
_DTYPES: dict[np.dtype[Any], pb.DataType] = {
    np.dtype(np.float32): pb.DATA_TYPE_FLOAT32,
    np.dtype(np.float64): pb.DATA_TYPE_FLOAT64,
    np.dtype(np.int32): pb.DATA_TYPE_INT32,
    np.dtype(np.int64): pb.DATA_TYPE_INT64,
}
# Bytes per element on the wire, null mask included.
COLUMN_BYTES = {
    pb.COLUMN_TYPE_INT64: 9,
    pb.COLUMN_TYPE_DOUBLE: 9,
    pb.COLUMN_TYPE_STRING: 5,
    pb.COLUMN_TYPE_BOOL: 2,
}


def check_filter(where: pb.Filter | None) -> None:
    """Bound a filter's size. What it means is the filter evaluation's business.

    Raises:
        InvalidArgumentError: Nested too deep.
        ResourceExhaustedError: Too many parts or literals.
    """
    stack = [] if where is None else [(where, 1)]
    parts = values = 0
    while stack:
        node, depth = stack.pop()
        parts += 1
        if depth > MAX_FILTER_DEPTH:
            raise InvalidArgumentError(
                f"the filter is nested more than {MAX_FILTER_DEPTH} deep; "
                "join conditions in one all_of or any_of, and use IN for many values",
                field="where",
            )
        kind = node.WhichOneof("kind")
        if kind == "comparison":
            values += len(node.comparison.values)
        elif kind == "negated":
            stack.append((node.negated, depth + 1))
        elif kind is not None:
            children = getattr(node, kind).filters
            if parts + len(stack) + len(children) > MAX_FILTER_PARTS:
                raise ResourceExhaustedError(
                    f"the filter has more than {MAX_FILTER_PARTS:,} parts; "
                    "use IN where a column may have one of many values",
                    field="where",
                )
            stack.extend((child, depth + 1) for child in children)
        if values > MAX_FILTER_VALUES:
            raise ResourceExhaustedError(
                f"the filter has more than {MAX_FILTER_VALUES:,} literals; "
                "use a range (between) or several requests",
                field="where",
            )


def encode_id(example: int | str) -> pb.Value:
    """An example id."""
    if isinstance(example, str):
        return pb.Value(string_value=example)
    return pb.Value(int64_value=example)


def encode_tensor(array: npt.NDArray[Any]) -> pb.Tensor:
    """float32, float64, int32 or int64, any shape."""
    tensor = pb.Tensor()
    fill_tensor(tensor, array)
    return tensor


def fill_tensor(
    tensor: pb.Tensor, array: npt.NDArray[Any], between: Callable[[], None] = lambda: None
) -> None:
    """The same into an empty message; `between` is called between two copies, and may raise."""
    data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    between()
    tensor.dtype = _DTYPES[array.dtype]
    tensor.shape.extend(array.shape)
    tensor.data = data


def column_type(data_type: pa.DataType) -> pb.ColumnType:
    """The wire's type for an Arrow type.

    Raises:
        TypeError: No metadata column has such a type.
    """
    if pa.types.is_dictionary(data_type):
        return column_type(data_type.value_type)
    if pa.types.is_boolean(data_type):
        return pb.COLUMN_TYPE_BOOL
    if pa.types.is_integer(data_type):
        return pb.COLUMN_TYPE_INT64
    if pa.types.is_floating(data_type):
        return pb.COLUMN_TYPE_DOUBLE
    # A column without any value has Arrow's null type: strings, of which there are none.
    if (
        pa.types.is_string(data_type)
        or pa.types.is_large_string(data_type)
        or pa.types.is_null(data_type)
    ):
        return pb.COLUMN_TYPE_STRING
    raise TypeError(f"no metadata column has the type {data_type}")


def encode_column(
    name: str, array: pa.Array | pa.ChunkedArray, between: Callable[[], None] = lambda: None
) -> pb.Column:
    """Metadata values with their null mask; a string column's dictionary holds only what occurs.

    `between` is called from time to time where there are many, and may raise.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    kind = column_type(array.type)
    valid = b""
    if array.null_count:
        valid = np.asarray(array.is_valid()).astype(np.uint8).tobytes()
    dictionary: list[str] = []
    if kind == pb.COLUMN_TYPE_STRING:
        codes, dictionary = _string_codes(array, between)
        data = codes.astype("<i4").tobytes()
    elif kind == pb.COLUMN_TYPE_BOOL:
        data = _dense(array, pa.bool_(), False).astype(np.uint8).tobytes()
    elif kind == pb.COLUMN_TYPE_INT64:
        data = _dense(array, pa.int64(), 0).astype("<i8", copy=False).tobytes()
    else:
        data = _dense(array, pa.float64(), 0.0).astype("<f8", copy=False).tobytes()
    return pb.Column(name=name, type=kind, data=data, dictionary=dictionary, valid=valid)


def _dense(array: pa.Array, data_type: pa.DataType, null: Any) -> npt.NDArray[Any]:
    dense = array.cast(data_type)
    if dense.null_count:
        dense = dense.fill_null(null)
    return np.asarray(dense.to_numpy(zero_copy_only=False))


def _string_codes(
    array: pa.Array, between: Callable[[], None]
) -> tuple[npt.NDArray[np.int64], list[str]]:
    if pa.types.is_null(array.type):
        return np.zeros(len(array), np.int64), []
    if not pa.types.is_dictionary(array.type):
        pieces = []
        for first in range(0, max(1, len(array)), _WORDS_AT_ONCE):
            between()
            pieces.append(array.slice(first, _WORDS_AT_ONCE).dictionary_encode())
        array = pa.chunked_array(pieces).unify_dictionaries().combine_chunks()
        between()
    codes = _dense(array.indices, pa.int64(), -1)
    used = np.zeros(len(array.dictionary), bool)
    used[codes[codes >= 0]] = True
    # Rows taken from a large column keep its whole dictionary: send only the words that occur.
    place = np.cumsum(used) - 1
    compact = np.where(codes >= 0, place[codes] if len(place) else 0, 0)
    between()
    return compact, array.dictionary.filter(pa.array(used)).to_pylist()
