"""The command line of the serving rooms: serve, engine, plan, keys, check-engine, engine-keys."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

from drafter.arguments import whole
from drafter.settings import read_settings
from server import check_engine, keys_cli
from server.alone import run_engine
from server.config import load_profile
from server.drafters import check_drafter, resolve_drafter
from server.engine import Engine, EngineError
from server.enginekeys import read_keys, write_new_keys
from server.launch import Node
from server.pin import pin
from server.plan import make_plan, render_plan
from server.serve import Asked, serve

EXAMPLES = """examples:
  python -m server serve --profile deploy/profiles/cpu-smollm2.toml
  python -m server serve --profile deploy/profiles/cpu-smollm2.toml --drafter none --port 8080
  python -m server engine --profile deploy/profiles/cpu-smollm2.toml --drafter ngram
  python -m server engine --profile deploy/profiles/cpu-smollm2.toml --capture /tmp/capture
  python -m server engine --profile deploy/profiles/cpu-smollm2.toml --drafter none -- \\
      python -m drafter generate --url {url} --key-file {key_file} …
  python -m server plan --profile deploy/profiles/kimi-k2.5-nvfp4-8xb200.toml
  python -m server check-engine
  python -m server plan --profile deploy/profiles/kimi-k2.5-8xh200.toml --pin k2-direct=DOWNLOADED
  python -m server plan --profile deploy/profiles/kimi-k2.5-8xh200.toml --context 32768 --requests 8

serve speaks plain HTTP: terminate TLS in front of it (a load balancer, nginx, Envoy), or name tls_certificate and
tls_key in [gateway]. Metrics and administration have none: they listen on loopback unless the profile says otherwise.
SIGHUP reads keys, limits and weights anew; SIGTERM lets running requests end first.

