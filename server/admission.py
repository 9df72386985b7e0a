"""How many may come in, and who is next: slots of the engines, a bounded queue that is fair by key, rates by key.

All of it runs in the gateway's one event loop. A request that finds a free slot and nobody waiting takes it without
a task switch. Limits hold for this replica alone.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from time import monotonic

from starlette.types import Scope

from server.arms import UNBOUNDED
from server.auth import AdminKey, Caller, KeyRing
from server.call import Call
from server.errors import RETRY_AFTER_LOADING_S, ApiError, Headers

SECONDS_A_MINUTE = 60.0
QUEUE_RETRY_AFTER_S = 2  # a queue of requests moves within seconds


def engine_down() -> ApiError:
    """What a request is told that comes while no engine is up."""
    headers = {"retry-after": str(RETRY_AFTER_LOADING_S)}
    return ApiError(503, "the engine is down.", code="engine_down", headers=headers)


class Bucket:
    """A token bucket that holds one minute's allowance. It may be overdrawn by what is known only afterwards."""

    __slots__ = ("level", "limit", "updated")

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self.level = float(limit)
        self.updated = now

    def resize(self, limit: int) -> None:
        """Another allowance; what was spent stays spent."""
        self.level += limit - self.limit
        self.limit = limit

    def refill(self, now: float) -> float:
        """What is left now."""
        earned = (now - self.updated) * self.limit / SECONDS_A_MINUTE
        self.level = min(float(self.limit), self.level + earned)
        self.updated = now
        return self.level

    def seconds_until(self, level: float) -> float:
        """How long until so much is left, as of the last refill."""
        return max(0.0, (level - self.level) * SECONDS_A_MINUTE / self.limit)


class Ticket:
    """One request's right to be here, from before its body is read until `release`, which must come exactly once.

    key_id: its key's name in the metrics. headers: what its answer tells of its key's limits. arm_wish: the arm that an
    administrator asked for. queued_s: how long it waited.
    """

    __slots__ = ("_account", "_admission", "_slots", "arm_wish", "headers", "queued_s")

    def __init__(self, admission: Admission, account: Account, arm_wish: str | None) -> None:
        self._admission = admission
        self._account = account
        self._slots = 0
        self.arm_wish = arm_wish
        self.headers: Headers = account.headers(admission.clock()) if account.limited else ()
        self.queued_s = 0.0

    @property
    def key_id(self) -> str:
        return self._account.caller.key_id

    async def wait(self, call: Call) -> None:
        """Wait for a slot for each answer that `call` asks for. It may be cancelled at any moment.

        Raises ApiError: 503 where no engine is up, 429 where the queue is full or the wait too long.
        """
        await self.enter(call.answers)

    async def enter(self, slots: int = 1) -> None:
        """Wait for `slots` slots, or for all there are."""
        admission, account = self._admission, self._account
        self._slots = admission.take_at_once(account, slots)
        if self._slots:
            return
        begun = admission.clock()
        try:
            self._slots = await admission.wait(account, slots)
        except ApiError:
            account.refund()
            raise
        self.queued_s = admission.clock() - begun

    def release(self, tokens: int) -> None:
        """The request is over, whatever became of it; its key pays for so many tokens."""
        if tokens and self._account.tokens is not None:
            self._account.tokens.refill(self._admission.clock())
            self._account.tokens.level -= tokens
        if self._slots:
            self._admission.freed(self._account, self._slots)


