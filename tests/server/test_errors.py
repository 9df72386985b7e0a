"""The engine's error shapes, and what a client library gets of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.errors import ApiError, engine_answered, engine_framed

FLAT = b'{"object":"error","message":"too long","type":"BadRequest","param":"messages","code":400}'
FULL = b'{"object":"error","message":"The queue is full.","type":"x","param":null,"code":503}'
UNKNOWN = "the engine answered with status"


@pytest.mark.parametrize(
    ("status", "raw", "message", "kind"),
    [
        (400, FLAT, "too long", "invalid_request_error"),
        (401, b'{"error":"Unauthorized"}', "Unauthorized", "authentication_error"),
        (403, b'{"error":{"message":"no","type":"x","param":null,"code":403}}', "no", "permission_error"),
        (429, b'{"error":{"message":"slow down","code":"rate"}}', "slow down", "rate_limit_error"),
        (503, FULL, "The queue is full.", "server_error"),
        (500, b"Internal Server Error", f"{UNKNOWN} 500.", "server_error"),
        (500, b"", f"{UNKNOWN} 500.", "server_error"),
        (500, b'{"detail":"x"}', f"{UNKNOWN} 500.", "server_error"),
        (422, b"[1]", f"{UNKNOWN} 422.", "invalid_request_error"),
        (400, b'{"message":{"a":1}}', f"{UNKNOWN} 400.", "invalid_request_error"),
    ],
)
def test_every_shape_becomes_openais(status: int, raw: bytes, message: str, kind: str) -> None:
    error = engine_answered(status, raw)
    assert error.status == status
    document = json.loads(error.body())
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert document["error"]["message"] == message
    assert document["error"]["type"] == kind
    assert document["error"]["code"] in (None, "rate")


def test_where_it_was_told_the_parameter_and_a_named_code_are_kept() -> None:
    error = engine_answered(400, b'{"object":"error","message":"m","param":"top_p","code":"bad"}')
    assert (error.param, error.code) == ("top_p", "bad")


def test_the_engines_source_path_is_cut_off() -> None:
    raw = json.dumps({"object": "error", "message": "1 validation error:\n  {'x': 1}\n\n  File \"/opt/a.py\", line 1"})
    assert engine_answered(400, raw.encode()).message == "1 validation error:\n  {'x': 1}"


@pytest.mark.parametrize("status", [204, 302, 600])
def test_a_status_that_is_no_error_becomes_502(status: int) -> None:
    assert engine_answered(status, b"{}").status == 502


@pytest.mark.parametrize(
    ("status", "header"), [(401, "www-authenticate"), (429, "retry-after"), (503, "retry-after"), (400, None)]
)
def test_headers_that_clients_act_on(status: int, header: str | None) -> None:
    assert set(engine_answered(status, b"{}").headers) == ({header} if header else set())


@pytest.mark.parametrize(
    ("found", "status"),
    [({"message": "m", "code": 503}, 503), ({"message": "m"}, 502), ("text", 502), ({"code": True}, 502), ([], 502)],
)
def test_an_error_frame_names_its_status(found: Any, status: int) -> None:
    assert engine_framed(found).status == status


def test_a_frame_is_one_event() -> None:
    frame = ApiError(400, "a\n\nb").frame()
    assert frame.startswith(b"data: {")
    assert frame.count(b"\n\n") == 1
    assert json.loads(frame[6:])["error"]["message"] == "a\n\nb"
