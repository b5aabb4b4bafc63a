"""Random requests, most of them nearly right; `opinions` says which are."""

from __future__ import annotations

import math
import random
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
    pb.TopGroupsRequest,
    pb.AttributeRequest,
    pb.SelfInfluenceRequest,
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
        kind = chance.choices(KINDS, (8, 5, 5, 2, 6, 6, 4, 3, 2, 1, 1))[0]
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
        return self._tensor(self.chance.choice((1, 1, 2, 3, 9)), D_IN)

    def _tensor(self, n: int, width: int) -> pb.Tensor:
        rows = self.rng.standard_normal((n, width)).astype("<f4")
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
        elif chance.random() < 0.2:
            request.rank_by = 3
        return request

    def _topgroups(self) -> pb.TopGroupsRequest:
        chance = self.chance
        request = pb.TopGroupsRequest(
            layer=LAYER,
            queries=self._queries(),
            by=self._column() or "label",
            k=MAX_K if chance.random() < 0.01 else chance.choice((1, 2, 5, 50)),
            order=chance.randrange(4),
            strategy=chance.choice((0, 0, 0, 1, 4, 5)),
            explain_plan=chance.random() < 0.2,
            **self._common(),
        )
        if chance.random() < 0.3:
            request.rank_by = 2
            if chance.random() < 0.5:
                request.unit = chance.randrange(D_OUT)
            else:
                request.direction.CopyFrom(self._tensor(request.queries.shape[0], D_OUT))
            if chance.random() < 0.5:
                request.max_residual = math.inf
        elif chance.random() < 0.2:
            request.rank_by = 3
        return request

    def _attribute(self) -> pb.AttributeRequest:
        chance = self.chance
        queries = self._queries()
        n = queries.shape[0]
        layer = pb.AttributedLayer(layer=LAYER, queries=queries, direction=self._tensor(n, D_OUT))
        request = pb.AttributeRequest(
            layers=[layer],
            inputs=n,
            by=self._column() or "task",
            k=chance.choice((0, 1, 2, 50)),
            order=chance.randrange(4),
            **self._common(),
        )
        if chance.random() < 0.3:  # several places of one input, and inputs without any
            request.inputs = chance.choice((1, n, n + 2))
            layers = request.layers[0]
            layers.inputs.extend(sorted(chance.choices(range(request.inputs), k=n)))
        if chance.random() < 0.7:
            request.max_residual = chance.choice((0.5, math.inf, math.inf))
        return request

    def _selfinfluence(self) -> pb.SelfInfluenceRequest:
        chance = self.chance
        return pb.SelfInfluenceRequest(
            layer=LAYER,
            by=self._column() or "label",
            first=chance.choice((0, 0, 1, 50)),
            count=chance.choice((0, 0, 1, 50)),
            **self._common(),
        )

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
