"""Random requests, most of them nearly right, and an opinion of one's own on which are right.

`valid` is written down from docs/server.md and the proto, not from the code: True, False, or None
where an answer and a refusal are both in order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from dualform.v1 import attribution_pb2 as pb

D_IN, D_OUT, STEPS, LAYER, INDEX = 6, 3, 6, "fc", "i"
MAX_K, MAX_QUERIES = 16384, 4096
COLUMNS = {
    "step": "int64",
    "slot": "int64",
    "position": "int64",
    "label": "int64",
    "task": "string",
    "weight": "double",
    "flag": "bool",
}
KINDS: tuple[type[Any], ...] = (
    pb.TopKRequest,
    pb.SumsRequest,
    pb.DualOutputRequest,
    pb.ExplainRequest,
    pb.StreamWeightsRequest,
    pb.GetExamplesRequest,
    pb.GetIndexRequest,
    pb.ListIndexesRequest,
)
_INTS = [0, 1, -1, 2, 3, 5, 7, 64, 4096, 4097, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63)]
_DOUBLES = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-4, 1e308, -1e308, 5e-324, math.inf, -math.inf, math.nan]
_TEXTS = [
    "",
    "fc",
    "i",
    "label",
    "task",
    "step",
    "flag",
    "weight",
    "x",
    "../i",
    "\0",
    "é",
    "a" * 300,
]


class Maker:
    """Makes requests by chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rng = np.random.default_rng(seed)

    def request(self) -> tuple[type[Any], bytes]:
        """One, as bytes: right, or changed in some fields, or in some bytes."""
        chance = self.chance
        kind = chance.choices(KINDS, (8, 6, 6, 4, 3, 2, 1, 1))[0]
        message = getattr(self, f"_{kind.__name__.removesuffix('Request').lower()}")()
        for _ in range(chance.choice((0, 0, 1, 1, 1, 2, 2, 4))):
            self.change(message)
        data = message.SerializeToString()
        if chance.random() < 0.3:
            data = self.damaged(data)
        return kind, data

    def change(self, message: Any) -> None:
        """Give one field of it, or of what it holds, another value of its type."""
        chance = self.chance
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = chance.choice(fields)
        inner = field.type == FieldDescriptor.TYPE_MESSAGE
        value = getattr(message, field.name)
        if _repeated(field):
            if inner:
                if len(value) and chance.random() < 0.7:
                    self.change(chance.choice(value))
                elif len(value) and chance.random() < 0.5:
                    del value[chance.randrange(len(value)) :]
                else:
                    value.add()
            elif len(value) and chance.random() < 0.5:
                del value[chance.randrange(len(value))]
            else:
                value.insert(chance.randrange(len(value) + 1), self.scalar(field))
        elif inner:
            if chance.random() < 0.2:
                message.ClearField(field.name)
            else:
                self.change(value)
        elif chance.random() < 0.2:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, self.scalar(field))

    def scalar(self, field: Any) -> Any:
        """A value of a field's type."""
        chance = self.chance
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.rng.bytes(chance.choice((0, 1, 4, 4 * D_IN, 8 * D_IN, 1000)))
        if field.type == FieldDescriptor.TYPE_STRING:
            return chance.choice(_TEXTS)
        if field.type == FieldDescriptor.TYPE_BOOL:
            return chance.random() < 0.5
        if field.type == FieldDescriptor.TYPE_DOUBLE:
            return chance.choice(_DOUBLES)
        if field.type in (FieldDescriptor.TYPE_ENUM, FieldDescriptor.TYPE_INT32):
            return chance.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 42, -1, 2**31 - 1))
        return chance.choice(_INTS)

    def damaged(self, data: bytes) -> bytes:
        """Some bytes changed, left out, added, or doubled."""
        chance, changed = self.chance, bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 5, 20))):
            at = chance.randrange(len(changed) + 1)
            match chance.randrange(5):
                case 0 if at < len(changed):
                    changed[at] ^= 1 << chance.randrange(8)
                case 1:
                    del changed[at : at + chance.choice((1, 2, 8))]
                case 2:
                    changed[at:at] = self.rng.bytes(chance.choice((1, 2, 8)))
                case 3:
                    changed[at:at] = changed[chance.randrange(len(changed) + 1) :][:30]
                case _:
                    del changed[at:]
        return bytes(changed)

    def _queries(self) -> pb.Tensor:
        n = self.chance.choice((1, 1, 2, 3, 9))
        rows = self.rng.standard_normal((n, D_IN)).astype("<f4")
        if self.chance.random() < 0.05:
            rows[self.chance.randrange(n), 0] = self.chance.choice((np.nan, np.inf, 3e38, 1e-45))
        return pb.Tensor(dtype=1, shape=rows.shape, data=rows.tobytes())

    def _where(self, depth: int = 0) -> pb.Filter:
        chance = self.chance
        kind = chance.randrange(6)
        if kind >= 3 or depth > 3:
            column = chance.choice(list(COLUMNS))
            operator = chance.randrange(1, 9)
            count = {8: 0, 7: chance.randrange(4)}.get(operator, 1)
            values = [self._value(COLUMNS[column]) for _ in range(count)]
            return pb.Filter(
                comparison=pb.Comparison(column=column, operator=operator, values=values)
            )
        if kind == 2:
            return pb.Filter(negated=self._where(depth + 1))
        parts = [self._where(depth + 1) for _ in range(chance.randrange(1, 4))]
        several = pb.FilterList(filters=parts)
        return pb.Filter(all_of=several) if kind else pb.Filter(any_of=several)

    def _value(self, kind: str) -> pb.Value:
        chance = self.chance
        if kind == "string":
            return pb.Value(string_value=chance.choice(("a", "b", "", "zz")))
        if kind == "bool":
            return pb.Value(bool_value=chance.random() < 0.5)
        if chance.random() < 0.3:
            return pb.Value(double_value=chance.choice(_DOUBLES[:-1]))
        return pb.Value(int64_value=chance.choice(_INTS))

    def _column(self) -> str:
        return self.chance.choice(("", "", "label", "task", "step", "weight", "flag"))

    def _common(self) -> dict[str, Any]:
        chance = self.chance
        common: dict[str, Any] = {"index": chance.choice(("", INDEX))}
        if chance.random() < 0.4:
            common["where"] = self._where()
        return common

    def _topk(self) -> pb.TopKRequest:
        chance = self.chance
        request = pb.TopKRequest(
            layer=LAYER,
            queries=self._queries(),
            k=MAX_K if chance.random() < 0.01 else chance.choice((1, 2, 5, 50)),
            group_by=self._column(),
            order=chance.randrange(4),
            distinct=self._column() if chance.random() < 0.3 else "",
            strategy=chance.choice((0, 0, 0, 1, 2, 3)),
            explain_plan=chance.random() < 0.2,
            **self._common(),
        )
        if chance.random() < 0.3:
            request.rank_by = 2
            request.unit = chance.randrange(D_OUT)
            if chance.random() < 0.5:
                request.at_step = chance.randrange(STEPS + 1)
        return request

    def _sums(self) -> pb.SumsRequest:
        chance = self.chance
        request = pb.SumsRequest(
            layer=LAYER,
            queries=self._queries(),
            group_by=self._column() or "label",
            absolute=chance.random() < 0.5,
            strategy=chance.choice((0, 0, 0, 1, 4, 5)),
            explain_plan=chance.random() < 0.2,
            **self._common(),
        )
        if chance.random() < 0.3:
            request.bins.extend(sorted(chance.sample(range(-3, 9), 3)))
        return request

    def _dualoutput(self) -> pb.DualOutputRequest:
        chance = self.chance
        request = pb.DualOutputRequest(
            layer=LAYER,
            queries=self._queries(),
            group_by=self._column(),
            strategy=chance.choice((0, 0, 0, 1, 6, 7)),
            explain_plan=chance.random() < 0.2,
            **self._common(),
        )
        if chance.random() < 0.3:
            request.at_step = chance.randrange(STEPS + 1)
        if chance.random() < 0.3:
            request.max_residual = chance.choice((0.5, 1.0, math.inf))
        return request

    def _explain(self) -> pb.ExplainRequest:
        chance = self.chance
        group_by = self._column()
        return pb.ExplainRequest(
            layers=[pb.ExplainLayer(layer=LAYER, queries=self._queries())],
            k=chance.choice((0, 1, 5)),
            order=chance.randrange(4),
            group_by=group_by,
            absolute=bool(group_by) and chance.random() < 0.5,
            output=chance.random() < 0.5,
            **self._common(),
        )

    def _streamweights(self) -> pb.StreamWeightsRequest:
        index = self.chance.choice(("", INDEX))
        return pb.StreamWeightsRequest(index=index, layer=LAYER, queries=self._queries())

    def _getexamples(self) -> pb.GetExamplesRequest:
        chance = self.chance
        values = [self._value(chance.choice(("int64", "string"))) for _ in range(3)]
        return pb.GetExamplesRequest(index=chance.choice(("", INDEX)), ids=values)

    def _getindex(self) -> pb.GetIndexRequest:
        return pb.GetIndexRequest(index=self.chance.choice(("", INDEX)))

    def _listindexes(self) -> pb.ListIndexesRequest:
        return pb.ListIndexesRequest()


