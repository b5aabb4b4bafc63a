"""Arrays and Python values to the wire's messages, and back."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dualform.client.errors import InvalidArgumentError, bad_answer
from dualform.questions.checks import MATRICES
from dualform.questions.quoted import quoted
from dualform.v1 import attribution_pb2 as pb

_DTYPES: dict[int, np.dtype[Any]] = {
    pb.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    pb.DATA_TYPE_FLOAT64: np.dtype("<f8"),
    pb.DATA_TYPE_INT32: np.dtype("<i4"),
    pb.DATA_TYPE_INT64: np.dtype("<i8"),
}
_COLUMN_DTYPES: dict[int, np.dtype[Any]] = {
    pb.COLUMN_TYPE_INT64: np.dtype("<i8"),
    pb.COLUMN_TYPE_DOUBLE: np.dtype("<f8"),
    pb.COLUMN_TYPE_STRING: np.dtype("<i4"),
    pb.COLUMN_TYPE_BOOL: np.dtype("?"),
}


def query_matrix(queries: object, field: str = "queries") -> npt.NDArray[np.float32]:
    """Whatever the user gave as queries, as a C-ordered float32 [n, d_in] array; or as directions.

    Args:
        queries: numpy array, torch tensor on any device, or anything `np.asarray` takes.
        field: What the argument is called; "direction" is about d_out numbers.

    Raises:
        InvalidArgumentError: Not float32 (nothing is rounded behind the user's back), or not
            two-dimensional.
    """
    words = MATRICES[field]
    many, one, width = words.many, words.one, words.width
    if hasattr(queries, "detach") and hasattr(queries, "dtype"):  # files can be detached too
        queries = _from_torch(queries, field)
    if isinstance(queries, np.ma.MaskedArray) and np.ma.is_masked(queries):
        raise InvalidArgumentError(
            f"{many} have masked numbers; every number of a {one} counts: fill them, as in "
            f"{field}.filled(0)",
            field=field,
        )
    try:
        array = np.asarray(queries)
    except Exception as error:  # whatever `__array__` of somebody's class raises
        raise InvalidArgumentError(
            f"{many} do not form an array ({error}); one row of {width} numbers per query is "
            "needed",
            field=field,
        ) from None
    if array.dtype.kind != "f" or array.dtype.itemsize != 4:
        raise InvalidArgumentError(
            f"{many} are {array.dtype}; float32 is needed, and nothing is converted silently: "
            f"pass np.asarray({field}, dtype=np.float32), or {field}.float() for a tensor",
            field=field,
        )
    if array.ndim != 2:
        hint = (
            f"; pass {field}.reshape(1, -1) for a single {one}"
            if array.ndim == 1
            else f"; pass {field}.reshape(-1, {width}), one row per {one}"
        )
        raise InvalidArgumentError(
            f"{many} have shape {list(array.shape)}; [n, {width}] is needed{hint}", field=field
        )
    return np.ascontiguousarray(array, dtype="<f4")


def direction_matrix(direction: object) -> npt.NDArray[np.float32] | None:
    """Directions as `query_matrix` gives queries; None stays None."""
    return None if direction is None else query_matrix(direction, "direction")


def query_matrices(queries: object) -> tuple[tuple[str, npt.NDArray[np.float32]], ...]:
    """Queries by layer, each as `query_matrix` gives them."""
    if not isinstance(queries, Mapping):
        raise InvalidArgumentError(
            f"queries are {type(queries).__name__}; explain takes them by layer, such as "
            "capture_queries gives",
            field="queries",
        )
    return tuple((layer, query_matrix(matrix)) for layer, matrix in queries.items())


def array_of(
    tensor: pb.Tensor, what: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]
) -> npt.NDArray[Any]:
    """A tensor message as a writable array in native byte order.

    Args:
        tensor: The message.
        what: What it is, for messages.
        dtype: Its dtype.
        shape: Its sizes; None for those that are the answer's own.

    Raises:
        InternalError: It is none of that dtype and shape.
    """
    wanted, found = np.dtype(dtype).newbyteorder("<"), _DTYPES.get(tensor.dtype)
    sizes = tuple(tensor.shape)
    fits = len(sizes) == len(shape) and all(
        size >= 0 and asked in (None, size) for size, asked in zip(sizes, shape, strict=True)
    )
    if found is None or found != wanted or not fits:  # None is float64 to NumPy
        raise bad_answer(
            f"{what} of {_called(found)} {_listed(sizes)}, where {_called(wanted)} "
            f"{_listed(shape)} was asked for"
        )
    return _unpack(tensor.data, wanted, sizes, what)


def column_of(column: pb.Column, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A metadata column as an array of `shape`.

    Returns:
        int64, float64 or bool where nothing is null; otherwise, and for strings, an object array
        with None for null.

    Raises:
        InternalError: It is none of that shape.
    """
    what = f"column {column.name!r}"
    dtype = _COLUMN_DTYPES.get(column.type)
    if dtype is None:
        raise bad_answer(f"{what} of unknown type {column.type}")
    values = _unpack(column.data, dtype, shape, what)
    valid = (
        _unpack(column.valid, np.dtype("?"), shape, what)
        if column.valid
        else np.ones(shape, dtype=bool)
    )
    if column.type == pb.COLUMN_TYPE_STRING:
        texts = np.full(shape, None, dtype=object)
        if valid.any():
            codes = values[valid]
            if codes.min() < 0 or codes.max() >= len(column.dictionary):
                raise bad_answer(f"{what} with a code beyond its dictionary")
            texts[valid] = np.array(column.dictionary, dtype=object)[codes]
        return texts
    if valid.all():
        return values
    nullable = values.astype(object)
    nullable[~valid] = None
    return nullable


def groups_of(column: pb.Column, count: int) -> list[Any]:
    """The groups of an answer as Python values; None for rows without a value.

    Raises:
        InternalError: One is there twice, or they are not in order.
    """
    groups: list[Any] = column_of(column, (count,)).tolist()
    known = [group for group in groups if group is not None and group == group]  # NaN is not
    ascend = all(a < b or (a == b and repr(a) != repr(b)) for a, b in pairwise(known))  # -0.0, 0.0
    if not ascend or known != groups[: len(known)] or None in groups[:-1]:
        raise bad_answer(f"groups of {column.name!r} that do not ascend, each once")
    return groups


def value_of(value: object, field: str) -> pb.Value:
    """One scalar as a message.

    Raises:
        InvalidArgumentError: Neither int, float, bool, str nor None, or beyond 64 bits.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return pb.Value()
    if isinstance(value, bool):
        return pb.Value(bool_value=value)
    if isinstance(value, int):
        return pb.Value(int64_value=int64(value, field))
    if isinstance(value, float):
        return pb.Value(double_value=value)
    if isinstance(value, str):
        return pb.Value(string_value=text(value, field))
    raise InvalidArgumentError(
        f"{field} holds {value!r} of type {type(value).__name__}; int, float, bool, str or None "
        "are possible",
        field=field,
    )


def int64(value: object, field: str) -> int:
    """`value` as an int that fits 64 bits.

    Raises:
        InvalidArgumentError: It is none; True and False are none.
    """
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(
            f"{field}={value!r} is of type {type(value).__name__}; an int is needed", field=field
        ) from None
    if not -(2**63) <= number < 2**63:
        raise InvalidArgumentError(f"{field}={number} does not fit 64 bits", field=field)
    return number


def patterns_of(layers: object) -> list[str]:
    """`layers=` as a list of names and glob patterns.

    Raises:
        InvalidArgumentError: Neither a str nor an iterable of them.
    """
    if isinstance(layers, str):
        return [layers]
    try:
        if isinstance(layers, bytes):
            raise TypeError
        patterns: list[str] = list(layers)  # type: ignore[call-overload]
    except TypeError:
        raise InvalidArgumentError(
            f"layers={layers!r} is of type {type(layers).__name__}; names or patterns as in "
            "model.named_modules() are needed, such as ['0', 'blocks.*']",
            field="layers",
        ) from None
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidArgumentError(
                f"layers holds {pattern!r}; names as in model.named_modules() are needed, such as "
                f"{str(pattern)!r}",
                field="layers",
            )
    return patterns


def meant(pattern: str, names: Collection[str]) -> list[str]:
    """Those of the names that a name or glob pattern means: one that is a name means it alone."""
    return [pattern] if pattern in names else [n for n in names if fnmatchcase(n, pattern)]


def text(value: object, field: str) -> str:
    """`value` as a str that can travel.

    Raises:
        InvalidArgumentError: It is none, or holds a lone surrogate.
    """
    if not isinstance(value, str):
        raise InvalidArgumentError(
            f"{field}={value!r} is of type {type(value).__name__}; a str is needed", field=field
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(
            f"{field}={quoted(value)} is not valid Unicode", field=field
        ) from None
    return value


def _from_torch(tensor: Any, field: str) -> npt.NDArray[Any]:
    many = MATRICES[field].many
    if str(tensor.dtype) == "torch.bfloat16":
        raise InvalidArgumentError(
            f"{many} are torch.bfloat16; float32 is needed: pass {field}.float()", field=field
        )
    try:
        array: npt.NDArray[Any] = tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError) as error:  # sparse, quantised, on the meta device
        raise InvalidArgumentError(
            f"{many} are a tensor that does not become an array ({error})", field=field
        ) from None
    return array


def _unpack(
    data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], what: str
) -> npt.NDArray[Any]:
    count = 1
    for size in shape:
        count *= size
    if min(shape, default=0) < 0 or len(data) != count * dtype.itemsize:
        raise bad_answer(f"{what} of {len(data)} bytes, said to be {dtype} {_listed(shape)}")
    if dtype.kind == "b" and np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise bad_answer(f"{what} with truth values other than 0 and 1")
    array: npt.NDArray[Any] = np.frombuffer(data, dtype).reshape(shape)
    return array.astype(dtype.newbyteorder("="))


def _called(dtype: np.dtype[Any] | None) -> str:
    return "unknown dtype" if dtype is None else dtype.name


def _listed(shape: Sequence[int | None]) -> str:
    shown = [("*" if size is None else str(size)) for size in shape[:8]]
    return f"[{', '.join(shown)}{', …' if len(shape) > 8 else ''}]"
