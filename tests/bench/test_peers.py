"""The comparison with other benchmarks, with tools that only pretend: how they are called, read, and told apart."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import peers
from bench.peers import Figure, Load, agree, compare, main

PRETEND = """\
#!{python}
import json, pathlib, sys
argv = sys.argv[1:]
after = lambda flag: argv[argv.index(flag) + 1]
lines = pathlib.Path(after({file!r})).read_text().splitlines()
assert all(json.loads(line)["messages"] for line in lines) and str(len(lines)) == after({count!r})
pathlib.Path({seen!r}).write_text(json.dumps(argv))
out = pathlib.Path(after({out!r}))
{write}
sys.exit({code})
"""


def pretend(file: Path, write: str, flags: tuple[str, str, str], code: int = 0) -> Path:
    prompts, count, out = flags
    text = PRETEND.format(
        python=sys.executable,
        file=prompts,
        count=count,
        out=out,
        seen=str(file.with_suffix(".argv")),
        write=write,
        code=code,
    )
    file.write_text(text)
    file.chmod(0o755)
    return file


SERVING_WRITES = 'out.write_text(json.dumps({"completed": len(lines), "output_throughput": 50, "median_ttft_ms": 20}))'
AIPERF_WRITES = (
    'out.mkdir(exist_ok=True); (out / "profile_export_aiperf.json").write_text(json.dumps('
    '{"output_token_throughput": {"avg": 40}, "time_to_first_token": {"p50": 30}}))'
)
SERVING_FLAGS = ("--dataset-path", "--num-prompts", "--output-file")
AIPERF_FLAGS = ("--input-file", "--request-count", "--output-artifact-dir")


@pytest.fixture(name="tools")
def _tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(peers, "SERVING", pretend(tmp_path / "serving", SERVING_WRITES, SERVING_FLAGS))
    monkeypatch.setattr(peers, "AIPERF", pretend(tmp_path / "aiperf", AIPERF_WRITES, AIPERF_FLAGS))
    return tmp_path


def load(folder: Path) -> Load:
    file = folder / "prompts.jsonl"
    count = peers.write_prompts("mt_bench", 3, 32, "tiny", file)
    return Load("http://127.0.0.1:1", "secret", "tiny", folder, file, count, 32, 2, None)


def test_what_each_tool_wrote_is_read(tools: Path) -> None:
    for name, figure in (("sglang", Figure(50, 20)), ("aiperf", Figure(40, 30))):
        out = tools / f"out-{name}"
        out.mkdir()
        assert peers.TOOLS[name](load(tools), out) == figure
    argv = json.loads((tools / "aiperf.argv").read_text())
    assert argv[argv.index("--api-key") + 1] == "secret" and argv[argv.index("--concurrency") + 1] == "2"
    argv = json.loads((tools / "serving.argv").read_text())
    assert "secret" not in argv and "--disable-ignore-eos" in argv


@pytest.mark.parametrize("tool", ["sglang", "aiperf"])
def test_a_tool_that_fails_or_is_missing_is_named(tools: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    what = {"sglang": "SERVING", "aiperf": "AIPERF"}[tool]
    out = tools / "out"
    out.mkdir()
    flags = {"sglang": SERVING_FLAGS, "aiperf": AIPERF_FLAGS}[tool]
    broken = pretend(tools / "broken", "print('no such option')", flags, code=3)
    monkeypatch.setattr(peers, what, broken)
    with pytest.raises(peers.PeerError, match="broken ended with 3: no such option"):
        peers.TOOLS[tool](load(tools), out)
    monkeypatch.setattr(peers, what, tools / "nothing")
    with pytest.raises(peers.PeerError, match="make speculators-env aiperf-env"):
        peers.TOOLS[tool](load(tools), out)


def test_requests_that_failed_are_no_figure(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = SERVING_WRITES.replace("len(lines)", "1")
    monkeypatch.setattr(peers, "SERVING", pretend(tools / "fewer", writes, SERVING_FLAGS))
    out = tools / "out"
    out.mkdir()
    with pytest.raises(peers.PeerError, match="completed 1 of 3"):
        peers.serving(load(tools), out)


def test_ratios_are_medians_of_rounds_and_bounds_are_relative() -> None:
    rounds = [
        {"eyas": Figure(tok, 100), "aiperf": Figure(100, ttft)} for tok, ttft in ((100, 99), (104, 95), (300, 30))
    ]
    found = compare(rounds)
    assert found == {"aiperf": {"tokens_per_second": 1.04, "ttft_ms": pytest.approx(100 / 95)}}
    assert agree(found)
    assert not agree({"x": {"tokens_per_second": 1.06, "ttft_ms": 1.0}})
    assert not agree({"x": {"tokens_per_second": 1.0, "ttft_ms": 0.89}})


def test_the_command_takes_turns(
    tools: Path, running: Any, key_file: Path, prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a fake engine: each tool in each round, ours really measured."""
    url, rounds = running("none").url, ["--rounds", "2", "--tokenizer", str(tools)]
    code = main(["--url", url, "--key-file", str(key_file), "--prompts", str(prompt_file), *rounds, "--json"])
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert code == (0 if found["agree"] else 1)
    assert [set(one) for one in found["rounds"]] == [{"eyas", "sglang", "aiperf"}] * 2
    assert found["rounds"][0]["eyas"]["tokens_per_second"] > 0
    assert shown.err.count("peers: round") == 6
    assert main(["--url", running("good").url, "--key-file", str(key_file)]) == 1
    assert "runs EAGLE3: compare on an engine without a drafter" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense"])
def test_no_engine_is_told_in_a_sentence(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", url]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("peers: ") and shown.err.count("\n") == 1