def _repeated(field: Any) -> bool:
    # `label` has gone from newer protobuf, `is_repeated` is not in older ones.
    new = getattr(field, "is_repeated", None)
    return bool(field.label == field.LABEL_REPEATED if new is None else new)


Opinion = bool | None


def valid(request: Any) -> Opinion:
    """Whether a request may be answered."""
    return _all(check(request) for check in _CHECKS[type(request)])


def _all(opinions: Any) -> Opinion:
    found = list(opinions)
    if False in found:
        return False
    return None if None in found else True


def _index(request: Any) -> Opinion:
    return request.index in ("", INDEX)


def _asked(request: Any) -> Opinion:
    return request.layer == LAYER and _right(request.queries)


def _right(queries: pb.Tensor, width: int = D_IN) -> Opinion:
    shape = list(queries.shape)
    if queries.dtype != 1 or len(shape) != 2 or shape[1] != width:
        return False
    if not 1 <= shape[0] <= MAX_QUERIES or len(queries.data) != 4 * shape[0] * width:
        return False
    return bool(np.isfinite(np.frombuffer(queries.data, "<f4")).all())


def _where(request: Any) -> Opinion:
    if not request.HasField("where"):
        return True
    nodes, literals, stack = 0, 0, [(request.where, 1)]
    deepest = 0
    opinions: list[Opinion] = []
    while stack:
        node, depth = stack.pop()
        nodes, deepest = nodes + 1, max(deepest, depth)
        kind = node.WhichOneof("kind")
        if kind == "comparison":
            literals += len(node.comparison.values)
            opinions.append(_compared(node.comparison))
        elif kind == "negated":
            stack.append((node.negated, depth + 1))
        elif kind is not None:
            parts = getattr(node, kind).filters
            opinions.append(len(parts) > 0)
            stack += [(part, depth + 1) for part in parts]
    if deepest > 64 or nodes > 2000 or literals > 65_536:
        return False
    return None if deepest > 40 or nodes > 900 else _all(opinions)


