"""Who takes a request: shares, stickiness, health by outcome, second tries; without a gateway."""

from __future__ import annotations

import asyncio
import collections
import time
from typing import Any

import pytest
from aiohttp import web

from server.arms import Arm, Arms, sticky_key
from server.breaker import BREAK_AFTER, OPEN_S, TRIAL_S, Breaker, RetryBudget
from server.call import Call
from server.errors import ApiError
from server.health import UNKNOWN, RemoteArm, drafter_of
from server.resolved import capacity_of
from server.upstream import Upstream
from tests.server.fake_engine import API_KEY, MODEL, FakeEngine
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
    breaker.sent(later)
    assert not breaker.lets_in(later), "one trial at a time"
    breaker.abandoned()
    assert breaker.lets_in(later)
    breaker.sent(later)
    assert breaker.failed(later)
    assert not breaker.lets_in(later + OPEN_S) and breaker.lets_in(later + 2 * OPEN_S)
    breaker.sent(later)
    assert breaker.succeeded() and breaker.state(later) == "closed"


def opened(at: float) -> Breaker:
    breaker = Breaker()
    for _ in range(BREAK_AFTER):
        breaker.failed(at)
    assert breaker.state(at) == "open"
    return breaker


def test_failures_of_requests_sent_earlier_do_not_lengthen_the_pause() -> None:
    breaker = opened(0.0)
    for _ in range(20):
        assert not breaker.failed(0.1)
    breaker.sent(OPEN_S)
    assert breaker.failed(OPEN_S)
    assert not breaker.failed(OPEN_S), "of a second trial, sent before the first one's end"
    assert breaker.lets_in(3 * OPEN_S) and not breaker.lets_in(3 * OPEN_S - 0.1)


def test_a_closed_breaker_counts_at_once_though_it_was_open_just_now() -> None:
    breaker = opened(0.0)
    assert breaker.succeeded()  # a request that was sent before
    for _ in range(BREAK_AFTER):
        turned = breaker.failed(0.1)
    assert turned and not breaker.lets_in(OPEN_S) and breaker.lets_in(OPEN_S + 0.1)


def test_a_trial_that_takes_long_keeps_nobody_out_for_long() -> None:
    breaker = opened(0.0)
    breaker.sent(OPEN_S)
    assert not breaker.lets_in(OPEN_S + TRIAL_S - 0.1) and breaker.lets_in(OPEN_S + TRIAL_S)
    breaker.sent(OPEN_S + TRIAL_S)
    assert not breaker.lets_in(OPEN_S + TRIAL_S)
    assert breaker.wait_s(OPEN_S + TRIAL_S) == TRIAL_S


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
        away = arms.members[1]

        async def acquaint(new: Arm) -> None:
            assert away in arms.members or stays in arms.members, "until the new ones are known, the old ones serve"
            met.append(new.url)
            arms.set_weights({"far": arms.members[1].weight})
            new.state = "ready"

        met: list[str] = []
        await remote.refresh(acquaint)
        assert met == [each.url for each in arms.members[1:]] == ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]
        assert {(each.name, each.weight, each.state) for each in arms.members[1:]} == {("far", 2.0, "ready")}
        stays = arms.members[2]
        arms.set_weights({"far": 0.5})
        known[0] = "fd00::7"
        await remote.refresh(acquaint)
        assert {each.url for each in arms.members[1:]} == {"http://[fd00::7]:30000", "http://10.0.0.2:30000"}
        assert stays in arms.members and {each.weight for each in arms.members[1:]} == {0.5}
        known.clear()
        await remote.refresh(acquaint)
        assert len(arms.members) == 3, "a name that cannot be looked up changes nothing"
        known.append("10.0.0.9")
        await remote.refresh(acquaint)
        assert [each.url for each in arms.members[1:]] == ["http://engines.svc:30000"]
        assert met == [f"http://{each}:30000" for each in ("10.0.0.1", "10.0.0.2", "[fd00::7]", "engines.svc")]

    asyncio.run(test())


