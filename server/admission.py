"""Who may come in: one ticket for each request, from before its body is read until its answer's last byte."""

from __future__ import annotations

from starlette.types import Scope

from server.call import Call
from server.errors import Headers


class Ticket:
    """One request's right to be here.

    key_id: its key's name in the metrics. headers: what its answer tells of its limits. arm_wish: the arm that an
    administrator asked for.
    """

    key_id: str = "none"
    headers: Headers = ()
    arm_wish: str | None = None

    async def wait(self, call: Call) -> None:
        """Wait for this request's turn at an engine. Raises ApiError where it will not come; may be cancelled."""

    def release(self, tokens: int) -> None:
        """The request is over, whatever became of it; it used so many tokens. Called exactly once."""


class Admission:
    """Lets everybody in."""

    def admit(self, scope: Scope) -> Ticket:
        """A ticket for the request whose head is `scope`. Raises ApiError (401, 429) without one."""
        return Ticket()
