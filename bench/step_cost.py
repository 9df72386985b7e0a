"""What a decode step and a speculative cycle cost on this machine, by batch size and number of draft steps.

Every cycle is told to accept nothing (SGLANG_SIMULATE_ACC_LEN=1.0), so a cycle gives one token whatever the drafter
says, and its time needs no good drafter. `python -m drafter speedup --costs FILE` makes speed-ups of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy
import orjson
from tqdm import tqdm

from drafter.arguments import whole
from drafter.costs import to_document, write_costs
from drafter.report import command, machine, now
from drafter.speedup import Costs
from server.config import Profile, load_profile
from server.drafters import LaunchError
from server.engine import Engine, EngineError

DEFAULT_PROFILE = Path(__file__).resolve().parent.parent / "deploy" / "profiles" / "cpu-smollm2.toml"
REQUEST_TIMEOUT_S = 1200.0
PROMPT_TOKENS = 64
SHORT = 8  # tokens of the shorter of two answers; what they have in common, prefill above all, drops out
LOUD_DRIFT = 0.1  # plain decoding at the end against the beginning
TOKEN_IDS = (100, 356)  # any ordinary ones will do: what is generated is thrown away

TEXT = """\
examples:
  python -m bench.step_cost --drafter runs/my-drafter --batch 1,2,4,8 --steps 1,2,3,5 --out costs.json
  python -m drafter speedup --costs costs.json --acceptance 0.70,0.49,0.33

