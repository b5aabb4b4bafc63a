"""The service's methods: bytes in, an answer from the catalog, bytes out.

Requests are answered and encoded in the scan's thread, so the event loop stays free for health
checks whatever is asked. Decoded there too, but for those of up to 1 MiB that may be answered
together: whether they are alike must be known before.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from dualform.engine.errors import EngineError, InvalidArgumentError
from dualform.engine.messages.catalog import Catalog
from dualform.engine.messages.writing import write
from dualform.serve.budget import MemoryBudget
from dualform.serve.calls import Answer, Call, Calls, Parts
from dualform.serve.costs import Experience, kind_of
from dualform.serve.joined import MOST_BYTES, JoinedScans
from dualform.serve.scans import Asker, ScanQueue, Stop
from dualform.serve.status import Refusal, or_refusal
from dualform.v1 import attribution_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["AttributionService"]
# Answered from memory, at once, however long the queue is.
CHEAP = frozenset({"ListIndexes", "GetIndex"})
# Answered together where they differ in nothing but their queries.
JOINED = frozenset({"TopK", "TopGroups", "Sums", "DualOutput"})

# Of what a caller named, in the log.
_MOST_LETTERS = 100


@dataclass(frozen=True)
class _Service:
    """What all methods answer with."""

    catalog: Catalog
    scans: ScanQueue
    experience: Experience
    memory: MemoryBudget


def attribution_handlers(
    catalog: Catalog, scans: ScanQueue, calls: Calls, memory: MemoryBudget
) -> grpc.GenericRpcHandler[bytes, bytes]:
    """Handlers of every method of `dualform.v1.AttributionService`.

    Args:
        catalog: Answers.
        scans: Runs what is not cheap.
        calls: What all methods share.
        memory: What the catalog takes for an answer is given back to it.
    """
    service = _Service(catalog, scans, Experience(), memory)
    handlers = {}
    for method in SERVICE.methods:
        shared = (method.name, method.input_type.name, service)
        handlers[method.name] = (
            calls.stream(method.name, _parts(*shared))
            if method.server_streaming
            else calls.unary(method.name, _answer(*shared))
        )
    return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)


def _answer(method: str, request_name: str, service: _Service) -> Answer:
    catalog, scans, experience = service.catalog, service.scans, service.experience

    def decoded(call: Call, data: bytes) -> Any:
        request = _decoded(request_name, data)
        _admit(call, request, catalog)
        return request

    def answer_all(requests: Sequence[Any], stop: Stop) -> list[_Found | Refusal]:
        wanted = _plans_asked(requests)
        with service.memory.lease():
            if len(requests) == 1:
                return [_found(catalog.answer(requests[0], stop), wanted, stop)]
            return [
                Refusal.of(found) if isinstance(found, EngineError) else _found(found, wanted, stop)
                for found in catalog.answer_together(requests, stop)
            ]

    joined = JoinedScans(scans, answer_all, method)

    async def found_of(call: Call, data: bytes) -> _Found | Refusal:
        if method not in CHEAP and len(data) > MOST_BYTES:
            by_size = (method, len(data).bit_length())
            call.asker.seconds = experience.seconds(by_size)
            some = await scans.run(
                lambda stop: answer_all([decoded(call, data)], stop), what=method, asker=call.asker
            )
            if isinstance(some, Refusal):
                return some
            experience.learn(by_size, call.asker.computed_s)
            return some[0]
        request = or_refusal(method, lambda: decoded(call, data))
        if isinstance(request, Refusal):
            return request
        if method in CHEAP:
            return or_refusal(method, lambda: _listed(call, catalog.answer(request)))
        kind = kind_of(method, request)
        call.asker.seconds = experience.seconds(kind)
        if method in JOINED:
            found: _Found | Refusal = await joined.run(
                _key(method, request), request, len(data), call.asker
            )
        else:
            some = await scans.run(
                lambda stop: answer_all([request], stop), what=method, asker=call.asker
            )
            found = some if isinstance(some, Refusal) else some[0]
        if not isinstance(found, Refusal):
            experience.learn(kind, call.asker.computed_s)
        return found

    async def answered(call: Call, data: bytes) -> bytes | Refusal:
        found = await found_of(call, data)
        if isinstance(found, Refusal):
            return found
        call.facts.update(found.facts)
        return found.data

    return answered


def _parts(method: str, request_name: str, service: _Service) -> Parts:
    """An answer in parts: each is computed once the client has taken the one before."""
    catalog, scans, experience = service.catalog, service.scans, service.experience

    async def sent(call: Call, data: bytes) -> AsyncGenerator[bytes | Refusal, None]:
        current: list[Stop] = []
        parts: list[Any] = []

        def next_part(stop: Stop) -> bytes | None:
            current[:] = [stop]
            with service.memory.lease():
                if not parts:
                    request = _decoded(request_name, data)
                    _admit(call, request, catalog)
                    parts.append(catalog.stream(request, lambda: current[0]()))
                part = next(parts[0], None)
                return None if part is None else bytes(part.SerializeToString())

        kind = (method, len(data).bit_length())
        asker = call.asker
        asker.seconds = experience.seconds(kind)
        with scans.stream(asker.client) as refused:
            part: bytes | Refusal | None = refused
            if refused is None:
                part = await scans.run(next_part, what=method, asker=asker)
            while isinstance(part, bytes):
                yield part
                part_asker = Asker(asker.client, asker.connection, experience.seconds(kind))
                part = await scans.run(next_part, what=method, asker=part_asker, admitted=True)
                if isinstance(part, bytes):  # the end takes no time
                    experience.learn(kind, part_asker.computed_s)
                asker.queued_s += part_asker.queued_s
                asker.computed_s += part_asker.computed_s
        if part is not None:
            yield part

    return sent


class _Found(NamedTuple):
    """An encoded answer, and what the report says of it."""

    data: bytes
    facts: dict[str, Any]


def _admit(call: Call, request: Any, catalog: Catalog) -> None:
    """Note what is asked, of the index that the client may ask about.

    Raises:
        EngineError: There is none.
    """
    facts = call.facts
    if "index" in request.DESCRIPTOR.fields_by_name:
        request.index = call.client.index_for(request.index, catalog.names)
        facts["index"] = request.index[:_MOST_LETTERS] or ",".join(catalog.names)
    layers = [request] if hasattr(request, "layer") else getattr(request, "layers", [])
    if layers:
        facts["layer"] = ",".join(layer.layer[:_MOST_LETTERS] for layer in layers[:8])
        asked = [layer.queries for layer in layers if hasattr(layer, "queries")]
        if asked:
            facts["queries"] = sum(queries.shape[0] for queries in asked if queries.shape)
    if getattr(request, "k", 0):
        facts["k"] = request.k


def _plans_asked(requests: Sequence[Any]) -> bool:
    """Whether they ask for the plan; from now on they do, for the report."""
    asked = bool(getattr(requests[0], "explain_plan", False))
    for request in requests:
        if hasattr(request, "explain_plan"):
            request.explain_plan = True
    return asked


def _found(response: Any, plan_wanted: bool, stop: Stop | None = None) -> _Found:
    facts: dict[str, Any] = {}
    fields = response.DESCRIPTOR.fields_by_name
    if "coverage" in fields:
        several = [response.coverage] if hasattr(response.coverage, "rows") else response.coverage
        facts["rows"] = sum(coverage.rows for coverage in several)
    if "plan" in fields:
        name = pb.Strategy.Name(response.plan.strategy)
        facts["strategy"] = name.removeprefix("STRATEGY_").lower()
        if not plan_wanted:
            response.ClearField("plan")
    return _Found(write(response, stop), facts)


def _listed(call: Call, response: Any) -> _Found:
    """What is served, as far as this client may know."""
    allowed = call.client.indexes
    if allowed is not None and hasattr(response, "indexes"):
        visible = [summary for summary in response.indexes if summary.name in allowed]
        del response.indexes[:]
        response.indexes.extend(visible)
    return _found(response, False)


def _key(method: str, request: Any) -> bytes:
    """The same for requests that differ in nothing but their queries, and their directions."""
    alike = type(request)()
    alike.CopyFrom(request)
    alike.ClearField("queries")
    if "direction" in alike.DESCRIPTOR.fields_by_name and alike.HasField("direction"):
        alike.direction.Clear()
    return method.encode() + bytes(alike.SerializeToString(deterministic=True))


def _decoded(request_name: str, data: bytes) -> Any:
    try:
        return getattr(pb, request_name).FromString(data)
    except DecodeError:
        raise InvalidArgumentError(
            f"the bytes are no {request_name}, or its filter is nested too deep",
            reason="UNREADABLE",
        ) from None
