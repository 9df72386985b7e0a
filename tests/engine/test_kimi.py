"""Every Kimi profile with each of its drafter blocks, on the real engine; and one of them over two nodes.

With the keys that need a GPU overridden, different profiles start the same engine: each start is run once.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from server.config import Profile
from server.engine import Engine
from server.launch import Node
from server.ports import free_port
from tests.engine.conftest import EnginePool
from tests.engine.kimi import PROFILES, on_cpu, start_of
from tests.engine.profiles import cores_of_two_ranks
from tests.tiny import TinyPair

pytestmark = pytest.mark.engine

STARTS = ("none", "lightseek-mla", "k2-direct", "k2-direct-outputs", "ngram")
QUESTIONS = ("the eagle hunts over water", "a fish dives", "its young in spring")
TOKENS = 40


@pytest.fixture(scope="module")
def pair(tiny: Callable[[str], TinyPair]) -> TinyPair:
    return tiny("kimi")


@pytest.fixture(scope="module")
def alone(engines: EnginePool) -> EnginePool:
    """No other engine runs beside those that are started here."""
    engines.stop()
    return engines


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, list[list[int]]]]:
    """The token ids of each start's answers."""
    yield {}


@pytest.fixture(scope="module")
def lengths() -> Iterator[dict[str, float]]:
    """The acceptance length of each start's answers."""
    yield {}


def ask(engine: Engine) -> tuple[list[list[int]], float]:
    """Greedy answers by their token ids, and the acceptance length over them (1 without speculation)."""
    found, steps, accepted = [], 0, 0
    for question in QUESTIONS:
        body: dict[str, Any] = {
            "model": "kimi-k2.5",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_spec_tokens_details": True,
            "return_output_ids_in_sglext": True,
        }
        answer = httpx.post(f"{engine.url}/v1/chat/completions", json=body, headers=engine.headers, timeout=120)
        assert answer.status_code == 200, answer.text
        extension = answer.json()["sglext"]
        found.append(extension["output_ids"][0])
        details = extension.get("spec_tokens_details") or {}
        steps += details.get("spec_verify_ct", 0)
        accepted += details.get("spec_num_correct_drafts", 0)
    assert all(len(ids) == TOKENS for ids in found)
    return found, 1 + accepted / steps if steps else 1.0


def test_every_profile_and_block_is_one_of_the_starts(pair: TinyPair) -> None:
    wanted = {start_of(on_cpu(PROFILES[0], pair), name) for name in STARTS}
    assert len(wanted) == len(STARTS)
    seen = set()
    for file in PROFILES:
        profile = on_cpu(file, pair)
        for name in ("none", *profile.drafters):
            start = start_of(profile, name)
            assert start in wanted, (file.stem, name)
            seen.add(start)
    assert seen == wanted


@pytest.mark.parametrize("name", STARTS)
def test_a_block_starts_and_answers(
    alone: EnginePool,
    pair: TinyPair,
    answers: dict[str, list[list[int]]],
    lengths: dict[str, float],
    name: str,
) -> None:
    """What `serve` would start: the preflight, the start, the comparison with /server_info and the probe included."""
    with Engine(on_cpu(PROFILES[0], pair), name, force=("probe",)) as engine:
        answers[name], lengths[name] = ask(engine)
        assert engine.served_name == "kimi-k2.5"
    assert answers[name] == answers["none"], "speculation changed a greedy answer"
    if name in ("lightseek-mla", "k2-direct"):
        assert lengths[name] > 1.3


def test_another_reading_of_the_layers_reaches_the_engine(
    alone: EnginePool, pair: TinyPair, answers: dict[str, list[list[int]]], lengths: dict[str, float]
) -> None:
    """[1, 2, 3] as outputs are [2, 3, 4] as inputs, to the token; other layers are other states, and accept less."""
    profile = on_cpu(PROFILES[0], pair)
    same = profile.drafters["k2-direct-outputs"].model_copy(update={"override_layer_ids": [1, 2, 3]})
    profile = profile.model_copy(update={"drafters": {"same": same.model_copy(update={"convention": None})}})
    with Engine(profile, "same") as engine:
        assert ask(engine) == (answers["k2-direct"], lengths["k2-direct"])
    assert lengths["k2-direct-outputs"] < lengths["k2-direct"]  # by 0.08: greedy, in fp32, so it is always so


def test_two_nodes(alone: EnginePool, pair: TinyPair, answers: dict[str, list[list[int]]]) -> None:
    """The second node holds half of the model and answers nothing; the first answers as one node alone."""
    profile: Profile = on_cpu(PROFILES[0], pair, tp=2, nodes=2, env=cores_of_two_ranks())
    first = f"127.0.0.1:{free_port()}"
    engines = [Engine(profile, "lightseek-mla", node=Node(rank, first), force=("probe",)) for rank in (0, 1)]
    failed: list[Exception] = []

    def start(engine: Engine) -> None:
        try:
            engine.start()
        except Exception as error:  # noqa: BLE001 (told by the test's own thread)
            failed.append(error)

    threads = [threading.Thread(target=start, args=[engine]) for engine in engines]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(400)
        assert not failed, failed[0]
        assert [engine.state for engine in engines] == ["ready", "ready"]
        ids, _ = ask(engines[0])
        assert ids == answers["none"]
    finally:
        for engine in engines:
            engine.stop()