A time is (a long answer less a short one) / (cycles between them), the median over --rounds, each with prompts of its
own. One engine runs at a time: none, one for each number of draft steps, and none again; a decode step is the mean of
both, and `drift` says how far the machine had moved meanwhile.
exit codes: 0 fine, 1 an engine failed, 2 usage, 130 interrupted (nothing is written)
"""


class CostError(ValueError):
    """Costs that cannot be measured as asked; nothing was started."""


Ask = Callable[[Engine, Sequence[Sequence[int]], int], tuple[float, list[int]]]


def ask(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> tuple[float, list[int]]:
    """Continue all prompts together by `count` tokens: seconds, and each answer's cycles (its tokens after the first
    where it did not speculate). Raises EngineError."""
    body = {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
    }
    began = time.perf_counter()
    try:
        answer = httpx.post(
            f"{engine.url}/generate", json=body, headers=engine.headers, timeout=REQUEST_TIMEOUT_S
        ).raise_for_status()
    except httpx.HTTPError as error:
        raise EngineError(
            f"the engine did not answer ({type(error).__name__}: {error}): see {engine.log_file}"
        ) from None
    seconds = time.perf_counter() - began
    cycles = []
    for each in answer.json():
        meta = each["meta_info"]
        if meta["completion_tokens"] != count:
            raise EngineError(f"the engine gave {meta['completion_tokens']} tokens, asked for {count}.")
        cycles.append(meta.get("spec_verify_ct", count - 1))
    return seconds, cycles


def cycle_ms(engine: Engine, batch: int, tokens: int, rounds: int, asking: Ask = ask) -> float:
    """Milliseconds of a cycle at a batch size: the median over the rounds. Raises EngineError."""
    times = []
    for place in range(rounds + 1):  # the first round warms up
        short, few = asking(engine, _prompts(2 * place, batch), SHORT)
        long, many = asking(engine, _prompts(2 * place + 1, batch), SHORT + tokens)
        cycles = statistics.mean(many) - statistics.mean(few)
        if abs(cycles - tokens) > 0.5:
            raise EngineError(
                f"{tokens} more tokens took {cycles:g} more cycles, expected one a token: the engine does not heed "
                "SGLANG_SIMULATE_ACC_LEN."
            )
        if place:
            times.append(1e3 * (long - short) / cycles)
    return statistics.median(times)


def _prompts(seed: int, batch: int) -> list[list[int]]:
    """Prompts that no earlier one is a prefix of, so that no prefill is spared by a cache."""
    ids = numpy.random.default_rng(seed).integers(*TOKEN_IDS, (batch, PROMPT_TOKENS))
    prompts: list[list[int]] = ids.tolist()
    return prompts


def measure(
    profile: Profile,
    drafter: str,
    batches: Sequence[int],
    steps: Sequence[int],
    tokens: int,
    rounds: int,
    say: Callable[[str], None],
) -> tuple[Costs, float]:
    """All costs, and the drift: how far the second measurement of plain decoding lay from the first, at most.

    Raises EngineError.
    """
    plain: list[dict[int, float]] = []
    cycles: dict[int, dict[int, float]] = {batch: {} for batch in batches}
    for number in (0, *steps, 0):
        name = f"{number} draft steps" if number else "no speculation"
        say(f"{name}: starting the engine")
        engine = Engine(
            profile,
            drafter=drafter if number else "none",
            num_steps=number or None,
            simulate_accept_len=1.0 if number else None,
        )
        with engine:
            found = {}
            for batch in batches:
                say(f"{name}: {batch} at a time")
                found[batch] = cycle_ms(engine, batch, tokens, rounds)
        if number:
            for batch, time_ms in found.items():
                cycles[batch][number] = time_ms
        else:
            plain.append(found)
    decode = {batch: statistics.mean(each[batch] for each in plain) for batch in batches}
    drift = max(abs(plain[1][batch] / plain[0][batch] - 1) for batch in batches)
    return Costs(decode, cycles, f"measured: {profile.target.served_name}, {drafter}, acceptance simulated"), drift


def check(profile: Profile, drafter: str, batches: Sequence[int], steps: Sequence[int], tokens: int) -> None:
    """Raise CostError, LaunchError or DrafterError for what cannot be measured, before anything starts."""
    if max(batches) > profile.engine.max_running_requests:
        raise CostError(
            f"--batch {max(batches)}: the profile runs {profile.engine.max_running_requests} requests at a time "
            "(engine.max_running_requests); raise it, or measure smaller ones."
        )
    longest = PROMPT_TOKENS + SHORT + tokens + max(steps)
    if longest > profile.engine.context_length:
        raise CostError(
            f"an answer needs {longest} tokens, the profile's context_length is {profile.engine.context_length}: "
            "lower --tokens."
        )
    algorithm = Engine(profile, drafter=drafter, num_steps=max(steps)).drafter.algorithm
    if algorithm != "EAGLE3":
        raise CostError(f"{drafter!r} is {algorithm}, which has no number of draft steps: name an EAGLE3 drafter.")


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="step_cost", description=__doc__, epilog=TEXT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = top.add_argument
    add("--profile", type=Path, default=DEFAULT_PROFILE, metavar="FILE", help="deployment (default: cpu-smollm2.toml)")
    add("--drafter", required=True, metavar="NAME|DIR", help="an EAGLE3 drafter; how good it is does not matter")
    add("--batch", type=_counts, default=[1, 2, 4, 8], metavar="N,N", help="requests at a time (default: 1,2,4,8)")
    add("--steps", type=_counts, default=[1, 2, 3, 5], metavar="K,K", help="draft steps (default: 1,2,3,5)")
    add("--tokens", type=whole(), default=48, metavar="N", help="tokens that a time is taken over (default: 48)")
    add("--rounds", type=whole(), default=5, metavar="N", help="rounds that the median is taken of (default: 5)")
    add("--out", type=Path, metavar="FILE", help="where the costs go, for `python -m drafter speedup --costs`")
    add("--json", action="store_true", help="print the costs as one JSON object on stdout, and nothing else there")
    return top


def main(argv: list[str] | None = None) -> int:
    """Measure, write, and return the exit code."""
    args = parser().parse_args(argv)
    try:
        profile = load_profile(args.profile)
        check(profile, args.drafter, args.batch, args.steps, args.tokens)
    except ValueError as error:  # every error of ours that is the user's to mend
        print(f"step_cost: {error}", file=sys.stderr)
        return 2
    bar = tqdm(total=(len(args.steps) + 2) * (len(args.batch) + 1), disable=not sys.stderr.isatty(), unit="")

    def say(what: str) -> None:
        bar.set_description_str(what)
        bar.update()
        if bar.disable:
            print(f"step_cost: {what}", file=sys.stderr)

    try:
        costs, drift = measure(profile, args.drafter, args.batch, args.steps, args.tokens, args.rounds, say)
    except KeyboardInterrupt:
        print("step_cost: interrupted; the engine was stopped and nothing was written.", file=sys.stderr)
        return 130
    except (EngineError, LaunchError) as error:
        print(f"step_cost: {error}", file=sys.stderr)
        return 1
    finally:
        bar.close()
    document = to_document(costs, simulated=True, provenance=_provenance(args, profile)) | {"drift": drift}
    if args.out:
        write_costs(document, args.out)
    if drift > LOUD_DRIFT:
        print(f"step_cost: the machine was not quiet, times moved by {drift:.0%}: measure again.", file=sys.stderr)
    if args.json:
        print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        _print(costs, drift)
    return 0


def _provenance(args: argparse.Namespace, profile: Profile) -> dict[str, Any]:
    return {
        "created": now(),
        "target": profile.target.model_dump(exclude_none=True),
        "drafter": args.drafter,
        "profile_sha256": profile.sha256,
        "tokens": args.tokens,
        "runs": args.rounds,
        "machine": machine(),
        "command": command(),
    }


def _print(costs: Costs, drift: float) -> None:
    for batch in costs.batches:
        row = ", ".join(
            f"k={steps} {time_ms:.2f} ms (x{costs.ratio(batch, steps):.2f})"
            for steps, time_ms in sorted(costs.step_ms[batch].items())
        )
        print(f"{batch} at a time: a decode step {costs.decode_ms[batch]:.2f} ms; a cycle of {row}")
    print(f"plain decoding moved by at most {drift:.1%} between the first and the last engine")


def _counts(text: str) -> list[int]:
    return sorted({whole()(part) for part in text.split(",")})


if __name__ == "__main__":
    sys.exit(main())
