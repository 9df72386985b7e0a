"""bench.transfer without an engine: which start is ahead, what is said of it, and what cannot be meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import transfer
from bench.transfer import SCRATCH, TUNED, Arm, Experiment, Plan, ahead, main, verdict, words_of
from tests.moved import SWAPPED, moved
from tests.tiny.language import CORE, Language, build, cycle_length
from tests.tiny.pair import SEED
from tests.tiny.tokenizer import train


@pytest.mark.parametrize(
    ("tuned", "scratch", "expected"),
    [
        ([2.0, 2.1], [1.8, 1.9], TUNED),
        ([1.8, 1.9], [2.0, 2.1], SCRATCH),
        ([1.8, 2.05], [2.0, 2.1], "neither"),
        ([2.0], [2.0], "neither"),
    ],
)
def test_one_start_is_ahead_where_every_seed_of_it_is(tuned: list[float], scratch: list[float], expected: str) -> None:
    assert ahead(tuned, scratch) == expected


@pytest.mark.parametrize(
    ("winners", "expected"),
    [
        ([TUNED, TUNED], "never overtaken"),
        ([TUNED, SCRATCH, SCRATCH], "scratch is ahead from about 1,200 tokens on"),
        ([TUNED, "neither"], "neither start is ahead"),
        ([SCRATCH, TUNED], "never overtaken"),
        ([TUNED, SCRATCH, "neither"], "neither start is ahead"),
    ],
)
def test_the_curve_in_a_sentence(winners: list[str], expected: str) -> None:
    found = verdict({str(2 * (n + 1)): winner for n, winner in enumerate(winners)}, 300)
    assert expected in found


def test_arms_are_pooled_over_seeds(tmp_path: Path) -> None:
    (tmp_path / "profile.toml").write_text(
        f'[target]\npath = "{tmp_path}"\nserved_name = "x"\n'
        '[engine]\ndevice = "cpu"\ncontext_length = 64\nmax_running_requests = 1\n'
    )
    plan = Plan(tmp_path, tmp_path / "out", (2, 8), 2, 1, 1, 8, None)
    arms = [Arm("as it is", tmp_path / "old")]
    for name in (TUNED, SCRATCH):
        arms += [Arm(name, tmp_path / f"{name}-{b}-{s}" / "drafter", b, s, 600 * b) for b in (2, 8) for s in (0, 1)]
    walks = []
    for arm in arms:
        right = 8 if arm.name == TUNED and arm.budget == 2 else 9 if arm.name == SCRATCH and arm.budget == 8 else 4
        histogram = [10 - right, right + arm.seed]
        walks.append(
            {
                "acceptance_length": 1 + histogram[1] / sum(histogram),
                "flatness": None,
                "documents": [{"histogram": histogram}] * 6,
            }
        )
    found = Experiment(plan).report(arms, walks, {str(tmp_path / "old"): 1.5})
    assert found["winner_by_budget"] == {"2": TUNED, "8": SCRATCH}
    by_name = {(row["name"], row["steps"]): row for row in found["arms"]}
    pooled = by_name[TUNED, 2]
    assert pooled["acceptance_length"] == pytest.approx(1 + (8 + 9) / (10 + 11))
    assert pooled["by_seed"] == [pytest.approx(1.8), pytest.approx(1 + 9 / 11)] and pooled["tokens"] == 1200
    assert found["furthest_from_served"] == pytest.approx(0.1)
    assert json.loads(json.dumps(found)) == found
    assert "scratch is ahead from about 4,800 tokens on" in words_of(found)


def test_what_fails_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--moved", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "profile.toml" in capsys.readouterr().err

    def fails(self: Experiment) -> None:
        raise transfer.TransferError("a step")

    monkeypatch.setattr(Experiment, "__init__", lambda self, plan: None)
    monkeypatch.setattr(Experiment, "run", fails)
    assert main(["--moved", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "transfer: a step\n"
    with pytest.raises(SystemExit) as stopped:
        main(["--moved", "x", "--out", "y", "--budgets", "40,20"])
    assert stopped.value.code == 2


def test_the_moved_language_is_one_cycle_of_which_a_quarter_is_new() -> None:
    tokens = train()
    old = build(tokens, SEED)
    new: Language = moved(old)
    both = set(old.core_C.tolist()) & set(new.core_C.tolist())
    assert len(new.core_C.unique()) == CORE and len(both) == CORE - SWAPPED
    assert cycle_length(new.main_MV, new.mode_V, int(new.core_C[0])) == 2 * CORE
    kept = torch.tensor(sorted(both))
    same = (new.main_MV[0, kept] == old.main_MV[0, kept]).float().mean()
    assert 0.4 < same < 0.9
