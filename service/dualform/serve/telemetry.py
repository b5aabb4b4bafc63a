"""Traces by OpenTelemetry: a span for each question, by gRPC's official instrumentation.

Where they go, and how many, is OpenTelemetry's own business: its environment variables, such as
OTEL_EXPORTER_OTLP_ENDPOINT, say it. Queries and tokens are in none.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from dualform._install import pip_install
from dualform.serve.config import ConfigError

_TRACED = "/dualform.v1."


class Telemetry:
    """Traces the calls of a server.

    Where the process has a tracer provider already, it is used; otherwise one that exports by OTLP
    is made, and ends with `close`.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.instrumentation import grpc as instrumentation
        except ImportError as error:
            raise ConfigError(f"telemetry: {error}: {pip_install('telemetry')}") from None
        self._trace = trace
        self._provider: Any = None
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            self._provider = _exporting()
            trace.set_tracer_provider(self._provider)
        official: Any = instrumentation
        traced = official.aio_server_interceptor(
            filter_=lambda details: str(details.method).startswith(_TRACED)
        )
        self.interceptors = (traced, _Generators())

    def ended(self, facts: dict[str, Any]) -> None:
        """What is known of the call whose span is current; `facts` as in its line of the log."""
        span = self._trace.get_current_span()
        for name, value in facts.items():
            span.set_attribute(f"dualform.{name}", value)
        code = grpc.StatusCode[facts["code"]]
        span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            # gRPC ends such calls itself, and tells nobody.
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, code.name))

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()


def _exporting() -> Any:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before.
    resource = Resource({"service.name": "dualform"}).merge(Resource.create())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class _Generators(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Makes generators of handlers that write their answers themselves: the instrumentation knows
    no others."""

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The same handler, if need be as a generator that yields nothing."""
        handler = await continuation(handler_call_details)
        for kind in ("unary_stream", "stream_stream"):
            behavior = getattr(handler, kind, None)
            if inspect.iscoroutinefunction(behavior):
                return getattr(grpc, f"{kind}_rpc_method_handler")(
                    _generator(behavior),
                    request_deserializer=handler.request_deserializer,
                    response_serializer=handler.response_serializer,
                )
        return handler


def _generator(behavior: Callable[..., Awaitable[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
        await behavior(request, context)
        return
        yield

    return answers
