"""What a server says about itself: its indexes, their layers, its limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dualform.client.errors import bad_answer
from dualform.v1 import attribution_pb2 as pb

_HEALTH: dict[int, str] = {pb.HEALTH_SERVING: "serving", pb.HEALTH_DAMAGED: "damaged"}
_COLUMN_TYPES: dict[int, str] = {
    pb.COLUMN_TYPE_INT64: "int64",
    pb.COLUMN_TYPE_DOUBLE: "float64",
    pb.COLUMN_TYPE_STRING: "str",
    pb.COLUMN_TYPE_BOOL: "bool",
}


@dataclass(frozen=True)
class ServerLimits:
    """The most that one request may ask for; the client splits batches to stay below.

    Attributes:
        max_k: Largest k.
        max_queries: Queries per request.
        max_message_bytes: Bytes of a request, and of an answer.
    """

    max_k: int
    max_queries: int
    max_message_bytes: int


@dataclass(frozen=True)
class IndexSummary:
    """One line of what is served.

    Attributes:
        name: What to pass as `index=`.
        health: "serving", or "damaged": not answered from.
        health_reason: What is damaged and what to do; empty where nothing is.
        version: Which version of the index is served, as `index_version` of its answers.
    """

    name: str
    health: str
    health_reason: str
    version: str = ""


@dataclass(frozen=True)
class InexactMark:
    """From `from_step` on the dual form of a layer is not exact, because of `reason`."""

    from_step: int
    reason: str


@dataclass(frozen=True)
class Sampling:
    """Which rows were recorded, masks apart.

    Attributes:
        every: Those of steps 0, N, 2 N and so on.
        sample: Of so large a part of the examples, drawn at each step.
        seed: Of the draws.
        zero_rows: False: without rows whose value is exactly zero.
    """

    every: int
    sample: float
    seed: int
    zero_rows: bool


@dataclass(frozen=True)
class Residence:
    """What of a layer lies on a GPU.

    Attributes:
        device: Such as "cuda:0".
        rows: How many of the layer's.
        key_bytes: What their keys take there.
        value_bytes: Likewise their values; 0 where they do not lie there.
    """

    device: str
    rows: int
    key_bytes: int
    value_bytes: int


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU that was asked for.

    Attributes:
        name: Such as "cuda:0".
        title: What it is.
        memory_bytes: In all.
        budget_bytes: What rows may take, of all indexes together.
        used_bytes: What they do take.
        refused: Why it is not used, and the CPU answers in its place; empty where it is.
    """

    name: str
    title: str
    memory_bytes: int
    budget_bytes: int
    used_bytes: int
    refused: str


@dataclass(frozen=True)
class LayerInfo:
    """One layer of an index.

    Attributes:
        name: As in `model.named_modules()`.
        kind: As in the recording, such as "linear".
        d_in, d_out: Sizes of key and value.
        bias: Whether the layer has one.
        rows: Rows in the layer's memory.
        row_space: Layers of the same number share row ids and metadata.
        values: False for an index without values: no dual output.
        columns: Metadata columns: name to "int64", "float64", "str" or "bool".
        inexact: Marks, in step order; empty where the dual form is exact throughout.
        dropped: Rows that training had and that were not recorded, by reason: "every", "rows" (a
            mask), "sample" or "zero" (their value).
        residences: What of it lies on GPUs now.
    """

    name: str
    kind: str
    d_in: int
    d_out: int
    bias: bool
    rows: int
    row_space: int
    values: bool
    columns: Mapping[str, str]
    inexact: tuple[InexactMark, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)
    residences: tuple[Residence, ...] = ()

    @property
    def exactness(self) -> str:
        """ "exact", or from which step on it is not, and why."""
        if not self.inexact:
            return "exact"
        return "; ".join(f"inexact from step {m.from_step}: {m.reason}" for m in self.inexact)


