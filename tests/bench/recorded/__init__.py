"""What two drafters, about 0.1 apart, did with the MT-Bench prompts on the real engine.

`python -m tests.bench.recorded` measures it again.
"""

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "noised.json"


@dataclass(frozen=True)
class Recorded:
    """Histograms of each prompt's answers by drafter, and categories by prompt.

    sampled: four answers, drawn at temperature 1 one by one, so that two of one drafter are as different as chance
    makes them. greedy: one, the same text for both drafters, on which they are further apart.
    """

    categories: dict[str, str]
    sampled: dict[str, dict[str, list[list[int]]]]
    greedy: dict[str, dict[str, list[list[int]]]]


def read_recorded() -> Recorded:
    found = json.loads(FILE.read_text())
    runs = {name: run["histograms"] for name, run in found["runs"].items()}
    return Recorded(found["categories"], **runs)
