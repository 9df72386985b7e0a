"""Reports of bench/accept_len.py for tests: what the slow reference accepts on greedy answers, told as served."""

import json
from pathlib import Path

import numpy as np
import torch

from drafter.acceptance import is_looping
from drafter.checkpoint.folder import open_folder
from drafter.data.shards import Document
from drafter.report import ids_sha256, write_report
from tests.bench.made_up_report import acceptance, made_up
from tests.tiny.eagle import load, walk
from tests.tiny.targets import load as load_target

STEPS = 3


def write_probe(file: Path, drafter: Path, reference: Path, documents: list[Document], **changes: object) -> Path:
    """`file`, a report of `drafter` on these answers; `changes` overwrite keys of its variant."""
    slow = load(drafter, load_target(reference).get_input_embeddings().weight)
    requests = []
    for number, document in enumerate(documents):
        text, marked = document.input_ids.tolist(), np.flatnonzero(document.loss_mask)
        start, stop = int(marked[0]), int(marked[-1]) + 1
        with torch.no_grad():
            guesses = slow.propose(torch.from_numpy(document.aux_hidden)[None, :-1], torch.tensor([text[1:]]), STEPS)
        requests.append(
            {
                "prompt_id": f"coding/{number}",
                "category": "coding",
                "histogram": walk(text, guesses[0].tolist(), start, stop),
                "tokens": stop - start,
                "seconds": 2.0,
                "ttft_s": 0.1,
                "looping": is_looping(text[start:stop]),
                "output_sha256": ids_sha256(text[start:stop]),
            }
        )
    report = made_up(drafters=("old",), loads=(1,))
    variant = report["variants"][0]
    for key in ("by_answer_position", "by_context_length", "acceptance_length_ci95", "tpot_ms_p50", "ttft_ms_p50"):
        variant.pop(key, None)
    variant |= {"drafter": str(drafter), "drafter_sha256": open_folder(drafter).sha256, "requests": requests}
    variant |= {"loop_share": sum(each["looping"] for each in requests) / len(requests), "steps": STEPS}
    variant["categories"] = {"coding": acceptance(requests)}
    variant |= acceptance(requests) | changes
    report["variants"] = [variant]
    report["comparisons"] = []
    try:
        write_report(report, file)
    except ValueError as error:
        raise AssertionError(json.dumps(variant, indent=1)[:2000]) from error
    return file
