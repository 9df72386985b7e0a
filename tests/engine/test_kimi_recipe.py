"""The Kimi recipe, the very script, on the tiny Kimi: its drafter moved to another vocabulary, captured under tp 2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drafter.checkpoint.manifest import read_manifest
from drafter.data.shards import open_shards
from drafter.report import read_report
from tests.engine.conftest import EnginePool
from tests.engine.profiles import profile_text
from tests.engine.test_recipe import prompts
from tests.tiny import TinyPair

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(2400)]  # nine engine starts

REPO = Path(__file__).parents[2]
BUDGET = "--epochs 6 --batch-tokens 600 --ttt-steps 3 --fp32 --threads 1 --eval-every 40"


def test_the_recipe(engines: EnginePool, tiny: Callable[[str], TinyPair], tmp_path: Path) -> None:
    engines.stop()
    pair, work = tiny("kimi"), tmp_path / "work"
    serve, capture = tmp_path / "serve.toml", tmp_path / "capture.toml"
    serve.write_text(profile_text(pair))
    cores = sorted(os.sched_getaffinity(0))  # two processes, of one core each where there are two
    bind = f'OMP_NUM_THREADS = "1", SGLANG_CPU_OMP_THREADS_BIND = "{cores[0]}|{cores[-1]}"'
    two = serve.read_text().replace('OMP_NUM_THREADS = "1"', bind).replace("[engine]", "[engine]\ntp = 2")
    capture.write_text(two)
    environment = {
        **os.environ,
        "PY": sys.executable,
        "GENERATE": str(serve),
        "CAPTURE": str(capture),
        "SERVE": str(serve),
        "WORK": str(work),
        "TARGET": str(pair.target),
        "K2": str(pair.drafters["mha_noised_a"]),
        "PROMPTS": prompts(tmp_path / "asked.jsonl", 120, 1),
        "HELD_OUT": prompts(tmp_path / "held.jsonl", 16, 2),
        "COUNT": "120",
        "TOKENS": "48",
        "HELD_TOKENS": "48",
        "AT_ONCE": "16",
        "PROBED": "24",
        "VOCAB": "200",
        "NPROC": "2",
        "TRAIN": BUDGET,
        "SCRATCH": "--lr 1e-2",
    }
    run = [REPO / "deploy" / "recipes" / "kimi_k25.sh"]
    first = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=1700)
    (tmp_path / "stderr").write_text(first.stderr)
    # The gate's word on drafters of a toy is its own: promote, hold or reject.
    assert first.returncode in (0, 3, 4), first.stderr[-4000:]
    assert "== 9. May one be promoted?" in first.stderr

    shards = open_shards(work / "shards-train", verify=True)
    assert shards.manifest["layer_ids"] == list(pair.layer_ids)
    found = {
        Path(each["drafter"]).parent.name: each for each in read_report(work / "bench" / "report.json")["variants"]
    }
    assert all(each["status"] == "ok" for each in found.values())
    assert found["finetune"]["acceptance_length"] > 1.5 and found["scratch"]["acceptance_length"] > 1.2
    lengths = [float(each) for each in re.findall(r"acceptance length (\S+) at 3 draft steps", first.stdout)]
    assert len(lengths) == 3
    for walked, name in zip(lengths[1:], ("finetune", "scratch"), strict=True):
        assert walked == pytest.approx(found[name]["acceptance_length"], abs=0.15)
    parents = {name: read_manifest(work / name / "drafter") for name in ("finetune", "scratch")}
    assert [each and each["origin"]["kind"] for each in parents.values()] == ["finetune", "scratch"]
    assert json.loads((work / "finetune" / "drafter" / "config.json").read_text())["draft_vocab_size"] == 200

    before = {path: path.stat().st_mtime_ns for path in work.rglob("*.safetensors")}
    again = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300)
    assert again.returncode == first.returncode, again.stderr[-2000:]
    assert before == {path: path.stat().st_mtime_ns for path in work.rglob("*.safetensors")}
