"""The drafter arms: engines that take requests, local or remote, and which of them takes this one.

Who supervises an arm (a thread for a local engine, the health loop for a remote one) writes `state` and `detail` by
plain attribute writes; the gateway reads them at each request. Weights say how conversations are shared out: one
conversation stays on its arm, by weighted rendezvous hashing, as long as that arm has room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

import orjson

from server.breaker import Breaker, RetryBudget
from server.call import Call
from server.errors import RETRY_AFTER_LOADING_S, ApiError

if TYPE_CHECKING:
    from server.shadow import Shadow

ArmState = Literal["starting", "ready", "down"]
# ok: an answer came whole. refused: the engine's 4xx, the request's own fault. busy: its 429 or 503. error: another
# 5xx, or an error within a stream. unreachable, died, timeout: as they say. gone: the client left, or we stopped.
Outcome = Literal["ok", "refused", "busy", "error", "unreachable", "died", "timeout", "gone"]
WELL = frozenset(("ok", "refused", "busy"))
ILL = frozenset(("unreachable", "died", "timeout"))  # not error: one client's odd request must not close an arm to all
WORTH_ANOTHER = frozenset(("unreachable", "died", "busy"))  # not a timeout: the engine may still be at work on it
UNBOUNDED = 1 << 30  # slots of an engine that nobody limits
_LATER = {"retry-after": str(RETRY_AFTER_LOADING_S)}
STICKY_TEXT = 1024  # characters of a prompt that make it the same conversation


@dataclass(eq=False)
class Arm:
    """One engine and how to reach it.

    `url` has no path; `served_name` is the model that requests name; `drafter` is the drafter's name, or `none`.
    `vocab_size`: tokens that the target knows, None where nobody said. `detail` says in one sentence why the arm is not
    ready; clients read it. An empty key means an engine without one. `capacity`: answers that it makes at once, None
    where nobody said. `weight`: its share of the conversations, 0 for none; several engines behind one DNS name are
    arms of one name, which share its weight. `inflight`: attempts that run on it; `ready_since`: monotonic seconds.
    """

    name: str
    url: str
    api_key: str
    admin_key: str
    served_name: str
    drafter: str
    state: ArmState = "starting"
    detail: str = ""
    vocab_size: int | None = None
    capacity: int | None = None
    weight: float = 1.0
    inflight: int = 0
    ready_since: float = field(default_factory=monotonic)
    breaker: Breaker = field(default_factory=Breaker)

    def takes(self, now: float) -> bool:
        """Whether a request may be sent to it."""
        return self.state == "ready" and self.breaker.lets_in(now)

    def has_room(self) -> bool:
        return self.capacity is None or self.inflight < self.capacity


class Arms:
    """All arms of one gateway. `on_change` is called whenever the capacity may have become another.

    structured_plain: send structured output to arms without speculation where there are some.
    """

    def __init__(
        self, arms: Iterable[Arm], *, structured_plain: bool = True, clock: Callable[[], float] = monotonic
    ) -> None:
        self.members = list(arms)
        self.structured_plain = structured_plain
        self.shadows: list[Shadow] = []
        self.retries = RetryBudget()
        self.clock = clock
        self.on_change: Callable[[], None] = lambda: None

    @property
    def served_name(self) -> str:
        """The one model that all arms serve."""
        return self.members[0].served_name

    @property
    def vocab_size(self) -> int | None:
        """Tokens that the target knows, where an arm says so."""
        return self.members[0].vocab_size

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(arm.name for arm in self.members))

    @property
    def ready(self) -> bool:
        """Whether a request could be answered now."""
        now = self.clock()
        return any(arm.weight > 0 and arm.takes(now) for arm in self.members)

    @property
    def capacity(self) -> int:
        """Slots of all arms that take requests now. An arm without a weight adds none, unless no other is up: its only
        requests are an administrator's."""
        now = self.clock()
        up = [arm for arm in self.members if arm.state == "ready" and arm.breaker.state(now) != "open"]
        taking = [arm for arm in up if arm.weight > 0] or up
        return min(UNBOUNDED, sum(UNBOUNDED if arm.capacity is None else arm.capacity for arm in taking))

    def replace(self, name: str, members: Collection[Arm]) -> None:
        """Other engines behind one name; what runs on those that left goes on."""
        at = next((at for at, arm in enumerate(self.members) if arm.name == name), len(self.members))
        others = [arm for arm in self.members if arm.name != name]
        self.members = [*others[:at], *members, *others[at:]]
        self.on_change()

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Other weights for arms by name."""
        for arm in self.members:
            arm.weight = weights.get(arm.name, arm.weight)

    def choose(self, call: Call) -> Arm:
        """The arm that takes `call`; tell `report` how it ended. Raises ApiError.

        404 where the call asks for an arm that is none, 503 where none takes it.
        """
        self.retries.earn()
        now = self.clock()
        if len(self.members) == 1 and call.arm_wish is None:
            arm = self.members[0]
            if not arm.takes(now) or not arm.weight:
                raise self.unavailable()
        else:
            asked = self._asked(call.arm_wish)
            found = [arm for arm in asked if arm.takes(now)]
            if not found:
                raise self.unavailable(asked)
            arm = self._best(call, found)
        arm.inflight += 1
        arm.breaker.sent(now)
        for shadow in self.shadows:
            shadow.offer(call)
        return arm

    def choose_again(self, call: Call, failed: Sequence[Arm], outcome: Outcome) -> Arm | None:
        """The arm that takes `call` after these have failed it, the last with `outcome`, before its first byte.

        None where another attempt is not worth it, no other arm is up, or the budget of second tries is used up.
        """
        now = self.clock()
        asked = self._asked(call.arm_wish)
        found = [arm for arm in asked if arm not in failed and arm.takes(now)]
        if outcome not in WORTH_ANOTHER or not found or not self.retries.spend():
            return None
        arm = self._best(call, found)
        arm.inflight += 1
        arm.breaker.sent(now)
        return arm

    def began(self, arm: Arm) -> None:
        """An answer's first frame has come: how long the rest takes says nothing of the engine any more."""
        if arm.breaker.trying and arm.breaker.succeeded():
            self.on_change()

    def report(self, arm: Arm, outcome: Outcome) -> None:
        """How an attempt on `arm` ended: once for each choice."""
        arm.inflight -= 1
        if outcome in WELL:
            turned = arm.breaker.succeeded()
        elif outcome in ILL:
            turned = arm.breaker.failed(self.clock())
        else:
            arm.breaker.abandoned()
            return
        if turned:
            self.on_change()

    def _best(self, call: Call, found: list[Arm]) -> Arm:
        """Of those that take requests: one without speculation for structured output where there is one (known hangs
        of the engine), else by the conversation, the next one where that has no room."""
        if call.structured and self.structured_plain and call.arm_wish is None:
            found = [arm for arm in found if arm.drafter == "none"] or found
        if len(found) == 1:
            return found[0]
        ranked = _ranked(found, sticky_key(call.asked, call.key_id))
        return next((arm for arm in ranked if arm.has_room()), ranked[0])

    def unavailable(self, asked: Collection[Arm] | None = None) -> ApiError:
        """The 503 that says why none of these takes a request, and when to try again."""
        arms = self._asked(None) if asked is None else asked
        if not arms:
            return ApiError(503, "no arm has a weight.", code="engine_down", headers=_LATER)
        broken = [arm for arm in arms if arm.state == "ready"]
        if broken:
            wait = min(arm.breaker.wait_s(self.clock()) for arm in broken)
            message = "the engine failed several requests in a row and is left alone for a while."
            return ApiError(503, message, code="engine_failing", headers={"retry-after": str(max(1, math.ceil(wait)))})
        loading = any(arm.state == "starting" for arm in arms)
        detail = next((arm.detail for arm in arms if arm.detail), "")
        message = detail or ("the model is loading" if loading else "the engine is down")
        code = "model_loading" if loading else "engine_down"
        return ApiError(503, f"{message}.", code=code, headers=_LATER)

    def _asked(self, pinned: str | None) -> list[Arm]:
        if pinned is None:
            return [arm for arm in self.members if arm.weight > 0]
        arms = [arm for arm in self.members if arm.name == pinned]
        if not arms:
            known = ", ".join(self.names)
            raise ApiError(404, f"there is no arm {pinned!r}: this gateway has {known}.", code="arm_not_found")
        return arms