def _compared(comparison: pb.Comparison) -> Opinion:
    kind = COLUMNS.get(comparison.column)
    if kind is None or not 1 <= comparison.operator <= 8:
        return False
    count = len(comparison.values)
    if comparison.operator == 8:
        if count:
            return False
    elif comparison.operator != 7 and count != 1:
        return False
    allowed = {
        "string": ("string_value",),
        "bool": ("bool_value",),
    }.get(kind, ("int64_value", "double_value"))
    for value in comparison.values:
        given = value.WhichOneof("kind")
        if given not in allowed:
            return False
        if given == "double_value" and math.isnan(value.double_value):
            return False
    return True


def _column_or_none(name: str) -> Callable[[Any], Opinion]:
    return lambda request: getattr(request, name) == "" or getattr(request, name) in COLUMNS


def _strategy(*allowed: int) -> Callable[[Any], Opinion]:
    def check(request: Any) -> Opinion:
        if request.strategy == 0:
            return True
        return None if request.strategy in allowed else False  # it need not apply

    return check


def _order(request: Any) -> Opinion:
    return request.order in range(4)


def _k(request: Any) -> Opinion:
    return 1 <= request.k <= MAX_K


def _at_step(request: Any) -> Opinion:
    return not request.HasField("at_step") or 0 <= request.at_step <= STEPS


