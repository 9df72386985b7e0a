"""Measure the two noised drafters of the tiny pair on all MT-Bench prompts and keep the histograms in noised.json.

`python -m tests.bench.recorded [sampled|greedy]` runs both, or one and keeps the other as it is. Takes the real engine
some minutes.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.accept_len import main
from drafter.report import read_report, write_text
from tests.bench.recorded import FILE
from tests.engine.profiles import profile_text
from tests.tiny import build

DRAFTERS = ("mha_noised_a", "mha_noised_b")
RUNS = {
    "sampled": "--max-tokens 48 --temperature 1 --answers 2 --repeats 2",
    "greedy": "--max-tokens 96",
}
SHARED = "--prompts mt_bench --concurrency 8 --interleave off"


def record(name: str, folder: Path, kept: dict[str, Any]) -> None:
    """Run one, and put it in its place in `kept`."""
    profile, arguments = folder / "profile.toml", f"{SHARED} {RUNS[name]}"
    # The longest prompt has 997 of the tiny tokenizer's tokens.
    profile.write_text(profile_text(build("llama")).replace("context_length = 1024", "context_length = 2048"))
    chosen = [word for drafter in DRAFTERS for word in ("--drafter", drafter)]
    # The first drafter is the baseline only because some variant has to be.
    shared = ["--profile", str(profile), "--baseline", DRAFTERS[0], "--out", str(folder / name)]
    if code := main([*arguments.split(), *shared, *chosen]):
        sys.exit(code)
    report = read_report(folder / name / "report.json")
    histograms: dict[str, dict[str, list[list[int]]]] = {}
    for variant in report["variants"]:
        mine = histograms.setdefault(variant["drafter"], {})
        for request in variant["requests"]:
            mine.setdefault(request["prompt_id"], []).append(request["histogram"])
    kept |= {
        "command": "python -m tests.bench.recorded",
        "engine_version": report["provenance"]["engine_version"],
        "categories": {row["prompt_id"]: row["category"] for row in report["variants"][0]["requests"]},
    }
    kept.setdefault("runs", {})[name] = {"arguments": arguments, "histograms": histograms}
    write_text(FILE, json.dumps(kept, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as made:
        for each in sys.argv[1:] or RUNS:
            record(each, Path(made), before)
