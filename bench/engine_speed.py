"""Is the engine itself slow? Plain decoding through SGLang on this machine, against plain transformers.

Both generate the same number of tokens from the same prompts at batch 1, greedily, with as many threads, in turns, so
that a busy machine slows both. Without a drafter: this is the ground on which every drafter's speed-up stands.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson

from drafter.arguments import whole
from drafter.data.prompts import Prompt, load_prompts
from drafter.report import command, machine
from server.config import Profile, load_profile
from server.engine import Engine, EngineError

DEFAULT_PROFILE = Path(__file__).resolve().parent.parent / "deploy" / "profiles" / "cpu-smollm2.toml"
REQUEST_TIMEOUT_S = 600.0
WARM_UP_TOKENS = 8

TEXT = """\
examples:
  python -m bench.engine_speed --runs 3
  python -m bench.engine_speed --tokens 256 --json >speed.json

each run takes another prompt of MT-Bench, so that no answer profits from a cached prompt
ratio_vs_transformers: the median over the runs of (tokens/s of the engine) / (tokens/s of transformers)
exit codes: 0 fine, 1 the engine failed, 2 usage, 130 interrupted
"""


class SpeedError(ValueError):
    """A comparison that cannot be made as asked; nothing was started."""


class Transformers:
    """The model in this process, generating by transformers' own loop with its cache. tokens [T] ids -> new ids."""

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        os.environ.update(thread_settings(threads))  # OpenMP reads it when torch is imported
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._torch = torch
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        # The end token is ignored by both, so that both generate as many tokens.
        self._settings = transformers.GenerationConfig(do_sample=False, use_cache=True, pad_token_id=0)

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids, by the model's chat template."""
        messages = [dict(message) for message in prompt.messages]
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """Continue `tokens` greedily by `count` tokens."""
        prompt = self._torch.tensor([list(tokens)])
        with self._torch.inference_mode():
            found = self._model.generate(
                prompt,
                attention_mask=self._torch.ones_like(prompt),
                generation_config=self._settings,
                max_new_tokens=count,
            )
        new: list[int] = found[0, len(tokens) :].tolist()
        return new


def ask(engine: Engine, client: httpx.Client, tokens: Sequence[int], count: int) -> list[int]:
    """The same through the engine. Raises EngineError where it does not answer."""
    body = {
        "input_ids": list(tokens),
        "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
    }
    try:
        answer = client.post(f"{engine.url}/generate", json=body, headers=engine.headers)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise EngineError(
            f"the engine did not answer ({type(error).__name__}: {error}): see {engine.log_file}"
        ) from None
    new: list[int] = answer.json()["output_ids"]
    return new


def compare(profile: Profile, prompts: Sequence[Prompt], count: int, threads: int) -> dict[str, Any]:
    """Run the comparison, one run a prompt (the first prompt only warms up), and return the figures.

    The engine goes first in every second run. Raises EngineError.
    """
    plain = Transformers(profile.model_path, profile.engine.dtype, threads)
    runs: list[dict[str, Any]] = []
    with Engine(profile, drafter="none") as engine, httpx.Client(timeout=REQUEST_TIMEOUT_S) as client:
        sides = {
            "transformers": lambda tokens, count: plain.generate(tokens, count),
            "engine": lambda tokens, count: ask(engine, client, tokens, count),
        }
        for number, prompt in enumerate(prompts):
            tokens = plain.encode(prompt)
            wanted = count if number else WARM_UP_TOKENS
            run: dict[str, Any] = {"prompt": prompt.id, "prompt_tokens": len(tokens), "tokens": wanted}
            answers = {}
            for name in list(sides)[:: -1 if number % 2 else 1]:
                start = time.perf_counter()
                answers[name] = sides[name](tokens, wanted)
                run[f"{name}_tokens_per_second"] = wanted / (time.perf_counter() - start)
                if len(answers[name]) != wanted:
                    raise EngineError(f"{name} generated {len(answers[name])} tokens, asked for {wanted}")
            run["ratio"] = run["engine_tokens_per_second"] / run["transformers_tokens_per_second"]
            run["same_tokens"] = same_tokens(answers["engine"], answers["transformers"])
            if number:
                runs.append(run)
                print(f"engine_speed: {describe(run)}", file=sys.stderr)
    return figures(runs)


