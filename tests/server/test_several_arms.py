"""A gateway before several engines, by HTTP: second tries, an admin's choice of an arm, shadows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.arms import Arm
from server.auth import AdminKey
from server.config import GatewayTable
from server.shadow import Shadow
from tests.server.conftest import Gateway
from tests.server.fake_engine import ADMIN_KEY, API_KEY, MODEL, FakeEngine, wait_until


@pytest.fixture
def two(fake: FakeEngine) -> Iterator[Callable[..., Gateway]]:
    """A gateway before two fake engines: `fake` as arm a, and `.other` as arm b."""
    other = FakeEngine().start()
    running = []

    def start(weights: tuple[float, float] = (1.0, 1.0), table: GatewayTable | None = None, **told: Any) -> Gateway:
        arms = [
            Arm(name, engine.url, API_KEY, ADMIN_KEY, MODEL, f"drafter-{name}", state="ready", weight=weight)
            for name, engine, weight in zip("ab", (fake, other), weights, strict=True)
        ]
        gateway = Gateway(arms[0], table or GatewayTable(), arms[1], **told).start()
        gateway.other = other  # type: ignore[attr-defined]
        running.append(gateway)
        return gateway

    yield start
    for gateway in running:
        gateway.stop()
    other.stop()


def test_an_engine_that_is_gone_costs_no_request(two: Callable[..., Gateway], fake: FakeEngine) -> None:
    gateway = two()
    fake.stop_listening()
    # Each conversation of the dead arm is tried there first, until its breaker opens; the budget covers these.
    answers = [gateway.ask(user="", prompt_cache_key=f"c{at}") for at in range(20)]
    assert [answer.status_code for answer in answers] == [200] * 20
    assert {answer.headers["x-eyas-arm"] for answer in answers} == {"b"}
    assert gateway.metric("eyas_requests_total", code="200", arm="b") == 20
    assert gateway.metric("eyas_requests_total") == 20, "a second try is not a second request"
    rids = [seen.body["rid"] for seen in gateway.other.requests]  # type: ignore[attr-defined]
    assert len(set(rids)) == 20


def test_a_stream_that_has_begun_is_never_tried_again(two: Callable[..., Gateway], fake: FakeEngine) -> None:
    gateway = two((1.0, 0.0))
    gateway.core.arms.set_weights({"b": 1e-12})
    answer = gateway.ask(stream=True, user="dies")
    assert answer.status_code == 200 and b'"error"' in answer.content and answer.content.endswith(b"[DONE]\n\n")
    assert len(fake.requests) == 1 and not gateway.other.requests  # type: ignore[attr-defined]


def test_an_admin_chooses_an_arm(two: Callable[..., Gateway], tmp_path: Path) -> None:
    secret = tmp_path / "admin"
    secret.write_text("0123456789abcdef0")
    secret.chmod(0o600)
    gateway = two((1.0, 0.0), admin=AdminKey(secret))
    wish = {"x-eyas-arm": "b"}
    assert gateway.ask().headers["x-eyas-arm"] == "a"
    refused = gateway.ask(headers=wish)
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_required"
    answer = gateway.ask(headers={**wish, "x-eyas-admin-key": "0123456789abcdef0"})
    assert (answer.status_code, answer.headers["x-eyas-arm"]) == (200, "b")
    assert answer.headers["x-eyas-drafter"] == "drafter-b"
    seen = gateway.other.requests[0]  # type: ignore[attr-defined]
    assert not any("admin" in name.lower() for name in seen.headers)


def test_a_shadow_sees_a_share_is_bounded_and_never_answers(gateways: Any, fake: FakeEngine) -> None:
    other = FakeEngine().start()
    try:
        shadow_arm = Arm("s", other.url, API_KEY, ADMIN_KEY, MODEL, "shadow-drafter", state="ready")
        main = Arm("main", fake.url, API_KEY, ADMIN_KEY, MODEL, "little-eagle", state="ready")
        gateway = Gateway(main, GatewayTable(), shadows=[Shadow(shadow_arm, 0.5, 2)]).start()
        try:
            for at in range(10):
                answer = gateway.ask(stream=at % 2 == 0, prompt="words")
                assert answer.headers["x-eyas-arm"] == "main"
            wait_until(lambda: gateway.metric("eyas_shadow_requests_total", arm="s", result="ok") == 5)
            assert len(other.requests) == 5
            assert {seen.body["rid"] for seen in other.requests}.isdisjoint(seen.body["rid"] for seen in fake.requests)
            steps = gateway.metric("eyas_spec_verify_steps_total", arm="s", drafter="shadow-drafter")
            assert steps == sum(seen.details["spec_verify_ct"] for seen in other.requests)
            assert gateway.metric("eyas_requests_total") == 10
            # a shadow that hangs holds two places, and the others are let go
            for _ in range(10):
                assert gateway.ask(stream=True, user="", n=1).status_code == 200
            other_hang = [gateway.ask(user="slow") for _ in range(6)]
            assert all(answer.status_code == 200 for answer in other_hang)
            other.stop_listening()
            for _ in range(4):
                assert gateway.ask().status_code == 200, "a dead shadow is nobody's business"
            wait_until(lambda: gateway.metric("eyas_shadow_requests_total", arm="s", result="failed") >= 1)
        finally:
            gateway.stop()
    finally:
        other.stop()


def test_a_shadow_that_hangs_takes_no_more_than_its_places(fake: FakeEngine) -> None:
    other = FakeEngine().start()
    other.delay = 3600.0
    shadow_arm = Arm("s", other.url, API_KEY, ADMIN_KEY, MODEL, "shadow-drafter", state="ready")
    main = Arm("main", fake.url, API_KEY, ADMIN_KEY, MODEL, "little-eagle", state="ready")
    fake.delay = 0.0
    gateway = Gateway(main, GatewayTable(), shadows=[Shadow(shadow_arm, 1.0, 2)]).start()
    try:
        for _ in range(8):
            assert gateway.ask(user="slow").status_code == 200
        wait_until(lambda: len(other.requests) == 2)
        assert gateway.metric("eyas_shadow_requests_total", result="skipped") == 6
    finally:
        gateway.stop()
        other.stop()
