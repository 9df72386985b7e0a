"""Our tok/s and TTFT beside SGLang's own benchmark and AIPerf: the same engine and prompts, in turns.

    python -m server engine --drafter none -- python -m bench.peers --url {url} --key-file {key_file}

Both peers live in environments of their own: `make speculators-env aiperf-env`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.attached import Attached
from bench.load import Endpoint, LoadError, flush
from drafter.arguments import whole
from drafter.data.prompts import PromptError, load_prompts
from drafter.report import command, machine
from server.engine import EngineError

ROOT = Path(__file__).resolve().parents[1]
SERVING, AIPERF = ROOT / ".cache/speculators/bin/python", ROOT / ".cache/aiperf/bin/aiperf"
TOKENS_APART, TTFT_APART = 0.05, 0.10  # what the three may differ by, relatively
TEXT = """\
Each round asks every prompt by each of the three, greedily and streaming, the engine's cache emptied before.
ratios: the median over the rounds of ours / theirs, each pair of one round.
exit codes: 0 within 5 % in tok/s and 10 % in median TTFT of both, 1 not, or a tool failed, 2 usage, 130 interrupted
"""


class PeerError(RuntimeError):
    """A tool that is missing or that failed: which one, and what to do."""


@dataclass(frozen=True)
class Load:
    """What each tool is to do. file: the prompts, as JSON lines of OpenAI messages."""

    url: str
    api_key: str
    model: str
    tokenizer: Path
    file: Path
    count: int
    max_tokens: int
    concurrency: int
    key_file: Path | None


@dataclass(frozen=True)
class Figure:
    """tokens_per_second: of all requests together; ttft_ms: the median."""

    tokens_per_second: float
    ttft_ms: float


def ours(load: Load, out: Path) -> Figure:
    """bench/accept_len.py."""
    argv = [sys.executable, "-m", "bench.accept_len", "--url", f"none={load.url}", "--prompts", str(load.file)]
    argv += ["--max-tokens", str(load.max_tokens), "--concurrency", str(load.concurrency), "--out", str(out)]
    _run([*argv, *(("--key-file", str(load.key_file)) if load.key_file else ())], out)
    (variant,) = json.loads((out / "report.json").read_text())["variants"]
    return Figure(variant["tokens_per_second"], variant["ttft_ms_p50"])


def serving(load: Load, out: Path) -> Figure:
    """SGLang's own, `sglang.benchmark.serving`."""
    argv = [SERVING, "-m", "sglang.benchmark.serving", "--backend", "sglang-oai-chat", "--base-url", load.url]
    argv += ["--dataset-name", "openai", "--dataset-path", load.file, "--num-prompts", load.count]
    argv += ["--model", load.tokenizer, "--served-model-name", load.model, "--tokenizer", load.tokenizer]
    argv += ["--max-concurrency", load.concurrency, "--disable-ignore-eos", "--temperature", 0, "--disable-tqdm"]
    argv += ["--sharegpt-output-len", load.max_tokens, "--output-file", out / "serving.jsonl"]
    _run(argv, out, {"OPENAI_API_KEY": load.api_key, "API_KEY": load.api_key})
    found = json.loads((out / "serving.jsonl").read_text().splitlines()[-1])
    if found["completed"] != load.count:
        raise PeerError(f"sglang.benchmark.serving completed {found['completed']} of {load.count} requests: see {out}.")
    return Figure(found["output_throughput"], found["median_ttft_ms"])


def aiperf(load: Load, out: Path) -> Figure:
    """NVIDIA's AIPerf."""
    argv = [AIPERF, "profile", "--model", load.model, "--tokenizer", load.tokenizer, "--url", load.url]
    argv += ["--endpoint-type", "chat", "--streaming", "--input-file", load.file]
    argv += ["--custom-dataset-type", "raw-payload", "--workers-max", 1, "--record-processors", 1]
    argv += ["--concurrency", load.concurrency, "--request-count", load.count]
    argv += ["--api-key", load.api_key]
    argv += ["--output-artifact-dir", out, "--ui", "none"]
    _run(argv, out)
    (file,) = out.rglob("profile_export_aiperf.json")
    found = json.loads(file.read_text())
    return Figure(found["output_token_throughput"]["avg"], found["time_to_first_token"]["p50"])


TOOLS: Mapping[str, Callable[[Load, Path], Figure]] = {"eyas": ours, "sglang": serving, "aiperf": aiperf}