class Account:
    """What one key uses now, and what it may."""

    __slots__ = ("caller", "inflight", "requests", "tokens", "waiting")

    def __init__(self, caller: Caller, now: float) -> None:
        self.inflight = 0
        self.waiting: deque[_Waiter] = deque()
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.caller = caller
        self.adopt(caller, now)

    def adopt(self, caller: Caller, now: float) -> None:
        """The key's limits, which may be others than before."""
        self.caller = caller
        self.requests = _resized(self.requests, caller.limits.requests_per_minute, now)
        self.tokens = _resized(self.tokens, caller.limits.tokens_per_minute, now)

    @property
    def limited(self) -> bool:
        return self.requests is not None or self.tokens is not None

    def has_room(self) -> bool:
        limit = self.caller.limits.max_inflight
        return limit is None or self.inflight < limit

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        found = []
        for kind, bucket in ((b"requests", self.requests), (b"tokens", self.tokens)):
            if bucket is not None:
                left = max(0, math.floor(bucket.refill(now)))
                found += [
                    (b"x-ratelimit-limit-" + kind, b"%d" % bucket.limit),
                    (b"x-ratelimit-remaining-" + kind, b"%d" % left),
                    (b"x-ratelimit-reset-" + kind, b"%.3fs" % bucket.seconds_until(bucket.limit)),
                ]
        return found

    def spend(self, now: float) -> None:
        """One request more. Raises ApiError 429 over a rate, and then nothing is spent."""
        if self.tokens is not None and self.tokens.refill(now) <= 0:
            message = f"this key's limit of {self.tokens.limit:,} tokens a minute is used up."
            raise self.refusal(message, "rate_limit_tokens", self.tokens.seconds_until(1), now)
        if self.requests is not None:
            if self.requests.refill(now) < 1:
                message = f"this key's limit of {self.requests.limit:,} requests a minute is used up."
                raise self.refusal(message, "rate_limit_requests", self.requests.seconds_until(1), now)
            self.requests.level -= 1

    def refund(self) -> None:
        """The request was refused for no fault of its key."""
        if self.requests is not None:
            self.requests.level += 1

    def refusal(self, message: str, code: str, retry_after_s: float, now: float) -> ApiError:
        """A 429 with what the client needs to know to come back in time."""
        headers = {"retry-after": str(max(1, math.ceil(retry_after_s)))}
        headers |= {name.decode(): value.decode() for name, value in self.headers(now)}
        return ApiError(429, message, code=code, headers=headers)

    def idle(self, now: float) -> bool:
        """Whether nothing would be lost with it."""
        full = all(bucket is None or bucket.refill(now) >= bucket.limit for bucket in (self.requests, self.tokens))
        return not self.inflight and not self.waiting and full


