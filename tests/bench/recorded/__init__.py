"""What two drafters, about 0.1 apart, did with the MT-Bench prompts on the real engine.

`python -m tests.bench.recorded` measures it again.
"""

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "noised.json"


@dataclass(frozen=True)
class Recorded:
    """Histograms of each prompt's answers, drawn at temperature 1 one by one, by drafter; categories by prompt."""

    categories: dict[str, str]
    histograms: dict[str, dict[str, list[list[int]]]]


def read_recorded() -> Recorded:
    found = json.loads(FILE.read_text())
    return Recorded(found["categories"], found["histograms"])
