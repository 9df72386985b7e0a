"""When an engine is to be left alone, and how many second tries a gateway may make: both by how requests ended."""

from __future__ import annotations

from typing import Literal

BREAK_AFTER = 5  # failures in a row
OPEN_S = 2.0  # the first pause; each trial that fails doubles it
OPEN_AT_MOST_S = 60.0
TRIAL_S = 2.0  # a trial without an end for so long is not waited for: an answer may take minutes
RETRY_SHARE = 0.1  # of all requests may be second tries,
RETRY_RESERVE = 5.0  # and so many at once where few requests come

BreakerState = Literal["closed", "open", "half-open"]


class Breaker:
    """Opens after BREAK_AFTER failures in a row; after a pause it lets one request try, whose first frame or end
    decides."""

    __slots__ = ("_failures", "_next_trial_at", "_pause_s", "_reopens_at", "_trying")

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = 0.0
        self._reopens_at = 0.0
        self._next_trial_at = 0.0
        self._trying = False

    def state(self, now: float) -> BreakerState:
        if not self._pause_s:
            return "closed"
        return "open" if now < self._reopens_at else "half-open"

    def lets_in(self, now: float) -> bool:
        """Whether a request may be sent; tell `sent` where it is."""
        return not self._pause_s or now >= max(self._reopens_at, self._next_trial_at)

    @property
    def trying(self) -> bool:
        """Whether a trial is on its way."""
        return self._trying

    def wait_s(self, now: float) -> float:
        """Seconds until it lets one in again, as far as that is known."""
        return max(0.0, self._reopens_at - now, self._next_trial_at - now) if self._pause_s else 0.0

    def sent(self, now: float) -> None:
        """A request goes out. While the breaker is half-open it is the trial."""
        if self._pause_s:
            self._trying, self._next_trial_at = True, now + TRIAL_S

    def succeeded(self) -> bool:
        """An engine that answers is well. Returns whether that closed the breaker."""
        self._failures, self._trying, self._next_trial_at = 0, False, 0.0
        closed, self._pause_s = self._pause_s > 0, 0.0
        return closed

    def failed(self, now: float) -> bool:
        """Returns whether that opened the breaker."""
        self._failures += 1
        if self._pause_s and now < self._reopens_at:
            return False  # of a request sent before it opened, or of another trial
        if self._trying:
            self._pause_s = min(OPEN_AT_MOST_S, 2 * self._pause_s)
        elif self._pause_s == 0 and self._failures >= BREAK_AFTER:
            self._pause_s = OPEN_S
        else:
            return False
        self._trying, self._next_trial_at = False, 0.0
        self._reopens_at = now + self._pause_s
        return True

    def abandoned(self) -> None:
        """A request ended without a word on the engine (its client left): if it was the trial, the next is."""
        self._trying, self._next_trial_at = False, 0.0


class RetryBudget:
    """Second tries as a share of requests, so that an overload is not answered with more load."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = RETRY_RESERVE

    def earn(self) -> None:
        """A request came in."""
        self._left = min(RETRY_RESERVE, self._left + RETRY_SHARE)

    def spend(self) -> bool:
        """Whether a second try may be made; it is counted."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
