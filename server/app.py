"""The gateway as one ASGI application: the two hot routes go to the relay, the rest to FastAPI.

Only what is named here can be reached: nothing of an engine's own surface passes through.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from server.admission import Admission
from server.arms import Arm, Arms
from server.call import ROUTES
from server.config import GatewayTable
from server.errors import RETRY_AFTER_LOADING_S, ApiError
from server.metrics import CONTENT_TYPE, Metrics
from server.relay import Relay

_ERRORS = {
    "400": "The request is malformed.",
    "404": "The model does not exist.",
    "413": "The body is too large.",
    "502": "The engine cannot be reached, or its answer broke off.",
    "503": "The model is loading, or the engine is down or full: try again after Retry-After.",
    "504": "The engine was silent for too long.",
}


class ControlApi(FastAPI):
    """FastAPI for everything but the hot routes, which its schema describes all the same."""

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        schema["paths"].update({path: {"post": _hot_operation(name)} for path, name in ROUTES.items()})
        return schema


def create_app(arm: Arm, gateway: GatewayTable, *, version: str) -> ASGIApp:
    """The gateway before `arm`. Run it in one process, with its lifespan on."""
    metrics = Metrics(version)
    metrics.watch_arm(arm)
    relay = Relay(Arms([arm]), Admission(), gateway, metrics)
    api = _control_api(arm, relay, metrics, version)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in ROUTES:
            await relay(scope, receive, send)
        else:
            await api(scope, receive, send)

    return app


def _control_api(arm: Arm, relay: Relay, metrics: Metrics, version: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await relay.open()
        yield
        await relay.close()

    api = ControlApi(
        title="Eyas",
        version=version,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: _openai_error},
    )

    @api.get("/v1/models", summary="The models served here")
    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": arm.served_name, "object": "model", "created": 0, "owned_by": "eyas"}],
        }

    @api.get("/healthz", summary="200 while the gateway lives")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @api.get("/readyz", summary="200 while requests can be answered, else 503 with the reason")
    async def readyz() -> JSONResponse:
        if arm.state == "ready":
            return JSONResponse({"status": "ready"})
        return JSONResponse(
            {"status": arm.state, "reason": arm.detail or f"arm {arm.name} is {arm.state}"},
            status_code=503,
            headers={"retry-after": str(RETRY_AFTER_LOADING_S)},
        )

    @api.get("/metrics", summary="Prometheus metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return api


async def _openai_error(request: Request, found: Exception) -> Response:
    """FastAPI's own 404 and 405 in OpenAI's shape."""
    assert isinstance(found, HTTPException)
    path = request.url.path
    message = f"{path} takes no {request.method}." if found.status_code == 405 else f"{path} does not exist here."
    error = ApiError(found.status_code, message, code="unknown_url" if found.status_code == 404 else None)
    return JSONResponse(error.document(), status_code=error.status, headers=found.headers)


def _hot_operation(name: str) -> dict[str, Any]:
    """The OpenAPI entry of a hot route: the body is the engine's own, so its schema is left open."""
    answer = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    asked = {"type": "object", "required": ["model"], "properties": {"model": {"type": "string"}}}
    return {
        "summary": {"chat": "Answer a conversation", "completions": "Continue a text"}[name],
        "operationId": name,
        "requestBody": {"required": True, "content": {"application/json": {"schema": asked}}},
        "responses": {
            "200": {"description": "The answer, or a stream of it where `stream` is true.", "content": answer},
            **{status: {"description": text} for status, text in _ERRORS.items()},
        },
    }
