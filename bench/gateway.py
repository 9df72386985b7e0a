"""What does the gateway cost? An engine that only speaks, reached directly, through the least relay that Python can
be, through Eyas, and through any other proxy; in turns, so that a busy machine slows all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import uvloop

from bench.raw_client import DONE, AnswerError, connect
from bench.served import KEY, ServedError, Side, Started, peer_at
from bench.synthetic import MODEL
from drafter.arguments import whole
from drafter.report import command, machine

STREAMS = 32
BODY_BYTES = 16 * 1024 * 1024
BURST_PIECES = 3
OWN = ("direct", "minimal", "eyas")

TEXT = """\
examples:
  python -m bench.gateway
  python -m bench.gateway --rounds 9 --json >gateway.json
  python -m bench.gateway --upstream-port 30000 --peer litellm=http://127.0.0.1:4000

cpu_us_per_chunk: CPU of the proxy's processes (direct: of the engine) for each piece of 32 streams at 20 ms a piece
cpu_us_per_request, added_unary_p50_ms: plain requests, one after another on one connection
added_ttft_burst_p50_ms: 32 streams that begin at once, each on a new connection
cpu_us_per_large_request: plain requests with bodies of 16 MiB
added_*: above direct, in the same round; ratios: Eyas over minimal
times are medians over the rounds; CPU is the least of them, since other work on the machine only adds to it
a peer has to pass on to the engine at --upstream-port, under the model name "synthetic"; a key that it asks for has
to be "eyas_0000beef_" and 43 times "k"
exit codes: 0 fine, 1 a side failed, 2 usage, 130 interrupted
"""


@dataclass(frozen=True)
class Amounts:
    """How much a round does with each side."""

    pieces: int = 100
    plain: int = 200
    bursts: int = 5
    large: int = 3


QUICK = Amounts(pieces=5, plain=20, bursts=1, large=1)


def body(stream: bool, pieces: int = 1, size: int = 0) -> bytes:
    """A chat request; `size` pads its text to so many bytes."""
    text = "What is an eyas?" + "x" * size
    asked = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": pieces, "stream": stream}
    return orjson.dumps(asked)


async def streams(side: Side, pieces: int) -> list[float]:
    """32 streams at once, each on its own connection; the seconds to the first event of each. Raises AnswerError."""
    connections = [await connect("127.0.0.1", side.port) for _ in range(STREAMS)]
    asked = body(True, pieces)
    answers = await asyncio.gather(*(connection.ask(asked, KEY) for connection in connections))
    for connection in connections:
        connection.transport.close()
    for answer in answers:
        if DONE not in answer.body or answer.body.count(b" eyas") != pieces:
            raise AnswerError(f"{side.name}: a stream did not come whole: {answer.body[-300:]!r}")
    return [answer.ttft_s for answer in answers]


async def plain(side: Side, count: int, size: int = 0) -> list[float]:
    """Plain requests, one after another on one connection; the seconds of each. Raises AnswerError."""
    connection = await connect("127.0.0.1", side.port)
    asked = body(False, size=size)
    seconds = [(await connection.ask(asked, KEY)).total_s for _ in range(count)]
    connection.transport.close()
    return seconds


async def one_round(side: Side, amounts: Amounts) -> dict[str, Any]:
    """All that a round measures of one side."""
    await plain(side, 5)
    found: dict[str, Any] = {}
    spent = side.cpu_s()
    await streams(side, amounts.pieces)
    found["cpu_us_per_chunk"] = _each(side, spent, STREAMS * amounts.pieces)
    spent = side.cpu_s()
    found["unary_p50_ms"] = 1e3 * statistics.median(await plain(side, amounts.plain))
    found["cpu_us_per_request"] = _each(side, spent, amounts.plain)
    bursts = [statistics.median(await streams(side, BURST_PIECES)) for _ in range(amounts.bursts)]
    found["ttft_burst_p50_ms"] = 1e3 * statistics.median(bursts)
    spent = side.cpu_s()
    found["large_p50_ms"] = 1e3 * statistics.median(await plain(side, amounts.large, BODY_BYTES))
    found["cpu_us_per_large_request"] = _each(side, spent, amounts.large)
    return found


def _each(side: Side, before: float | None, count: int) -> float | None:
    after = side.cpu_s()
    return None if before is None or after is None else 1e6 * (after - before) / count


def figures(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The figures over all rounds. CPU: the least, since other work on the machine only ever adds to it (caches).

    Times: medians; what is added to direct, and its ratios, are taken within each round first.
    """
    for each in rounds:
        for measured in each.values():
            for what in ("unary", "ttft_burst", "large"):
                measured[f"added_{what}_p50_ms"] = measured[f"{what}_p50_ms"] - each["direct"][f"{what}_p50_ms"]
    found: dict[str, Any] = {}
    for name, first in rounds[0].items():
        values = {key: [each[name][key] for each in rounds] for key in first}
        found[name] = {key: _least(held) if key.startswith("cpu") else _median(held) for key, held in values.items()}
    for ratio, key in (
        ("chunk_ratio_vs_minimal", "cpu_us_per_chunk"),
        ("request_ratio_vs_minimal", "cpu_us_per_request"),
        ("large_request_ratio_vs_minimal", "cpu_us_per_large_request"),
    ):
        found[ratio] = round(found["eyas"][key] / found["minimal"][key], 4)
    for ratio, key in (
        ("added_unary_ratio_vs_minimal", "added_unary_p50_ms"),
        ("added_ttft_ratio_vs_minimal", "added_ttft_burst_p50_ms"),
    ):
        pairs = [(each["eyas"][key], each["minimal"][key]) for each in rounds]
        found[ratio] = _median([ours / theirs for ours, theirs in pairs if theirs > 0])
    return found