def _ranked(arms: list[Arm], sticky: bytes) -> list[Arm]:
    """By name first, by weight; then among the engines of one name, alike."""
    by_name = {arm.name: arm.weight or 1.0 for arm in arms}  # a pinned arm may have none
    for name, weight in by_name.items():
        by_name[name] = _score(sticky, name, weight)
    if len(by_name) == len(arms):
        return sorted(arms, key=lambda arm: by_name[arm.name], reverse=True)
    return sorted(arms, key=lambda arm: (by_name[arm.name], _score(sticky, arm.url, 1.0)), reverse=True)


def _score(sticky: bytes, name: str, weight: float) -> float:
    """Weighted rendezvous hashing: the highest of -w / ln(u) wins, with u uniform in (0, 1) by name and key.

    An arm wins with probability weight / sum, and another weight moves only what has to move (Schindelhauer and
    Schomaker, 2005, "Weighted distributed hash tables").
    """
    drawn = int.from_bytes(blake2b(name.encode(), key=sticky, digest_size=8).digest())
    return -weight / math.log((drawn + 1) / (2**64 + 1))


def sticky_key(asked: Mapping[str, Any], key_id: str) -> bytes:
    """What keeps a conversation on one arm: `prompt_cache_key`, else `user`, else the key and the first messages.

    The first messages are those up to the first of the user, so that the next turn of a conversation has the same.
    """
    for name in ("prompt_cache_key", "user"):
        value = asked.get(name)
        if isinstance(value, str) and value:
            return blake2b(f"{name}:{value}".encode(), digest_size=16).digest()
    messages = asked.get("messages")
    first: Any = asked.get("prompt")
    if isinstance(messages, list):
        until = next(
            (at for at, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user"), 0
        )
        first = messages[: until + 1]
    text = first[:STICKY_TEXT] if isinstance(first, str) else orjson.dumps(first)[: 4 * STICKY_TEXT].decode("latin-1")
    return blake2b(f"{key_id}:{text}".encode(), digest_size=16).digest()
