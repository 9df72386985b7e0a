"""Who takes a request: shares, stickiness, health by outcome, second tries, shadows; pure first, then by HTTP."""

from __future__ import annotations

import asyncio
import collections
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from server.arms import Arm, Arms, sticky_key
from server.auth import AdminKey, KeyRing, add_key
from server.breaker import BREAK_AFTER, OPEN_S, Breaker, RetryBudget
from server.call import Call
from server.config import GatewayTable, Limits
from server.errors import ApiError
from server.health import RemoteArm, capacity_of
from server.shadow import Shadow
from server.upstream import Upstream
from tests.server.conftest import Gateway
from tests.server.fake_engine import ADMIN_KEY, API_KEY, MODEL, FakeEngine, wait_until
from tests.server.test_admission import Clock


def arm(name: str, weight: float = 1.0, *, url: str = "", drafter: str = "d", **changes: Any) -> Arm:
    return Arm(name, url or f"http://{name}", "", "", MODEL, drafter, state="ready", weight=weight, **changes)


def call(user: str = "", *, structured: bool = False, wish: str | None = None, **asked: Any) -> Call:
    return Call(
        path="/v1/completions",
        rid="0" * 32,
        raw=b"{}",
        tail=b"}",
        stream=False,
        wants_usage=False,
        wants_details=False,
        prompts=None,
        each=1,
        structured=structured,
        asked={"user": user, **asked},
        arm_wish=wish,
    )


def chosen(arms: Arms, asked: Call) -> Arm:
    found = arms.choose(asked)
    arms.report(found, "ok")
    return found


def test_conversations_are_shared_out_by_weight_and_stay() -> None:
    arms = Arms([arm("a", 3.0), arm("b", 1.0), arm("c", 0.0)])
    users = [f"user {at}" for at in range(4000)]
    first = {user: chosen(arms, call(user)).name for user in users}
    counts = collections.Counter(first.values())
    assert counts["c"] == 0
    assert counts["a"] / len(users) == pytest.approx(0.75, abs=0.03)
    assert {user: chosen(arms, call(user)).name for user in users} == first
    arms.set_weights({"b": 1.5})
    moved = [user for user in users if chosen(arms, call(user)).name != first[user]]
    assert all(first[user] == "a" for user in moved), "more weight for b moves nobody away from b"
    assert len(moved) / len(users) == pytest.approx(1.5 / 4.5 - 0.25, abs=0.03)


def test_an_engine_more_behind_a_name_moves_nobody_to_another_name() -> None:
    arms = Arms([arm("a"), arm("b", url="http://1"), arm("b", url="http://2")])
    users = [f"user {at}" for at in range(1000)]
    first = {user: chosen(arms, call(user)) for user in users}
    assert collections.Counter(each.name for each in first.values())["a"] / 1000 == pytest.approx(0.5, abs=0.06)
    arms.replace("b", [arm("b", url="http://1"), arm("b", url="http://2"), arm("b", url="http://3")])
    for user in users:
        again = chosen(arms, call(user))
        assert again.name == first[user].name
        assert again.url in (first[user].url, "http://3")


def test_the_sticky_key() -> None:
    def key(**asked: Any) -> bytes:
        return sticky_key(asked, "k")

    turn = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    later = [*turn, {"role": "assistant", "content": "…"}, {"role": "user", "content": "two"}]
    assert key(prompt_cache_key="p", user="u", messages=turn) == key(prompt_cache_key="p", user="v")
    assert key(user="u", messages=turn) == key(user="u", messages=later[2:])
    assert key(messages=turn) == key(messages=later)
    assert key(messages=turn) != key(messages=later[2:])
    assert key(messages=turn) != sticky_key({"messages": turn}, "another key")
    assert key(prompt="x" * 5000) == key(prompt="x" * 6000) != key(prompt="y")
    for odd in ({}, {"messages": []}, {"messages": ["x"]}, {"prompt": [1, 2]}, {"user": 3}):
        assert len(sticky_key(odd, "k")) == 16


def test_an_arm_without_room_passes_its_conversation_on() -> None:
    arms = Arms([arm("a", capacity=1), arm("b", capacity=1)])
    first = arms.choose(call("u"))
    second = arms.choose(call("u"))
    assert {first.name, second.name} == {"a", "b"}
    assert arms.choose(call("u")) is first, "with no room anywhere it waits where it belongs"


def test_structured_output_goes_to_an_arm_without_speculation() -> None:
    arms = Arms([arm("a"), arm("plain", drafter="none")])
    assert {chosen(arms, call(f"{at}", structured=True)).name for at in range(40)} == {"plain"}
    assert {chosen(arms, call(f"{at}")).name for at in range(40)} == {"a", "plain"}
    arms.members[1].state = "down"
    assert chosen(arms, call(structured=True)).name == "a"
    off = Arms(arms.members, structured_plain=False)
    off.members[1].state = "ready"
    assert {chosen(off, call(f"{at}", structured=True)).name for at in range(40)} == {"a", "plain"}


