"""What is counted, against sums made here from what the fake engine sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.conftest import Gateway
from tests.server.fake_engine import MODEL, FakeEngine, wait_until

WHOSE = {"model": MODEL, "drafter": "little-eagle", "arm": "main"}


def answers_of(details: Any) -> list[dict[str, Any]]:
    return details if isinstance(details, list) else [details]


def test_the_counters_are_the_sums_over_all_requests(gate: Gateway, fake: FakeEngine) -> None:
    bodies = [
        {"stream": at % 2 == 0, "n": 1 + at % 3, "max_tokens": 3 + at, "user": "byte_by_byte" if at == 4 else ""}
        for at in range(24)
    ]

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=gate.url, timeout=60) as client:
            asked = {"model": MODEL, "messages": [], "prompt": "hi"}
            paths = ("/v1/chat/completions", "/v1/completions")
            answers = await asyncio.gather(
                *(client.post(paths[at % 2], json={**asked, **body}) for at, body in enumerate(bodies))
            )
            assert [answer.status_code for answer in answers] == [200] * len(bodies)

    asyncio.run(ask_all())
    wait_until(lambda: gate.metric("eyas_requests_total") == len(bodies))
    answers = [answer for seen in fake.requests for answer in answers_of(seen.details)]
    assert len(answers) == sum(body["n"] for body in bodies)  # type: ignore[misc]
    histogram = [sum(answer["spec_correct_drafts_histogram"][i] for answer in answers) for i in range(4)]
    steps = sum(histogram)
    assert gate.metric("eyas_spec_verify_steps_total", **WHOSE) == steps
    assert gate.metric("eyas_spec_draft_tokens_total", **WHOSE) == 3 * steps
    accepted = sum(answer["spec_num_correct_drafts"] for answer in answers)
    assert gate.metric("eyas_spec_accepted_tokens_total", **WHOSE) == accepted
    by_position = [gate.metric("eyas_spec_accepted_tokens_per_pos_total", **WHOSE, position=str(k)) for k in range(4)]
    assert by_position == [sum(histogram[1:]), sum(histogram[2:]), histogram[3], 0]
    assert sum(by_position) == accepted
    assert gate.metric("eyas_spec_request_acceptance_length_count", **WHOSE) == len(bodies)
    lengths = 0.0
    for seen in fake.requests:
        own = answers_of(seen.details)
        lengths += 1 + sum(a["spec_num_correct_drafts"] for a in own) / sum(a["spec_verify_ct"] for a in own)
    assert gate.metric("eyas_spec_request_acceptance_length_sum", **WHOSE) == pytest.approx(lengths)
    assert gate.metric("eyas_spec_unreported_requests_total") == 0
    for kind in ("prompt", "completion"):
        expected = sum(seen.usage[f"{kind}_tokens"] for seen in fake.requests)
        assert gate.metric("eyas_tokens_total", kind=kind, key_id="none") == expected
    assert gate.metric("eyas_requests_total", route="chat", code="200", arm="main") == 12
    assert gate.metric("eyas_requests_total", route="completions", code="200", arm="main") == 12
    assert gate.metric("eyas_ttft_seconds_count") == 12
    assert gate.metric("eyas_tpot_seconds_count") == sum(b["stream"] and b["n"] == 1 for b in bodies)
    assert gate.metric("eyas_overhead_seconds_count") == 24
    assert gate.metric("eyas_inflight_requests") == 0
    assert gate.metric("eyas_rejected_total") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["no_statistics", "contradiction", "proposed_too_few"])
def test_unusable_statistics_are_counted_and_cost_the_client_nothing(
    gate: Gateway, how: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        answer = gate.ask(user=how, stream=stream)
    assert answer.status_code == 200
    assert "sglext" not in answer.text
    assert gate.metric("eyas_spec_unreported_requests_total", **WHOSE) == 1
    assert gate.metric("eyas_spec_verify_steps_total") == 0
    assert gate.metric("eyas_tokens_total", kind="completion") == 16
    assert ("unusable" in caplog.text) == (how != "no_statistics")


def test_a_swapped_drafter_counts_apart(gate: Gateway, fake: FakeEngine) -> None:
    gate.ask()
    gate.arm.drafter = "other"
    assert gate.ask().headers["x-eyas-drafter"] == "other"
    first, second = (seen.details["spec_verify_ct"] for seen in fake.requests)
    assert gate.metric("eyas_spec_verify_steps_total", drafter="little-eagle") == first
    assert gate.metric("eyas_spec_verify_steps_total", drafter="other") == second


@pytest.mark.parametrize("how", ["dies", "truncated", "error_frame", "flat_error"])
def test_what_did_not_finish_is_not_in_the_sums(gate: Gateway, how: str) -> None:
    gate.ask(user=how, stream=True)
    wait_until(lambda: gate.metric("eyas_requests_total") == 1)
    for name in ("tokens_total", "spec_verify_steps_total", "spec_unreported_requests_total", "ttft_seconds_count"):
        assert gate.metric(f"eyas_{name}") == 0


def test_time_to_the_first_frame_and_for_each_token(gate: Gateway, fake: FakeEngine) -> None:
    fake.delay, fake.pace = 0.3, 0.01
    gate.ask(user="slow", stream=True, max_tokens=11)
    frames = fake.requests[0].sent.count(b"\n\n")
    ttft = gate.metric("eyas_ttft_seconds_sum")
    assert 0.3 <= ttft < 0.3 + 0.25
    assert 0.01 * (frames - 2) / 10 <= gate.metric("eyas_tpot_seconds_sum") < 0.05 * frames / 10
    assert gate.metric("eyas_overhead_seconds_sum") < 0.1


def test_requests_with_an_engine_are_shown_while_they_last(gate: Gateway, fake: FakeEngine) -> None:
    body = {"model": MODEL, "prompt": "x", "user": "hangs", "stream": True}
    with gate.client.stream("POST", "/v1/completions", json=body):
        fake.seen()
        assert gate.metric("eyas_inflight_requests") == 1
    wait_until(lambda: gate.metric("eyas_inflight_requests") == 0)


def test_labels_do_not_grow_with_what_clients_send(gateways: Callable[..., Gateway]) -> None:
    gate = gateways()
    gate.ask(user="flat_error")
    gate.ask(model="x0")
    before = gate.client.get("/metrics").text.count("\n")
    for at in range(20):
        gate.ask(model=f"x{at}", headers={"x-request-id": f"id{at}"})
        gate.client.get(f"/nowhere/{at}")
        gate.ask(user="flat_error", messages=[{"role": "user", "content": str(at)}])
    assert gate.client.get("/metrics").text.count("\n") == before
