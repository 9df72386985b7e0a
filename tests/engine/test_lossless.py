"""Greedy output with speculation equals plain output, token for token, through the gateway, streaming and not.

Real SGLang in fp32 on the tiny Llama and the tiny Kimi. The statistics that come with each answer are checked against
the answer, and the gateway's counters against their sum.
"""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from drafter.acceptance import acceptance_length, accepted_tokens, add_histograms, verify_steps
from server.arms import Arm
from server.config import GatewayTable
from server.engine import Engine
from tests.engine.conftest import EnginePool
from tests.server.conftest import Gateway

pytestmark = pytest.mark.engine

PROMPTS = 60
TOKENS = 48
CONCURRENCY = 12
SENTENCE = "the eagle hunts over water and sees a fish then it dives holds turns lands feeds its young in spring"
# name: (drafter, options). Noised drafters, so that steps end at every position.
LLAMA = {
    "chain": ("mha_noised_a", {"num_steps": 3}),
    "tree": ("mha_noised_a", {"num_steps": 3, "topk": 4, "draft_tokens": 8}),
    "ngram": ("ngram", {}),
}
KIMI = {
    "chain": ("mla_noised_a", {"num_steps": 3}),
    "tree": ("mla_noised_a", {"num_steps": 3, "topk": 4, "draft_tokens": 8}),
    "mha-chain": ("mha_noised_a", {"num_steps": 3}),
    "ngram": ("ngram", {}),
    "tp2": ("mla_noised_a", {"num_steps": 3, "tp": 2}),
}
SLOW = {"tp2": 16}  # prompts of a variant that is slow here: two ranks meet twice a layer, perhaps on one core


@dataclass(frozen=True)
class Answer:
    """One answer: its token ids, its text, and the engine's statistics (None without speculation)."""

    ids: tuple[int, ...]
    text: str
    details: dict[str, Any] | None
    usage: dict[str, Any]


def prompts() -> list[str]:
    rng = random.Random(7)
    return [" ".join(rng.choices(SENTENCE.split(), k=rng.randint(2, 30))) for _ in range(PROMPTS)]


def ask(url: str, model: str, prompt: str, stream: bool) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_spec_tokens_details": True,
        "return_output_ids_in_sglext": True,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-eyas-arm"] == "tiny"
    if not stream:
        message = answer.json()
        text = message["choices"][0]["message"]["content"]
        return _answer(text, message.get("sglext", {}), message["usage"])
    frames = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert frames[-1] == "[DONE]"
    messages = [json.loads(frame) for frame in frames[:-1]]
    text = "".join(m["choices"][0]["delta"].get("content") or "" for m in messages if m["choices"])
    extension: dict[str, Any] = {}
    for message in messages:
        extension |= message.get("sglext") or {}
    return _answer(text, extension, next(m["usage"] for m in messages if m.get("usage")))


def _answer(text: str, extension: dict[str, Any], usage: dict[str, Any]) -> Answer:
    ids = extension["output_ids"]
    flat = ids[0] if ids and isinstance(ids[0], list) else ids
    return Answer(tuple(flat), text, extension.get("spec_tokens_details"), usage)


def ask_all(gateway: Gateway, engine: Engine, stream: bool, count: int = PROMPTS) -> list[Answer]:
    with ThreadPoolExecutor(CONCURRENCY) as threads:
        asked = prompts()[:count]
        return list(threads.map(lambda prompt: ask(gateway.url, engine.served_name, prompt, stream), asked))


def gateway_before(engine: Engine) -> Gateway:
    arm = Arm(
        name="tiny",
        url=engine.url,
        api_key=engine.api_key,
        admin_key=engine.admin_key,
        served_name=engine.served_name,
        drafter=engine.drafter.name,
        state="ready",
    )
    return Gateway(arm, GatewayTable()).start()


@pytest.fixture(scope="module")
def references(engines: EnginePool, tiny: Any) -> Iterator[dict[str, list[Answer]]]:
    """Plain greedy answers, once for each target."""
    yield {}


def reference(references: dict[str, list[Answer]], engines: EnginePool, pair: Any) -> list[Answer]:
    if pair.name not in references:
        engine = engines.get(pair, "none")
        gateway = gateway_before(engine)
        plain, streamed = ask_all(gateway, engine, False), ask_all(gateway, engine, True)
        assert [answer.ids for answer in plain] == [answer.ids for answer in streamed]
        assert all(answer.details is None for answer in plain + streamed)
        assert gateway.metric("eyas_spec_unreported_requests_total") == 2 * PROMPTS
        assert len({answer.ids for answer in plain}) > PROMPTS // 2, "a target that says the same always tests nothing"
        gateway.stop()
        references[pair.name] = plain
    return references[pair.name]


@pytest.mark.parametrize(("target", "variant"), [("llama", name) for name in LLAMA] + [("kimi", name) for name in KIMI])
def test_greedy_output_is_unchanged(
    engines: EnginePool, tiny: Any, references: dict[str, list[Answer]], target: str, variant: str
) -> None:
    pair = tiny(target)
    wanted = reference(references, engines, pair)
    drafter, options = {"llama": LLAMA, "kimi": KIMI}[target][variant]
    engine = engines.get(pair, drafter, **options)
    gateway, count = gateway_before(engine), SLOW.get(variant, PROMPTS)
    try:
        answers = [answer for stream in (False, True) for answer in ask_all(gateway, engine, stream, count)]
        counted = {
            name: gateway.metric(f"eyas_spec_{name}_total")
            for name in ("verify_steps", "accepted_tokens", "draft_tokens", "unreported_requests")
        }
        by_position = [
            gateway.metric("eyas_spec_accepted_tokens_per_pos_total", position=str(position)) for position in range(8)
        ]
    finally:
        gateway.stop()

    for number, answer in enumerate(answers):
        want = wanted[number % count]
        assert answer.ids == want.ids, f"prompt {number % count}"
        assert answer.text == want.text
        assert answer.usage["completion_tokens"] == TOKENS == len(answer.ids)
        check_identities(answer)

    histograms = [answer.details["spec_correct_drafts_histogram"] for answer in answers if answer.details]
    assert len(histograms) == 2 * count
    total = add_histograms(histograms)
    assert counted["unreported_requests"] == 0
    assert counted["verify_steps"] == verify_steps(total)
    assert counted["accepted_tokens"] == accepted_tokens(total) == sum(by_position)
    assert counted["draft_tokens"] == sum(
        answer.details["spec_num_proposed_drafts"] for answer in answers if answer.details
    )
    length = acceptance_length(total)
    assert length is not None and length > 1.05, "nothing was accepted: the equality shows nothing"
    assert total[0] > 0 and sum(1 for steps in total if steps) > 1, "acceptance must be partial"


def check_identities(answer: Answer) -> None:
    """sum(h) is the number of verify steps, sum(i*h[i]) the number of accepted drafts, for every request."""
    details = answer.details
    assert details is not None
    histogram = details["spec_correct_drafts_histogram"]
    assert sum(histogram) == details["spec_verify_ct"]
    assert sum(accepted * steps for accepted, steps in enumerate(histogram)) == details["spec_num_correct_drafts"]
    # One token comes from the prefill, then each step gives its accepted drafts and one more; the last step of a
    # request is counted whole even where max_tokens cuts its tokens off.
    made = 1 + details["spec_verify_ct"] + details["spec_num_correct_drafts"]
    assert len(answer.ids) <= made < len(answer.ids) + len(histogram)