def _least(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(min(known), 4) if known else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None


def measure(peers: dict[str, int], upstream_port: int, rounds: int, amounts: Amounts) -> list[dict[str, Any]]:
    """Start the sides, and measure each in every round, in a turning order. Raises ServedError and AnswerError."""
    with contextlib.ExitStack() as stack:

        def start(name: str, *more: Any) -> Started:
            side = Started(name, *more)
            stack.callback(side.stop)
            return side

        engine = start("upstream", "", upstream_port)
        sides: list[Side] = [
            Side("direct", engine.port, engine.pids),
            start("minimal", engine.url),
            start("eyas", engine.url),
        ]
        sides += [peer_at(name, port) for name, port in peers.items()]
        found: list[dict[str, Any]] = []
        for number in range(rounds):
            turned = sides[number % len(sides) :] + sides[: number % len(sides)]
            measured = {side.name: uvloop.run(one_round(side, amounts)) for side in turned}
            found.append({side.name: measured[side.name] for side in sides})
            print(f"gateway: round {number + 1} of {rounds}: {describe(found[-1])}", file=sys.stderr)
        return found


def describe(measured: dict[str, dict[str, Any]]) -> str:
    """One round in words."""
    return "; ".join(
        f"{name} {_text(each['cpu_us_per_chunk'])} us a chunk, {_text(each['cpu_us_per_request'])} us a request, "
        f"{each['unary_p50_ms']:.2f} ms plain, {each['ttft_burst_p50_ms']:.1f} ms in the burst"
        for name, each in measured.items()
    )


def _text(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"


def table(found: dict[str, Any], names: Sequence[str]) -> str:
    """The figures for people."""
    keys = {
        "cpu_us_per_chunk": "us/chunk",
        "cpu_us_per_request": "us/request",
        "cpu_us_per_large_request": "us/16 MiB",
        "unary_p50_ms": "plain ms",
        "added_unary_p50_ms": "added",
        "ttft_burst_p50_ms": "burst ms",
        "added_ttft_burst_p50_ms": "added",
    }
    lines = [f"{'':12}" + "".join(f"{title:>12}" for title in keys.values())]
    for name in names:
        values = [found[name][key] for key in keys]
        lines.append(f"{name:12}" + "".join(f"{_cell(value):>12}" for value in values))
    ratios = {key.removesuffix("_vs_minimal"): value for key, value in found.items() if key.endswith("_vs_minimal")}
    return "\n".join(
        [*lines, "eyas over minimal: " + ", ".join(f"{key} {_cell(value)}" for key, value in ratios.items())]
    )


def _cell(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"


def peer(text: str) -> tuple[str, int]:
    """NAME=URL of a proxy on this machine -> its name and port."""
    name, _, url = text.partition("=")
    port = url.rstrip("/").rpartition(":")[2]
    if not name or name in OWN or not url.startswith("http://127.0.0.1:") or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://127.0.0.1:PORT, with a name not in {OWN}")
    return name, int(port)


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="gateway", description=__doc__, epilog=TEXT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = top.add_argument
    add("--rounds", type=whole(), default=5, metavar="N", help="rounds of all sides (default: 5)")
    add("--peer", type=peer, action="append", default=[], metavar="NAME=URL", help="another proxy; may be repeated")
    add("--upstream-port", type=whole(), default=0, metavar="PORT", help="of the engine (default: any that is free)")
    add("--quick", action="store_true", help="very little of everything, to see that the command works")
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    return top


def main(argv: list[str] | None = None) -> int:
    """Measure, report; returns the exit code."""
    args = parser().parse_args(argv)
    if args.peer and not args.upstream_port:
        parser().error("--peer needs --upstream-port: the port of the engine that the peer passes on to")
    peers = dict(args.peer)
    try:
        rounds = measure(peers, args.upstream_port, args.rounds, QUICK if args.quick else Amounts())
    except (ServedError, AnswerError, OSError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gateway: interrupted; what was started is stopped.", file=sys.stderr)
        return 130
    found = figures(rounds) | {"quick": args.quick, "runs": rounds, "cores_used": len(os.sched_getaffinity(0))}
    found |= {"machine": machine(), "command": command()}
    if args.json:
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        print(table(found, [*OWN, *peers]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
