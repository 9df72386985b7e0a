"""Measure the two noised drafters of the tiny pair on all MT-Bench prompts and keep the histograms in noised.json.

Answers are drawn at temperature 1, four for each prompt, so that two of one drafter are as different as chance makes
them. Takes the real engine some minutes.
"""

import json
import sys
import tempfile
from pathlib import Path

from bench.accept_len import main
from drafter.report import read_report, write_text
from tests.bench.recorded import FILE
from tests.engine.profiles import profile_text
from tests.tiny import build

DRAFTERS = ("mha_noised_a", "mha_noised_b")
ARGUMENTS = (
    "--prompts mt_bench --max-tokens 48 --temperature 1 --answers 2 --repeats 2 --concurrency 8 --interleave off"
)


def record(folder: Path) -> None:
    profile = folder / "profile.toml"
    # The longest prompt has 997 of the tiny tokenizer's tokens.
    text = profile_text(build("llama")).replace("context_length = 1024", "context_length = 2048")
    profile.write_text(text)
    chosen = [word for name in DRAFTERS for word in ("--drafter", name)]
    # The first drafter is the baseline only because some variant has to be.
    code = main(
        [*ARGUMENTS.split(), "--profile", str(profile), "--baseline", DRAFTERS[0], *chosen, "--out", str(folder)]
    )
    if code:
        sys.exit(code)
    report = read_report(folder / "report.json")
    histograms: dict[str, dict[str, list[list[int]]]] = {}
    for variant in report["variants"]:
        mine = histograms.setdefault(variant["drafter"], {})
        for request in variant["requests"]:
            mine.setdefault(request["prompt_id"], []).append(request["histogram"])
    kept = {
        "command": "python -m tests.bench.recorded",
        "arguments": ARGUMENTS,
        "engine_version": report["provenance"]["engine_version"],
        "categories": {row["prompt_id"]: row["category"] for row in report["variants"][0]["requests"]},
        "histograms": histograms,
    }
    write_text(FILE, json.dumps(kept, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        record(Path(name))
