"""A span for each request, where OpenTelemetry is installed and a collector is named (`gateway.tracing_endpoint`).

The engine then gets this span's W3C context, in place of the client's own, which goes on as it is otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from server.call import ROUTES

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from server.exchange import Exchange

OPERATIONS = {"chat": "chat", "completions": "text_completion"}  # gen_ai.operation.name


class TracingError(ValueError):
    """Tracing that was asked for and cannot be had."""


class Tracing:
    """Makes a span for each request, a child of the client's own where that sent its context."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def begin(self, exchange: Exchange) -> RequestSpan:
        """The span of an exchange, which from now on carries its context to the engine instead of the client's."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(exchange.trace)
        route = ROUTES[exchange.call.path]
        span = self.tracer.start_span(OPERATIONS[route], context=context, kind=SpanKind.SERVER)
        carried: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carried, context=set_span_in_context(span))
        exchange.trace = carried
        return RequestSpan(span, OPERATIONS[route])


class RequestSpan:
    """One request's span."""

    def __init__(self, span: Span, operation: str) -> None:
        self.span = span
        self.operation = operation

    def end(self, exchange: Exchange) -> None:
        """Say how the request went, in OpenTelemetry's words where it has them. No prompt, no answer, no key."""
        for name, value in _attributes(exchange, self.operation).items():
            self.span.set_attribute(name, value)
        if exchange.first_frame_at is not None and exchange.call.stream:
            begun_ns = time.time_ns() - int(exchange.age_s * 1e9)
            at = begun_ns + int((exchange.first_frame_at - exchange.begun) * 1e9)
            self.span.add_event("gen_ai.first_frame", timestamp=at)
        self.span.end()


def _attributes(exchange: Exchange, operation: str) -> Mapping[str, str | int | float | bool]:
    arm = exchange.arm
    found: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": operation,
        "http.response.status_code": exchange.status,
        "eyas.key_id": exchange.call.key_id,
        "eyas.stream": exchange.call.stream,
        "eyas.queued_s": exchange.ticket.queued_s,
        "eyas.tokens": exchange.tokens,
    }
    if arm is not None:
        found |= {"gen_ai.request.model": arm.served_name, "eyas.arm": arm.name, "eyas.drafter": arm.drafter}
    if exchange.status >= 499:
        found["error.type"] = str(exchange.status)
    return found


def start_tracing(endpoint: str, version: str) -> tuple[Tracing, Any]:
    """Send spans to a collector's OTLP/HTTP address. Returns the tracing, and the provider to shut down at the end.

    Raises TracingError where OpenTelemetry's SDK is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingError(
            f"gateway.tracing_endpoint needs OpenTelemetry's SDK, which is not installed ({error.name}): "
            "pip install 'eyas[tracing]', or remove the key."
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "eyas", "service.version": version}))
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider.get_tracer("eyas", version)), provider