@dataclass(frozen=True)
class IndexInfo:
    """One index.

    Attributes:
        name: What to pass as `index=`.
        health, health_reason: As in IndexSummary.
        steps: Optimizer steps recorded.
        optimizer: Its class name, such as "SGD".
        layers: By name, in recording order.
        version: As in IndexSummary.
        sampling: Which rows were recorded; None for all.
        devices: The GPUs of whoever answers.
    """

    name: str
    health: str
    health_reason: str
    steps: int
    optimizer: str
    layers: Mapping[str, LayerInfo]
    version: str = ""
    sampling: Sampling | None = None
    devices: tuple[DeviceInfo, ...] = ()


def limits_of(message: pb.Limits) -> ServerLimits:
    """From the wire.

    Raises:
        InternalError: By these limits nothing could be asked.
    """
    found = ServerLimits(message.max_k, message.max_queries, message.max_message_bytes)
    _at_least(1, **vars(found))
    return found


def summaries_of(message: pb.ListIndexesResponse) -> list[IndexSummary]:
    """From the wire.

    Raises:
        InternalError: A name is there twice.
    """
    _once("index", [index.name for index in message.indexes])
    return [
        IndexSummary(index.name, _health(index.health), index.health_reason, index.version)
        for index in message.indexes
    ]


def index_of(message: pb.IndexInfo) -> IndexInfo:
    """From the wire.

    Raises:
        InternalError: A layer is there twice, or a number can be none.
    """
    _once("layer", [layer.name for layer in message.layers])
    _at_least(0, steps=message.steps)
    return IndexInfo(
        name=message.name,
        health=_health(message.health),
        health_reason=message.health_reason,
        steps=message.steps,
        optimizer=message.optimizer,
        layers={layer.name: _layer(layer) for layer in message.layers},
        version=message.version,
        sampling=_sampling(message.sampling) if message.HasField("sampling") else None,
        devices=tuple(map(_device, message.devices)),
    )


def _sampling(message: pb.Sampling) -> Sampling:
    if not 0 < message.sample <= 1:
        raise bad_answer(f"a sample of {message.sample:g} of the examples")
    _at_least(1, every=message.every)
    return Sampling(message.every, message.sample, message.seed, message.zero_rows)


def _device(message: pb.DeviceInfo) -> DeviceInfo:
    found = DeviceInfo(
        message.name,
        message.title,
        message.memory_bytes,
        message.budget_bytes,
        message.used_bytes,
        message.refused,
    )
    _at_least(0, memory=found.memory_bytes, budget=found.budget_bytes, used=found.used_bytes)
    return found


def _layer(message: pb.LayerInfo) -> LayerInfo:
    _once(f"column of layer {message.name!r}", [column.name for column in message.columns])
    _at_least(1, d_in=message.d_in, d_out=message.d_out)
    _at_least(0, rows=message.rows, row_space=message.row_space)
    for reason, dropped in message.dropped.items():  # a reason may be called as any field
        _at_least(0, **{f"rows dropped by {reason!r}": dropped})
    return LayerInfo(
        name=message.name,
        kind=message.kind,
        d_in=message.d_in,
        d_out=message.d_out,
        bias=message.bias,
        rows=message.rows,
        row_space=message.row_space,
        values=message.values,
        columns={c.name: _COLUMN_TYPES.get(c.type, "unknown") for c in message.columns},
        inexact=tuple(InexactMark(mark.from_step, mark.reason) for mark in message.inexact),
        dropped=dict(message.dropped),
        residences=tuple(map(_residence, message.residences)),
    )


def _residence(message: pb.Residence) -> Residence:
    found = Residence(message.device, message.rows, message.key_bytes, message.value_bytes)
    _at_least(0, rows=found.rows, keys=found.key_bytes, values=found.value_bytes)
    return found


def _health(health: int) -> str:
    return _HEALTH.get(health, "unknown")


def _once(what: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        again = Counter(names).most_common(1)[0][0]
        raise bad_answer(f"{what} {again!r} twice")


def _at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise bad_answer(f"{name} of {number}, where {least} is the least")
