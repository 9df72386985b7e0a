"""A variant of the bench that fails is named with its cause, and the others finish."""

import json
import re
import time
from typing import Any

import pytest

from bench import load
from bench.journal import Journal
from tests.bench.fake_engine import FakeEngine, Script

FAULTS = {
    "dies": r"prompt green: the connection failed \(.*\); the engine is dead\. Its last log lines:\n(.*\n)*  Segment",
    "cut off": r"prompt green: the stream ended before the answer did",
    "no done": r"prompt green: the stream ended before the answer did",
    "breaks off": r"prompt green: the engine broke the stream off: Out of KV cache\.",
    "aborts": r"prompt green: the engine aborted the request",
    "400": r"prompt green: answered 400: The input is longer than the context length\.",
    "not json": r"prompt green: the stream has an event that is not JSON",
    "miscounts": r"prompt green: the engine says spec_verify_ct 1000 but its histogram \[4, 0, 5, 5\] gives 14",
    "counts what never came": r"prompt green: the histogram .* accounts for \d+ tokens more than the 40 that came",
    "no details": r"prompt green: the engine speculates but sent no speculation details with 40 tokens",
    "no ids": r"prompt green: the stream carried no output ids",
    "fewer ids": r"prompt green: usage counts 40 completion tokens but the engine sent 39 ids",
    "no usage": r"prompt green: the stream carried no usage",
    "does not flush": r"/flush_cache answered 400: Flush cache failed\.",
    "fails to warm up": r"prompt warm-up/0: answered 400",
    "does not start": r"the engine died \(exit code 3\) while loading",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_variant_that_fails_is_reported_while_the_others_finish(bench: Any, engine: type[FakeEngine], fault: str):
    engine.scripts["bad"] = Script(steps=(3, 2, 0), fault=fault, fault_at=1)
    code, report, out, err = bench("--drafter", "bad", "--drafter", "good", "--concurrency", "1")
    assert code == 1
    assert [variant["status"] for variant in report["variants"]] == ["ok", "failed", "ok"]
    failed = report["variants"][1]
    assert set(failed) == {"status", "drafter", "error"}
    assert re.search(FAULTS[fault], failed["error"]), failed["error"]
    assert "Failed: bad" in out and "bad: failed" in err
    assert report["variants"][2]["greedy_equal"] == {"equal": 4, "total": 4, "near_ties": 0, "differences": []}
    assert "Traceback" not in err


def test_log_lines_of_a_dead_engine_are_the_last_twenty(bench: Any, engine: type[FakeEngine]):
    engine.scripts["bad"] = Script(steps=(1,), fault="dies")
    _, report, _, _ = bench("--drafter", "bad")
    lines = report["variants"][1]["error"].splitlines()[1:]
    assert lines == [f"  line {count}" for count in range(11, 30)] + ["  Segmentation fault"]


def test_an_engine_that_goes_silent_is_given_up(bench: Any, engine: type[FakeEngine], monkeypatch: Any):
    monkeypatch.setattr(load, "IDLE_TIMEOUT_S", 0.3)
    engine.scripts["bad"] = Script(steps=(1,), fault="goes silent")
    began = time.monotonic()
    code, report, _, _ = bench("--drafter", "bad")
    assert code == 1 and time.monotonic() - began < 15
    assert "prompt red: nothing came from the engine for" in report["variants"][1]["error"]


def test_a_plain_engine_that_speculates_is_a_fault(bench: Any, engine: type[FakeEngine]):
    engine.scripts["none"].fault = "speculates all the same"
    code, report, _, _ = bench("--drafter", "good")
    assert code == 1
    assert "should not speculate" in report["variants"][0]["error"]
    # without a baseline there is nothing to compare with
    assert report["variants"][1]["status"] == "ok" and "greedy_equal" not in report["variants"][1]


def test_a_report_in_which_everything_failed_is_still_written(bench: Any, engine: type[FakeEngine]):
    for script in engine.scripts.values():
        script.fault = "does not start"
    code, report, out, _ = bench("--drafter", "good")
    assert code == 1
    assert [variant["status"] for variant in report["variants"]] == ["failed", "failed"]
    assert "no engine came up" in out and "out of memory" in out


def test_json_of_a_failed_variant(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"].fault = "dies"
    code, report, out, _ = bench("--drafter", "good", "--json")
    assert code == 1
    assert json.loads(out) == report


def test_an_engine_that_came_back_as_another_fails_its_variant(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"].versions = ("9.9.9", "9.9.10")
    code, report, _, _ = bench("--drafter", "good", "--repeats", "2")
    assert code == 1
    assert [variant["status"] for variant in report["variants"]] == ["ok", "failed"]
    assert "engine_version '9.9.10', the one before had '9.9.9'" in report["variants"][1]["error"]


def test_an_answer_without_a_token_fails_its_variant(bench: Any, engine: type[FakeEngine], monkeypatch: Any):
    original = FakeEngine.answer_to

    def nothing(self: FakeEngine, prompt: str, max_tokens: int) -> Any:
        answer = original(self, prompt, max_tokens)
        if self.given == "good" and prompt == "green":
            answer.ids, answer.pieces, answer.histogram = [], [], []
        return answer

    monkeypatch.setattr(FakeEngine, "answer_to", nothing)
    code, report, _, _ = bench("--drafter", "good")
    assert code == 1
    assert "prompt green: the engine sent an answer without a single token" in report["variants"][1]["error"]


def test_a_disk_that_fills_up_is_said_in_a_sentence(bench: Any, engine: type[FakeEngine], monkeypatch: Any):
    original = Journal.add

    def full(self: Journal, key: Any, block: Any) -> None:
        if key[0] == "good":
            raise OSError(28, "No space left on device")
        original(self, key, block)

    monkeypatch.setattr(Journal, "add", full)
    code, report, _, err = bench("--drafter", "good")
    assert code == 1 and report is None
    assert "stopped by [Errno 28] No space left on device: mend it and give the same command" in err
    monkeypatch.undo()
