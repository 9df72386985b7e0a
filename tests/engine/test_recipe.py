"""The recipe from an empty folder to a drafter that the engine serves: QUICK, on the tiny Llama, every step real."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drafter.checkpoint.manifest import read_manifest
from server.engine import Engine
from tests.engine.pool import EnginePool
from tests.engine.test_walk import WORDS
from tests.tiny import TinyPair

pytestmark = [pytest.mark.engine, pytest.mark.slow]

REPO = Path(__file__).parents[2]
TRAIN = "--epochs 12 --lr 1e-2 --batch-tokens 600 --ttt-steps 3 --fp32 --threads 1 --eval-every 40"


def prompts(file: Path, count: int, seed: int) -> str:
    rng = random.Random(seed)
    lines = (" ".join(rng.choices(WORDS.split(), k=rng.randint(4, 30))) for _ in range(count))
    file.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    return str(file)


def test_the_recipe(engines: EnginePool, tiny: Callable[[str], TinyPair], tmp_path: Path) -> None:
    engines.stop()
    pair, work = tiny("llama"), tmp_path / "work"
    profile = engines.profile(pair)
    environment = {
        **os.environ,
        "QUICK": "1",
        "PY": sys.executable,
        "PROFILE": str(profile.source),
        "WORK": str(work),
        "PROMPTS": prompts(tmp_path / "asked.jsonl", 160, 1),
        "HELD_OUT": prompts(tmp_path / "held.jsonl", 24, 2),
        "COUNT": "160",
        "HELD_COUNT": "24",
        "VOCAB": "256",
        "TRAIN": TRAIN,
    }
    run = [REPO / "deploy" / "recipes" / "smollm2.sh"]
    first = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=800)
    assert first.returncode == 0, first.stderr
    lengths = [float(each) for each in re.findall(r"acceptance length (\S+) at \d draft steps", first.stdout)]
    assert len(lengths) == 4
    assert lengths[0] < lengths[1] <= lengths[2]
    assert lengths[2] > 1.3, "nothing was learned"

    folder = work / "run" / "drafter"
    manifest = read_manifest(folder)
    assert manifest and manifest["origin"]["kind"] == "scratch" and manifest["training"]["tokens"] > 0
    engine = Engine(profile, str(folder), run_dir=tmp_path / "engine")
    with engine:
        assert engine.resolved["speculative_num_steps"] == 3

    before = (work / "train.jsonl").stat().st_mtime_ns
    again = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout[first.stdout.index("acceptance length") :]
    assert (work / "train.jsonl").stat().st_mtime_ns == before