def same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two answers share (in bfloat16 they may part where two tokens are about as likely)."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def describe(run: dict[str, Any]) -> str:
    """One run in words."""
    return (
        f"{run['prompt']}: engine {run['engine_tokens_per_second']:.1f} tok/s, "
        f"transformers {run['transformers_tokens_per_second']:.1f} tok/s, ratio {run['ratio']:.2f}"
    )


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The medians over the runs."""
    median = {
        key: statistics.median(run[key] for run in runs)
        for key in ("ratio", "engine_tokens_per_second", "transformers_tokens_per_second")
    }
    return {
        "ratio_vs_transformers": round(median["ratio"], 3),
        "tokens_per_second": round(median["engine_tokens_per_second"], 2),
        "transformers_tokens_per_second": round(median["transformers_tokens_per_second"], 2),
        "runs": list(runs),
    }


def thread_settings(threads: int) -> dict[str, str]:
    """Environment for both sides. Threads that wait must sleep: on a busy machine a spinning one takes the core that
    the thread it waits for needs, which was seen to cost a factor of ten."""
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}


def with_threads(profile: Profile, threads: int, model: Path | None) -> Profile:
    """The profile with so many threads and, where given, another model folder. Raises SpeedError."""
    if profile.engine.device != "cpu":
        raise SpeedError(f"{profile.source.name} runs on {profile.engine.device}: this compares two ways on a CPU.")
    if profile.engine.dtype == "auto":
        raise SpeedError(f"{profile.source.name} leaves dtype open: name it, since transformers must use the same.")
    engine = profile.engine.model_copy(update={"env": {**profile.engine.env, **thread_settings(threads)}})
    if model is None:
        return profile.model_copy(update={"engine": engine})
    if not (model / "config.json").is_file():
        raise SpeedError(f"{model} holds no config.json: name a folder with a model in Hugging Face's format.")
    target = profile.target.model_copy(update={"path": str(model.resolve()), "package": None, "sha256": None})
    return profile.model_copy(update={"engine": engine, "target": target})


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="engine_speed", description=__doc__, epilog=TEXT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = top.add_argument
    add("--profile", type=Path, default=DEFAULT_PROFILE, metavar="FILE", help="deployment (default: cpu-smollm2.toml)")
    add("--model", type=Path, metavar="DIR", help="another model than the profile's")
    add("--runs", type=whole(), default=7, metavar="N", help="runs, each of both (default: 7)")
    add("--tokens", type=whole(), default=96, metavar="N", help="tokens to generate in each (default: 96)")
    add("--threads", type=whole(), default=os.cpu_count() or 1, metavar="N", help="for both (default: all cores)")
    add("--json", action="store_true", help="print the figures as one JSON object on stdout, and nothing else there")
    return top


def main(argv: list[str] | None = None) -> int:
    """Compare, and return the exit code."""
    args = parser().parse_args(argv)
    try:
        profile = with_threads(load_profile(args.profile), args.threads, args.model)
        prompts = load_prompts("mt_bench", args.runs + 1)
        if len(prompts) <= args.runs:
            raise SpeedError(f"--runs {args.runs}: MT-Bench has prompts for {len(prompts) - 1} runs.")
    except ValueError as error:  # every error of ours that is the user's to mend
        print(f"engine_speed: {error}", file=sys.stderr)
        return 2
    try:
        found = compare(profile, prompts, args.tokens, args.threads)
    except KeyboardInterrupt:
        print("engine_speed: interrupted; the engine was stopped.", file=sys.stderr)
        return 130
    except EngineError as error:
        print(f"engine_speed: {error}", file=sys.stderr)
        return 1
    found |= {"threads": args.threads, "dtype": profile.engine.dtype, "machine": machine(), "command": command()}
    if args.json:
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        print(
            f"{found['tokens_per_second']:.1f} tok/s, {found['ratio_vs_transformers']:.2f} times transformers' "
            f"{found['transformers_tokens_per_second']:.1f} (medians of {len(found['runs'])} runs, "
            f"{args.threads} threads, {profile.engine.dtype}, batch 1)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
