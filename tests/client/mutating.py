"""A server whose answers are the engine's, changed on their way: as bytes, over a real socket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from dualform.engine.messages.catalog import Catalog
from dualform.v1 import attribution_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["AttributionService"]
# What becomes of an answer's messages (one, unless it comes in parts), which are the change's own.
Change = Callable[[list[Any]], Iterable[Any]]


class Answers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers from a catalog, each question once.

    Args:
        catalog: Answers.

    Attributes:
        changes: By rpc, what becomes of its answers.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._known: dict[tuple[str, bytes], list[Message]] = {}
        self.changes: dict[str, Change] = {}

    def service(self, details: Any) -> Any:
        method = SERVICE.methods_by_name[details.method.rpartition("/")[2]]

        def parts(request: bytes, context: Any) -> Iterator[bytes]:
            messages = self._answer(method, request)
            for message in self.changes.get(method.name, list)(messages):
                yield message if isinstance(message, bytes) else message.SerializeToString()

        if method.name == "StreamWeights":
            return grpc.unary_stream_rpc_method_handler(parts)
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: next(iter(parts(request, context)))
        )

    def _answer(self, method: Any, request: bytes) -> list[Any]:
        key = (method.name, request)
        if key not in self._known:
            question = getattr(pb, method.input_type.name).FromString(request)
            streams = method.name == "StreamWeights"
            self._known[key] = (
                list(self._catalog.stream(question))
                if streams
                else [self._catalog.answer(question)]
            )
        return [
            type(message).FromString(message.SerializeToString()) for message in self._known[key]
        ]


@contextmanager
def mutating(catalog: Catalog) -> Iterator[tuple[str, Answers]]:
    """Yields "HOST:PORT", and what has the changes."""
    answers = Answers(catalog)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((answers,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", answers
    finally:
        server.stop(0).wait()


def mutations(message: Any, path: str = "") -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Every field of a message in a few wrong ways: what is changed, and how."""
    for field in message.DESCRIPTOR.fields:
        name = f"{path}{field.name}"
        value = getattr(message, field.name)
        repeated = hasattr(value, "MergeFrom") and not isinstance(value, Message)
        if repeated and field.message_type and field.message_type.GetOptions().map_entry:
            for key in value:
                yield f"{name}[{key}]=-1", _at(field.name, lambda m, k=key: m.__setitem__(k, -1))
        elif repeated:
            if not len(value):
                continue
            yield f"{name}:none", _at(field.name, lambda r: r.__delitem__(slice(None)))
            yield f"{name}:less", _at(field.name, lambda r: r.pop())
            yield f"{name}:twice", _at(field.name, lambda r: r.append(r[-1]))
            if len(value) > 1 and value[0] != value[-1]:
                yield f"{name}:turned", _at(field.name, lambda r: r.reverse())
            for place in {0, len(value) - 1}:
                if field.message_type:
                    for what, change in mutations(value[place], f"{name}[{place}]."):
                        yield what, _inside(field.name, place, change)
                else:
                    for other in _others(field, value[place]):
                        yield (
                            f"{name}[{place}]={_shown(other)}",
                            _at(field.name, lambda r, p=place, o=other: r.__setitem__(p, o)),
                        )
        elif field.message_type:
            if not message.HasField(field.name):
                yield f"{name}:there", lambda m, f=field.name: getattr(m, f).SetInParent()
                continue
            yield f"{name}:absent", lambda m, f=field.name: m.ClearField(f)
            for what, change in mutations(value, f"{name}."):
                yield what, _inside(field.name, None, change)
        else:
            for other in _others(field, value):
                yield f"{name}={_shown(other)}", lambda m, f=field.name, o=other: setattr(m, f, o)


def _others(field: Any, value: Any) -> list[Any]:
    if field.enum_type is not None:
        return [0, 1, 2, 99]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        large = 2**30 if field.cpp_type == field.CPPTYPE_INT32 else 2**62
        return [-1, 0, value + 1, large, -large]
    if isinstance(value, float):
        return [float("nan"), float("inf"), -1.0]
    if isinstance(value, str):
        return ["", value + "x", "\x00"]
    turned = value[::-1]
    return [b"", value[:-1], value + b"\0", b"\xff" * len(value), bytes(len(value)), turned]


def _shown(value: Any) -> str:
    return repr(value if not isinstance(value, bytes) else value[:4])


def _at(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda message: change(getattr(message, name))


def _inside(name: str, place: int | None, change: Callable[[Any], None]) -> Callable[[Any], None]:
    def apply(message: Any) -> None:
        found = getattr(message, name)
        change(found if place is None else found[place])

    return apply
