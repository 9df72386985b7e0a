"""The admin listener: metrics, health, and what an operator may see and change while it runs.

Everything under /admin needs the admin key, as a bearer. It has no TLS of its own and listens on loopback by default.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import orjson
from fastapi import Depends, FastAPI, Request

from server.app import ERROR_HANDLERS, add_health, add_metrics
from server.auth import bearer
from server.errors import ApiError
from server.gateway import Gateway

Reload = Callable[[], str]


def create_admin_app(gateway: Gateway, reload: Reload) -> FastAPI:
    """`reload` reads keys, limits and weights anew and says what changed; it raises ValueError where a file is bad."""

    def admin(request: Request) -> None:
        authorization = request.headers.get("authorization")
        gateway.admin.check(bearer(None if authorization is None else authorization.encode("latin-1")))

    api = FastAPI(
        title="Eyas, administration",
        version=gateway.version,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=ERROR_HANDLERS,
    )
    add_health(api, gateway)
    add_metrics(api, gateway)

    @api.get("/admin/status", dependencies=[Depends(admin)], summary="Arms, slots and queue")
    async def status() -> dict[str, Any]:
        return _status(gateway)

    @api.post("/admin/reload", dependencies=[Depends(admin)], summary="Read keys, limits and weights anew, as SIGHUP")
    async def reloaded() -> dict[str, str]:
        try:
            return {"status": "ok", "changed": reload()}
        except ValueError as error:
            raise ApiError(400, str(error), code="bad_configuration") from None

    @api.put("/admin/arms/{name}/weight", dependencies=[Depends(admin)], summary="Move an arm's share, until a reload")
    async def weight(name: str, request: Request) -> dict[str, Any]:
        if name not in gateway.arms.names:
            raise ApiError(404, f"there is no arm {name!r}.", code="arm_not_found")
        gateway.arms.set_weights({name: _weight(await request.body())})
        gateway.refit()
        return _status(gateway)

    return api


def _weight(raw: bytes) -> float:
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError:
        found = None
    value: Any = found.get("weight") if isinstance(found, dict) else None
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ApiError(400, 'expected {"weight": a number from 0}.', param="weight")
    return float(value)


def _status(gateway: Gateway) -> dict[str, Any]:
    now = gateway.arms.clock()
    return {
        "status": gateway.readiness()[0],
        "capacity": gateway.admission.capacity,
        "slots_in_use": gateway.admission.inflight,
        "waiting": gateway.admission.waiting,
        "tasks": len(asyncio.all_tasks()),
        "arms": [
            {
                "name": arm.name,
                "url": arm.url,
                "drafter": arm.drafter,
                "state": arm.state,
                "detail": arm.detail,
                "weight": arm.weight,
                "inflight": arm.inflight,
                "capacity": arm.capacity,
                "breaker": arm.breaker.state(now),
            }
            for arm in gateway.arms.members
        ],
    }
