"""Keys, their limits and the queue, by HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from server.arms import Arm
from server.auth import KeyRing, add_key
from server.config import GatewayTable, Limits
from tests.server.conftest import Gateway
from tests.server.fake_engine import ADMIN_KEY, API_KEY, MODEL, FakeEngine, wait_until


def test_keys_and_limits_by_http(gateways: Any, fake: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key_id, key = add_key(file, "a", Limits(requests_per_minute=3, tokens_per_minute=600))
    main = Arm("main", fake.url, API_KEY, ADMIN_KEY, MODEL, "little-eagle", state="ready")
    gateway = Gateway(main, GatewayTable(), keys=KeyRing(file, Limits())).start()
    try:
        refused = gateway.ask()
        assert refused.status_code == 401 and refused.headers["www-authenticate"].startswith("Bearer")
        assert refused.json()["error"]["code"] == "invalid_api_key" and refused.headers["x-request-id"]
        assert gateway.client.get("/v1/models").status_code == 401
        mine = {"authorization": f"Bearer {key}"}
        assert gateway.client.get("/v1/models", headers=mine).status_code == 200
        answers = [gateway.ask(headers=mine, max_tokens=16, stream=at == 1) for at in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert answers[0].headers["x-ratelimit-remaining-requests"] == "2"
        assert answers[0].headers["x-ratelimit-limit-tokens"] == "600"
        # the second is told what the first has used: 7 + 16 tokens
        assert 577 <= int(answers[1].headers["x-ratelimit-remaining-tokens"]) < 600
        over = answers[3]
        assert over.json()["error"]["type"] == "rate_limit_error" and int(over.headers["retry-after"]) in range(1, 61)
        assert gateway.metric("eyas_tokens_total", key_id=key_id, kind="completion") == 3 * 16
        assert gateway.metric("eyas_rejected_total", reason="rate_limit_requests") == 1
        assert key not in gateway.client.get("/metrics").text
        assert len(fake.requests) == 3
        sent = [{name.lower(): value for name, value in seen.headers.items()} for seen in fake.requests]
        assert all(headers["authorization"] == f"Bearer {API_KEY}" for headers in sent)
    finally:
        gateway.stop()


def test_the_queue_by_http(gateways: Any, fake: FakeEngine) -> None:
    gateway = gateways(max_inflight=1, queue_limit=1, queue_timeout_s=30.0)

    async def test() -> None:
        body = {"model": MODEL, "prompt": "x", "user": "gated"}
        async with aiohttp.ClientSession(gateway.url) as session:

            async def ask() -> tuple[int, dict[str, Any], Any]:
                async with session.post("/v1/completions", json=body) as answer:
                    return answer.status, dict(answer.headers), json.loads(await answer.read())

            first = asyncio.create_task(ask())
            await asyncio.to_thread(fake.seen, 1)
            second = asyncio.create_task(ask())
            await asyncio.to_thread(wait_until, lambda: gateway.metric("eyas_queue_depth") == 1)
            status, headers, answer = await ask()
            assert (status, answer["error"]["code"]) == (429, "queue_full")
            assert "Retry-After" in headers or "retry-after" in headers
            second.cancel()  # the client leaves the queue
            await asyncio.to_thread(wait_until, lambda: gateway.metric("eyas_queue_depth") == 0)
            third = asyncio.create_task(ask())
            await asyncio.to_thread(wait_until, lambda: gateway.metric("eyas_queue_depth") == 1)
            fake.gate.set()
            assert (await first)[0] == (await third)[0] == 200
            assert len(fake.requests) == 2, "who left the queue reached no engine"

    asyncio.run(test())
    assert gateway.metric("eyas_queue_wait_seconds_count") == 1
    assert gateway.metric("eyas_client_disconnects_total", phase="waiting") == 1
    wait_until(lambda: gateway.core.admission.inflight == 0)
