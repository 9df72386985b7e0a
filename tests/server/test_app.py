"""What can be reached from outside, and what cannot."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from tests.server.conftest import Gateway
from tests.server.fake_engine import ADMIN_KEY, API_KEY, MODEL, FakeEngine


def is_openai_error(document: dict[str, dict[str, object]]) -> bool:
    return set(document) == {"error"} and set(document["error"]) == {"message", "type", "param", "code"}


def test_the_model_is_listed_ready_or_not(gate: Gateway) -> None:
    for state in ("ready", "starting"):
        gate.arm.state = state  # type: ignore[assignment]
        document = gate.client.get("/v1/models").json()
        assert document["object"] == "list"
        assert [(model["id"], model["object"]) for model in document["data"]] == [(MODEL, "model")]


def test_alive_is_not_ready(gate: Gateway) -> None:
    assert gate.client.get("/readyz").status_code == 200
    assert gate.metric("eyas_engine_up", arm="main") == 1
    gate.arm.state, gate.arm.detail = "starting", "the weights are being read"
    answer = gate.client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"status": "starting", "reason": "the weights are being read"}
    assert int(answer.headers["retry-after"]) > 0
    gate.arm.state = "down"
    assert gate.client.get("/readyz").json()["status"] == "down"
    assert gate.metric("eyas_engine_up", arm="main") == 0
    assert gate.client.get("/healthz").status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
@pytest.mark.parametrize(
    "path",
    [
        "/server_info",
        "/get_server_info",
        "/model_info",
        "/flush_cache",
        "/abort_request",
        "/generate",
        "/update_weights_from_disk",
        "/set_internal_state",
        "/v1/embeddings",
        "/v1/loads",
        "/health",
        "/ready",
        "/docs",
        "/v1/chat/completions/",
        "/v1/chat/completions/../../server_info",
        "/v1/completions/%2e%2e/%2e%2e/server_info",
        "//server_info",
        "/v1//chat/completions",
    ],
)
def test_nothing_else_exists_and_the_engine_hears_of_none(
    shared_gate: Gateway, shared_fake: FakeEngine, method: str, path: str
) -> None:
    status, body = raw_request(shared_gate.port, method, path)
    assert status == 404
    assert b'"error":{' in body.replace(b" ", b"")
    assert API_KEY.encode() not in body and ADMIN_KEY.encode() not in body
    assert shared_fake.touched == []
    assert shared_fake.aborts == []
    assert shared_fake.requests == []


def raw_request(port: int, method: str, path: str) -> tuple[int, bytes]:
    """A request whose path no client library tidies."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        connection.sendall(head.encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(answer.split(b" ", 2)[1]), answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/metrics", "GET"),
    ],
)
def test_a_wrong_method_is_told(gate: Gateway, fake: FakeEngine, method: str, path: str, allowed: str) -> None:
    answer = gate.client.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed
    assert is_openai_error(answer.json())
    assert fake.requests == []


def test_the_schema_tells_of_the_hot_routes(gate: Gateway) -> None:
    for _ in range(2):
        paths = gate.client.get("/openapi.json").json()["paths"]
        assert set(paths) == {
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/models",
            "/healthz",
            "/readyz",
            "/metrics",
        }
        assert list(paths["/v1/completions"]) == ["post"]


def test_the_schema_says_what_each_route_answers(gate: Gateway) -> None:
    """Every status and media type that a route answers with stands in the schema, which clients are generated from."""
    paths = gate.client.get("/openapi.json").json()["paths"]
    for state in ("ready", "starting"):
        gate.arm.state = state  # type: ignore[assignment]
        for path, operations in paths.items():
            for method in operations:
                for body in (b"", b"{", b'{"model":"other"}', b'{"model":"tiny","prompt":"x"}'):
                    answer = gate.client.request(method, path, content=body)
                    told = operations[method]["responses"][str(answer.status_code)].get("content")
                    found = answer.headers["content-type"].partition(";")[0]
                    assert told is None or found in told, (method, path, found)
    model = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert model == {"model": {"const": MODEL}}


def test_metrics_speak_prometheus_and_name_the_build(gate: Gateway) -> None:
    assert gate.client.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    assert gate.metric("eyas_build_info", version="0.0.test") == 1


def test_two_gateways_in_one_process_count_apart(gateways: Callable[..., Gateway]) -> None:
    one, other = gateways(), gateways()
    assert one.ask().status_code == 200
    assert one.metric("eyas_tokens_total", kind="completion") == 16
    assert other.metric("eyas_tokens_total", kind="completion") == 0
