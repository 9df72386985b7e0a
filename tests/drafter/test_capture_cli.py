"""python -m drafter capture against a fake engine: what it says, its exit codes, and how it goes on when killed."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drafter.__main__ import main
from drafter.data import spool
from drafter.data.shards import open_shards
from tests.drafter import fake_capturing_engine as fakes
from tests.drafter.capturing import check, lines, write_lines
from tests.drafter.fake_capturing_engine import KEY

REPO = Path(__file__).parents[2]


@pytest.fixture
def shown(capsys, monkeypatch):
    """A command as below, run in this process from the repository's folder: (exit code, stdout, stderr)."""

    def run(arguments):
        monkeypatch.chdir(REPO)
        try:
            code = main(arguments[3:])
        except SystemExit as end:  # argparse
            code = end.code
        return (code, *capsys.readouterr())

    return run


def command(fake, tmp_path, file, *more, out="out"):
    (tmp_path / "engine.yaml").write_text(json.dumps({"api-key": KEY, "admin-api-key": "a"}))
    where = ["--url", fake.url, "--dir", str(fake.folder), "--out", str(tmp_path / out)]
    keys = ["--key-file", str(tmp_path / "engine.yaml")]
    return [sys.executable, "-m", "drafter", "capture", str(file), *where, *keys, "--shard-mb", "0.004", *more]


def test_the_command(fake, tmp_path, shown):
    file = write_lines(tmp_path / "answers.jsonl", lines(9))
    done = subprocess.run(command(fake, tmp_path, file, "--json"), capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["documents"] == 9 and printed["data_hash"] == open_shards(tmp_path / "out").data_hash
    assert "eyas: 9 documents, " in done.stderr and KEY not in done.stderr + done.stdout
    code, out, err = shown(command(fake, tmp_path, file))
    assert code == 0 and "(9 are there already)" in err and "9 documents" in out


def test_refused_lines_are_findings(fake, tmp_path, shown):
    entries = lines(4)
    entries[1]["input_ids"][0] = fakes.REFUSED
    file = write_lines(tmp_path / "answers.jsonl", entries)
    code, _, err = shown(command(fake, tmp_path, file))
    assert code == 1
    assert "eyas: not captured: " in err and "answers.jsonl:2" in err


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--concurrency", "0"], 2, "is not a whole number of 1 or more"),
        (["--max-gb", "nan"], 2, "is not a finite number above 0"),
        (["--key-file", "nowhere.yaml"], 1, "eyas: --key-file: nowhere.yaml cannot be read"),
        (["--key-file", "pyproject.toml"], 1, "eyas: --key-file: pyproject.toml is no engine's key file"),
        (["--dir", "nowhere"], 1, "eyas: nowhere/handshake.json is missing"),
        (["--out", "pyproject.toml/x"], 1, "eyas: the folder pyproject.toml/x cannot be made"),
    ],
)
def test_errors_of_the_command(fake, tmp_path, shown, more, code, message):
    file = write_lines(tmp_path / "answers.jsonl", lines(2))
    ended, out, err = shown(command(fake, tmp_path, file, *more))
    assert (ended, out) == (code, "")
    assert message in err and "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_client_that_ends_early_goes_on(fake, tmp_path, shown, number):
    entries = lines(60)
    file = write_lines(tmp_path / "answers.jsonl", entries)
    assert shown(command(fake, tmp_path, file, out="whole"))[0] == 0
    fake.delay, before = 0.01, len(fake.answered)
    process = subprocess.Popen(
        command(fake, tmp_path, file, "--concurrency", "2"), cwd=REPO, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while len(fake.answered) < before + 25 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    said = process.communicate()[1]
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    assert "Traceback" not in said
    held = len(open_shards(tmp_path / "out", verify=True))
    assert 0 < held < 60
    fake.delay = 0
    assert shown(command(fake, tmp_path, file))[0] == 0
    check(tmp_path / "out", entries)
    assert not list(spool.spool_of(fake.folder).iterdir())
    if number == signal.SIGKILL:  # the same bytes as if nothing had happened
        for shard in sorted((tmp_path / "whole").iterdir()):
            assert shard.read_bytes() == (tmp_path / "out" / shard.name).read_bytes()


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_client_that_is_killed_again_and_again_loses_nothing(fake, tmp_path, kills):
    """kill -9 at random moments of a capture, its start and its end included: each document is there once."""
    entries = lines(60)
    file = write_lines(tmp_path / "answers.jsonl", entries)
    assert subprocess.run(command(fake, tmp_path, file, out="whole"), cwd=REPO).returncode == 0
    moments, killed, code = random.Random(5), 0, -signal.SIGKILL
    fake.delay = 0.01
    while code == -signal.SIGKILL:
        before, most = len(fake.answered), moments.randrange(0, 30)
        process = subprocess.Popen(command(fake, tmp_path, file, "--concurrency", "2"), cwd=REPO)
        while process.poll() is None and (killed == kills or len(fake.answered) < before + most):
            time.sleep(0.002)
        process.kill()
        code = process.wait()
        killed += code == -signal.SIGKILL
        if (tmp_path / "out" / "manifest.json").exists():
            open_shards(tmp_path / "out", verify=True)
    assert code == 0 and killed > 0
    check(tmp_path / "out", entries)
    folders = [open_shards(tmp_path / name) for name in ("whole", "out")]
    assert sorted(folders[0].names()) == sorted(folders[1].names()) and len(set(folders[1].names())) == 60


def test_help_teaches(shown):
    code, out, _ = shown([sys.executable, "-m", "drafter", "capture", "--help"])
    assert code == 0
    assert "server engine --profile" in out and "exit codes" in out
