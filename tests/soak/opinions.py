"""An opinion of one's own on which requests are right: `valid`.

Written down from docs/server.md and the proto, not from the code: True, False, or None where an
answer and a refusal are both in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dualform.v1 import attribution_pb2 as pb

from .fuzzing import COLUMNS, D_IN, D_OUT, INDEX, LAYER, MAX_K, MAX_QUERIES, STEPS

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
    if request.rank_by in (0, 1, 3):  # by weight or cosine
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


def _attributed(request: Any) -> Opinion:
    names = [layer.layer for layer in request.layers]
    if not names or len(set(names)) < len(names) or not 0 <= request.k <= MAX_K:
        return False
    if not 1 <= request.inputs <= MAX_QUERIES:
        return False
    return all(_of_layer(layer, request.inputs) for layer in request.layers)


def _of_layer(layer: pb.AttributedLayer, inputs: int) -> bool:
    if layer.layer != LAYER or not _right(layer.queries) or not _right(layer.direction, D_OUT):
        return False
    n, which = layer.queries.shape[0], list(layer.inputs)
    if layer.direction.shape[0] != n:
        return False
    if not which:
        return n == inputs
    return len(which) == n and sorted(which) == which and which[0] >= 0 and which[-1] < inputs


def _by(request: Any) -> Opinion:
    return request.by in COLUMNS


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
    pb.TopGroupsRequest: (
        _index,
        _asked,
        _where,
        _k,
        _order,
        _ranked,
        _by,
        _strategy(1, 4, 5),
    ),
    pb.AttributeRequest: (_index, _where, _attributed, _order, _by, _max_residual),
    pb.SelfInfluenceRequest: (
        _index,
        _where,
        _by,
        lambda request: request.layer == LAYER and request.first >= 0 and request.count >= 0,
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