def _max_residual(request: Any) -> Opinion:
    if not request.HasField("max_residual"):
        return None  # refused by how well rows explain the output
    value = request.max_residual
    if math.isnan(value) or value < 0:
        return False
    return True if value == math.inf else None


def _ranked(request: Any) -> Opinion:
    names = ("unit", "direction", "at_step", "max_residual")
    extra = [name for name in names if request.HasField(name)]
    if request.rank_by in (0, 1):
        return not extra
    if request.rank_by != 2 or ("unit" in extra) == ("direction" in extra):
        return False
    if "unit" in extra and not 0 <= request.unit < D_OUT:
        return False
    if "direction" in extra:
        each = list(request.direction.shape)[:1] == list(request.queries.shape)[:1]
        if not each or not _right(request.direction, D_OUT):
            return False
    return _all((_at_step(request), _max_residual(request)))


def _bins(request: Any) -> Opinion:
    edges = list(request.bins)
    if not edges:
        return True
    if len(edges) < 2 or any(map(math.isnan, edges)) or sorted(set(edges)) != edges:
        return False
    if COLUMNS.get(request.group_by) not in ("int64", "double"):
        return False
    return None if any(map(math.isinf, edges)) else True


def _explained(request: Any) -> Opinion:
    names = [layer.layer for layer in request.layers]
    if not names or len(set(names)) < len(names) or not 0 <= request.k <= MAX_K:
        return False
    if not (request.k or request.group_by or request.output):
        return False
    if request.absolute and not request.group_by:
        return False
    if not all(layer.layer == LAYER and _right(layer.queries) for layer in request.layers):
        return False
    if request.HasField("max_residual") and not request.output:
        return False
    return _max_residual(request) if request.output else True


def _ids(request: Any) -> Opinion:
    kinds = {value.WhichOneof("kind") for value in request.ids}
    return 1 <= len(request.ids) <= MAX_QUERIES and kinds <= {"int64_value", "string_value"}


_CHECKS: dict[type[Any], Sequence[Callable[[Any], Opinion]]] = {
    pb.TopKRequest: (
        _index,
        _asked,
        _where,
        _k,
        _order,
        _ranked,
        _column_or_none("group_by"),
        _column_or_none("distinct"),
        _strategy(1, 2, 3),
    ),
    pb.SumsRequest: (
        _index,
        _asked,
        _where,
        lambda request: request.group_by in COLUMNS,
        _bins,
        _strategy(1, 4, 5),
    ),
    pb.DualOutputRequest: (
        _index,
        _asked,
        _where,
        _at_step,
        _max_residual,
        _column_or_none("group_by"),
        _strategy(1, 6, 7),
    ),
    pb.ExplainRequest: (_index, _where, _explained, _order, _column_or_none("group_by")),
    pb.StreamWeightsRequest: (_index, _asked),
    pb.GetExamplesRequest: (_index, _ids),
    pb.GetIndexRequest: (_index,),
    pb.ListIndexesRequest: (),
}