def test_a_wish_beats_weights() -> None:
    arms = Arms([arm("a"), arm("b", 0.0)])
    assert chosen(arms, call(wish="b")).name == "b"
    with pytest.raises(ApiError) as refused:
        arms.choose(call(wish="z"))
    assert refused.value.status == 404
    arms.members[1].state = "down"
    with pytest.raises(ApiError) as refused:
        arms.choose(call(wish="b"))
    assert refused.value.status == 503


def test_a_breaker_opens_lets_one_try_and_closes() -> None:
    breaker = Breaker()
    for _ in range(BREAK_AFTER - 1):
        assert not breaker.failed(0.0)
    assert breaker.lets_in(0.0)
    assert not breaker.succeeded()
    for _ in range(BREAK_AFTER):
        opened = breaker.failed(10.0)
    assert opened and breaker.state(10.0) == "open" and not breaker.lets_in(10.0)
    later = 10.0 + OPEN_S
    assert breaker.state(later) == "half-open" and breaker.lets_in(later)
    breaker.sent()
    assert not breaker.lets_in(later), "one trial at a time"
    breaker.abandoned()
    assert breaker.lets_in(later)
    breaker.sent()
    assert breaker.failed(later)
    assert not breaker.lets_in(later + OPEN_S) and breaker.lets_in(later + 2 * OPEN_S)
    breaker.sent()
    assert breaker.succeeded() and breaker.state(later) == "closed"


def test_an_arm_that_fails_is_left_alone_and_its_share_goes_to_the_others() -> None:
    clock = Clock()
    arms = Arms([arm("a", capacity=4), arm("b", capacity=2)], clock=clock)
    seen: list[int] = []
    arms.on_change = lambda: seen.append(arms.capacity)
    for _ in range(BREAK_AFTER):
        arms.report(arms.choose(call(wish="a")), "died")
    assert seen == [2]
    assert {chosen(arms, call(f"{at}")).name for at in range(30)} == {"b"}
    clock.now += OPEN_S
    found = [arms.choose(call(f"{at}")) for at in range(40)]
    assert [each.name for each in found].count("a") == 1, "one trial"
    for each in found:
        arms.report(each, "ok")
    assert seen == [2, 6]
    for outcome in ("error", "refused", "busy", "gone"):  # one client's odd request closes an arm to nobody
        for _ in range(3 * BREAK_AFTER):
            arms.report(arms.choose(call(wish="b")), outcome)  # type: ignore[arg-type]
    assert arms.members[1].breaker.state(clock.now) == "closed"
    assert [each.inflight for each in arms.members] == [0, 0]


def test_one_arm_alone_that_fails_is_told_with_a_time() -> None:
    arms = Arms([arm("a")], clock=Clock())
    for _ in range(BREAK_AFTER):
        arms.report(arms.choose(call()), "unreachable")
    with pytest.raises(ApiError) as refused:
        arms.choose(call())
    assert (refused.value.status, refused.value.code) == (503, "engine_failing")
    assert refused.value.headers["retry-after"] == "2"


def test_second_tries_have_a_budget() -> None:
    budget = RetryBudget()
    assert [budget.spend() for _ in range(6)] == [True] * 5 + [False]
    for _ in range(11):
        budget.earn()
    assert [budget.spend(), budget.spend()] == [True, False]


def test_which_failures_are_worth_a_second_try() -> None:
    arms = Arms([arm("a"), arm("b")])
    asked = call("u")
    for outcome, worth in (("unreachable", True), ("died", True), ("busy", True), ("timeout", False), ("error", False)):
        first = arms.choose(asked)
        second = arms.choose_again(asked, [first], outcome)  # type: ignore[arg-type]
        assert (second is not None) is worth, outcome
        assert second is not first
        if second:
            assert arms.choose_again(asked, [first, second], "died") is None


def test_what_an_engine_says_of_its_capacity() -> None:
    assert capacity_of({"internal_states": [{"effective_max_running_requests_per_dp": 24}], "dp_size": 2}) == 48
    assert capacity_of({"max_running_requests": 7, "internal_states": [{}]}) == 7
    for odd in ({}, {"max_running_requests": None}, {"internal_states": "x"}, {"max_running_requests": 0}):
        assert capacity_of(odd) is None


def test_a_name_with_several_addresses_is_several_engines() -> None:
    async def test() -> None:
        known = ["10.0.0.1", "10.0.0.2"]

        async def resolve(host: str, port: int) -> list[str]:
            if not known:
                raise OSError("no such name")
            assert (host, port) == ("engines.svc", 30000)
            return list(known)

        arms = Arms([arm("other"), arm("far", 2.0, url="http://engines.svc:30000")])
        remote = RemoteArm(arms, arms.members[1], resolve=resolve)
        await remote.refresh()
        assert [each.url for each in arms.members[1:]] == ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]
        assert {(each.name, each.weight, each.state) for each in arms.members[1:]} == {("far", 2.0, "starting")}
        stays = arms.members[2]
        arms.set_weights({"far": 0.5})
        known[0] = "fd00::7"
        await remote.refresh()
        assert {each.url for each in arms.members[1:]} == {"http://[fd00::7]:30000", "http://10.0.0.2:30000"}
        assert stays in arms.members and {each.weight for each in arms.members[1:]} == {0.5}
        known.clear()
        await remote.refresh()
        assert len(arms.members) == 3, "a name that cannot be looked up changes nothing"
        known.append("10.0.0.9")
        await remote.refresh()
        assert [each.url for each in arms.members[1:]] == ["http://engines.svc:30000"]

    asyncio.run(test())


