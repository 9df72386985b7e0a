"""How the bench is called: what it refuses before anything starts, and from where it runs."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.accept_len import main
from tests.bench.fake_engine import FakeEngine, Script

ROOT = Path(__file__).parents[2]


def usage(capsys: Any, *args: str) -> str:
    """The one line on stderr of a command that is refused."""
    try:
        code = main(list(args))
    except SystemExit as exit_:
        code = int(str(exit_.code))
    printed = capsys.readouterr()
    assert code == 2 and printed.out == ""
    return str(printed.err)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--drafter", "nobody"], "drafter 'nobody' is neither a name"),
        (["--drafter", "good", "--baseline", "nobody"], "drafter 'nobody' is neither a name"),
        (["--drafter", "good", "--drafter", "good"], "drafter 'good' is given twice"),
        (["--drafter", "good", "--concurrency", "5"], "concurrency is 5, but the profile runs 4 requests"),
        (["--drafter", "good", "--max-tokens", "512"], "max tokens is 512, but the profile's context_length of 512"),
        (["--drafter", "good", "--prompts", "mtbench"], "did you mean 'mt_bench'"),
        (["--drafter", "good", "--profile", "nowhere.toml"], "profile nowhere.toml does not exist"),
        (["--drafter", "good", "--out", "/dev/null/x"], "the folder /dev/null/x cannot be made"),
        (["--drafter", "good", "--limit", "0"], "'0' is not a whole number from 1 to 2147483647"),
        (["--drafter", "good", "--repeats", "x"], "'x' is not a whole number"),
        (["--drafter", "good", "--temperature", "-1"], "is not a finite number from 0 to 2"),
        (["--drafter", "good", "--temperature", "nan"], "is not a finite number from 0 to 2"),
        (["--drafter", "good", "--url", "x"], "--url 'x' is no address"),
        (["--drafter", "good", "--url", "a=ftp://x"], "--url 'a=ftp://x' is no address"),
        (["--drafter", "good", "--url", "http://x", "--key-file", "/nowhere"], "key file /nowhere cannot be read"),
        (["--url", "a=http://x", "--baseline", "b"], "baseline 'b' is none of the URLs (a)"),
        (["--drafter", "good", "--url", "good=http://x"], "'good' names two variants: give each URL a name"),
        (["--url", "a=http://x", "--url", "a=http://y"], "'a' names two variants: give each URL a name"),
        (["--drafter", "good", "--concurrency", "1,1"], "names one number twice"),
        (["--drafter", "good", "--concurrency", "3,4", "--limit", "3"], "concurrency is 4, but a block has 3 prompts"),
        (["--drafter", "good", "--answers", "2"], "concurrency is 4 with 2 answers each, but the profile runs 4"),
        (["--drafter", "good", "--thinking", "on,on"], "is not on, off, default"),
        (["--drafter", "good", "--looks", "2", "--concurrency", "2"], "looks compare drafters with each other"),
        (["--drafter", "good", "--check-sampling"], "greedy answers are not sampled"),
        (["--drafter", "ngram:depth=3"], "drafter 'ngram:depth=3': depth: extra inputs"),
        (["--drafter", "ngram:draft_tokens=0"], "draft_tokens: input should be greater than or equal to 1"),
        (["--drafter", "ngram:draft_tokens"], "'draft_tokens' is no key=value"),
        (["--drafter", "ngram:external_corpus_path=/nowhere"], "the corpus /nowhere is not a file"),
        ([], "nothing to measure: name a --drafter, or a --url"),
    ],
)
def test_usage_errors_start_nothing(
    engine: type[FakeEngine], profile_file: Path, prompt_file: Path, capsys: Any, args: list[str], message: str
):
    shared = ["--profile", str(profile_file), "--prompts", str(prompt_file)]
    assert message in usage(capsys, *shared, *args)
    assert engine.seen.starts == []


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--drafter", "good", "--seed", "9" * 24], "to 2147483647"),
        (["--drafter", "good", "--repeats", "9" * 24], "to 2147483647"),
        (["--drafter", "good", "--key-file", "keys.yaml"], "--key-file is for engines that already run"),
        (["--url", "http://[::1"], "is no address"),
        (["--url", "http://localhost:99999999"], "is no address"),
        (["--url", "http://localhost:8", "--num-steps", "2"], "keeps its draft steps"),
    ],
)
def test_what_cannot_be_meant_starts_nothing(
    bench: Any, engine: type[FakeEngine], capsys: Any, args: list[str], reason: str
):
    try:
        code, _, _, err = bench(*args)
    except SystemExit as end:  # argparse
        code, err = end.code, capsys.readouterr().err
    assert code == 2 and reason in err and engine.seen.starts == []


def test_two_folders_with_one_name_are_told_apart(bench: Any, engine: type[FakeEngine]):
    engine.scripts["a/best"] = Script(steps=(1,), name="best")
    engine.scripts["b/best"] = Script(steps=(2,), name="best")
    _, report, _, _ = bench("--drafter", "a/best", "--drafter", "b/best")
    assert [variant["drafter"] for variant in report["variants"]] == ["none", "a/best", "b/best"]


def test_one_drafter_under_two_spellings_runs_once_as_baseline(bench: Any, engine: type[FakeEngine]):
    engine.scripts["./good"] = Script(steps=(3, 2, 0), name="good")
    code, report, _, _ = bench("--drafter", "./good", "--baseline", "good")
    assert code == 0
    assert [variant["drafter"] for variant in report["variants"]] == ["good", "./good"]


def test_it_runs_as_a_script_from_any_folder(tmp_path: Path):
    script = [sys.executable, str(ROOT / "bench" / "accept_len.py")]
    for command in ([*script, "--help"], [sys.executable, "-m", "bench.accept_len", "--help"]):
        folder = ROOT if "-m" in command else tmp_path
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
        assert "what the numbers mean" in done.stdout
        for flag in ("--drafter", "--url", "--prompts", "--repeats", "--interleave", "--looks", "--check-sampling"):
            assert flag in done.stdout


def test_it_runs_as_a_script_without_being_installed(tmp_path: Path):
    for room in ("bench", "drafter", "server"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, str(tmp_path / "bench" / "accept_len.py"), "--drafter", "x", "--profile", "nowhere.toml"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        "accept_len: profile nowhere.toml does not exist: see deploy/profiles/ for those that come with Eyas.\n"
    )


def test_no_file_in_bench_takes_a_standard_name():
    assert not {path.stem for path in (ROOT / "bench").glob("*.py")} & sys.stdlib_module_names
