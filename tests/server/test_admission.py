"""The door: slots, a bounded queue that is fair by key, rates, and nothing lost when clients leave at any moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from server.admission import Admission, Ticket
from server.auth import Caller, KeyRing
from server.config import Limits
from server.errors import ApiError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def caller(key_id: str = "a", **limits: int) -> Caller:
    return Caller(key_id, Limits(**limits))


def door(capacity: int = 1, queue_limit: int = 100, timeout: float = 30.0, clock: Clock | None = None) -> Admission:
    keys = KeyRing(None, Limits())
    return Admission(keys, capacity=capacity, queue_limit=queue_limit, queue_timeout_s=timeout, clock=clock or Clock())


async def enter(admission: Admission, who: Caller, slots: int = 1) -> Ticket:
    ticket = admission.ticket(who)
    await ticket.enter(slots)
    return ticket


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def queued(admission: Admission, who: Caller, order: list[str], slots: int = 1) -> asyncio.Task[Ticket]:
    """A request that writes its key's id when its turn comes, and holds its slot."""

    async def wait() -> Ticket:
        ticket = await enter(admission, who, slots)
        order.append(ticket.key_id)
        return ticket

    return asyncio.create_task(wait())


def test_one_in_one_waits_and_comes_in_when_the_first_is_done() -> None:
    async def test() -> None:
        clock = Clock()
        admission = door(clock=clock)
        first = await enter(admission, caller())
        second = queued(admission, caller(), [])
        await turns()
        assert (admission.inflight, admission.waiting, second.done()) == (1, 1, False)
        clock.now += 3
        first.release(0)
        ticket = await second
        assert (admission.inflight, admission.waiting, ticket.queued_s) == (1, 0, 3.0)
        ticket.release(0)
        assert admission.inflight == 0

    run(test())


def test_keys_take_turns_however_many_one_of_them_sends() -> None:
    async def test() -> None:
        admission = door()
        held = await enter(admission, caller("x"))
        order: list[str] = []
        tasks = [queued(admission, caller("a"), order) for _ in range(6)]
        await turns()
        tasks += [queued(admission, caller(name), order) for name in "bbc"]
        await turns()
        held.release(0)
        for _ in range(9):
            await turns()
            done = next(task for task in tasks if task.done())
            tasks.remove(done)
            done.result().release(0)
        assert order == list("abcabaaaa")

    run(test())


def test_a_full_queue_refuses_whoever_holds_most_of_it() -> None:
    async def test() -> None:
        admission = door(queue_limit=4)
        held = await enter(admission, caller("x"))
        greedy = [queued(admission, caller("a"), []) for _ in range(4)]
        await turns()
        with pytest.raises(ApiError) as refused:  # one more of the same key
            await enter(admission, caller("a"))
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        assert int(refused.value.headers["retry-after"]) >= 1
        modest = queued(admission, caller("b"), [])  # another key takes the place of the newest of the greedy one
        await turns()
        with pytest.raises(ApiError):
            await greedy[3]
        assert admission.waiting == 4 and not any(task.done() for task in [*greedy[:3], modest])
        for task in [*greedy[:3], modest]:
            task.cancel()
        await turns()
        held.release(0)
        assert (admission.inflight, admission.waiting) == (0, 0)

    run(test())


def test_no_queue_at_all() -> None:
    async def test() -> None:
        admission = door(queue_limit=0)
        await enter(admission, caller())
        with pytest.raises(ApiError, match="waiting"):
            await enter(admission, caller("b"))

    run(test())


def test_who_waits_too_long_is_told() -> None:
    async def test() -> None:
        admission = door(timeout=0.02)
        await enter(admission, caller())
        with pytest.raises(ApiError) as refused:
            await enter(admission, caller("b"))
        assert (refused.value.status, refused.value.code, admission.waiting) == (429, "queue_timeout", 0)

    run(test())


def test_a_client_that_leaves_the_queue_frees_its_place() -> None:
    async def test() -> None:
        admission = door()
        held = await enter(admission, caller())
        gone, stays = queued(admission, caller(), []), queued(admission, caller(), [])
        await turns()
        gone.cancel()
        await turns()
        assert admission.waiting == 1
        held.release(0)
        (await stays).release(0)
        assert (admission.inflight, admission.waiting) == (0, 0)

    run(test())


def test_a_client_that_leaves_in_the_turn_in_which_its_slot_comes_gives_it_back() -> None:
    async def test() -> None:
        for release_first in (True, False):
            admission = door()
            held = await enter(admission, caller())
            gone, stays = queued(admission, caller(), []), queued(admission, caller("b"), [])
            await turns()
            if release_first:
                held.release(0)
                gone.cancel()
            else:
                gone.cancel()
                held.release(0)
            await turns()
            assert gone.cancelled()
            (await stays).release(0)
            assert (admission.inflight, admission.waiting) == (0, 0)

    run(test())


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    async def test() -> None:
        admission = door(capacity=4)
        held = [await enter(admission, caller()) for _ in range(4)]
        order: list[str] = []
        large = queued(admission, caller("large"), order, slots=3)
        await turns()
        small = queued(admission, caller("small"), order)
        for ticket in held[:3]:
            await turns()
            assert order == []
            ticket.release(0)
        await large
        await turns()
        assert order == ["large"], "the small one stands behind it"
        held[3].release(0)
        await small
        assert (await admission_of(door(capacity=2), 9)) == 2  # more than there are: capped

    async def admission_of(admission: Admission, slots: int) -> int:
        return (await enter(admission, caller(), slots))._slots

    run(test())


