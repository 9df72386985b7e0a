"""The grammar of requests: what it writes is a prompt file, without repeats, slots left open or a benchmark's text."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drafter.data.overlap import bundled_overlap
from drafter.data.prompts import load_prompts

SCRIPT = Path(__file__).parents[2] / "deploy/recipes/smollm2/requests.py"


def written(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)


def test_requests_are_a_prompt_file_that_overlaps_with_no_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(written("--count", "1500", "--seed", "7").stdout)
    prompts = [str(prompt.messages[0]["content"]) for prompt in load_prompts(str(file))]
    assert len(set(prompts)) == 1500
    assert not [text for text in prompts if "{topic" in text or "{n}" in text or "{count" in text or "  \n" in text]
    overlap = bundled_overlap()
    assert not [text for text in prompts if overlap.with_prompt(text)]


def test_examples_of_functions_are_true() -> None:
    """Sums are added up again; the same seed writes the same."""
    lines = written("--count", "1000").stdout
    assert lines == written("--count", "1000").stdout
    texts = [text for line in lines.splitlines() if "the sum of the numbers." in (text := json.loads(line)["prompt"])]
    examples = [found for text in texts for found in re.findall(r">>> \w+\((\[.*\])\)\n    (.*)\n", text)]
    assert len(examples) > 3
    assert all(sum(json.loads(numbers)) == int(answer) for numbers, answer in examples)


@pytest.mark.parametrize("count", ["0", "-1", "many"])
def test_a_count_that_is_none_is_refused(count: str) -> None:
    done = written("--count", count)
    assert (done.returncode, done.stdout) == (2, "") and count in done.stderr
