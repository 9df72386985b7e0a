"""`bench.gateway`: its arithmetic, its refusals, and one very short run of the whole of it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gateway import OWN, figures, main, peer
from bench.served import ServedError, Started, peer_at, process_cpu_s

REPO = Path(__file__).parents[2]


def test_a_short_run_measures_every_side():
    words = [sys.executable, "-m", "bench.gateway", "--quick", "--rounds", "1", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPO, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in OWN:
        for key in ("cpu_us_per_chunk", "cpu_us_per_request", "unary_p50_ms", "ttft_burst_p50_ms", "large_p50_ms"):
            assert found[name][key] > 0, (name, key)
        assert found[name]["ttft_burst_p50_ms"] >= 20
    assert found["direct"]["added_unary_p50_ms"] == found["direct"]["added_ttft_burst_p50_ms"] == 0
    assert found["eyas"]["added_unary_p50_ms"] > 0
    assert found["chunk_ratio_vs_minimal"] > 0 and found["request_ratio_vs_minimal"] > 0
    assert found["quick"] is True and len(found["runs"]) == 1 and found["command"] and found["machine"]
    assert "round 1 of 1" in done.stderr


def measured(chunk, request, unary, ttft, large=10.0):
    return {
        "cpu_us_per_chunk": chunk,
        "cpu_us_per_request": request,
        "unary_p50_ms": unary,
        "ttft_burst_p50_ms": ttft,
        "large_p50_ms": large,
        "cpu_us_per_large_request": 10 * request,
    }


def test_cpu_is_the_least_and_what_is_added_is_taken_within_a_round():
    rounds = [
        {"direct": measured(1, 1, 1, 20), "minimal": measured(10, 100, 2, 24), "eyas": measured(12, 150, 3, 26)},
        {"direct": measured(1, 1, 5, 40), "minimal": measured(30, 300, 9, 50), "eyas": measured(33, 330, 9, 55)},
        {"direct": measured(1, 1, 1, 20), "minimal": measured(10, 100, 2, 24), "eyas": measured(20, 100, 1.5, 23)},
    ]
    found = figures(rounds)
    assert found["eyas"]["added_unary_p50_ms"] == 2  # of 2, 4, 0.5
    assert found["eyas"]["added_ttft_burst_p50_ms"] == 6  # of 6, 15, 3
    assert found["eyas"]["cpu_us_per_chunk"] == 12 and found["eyas"]["cpu_us_per_request"] == 100
    assert found["chunk_ratio_vs_minimal"] == 1.2
    assert found["request_ratio_vs_minimal"] == 1.0
    assert found["added_unary_ratio_vs_minimal"] == 1  # of 2, 1, 0.5
    assert found["added_ttft_ratio_vs_minimal"] == 1.5  # of 1.5, 1.5, 0.75


def test_the_cpu_clock_of_another_process_counts_its_work_and_no_sleep():
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        spent = process_cpu_s(process.pid)
        time.sleep(0.3)
        assert 0.3 <= spent < 0.6
        assert process_cpu_s(process.pid) - spent < 0.05
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with pytest.raises(OSError):
        process_cpu_s(process.pid)


def test_a_peer_is_found_by_its_port():
    side = Started("upstream")
    try:
        assert peer_at("theirs", side.port).pids == [side.process.pid]
        assert os.getpid() not in peer_at("theirs", side.port).pids
    finally:
        side.stop()
    with pytest.raises(ServedError, match="start it first"):
        peer_at("theirs", side.port)


@pytest.mark.parametrize("text", ["", "x", "=http://127.0.0.1:1", "eyas=http://127.0.0.1:1", "x=http://elsewhere:1"])
def test_a_peer_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--peer", text, "--upstream-port", "1"])
    assert ended.value.code == 2
    assert "NAME=http://127.0.0.1:PORT" in capsys.readouterr().err


def test_a_peer_without_a_port_for_its_engine_is_refused(capsys):
    assert peer("x=http://127.0.0.1:80/") == ("x", 80)
    with pytest.raises(SystemExit) as ended:
        main(["--peer", "x=http://127.0.0.1:80"])
    assert ended.value.code == 2
    assert "--upstream-port" in capsys.readouterr().err