def test_a_key_at_its_own_limit_waits_and_holds_up_nobody() -> None:
    async def test() -> None:
        admission = door(capacity=4)
        limited = caller("a", max_inflight=1)
        first = await enter(admission, limited)
        waits = queued(admission, limited, [])
        await turns()
        assert not waits.done()
        other = queued(admission, caller("b"), [])
        await turns()
        assert other.done(), "a key at its own limit must not block the others"
        first.release(0)
        await waits

    run(test())


def test_requests_a_minute() -> None:
    async def test() -> None:
        clock = Clock()
        admission = door(capacity=100, clock=clock)
        who = caller(requests_per_minute=3)
        tickets = [await enter(admission, who) for _ in range(3)]
        with pytest.raises(ApiError) as refused:
            await enter(admission, who)
        headers = refused.value.headers
        assert (refused.value.status, refused.value.code) == (429, "rate_limit_requests")
        assert headers["retry-after"] == "20"
        assert headers["x-ratelimit-limit-requests"] == "3" and headers["x-ratelimit-remaining-requests"] == "0"
        assert headers["x-ratelimit-reset-requests"] == "60.000s"
        await enter(admission, caller("b"))  # another key is not concerned
        clock.now += 20
        await enter(admission, who)
        with pytest.raises(ApiError):
            await enter(admission, who)
        assert [dict(ticket.headers)[b"x-ratelimit-remaining-requests"] for ticket in tickets] == [b"2", b"1", b"0"]
        clock.now += 600  # a minute's worth at most
        for _ in range(3):
            await enter(admission, who)
        with pytest.raises(ApiError):
            await enter(admission, who)

    run(test())


def test_tokens_a_minute_are_charged_afterwards_and_may_be_overdrawn() -> None:
    async def test() -> None:
        clock = Clock()
        admission = door(capacity=100, clock=clock)
        who = caller(tokens_per_minute=600)
        ticket = await enter(admission, who)
        ticket.release(900)
        with pytest.raises(ApiError) as refused:
            await enter(admission, who)
        assert refused.value.code == "rate_limit_tokens"
        assert refused.value.headers["retry-after"] == "31"  # 301 tokens at 10 a second
        assert refused.value.headers["x-ratelimit-remaining-tokens"] == "0"
        clock.now += 31
        await enter(admission, who)

    run(test())


def test_a_refused_request_costs_nothing_of_the_rate() -> None:
    async def test() -> None:
        admission = door(queue_limit=0)
        who = caller(requests_per_minute=2)
        first = await enter(admission, who)
        for _ in range(5):
            with pytest.raises(ApiError, match="waiting"):
                await enter(admission, who)
        first.release(0)
        assert dict((await enter(admission, who)).headers)[b"x-ratelimit-remaining-requests"] == b"0"

    run(test())


def test_new_limits_hold_at_once_and_forget_nothing() -> None:
    async def test() -> None:
        admission = door(capacity=100)
        for _ in range(5):
            await enter(admission, caller(requests_per_minute=10))
        admission.adopt([caller(requests_per_minute=6)])
        ticket = await enter(admission, caller(requests_per_minute=6))
        assert dict(ticket.headers)[b"x-ratelimit-remaining-requests"] == b"0"  # 5 are left of 10, and so 1 of 6
        admission.adopt([caller(requests_per_minute=8)])
        ticket = await enter(admission, caller(requests_per_minute=8))
        assert dict(ticket.headers)[b"x-ratelimit-remaining-requests"] == b"1"
        admission.adopt([caller()])
        assert (await enter(admission, caller())).headers == ()

    run(test())


def test_more_room_lets_in_who_waits_and_no_room_turns_them_away() -> None:
    async def test() -> None:
        admission = door()
        await enter(admission, caller())
        order: list[str] = []
        waiting = [queued(admission, caller(), order) for _ in range(4)]
        await turns()
        admission.resize(3)
        await turns()
        assert len(order) == 2
        admission.resize(0)
        for task in waiting[2:]:
            with pytest.raises(ApiError, match="down"):
                await task
        assert (admission.waiting, admission.inflight) == (0, 3)
        with pytest.raises(ApiError, match="down"):
            await enter(admission, caller())

    run(test())


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_the_sums_come_out(seed: int) -> None:
    """Random arrivals, cancellations, releases and resizes; never over capacity, and nothing is left at the end."""

    async def test() -> None:
        dice = random.Random(seed)
        admission = door(capacity=4, queue_limit=12, timeout=5.0)
        callers = [caller("a"), caller("b", max_inflight=2), caller("c"), caller("d", max_inflight=1)]
        tasks: list[asyncio.Task[Ticket]] = []
        held: list[Ticket] = []
        served = 0
        for _ in range(3000):
            what = dice.random()
            if what < 0.45:
                tasks.append(queued(admission, dice.choice(callers), [], slots=dice.choice((1, 1, 1, 2, 9))))
            elif what < 0.6 and tasks:
                dice.choice(tasks).cancel()
            elif what < 0.95 and held:
                held.pop(dice.randrange(len(held))).release(0)
            elif what > 0.98:
                admission.resize(dice.choice((3, 4, 5)))
            if dice.random() < 0.7:
                await asyncio.sleep(0)
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                if not task.cancelled() and task.exception() is None:
                    held.append(task.result())
                    served += 1
            assert admission.waiting <= 12
        for _ in range(1000):
            while held:
                held.pop().release(0)
            await turns()
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                if not task.cancelled() and task.exception() is None:
                    held.append(task.result())
        assert not tasks, "somebody waits though all slots are free"
        assert (admission.inflight, admission.waiting) == (0, 0)
        assert served > 300
        admission.adopt([])
        assert not admission._accounts and not admission._turns

    run(test())