def test_probes_find_out_who_answers(fake: FakeEngine) -> None:
    async def test() -> None:
        arms = Arms([arm("far", url=fake.url)])
        (far,) = arms.members
        far.state, far.api_key = "starting", API_KEY
        remote = RemoteArm(arms, far)
        changes: list[str] = []
        arms.on_change = lambda: changes.append(far.state)
        upstream = Upstream(connect_timeout_s=5.0)
        await remote.probe(upstream, far)
        assert changes == ["ready"]
        await asyncio.to_thread(fake.stop_listening)
        for _ in range(2):
            await remote.probe(upstream, far)
            assert far.state == "ready"
        await remote.probe(upstream, far)
        assert far.state == "down" and "cannot be reached" in far.detail
        upstream.close()
        assert changes == ["ready", "down"]

    asyncio.run(test())
    assert "/ready" in fake.touched


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


def test_keys_and_limits_by_http(gateways: Any, fake: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key_id, key = add_key(file, "a", Limits(requests_per_minute=3, tokens_per_minute=600))
    main = Arm("main", fake.url, API_KEY, ADMIN_KEY, MODEL, "little-eagle", state="ready")
    gateway = Gateway(main, GatewayTable(), keys=KeyRing(file, Limits())).start()
    try:
        refused = gateway.ask()
        assert refused.status_code == 401 and refused.headers["www-authenticate"].startswith("Bearer")
        assert refused.json()["error"]["code"] == "invalid_api_key" and refused.headers["x-request-id"]
        assert gateway.client.get("/v1/models").status_code == 401
        mine = {"authorization": f"Bearer {key}"}
        assert gateway.client.get("/v1/models", headers=mine).status_code == 200
        answers = [gateway.ask(headers=mine, max_tokens=16, stream=at == 1) for at in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert answers[0].headers["x-ratelimit-remaining-requests"] == "2"
        assert answers[0].headers["x-ratelimit-limit-tokens"] == "600"
        # the second is told what the first has used: 7 + 16 tokens
        assert 577 <= int(answers[1].headers["x-ratelimit-remaining-tokens"]) < 600
        over = answers[3]
        assert over.json()["error"]["type"] == "rate_limit_error" and int(over.headers["retry-after"]) in range(1, 61)
        assert gateway.metric("eyas_tokens_total", key_id=key_id, kind="completion") == 3 * 16
        assert gateway.metric("eyas_rejected_total", reason="rate_limit_requests") == 1
        assert key not in gateway.client.get("/metrics").text
        assert len(fake.requests) == 3
        sent = [{name.lower(): value for name, value in seen.headers.items()} for seen in fake.requests]
        assert all(headers["authorization"] == f"Bearer {API_KEY}" for headers in sent)
    finally:
        gateway.stop()


def test_the_queue_by_http(gateways: Any, fake: FakeEngine) -> None:
    gateway = gateways(max_inflight=1, queue_limit=1, queue_timeout_s=30.0)

    async def test() -> None:
        body = {"model": MODEL, "prompt": "x", "user": "gated"}
        async with aiohttp.ClientSession(gateway.url) as session:

            async def ask() -> tuple[int, dict[str, Any], Any]:
                async with session.post("/v1/completions", json=body) as answer:
                    return answer.status, dict(answer.headers), json.loads(await answer.read())

            first = asyncio.create_task(ask())
            await asyncio.to_thread(fake.seen, 1)
            second = asyncio.create_task(ask())
            await asyncio.to_thread(wait_until, lambda: gateway.metric("eyas_queue_depth") == 1)
            status, headers, answer = await ask()
            assert (status, answer["error"]["code"]) == (429, "queue_full")
            assert "Retry-After" in headers or "retry-after" in headers
            second.cancel()  # the client leaves the queue
            await asyncio.to_thread(wait_until, lambda: gateway.metric("eyas_queue_depth") == 0)
            third = asyncio.create_task(ask())
            await asyncio.to_thread(wait_until, lambda: gateway.metric("eyas_queue_depth") == 1)
            fake.gate.set()
            assert (await first)[0] == (await third)[0] == 200
            assert len(fake.requests) == 2, "who left the queue reached no engine"

    asyncio.run(test())
    assert gateway.metric("eyas_queue_wait_seconds_count") == 1
    assert gateway.metric("eyas_client_disconnects_total", phase="waiting") == 1
    wait_until(lambda: gateway.core.admission.inflight == 0)
