"""Spans: one for each request, in the client's trace, its context handed on; and a clear word without the SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace

from server import tracing
from server.arms import Arm
from server.config import GatewayTable
from server.tracing import Tracing, TracingError
from tests.server.conftest import Gateway
from tests.server.fake_engine import ADMIN_KEY, API_KEY, MODEL, FakeEngine, wait_until

TRACE, PARENT = 0x11112222333344445555666677778888, 0x1234567890ABCDEF
TRACEPARENT = f"00-{TRACE:032x}-{PARENT:016x}-01"


class Recorded(trace.NonRecordingSpan):
    """A span that remembers what it is told."""

    def __init__(self, name: str, context: trace.SpanContext, parent: trace.SpanContext) -> None:
        super().__init__(context)
        self.name, self.parent, self.attributes, self.events, self.ended = name, parent, {}, [], 0

    def set_attribute(self, key: str, value: Any) -> None:
        self.attributes[key] = value

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        self.events.append((name, timestamp))

    def end(self, end_time: int | None = None) -> None:
        self.ended += 1


class Tracer(trace.NoOpTracer):
    def __init__(self) -> None:
        self.spans: list[Recorded] = []

    def start_span(self, name: str, context: Any = None, kind: Any = None, **_: Any) -> Any:
        parent = trace.get_current_span(context).get_span_context()
        made = trace.SpanContext(parent.trace_id or TRACE + 1, 0xA000 + len(self.spans), False, trace.TraceFlags(1))
        self.spans.append(Recorded(name, made, parent))
        return self.spans[-1]


@pytest.fixture
def traced(fake: FakeEngine) -> Iterator[tuple[Gateway, Tracer]]:
    arm = Arm("main", fake.url, API_KEY, ADMIN_KEY, MODEL, "little-eagle", state="ready")
    gateway, tracer = Gateway(arm, GatewayTable()), Tracer()
    gateway.core.relay.tracing = Tracing(tracer)
    yield gateway.start(), tracer
    gateway.stop()


def test_a_span_in_the_clients_trace(traced: tuple[Gateway, Tracer], fake: FakeEngine) -> None:
    gateway, tracer = traced
    gateway.ask(stream=True, headers={"traceparent": TRACEPARENT})
    gateway.ask("/v1/completions", prompt="a secret plan", user="flat_error")
    wait_until(lambda: len(tracer.spans) == 2 and all(span.ended for span in tracer.spans))
    first, second = tracer.spans
    assert (first.name, second.name) == ("chat", "text_completion")
    assert (first.parent.trace_id, first.parent.span_id) == (TRACE, PARENT)
    sent = {name.lower(): value for name, value in fake.requests[0].headers.items()}
    assert sent["traceparent"] == f"00-{TRACE:032x}-{0xA000:016x}-01"
    assert first.attributes["eyas.arm"] == "main" and first.attributes["http.response.status_code"] == 200
    assert first.events[0][0] == "gen_ai.first_frame" and first.events[0][1] > 1_600_000_000_000_000_000
    assert second.attributes["error.type" if second.attributes["http.response.status_code"] >= 499 else "eyas.drafter"]
    assert not second.parent.is_valid and [span.ended for span in tracer.spans] == [1, 1]
    assert "secret" not in repr([span.attributes for span in tracer.spans])


def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracingError, match=r"pip install 'eyas\[tracing\]'"):
        tracing.start_tracing("http://127.0.0.1:4318", "0")
