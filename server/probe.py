"""Whether a drafter that was just started is accepted at all, on fixed prompts: what no check of its files can tell.

A permuted vocabulary map, hidden states of another layer, a drafter of another target: the engine serves them all
without a word, at an acceptance length near 1. NGRAM is not probed: it drafts from what it has seen, which at a start
is nothing, so its length says nothing about it yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from drafter.acceptance import acceptance_length, add_histograms, histogram_of_details, verify_steps

NAME = "probe"  # for --force
TOKENS = 48  # of each answer: with the prompts below at least 96 verify steps of 3 draft tokens
FEWEST_STEPS = 20
PROMPTS = (
    "Explain in a few paragraphs how a sailing boat can move against the wind.",
    "Write a short story about a lighthouse keeper and a young falcon.",
    "List ten things to check before a long journey by car, with a reason for each.",
    "Write a Python function that merges two sorted lists, and explain each line of it.",
    "What is the difference between weather and climate? Give examples.",
    "Describe step by step how bread is made, from flour to the finished loaf.",
    "Summarise what you know about the history of the printing press.",
    "A train leaves at nine and travels 240 km at 80 km/h. When does it arrive? Show every step.",
)
CAUSES = (
    "d2t is not the map that lm_head was trained under: compare it with the origin's (`python -m drafter diff`), and "
    "move the rows (`python -m drafter remap --rows-vocab`)",
    "the target is not the one that the drafter was made for, or a later version of it",
    "the captured layers are others than in training: the ids of eagle_config, or what they mean to this target",
    "a norm or the rope of the drafter is configured otherwise than in training (norm_output, norm_before_fc, fc_norm, "
    "rope_theta)",
    "the drafter is hardly trained",
)


class ProbeError(RuntimeError):
    """A probe without a trustworthy answer, in one sentence."""


@dataclass(frozen=True)
class Probe:
    """What a probe found. `histogram`: verify steps by accepted draft tokens, summed over the prompts."""

    histogram: list[int]

    @property
    def acceptance_length(self) -> float:
        """By `drafter.acceptance`: not the engine's own figure, which counts the prefill's token as a step's."""
        length = acceptance_length(self.histogram)
        assert length is not None, "`ask` refuses a probe without a step"
        return length

    @property
    def text(self) -> str:
        """One phrase for a person."""
        return (
            f"acceptance length {self.acceptance_length:.2f} on {len(PROMPTS)} fixed prompts "
            f"({verify_steps(self.histogram)} verify steps)"
        )

    def failure(self, drafter: str, floor: float) -> str:
        """What stops a start, with the likely causes, the likeliest first."""
        causes = "\n  ".join(f"{number}. {cause}." for number, cause in enumerate(CAUSES, 1))
        return (
            f"drafter {drafter} is hardly ever accepted: {self.text}, expected {floor:.2f} or more. The engine serves "
            f"such a drafter without a word, and slower than without one; it was stopped. Likely causes:\n  {causes}\n"
            f"Serve it all the same with --force {NAME}; the profile's [probe] sets the floor, or turns the probe off."
        )


def ask(url: str, model: str, headers: Mapping[str, str], timeout_s: float) -> Probe:
    """Send the fixed prompts, greedily and all at once. Raises ProbeError."""
    with (
        httpx.Client(base_url=url, headers=dict(headers), timeout=timeout_s, trust_env=False) as client,
        ThreadPoolExecutor(len(PROMPTS)) as threads,
    ):
        try:
            histograms = list(threads.map(lambda prompt: _histogram(client, model, prompt), PROMPTS))
        except httpx.TransportError as error:
            raise ProbeError(f"the engine did not answer the probe ({type(error).__name__}).") from None
    found = Probe(add_histograms(histograms))
    if verify_steps(found.histogram) < FEWEST_STEPS:
        raise ProbeError(
            f"the engine made {verify_steps(found.histogram)} verify steps in the whole probe, expected "
            f"{FEWEST_STEPS} or more: it does not speculate as it was asked to."
        )
    return found


def why_not(algorithm: Literal["NONE", "EAGLE3", "NGRAM"], *, adopted: bool, simulated: bool, off: str | None) -> str:
    """Why a started engine is not probed; empty where it is. adopted: an earlier process started it. off: the
    profile's reason not to."""
    if adopted:
        return "it was when the engine started"
    match algorithm:
        case "NONE":
            return "nothing speculates"
        case "NGRAM":
            return "NGRAM has seen nothing yet to draft from"
        case "EAGLE3" if simulated:
            return "acceptance is simulated"
        case "EAGLE3" if off is not None:
            return f"the profile turns it off: {off}"
    return ""


def _histogram(client: httpx.Client, model: str, prompt: str) -> list[int]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,  # a short answer would leave too few steps to tell anything by
        "return_spec_tokens_details": True,
    }
    answer = client.post("/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": prompt}]})
    if answer.is_client_error:  # a target without a chat template
        answer = client.post("/v1/completions", json=body | {"prompt": prompt})
    if answer.status_code != httpx.codes.OK:
        raise ProbeError(f"the engine answered {answer.status_code} to the probe: {answer.text[:300]}")
    try:
        return histogram_of_details(answer.json()["sglext"]["spec_tokens_details"])
    except (ValueError, LookupError, TypeError) as error:
        raise ProbeError(f"the engine's answer to the probe has no trustworthy statistics ({error!s:.200}).") from None
