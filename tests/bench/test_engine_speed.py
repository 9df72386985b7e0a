"""`bench.engine_speed`: its arithmetic, what it refuses, and the bar that the CPU engine must pass."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.engine_speed import SpeedError, figures, main, same_tokens, with_threads
from server.config import load_profile

REPO = Path(__file__).parents[2]
PROFILE = """
[target]
path = "{folder}"
served_name = "m"
[engine]
device = "{device}"
dtype = "{dtype}"
context_length = 64
max_running_requests = 1
env = {{OMP_NUM_THREADS = "7", OTHER = "kept"}}
"""


def profile_in(folder, device="cpu", dtype="float32"):
    file = folder / "profile.toml"
    file.write_text(PROFILE.format(folder=folder, device=device, dtype=dtype))
    return file


def test_same_tokens_counts_the_common_start():
    assert [same_tokens(*pair) for pair in (([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [1, 9, 3]), ([4], [5]), ([], []))] == [
        3, 1, 0, 0,
    ]  # fmt: skip


def test_figures_are_medians_and_the_ratio_is_that_of_pairs():
    speeds = [(10, 20), (30, 20), (40, 10)]  # engine, transformers
    runs = [{"engine_tokens_per_second": a, "transformers_tokens_per_second": b, "ratio": a / b} for a, b in speeds]
    found = figures(runs)
    assert found["ratio_vs_transformers"] == 1.5
    assert (found["tokens_per_second"], found["transformers_tokens_per_second"]) == (30, 20)
    assert found["runs"] == runs


def test_threads_and_model_replace_those_of_the_profile(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    changed = with_threads(load_profile(profile_in(tmp_path)), 3, tmp_path)
    assert changed.engine.env == {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE", "OTHER": "kept"}
    assert changed.model_path == str(tmp_path)


@pytest.mark.parametrize(
    ("profile", "reason"), [({"device": "cuda"}, "runs on cuda"), ({"dtype": "auto"}, "leaves dtype open")]
)
def test_a_profile_that_cannot_be_compared_is_refused(tmp_path, profile, reason):
    with pytest.raises(SpeedError, match=reason):
        with_threads(load_profile(profile_in(tmp_path, **profile)), 1, None)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--profile", "nowhere.toml"], "nowhere.toml does not exist"),
        (["--model", "nowhere"], "nowhere holds no config.json"),
        (["--runs", "80"], "MT-Bench has prompts for 79 runs"),
    ],
)
def test_usage_errors_are_one_sentence(capsys, arguments, reason):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("engine_speed: ")
    assert reason in shown.err


def test_a_count_below_one_is_refused():
    with pytest.raises(SystemExit) as stopped:
        main(["--tokens", "0"])
    assert stopped.value.code == 2


def measure():
    shown = subprocess.run(
        [sys.executable, "-m", "bench.engine_speed", "--runs", "7", "--tokens", "48", "--json"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert {"ratio_vs_transformers", "tokens_per_second", "runs", "machine", "command"} <= set(found)
    assert len(found["runs"]) == 7
    assert all(run["tokens"] == 48 for run in found["runs"])
    # The same model on both sides; in bfloat16 one of seven first tokens may be a near tie.
    assert sum(run["same_tokens"] > 0 for run in found["runs"]) >= 5
    return found["ratio_vs_transformers"]


@pytest.mark.engine
@pytest.mark.slow
def test_the_engine_is_no_slower_than_transformers():
    """The bar: at least 0.9 of transformers' speed, both in turns on the small model in bfloat16.

    Seven runs have a median of 0.97 and single ones lie between 0.89 and 1.05, so a machine that is busy for a moment
    can spoil one measurement: then a second one decides.
    """
    ratio = measure()
    assert ratio >= 0.9 or measure() >= 0.9, f"{ratio} at first"