class _Waiter:
    __slots__ = ("account", "future", "slots")

    def __init__(self, account: Account, slots: int) -> None:
        self.account = account
        self.slots = slots
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Admission:
    """The door.

    keys: who may come in. capacity: slots in all (one for each answer that an engine makes at once); 0 while no engine
    is up, and then `measure` is asked anew before anyone is turned away with `no_engine`. queue_limit: requests that
    may wait, of all keys together. queue_timeout_s: how long one may. admin: whose key lets a request choose its arm.
    """

    def __init__(
        self,
        keys: KeyRing,
        *,
        capacity: int = UNBOUNDED,
        queue_limit: int = 256,
        queue_timeout_s: float = 60.0,
        admin: AdminKey | None = None,
        no_engine: Callable[[], ApiError] = engine_down,
        measure: Callable[[], int] = int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.keys = keys
        self.capacity = capacity
        self.queue_limit = queue_limit
        self.queue_timeout_s = queue_timeout_s
        self.admin = admin or AdminKey(None)
        self.no_engine = no_engine
        self.measure = measure
        self.clock = clock
        self.closed: ApiError | None = None  # what everyone new is told, where the gateway is about to end
        self.inflight = 0  # slots
        self.waiting = 0  # requests
        self._accounts: dict[str, Account] = {}
        self._turns: OrderedDict[str, Account] = OrderedDict()  # keys with someone waiting, whose turn is next first

    def admit(self, scope: Scope) -> Ticket:
        """A ticket for the request whose head is `scope`. Raises ApiError.

        401 without a key of the file, 403 for an arm's choice without the admin key, 429 (with Retry-After and
        x-ratelimit-*) over one of the key's rates.
        """
        if self.closed is not None:
            raise self.closed
        authorization = wish = admin_key = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"x-eyas-arm":
                wish = value
            elif name == b"x-eyas-admin-key":
                admin_key = value
        caller = self.keys.who(authorization)
        if wish is not None:
            self.admin.check(admin_key)
        return self.ticket(caller, None if wish is None else wish.decode("latin-1"))

    def ticket(self, caller: Caller, arm_wish: str | None = None) -> Ticket:
        """A ticket for `caller`; counted against the key's requests a minute. Raises ApiError 429."""
        account = self._accounts.get(caller.key_id)
        if account is None:
            account = self._accounts[caller.key_id] = Account(caller, self.clock())
        if account.limited:
            account.spend(self.clock())
        return Ticket(self, account, arm_wish)

    def take_at_once(self, account: Account, slots: int) -> int:
        """The slots, capped at the capacity, where they are free and nobody waits; else 0."""
        slots = min(slots, self.capacity)
        if self.waiting or not slots or self.inflight + slots > self.capacity or not account.has_room():
            return 0
        self._take(account, slots)
        return slots

    async def wait(self, account: Account, slots: int) -> int:
        """Stand in the queue for `slots` slots; returns how many it got. Raises ApiError 503 or 429."""
        if not self.capacity:
            self.capacity = self.measure()
        if not self.capacity:
            raise self.no_engine()
        waiter = self._enqueue(account, slots)
        self._admit_waiting()  # those who wait may all be held up by their own keys' limits
        try:
            async with asyncio.timeout(self.queue_timeout_s):
                await waiter.future
        except TimeoutError:
            self._leave(waiter)
            message = f"no engine had room within {self.queue_timeout_s:g} s."
            raise account.refusal(message, "queue_timeout", QUEUE_RETRY_AFTER_S, self.clock()) from None
        except asyncio.CancelledError:
            self._leave(waiter)
            raise
        return waiter.slots

    def resize(self, capacity: int) -> None:
        """Another number of slots; what runs goes on. With none left, nobody waits in vain."""
        self.capacity = capacity
        self._admit_waiting()
        if not capacity:
            self.turn_away(self.no_engine)

    def turn_away(self, error: Callable[[], ApiError]) -> None:
        """Nobody who waits now will be served: tell each."""
        for account in list(self._turns.values()):
            for waiter in list(account.waiting):
                self._leave(waiter)
                if not waiter.future.done():
                    waiter.future.set_exception(error())

    def adopt(self, callers: list[Caller]) -> None:
        """Other keys and limits: who is gone keeps what runs, and is forgotten once nothing of it does."""
        now = self.clock()
        for caller in callers:
            if caller.key_id in self._accounts:
                self._accounts[caller.key_id].adopt(caller, now)
        known = {caller.key_id for caller in callers}
        for key_id in [key_id for key_id in self._accounts if key_id not in known]:
            if self._accounts[key_id].idle(now):
                del self._accounts[key_id]
        self._admit_waiting()

    def freed(self, account: Account, slots: int) -> None:
        """A ticket's slots come back: let the next in."""
        self.inflight -= slots
        account.inflight -= 1
        if self.waiting:
            self._admit_waiting()

    def _take(self, account: Account, slots: int) -> None:
        self.inflight += slots
        account.inflight += 1

    def _enqueue(self, account: Account, slots: int) -> _Waiter:
        if self.waiting >= self.queue_limit:
            self._make_room(account)
        waiter = _Waiter(account, slots)
        account.waiting.append(waiter)
        self._turns.setdefault(account.caller.key_id, account)
        self.waiting += 1
        return waiter

    def _make_room(self, account: Account) -> None:
        """A full queue refuses whoever has most waiting: the newcomer, or the newest of a key that holds more."""
        longest = max(self._turns.values(), key=lambda other: len(other.waiting), default=None)
        message = f"{self.waiting} requests are waiting already."
        if longest is None or len(longest.waiting) <= len(account.waiting) + 1:
            raise account.refusal(message, "queue_full", QUEUE_RETRY_AFTER_S, self.clock())
        last = longest.waiting[-1]
        self._leave(last)
        if not last.future.done():
            last.future.set_exception(longest.refusal(message, "queue_full", QUEUE_RETRY_AFTER_S, self.clock()))

    def _leave(self, waiter: _Waiter) -> None:
        """Take a waiter out, wherever it stands: also where its slot was granted in this very turn of the loop."""
        account = waiter.account
        if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
            self.freed(account, waiter.slots)
        elif waiter in account.waiting:
            account.waiting.remove(waiter)
            self.waiting -= 1
            if not account.waiting:
                del self._turns[account.caller.key_id]
            self._admit_waiting()  # a smaller one may have stood behind it

    def _admit_waiting(self) -> None:
        """Let in whom there is room for, one of each key in turn. A large request is not overtaken for ever:
        where the next in turn does not fit, nobody behind it is let in."""
        blocked: set[str] = set()  # at their own limits
        while self._turns:
            key_id, account = next(iter(self._turns.items()))
            if not account.has_room():
                if key_id in blocked:
                    break
                blocked.add(key_id)
                self._turns.move_to_end(key_id)
                continue
            waiter = account.waiting[0]
            waiter.slots = min(waiter.slots, max(1, self.capacity))
            leaving = waiter.future.done()  # cancelled, and its task has not run since
            if not leaving and self.inflight + waiter.slots > self.capacity:
                break
            account.waiting.popleft()
            self.waiting -= 1
            if not account.waiting:
                del self._turns[key_id]
            if leaving:
                continue
            if account.waiting:
                self._turns.move_to_end(key_id)
            blocked.clear()
            self._take(account, waiter.slots)
            waiter.future.set_result(None)


def _resized(bucket: Bucket | None, limit: int | None, now: float) -> Bucket | None:
    if limit is None:
        return None
    if bucket is None:
        return Bucket(limit, now)
    if bucket.limit != limit:
        bucket.resize(limit)
    return bucket