def _run(argv: Sequence[object], out: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run a tool with its output in a log. Raises PeerError."""
    words = [str(word) for word in argv]
    log = out / "tool.log"
    try:
        with log.open("wb") as stream:
            env = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
            done = subprocess.run(words, stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
    except FileNotFoundError:
        raise PeerError(f"{words[0]} is missing: run `make speculators-env aiperf-env`.") from None
    if done.returncode:
        last = (log.read_text("utf-8", "replace").strip().splitlines() or [""])[-1]
        raise PeerError(f"{Path(words[0]).name} ended with {done.returncode}: {last:.300}")


def compare(rounds: Sequence[Mapping[str, Figure]]) -> dict[str, dict[str, float]]:
    """Ours over each peer's, the median over rounds: {peer: {tokens_per_second, ttft_ms}}."""
    return {
        peer: {
            name: statistics.median(getattr(one["eyas"], name) / getattr(one[peer], name) for one in rounds)
            for name in ("tokens_per_second", "ttft_ms")
        }
        for peer in rounds[0]
        if peer != "eyas"
    }


def agree(ratios: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether ours are as near to every peer's as they must be."""
    return all(
        abs(found["tokens_per_second"] - 1) <= TOKENS_APART and abs(found["ttft_ms"] - 1) <= TTFT_APART
        for found in ratios.values()
    )


def measure(load: Load, tools: Sequence[str], rounds: int, folder: Path, flush: Callable[[], None]) -> dict[str, Any]:
    """`rounds` of every tool in turns, each round beginning with another one. Raises PeerError."""
    found: list[dict[str, Figure]] = []
    for number in range(-1, rounds):  # the first warms everything up and does not count
        one = {}
        for name in [*tools[number % len(tools) :], *tools[: number % len(tools)]]:
            out = folder / f"{number + 1}-{name}"
            out.mkdir()
            flush()
            one[name] = TOOLS[name](load, out)
            if number >= 0:
                print(f"peers: round {number + 1}, {name}: {one[name]}", file=sys.stderr)
        if number >= 0:
            found.append(one)
    ratios = compare(found)
    return {
        "agree": agree(ratios),
        "ratios": ratios,
        "rounds": [{name: vars(figure) for name, figure in one.items()} for one in found],
        "machine": machine(),
        "command": command(),
    }


def write_prompts(sets: str, limit: int | None, max_tokens: int, model: str, file: Path) -> int:
    """The prompts as request bodies, one a line, which all three read. Returns how many. Raises PromptError."""
    prompts = load_prompts(sets, limit)
    with file.open("w", encoding="utf-8") as stream:
        for prompt in prompts:
            body = {"messages": list(prompt.messages), "max_tokens": max_tokens, "temperature": 0}
            stream.write(json.dumps({**body, "model": model, "stream": True}) + "\n")
    return len(prompts)


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="peers", description=__doc__, epilog=TEXT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = top.add_argument
    add("--url", required=True, help="an engine that runs, without a drafter")
    add("--key-file", type=Path, metavar="FILE", help="its keys, as `python -m server engine` prints them")
    add("--tokenizer", type=Path, metavar="DIR", help="the target's folder (default: what the engine says)")
    add("--prompts", default="mt_bench", metavar="SETS", help="as accept_len.py takes them (default: mt_bench)")
    add("--limit", type=whole(), default=10, metavar="N", help="so many of each set (default: 10)")
    add("--max-tokens", type=whole(), default=96, metavar="N", help="longest answer (default: 96)")
    add("--concurrency", type=whole(), default=2, metavar="N", help="requests at a time (default: 2)")
    add("--rounds", type=whole(), default=3, metavar="N", help="of all three (default: 3)")
    add("--peer", action="append", choices=[name for name in TOOLS if name != "eyas"], help="only this one")
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    return top


def main(argv: list[str] | None = None) -> int:
    """Measure and report; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        engine = Attached("none", args.url, args.key_file)
        engine.start(lambda said: None)
        if engine.drafter.algorithm != "NONE":
            raise PeerError(f"{args.url} runs {engine.drafter.algorithm}: compare on an engine without a drafter.")
        endpoint = Endpoint(engine.url, engine.served_name, False, engine.headers, engine.admin_headers)
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            file = Path(folder) / "prompts.jsonl"
            load = Load(
                url=engine.url,
                api_key=engine.headers.get("authorization", "").removeprefix("Bearer "),
                model=engine.served_name,
                tokenizer=args.tokenizer or Path(engine.resolved["model_path"]),
                file=file,
                count=write_prompts(args.prompts, args.limit, args.max_tokens, engine.served_name, file),
                max_tokens=args.max_tokens,
                concurrency=args.concurrency,
                key_file=args.key_file,
            )
            tools = ["eyas", *(args.peer or [name for name in TOOLS if name != "eyas"])]
            found = measure(load, tools, args.rounds, Path(folder), lambda: flush(endpoint))
    except (PeerError, EngineError, LoadError, PromptError, ValueError, OSError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("peers: interrupted.", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(found))
    else:
        for peer, ratios in found["ratios"].items():
            print(f"{peer}: tok/s x{ratios['tokens_per_second']:.3f}, median TTFT x{ratios['ttft_ms']:.3f}")
    return 0 if found["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