exit codes: 0 fine, 1 failure, 2 usage, 130 interrupted. Errors go to stderr, one sentence and the fix.
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    top = argparse.ArgumentParser(
        prog="python -m server",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("serve", "a gateway with an OpenAI-compatible API, and the engine under it"),
        ("engine", "one engine without a gateway: what the bench and the trainer use"),
        ("plan", "what a profile would start: argv, environment, memory, break-even, warnings. Starts nothing, no GPU"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "--profile", type=Path, required=True, metavar="FILE", help="a TOML profile (deploy/profiles/)"
        )
        command.add_argument(
            "--drafter",
            metavar="NAME|DIR|none|ngram",
            help="none, ngram, a name of the profile's [drafters], or a folder (default: what the profile names)",
        )
        command.add_argument(
            "--force",
            action="append",
            default=[],
            metavar="CHECK",
            help="pass over what one check of the preflight or the probe finds, by its name; repeatable",
        )
        command.add_argument(
            "--dist-init-addr",
            metavar="HOST:PORT",
            help="with nodes above 1: an address of the first node that the others reach",
        )
        if name != "serve":
            command.add_argument(
                "--node-rank", type=int, default=0, metavar="N", help="with nodes above 1: which this is (default: 0)"
            )
        if name == "serve":
            command.add_argument("--host", help="address to listen on (default: the profile's, 127.0.0.1)")
            command.add_argument(
                "--port",
                type=_port,
                metavar="N",
                help="port to listen on (default: the profile's, 8000); metrics and administration are on the next one",
            )
            command.add_argument("--engine-url", metavar="URL", help="serve the engine that runs there, and start none")
            command.add_argument(
                "--engine-keys", type=Path, metavar="FILE", help="JSON with that engine's api-key and admin-api-key"
            )
        if name == "engine":
            command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
            command.add_argument(
                "--keys", type=Path, metavar="FILE", help="a file of `engine-keys` (default: new keys at each start)"
            )
            command.add_argument("--port", type=_port, metavar="N", help="port for the engine (default: a free one)")
            command.add_argument(
                "--capture",
                type=Path,
                metavar="DIR",
                help="load no drafter, and write into DIR what one would be fed, for `python -m drafter capture --dir "
                "DIR`; the layers are the profile's [capture]",
            )
            command.add_argument(
                "command_beside",
                nargs="*",
                metavar="-- COMMAND",
                help="run a command once the engine is ready, and stop the engine after it; {url} and {key_file} in "
                "its words are the engine's",
            )
        if name == "plan":
            command.add_argument("--json", action="store_true", help="one JSON object on stdout, and nothing else")
            command.add_argument(
                "--pin",
                action="append",
                default=[],
                metavar="NAME[=DIR]",
                help="write into the profile which drafter NAME is: folder, revision, sha256, layer ids; repeatable",
            )
            command.add_argument("--context", type=whole(), metavar="N", help="tokens of a request to plan for")
            command.add_argument("--requests", type=whole(), metavar="N", help="requests at a time to plan for")
    text = "who may use a gateway: make, list and revoke API keys"
    keys_cli.add_arguments(commands.add_parser("keys", help=text, description=text))
    text = "whether the installed SGLang still has all that Eyas hooks, patches, asks and reads: before an upgrade"
    check_engine.add_arguments(commands.add_parser("check-engine", help=text, description=text))
    text = "make a key file for an engine and its gateways"
    command = commands.add_parser("engine-keys", help=text, description=text)
    command.add_argument("file", type=Path, metavar="FILE")
    return top


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, expected 1 to 65535")
    return int(text)


def _plan(arguments: argparse.Namespace) -> int:
    profile = load_profile(arguments.profile)
    for asked in arguments.pin:
        print(f"eyas: {pin(profile, asked, arguments.force)}", file=sys.stderr)
        profile = load_profile(arguments.profile)
    drafter = resolve_drafter(profile, arguments.drafter, here=False)
    plan = make_plan(
        profile,
        drafter,
        check_drafter(profile, drafter, arguments.force),
        arguments.force,
        node=Node(arguments.node_rank, arguments.dist_init_addr),
        context=arguments.context,
        requests=arguments.requests,
    )
    print(json.dumps(plan, indent=1) if arguments.json else render_plan(plan))
    return 0


def main(argv: list[str] | None = None) -> int:
    commands = parser()
    arguments = commands.parse_args(argv)
    if arguments.command == "engine" and arguments.capture and arguments.drafter:
        commands.error("--capture loads no drafter: leave --drafter out")
    try:
        if arguments.command == "keys":
            return keys_cli.run(arguments)
        if arguments.command == "check-engine":
            return check_engine.run(arguments.sglang, as_json=arguments.json)
        if arguments.command == "engine-keys":
            write_new_keys(arguments.file)
            return 0
        if arguments.command == "plan":
            return _plan(arguments)
        if arguments.command == "engine":
            profile = load_profile(arguments.profile)
            engine = Engine(
                profile,
                "none" if arguments.capture else arguments.drafter,
                port=arguments.port,
                capture_dir=arguments.capture,
                keys=read_keys(arguments.keys) if arguments.keys else None,
                host=arguments.host,
                node=Node(arguments.node_rank, arguments.dist_init_addr),
                force=arguments.force,
            )
            return run_engine(engine, arguments.command_beside)
        read_settings()  # a variable that cannot be meant is told before anything starts
        version = importlib.metadata.version("eyas")
        profile = load_profile(arguments.profile)
        asked = Asked(
            drafter=arguments.drafter,
            host=arguments.host,
            port=arguments.port,
            engine_url=arguments.engine_url,
            engine_keys=arguments.engine_keys,
            force=arguments.force,
            node=Node(first=arguments.dist_init_addr),
        )
        return serve(profile, asked, version)
    except (ValueError, EngineError) as error:  # every error of ours that is the user's to mend, or the engine's
        print(f"eyas: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("eyas: interrupted.", file=sys.stderr)
        return 130
