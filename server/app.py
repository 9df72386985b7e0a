"""The gateway as one ASGI application: the two hot routes go to the relay, the rest to FastAPI.

Only what is named here can be reached: nothing of an engine's own surface passes through.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from server.call import ROUTES
from server.errors import RETRY_AFTER_LOADING_S, ApiError
from server.gateway import Gateway
from server.metrics import CONTENT_TYPE

_ERRORS = {
    "400": "The request is malformed.",
    "401": "The API key is missing or unknown.",
    "403": "An arm was chosen without the admin key.",
    "404": "The model does not exist.",
    "405": "The route takes POST alone.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "429": "The key is over a limit, or the queue is full: try again after Retry-After.",
    "502": "The engine cannot be reached, or its answer broke off.",
    "503": "The model is loading, or the engine is down or full: try again after Retry-After.",
    "504": "The engine was silent for too long.",
}


class ControlApi(FastAPI):
    """FastAPI for everything but the hot routes, which its schema describes all the same, for this one model."""

    served_name = ""

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        hot = {path: {"post": _hot_operation(name, self.served_name)} for path, name in ROUTES.items()}
        schema["paths"].update(hot)
        return schema


def create_app(gateway: Gateway) -> ASGIApp:
    """The public application. Run it in one process, with its lifespan on."""
    relay = gateway.relay
    api = _control_api(gateway)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in ROUTES:
            await relay(scope, receive, send)
        else:
            await api(scope, receive, send)

    return app


def _control_api(gateway: Gateway) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.open()
        yield
        await gateway.close()

    api = ControlApi(
        title="Eyas",
        version=gateway.version,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=ERROR_HANDLERS,
    )
    api.served_name = gateway.arms.served_name

    @api.get("/v1/models", summary="The models served here", responses={401: {"description": _ERRORS["401"]}})
    async def models(request: Request) -> dict[str, Any]:
        authorization = request.headers.get("authorization")
        gateway.admission.keys.who(None if authorization is None else authorization.encode("latin-1"))
        return {
            "object": "list",
            "data": [{"id": gateway.arms.served_name, "object": "model", "created": 0, "owned_by": "eyas"}],
        }

    add_health(api, gateway)
    if gateway.metrics_in_public:
        add_metrics(api, gateway)
    return api


def add_health(api: FastAPI, gateway: Gateway) -> None:
    """The two routes that a supervisor asks."""

    @api.get("/healthz", summary="200 while the gateway lives")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    not_ready: dict[int | str, dict[str, Any]] = {503: {"description": "No request can be answered now."}}

    @api.get("/readyz", summary="200 while requests can be answered, else 503 with the reason", responses=not_ready)
    async def readyz() -> JSONResponse:
        status, reason = gateway.readiness()
        if status == "ready":
            return JSONResponse({"status": status})
        headers = {"retry-after": str(RETRY_AFTER_LOADING_S)}
        return JSONResponse({"status": status, "reason": reason}, status_code=503, headers=headers)


def add_metrics(api: FastAPI, gateway: Gateway) -> None:
    """What Prometheus asks."""

    @api.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        return Response(gateway.metrics.render(), media_type=CONTENT_TYPE)


async def _no_route(request: Request, found: Exception) -> Response:
    """FastAPI's own 404 and 405 in OpenAI's shape."""
    assert isinstance(found, HTTPException)
    path = request.url.path
    message = f"{path} takes no {request.method}." if found.status_code == 405 else f"{path} does not exist here."
    error = ApiError(found.status_code, message, code="unknown_url" if found.status_code == 404 else None)
    return JSONResponse(error.document(), status_code=error.status, headers=found.headers)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.document(), status_code=error.status, headers=error.headers)


ERROR_HANDLERS: dict[int | type[Exception], Any] = {HTTPException: _no_route, ApiError: _refused}


def _hot_operation(name: str, served_name: str) -> dict[str, Any]:
    """The OpenAPI entry of a hot route: the body is the engine's own, so its schema is left open."""
    answer = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    asked = {"type": "object", "required": ["model"], "properties": {"model": {"const": served_name}}}
    return {
        "summary": {"chat": "Answer a conversation", "completions": "Continue a text"}[name],
        "operationId": name,
        "requestBody": {"required": True, "content": {"application/json": {"schema": asked}}},
        "responses": {
            "200": {"description": "The answer, or a stream of it where `stream` is true.", "content": answer},
            **{status: {"description": text} for status, text in _ERRORS.items()},
        },
    }
