"""Whether answers of two variants are the same: token for token where greedy, in distribution where sampled."""

from typing import Any

import pytest

from tests.bench.fake_engine import FakeEngine, Script


def test_greedy_answers_are_compared_token_for_token(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"].changed = ("blue",)
    code, report, out, _ = bench("--drafter", "good", "--repeats", "2")
    plain, good = report["variants"]
    assert code == 0  # told, not failed
    assert (good["greedy_equal"]["equal"], good["greedy_equal"]["total"]) == (6, 8)
    assert "6 of 8" in out
    same = [a["output_sha256"] == b["output_sha256"] for a, b in zip(plain["requests"], good["requests"], strict=True)]
    assert same == [True, True, False, True] * 2


def test_sampled_answers_are_not_compared(bench: Any):
    _, report, _, _ = bench("--drafter", "good", "--temperature", "0.7")
    assert "greedy_equal" not in report["variants"][1]


def test_where_answers_differ_the_plain_engine_is_asked_how_near_it_was(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"].changed = ("blue",)
    _, report, _, _ = bench("--drafter", "good", "--repeats", "2")
    found = report["variants"][1]["greedy_equal"]
    assert engine.seen.starts[-1] == "none" and {given for given, _ in engine.seen.questions} == {"none"}
    (question,) = [body for _, body in engine.seen.questions]  # the same in both repeats
    fake = FakeEngine.__new__(FakeEngine)
    fake.script = engine.scripts["good"]
    mine = fake.answer_to("blue", 40).ids
    fake.script = Script(algorithm="NONE")
    theirs = fake.answer_to("blue", 40).ids
    assert question["input_ids"] == list(b"blue") and question["token_ids_logprob"] == [theirs[0], mine[0]]
    row = {"prompt_id": "blue", "position": 0, "gap": pytest.approx(0.4), "near_tie": False}
    assert found == {
        "equal": 6, "total": 8, "near_ties": 0, "differences": [{**row, "repeat": 0}, {**row, "repeat": 1}],
    }  # fmt: skip


@pytest.mark.parametrize(("gap", "near"), [(0.0004, True), (-0.0004, True), (0.4, False), (None, None)])
def test_what_a_near_tie_is(bench: Any, engine: type[FakeEngine], gap: float | None, near: bool | None):
    engine.scripts["good"].changed = ("blue",)
    engine.scripts["none"].gap = gap
    _, report, _, _ = bench("--drafter", "good")
    (row,) = report["variants"][1]["greedy_equal"]["differences"]
    assert row.get("near_tie") is near and report["variants"][1]["greedy_equal"]["near_ties"] == (near is True)


def test_a_type_of_numbers_that_is_not_known_makes_no_near_ties(bench: Any, engine: type[FakeEngine], monkeypatch: Any):
    original = FakeEngine.start

    def start(self: FakeEngine, progress: Any) -> None:
        original(self, progress)
        self.resolved = {"dtype": "auto"}

    monkeypatch.setattr(FakeEngine, "start", start)
    engine.scripts["good"].changed = ("blue",)
    code, report, _, _ = bench("--drafter", "good")
    assert code == 0
    (difference,) = report["variants"][1]["greedy_equal"]["differences"]
    assert difference["gap"] == pytest.approx(0.4) and "near_tie" not in difference


@pytest.mark.parametrize(("samples", "differs"), [((1, 2, 3), False), ((1, 1, 2, 3), True)])
def test_the_sampling_check(bench: Any, engine: type[FakeEngine], samples: tuple[int, ...], differs: bool):
    engine.scripts["good"].samples = samples
    _, report, _, _ = bench("--drafter", "good", "--temperature", "1", "--check-sampling", "300")
    found = report["variants"][1]["sampling"]
    assert found["differs"] is differs and (found["p_value"] < found["error_rate"]) is differs
    assert (found["prompts"], found["samples"]) == (4, 1200) and found["reference_samples"] == 3 * 1200
    assert "sampling" not in report["variants"][0]


def test_what_never_varies_is_not_called_checked(bench: Any, engine: type[FakeEngine]):
    for script in engine.scripts.values():
        script.samples = (1,)
    code, report, _, _ = bench("--drafter", "good", "--temperature", "1", "--check-sampling", "100")
    assert code == 0 and "sampling" not in report["variants"][1]