def test_who_waits_outlives_a_name_that_gets_other_addresses(gateways: Any, fake: FakeEngine) -> None:
    """One engine more, and then one fewer: at no time is there none, which would turn the queue away."""
    gateway = gateways(max_inflight=1)
    other = fake.url.replace("127.0.0.1", "127.0.0.2")
    changes: list[int] = []
    before = gateway.core.arms.on_change
    gateway.core.arms.on_change = lambda: (before(), changes.append(gateway.core.arms.capacity))[0]
    known = ["127.0.0.1", "127.0.0.2"]
    gateway.core.arms.members[0].url = f"http://localhost:{fake.url.rpartition(':')[2]}"

    async def resolve(host: str, port: int) -> list[str]:
        return list(known)

    remote = RemoteArm(gateway.core.arms, gateway.core.arms.members[0], resolve=resolve)
    remote.members = {gateway.core.arms.members[0].url: gateway.core.arms.members[0]}

    async def look() -> None:
        upstream = Upstream(connect_timeout_s=5.0)
        await remote.refresh(lambda each: remote.probe(upstream, each))
        upstream.close()

    asyncio.run(look())
    assert {each.url for each in gateway.core.arms.members} == {fake.url, other}
    known.pop()
    asyncio.run(look())
    assert len(gateway.core.arms.members) == 1
    assert changes and min(changes) > 0


def test_an_arm_without_weight_makes_no_room_for_the_others_requests() -> None:
    arms = Arms([arm("a", capacity=1), arm("canary", 0.0, capacity=4)])
    assert arms.capacity == 1
    arms.set_weights({"canary": 0.1})
    assert arms.capacity == 5
    arms.set_weights({"a": 0.0})
    arms.members[1].state = "down"
    assert arms.capacity == 1, "an administrator may still ask for it"
    assert chosen(arms, call(wish="a")).name == "a"


@pytest.mark.parametrize("count", [1, 2])
def test_no_weight_at_all_is_told(count: int) -> None:
    arms = Arms([arm(name, 0.0) for name in "ab"[:count]])
    assert not arms.ready
    with pytest.raises(ApiError) as refused:
        arms.choose(call())
    assert refused.value.status == 503 and "weight" in refused.value.message and refused.value.headers["retry-after"]


@pytest.mark.parametrize("name", ["a\r\nx-evil: 1", "a\x00", "/m/a\n"])
def test_a_drafters_name_that_no_header_can_hold(name: str) -> None:
    assert drafter_of({"speculative_draft_model_path": name}) == UNKNOWN


def test_an_engine_that_talks_nonsense_to_a_probe_is_not_ready(fake: FakeEngine, monkeypatch: Any) -> None:
    async def test(said: bytes) -> None:
        async def touched(_: Any, request: Any) -> Any:
            return web.Response(body=said)

        monkeypatch.setattr(FakeEngine, "_touched", touched)
        lying = FakeEngine().start()
        try:
            arms = Arms([arm("far", url=lying.url)])
            arms.members[0].state = "starting"
            upstream = Upstream(connect_timeout_s=5.0)
            await RemoteArm(arms, arms.members[0]).probe(upstream, arms.members[0])
            upstream.close()
            assert arms.members[0].state == "starting" and "DecodeError" in arms.members[0].detail
        finally:
            lying.stop()

    for said in (b"[" * 100_000, b"<html>", b"\xff", b'{"a":' * 5000):
        asyncio.run(test(said))


def test_a_long_answer_as_a_trial_keeps_nobody_out(gateways: Any, fake: FakeEngine) -> None:
    gateway = gateways()
    for _ in range(BREAK_AFTER):
        assert gateway.ask(user="dies_at_once").status_code == 502
    assert gateway.ask().status_code == 503
    time.sleep(OPEN_S)
    body = {"model": MODEL, "prompt": "x", "user": "hangs", "stream": True}
    with gateway.client.stream("POST", "/v1/completions", json=body) as trial:
        next(trial.iter_raw())
        assert gateway.ask().status_code == 200


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
