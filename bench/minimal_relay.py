"""The least that a relay in Python can do: raw ASGI in, aiohttp out, every byte as it comes. The yardstick.

It reads no request, counts nothing, tells no error, and stops no engine whose client has left.
"""

from __future__ import annotations

import aiohttp
from starlette.types import ASGIApp, Receive, Scope, Send


def minimal_relay(upstream_url: str) -> ASGIApp:
    """An ASGI application before `upstream_url`."""
    session: aiohttp.ClientSession

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal session
        if scope["type"] == "lifespan":
            await receive()
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await session.close()
            await send({"type": "lifespan.shutdown.complete"})
            return
        parts = []
        more = True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        headers = {"content-type": "application/json"}
        async with session.post(upstream_url + scope["path"], data=b"".join(parts), headers=headers) as response:
            kept = [(b"content-type", response.headers["content-type"].encode())]
            if response.content_length is not None:
                kept.append((b"content-length", b"%d" % response.content_length))
            await send({"type": "http.response.start", "status": response.status, "headers": kept})
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    return app
